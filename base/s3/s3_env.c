/*
 * Settings of an s3:// store.
 *
 * 1. The URL gives bucket and prefix.
 * 2. The environment gives the endpoint: BUCKET_STORAGE_HOST first, then AWS_ENDPOINT_URL_S3 or
 *    AWS_ENDPOINT_URL; AWS_REGION or AWS_DEFAULT_REGION; and says where credentials are.
 * 3. An endpoint of one's own uses path style; AWS uses virtual hosts, but path style for a bucket
 *    with dots, whose name would not match the certificate. BUCKET_STORAGE_ADDRESSING_STYLE says
 *    otherwise.
 * Failures: a bad bucket name or endpoint, half a pair of keys, a number out of its range: one line
 * saying which variables are meant.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/s3/s3.h"
#include "base/s3/source.h"
#include "base/str.h"

enum { DEFAULT_STALL_S = 30 };

static const char *env(const char *name)
{
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

static int set_bucket(struct s3 *s, const char *rest, struct mb_err *err)
{
    static const char allowed[] =
        "abcdefghijklmnopqrstuvwxyz0123456789.-_ABCDEFGHIJKLMNOPQRSTUVWXYZ";
    size_t n = strcspn(rest, "/");
    if (n < 3 || n > 63 || strspn(rest, allowed) != n)
        return mb_err_set(err, MB_EINVAL,
                          "s3://%.100s: the bucket name must be 3 to 63 of a-z 0-9 . -", rest);
    const char *prefix = rest + n;
    while (*prefix == '/')
        prefix++;
    size_t len = strlen(prefix);
    while (len > 0 && prefix[len - 1] == '/')
        len--;
    s->bucket = mb_strndup(rest, n);
    s->prefix = len ? mb_asprintf("%.*s/", (int)len, prefix) : mb_strdup("");
    return s->bucket && s->prefix ? 0 : mb_err_set(err, MB_ENOMEM, "s3: out of memory");
}

int s3_use_region(struct s3 *s, const char *region)
{
    snprintf(s->region, sizeof s->region, "%s", region);
    if (!s->is_aws)
        return 0;
    const char *domain = mb_s3_aws_domain(region);
    char *host = s->path_style ? mb_asprintf("s3.%s.%s", region, domain)
                               : mb_asprintf("%s.s3.%s.%s", s->bucket, region, domain);
    char *endpoint = host ? mb_asprintf("https://%s", host) : NULL;
    if (!endpoint) {
        mb_free(host);
        return MB_ENOMEM;
    }
    mb_free(s->host);
    mb_free(s->endpoint);
    s->host = host;
    s->endpoint = endpoint;
    return 0;
}

static int set_endpoint(struct s3 *s, const char *url, struct mb_err *err)
{
    const char *host = mb_starts_with(url, "http://")    ? url + 7
                       : mb_starts_with(url, "https://") ? url + 8
                                                         : NULL;
    size_t n = host ? strcspn(host, "/") : 0;
    if (n == 0 || host[n + strspn(host + n, "/")] != '\0' || memchr(host, '@', n))
        return mb_err_set(err, MB_EINVAL,
                          "S3 endpoint \"%.100s\" (BUCKET_STORAGE_HOST or AWS_ENDPOINT_URL): "
                          "http://HOST:PORT or https://HOST:PORT is expected",
                          memchr(url, '@', strlen(url)) ? "..." : url);
    /* HTTP clients leave the scheme's own port out of Host, so the signature must too. */
    size_t host_len = n;
    const char *own_port = host == url + 7 ? ":80" : ":443";
    size_t port_len = strlen(own_port);
    if (host_len > port_len && strncmp(host + host_len - port_len, own_port, port_len) == 0)
        host_len -= port_len;
    const char *before = s->path_style ? "" : s->bucket;
    const char *dot = s->path_style ? "" : ".";
    s->host = mb_asprintf("%s%s%.*s", before, dot, (int)host_len, host);
    s->endpoint = mb_asprintf("%.*s%s%s%.*s", (int)(host - url), url, before, dot, (int)n, host);
    return s->host && s->endpoint ? 0 : mb_err_set(err, MB_ENOMEM, "s3: out of memory");
}

