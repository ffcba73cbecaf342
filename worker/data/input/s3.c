/*
 * A stream from s3://BUCKET/KEY through base/s3, which signs, retries and checks.
 *
 * 1. The first read asks for size and ETag.
 * 2. SLOTS parts of PART_BYTES are in flight or waiting, each bound to the ETag, so that an object
 *    that is replaced meanwhile is an error and never a mixture. read runs the loop until the part
 *    it stands in is there; a part that was read makes room for the next.
 * cancel wakes the loop; close cancels what is in flight.
 */
#include <fnmatch.h>
#include <stdio.h>
#include <string.h>
#include <uv.h>
#include "base/loop.h"
#include "base/alloc.h"
#include "base/s3/store.h"
#include "base/str.h"
#include "worker/data/input/source.h"

enum { SLOTS = 4, PART_BYTES = 2 << 20, FIRST_TIMEOUT_MS = 30000 };
#define PART_TIMEOUT_MS (24ull * 3600 * 1000)

enum slot_state { SLOT_FREE, SLOT_ASKED, SLOT_FULL };

struct s3_stream;

struct slot {
    struct s3_stream *stream;
    enum slot_state state;
    uint64_t offset;
    struct mb_buf bytes;
};

struct s3_stream {
    struct mb_stream base;
    char *key; /* of the store that is the bucket */
    uint64_t outage_ms;
    uv_loop_t loop;
    uv_async_t wake;
    struct mb_store *store;
    int has_size;
    uint64_t size_bytes;
    char etag[192];
    uint64_t asked;  /* parts before this byte were asked for */
    uint64_t offset; /* of the next byte to hand out */
    struct slot slots[SLOTS];
    struct mb_err err; /* of any request */
    atomic_int is_cancelled;
};

static void on_head(void *arg, const struct mb_store_result *r)
{
    struct s3_stream *s = arg;

    if (r->error != 0) {
        mb_err_set(&s->err, r->error, "%s", r->text);
        return;
    }
    s->has_size = 1;
    s->size_bytes = r->size_bytes;
    snprintf(s->etag, sizeof(s->etag), "%s", r->etag);
    atomic_store(&s->base.total_bytes, r->size_bytes);
}

static void on_part(void *arg, const struct mb_store_result *r)
{
    struct slot *slot = arg;
    struct s3_stream *s = slot->stream;
    uint64_t left = s->size_bytes - slot->offset;

    slot->state = SLOT_FULL;
    mb_buf_reset(&slot->bytes);
    if (s->err.code != 0)
        return;
    if (r->error != 0)
        mb_err_set(&s->err, r->error, "%s", r->text);
    else if (r->data_len != (left < PART_BYTES ? left : PART_BYTES))
        mb_err_set(&s->err, MB_EPROTO, "the server sent %zu bytes of a part of %llu", r->data_len,
                   (unsigned long long)(left < PART_BYTES ? left : PART_BYTES));
    else if (mb_buf_add(&slot->bytes, r->data, r->data_len) != 0)
        mb_err_set(&s->err, MB_ENOMEM, "out of memory");
}

/* Asks for as many parts as there are free slots. */
static void ask(struct s3_stream *s)
{
    for (size_t i = 0; i < SLOTS && s->asked < s->size_bytes && s->err.code == 0; i++) {
        struct slot *slot = &s->slots[i];
        struct mb_store_range range = {.key = s->key,
                                       .etag = s->etag,
                                       .offset = s->asked,
                                       .size_bytes = PART_BYTES,
                                       .timeout_ms = PART_TIMEOUT_MS,
                                       .outage_ms = s->outage_ms};

        if (slot->state != SLOT_FREE)
            continue;
        slot->stream = s;
        slot->offset = s->asked;
        if (mb_store_get_range(s->store, &range, on_part, slot, &s->err) != 0)
            return;
        slot->state = SLOT_ASKED;
        s->asked += PART_BYTES;
    }
}

/* The full slot that holds byte s->offset, or NULL. */
static struct slot *full_slot(struct s3_stream *s)
{
    for (size_t i = 0; i < SLOTS; i++) {
        struct slot *slot = &s->slots[i];

        if (slot->state == SLOT_FULL && slot->offset <= s->offset &&
            s->offset - slot->offset < slot->bytes.len)
            return slot;
    }
    return NULL;
}

