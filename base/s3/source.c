/*
 * 1. Keys in the environment are taken, if both halves are there.
 * 2. A role with a token file goes to STS.
 * 3. Else there are files to read; what their profile has is taken by mb_s3_source_read_files().
 * 4. A container's endpoint, if the environment names one. Plain HTTP is for addresses that cannot
 *    be anyone else's: loopback and the two of ECS and EKS.
 * 5. Else the instance's metadata service, unless that is switched off. It has nothing for a store
 * of one's own (BUCKET_STORAGE_HOST), where missing keys are a mistake to be told at once.
 * Failures: half a pair, an address that is not allowed, memory.
 */
#include "base/s3/source.h"

#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/str.h"

#define ECS_ENDPOINT "http://169.254.170.2"

struct env {
    mb_s3_env_fn get;
    void *arg;
};

static const char *env_of(const struct env *e, const char *name)
{
    const char *value = e->get(e->arg, name);
    return value && *value ? value : NULL;
}

void mb_s3_source_close(struct mb_s3_source *s)
{
    mb_s3_keys_close(&s->keys);
    mb_secret_destroy(s->token);
    mb_free(s->role_arn);
    mb_free(s->session_name);
    mb_free(s->token_file);
    mb_free(s->url);
    mb_free(s->profile);
    mb_free(s->credentials_file);
    mb_free(s->config_file);
    mb_free(s->region);
    memset(s, 0, sizeof *s);
}

const char *mb_s3_source_name(enum mb_s3_source_kind kind)
{
    static const char *const names[] = {"the environment",      "STS with a web identity",
                                        "the shared files",     "the container's endpoint",
                                        "the metadata service", "nowhere"};
    return names[kind];
}

const char *mb_s3_aws_domain(const char *region)
{
    return mb_starts_with(region, "cn-") ? "amazonaws.com.cn" : "amazonaws.com";
}

static int nomem(struct mb_s3_source *s, struct mb_err *err)
{
    mb_s3_source_close(s);
    return mb_err_set(err, MB_ENOMEM, "S3 credentials: out of memory");
}

/* ---- the environment ---- */

/* 1: taken, 0: not there. */
static int take_pair(const struct env *e, const char *access_name, const char *secret_name,
                     const char *token_name, struct mb_s3_source *out, struct mb_err *err)
{
    const char *access = env_of(e, access_name);
    const char *secret = env_of(e, secret_name);
    if (!access && !secret)
        return 0;
    if (!access || !secret)
        return mb_err_set(err, MB_EDENIED, "%s is set and %s is not: S3 credentials need both",
                          access ? access_name : secret_name, access ? secret_name : access_name);
    const char *names[] = {access_name, secret_name, token_name};
    for (size_t i = 0; i < 3; i++) { /* of a file's last line, most often */
        const char *value = names[i] ? env_of(e, names[i]) : NULL;
        if (value && !mb_s3_keys_is_plain(value))
            return mb_err_set(err, MB_EINVAL,
                              "%s holds a blank, a line break or another character that no key has",
                              names[i]);
    }
    out->kind = MB_S3_FROM_KEYS;
    if (mb_s3_keys_set(&out->keys, access, secret, token_name ? env_of(e, token_name) : NULL) != 0)
        return nomem(out, err);
    return 1;
}

/* STS of the region, unless the environment names one. */
static int set_role(const struct env *e, const char *region, const char *role,
                    const char *token_file, const char *session, struct mb_s3_source *out,
                    struct mb_err *err)
{
    const char *url = env_of(e, "AWS_ENDPOINT_URL_STS");
    if (!url)
        url = env_of(e, "AWS_ENDPOINT_URL");
    out->kind = MB_S3_FROM_ROLE;
    out->role_arn = mb_strdup(role);
    out->token_file = mb_strdup(token_file);
    out->session_name = mb_strdup(session ? session : "mobula");
    out->url =
        url ? mb_strdup(url) : mb_asprintf("https://sts.%s.%s", region, mb_s3_aws_domain(region));
    if (!out->role_arn || !out->token_file || !out->session_name || !out->url)
        return nomem(out, err);
    return 0;
}

static char *file_name(const struct env *e, const char *variable, const char *below_home)
{
    const char *path = env_of(e, variable);
    const char *home = env_of(e, "HOME");
    return path ? mb_strdup(path) : mb_asprintf("%s/%s", home ? home : "", below_home);
}

static int set_files(const struct env *e, struct mb_s3_source *out, struct mb_err *err)
{
    const char *profile = env_of(e, "AWS_PROFILE");
    if (!profile)
        profile = env_of(e, "AWS_DEFAULT_PROFILE");
    out->kind = MB_S3_FROM_FILES;
    out->is_named = profile != NULL;
    out->profile = mb_strdup(profile ? profile : "default");
    out->credentials_file = file_name(e, "AWS_SHARED_CREDENTIALS_FILE", ".aws/credentials");
    out->config_file = file_name(e, "AWS_CONFIG_FILE", ".aws/config");
    if (!out->profile || !out->credentials_file || !out->config_file)
        return nomem(out, err);
    return 0;
}

