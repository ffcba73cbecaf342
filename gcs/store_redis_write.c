/*
 * The writes of the store on Redis (store_redis.c tells the whole story).
 *
 *  1. A write waits for the end of the loop's turn; what waits then is a batch with a number.
 *  2. One script compares epoch and number, and applies all of the batch. Up to FLIGHT_MAX are on
 *     their way; answers come in their order.
 *  3. The connection breaks: a batch without an answer is sent again on the next one.
 *  4. The script refuses, or the head is lost for another reason: all that is not kept is undone.
 */
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "gcs/store_redis_internal.h"

enum {
    FLIGHT_MAX = 4,
    BATCH_WRITES_MAX = 1000,
    BATCH_BYTES_MAX = 8 << 20,
    FIELD_HEAD_MAX = 24 /* the length of the namespace and a colon */
};

struct batch {
    struct batch *next;
    struct mb_redis *r;
    int64_t number;
    struct store_queue writes;
    int is_sent; /* on the present connection: on_written() will be called */
    int is_gone; /* its writes were undone: on_written() only frees it */
};

/* KEYS epoch, batch, tables. {0}: applied, now or before; {1, epoch}: another's; {2, batch}: not
 * the next one. */
static const char write_script[] =
    "local e=redis.call('GET',KEYS[1]) "
    "if e~=ARGV[1] then return {1,tonumber(e) or -1} end "
    "local b=tonumber(redis.call('GET',KEYS[2]) or '0') local n=tonumber(ARGV[2]) "
    "if n<=b then return {0,b} end if n~=b+1 then return {2,b} end "
    "for i=3,#ARGV,3 do local t=KEYS[3+tonumber(string.sub(ARGV[i],2))] "
    "if string.sub(ARGV[i],1,1)=='p' then redis.call('HSET',t,ARGV[i+1],ARGV[i+2]) "
    "else redis.call('HDEL',t,ARGV[i+1]) end end "
    "redis.call('SET',KEYS[2],ARGV[2]) return {0,n}";

/* ---- the end of being head ---- */

static void hold_all(struct mb_redis *r, struct store_queue *all)
{
    struct batch *b = r->flight;

    r->flight = NULL;
    r->n_flight = 0;
    while (b) {
        struct batch *next = b->next;
        store_queue_append(all, &b->writes);
        if (b->is_sent)
            b->is_gone = 1;
        else
            mb_free(b);
        b = next;
    }
    store_queue_append(all, &r->waiting);
}

void redis_undo_all(struct mb_redis *r)
{
    struct store_queue all = {0};

    hold_all(r, &all);
    if (all.head)
        tables_undo(r->tables, &all, &r->failure);
}

static void lose_batches(struct mb_redis *r, long long theirs, int64_t number)
{
    struct mb_err err = {0};

    mb_err_set(&err, MB_ECORRUPT,
               "store %s lost acknowledged writes: it ends with batch %lld, this head is at batch "
               "%lld; restore its data, or stop every node and begin a new cluster with it",
               redis_link_name(r->link), theirs, (long long)number);
    redis_lose(r, &err);
}

/* ---- batches ---- */

static void batch_kept(struct mb_redis *r, struct batch *b)
{
    r->flight = b->next;
    r->n_flight--;
    r->progress_ms = mb_mono_ms();
    tables_kept(r->tables, &b->writes);
    mb_free(b);
}

static void on_written(void *arg, const redisReply *reply)
{
    struct batch *b = arg;
    struct mb_redis *r = b->r;

    b->is_sent = 0;
    if (b->is_gone) {
        mb_free(b);
        return;
    }
    if (!reply) /* the connection broke: sent again on the next one */
        return;
    switch (redis_number_at(reply, 0)) {
    case 0: /* answers come in order */
        batch_kept(r, b);
        redis_flush(r);
        if (r->is_closing_tables)
            uv_idle_start(&r->turn, redis_on_turn);
        break;
    case 1:
        redis_lose_epoch(r, redis_number_at(reply, 1));
        break;
    case 2:
        lose_batches(r, redis_number_at(reply, 1), b->number);
        break;
    default:
        redis_link_reset(r->link, reply->type == REDIS_REPLY_ERROR ? reply->str : "odd answer");
        break;
    }
}

struct words {
    const char **argv;
    size_t *len;
    int n;
    char *fields, *at; /* the field names */
};

static void add_word(struct words *w, const void *p, size_t n)
{
    w->argv[w->n] = p;
    w->len[w->n++] = n;
}

static void add_text(struct words *w, const char *text)
{
    add_word(w, text, strlen(text));
}

