/*
 * The store on Redis, and the election of the head.
 *
 * Happy path:
 *  1. open: resolve, connect, log in. Then the lease is asked for until it is ours (on_won), and
 *     renewed at every third of its time.
 *  2. Won: the tables, one hash each, are read; nobody else can write them any more.
 *  3. Writes that came in one turn of the loop are one batch: one script that compares epoch and
 *     batch number and applies all. Up to FLIGHT_MAX batches are on their way at a time; each is
 *     kept when Redis has said so.
 *  4. close: what waits is written, the lease is given back.
 * Failure paths:
 *  5. The connection breaks, an answer is late or an error: connected anew with a back-off; batches
 *     without an answer are sent again, their number tells Redis whether it has them.
 *  6. A write waits longer than MB_REDIS_WRITE_WAIT_MS: it is not known what Redis has, so
 *     everything is undone and this head ends (on_lost); the next one reads the truth.
 *  7. The epoch is higher than ours: another head was elected. It is lower or gone, or batches are
 *     missing: Redis was emptied or went back to an older state. Both are final.
 */
#include "gcs/store_redis.h"

#include <async.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/lease.h"
#include "gcs/redis_link.h"
#include "gcs/store_backend.h"

enum {
    FLIGHT_MAX = 4,
    BATCH_WRITES_MAX = 1000,
    BATCH_BYTES_MAX = 8 << 20,
    ANSWER_MS = 2000,
    CLOSE_MS = 2000,
    CHECK_MS = 100,
    KEY_MAX = 96,
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

struct mb_redis {
    uv_loop_t *loop;
    struct redis_link *link;
    char *holder;  /* "HOLDER|ADDRESS", the value of the lease */
    size_t id_len; /* of HOLDER */
    const struct mb_redis_ops *ops;
    void *arg;
    char key_lease[KEY_MAX], key_epoch[KEY_MAX], key_batch[KEY_MAX];
    char key_table[MB_TABLES_TABLES][KEY_MAX];
    struct mb_lease lease;
    char other[320]; /* address of the head that is not us */
    uv_timer_t timer;
    uv_idle_t turn; /* active while writes wait to be sent */
    int is_lost;
    struct mb_err failure;

    struct mb_tables *tables; /* from winning until its close */
    int loads;                /* answers still to come; the tables are not open before */
    int is_open;
    struct store_queue waiting;
    struct batch *flight; /* oldest first */
    int n_flight;
    int64_t n_batches; /* number of the newest batch */
    uint64_t progress_ms;

