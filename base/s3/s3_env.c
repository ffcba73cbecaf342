/*
 * Settings of an s3:// store.
 *
 * 1. The URL gives bucket and prefix.
 * 2. The environment gives endpoint and keys: BUCKET_STORAGE_HOST, _ACCESS_KEY, _SECRET_KEY first,
 *    then AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
 *    AWS_SESSION_TOKEN, AWS_REGION or AWS_DEFAULT_REGION.
 * 3. An endpoint of one's own uses path style; AWS uses virtual hosts, but path style for a bucket
 *    with dots, whose name would not match the certificate.
 * Failures: a bad bucket name or endpoint, no keys: one line saying which variables are meant.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/s3/s3.h"
#include "base/str.h"

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
    char *host = s->path_style ? mb_asprintf("s3.%s.amazonaws.com", region)
                               : mb_asprintf("%s.s3.%s.amazonaws.com", s->bucket, region);
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
    s->host = mb_strndup(host, host_len);
    s->endpoint = mb_strndup(url, (size_t)(host - url) + n);
    s->path_style = 1;
    return s->host && s->endpoint ? 0 : mb_err_set(err, MB_ENOMEM, "s3: out of memory");
}

static int set_keys(struct s3 *s, struct mb_err *err)
{
    const char *access = env("BUCKET_STORAGE_ACCESS_KEY");
    const char *secret = env("BUCKET_STORAGE_SECRET_KEY");
    const char *token = NULL;
    if (!access || !secret) {
        access = env("AWS_ACCESS_KEY_ID");
        secret = env("AWS_SECRET_ACCESS_KEY");
        token = env("AWS_SESSION_TOKEN");
    }
    if (!access || !secret)
        return mb_err_set(
            err, MB_EDENIED,
            "no S3 keys: set BUCKET_STORAGE_ACCESS_KEY and BUCKET_STORAGE_SECRET_KEY, "
            "or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY");
    s->access_key = mb_strdup(access);
    s->secret_key = mb_strdup(secret);
    s->session_token = mb_strdup(token);
    return s->access_key && s->secret_key && (!token || s->session_token)
               ? 0
               : mb_err_set(err, MB_ENOMEM, "s3: out of memory");
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
    if (rc == 0)
        rc = set_keys(s, err);
    if (rc == 0 && endpoint) {
        rc = set_endpoint(s, endpoint, err);
    } else if (rc == 0) {
        s->is_aws = 1;
        s->path_style = strchr(s->bucket, '.') != NULL;
    }
    if (rc == 0 && s3_use_region(s, region ? region : "us-east-1") != 0)
        rc = mb_err_set(err, MB_ENOMEM, "s3: out of memory");
    s->parallel = S3_PARTS_IN_FLIGHT;
    return rc;
}

void s3_settings_free(struct s3 *s)
{
    mb_free(s->endpoint);
    mb_free(s->host);
    mb_free(s->bucket);
    mb_free(s->prefix);
    mb_free(s->access_key);
    mb_free(s->secret_key);
    mb_free(s->session_token);
}