/* "p1" or "d1", the field "LENGTH:NAMESPACE KEY", the value. */
static void add_write(struct words *w, const struct store_write *write)
{
    static const char *const puts[] = {"p0", "p1", "p2", "p3", "p4"};
    static const char *const dels[] = {"d0", "d1", "d2", "d3", "d4"};
    struct mb_blob ns = mb_record_ns(write->record), value = mb_record_value(write->record);
    size_t n = ns.n + mb_record_key(write->record).n; /* they follow each other */
    int head = snprintf(w->at, FIELD_HEAD_MAX, "%zu:", ns.n);
    int is_put = write->kind == STORE_PUT;

    memcpy(w->at + head, ns.p, n);
    add_text(w, (is_put ? puts : dels)[write->table]);
    add_word(w, w->at, (size_t)head + n);
    add_word(w, is_put ? value.p : "", is_put ? value.n : 0);
    w->at += (size_t)head + n;
}

static void free_words(struct words *w)
{
    mb_free(w->argv);
    mb_free(w->len);
    mb_free(w->fields);
}

static int alloc_words(struct words *w, const struct batch *b)
{
    size_t n_words = 5 + 2 + MB_TABLES_TABLES, n_bytes = 1;

    for (const struct store_write *x = b->writes.head; x; x = x->next) {
        if (x->kind == STORE_BARRIER)
            continue;
        n_words += 3;
        n_bytes += FIELD_HEAD_MAX + mb_record_ns(x->record).n + mb_record_key(x->record).n;
    }
    w->argv = mb_calloc(n_words, sizeof *w->argv);
    w->len = mb_calloc(n_words, sizeof *w->len);
    w->at = w->fields = mb_alloc(n_bytes);
    return w->argv && w->len && w->fields ? 0 : MB_ENOMEM;
}

/* 0, or it could not be sent now. */
static int send_batch(struct mb_redis *r, struct batch *b)
{
    struct words w = {0};
    char epoch[24], number[24];
    int rc = alloc_words(&w, b);

    if (rc == 0) {
        snprintf(epoch, sizeof epoch, "%lld", (long long)r->lease.epoch);
        snprintf(number, sizeof number, "%lld", (long long)b->number);
        add_text(&w, "EVAL");
        add_text(&w, write_script);
        add_text(&w, "7");
        add_text(&w, r->key_epoch);
        add_text(&w, r->key_batch);
        for (int t = 0; t < MB_TABLES_TABLES; t++)
            add_text(&w, r->key_table[t]);
        add_text(&w, epoch);
        add_text(&w, number);
        for (const struct store_write *x = b->writes.head; x; x = x->next)
            if (x->kind != STORE_BARRIER)
                add_write(&w, x);
        rc = redis_link_send(r->link, on_written, b, w.n, w.argv, w.len);
    }
    b->is_sent = rc == 0;
    free_words(&w);
    return rc;
}

static struct batch *next_batch(struct mb_redis *r)
{
    struct batch *b = mb_calloc(1, sizeof *b), **last = &r->flight;

    if (!b)
        return NULL;
    b->r = r;
    b->number = ++r->n_batches;
    while (r->waiting.head && b->writes.n < BATCH_WRITES_MAX &&
           b->writes.size_bytes < BATCH_BYTES_MAX) {
        struct store_write *w = r->waiting.head;
        r->waiting.head = w->next;
        if (!w->next)
            r->waiting.tail = NULL;
        r->waiting.n--;
        r->waiting.size_bytes -= w->size_bytes;
        store_queue_push(&b->writes, w);
    }
    while (*last)
        last = &(*last)->next;
    *last = b;
    r->n_flight++;
    return b;
}

void redis_flush(struct mb_redis *r)
{
    if (!r->is_open || r->is_lost || !redis_link_ready(r->link))
        return;
    for (struct batch *b = r->flight; b; b = b->next)
        if (!b->is_sent && send_batch(r, b) != 0)
            return;
    while (r->waiting.head && r->n_flight < FLIGHT_MAX) {
        struct batch *b = next_batch(r);
        if (!b || send_batch(r, b) != 0)
            return; /* the timer tries again */
    }
}

static void submit(void *self, struct store_write *w)
{
    struct mb_redis *r = self;

    if (!r->waiting.head && !r->flight)
        r->progress_ms = mb_mono_ms();
    store_queue_push(&r->waiting, w);
    if (!uv_is_active((uv_handle_t *)&r->turn))
        redis_arm(r); /* its timer watches the wait */
}

void redis_tables_end(struct mb_redis *r)
{
    struct mb_tables *s = r->tables;

    r->tables = NULL;
    r->is_open = 0;
    tables_closed(s);
}

void redis_on_turn(uv_idle_t *turn)
{
    struct mb_redis *r = turn->data;

    uv_idle_stop(turn);
    if (r->is_lost)
        redis_undo_all(r);
    else
        redis_flush(r);
    if (r->is_closing_tables && !r->waiting.head && !r->flight && r->tables)
        redis_tables_end(r);
    else
        redis_arm(r);
}

static void close_tables(void *self)
{
    struct mb_redis *r = self;

    r->is_closing_tables = 1;
    r->closing_ms = mb_mono_ms();
    uv_idle_start(&r->turn, redis_on_turn);
}

const struct store_backend redis_backend = {submit, close_tables};
