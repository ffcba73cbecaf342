/*
 * The store on Redis, and the election of the head: several heads may name the same store, one
 * holds the lease (lease.h) and has the tables; the others stand by.
 *
 * Everything is asynchronous, on the loop; callbacks never run inside a call. Every write compares
 * the epoch of the lease and the number of its batch inside Redis, so that a deposed head changes
 * nothing, and a batch whose answer was lost is applied once.
 */
#ifndef MOBULA_GCS_STORE_REDIS_H
#define MOBULA_GCS_STORE_REDIS_H

#include "gcs/store.h"

enum {
    MB_REDIS_TTL_MS = 3000,
    MB_REDIS_WRITE_WAIT_MS = 10000 /* a write that Redis has not confirmed by then fails */
};

struct mb_redis;

struct mb_redis_ops {
    /* This process is the head now; tables are loaded and the caller's, to be closed before
     * mb_redis_close(). At most once. */
    void (*on_won)(void *arg, struct mb_tables *tables);
    /* Another head holds the lease; its address, whenever it is another than before. */
    void (*on_other)(void *arg, const char *address);
    /* Not the head any more, or the store cannot be trusted: for good. err says what to do. */
    void (*on_lost)(void *arg, const struct mb_err *err);
};

struct mb_redis_opts {
    const char *url;      /* redis_url.h; copied */
    const char *password; /* instead of the url's; NULL: the url's; copied */
    const char *holder;   /* who we are, the same after a restart of this node: hex digits */
    const char *address;  /* host:port where this head serves */
    uint64_t ttl_ms;      /* 0: MB_REDIS_TTL_MS */
};

/* MB_EINVAL, MB_EUNSUPPORTED: the url. An unreachable Redis is waited for. */
int mb_redis_open(uv_loop_t *loop, const struct mb_redis_opts *opts, const struct mb_redis_ops *ops,
                  void *arg, struct mb_redis **out, struct mb_err *err);
/* 1: this process is the head, and no other can be. */
int mb_redis_is_head(const struct mb_redis *r);
/* Gives the lease back if it is held, so that a standby need not wait; then cb, r is freed. */
void mb_redis_close(struct mb_redis *r, void (*cb)(void *arg), void *arg);

#endif