static int run_until_size(struct s3_stream *s, struct mb_err *err)
{
    if (!s->has_size && s->err.code == 0)
        mb_store_head(s->store, s->key, FIRST_TIMEOUT_MS, on_head, s, &s->err);
    while (!s->has_size && s->err.code == 0 && !atomic_load(&s->is_cancelled))
        mb_loop_turn(&s->loop);
    if (s->err.code != 0 && err != NULL)
        *err = s->err;
    return s->err.code;
}

static ssize_t s3_read(struct mb_stream *base, void *p, size_t n, struct mb_err *err)
{
    struct s3_stream *s = (struct s3_stream *)base;
    struct slot *slot = NULL;
    int rc = run_until_size(s, err);
    size_t have;

    if (rc != 0)
        return rc;
    while (s->err.code == 0 && !atomic_load(&s->is_cancelled) && s->offset < s->size_bytes) {
        ask(s);
        slot = full_slot(s);
        if (slot != NULL)
            break;
        mb_loop_turn(&s->loop);
    }
    if (atomic_load(&s->is_cancelled))
        return mb_err_set(err, MB_ECANCELED, "cancelled");
    if (s->err.code != 0 && err != NULL)
        *err = s->err;
    if (s->err.code != 0 || slot == NULL)
        return s->err.code;
    have = slot->bytes.len - (size_t)(s->offset - slot->offset);
    if (have > n)
        have = n;
    memcpy(p, slot->bytes.data + (s->offset - slot->offset), have);
    s->offset += have;
    atomic_store(&base->done_bytes, s->offset);
    if (s->offset == slot->offset + slot->bytes.len)
        slot->state = SLOT_FREE;
    return (ssize_t)have;
}

/* Waits for what is in flight and drops it. */
static int s3_seek(struct mb_stream *base, uint64_t offset, struct mb_err *err)
{
    struct s3_stream *s = (struct s3_stream *)base;
    int rc = run_until_size(s, err);

    for (size_t i = 0; rc == 0 && i < SLOTS; i++) {
        while (s->slots[i].state == SLOT_ASKED && !atomic_load(&s->is_cancelled))
            mb_loop_turn(&s->loop);
        if (s->slots[i].state == SLOT_FULL)
            s->slots[i].state = SLOT_FREE;
    }
    if (rc == 0 && offset > s->size_bytes)
        rc = mb_err_set(err, MB_ESTATE, "shorter than when it was left");
    s->offset = s->asked = offset;
    atomic_store(&base->done_bytes, offset);
    return rc;
}

static void s3_cancel(struct mb_stream *base)
{
    struct s3_stream *s = (struct s3_stream *)base;

    atomic_store(&s->is_cancelled, 1);
    uv_async_send(&s->wake);
}

static void on_store_closed(void *arg)
{
    struct mb_store **store = arg;

    *store = NULL;
}

static void close_store(uv_loop_t *loop, struct mb_store **store)
{
    if (*store == NULL)
        return;
    mb_store_close(*store, on_store_closed, store);
    while (*store != NULL)
        mb_loop_turn(loop);
}

static void s3_close(struct mb_stream *base)
{
    struct s3_stream *s = (struct s3_stream *)base;

    close_store(&s->loop, &s->store);
    uv_close((uv_handle_t *)&s->wake, NULL);
    uv_run(&s->loop, UV_RUN_DEFAULT);
    uv_loop_close(&s->loop);
    for (size_t i = 0; i < SLOTS; i++)
        mb_buf_close(&s->slots[i].bytes);
    mb_free(s->key);
    mb_free(s);
}

static void on_wake(uv_async_t *wake)
{
    (void)wake; /* the loop returns, read looks at is_cancelled */
}

/* "s3://BUCKET" of a URL, owned by the caller, and its key. */
static int split_url(const char *url, char **bucket, const char **key, struct mb_err *err)
{
    size_t n = strcspn(url + 5, "/");

    *key = url + 5 + n + strspn(url + 5 + n, "/");
    if ((*key)[0] == '\0')
        return mb_err_set(err, MB_EINVAL, "a key is missing: s3://BUCKET/KEY");
    *bucket = mb_strndup(url, 5 + n);
    return *bucket != NULL ? 0 : mb_err_set(err, MB_ENOMEM, "out of memory");
}

