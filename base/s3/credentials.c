/*
 * Fetching credentials.
 *
 * 1. get: keys that are fresh are given out. Aging ones too, while new ones are fetched behind
 * them; a failure of that is logged and tried again later. Expired or missing ones make the request
 *    wait.
 * 2. load: the source is chosen from the environment again, so that rotated files are seen. The
 *    pool reads files (profiles, tokens); then STS, the container's endpoint or the metadata
 *    service is asked, the latter two through no proxy.
 * 3. The end of a load wakes all who wait.
 * Failures: a source that does not answer is MB_EUNAVAIL or MB_ETIMEOUT, and asking again may help;
 * one that refuses, or no source at all, is MB_EDENIED. Texts name the source and never what it
 * said, except for its error code.
 */
#include "base/s3/credentials.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/s3/s3.h"
#include "base/s3/source.h"
#include "base/str.h"

enum {
    MAX_FILE_BYTES = 256 * 1024,
    MAX_ANSWER_BYTES = 256 * 1024,
    STS_TIMEOUT_MS = 10000,
    CONTAINER_TIMEOUT_MS = 5000,
    METADATA_TIMEOUT_MS = 1000,
    AGAIN_MS = 10000 /* pause after a refresh that failed while the old keys are good */
};

enum step { IDLE, START, FILES, TOKEN_FILE, ASK, IMDS_TOKEN, IMDS_ROLE, IMDS_KEYS };

struct s3_credentials {
    struct s3 *s3;
    enum step step;
    struct mb_s3_source source; /* of the load that runs */
    struct mb_s3_keys keys;
    enum mb_s3_source_kind came_from; /* the keys */
    int has_keys;
    int had_keys; /* this source has worked before */
    unsigned generation;
    uint64_t lifetime_ms;
    uint64_t random;     /* places the refresh */
    uint64_t not_before; /* monotonic ms; of a refresh after one that failed */
    unsigned attempts;   /* left, of the metadata service */
    struct s3_wait *waits;
    uv_work_t work;
    char *paths[2]; /* borrowed from source */
    struct mb_buf files[2];
    int has_file[2];
    struct mb_err file_err;
    struct mb_secret *imds_token;
};

static const char *env(void *arg, const char *name)
{
    (void)arg;
    return getenv(name);
}

static uint64_t seconds_of(const char *name, uint64_t otherwise, uint64_t most)
{
    const char *text = getenv(name);
    int64_t value;
    if (!text || mb_parse_i64(text, 1, (int64_t)most, name, &value, NULL) != 0)
        return otherwise;
    return (uint64_t)value;
}

static void wipe_files(struct s3_credentials *c)
{
    for (size_t i = 0; i < 2; i++) {
        mb_secret_wipe(c->files[i].data, c->files[i].cap);
        mb_buf_close(&c->files[i]);
        c->has_file[i] = 0;
    }
}

static int choose(struct s3_credentials *c, struct mb_err *err)
{
    return mb_s3_source_choose(env, NULL, c->s3->region, &c->source, err);
}

/* ---- the end of a load ---- */

static void end_load(struct s3_credentials *c, const struct mb_err *err)
{
    wipe_files(c);
    mb_secret_destroy(c->imds_token);
    c->imds_token = NULL;
    mb_s3_source_close(&c->source);
    c->step = IDLE;
    if (err->code != 0 && c->has_keys) {
        c->not_before = mb_mono_ms() + AGAIN_MS + mb_random_u64() % AGAIN_MS;
        mb_warn("s3", "credentials could not be renewed, the old ones are still good: %s",
                err->text);
    }
    struct s3_wait *waits = c->waits;
    c->waits = NULL;
    while (waits) { /* ready may wait again: that is another load's list */
        struct s3_wait *w = waits;
        waits = w->next;
        if (waits)
            waits->prev = NULL;
        w->prev = w->next = NULL;
        w->is_waiting = 0;
        w->ready(w->arg, err);
    }
}

static void fail(struct s3_credentials *c, int code, const char *text)
{
    struct mb_err err;
    mb_err_set(&err, code, "S3 credentials from %s: %s", mb_s3_source_name(c->source.kind), text);
    end_load(c, &err);
}

static void set_nowhere(struct mb_err *err)
{
    mb_err_set(err, MB_EDENIED,
               "no S3 credentials: set BUCKET_STORAGE_ACCESS_KEY and BUCKET_STORAGE_SECRET_KEY, or "
               "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; no web identity, profile, container "
               "endpoint or metadata service had any either");
}

static void fail_nowhere(struct s3_credentials *c)
{
    struct mb_err err;
    set_nowhere(&err);
    end_load(c, &err);
}