/* By the words that AWS's tools use for their own setting of this name. */
static int set_style(struct s3 *s, int is_aws, struct mb_err *err)
{
    const char *style = env("BUCKET_STORAGE_ADDRESSING_STYLE");
    if (!style || strcmp(style, "auto") == 0)
        s->path_style = !is_aws || strchr(s->bucket, '.') != NULL;
    else if (strcmp(style, "path") == 0 || strcmp(style, "virtual") == 0)
        s->path_style = style[0] == 'p';
    else
        return mb_err_set(err, MB_EINVAL,
                          "BUCKET_STORAGE_ADDRESSING_STYLE \"%.40s\": auto, path or virtual is "
                          "expected",
                          style);
    return 0;
}

static int set_number(const char *name, int64_t least, int64_t most, int64_t otherwise,
                      int64_t *out, struct mb_err *err)
{
    const char *text = env(name);

    *out = otherwise;
    if (!text || mb_parse_i64(text, least, most, name, out, err) == 0)
        return 0;
    return mb_err_set(err, MB_EINVAL, "%s \"%.40s\": a whole number from %lld to %lld is expected",
                      name, text, (long long)least, (long long)most);
}

static int set_stall(struct s3 *s, struct mb_err *err)
{
    int64_t seconds;
    int rc = set_number("BUCKET_STORAGE_STALL_SECONDS", 1, 3600, DEFAULT_STALL_S, &seconds, err);

    s->stall_ms = (uint64_t)seconds * 1000;
    return rc;
}

/* S3 takes parts of 5 MiB to 5 GiB. */
static int set_transfers(struct s3 *s, struct mb_err *err)
{
    int64_t part_mib = S3_PART_BYTES >> 20, parallel = S3_MAX_CONNECTIONS;
    int rc = set_number("BUCKET_STORAGE_PART_MIB", 5, 5120, part_mib, &part_mib, err);

    if (rc == 0)
        rc = set_number("BUCKET_STORAGE_CONCURRENCY", 1, S3_MAX_CONNECTIONS, parallel, &parallel,
                        err);
    s->part_bytes = (uint64_t)part_mib << 20;
    s->max_parallel = (unsigned)parallel;
    s->parallel = s->max_parallel < S3_FIRST_PARALLEL ? s->max_parallel : S3_FIRST_PARALLEL;
    return rc;
}

int s3_settings(struct s3 *s, const char *rest, struct mb_err *err)
{
    const char *endpoint = env("BUCKET_STORAGE_HOST");
    const char *region = env("AWS_REGION");
    if (!endpoint)
        endpoint = env("AWS_ENDPOINT_URL_S3");
    if (!endpoint)
        endpoint = env("AWS_ENDPOINT_URL");
    if (!region)
        region = env("AWS_DEFAULT_REGION");
    int rc = set_bucket(s, rest, err);
    s->is_aws = endpoint == NULL;
    if (rc == 0)
        rc = set_style(s, s->is_aws, err);
    if (rc == 0)
        rc = set_stall(s, err);
    if (rc == 0)
        rc = set_transfers(s, err);
    if (rc == 0 && endpoint)
        rc = set_endpoint(s, endpoint, err);
    if (rc == 0 && s3_use_region(s, region ? region : "us-east-1") != 0)
        rc = mb_err_set(err, MB_ENOMEM, "s3: out of memory");
    s->region_is_default = region == NULL;
    if (rc == 0) {
        s3_facts_load(s->endpoint, &s->facts);
        s->no_checksum = s->facts.sum != S3_SUM_CRC64NVME;
        rc = s3_credentials_create(s, &s->credentials, err);
    }
    return rc;
}

void s3_settings_free(struct s3 *s)
{
    mb_free(s->endpoint);
    mb_free(s->host);
    mb_free(s->bucket);
    mb_free(s->prefix);
    s3_credentials_destroy(s->credentials);
}
