/*
 *  1. The pieces are listed: each is named by its first byte, together they are the log.
 *  2. Where to begin: at a byte; or, for the last lines, pieces are fetched from the end until the
 *     newlines in them are enough.
 *  3. One piece at a time is in memory; the next is fetched when it is used up.
 *  4. The end was read: nothing comes after it, so everything is given back at once, however long
 *     its reader stays there; another attempt's log is opened anew.
 * Failure paths:
 *  5. The store does not answer, a piece is no longer there: MB_EUNAVAIL with its words, for good.
 *  6. Pieces overlap, since a log was shortened and went on: the later one counts. A gap between
 *     two: the offset of the piece says so.
 *  7. Closed: transfers are ended, then it is freed; the head may be gone by then.
 */
#include "gcs/log_store.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/s3/store.h"
#include "base/str.h"
#include "gcs/services.h"

enum {
    READERS_MAX = 16,           /* of a head: each holds a piece until its end */
    PIECE_MAX_BYTES = 16 << 20, /* agents send 4 MiB */
    CALL_MS = 20000,
    KEY_BYTES = 320
};

struct segment {
    uint64_t begin, end;
};

struct log_store {
    struct mb_head *h;
    struct mb_store *store; /* NULL: closed at the end */
    char *prefix;
    struct log_start start;
    int may_be_empty;
    struct segment *segments; /* ascending, without overlap */
    size_t n;
    size_t at;         /* the segment of data, or that is being fetched */
    char *data;        /* NULL: not fetched */
    size_t data_bytes; /* at most the segment's */
    uint64_t offset;   /* the next byte, once started */
    uint64_t lines;    /* still to be found, before started */
    int listed, started, busy, closed;
    int ended;           /* the end was read: no segments, no place among the READERS_MAX */
    uint64_t first, end; /* of all, once ended */
    struct mb_err failure;
    void (*ready)(void *arg);
    void *arg;
};

static void drop_data(struct log_store *s)
{
    mb_free(s->data);
    s->data = NULL;
    s->data_bytes = 0;
}

static int fail(struct log_store *s, const char *what, const char *why)
{
    return mb_err_set(&s->failure, MB_EUNAVAIL, "%s in %.600s: %.300s", what,
                      mb_store_url(s->store), why);
}

/* ---- a piece ---- */

static void on_got(void *arg, const struct mb_store_result *r);

static int fetch(struct log_store *s, size_t i)
{
    char key[KEY_BYTES];
    struct mb_err err = {0};

    drop_data(s);
    s->at = i;
    snprintf(key, sizeof key, "%s%020llu.log", s->prefix, (unsigned long long)s->segments[i].begin);
    if (mb_store_get(s->store, key, PIECE_MAX_BYTES, CALL_MS, on_got, s, &err) != 0)
        return fail(s, "a piece of the log cannot be read", err.text);
    s->busy = 1;
    return 0;
}

/* From the end of the piece backwards; 1: it holds the place where the wanted lines begin. */
static int find_lines(struct log_store *s)
{
    const struct segment *g = &s->segments[s->at];
    size_t i = s->data_bytes;

    if (s->at + 1 == s->n && i > 0 && s->data[i - 1] == '\n')
        i--; /* the end of the last line begins no other one */
    for (; i > 0; i--) {
        if (s->data[i - 1] == '\n' && --s->lines == 0) {
            s->offset = g->begin + i;
            return 1;
        }
    }
    s->offset = g->begin;
    return s->at == 0;
}

static void take_piece(struct log_store *s, const struct mb_store_result *r)
{
    struct segment *g = &s->segments[s->at];
    size_t n = (size_t)(g->end - g->begin);

    if (r->data_len < n)
        n = r->data_len;
    g->end = g->begin + n;
    s->data = mb_alloc(n > 0 ? n : 1);
    if (!s->data) {
        mb_err_set(&s->failure, MB_ENOMEM, "out of memory");
        return;
    }
    if (n > 0)
        memcpy(s->data, r->data, n);
    s->data_bytes = n;
    if (s->started)
        return;
    if (find_lines(s))
        s->started = 1;
    else
        fetch(s, s->at - 1);
}

static void on_got(void *arg, const struct mb_store_result *r)
{
    struct log_store *s = arg;

    s->busy = 0;
    if (s->closed)
        return;
    if (r->error != 0)
        fail(s, "a piece of the log cannot be read", r->text);
    else
        take_piece(s, r);
    if (!s->busy)
        s->ready(s->arg);
}

/* ---- the list ---- */

/* "00000000000000000000.log" behind the prefix; 0: something else. */
static int parse_name(const char *name, uint64_t *begin)
{
    char *end;

    if (strspn(name, "0123456789") != 20 || strcmp(name + 20, ".log") != 0)
        return 0;
    *begin = strtoull(name, &end, 10);
    return 1;
}