/* Moves keys in. */
static void take_keys(struct s3_credentials *c, struct mb_s3_keys *keys)
{
    uint64_t now = mb_unix_ms();
    mb_s3_keys_close(&c->keys);
    c->keys = *keys;
    memset(keys, 0, sizeof *keys);
    c->came_from = c->source.kind;
    c->has_keys = c->had_keys = 1;
    c->generation++;
    c->random = mb_random_u64();
    c->not_before = 0;
    c->lifetime_ms = c->keys.expires_unix_ms > now ? c->keys.expires_unix_ms - now : 0;
}

static void succeed(struct s3_credentials *c, struct mb_s3_keys *keys)
{
    static const struct mb_err none = {0};
    take_keys(c, keys);
    if (c->keys.expires_unix_ms != 0 && c->lifetime_ms == 0) {
        c->has_keys = 0;
        fail(c, MB_EUNAVAIL, "they have expired already");
        return;
    }
    mb_debug("s3", "credentials from %s lifetime_s=%llu", mb_s3_source_name(c->came_from),
             (unsigned long long)(c->lifetime_ms / 1000));
    end_load(c, &none);
}

/* ---- answers ---- */

static int is_transient(const struct mb_http_response *r)
{
    return r->error == MB_EUNAVAIL || r->error == MB_ETIMEOUT || r->status >= 500 ||
           r->status == 429;
}

static void fail_answer(struct s3_credentials *c, const struct mb_http_response *r,
                        const char *code)
{
    char text[400];
    int error = is_transient(r) ? MB_EUNAVAIL : r->error != 0 ? r->error : MB_EDENIED;
    if (r->error != 0)
        snprintf(text, sizeof text, "%.300s: %s", c->source.url, r->detail);
    else
        snprintf(text, sizeof text, "%.300s answered HTTP %ld%s%.60s", c->source.url, r->status,
                 code[0] ? " " : "", code);
    fail(c, error, text);
}

static int on_sts_error(void *arg, const char *parent, const char *name, const char *text)
{
    if (strcmp(parent, "Error") == 0 && strcmp(name, "Code") == 0)
        snprintf(arg, 64, "%s", text);
    return 0;
}

static void on_sts(void *arg, const struct mb_http_response *r)
{
    struct s3_credentials *c = arg;
    struct mb_s3_keys keys;
    struct mb_err err = {0};
    char code[64] = "";
    if (r->error == 0 && r->status == 200 &&
        mb_s3_keys_from_sts(r->body, r->body_len, &keys, &err) == 0) {
        succeed(c, &keys);
    } else if (err.code != 0) {
        fail(c, err.code, err.text);
    } else {
        mb_s3_xml_parse(r->body, r->body_len, on_sts_error, code, NULL);
        if (strcmp(code, "IDPCommunicationError") == 0)
            fail(c, MB_EUNAVAIL, code);
        else
            fail_answer(c, r, code);
    }
}

static void on_json(void *arg, const struct mb_http_response *r)
{
    struct s3_credentials *c = arg;
    struct mb_s3_keys keys;
    struct mb_err err = {0};
    if (r->error != 0 || r->status != 200)
        fail_answer(c, r, "");
    else if (mb_s3_keys_from_json(r->body, r->body_len, &keys, &err) == 0)
        succeed(c, &keys);
    else
        fail(c, err.code, err.text);
}

/* ---- asking ---- */

struct ask {
    const char *method;
    const char *path; /* behind source.url */
    const char *header;
    const struct mb_buf *body;
    uint64_t timeout_ms;
    int is_direct;
    mb_http_response_cb cb;
};

static void ask(struct s3_credentials *c, const struct ask *a)
{
    struct mb_err err;
    const char *headers[3] = {a->header, NULL, NULL};
    char *url = mb_asprintf("%s%s", c->source.url, a->path);
    if (!url) {
        fail(c, MB_ENOMEM, "out of memory");
        return;
    }
    if (a->body)
        headers[a->header ? 1 : 0] = "Content-Type: application/x-www-form-urlencoded";
    struct mb_http_request request = {.method = a->method,
                                      .url = url,
                                      .headers = headers,
                                      .body = a->body ? a->body->data : NULL,
                                      .body_len = a->body ? a->body->len : 0,
                                      .body_fd = -1,
                                      .max_body_bytes = MAX_ANSWER_BYTES,
                                      .timeout_ms = a->timeout_ms,
                                      .connect_timeout_ms = a->timeout_ms,
                                      .is_direct = a->is_direct,
                                      .takes_http_proxy = 1,
                                      .is_secret = 1,
                                      .is_fresh = 1};
    if (mb_http_fetch(c->s3->http, &request, a->cb, c, NULL, &err) != 0)
        fail(c, err.code, err.text);
    mb_free(url);
}

