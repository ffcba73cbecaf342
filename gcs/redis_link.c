/*
 *  1. open: the timer starts the first try: the name is resolved, hiredis connects, AUTH and SELECT
 *     are sent if asked for; their answers make it ready.
 *  2. Any failure, or no readiness within TRY_MS: the timer starts the next try after a back-off.
 *     The first failure and every later one at ten times the tries are said. Readiness that does
 * not last (a Redis that is full answers every write with an error) counts as another failure.
 *  3. A refused login before the first readiness is final: it is a mistake in the settings. Later
 * it may be a Redis that is being set up again, and is tried again.
 */
#include "gcs/redis_link.h"

#include <adapters/libuv.h>
#include <async.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/redis_bound.h"

enum { TRY_MS = 2000, BACKOFF_BASE_MS = 50, BACKOFF_CAP_MS = 1000, LASTS_MS = 3000 };

struct redis_link {
    uv_loop_t *loop;
    struct mb_redis_url url;
    char name[512];
    const struct redis_link_ops *ops;
    void *arg;
    redisAsyncContext *ac;
    struct redis_bound bound; /* of ac's reader */
    int logins;               /* answers of AUTH and SELECT still to come */
    int is_ready, was_ready, is_stopped, is_resolving, is_closing;
    unsigned tries;    /* since it was ready for LASTS_MS */
    uint64_t ready_ms; /* 0: it is not */
    int is_said;       /* the newest failure */
    uv_timer_t timer;
    uv_getaddrinfo_t resolve;
    void (*closed_cb)(void *arg);
    void *closed_arg;
    int handles;
};

struct call {
    redis_link_cb cb;
    void *arg;
};

static void on_timer(uv_timer_t *timer);

static void again(struct redis_link *l, const char *why)
{
    if (l->is_stopped)
        return;
    if (l->ready_ms != 0 && mb_mono_ms() - l->ready_ms >= LASTS_MS)
        l->tries = 0;
    l->ready_ms = 0;
    if (l->tries == 0 || l->tries == 10 || l->tries % 100 == 0) {
        mb_warn("store", "%s: %s; trying again tries=%u", l->name, why, l->tries);
        l->is_said = 1; /* until it is connected */
    }
    uv_timer_start(&l->timer, on_timer,
                   mb_backoff_ms(l->tries, BACKOFF_BASE_MS, BACKOFF_CAP_MS, mb_random_u64()) + 1,
                   0);
    l->tries++;
}

static void drop(struct redis_link *l)
{
    redisAsyncContext *ac = l->ac;

    l->ac = NULL;
    l->is_ready = 0;
    l->logins = 0;
    if (ac) {
        ac->data = NULL;
        redisAsyncFree(ac);
    }
}

void redis_link_reset(struct redis_link *l, const char *why)
{
    char text[160];

    snprintf(text, sizeof text, "%s", why); /* may lie in what is freed now */
    drop(l);
    again(l, text);
}

/* ---- becoming ready ---- */

static void now_ready(struct redis_link *l)
{
    if (l->is_said)
        mb_info("store", "%s: connected", l->name);
    l->is_said = 0;
    uv_timer_stop(&l->timer);
    l->is_ready = l->was_ready = 1;
    l->ready_ms = mb_mono_ms();
    l->ops->on_ready(l->arg);
}

static int is_refusal(const char *text)
{
    return mb_starts_with(text, "NOAUTH") || mb_starts_with(text, "WRONGPASS") ||
           mb_starts_with(text, "ERR invalid password") || mb_starts_with(text, "NOPERM") ||
           mb_starts_with(text, "ERR DB index") || mb_starts_with(text, "ERR AUTH");
}

static void on_login(redisAsyncContext *ac, void *answer, void *arg)
{
    struct redis_link *l = ac->data;
    const redisReply *reply = answer;

    (void)arg;
    if (!l || l->ac != ac || !reply)
        return;
    if (reply->type != REDIS_REPLY_ERROR) {
        if (--l->logins == 0)
            now_ready(l);
        return;
    }
    if (!l->was_ready && is_refusal(reply->str)) {
        struct mb_err err = {0};
        mb_err_set(&err, MB_EDENIED,
                   "store %s refuses the login: %.100s; the password comes from the address, from "
                   "--store-password-file or MOBULA_STORE_PASSWORD",
                   l->name, reply->str);
        redis_link_stop(l);
        l->ops->on_refused(l->arg, &err);
        return;
    }
    redis_link_reset(l, reply->str);
}

static void login(struct redis_link *l)
{
    char db[16];

    snprintf(db, sizeof db, "%d", l->url.db);
    if (l->url.user[0])
        redisAsyncCommand(l->ac, on_login, NULL, "AUTH %s %s", l->url.user, l->url.password);
    else if (l->url.password[0])
        redisAsyncCommand(l->ac, on_login, NULL, "AUTH %s", l->url.password);
    redisAsyncCommand(l->ac, on_login, NULL, "SELECT %s", db);
    l->logins = 1 + (l->url.user[0] || l->url.password[0]);
}