    int is_closing_tables, is_closing;
    uint64_t closing_ms;
    int handles;
    void (*closed_cb)(void *arg);
    void *closed_arg;
};

static void arm(struct mb_redis *r);
static void flush(struct mb_redis *r);
static void on_turn(uv_idle_t *turn);

/* ---- the scripts ---- */

/* KEYS lease, epoch. {1, epoch}: ours. {0, ms left, "holder|address"}: another's. A holder that
 * comes back takes its own lease over at once. */
static const char acquire_script[] = "local c=redis.call('GET',KEYS[1]) "
                                     "if c and string.sub(c,1,#ARGV[1]+1)~=ARGV[1]..'|' then "
                                     "return {0,redis.call('PTTL',KEYS[1]),c} end "
                                     "local e=redis.call('INCR',KEYS[2]) "
                                     "redis.call('SET',KEYS[1],ARGV[2],'PX',ARGV[3]) return {1,e}";
/* {1}: renewed; {0, epoch}: it is another's. */
static const char renew_script[] = "local e=redis.call('GET',KEYS[2]) "
                                   "if e~=ARGV[1] then return {0,tonumber(e) or -1} end "
                                   "redis.call('SET',KEYS[1],ARGV[2],'PX',ARGV[3]) return {1,0}";
static const char release_script[] =
    "if redis.call('GET',KEYS[2])==ARGV[1] then redis.call('DEL',KEYS[1]) end return 1";
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

static void undo_all(struct mb_redis *r)
{
    struct store_queue all = {0};

    hold_all(r, &all);
    if (all.head)
        tables_undo(r->tables, &all, &r->failure);
}

static void lose(struct mb_redis *r, const struct mb_err *why)
{
    if (r->is_lost)
        return;
    r->is_lost = 1;
    r->failure = *why;
    mb_lease_deposed(&r->lease);
    redis_link_stop(r->link);
    undo_all(r);
    if (!r->is_closing && !r->is_closing_tables)
        r->ops->on_lost(r->arg, &r->failure);
}

static void lose_epoch(struct mb_redis *r, long long theirs)
{
    struct mb_err err = {0};
    const char *url = redis_link_name(r->link);

    if (theirs > r->lease.epoch)
        mb_err_set(
            &err, MB_ESTATE,
            "this head is deposed: another one was elected (epoch %lld, ours was %lld) at %s",
            theirs, (long long)r->lease.epoch, url);
    else
        mb_err_set(
            &err, MB_ECORRUPT,
            "store %s was emptied or set back: its epoch is %lld, this head has %lld; restore "
            "its data, or stop every node and begin a new cluster with it",
            url, theirs, (long long)r->lease.epoch);
    lose(r, &err);
}

static void lose_batches(struct mb_redis *r, long long theirs, int64_t number)
{
    struct mb_err err = {0};

    mb_err_set(&err, MB_ECORRUPT,
               "store %s lost acknowledged writes: it ends with batch %lld, this head is at batch "
               "%lld; restore its data, or stop every node and begin a new cluster with it",
               redis_link_name(r->link), theirs, (long long)number);
    lose(r, &err);
}

/* ---- batches ---- */

static const redisReply *element(const redisReply *reply, size_t i)
{
    return reply && reply->type == REDIS_REPLY_ARRAY && i < reply->elements ? reply->element[i]
                                                                            : NULL;
}

/* The i-th number of an answer, or -2. */
static long long number_at(const redisReply *reply, size_t i)
{
    const redisReply *e = element(reply, i);

    return e && e->type == REDIS_REPLY_INTEGER ? e->integer : -2;
}

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
    switch (number_at(reply, 0)) {
    case 0: /* answers come in order */
        batch_kept(r, b);
        flush(r);
        if (r->is_closing_tables)
            uv_idle_start(&r->turn, on_turn);
        break;
    case 1:
        lose_epoch(r, number_at(reply, 1));
        break;
    case 2:
        lose_batches(r, number_at(reply, 1), b->number);
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

static void flush(struct mb_redis *r)
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
        arm(r); /* its timer watches the wait */
}

static void tables_end(struct mb_redis *r)
{
    struct mb_tables *s = r->tables;

    r->tables = NULL;
    r->is_open = 0;
    tables_closed(s);
}

static void on_turn(uv_idle_t *turn)
{
    struct mb_redis *r = turn->data;

    uv_idle_stop(turn);
    if (r->is_lost)
        undo_all(r);
    else
        flush(r);
    if (r->is_closing_tables && !r->waiting.head && !r->flight && r->tables)
        tables_end(r);
    else
        arm(r);
}

static void close_tables(void *self)
{
    struct mb_redis *r = self;

    r->is_closing_tables = 1;
    r->closing_ms = mb_mono_ms();
    uv_idle_start(&r->turn, on_turn);
}

/* ---- loading ---- */

/* "LENGTH:NAMESPACE KEY" */
static int split_field(const redisReply *e, struct mb_blob *ns, struct mb_blob *key)
{
    char *end;
    unsigned long n;

    if (e->type != REDIS_REPLY_STRING || e->len == 0 || e->str[0] < '0' || e->str[0] > '9')
        return MB_ECORRUPT;
    n = strtoul(e->str, &end, 10); /* hiredis ends every string with a NUL */
    if (*end != ':' || n > (size_t)(e->str + e->len - end - 1))
        return MB_ECORRUPT;
    *ns = (struct mb_blob){end + 1, n};
    *key = (struct mb_blob){end + 1 + n, (size_t)(e->str + e->len - end - 1) - n};
    return 0;
}

static int load_pairs(struct mb_redis *r, enum mb_tables_table t, const redisReply *reply)
{
    int rc = reply->type == REDIS_REPLY_ARRAY && reply->elements % 2 == 0 ? 0 : MB_ECORRUPT;

    for (size_t i = 0; rc == 0 && i < reply->elements; i += 2) {
        const redisReply *v = reply->element[i + 1];
        struct mb_blob ns, key;
        rc = split_field(reply->element[i], &ns, &key);
        if (rc == 0 && v->type != REDIS_REPLY_STRING)
            rc = MB_ECORRUPT;
        if (rc == 0)
            rc = tables_load(r->tables, t, ns, key, (struct mb_blob){v->str, v->len});
    }
    return rc;
}

static void loaded(struct mb_redis *r)
{
    static const struct store_backend backend = {submit, close_tables};

    if (--r->loads > 0 || r->is_lost || r->is_closing)
        return;
    r->tables->backend = &backend;
    r->tables->self = r;
    r->is_open = 1;
    mb_info("store", "%s: this is the head now epoch=%lld batch=%lld", redis_link_name(r->link),
            (long long)r->lease.epoch, (long long)r->n_batches);
    r->ops->on_won(r->arg, r->tables);
}

static void load_failed(struct mb_redis *r, int rc, const char *key, const redisReply *reply)
{
    struct mb_err err = {0};

    if (rc == MB_ENOMEM)
        mb_err_set(&err, rc, "store %s: out of memory while loading", redis_link_name(r->link));
    else
        mb_err_set(&err, rc,
                   "store %s: the key %s is not one of mobula's (%.100s); nothing was changed. Use "
                   "another ?prefix=, or restore its data",
                   redis_link_name(r->link), key,
                   reply->type == REDIS_REPLY_ERROR ? reply->str : "a field has another form");
    lose(r, &err);
}

static void on_number(void *arg, const redisReply *reply)
{
    struct mb_redis *r = arg;

    if (!reply || r->is_lost || r->is_closing)
        return;
    if (reply->type == REDIS_REPLY_STRING)
        r->n_batches = strtoll(reply->str, NULL, 10);
    else if (reply->type != REDIS_REPLY_NIL) {
        load_failed(r, MB_ECORRUPT, r->key_batch, reply);
        return;
    }
    loaded(r);
}

struct load {
    struct mb_redis *r;
    enum mb_tables_table t;
};

static void on_table(void *arg, const redisReply *reply)
{
    struct load l = *(struct load *)arg;

    mb_free(arg);
    if (!reply || l.r->is_lost || l.r->is_closing)
        return; /* begin_load() starts anew on the next connection */
    int rc = load_pairs(l.r, l.t, reply);
    if (rc != 0)
        load_failed(l.r, rc, l.r->key_table[l.t], reply);
    else
        loaded(l.r);
}

static int ask_table(struct mb_redis *r, enum mb_tables_table t)
{
    const char *argv[] = {"HGETALL", r->key_table[t]};
    size_t len[] = {7, strlen(r->key_table[t])};
    struct load *l = mb_alloc(sizeof *l);

    if (!l)
        return MB_ENOMEM;
    *l = (struct load){r, t};
    if (redis_link_send(r->link, on_table, l, 2, argv, len) == 0)
        return 0;
    mb_free(l);
    return MB_ENOMEM;
}

static void begin_load(struct mb_redis *r)
{
    const char *argv[] = {"GET", r->key_batch};
    size_t len[] = {3, strlen(r->key_batch)};
    int rc = 0;

    if (r->tables)
        tables_free(r->tables);
    r->tables = tables_create(redis_link_name(r->link));
    r->loads = MB_TABLES_TABLES + 1;
    if (!r->tables)
        rc = MB_ENOMEM;
    for (int t = 0; rc == 0 && t < MB_TABLES_TABLES; t++)
        rc = ask_table(r, (enum mb_tables_table)t);
    if (rc == 0)
        rc = redis_link_send(r->link, on_number, r, 2, argv, len);
    if (rc != 0)
        load_failed(r, MB_ENOMEM, "", NULL);
}

/* ---- the lease ---- */

static int eval(struct mb_redis *r, const char *script, redis_link_cb cb, const char *const *args,
                int n)
{
    const char *argv[8] = {"EVAL", script, "2", r->key_lease, r->key_epoch};
    size_t len[8];

    for (int i = 0; i < n; i++)
        argv[5 + i] = args[i];
    for (int i = 0; i < 5 + n; i++)
        len[i] = strlen(argv[i]);
    return redis_link_send(r->link, cb, r, 5 + n, argv, len);
}

static void hear_of_other(struct mb_redis *r, const redisReply *value)
{
    const char *bar = value && value->type == REDIS_REPLY_STRING ? strchr(value->str, '|') : NULL;

    if (!bar || strcmp(bar + 1, r->other) == 0)
        return;
    snprintf(r->other, sizeof r->other, "%s", bar + 1);
    mb_info("store", "%s: standing by for the head at %s", redis_link_name(r->link), r->other);
    r->ops->on_other(r->arg, r->other);
}

static void on_acquired(void *arg, const redisReply *reply)
{
    struct mb_redis *r = arg;
    uint64_t now = mb_mono_ms();

    if (!reply || r->is_closing) {
        mb_lease_unanswered(&r->lease, now);
        return;
    }
    switch (number_at(reply, 0)) {
    case 1:
        mb_lease_granted(&r->lease, number_at(reply, 1));
        begin_load(r);
        break;
    case 0: {
        long long left = number_at(reply, 1);
        mb_lease_refused(&r->lease, left > 0 ? (uint64_t)left : 0, now);
        hear_of_other(r, element(reply, 2));
        break;
    }
    default:
        mb_lease_unanswered(&r->lease, now);
        redis_link_reset(r->link, reply->type == REDIS_REPLY_ERROR ? reply->str : "odd answer");
    }
    arm(r);
}

static void on_renewed(void *arg, const redisReply *reply)
{
    struct mb_redis *r = arg;

    if (!reply) {
        mb_lease_unanswered(&r->lease, mb_mono_ms());
    } else if (number_at(reply, 0) == 1) {
        mb_lease_renewed(&r->lease);
    } else if (number_at(reply, 0) == 0) {
        lose_epoch(r, number_at(reply, 1));
    } else {
        mb_lease_unanswered(&r->lease, mb_mono_ms());
        redis_link_reset(r->link, reply->type == REDIS_REPLY_ERROR ? reply->str : "odd answer");
    }
    arm(r);
}

static void ask_lease(struct mb_redis *r)
{
    char ttl[24], epoch[24], id[128];
    int rc;

    snprintf(ttl, sizeof ttl, "%llu", (unsigned long long)r->lease.ttl_ms);
    snprintf(epoch, sizeof epoch, "%lld", (long long)r->lease.epoch);
    snprintf(id, sizeof id, "%.*s", (int)r->id_len, r->holder);
    if (r->lease.state == MB_LEASE_HELD) {
        const char *args[] = {epoch, r->holder, ttl};
        rc = eval(r, renew_script, on_renewed, args, 3);
    } else {
        const char *args[] = {id, r->holder, ttl};
        rc = eval(r, acquire_script, on_acquired, args, 3);
    }
    if (rc != 0)
        mb_lease_unanswered(&r->lease, mb_mono_ms());
}

/* ---- time ---- */

static void check_waits(struct mb_redis *r, uint64_t now)
{
    struct mb_err err = {0};

    if (r->lease.asking && now > r->lease.asked_ms + ANSWER_MS)
        redis_link_reset(r->link, "no answer");
    if (!(r->waiting.head || r->flight) || r->is_lost)
        return;
    if (now > r->progress_ms + MB_REDIS_WRITE_WAIT_MS ||
        (r->is_closing_tables && now > r->closing_ms + CLOSE_MS)) {
        mb_err_set(
            &err, MB_EUNAVAIL,
            "store %s did not take a write within %d s; is it up? The head begins again when "
            "it answers",
            redis_link_name(r->link), MB_REDIS_WRITE_WAIT_MS / 1000);
        lose(r, &err);
    }
}

static void on_timer(uv_timer_t *timer)
{
    struct mb_redis *r = timer->data;

    check_waits(r, mb_mono_ms());
    if (!r->is_lost && !r->is_closing && redis_link_ready(r->link) &&
        mb_lease_tick(&r->lease, mb_mono_ms()))
        ask_lease(r);
    flush(r);
    if (r->is_closing_tables && !r->waiting.head && !r->flight && r->tables)
        tables_end(r);
    arm(r);
}

static void arm(struct mb_redis *r)
{
    uint64_t now = mb_mono_ms(), wait = CHECK_MS;

    if (r->is_closing)
        return;
    if (r->waiting.head && (r->is_lost || (redis_link_ready(r->link) && r->n_flight == 0)))
        uv_idle_start(&r->turn, on_turn);
    if (r->is_lost && !r->is_closing_tables)
        return;
    if (!r->lease.asking && !r->waiting.head && !r->flight && !r->is_closing_tables &&
        redis_link_ready(r->link))
        wait = r->lease.ask_at_ms > now ? r->lease.ask_at_ms - now : 0;
    uv_timer_start(&r->timer, on_timer, wait, 0);
}

static void on_link_ready(void *arg)
{
    struct mb_redis *r = arg;

    if (r->lease.state == MB_LEASE_HELD && !r->is_open && !r->is_closing && !r->is_lost)
        begin_load(r); /* the connection broke while loading */
    flush(r);
    arm(r);
}

static void on_link_refused(void *arg, const struct mb_err *err)
{
    lose(arg, err);
}

/* ---- life ---- */

static void make_keys(struct mb_redis *r, const char *prefix)
{
    snprintf(r->key_lease, KEY_MAX, "%s:lease", prefix);
    snprintf(r->key_epoch, KEY_MAX, "%s:epoch", prefix);
    snprintf(r->key_batch, KEY_MAX, "%s:batch", prefix);
    for (int t = 0; t < MB_TABLES_TABLES; t++)
        snprintf(r->key_table[t], KEY_MAX, "%s:%s", prefix, store_table_names[t]);
}

int mb_redis_open(uv_loop_t *loop, const struct mb_redis_opts *opts, const struct mb_redis_ops *ops,
                  void *arg, struct mb_redis **out, struct mb_err *err)
{
    static const struct redis_link_ops link_ops = {on_link_ready, on_link_refused};
    struct mb_redis_url url;
    struct mb_redis *r;
    int rc = mb_redis_url_parse(opts->url, &url, err);

    *out = NULL;
    if (rc != 0)
        return rc;
    r = mb_calloc(1, sizeof *r);
    if (r)
        r->holder = mb_asprintf("%s|%s", opts->holder, opts->address);
    if (!r || !r->holder) {
        mb_free(r);
        return mb_err_set(err, MB_ENOMEM, "store: out of memory");
    }
    r->loop = loop;
    r->ops = ops;
    r->arg = arg;
    r->id_len = strlen(opts->holder);
    make_keys(r, url.prefix);
    mb_lease_init(&r->lease, opts->ttl_ms ? opts->ttl_ms : MB_REDIS_TTL_MS, mb_mono_ms());
    if (opts->password)
        snprintf(url.password, sizeof url.password, "%s", opts->password);
    rc = redis_link_open(loop, &url, &link_ops, r, &r->link, err);
    memset(&url, 0, sizeof url);
    if (rc != 0) {
        mb_free(r->holder);
        mb_free(r);
        return rc;
    }
    uv_timer_init(loop, &r->timer);
    uv_idle_init(loop, &r->turn);
    r->timer.data = r->turn.data = r;
    arm(r);
    *out = r;
    return 0;
}

int mb_redis_is_head(const struct mb_redis *r)
{
    return r->is_open && !r->is_lost && mb_lease_valid(&r->lease, mb_mono_ms());
}

static void part_closed(struct mb_redis *r)
{
    if (--r->handles > 0)
        return;
    void (*cb)(void *) = r->closed_cb;
    void *arg = r->closed_arg;

    mb_free(r->holder);
    mb_free(r);
    if (cb)
        cb(arg);
}

static void on_handle_closed(uv_handle_t *handle)
{
    part_closed(handle->data);
}

static void on_link_closed(void *arg)
{
    part_closed(arg);
}

static void end(struct mb_redis *r)
{
    if (r->tables) { /* still loading */
        tables_free(r->tables);
        r->tables = NULL;
    }
    uv_close((uv_handle_t *)&r->timer, on_handle_closed);
    uv_close((uv_handle_t *)&r->turn, on_handle_closed);
    redis_link_close(r->link, on_link_closed, r);
}

static void on_released(void *arg, const redisReply *reply)
{
    struct mb_redis *r = arg;

    (void)reply;
    if (uv_is_active((uv_handle_t *)&r->timer)) {
        uv_timer_stop(&r->timer);
        end(r);
    }
}

static void on_release_late(uv_timer_t *timer)
{
    end(timer->data);
}

void mb_redis_close(struct mb_redis *r, void (*cb)(void *arg), void *arg)
{
    char epoch[24];
    const char *args[] = {epoch};

    r->is_closing = 1;
    r->closed_cb = cb;
    r->closed_arg = arg;
    r->handles = 3;
    uv_idle_stop(&r->turn);
    uv_timer_stop(&r->timer);
    snprintf(epoch, sizeof epoch, "%lld", (long long)r->lease.epoch);
    if (r->lease.state == MB_LEASE_HELD && redis_link_ready(r->link) &&
        eval(r, release_script, on_released, args, 1) == 0)
        uv_timer_start(&r->timer, on_release_late, CLOSE_MS, 0);
    else
        end(r);
}