/* Wiped by the caller. NULL: out of memory. */
static char *token_header(const char *name, const char *token)
{
    return mb_asprintf("%s: %s", name, token);
}

static void free_wiped(char *text)
{
    if (text)
        mb_secret_wipe(text, strlen(text));
    mb_free(text);
}

/* The token in files[0] without white space at its ends; NULL: there is none. */
static const char *token_of_file(struct s3_credentials *c)
{
    struct mb_buf *f = &c->files[0];
    if (!c->has_file[0])
        return NULL;
    while (f->len > 0 && strchr(" \t\r\n", f->data[f->len - 1]))
        f->data[--f->len] = '\0';
    const char *text = mb_buf_str(f);
    text += strspn(text, " \t\r\n");
    return *text && strlen(text) == f->len - (size_t)(text - mb_buf_str(f)) &&
                   !strpbrk(text, " \t\r\n")
               ? text
               : NULL;
}

static void ask_sts(struct s3_credentials *c)
{
    const char *token = token_of_file(c);
    struct mb_buf body = {0};
    if (!token) {
        char text[300];
        snprintf(text, sizeof text, "%.200s holds no token", c->source.token_file);
        fail(c, MB_EDENIED, text);
        return;
    }
    int rc = mb_buf_reserve(&body, 3 * strlen(token) + 4096); /* one block: it is wiped below */
    if (rc == 0)
        rc = mb_buf_puts(&body, "Action=AssumeRoleWithWebIdentity&Version=2011-06-15&RoleArn=");
    if (rc == 0)
        rc = mb_buf_url(&body, c->source.role_arn, 0);
    if (rc == 0)
        rc = mb_buf_puts(&body, "&RoleSessionName=");
    if (rc == 0)
        rc = mb_buf_url(&body, c->source.session_name, 0);
    if (rc == 0)
        rc = mb_buf_puts(&body, "&WebIdentityToken=");
    if (rc == 0)
        rc = mb_buf_url(&body, token, 0);
    c->step = ASK;
    if (rc == 0)
        ask(c, &(struct ask){"POST", "/", NULL, &body, STS_TIMEOUT_MS, 0, on_sts});
    else
        fail(c, MB_ENOMEM, "out of memory");
    mb_secret_wipe(body.data, body.cap);
    mb_buf_close(&body);
}

static void ask_container(struct s3_credentials *c)
{
    const char *token = c->source.token_file ? token_of_file(c) : mb_secret_text(c->source.token);
    if (c->source.token_file && !token) {
        fail(c, MB_EDENIED, "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE holds no token");
        return;
    }
    char *header = token ? token_header("Authorization", token) : NULL;
    c->step = ASK;
    if (token && !header)
        fail(c, MB_ENOMEM, "out of memory");
    else
        ask(c, &(struct ask){"GET", "", header, NULL, CONTAINER_TIMEOUT_MS, 1, on_json});
    free_wiped(header);
}

/* ---- instance metadata, version 2 ---- */

static void ask_metadata(struct s3_credentials *c, enum step step, const char *path,
                         mb_http_response_cb cb)
{
    uint64_t timeout_ms =
        seconds_of("AWS_METADATA_SERVICE_TIMEOUT", METADATA_TIMEOUT_MS / 1000, 60) * 1000;
    char *header = step == IMDS_TOKEN
                       ? mb_strdup("x-aws-ec2-metadata-token-ttl-seconds: 21600")
                       : token_header("x-aws-ec2-metadata-token", mb_secret_text(c->imds_token));
    c->step = step;
    if (header)
        ask(c, &(struct ask){step == IMDS_TOKEN ? "PUT" : "GET", path, header, NULL, timeout_ms, 1,
                             cb});
    else
        fail(c, MB_ENOMEM, "out of memory");
    free_wiped(header);
}

#define IMDS_PATH "/latest/meta-data/iam/security-credentials/"