int mb_s3_source_choose(mb_s3_env_fn get, void *arg, const char *region, struct mb_s3_source *out,
                        struct mb_err *err)
{
    struct env e = {get, arg};
    memset(out, 0, sizeof *out);
    int rc =
        take_pair(&e, "BUCKET_STORAGE_ACCESS_KEY", "BUCKET_STORAGE_SECRET_KEY", NULL, out, err);
    if (rc == 0)
        rc = take_pair(&e, "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", out,
                       err);
    if (rc != 0)
        return rc < 0 ? rc : 0;
    const char *role = env_of(&e, "AWS_ROLE_ARN");
    const char *token_file = env_of(&e, "AWS_WEB_IDENTITY_TOKEN_FILE");
    if (token_file && !role)
        return mb_err_set(err, MB_EDENIED,
                          "AWS_WEB_IDENTITY_TOKEN_FILE is set and AWS_ROLE_ARN is not");
    if (token_file)
        return set_role(&e, region, role, token_file, env_of(&e, "AWS_ROLE_SESSION_NAME"), out,
                        err);
    return set_files(&e, out, err);
}

/* ---- containers and instances ---- */

static int is_host(const char *host, size_t n, const char *want)
{
    return n == strlen(want) && strncmp(host, want, n) == 0;
}

/* Container endpoints hand out keys to whoever asks: in plain text only to where no one listens. */
static int may_be_plain(const char *url)
{
    const char *host = url + strlen("http://");
    size_t n = host[0] == '[' ? strcspn(host, "]") + 1 : strcspn(host, ":/?#");
    int is_loopback = strncmp(host, "127.", 4) == 0 && strspn(host, "0123456789.") == n;
    return is_loopback || is_host(host, n, "localhost") || is_host(host, n, "[::1]") ||
           is_host(host, n, "169.254.170.2") || is_host(host, n, "169.254.170.23") ||
           is_host(host, n, "[fd00:ec2::23]");
}

static int set_container(const struct env *e, const char *url, struct mb_s3_source *out,
                         struct mb_err *err)
{
    const char *token_file = env_of(e, "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE");
    const char *token = token_file ? NULL : env_of(e, "AWS_CONTAINER_AUTHORIZATION_TOKEN");
    if (!mb_starts_with(url, "https://") && !(mb_starts_with(url, "http://") && may_be_plain(url)))
        return mb_err_set(err, MB_EINVAL,
                          "AWS_CONTAINER_CREDENTIALS_FULL_URI \"%.200s\": https:// is expected, or "
                          "http:// to a loopback or container address",
                          url);
    if (token && strpbrk(token, "\r\n"))
        return mb_err_set(err, MB_EINVAL, "AWS_CONTAINER_AUTHORIZATION_TOKEN holds a line break");
    out->kind = MB_S3_FROM_CONTAINER;
    out->url = mb_strdup(url);
    out->token_file = mb_strdup(token_file);
    out->token = mb_secret_create(token, token ? strlen(token) : 0);
    if (!out->url || (token_file && !out->token_file) || (token && !out->token))
        return nomem(out, err);
    return 0;
}

static int set_metadata(const struct env *e, struct mb_s3_source *out, struct mb_err *err)
{
    const char *off = env_of(e, "AWS_EC2_METADATA_DISABLED");
    const char *url = env_of(e, "AWS_EC2_METADATA_SERVICE_ENDPOINT");
    const char *mode = env_of(e, "AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE");
    out->kind = MB_S3_FROM_NOWHERE;
    if ((off && strcasecmp(off, "true") == 0) || env_of(e, "BUCKET_STORAGE_HOST"))
        return 0;
    if (!url)
        url = mode && strcasecmp(mode, "IPv6") == 0 ? "http://[fd00:ec2::254]"
                                                    : "http://169.254.169.254";
    size_t n = strlen(url);
    while (n > 0 && url[n - 1] == '/')
        n--;
    out->kind = MB_S3_FROM_METADATA;
    out->url = mb_strndup(url, n);
    return out->url ? 0 : nomem(out, err);
}

int mb_s3_source_after_files(mb_s3_env_fn get, void *arg, struct mb_s3_source *out,
                             struct mb_err *err)
{
    struct env e = {get, arg};
    const char *relative = env_of(&e, "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI");
    const char *full = env_of(&e, "AWS_CONTAINER_CREDENTIALS_FULL_URI");
    memset(out, 0, sizeof *out);
    if (relative) {
        char *url = mb_asprintf(ECS_ENDPOINT "%s%s", relative[0] == '/' ? "" : "/", relative);
        int rc = url ? set_container(&e, url, out, err) : nomem(out, err);
        mb_free(url);
        return rc;
    }
    return full ? set_container(&e, full, out, err) : set_metadata(&e, out, err);
}
