/*
 * A connection to Redis that comes back by itself: resolve, connect, AUTH, SELECT, with a jittered
 * back-off between tries. Loop-thread only; used by store_redis.c.
 */
#ifndef MOBULA_GCS_REDIS_LINK_H
#define MOBULA_GCS_REDIS_LINK_H

#include <hiredis.h>
#include <uv.h>
#include "gcs/redis_url.h"

struct redis_link;

struct redis_link_ops {
    void (*on_ready)(void *arg); /* connected and logged in, each time anew */
    /* User, password or database were refused before it was ever ready: for good. */
    void (*on_refused)(void *arg, const struct mb_err *err);
};

/* reply NULL: the connection broke before the answer came. Exactly once, never from inside. */
typedef void (*redis_link_cb)(void *arg, const redisReply *reply);

int redis_link_open(uv_loop_t *loop, const struct mb_redis_url *url,
                    const struct redis_link_ops *ops, void *arg, struct redis_link **out,
                    struct mb_err *err);
int redis_link_ready(const struct redis_link *l);
const char *redis_link_name(const struct redis_link *l); /* the url without its login */
/* The words are copied. A negative code: not ready, or out of memory; cb does not run. */
int redis_link_send(struct redis_link *l, redis_link_cb cb, void *arg, int argc, const char **argv,
                    const size_t *len);
/* Give this connection up and make another; callbacks run with NULL, also from inside this call. */
void redis_link_reset(struct redis_link *l, const char *why);
void redis_link_stop(struct redis_link *l); /* give it up and make no other */
void redis_link_close(struct redis_link *l, void (*cb)(void *arg), void *arg);

#endif