static void on_imds_role(void *arg, const struct mb_http_response *r)
{
    struct s3_credentials *c = arg;
    struct mb_buf path = {0};
    char role[256];
    if (r->error == 0 && r->status == 404) {
        fail_nowhere(c); /* an instance without a role */
        return;
    }
    if (r->error != 0 || r->status != 200) {
        fail_answer(c, r, "");
        return;
    }
    size_t n = strcspn((const char *)r->body, "\r\n");
    if (n == 0 || n >= sizeof role) {
        fail(c, MB_EPROTO, "the metadata service names no role");
        return;
    }
    snprintf(role, sizeof role, "%.*s", (int)n, (const char *)r->body);
    if (mb_buf_puts(&path, IMDS_PATH) == 0 && mb_buf_url(&path, role, 0) == 0)
        ask_metadata(c, IMDS_KEYS, mb_buf_str(&path), on_json);
    else
        fail(c, MB_ENOMEM, "out of memory");
    mb_buf_close(&path);
}

static void on_imds_token(void *arg, const struct mb_http_response *r)
{
    struct s3_credentials *c = arg;
    if (r->error == 0 && r->status == 200 && r->body_len > 0 &&
        !memchr(r->body, '\n', r->body_len)) {
        c->imds_token = mb_secret_create((const char *)r->body, r->body_len);
        if (c->imds_token)
            ask_metadata(c, IMDS_ROLE, IMDS_PATH, on_imds_role);
        else
            fail(c, MB_ENOMEM, "out of memory");
    } else if (is_transient(r) && --c->attempts > 0) {
        ask_metadata(c, IMDS_TOKEN, "/latest/api/token", on_imds_token);
    } else if (!c->had_keys && r->error != MB_ECANCELED &&
               (r->error != 0 || (r->status >= 400 && r->status < 429))) {
        fail_nowhere(c); /* nothing answers there, or it is switched off: 403 */
    } else {
        fail_answer(c, r, "");
    }
}

/* ---- files ---- */

static void go_on(struct s3_credentials *c);

static void read_files(uv_work_t *work)
{
    struct s3_credentials *c = work->data;
    for (size_t i = 0; i < 2 && c->file_err.code == 0; i++) {
        if (!c->paths[i])
            continue;
        /* Room for all of it: a buffer that grows would leave copies behind. */
        if (mb_buf_reserve(&c->files[i], MAX_FILE_BYTES) != 0)
            mb_err_set(&c->file_err, MB_ENOMEM, "out of memory");
        else if (mb_fs_read(c->paths[i], MAX_FILE_BYTES - 1, &c->files[i], &c->file_err) == 0)
            c->has_file[i] = 1;
        else if (c->file_err.code == MB_ENOENT && c->step == FILES)
            mb_err_clear(&c->file_err);
    }
}

static void after_files(struct s3_credentials *c)
{
    struct s3 *s = c->s3;
    struct mb_err err = {0};
    int rc = mb_s3_source_read_files(
        &c->source, env, NULL, s->region, c->has_file[0] ? mb_buf_str(&c->files[0]) : NULL,
        c->files[0].len, c->has_file[1] ? mb_buf_str(&c->files[1]) : NULL, c->files[1].len, &err);
    wipe_files(c);
    if (rc == 0 && c->source.region && s->region_is_default)
        rc = s3_use_region(s, c->source.region) == 0 ? 0 : MB_ENOMEM;
    if (rc == 0 && c->source.kind == MB_S3_FROM_FILES) {
        mb_s3_source_close(&c->source);
        rc = mb_s3_source_after_files(env, NULL, &c->source, &err);
    }
    if (rc != 0) {
        fail(c, rc, err.text);
    } else if (c->source.kind == MB_S3_FROM_KEYS) {
        c->source.kind = MB_S3_FROM_FILES; /* that is where they came from */
        succeed(c, &c->source.keys);
    } else {
        go_on(c);
    }
}

static void after_start(struct s3_credentials *c)
{
    struct mb_err err = {0};
    if (choose(c, &err) != 0)
        fail(c, err.code, err.text);
    else if (c->source.kind == MB_S3_FROM_KEYS)
        succeed(c, &c->source.keys);
    else
        go_on(c);
}

static void on_files(uv_work_t *work, int status)
{
    struct s3_credentials *c = work->data;
    struct s3 *s = c->s3;
    if (status != 0)
        fail(c, MB_ECANCELED, "cancelled");
    else if (c->file_err.code != 0)
        fail(c, c->file_err.code == MB_ENOENT ? MB_EDENIED : c->file_err.code, c->file_err.text);
    else if (c->step == START)
        after_start(c);
    else if (c->step == FILES)
        after_files(c);
    else if (c->source.kind == MB_S3_FROM_ROLE)
        ask_sts(c);
    else
        ask_container(c);
    s3_call_ended(s);
}