static void take_list(struct log_store *s, const struct mb_store_result *r)
{
    size_t skip = strlen(s->prefix);

    s->segments = mb_calloc(r->n_entries + 1, sizeof *s->segments);
    if (!s->segments) {
        mb_err_set(&s->failure, MB_ENOMEM, "out of memory");
        return;
    }
    for (size_t i = 0; i < r->n_entries; i++) {
        const struct mb_store_entry *e = &r->entries[i];
        uint64_t begin;

        if (strlen(e->key) <= skip || !parse_name(e->key + skip, &begin) || e->size_bytes == 0)
            continue;
        if (s->n > 0 && s->segments[s->n - 1].end > begin)
            s->segments[s->n - 1].end = begin;
        s->segments[s->n++] = (struct segment){begin, begin + e->size_bytes};
    }
    if (s->n == 0 && !s->may_be_empty)
        fail(s, "nothing of the log is", "its node was lost before it sent any");
}

static void begin(struct log_store *s)
{
    uint64_t end = head_log_store_end(s);

    s->listed = 1;
    s->lines = s->start.tail_lines;
    if (s->start.has_tail && s->lines > 0 && s->n > 0) {
        fetch(s, s->n - 1);
        return;
    }
    s->offset = s->start.has_tail || s->start.offset > end ? end : s->start.offset;
    s->started = 1;
}

static void on_list(void *arg, const struct mb_store_result *r)
{
    struct log_store *s = arg;

    s->busy = 0;
    if (s->closed)
        return;
    if (r->error != 0 && r->error != MB_ENOENT)
        fail(s, "the pieces of the log cannot be listed", r->text);
    else
        take_list(s, r);
    if (s->failure.code == 0)
        begin(s);
    if (!s->busy)
        s->ready(s->arg);
}

/* ---- the end ---- */

static void free_store(void *arg)
{
    struct log_store *s = arg;

    drop_data(s);
    mb_free(s->segments);
    mb_free(s->prefix);
    mb_free(s);
}

static void on_store_closed(void *arg)
{
    struct log_store *s = arg;

    s->store = NULL;
    if (s->closed)
        free_store(s);
}

static void end_reading(struct log_store *s)
{
    s->first = head_log_store_first(s);
    s->end = head_log_store_end(s);
    s->ended = 1;
    mb_free(s->segments);
    s->segments = NULL;
    s->n = s->at = 0;
    s->h->n_log_stores--;
    mb_store_close(s->store, on_store_closed, s);
}

/* ---- reading ---- */

int head_log_store_peek(struct log_store *s, size_t max, struct log_piece *out, struct mb_err *err)
{
    *out = (struct log_piece){.offset = s->offset};
    if (s->failure.code != 0) {
        *err = s->failure;
        return err->code;
    }
    out->at_end = s->ended;
    if (s->busy || !s->started || s->ended)
        return 0;
    while (s->at < s->n && s->segments[s->at].end <= s->offset) {
        drop_data(s);
        s->at++;
    }
    if (s->at == s->n) {
        end_reading(s);
        out->at_end = 1;
        return 0;
    }
    if (s->offset < s->segments[s->at].begin)
        s->offset = out->offset = s->segments[s->at].begin;
    if (!s->data) {
        if (fetch(s, s->at) != 0)
            *err = s->failure;
        return s->failure.code;
    }
    size_t from = (size_t)(s->offset - s->segments[s->at].begin);
    out->data = s->data + from;
    out->n = s->data_bytes - from < max ? s->data_bytes - from : max;
    return 0;
}

void head_log_store_advance(struct log_store *s, size_t n)
{
    s->offset += n;
}

uint64_t head_log_store_first(const struct log_store *s)
{
    return s->n > 0 ? s->segments[0].begin : s->first;
}

uint64_t head_log_store_end(const struct log_store *s)
{
    return s->n > 0 ? s->segments[s->n - 1].end : s->end;
}

/* ---- life ---- */

int head_log_store_open(struct mb_head *h, const struct log_store_opts *opts,
                        struct log_store **out, struct mb_err *err)
{
    struct log_store *s;
    int rc;

    if (opts->start.since_unix_ms > 0)
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "the node of this log is gone, and the store has its lines but not when "
                          "they were written: ask without a time");
    if (h->n_log_stores >= READERS_MAX)
        return mb_err_set(err, MB_EUNAVAIL, "%d logs are read from stores now: ask again",
                          READERS_MAX);
    s = mb_calloc(1, sizeof *s);
    if (!s || !(s->prefix = mb_strdup(opts->prefix))) {
        mb_free(s);
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    s->start = opts->start;
    s->may_be_empty = opts->may_be_empty;
    s->ready = opts->ready;
    s->arg = opts->arg;
    rc = mb_store_open(h->loop, opts->url, &s->store, err);
    if (rc != 0) {
        free_store(s);
        return rc;
    }
    s->h = h;
    h->n_log_stores++;
    rc = mb_store_list(s->store, s->prefix, CALL_MS, on_list, s, err);
    if (rc != 0) {
        head_log_store_close(s);
        return rc;
    }
    s->busy = 1;
    *out = s;
    return 0;
}

void head_log_store_close(struct log_store *s)
{
    if (!s)
        return;
    s->closed = 1;
    if (!s->ended) {
        s->h->n_log_stores--;
        mb_store_close(s->store, free_store, s);
    } else if (!s->store) {
        free_store(s);
    }
}