int mb_stream_s3_open(const char *url, uint64_t outage_ms, struct mb_stream **out,
                      struct mb_err *err)
{
    static const struct mb_stream_ops ops = {s3_read, s3_seek, s3_cancel, s3_close};
    struct s3_stream *s = NULL;
    char *bucket = NULL;
    const char *key;
    int rc = split_url(url, &bucket, &key, err);

    if (rc != 0)
        return rc;
    s = mb_calloc(1, sizeof(*s));
    if (s == NULL || (s->key = mb_strdup(key)) == NULL || uv_loop_init(&s->loop) != 0) {
        if (s != NULL)
            mb_free(s->key);
        mb_free(s);
        mb_free(bucket);
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    s->base.ops = &ops;
    s->outage_ms = outage_ms;
    uv_async_init(&s->loop, &s->wake, on_wake);
    rc = mb_store_open(&s->loop, bucket, &s->store, err);
    mb_free(bucket);
    if (rc != 0) {
        s3_close(&s->base);
        return rc;
    }
    *out = &s->base;
    return 0;
}

/* ---- identity and globs ---- */

int mb_stream_s3_identity(const char *url, struct mb_buf *out, struct mb_err *err)
{
    struct mb_stream *base;
    struct s3_stream *s;
    int rc = mb_stream_s3_open(url, FIRST_TIMEOUT_MS, &base, err);

    if (rc != 0)
        return rc;
    s = (struct s3_stream *)base;
    rc = run_until_size(s, err);
    if (rc == 0 && s->etag[0] == '\0')
        rc = mb_err_set(err, MB_EUNSUPPORTED, "the server names no ETag");
    if (rc == 0 &&
        mb_buf_printf(out, "size=%llu etag=%s", (unsigned long long)s->size_bytes, s->etag) != 0)
        rc = mb_err_set(err, MB_ENOMEM, "out of memory");
    s3_close(base);
    return rc;
}

struct listing {
    const char *bucket; /* s3://NAME */
    const char *pattern;
    int (*add)(void *arg, const char *url, struct mb_err *err);
    void *arg;
    size_t n_found;
    int is_done;
    int rc;
    struct mb_err *err;
};

static void on_list(void *arg, const struct mb_store_result *r)
{
    struct listing *l = arg;

    l->is_done = 1;
    l->rc = r->error;
    if (r->error != 0)
        mb_err_set(l->err, r->error, "%s", r->text);
    for (size_t i = 0; l->rc == 0 && i < r->n_entries; i++) {
        char *url;

        if (fnmatch(l->pattern, r->entries[i].key, FNM_PATHNAME) != 0)
            continue;
        url = mb_asprintf("%s/%s", l->bucket, r->entries[i].key);
        l->rc = url == NULL ? mb_err_set(l->err, MB_ENOMEM, "out of memory")
                            : l->add(l->arg, url, l->err);
        l->n_found++;
        mb_free(url);
    }
}

int mb_stream_s3_glob(const char *url, int (*add)(void *arg, const char *url, struct mb_err *err),
                      void *arg, struct mb_err *err)
{
    struct listing l = {.add = add, .arg = arg, .err = err};
    struct mb_store *store = NULL;
    char *bucket = NULL;
    char *prefix = NULL;
    uv_loop_t loop;
    int rc = split_url(url, &bucket, &l.pattern, err);

    if (rc != 0)
        return rc;
    l.bucket = bucket;
    prefix = mb_strndup(l.pattern, strcspn(l.pattern, "*?["));
    if (prefix == NULL || uv_loop_init(&loop) != 0) {
        mb_free(prefix);
        mb_free(bucket);
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    rc = mb_store_open(&loop, bucket, &store, err);
    if (rc == 0)
        rc = mb_store_list(store, prefix, 2 * FIRST_TIMEOUT_MS, on_list, &l, err);
    while (rc == 0 && !l.is_done)
        mb_loop_turn(&loop);
    if (rc == 0)
        rc = l.rc;
    if (rc == 0 && l.n_found == 0)
        rc = mb_err_set(err, MB_ENOENT, "no key of the bucket matches");
    close_store(&loop, &store);
    uv_run(&loop, UV_RUN_DEFAULT);
    uv_loop_close(&loop);
    mb_free(prefix);
    mb_free(bucket);
    return rc;
}