static void start_reading(struct s3_credentials *c, enum step step, char *first, char *second)
{
    c->step = step;
    c->paths[0] = first;
    c->paths[1] = second;
    c->work.data = c;
    mb_err_clear(&c->file_err);
    c->s3->n_calls++; /* the store stays until the pool is done */
    int rc = uv_queue_work(c->s3->loop, &c->work, read_files, on_files);
    assert(rc == 0); /* its only failure is a missing function */
    (void)rc;
}

/* ---- a load ---- */

static void go_on(struct s3_credentials *c)
{
    switch (c->source.kind) {
    case MB_S3_FROM_ROLE:
        start_reading(c, TOKEN_FILE, c->source.token_file, NULL);
        break;
    case MB_S3_FROM_FILES:
        start_reading(c, FILES, c->source.credentials_file, c->source.config_file);
        break;
    case MB_S3_FROM_CONTAINER:
        if (c->source.token_file)
            start_reading(c, TOKEN_FILE, c->source.token_file, NULL);
        else
            ask_container(c);
        break;
    case MB_S3_FROM_METADATA:
        c->attempts = (unsigned)seconds_of("AWS_METADATA_SERVICE_NUM_ATTEMPTS", 1, 100);
        ask_metadata(c, IMDS_TOKEN, "/latest/api/token", on_imds_token);
        break;
    case MB_S3_FROM_KEYS: /* they were taken before */
    case MB_S3_FROM_NOWHERE:
        fail_nowhere(c);
        break;
    }
}

const struct mb_s3_keys *s3_credentials_get(struct s3_credentials *c, struct s3_wait *w,
                                            unsigned *generation)
{
    enum mb_s3_keys_age age = MB_S3_KEYS_EXPIRED;
    if (c->has_keys)
        age = mb_s3_keys_age(c->keys.expires_unix_ms, c->lifetime_ms, c->random, mb_unix_ms());
    *generation = c->generation;
    if (age == MB_S3_KEYS_FRESH ||
        (age == MB_S3_KEYS_AGING && (c->step != IDLE || mb_mono_ms() < c->not_before)))
        return &c->keys;
    if (age == MB_S3_KEYS_EXPIRED) {
        c->has_keys = 0;
        w->is_waiting = 1;
        w->prev = NULL;
        w->next = c->waits;
        if (c->waits)
            c->waits->prev = w;
        c->waits = w;
    }
    if (c->step == IDLE)
        start_reading(c, START, NULL, NULL); /* nobody is woken from inside */
    return age == MB_S3_KEYS_EXPIRED ? NULL : &c->keys;
}

void s3_credentials_forget(struct s3_credentials *c, struct s3_wait *w)
{
    if (!w->is_waiting)
        return;
    if (w->prev)
        w->prev->next = w->next;
    else
        c->waits = w->next;
    if (w->next)
        w->next->prev = w->prev;
    w->is_waiting = 0;
}

int s3_credentials_reject(struct s3_credentials *c, unsigned generation)
{
    if (c->came_from == MB_S3_FROM_KEYS)
        return 0;
    if (generation == c->generation)
        c->has_keys = 0;
    return 1;
}

/* Without the shared files and without anything behind them there is nothing to wait for. */
static int look_beyond_files(struct s3_credentials *c, struct mb_err *err)
{
    struct mb_s3_source next;
    if (c->source.is_named || access(c->source.credentials_file, F_OK) == 0 ||
        access(c->source.config_file, F_OK) == 0)
        return 0;
    int rc = mb_s3_source_after_files(env, NULL, &next, err);
    if (rc == 0 && next.kind == MB_S3_FROM_NOWHERE) {
        set_nowhere(err);
        rc = err ? err->code : MB_EDENIED;
    }
    mb_s3_source_close(&next);
    return rc;
}

int s3_credentials_create(struct s3 *s, struct s3_credentials **out, struct mb_err *err)
{
    struct s3_credentials *c = mb_calloc(1, sizeof *c);
    if (!c)
        return mb_err_set(err, MB_ENOMEM, "s3: out of memory");
    c->s3 = s;
    mb_secret_shut_process();
    int rc = choose(c, err);
    if (rc == 0 && c->source.kind == MB_S3_FROM_KEYS)
        take_keys(c, &c->source.keys);
    if (rc == 0 && c->source.kind == MB_S3_FROM_FILES)
        rc = look_beyond_files(c, err);
    mb_s3_source_close(&c->source);
    if (rc != 0) {
        mb_free(c);
        return rc;
    }
    *out = c;
    return 0;
}

void s3_credentials_destroy(struct s3_credentials *c)
{
    if (!c)
        return;
    wipe_files(c);
    mb_s3_keys_close(&c->keys);
    mb_s3_source_close(&c->source);
    mb_secret_destroy(c->imds_token);
    mb_free(c);
}
