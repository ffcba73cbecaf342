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
 *     missing: Redis was emptied or went back to an older state. Both are final. A standby looks at
 *     the number of batches whenever it asks for the lease, and does not begin below it.
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
#include "gcs/store_redis_internal.h"

enum { ANSWER_MS = 2000, CLOSE_MS = 2000, CHECK_MS = 100, ARGS_MAX = 4 };

/* ---- the scripts ---- */

/* KEYS lease, epoch, batch. {1, epoch}: ours. {0, ms left, "holder|address", batch}: another's. A
 * holder that comes back takes its own lease over at once. {2, batch}: nobody's, but there were
 * batches before (ARGV[4]) that are not there any more. */
static const char acquire_script[] = "local c=redis.call('GET',KEYS[1]) "
                                     "local b=redis.pcall('GET',KEYS[3]) "
                                     "b=type(b)=='string' and tonumber(b) or 0 "
                                     "if c and string.sub(c,1,#ARGV[1]+1)~=ARGV[1]..'|' then "
                                     "return {0,redis.call('PTTL',KEYS[1]),c,b} end "
                                     "if b<tonumber(ARGV[4]) then return {2,b} end "
                                     "local e=redis.call('INCR',KEYS[2]) "
                                     "redis.call('SET',KEYS[1],ARGV[2],'PX',ARGV[3]) return {1,e}";
/* {1}: renewed; {0, epoch}: it is another's. */
static const char renew_script[] = "local e=redis.call('GET',KEYS[2]) "
                                   "if e~=ARGV[1] then return {0,tonumber(e) or -1} end "
                                   "redis.call('SET',KEYS[1],ARGV[2],'PX',ARGV[3]) return {1,0}";
static const char release_script[] =
    "if redis.call('GET',KEYS[2])==ARGV[1] then redis.call('DEL',KEYS[1]) end return 1";
/* ---- answers ---- */

const redisReply *redis_element(const redisReply *reply, size_t i)
{
    return reply && reply->type == REDIS_REPLY_ARRAY && i < reply->elements ? reply->element[i]
                                                                            : NULL;
}

/* The i-th number of an answer, or -2. */
long long redis_number_at(const redisReply *reply, size_t i)
{
    const redisReply *e = redis_element(reply, i);

    return e && e->type == REDIS_REPLY_INTEGER ? e->integer : -2;
}

/* ---- the end of being head ---- */

void redis_lose(struct mb_redis *r, const struct mb_err *why)
{
    if (r->is_lost)
        return;
    r->is_lost = 1;
    r->failure = *why;
    mb_lease_deposed(&r->lease);
    redis_link_stop(r->link);
    redis_undo_all(r);
    if (!r->is_closing && !r->is_closing_tables)
        r->ops->on_lost(r->arg, &r->failure);
}

void redis_lose_epoch(struct mb_redis *r, long long theirs)
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
    redis_lose(r, &err);
}

