/*
 * CRC64NVME is known to the caller, who needs it for the manifest; the others are computed here, by
 * a second reading of the body, for the endpoints that do not take the first. A part of a multipart
 * upload gets Content-MD5 instead of CRC32C: a checksum of parts would have to be announced when
 * the upload is created, Content-MD5 is always allowed.
 */
#include "base/s3/s3_sum.h"

#include <errno.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/checksum.h"
#include "base/str.h"

enum { BLOCK_BYTES = 256 * 1024, MD5_BYTES = 16 };

static int speaks_of_sums(const char *name)
{
    return mb_starts_with(name, "x-amz-checksum-") && strcmp(name, "x-amz-checksum-mode") != 0;
}

int s3_sum_is_in(const struct s3_request *r)
{
    for (size_t i = 0; i < r->n_headers; i++) {
        if (speaks_of_sums(r->headers[i].name))
            return 1;
    }
    return r->has_crc;
}

enum s3_sum s3_sum_of_request(const struct s3_request *r, enum s3_sum sum)
{
    if (!r->has_crc || (sum != S3_SUM_CRC64NVME && strcmp(r->method, "PUT") != 0))
        return S3_SUM_NONE;
    if (sum == S3_SUM_CRC32C && r->query && strstr(r->query, "partNumber="))
        return S3_SUM_MD5;
    return sum;
}

int s3_sum_hides(const struct s3_request *r, size_t i, enum s3_sum sum)
{
    return sum != S3_SUM_CRC64NVME && speaks_of_sums(r->headers[i].name);
}

const char *s3_sum_header(enum s3_sum kind)
{
    return kind == S3_SUM_CRC64NVME ? S3_CHECKSUM_HEADER
           : kind == S3_SUM_CRC32C  ? "x-amz-checksum-crc32c"
                                    : "content-md5";
}

struct sum {
    EVP_MD_CTX *md5; /* NULL: CRC32C */
    uint32_t crc;
    int failed;
};

static void add(struct sum *s, const void *p, size_t n)
{
    if (s->md5)
        s->failed |= EVP_DigestUpdate(s->md5, p, n) != 1;
    else
        s->crc = mb_crc32c(s->crc, p, n);
}

static int add_file(struct sum *s, int fd, uint64_t offset, uint64_t n)
{
    uint8_t *block = mb_alloc(BLOCK_BYTES);
    int rc = block ? 0 : MB_ENOMEM;
    while (rc == 0 && n > 0) {
        ssize_t got = pread(fd, block, n < BLOCK_BYTES ? (size_t)n : BLOCK_BYTES, (off_t)offset);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0) {
            rc = got < 0 ? MB_EIO : MB_ESTATE;
            break;
        }
        add(s, block, (size_t)got);
        offset += (uint64_t)got;
        n -= (uint64_t)got;
    }
    mb_free(block);
    return rc;
}

int s3_sum_compute(const struct s3_request *r, enum s3_sum kind, char out[S3_SUM_TEXT_BYTES])
{
    struct sum s = {NULL, 0, 0};
    uint8_t bytes[EVP_MAX_MD_SIZE];
    int rc = 0;
    if (kind == S3_SUM_MD5) {
        s.md5 = EVP_MD_CTX_new();
        if (!s.md5 || EVP_DigestInit_ex(s.md5, EVP_md5(), NULL) != 1) {
            EVP_MD_CTX_free(s.md5);
            return MB_ENOMEM;
        }
    }
    if (r->body_fd >= 0)
        rc = add_file(&s, r->body_fd, r->body_offset, r->body_len);
    else if (r->body_len > 0)
        add(&s, r->body, r->body_len);
    if (s.md5) {
        s.failed |= EVP_DigestFinal_ex(s.md5, bytes, NULL) != 1;
        EVP_MD_CTX_free(s.md5);
    } else {
        for (int i = 0; i < 4; i++)
            bytes[i] = (uint8_t)(s.crc >> (24 - 8 * i));
    }
    if (rc == 0 && s.failed)
        rc = MB_ENOMEM;
    if (rc == 0)
        mb_base64(bytes, kind == S3_SUM_MD5 ? MD5_BYTES : 4, out);
    return rc;
}

/* 32 hexadecimal digits, in quotes or not, into bytes. */
static int parse_md5(const char *etag, uint8_t out[MD5_BYTES])
{
    size_t n = strlen(etag);
    if (n == 2 * MD5_BYTES + 2 && etag[0] == '"' && etag[n - 1] == '"')
        etag++, n -= 2;
    if (n != 2 * MD5_BYTES || strspn(etag, "0123456789abcdefABCDEF") < n)
        return 0;
    for (size_t i = 0; i < MD5_BYTES; i++) {
        char digits[3] = {etag[2 * i], etag[2 * i + 1], '\0'};
        out[i] = (uint8_t)strtoul(digits, NULL, 16);
    }
    return 1;
}

int s3_sum_is_etag(int fd, uint64_t offset, uint64_t n, const char *etag, int *out)
{
    struct s3_request r = {.body_fd = fd, .body_offset = offset, .body_len = (size_t)n};
    char want[S3_SUM_TEXT_BYTES], have[S3_SUM_TEXT_BYTES];
    uint8_t bytes[MD5_BYTES];
    int rc;
    *out = 0;
    if (!parse_md5(etag, bytes))
        return 0;
    mb_base64(bytes, MD5_BYTES, want);
    rc = s3_sum_compute(&r, S3_SUM_MD5, have);
    *out = rc == 0 && strcmp(want, have) == 0;
    return rc;
}
