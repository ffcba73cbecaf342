/*
 * Signing.
 *
 * 1. The canonical request: method, path, query, headers, their names, payload hash, one a line.
 * 2. The string to sign: algorithm, time, scope (day/region/s3/aws4_request), hash of 1.
 * 3. The key: HMAC of day, region, service and a constant, chained from the secret.
 * 4. Authorization names the key, the scope, the signed headers and the HMAC of 2.
 * Failure: memory only. The secret leaves this file in no form but the HMAC.
 */
#include "base/s3/sigv4.h"

#include <stdio.h>
#include <string.h>
#include <time.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include "base/checksum.h"
#include "base/err.h"
#include "base/secret.h"
#include "base/str.h"

enum { HASH_BYTES = 32 };

void mb_sigv4_date(uint64_t unix_ms, char out[17])
{
    time_t seconds = (time_t)(unix_ms / 1000);
    struct tm tm;
    gmtime_r(&seconds, &tm);
    strftime(out, 17, "%Y%m%dT%H%M%SZ", &tm);
}

static size_t canonical_bytes(const struct mb_sigv4_request *req)
{
    size_t n = strlen(req->method) + strlen(req->path) + strlen(req->query) +
               strlen(req->payload_hash) + 8;
    for (size_t i = 0; i < req->n_headers; i++)
        n += 2 * strlen(req->headers[i].name) + strlen(req->headers[i].value) + 3;
    return n;
}

static int canonical_request(const struct mb_sigv4_request *req, struct mb_buf *out)
{
    int rc = mb_buf_printf(out, "%s\n%s\n%s\n", req->method, req->path, req->query);
    for (size_t i = 0; rc == 0 && i < req->n_headers; i++)
        rc = mb_buf_printf(out, "%s:%s\n", req->headers[i].name, req->headers[i].value);
    for (size_t i = 0; rc == 0 && i < req->n_headers; i++)
        rc = mb_buf_printf(out, "%s%s", i ? ";" : "\n", req->headers[i].name);
    return rc != 0 ? rc : mb_buf_printf(out, "\n%s", req->payload_hash);
}

static int hmac(unsigned char key[HASH_BYTES], const char *text)
{
    unsigned n = HASH_BYTES;
    unsigned char out[EVP_MAX_MD_SIZE];
    if (!HMAC(EVP_sha256(), key, HASH_BYTES, (const unsigned char *)text, strlen(text), out, &n))
        return MB_ENOMEM;
    memcpy(key, out, HASH_BYTES);
    OPENSSL_cleanse(out, sizeof out);
    return 0;
}

static int sign(const struct mb_sigv4_request *req, const char *day, const char *text,
                char hex[2 * HASH_BYTES + 1])
{
    unsigned char key[EVP_MAX_MD_SIZE];
    char secret[256];
    unsigned n = 0;
    int len = snprintf(secret, sizeof secret, "AWS4%s", req->secret_key);
    int rc = 0;
    if (len < 0 || (size_t)len >= sizeof secret)
        rc = MB_EINVAL;
    else if (!HMAC(EVP_sha256(), secret, len, (const unsigned char *)day, strlen(day), key, &n))
        rc = MB_ENOMEM;
    OPENSSL_cleanse(secret, sizeof secret);
    const char *const steps[] = {req->region, "s3", "aws4_request", text};
    for (size_t i = 0; rc == 0 && i < sizeof steps / sizeof *steps; i++)
        rc = hmac(key, steps[i]);
    if (rc == 0)
        mb_hex(key, HASH_BYTES, hex);
    OPENSSL_cleanse(key, sizeof key);
    return rc;
}

int mb_sigv4_authorization(const struct mb_sigv4_request *req, struct mb_buf *out)
{
    struct mb_buf canonical = {0};
    struct mb_buf to_sign = {0};
    char day[9];
    char hash[65];
    char signature[2 * HASH_BYTES + 1];
    size_t start = out->len;
    snprintf(day, sizeof day, "%.8s", req->amz_date);
    int rc = mb_buf_reserve(&canonical, canonical_bytes(req)); /* one block: it is wiped below */
    if (rc == 0)
        rc = canonical_request(req, &canonical);
    if (rc == 0)
        rc = mb_sha256_hex(canonical.data, canonical.len, hash);
    if (rc == 0)
        rc = mb_buf_printf(&to_sign, "AWS4-HMAC-SHA256\n%s\n%s/%s/s3/aws4_request\n%s",
                           req->amz_date, day, req->region, hash);
    if (rc == 0)
        rc = sign(req, day, mb_buf_str(&to_sign), signature);
    if (rc == 0)
        rc = mb_buf_printf(out,
                           "AWS4-HMAC-SHA256 Credential=%s/%s/%s/s3/aws4_request,SignedHeaders=",
                           req->access_key, day, req->region);
    for (size_t i = 0; rc == 0 && i < req->n_headers; i++)
        rc = mb_buf_printf(out, "%s%s", i ? ";" : "", req->headers[i].name);
    if (rc == 0)
        rc = mb_buf_printf(out, ",Signature=%s", signature);
    if (rc != 0 && out->data) {
        out->len = start;
        out->data[start] = '\0';
    }
    mb_secret_wipe(canonical.data, canonical.cap); /* a session token among the headers */
    mb_buf_close(&canonical);
    mb_buf_close(&to_sign);
    return rc;
}