static void lose_batches(struct mb_redis *r, long long there)
{
    struct mb_err err = {0};

    mb_err_set(&err, MB_ECORRUPT,
               "store %s was set back: it has batch %lld, and had %lld while this node stood by; "
               "restore newer data, or what was stored since is lost",
               redis_link_name(r->link), there, (long long)r->seen_batches);
    redis_lose(r, &err);
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

int redis_load_pairs(struct mb_tables *tables, enum mb_tables_table t, const redisReply *reply)
{
    int rc = reply->type == REDIS_REPLY_ARRAY && reply->elements % 2 == 0 ? 0 : MB_ECORRUPT;

    for (size_t i = 0; rc == 0 && i < reply->elements; i += 2) {
        const redisReply *v = reply->element[i + 1];
        struct mb_blob ns, key;
        rc = split_field(reply->element[i], &ns, &key);
        if (rc == 0 && v->type != REDIS_REPLY_STRING)
            rc = MB_ECORRUPT;
        if (rc == 0)
            rc = tables_load(tables, t, ns, key, (struct mb_blob){v->str, v->len});
    }
    return rc;
}

static void loaded(struct mb_redis *r)
{
    if (--r->loads > 0 || r->is_lost || r->is_closing)
        return;
    r->tables->backend = &redis_backend;
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
    redis_lose(r, &err);
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
    int rc = redis_load_pairs(l.r->tables, l.t, reply);
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
    const char *argv[6 + ARGS_MAX] = {"EVAL",       script,       "3",
                                      r->key_lease, r->key_epoch, r->key_batch};
    size_t len[6 + ARGS_MAX];

    for (int i = 0; i < n; i++)
        argv[6 + i] = args[i];
    for (int i = 0; i < 6 + n; i++)
        len[i] = strlen(argv[i]);
    return redis_link_send(r->link, cb, r, 6 + n, argv, len);
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

/* A lease that was renewed since: a head works with this state, whatever was there before. One out
 * of an older copy only runs down. */
static void see_batches(struct mb_redis *r, long long left_ms, long long batches)
{
    if (batches >= 0 && (left_ms > r->seen_left_ms || batches > r->seen_batches))
        r->seen_batches = batches;
    r->seen_left_ms = left_ms;
}

static void on_acquired(void *arg, const redisReply *reply)
{
    struct mb_redis *r = arg;
    uint64_t now = mb_mono_ms();

    if (!reply || r->is_closing) {
        mb_lease_unanswered(&r->lease, now);
        return;
    }
    switch (redis_number_at(reply, 0)) {
    case 1:
        mb_lease_granted(&r->lease, redis_number_at(reply, 1));
        begin_load(r);
        break;
    case 0: {
        long long left = redis_number_at(reply, 1);
        mb_lease_refused(&r->lease, left > 0 ? (uint64_t)left : 0, now);
        hear_of_other(r, redis_element(reply, 2));
        see_batches(r, left, redis_number_at(reply, 3));
        break;
    }
    case 2:
        lose_batches(r, redis_number_at(reply, 1));
        return;
    default:
        mb_lease_unanswered(&r->lease, now);
        redis_link_reset(r->link, reply->type == REDIS_REPLY_ERROR ? reply->str : "odd answer");
    }
    redis_arm(r);
}

static void on_renewed(void *arg, const redisReply *reply)
{
    struct mb_redis *r = arg;

    if (!reply) {
        mb_lease_unanswered(&r->lease, mb_mono_ms());
    } else if (redis_number_at(reply, 0) == 1) {
        mb_lease_renewed(&r->lease);
    } else if (redis_number_at(reply, 0) == 0) {
        redis_lose_epoch(r, redis_number_at(reply, 1));
    } else {
        mb_lease_unanswered(&r->lease, mb_mono_ms());
        redis_link_reset(r->link, reply->type == REDIS_REPLY_ERROR ? reply->str : "odd answer");
    }
    redis_arm(r);
}

static void ask_lease(struct mb_redis *r)
{
    char ttl[24], epoch[24], seen[24], id[128];
    int rc;

    snprintf(ttl, sizeof ttl, "%llu", (unsigned long long)r->lease.ttl_ms);
    snprintf(epoch, sizeof epoch, "%lld", (long long)r->lease.epoch);
    snprintf(id, sizeof id, "%.*s", (int)r->id_len, r->holder);
    if (r->lease.state == MB_LEASE_HELD) {
        const char *args[] = {epoch, r->holder, ttl};
        rc = eval(r, renew_script, on_renewed, args, 3);
    } else {
        const char *args[ARGS_MAX] = {id, r->holder, ttl, seen};

        snprintf(seen, sizeof seen, "%lld", (long long)r->seen_batches);
        rc = eval(r, acquire_script, on_acquired, args, ARGS_MAX);
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
        redis_lose(r, &err);
    }
}

static void on_timer(uv_timer_t *timer)
{
    struct mb_redis *r = timer->data;

    check_waits(r, mb_mono_ms());
    if (!r->is_lost && !r->is_closing && redis_link_ready(r->link) &&
        mb_lease_tick(&r->lease, mb_mono_ms()))
        ask_lease(r);
    redis_flush(r);
    if (r->is_closing_tables && !r->waiting.head && !r->flight && r->tables)
        redis_tables_end(r);
    redis_arm(r);
}

void redis_arm(struct mb_redis *r)
{
    uint64_t now = mb_mono_ms(), wait = CHECK_MS;

    if (r->is_closing)
        return;
    if (r->waiting.head && (r->is_lost || (redis_link_ready(r->link) && r->n_flight == 0)))
        uv_idle_start(&r->turn, redis_on_turn);
    if (r->is_lost && !r->is_closing_tables)
        return;
    if (!r->lease.asking && !r->waiting.head && !r->flight && !r->is_closing_tables &&
        redis_link_ready(r->link))
        wait = r->lease.ask_at_ms > now ? r->lease.ask_at_ms - now : 0;
    /* Never later than it was: writes that follow each other quickly would keep the lease waiting.
     */
    if (!uv_is_active((uv_handle_t *)&r->timer) || uv_timer_get_due_in(&r->timer) > wait)
        uv_timer_start(&r->timer, on_timer, wait, 0);
}

static void on_link_ready(void *arg)
{
    struct mb_redis *r = arg;

    if (r->lease.state == MB_LEASE_HELD && !r->is_open && !r->is_closing && !r->is_lost)
        begin_load(r); /* the connection broke while loading */
    redis_flush(r);
    redis_arm(r);
}

static void on_link_refused(void *arg, const struct mb_err *err)
{
    redis_lose(arg, err);
}

/* ---- life ---- */

static void make_keys(struct mb_redis *r, const char *prefix)
{
    snprintf(r->key_lease, REDIS_KEY_MAX, "%s:lease", prefix);
    snprintf(r->key_epoch, REDIS_KEY_MAX, "%s:epoch", prefix);
    snprintf(r->key_batch, REDIS_KEY_MAX, "%s:batch", prefix);
    for (int t = 0; t < MB_TABLES_TABLES; t++)
        snprintf(r->key_table[t], REDIS_KEY_MAX, "%s:%s", prefix, store_table_names[t]);
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
    redis_arm(r);
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