static void on_connect(const redisAsyncContext *ac, int status)
{
    struct redis_link *l = ac->data;

    if (!l || l->ac != ac)
        return;
    if (status == REDIS_OK) {
        login(l);
        return;
    }
    l->ac = NULL; /* hiredis frees it */
    again(l, ac->errstr);
}

static void on_disconnect(const redisAsyncContext *ac, int status)
{
    struct redis_link *l = ac->data;

    (void)status;
    if (!l || l->ac != ac)
        return;
    l->ac = NULL;
    l->is_ready = 0;
    again(l, ac->err ? ac->errstr : "the connection was closed");
}

static void connect_to(struct redis_link *l, const char *ip)
{
    redisAsyncContext *ac = redisAsyncConnect(ip, l->url.port);

    if (!ac || ac->err || redisLibuvAttach(ac, l->loop) != REDIS_OK) {
        if (ac)
            redisAsyncFree(ac);
        again(l, "cannot connect");
        return;
    }
    redis_bound_reader(&l->bound, ac->c.reader, REDIS_ELEMENTS_MAX);
    l->ac = ac;
    ac->data = l;
    redisAsyncSetConnectCallback(ac, on_connect);
    redisAsyncSetDisconnectCallback(ac, on_disconnect);
    uv_timer_start(&l->timer, on_timer, TRY_MS, 0);
}

static void link_part_closed(struct redis_link *l)
{
    if (--l->handles > 0)
        return;
    void (*cb)(void *) = l->closed_cb;
    void *arg = l->closed_arg;

    memset(&l->url, 0, sizeof l->url);
    mb_free(l);
    if (cb)
        cb(arg);
}

static void on_resolved(uv_getaddrinfo_t *req, int status, struct addrinfo *found)
{
    struct redis_link *l = req->data;
    char ip[64] = "";

    l->is_resolving = 0;
    if (status == 0 && found->ai_family == AF_INET)
        uv_ip4_name((const struct sockaddr_in *)(const void *)found->ai_addr, ip, sizeof ip);
    else if (status == 0 && found->ai_family == AF_INET6)
        uv_ip6_name((const struct sockaddr_in6 *)(const void *)found->ai_addr, ip, sizeof ip);
    uv_freeaddrinfo(found);
    if (l->is_closing) {
        link_part_closed(l);
        return;
    }
    if (l->is_stopped)
        return;
    if (ip[0])
        connect_to(l, ip);
    else
        again(l, status != 0 ? uv_strerror(status) : "its name has no address");
}

static void on_timer(uv_timer_t *timer)
{
    struct redis_link *l = timer->data;
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM};

    if (l->ac) {
        redis_link_reset(l, "no connection within 2 s");
        return;
    }
    if (l->is_resolving)
        return;
    int rc = uv_getaddrinfo(l->loop, &l->resolve, on_resolved, l->url.host, NULL, &hints);
    if (rc == 0)
        l->is_resolving = 1;
    else
        again(l, uv_strerror(rc));
}

/* ---- use ---- */

static void on_answer(redisAsyncContext *ac, void *answer, void *arg)
{
    struct call c = *(struct call *)arg;

    (void)ac;
    mb_free(arg);
    c.cb(c.arg, answer);
}

int redis_link_send(struct redis_link *l, redis_link_cb cb, void *arg, int argc, const char **argv,
                    const size_t *len)
{
    struct call *c = l->is_ready ? mb_alloc(sizeof *c) : NULL;

    if (!c)
        return MB_ENOMEM;
    *c = (struct call){cb, arg};
    if (redisAsyncCommandArgv(l->ac, on_answer, c, argc, argv, len) == REDIS_OK)
        return 0;
    mb_free(c);
    return MB_ENOMEM;
}

int redis_link_ready(const struct redis_link *l)
{
    return l->is_ready;
}

const char *redis_link_name(const struct redis_link *l)
{
    return l->name;
}

/* ---- life ---- */

int redis_link_open(uv_loop_t *loop, const struct mb_redis_url *url,
                    const struct redis_link_ops *ops, void *arg, struct redis_link **out,
                    struct mb_err *err)
{
    struct redis_link *l = mb_calloc(1, sizeof *l);

    if (!l)
        return mb_err_set(err, MB_ENOMEM, "store: out of memory");
    l->loop = loop;
    l->url = *url;
    l->ops = ops;
    l->arg = arg;
    mb_redis_url_public(url, l->name);
    uv_timer_init(loop, &l->timer);
    l->timer.data = l->resolve.data = l;
    uv_timer_start(&l->timer, on_timer, 0, 0);
    *out = l;
    return 0;
}

void redis_link_stop(struct redis_link *l)
{
    l->is_stopped = 1;
    uv_timer_stop(&l->timer);
    drop(l);
}

static void on_timer_closed(uv_handle_t *handle)
{
    link_part_closed(handle->data);
}

void redis_link_close(struct redis_link *l, void (*cb)(void *arg), void *arg)
{
    redis_link_stop(l);
    l->is_closing = 1;
    l->closed_cb = cb;
    l->closed_arg = arg;
    l->handles = 1 + l->is_resolving;
    if (l->is_resolving)
        uv_cancel((uv_req_t *)&l->resolve);
    uv_close((uv_handle_t *)&l->timer, on_timer_closed);
}
