/*
 * One request: token file -> headers -> HTTPS with the cluster's CA, through no proxy -> the
 * answer, or the message of the Status object that the server sends instead.
 *
 *  1. The token cannot be read: the request fails at once; the next one reads it anew.
 *  2. 401: the token was taken back before the kubelet wrote the new one; as 1.
 *  3. No answer within ASK_MS: MB_EUNAVAIL. Who asks decides when to ask again.
 */
#include "agent/kube.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "base/fs.h"
#include "base/http/client.h"
#include "base/secret.h"

enum {
    ASK_MS = 10000,
    TOKEN_MAX = 64 << 10,
    NAMESPACE_MAX = 64,
    BODY_MAX = 2 << 20, /* etcd takes 1.5 MiB for an object */
    URL_MAX = 1024
};

struct mb_kube {
    struct mb_kube_opts opts;
    struct mb_http_client *http;
    char *ca_file;
    char namespace[NAMESPACE_MAX];
    mb_kube_cb cb; /* NULL: no request is under way */
    void *arg;
    void (*stop_cb)(void *arg);
    void *stop_arg;
};

static int read_line(const struct mb_kube *k, const char *name, size_t max, struct mb_buf *out,
                     struct mb_err *err)
{
    char *path = mb_path_join(k->opts.dir, name);
    int rc =
        path != NULL ? mb_fs_read(path, max, out, err) : mb_err_set(err, MB_ENOMEM, "no memory");

    mb_free(path);
    if (rc != MB_OK)
        return rc;
    out->len = strcspn(mb_buf_str(out), "\r\n");
    if (out->len == 0)
        return mb_err_set(err, MB_EINVAL, "%s/%s is empty", k->opts.dir, name);
    out->data[out->len] = '\0';
    return MB_OK;
}

static int read_namespace(struct mb_kube *k, struct mb_err *err)
{
    struct mb_buf text = {0};
    int rc = read_line(k, "namespace", NAMESPACE_MAX - 1, &text, err);

    if (rc == MB_OK)
        snprintf(k->namespace, sizeof(k->namespace), "%s", mb_buf_str(&text));
    mb_buf_close(&text);
    return rc;
}

static void destroy(struct mb_kube *k)
{
    mb_http_client_destroy(k->http);
    mb_free(k->ca_file);
    mb_free(k);
}

int mb_kube_create(uv_loop_t *loop, const struct mb_kube_opts *opts, struct mb_kube **out,
                   struct mb_err *err)
{
    struct mb_kube *k = mb_calloc(1, sizeof(*k));
    int rc = MB_OK;

    if (k == NULL)
        return mb_err_set(err, MB_ENOMEM, "no memory for a client of the API server");
    k->opts = *opts;
    k->ca_file = mb_path_join(opts->dir, "ca.crt");
    if (k->ca_file == NULL)
        rc = mb_err_set(err, MB_ENOMEM, "no memory for a client of the API server");
    if (rc == MB_OK)
        rc = read_namespace(k, err);
    if (rc == MB_OK)
        rc = mb_http_client_create(loop, 1, &k->http, err); /* last: it has handles */
    if (rc != MB_OK)
        destroy(k);
    else
        *out = k;
    return rc;
}

const char *mb_kube_namespace(const struct mb_kube *k)
{
    return k->namespace;
}

static int code_of(long status)
{
    switch (status) {
    case 401:
    case 403:
        return MB_EDENIED;
    case 404:
    case 410:
        return MB_ENOENT;
    case 409:
        return MB_ESTATE;
    case 429:
        return MB_EUNAVAIL;
    default:
        return status >= 500 ? MB_EUNAVAIL : MB_EPROTO;
    }
}

static void on_answer(void *arg, const struct mb_http_response *r)
{
    struct mb_kube *k = arg;
    mb_kube_cb cb = k->cb;
    struct mb_err err = {0};

    k->cb = NULL;
    if (r->error != MB_OK) {
        mb_err_set(&err, r->error == MB_ECANCELED ? MB_ECANCELED : MB_EUNAVAIL, "%s", r->detail);
    } else if (r->status < 200 || r->status > 299) {
        json_t *o = json_loadb((const char *)r->body, r->body_len, 0, NULL);
        const char *message = json_string_value(json_object_get(o, "message"));

        mb_err_set(&err, code_of(r->status), "%ld: %s", r->status,
                   message != NULL ? message : "an answer without a message");
        json_decref(o);
    }
    cb(k->arg, &err, (const char *)r->body, err.code == MB_OK ? r->body_len : 0);
}

/* "Authorization: Bearer TOKEN" */
static int read_token(const struct mb_kube *k, struct mb_buf *header, struct mb_err *err)
{
    struct mb_buf token = {0};
    int rc = read_line(k, "token", TOKEN_MAX, &token, err);

    if (rc == MB_OK &&
        mb_buf_printf(header, "Authorization: Bearer %s", mb_buf_str(&token)) != MB_OK)
        rc = mb_err_set(err, MB_ENOMEM, "no memory for the token");
    if (token.data != NULL)
        mb_secret_wipe(token.data, token.cap);
    mb_buf_close(&token);
    return rc;
}

int mb_kube_ask(struct mb_kube *k, const char *method, const char *path, const char *content_type,
                const char *body, mb_kube_cb cb, void *arg, struct mb_err *err)
{
    int is_ipv6 = strchr(k->opts.host, ':') != NULL;
    struct mb_buf token = {0};
    char url[URL_MAX], type[80];
    const char *headers[] = {"Accept: application/json", NULL, NULL, NULL};
    struct mb_http_request q = {.method = method,
                                .url = url,
                                .headers = headers,
                                .body = body,
                                .body_len = body != NULL ? strlen(body) : 0,
                                .body_fd = -1,
                                .max_body_bytes = BODY_MAX,
                                .timeout_ms = ASK_MS,
                                .connect_timeout_ms = ASK_MS,
                                .ca_file = k->ca_file,
                                .is_direct = 1};
    int rc = read_token(k, &token, err);

    if (rc == MB_OK &&
        snprintf(url, sizeof(url), "https://%s%s%s:%s%s", is_ipv6 ? "[" : "", k->opts.host,
                 is_ipv6 ? "]" : "", k->opts.port, path) >= (int)sizeof(url))
        rc = mb_err_set(err, MB_EINVAL, "the path %s is too long", path);
    if (rc == MB_OK) {
        headers[1] = mb_buf_str(&token);
        snprintf(type, sizeof(type), "Content-Type: %s", content_type != NULL ? content_type : "");
        headers[2] = content_type != NULL ? type : NULL;
        k->cb = cb;
        k->arg = arg;
        rc = mb_http_fetch(k->http, &q, on_answer, k, NULL, err);
    }
    if (token.data != NULL)
        mb_secret_wipe(token.data, token.cap);
    mb_buf_close(&token);
    return rc;
}

static void on_stopped(void *arg)
{
    struct mb_kube *k = arg;
    void (*cb)(void *) = k->stop_cb;
    void *cb_arg = k->stop_arg;

    destroy(k);
    cb(cb_arg);
}

void mb_kube_stop(struct mb_kube *k, void (*cb)(void *arg), void *arg)
{
    k->stop_cb = cb;
    k->stop_arg = arg;
    mb_http_client_stop(k->http, on_stopped, k);
}
