/* The inside of the store on Redis, shared by store_redis.c and store_redis_write.c only. */
#ifndef MOBULA_GCS_STORE_REDIS_INTERNAL_H
#define MOBULA_GCS_STORE_REDIS_INTERNAL_H

#include <async.h>
#include "gcs/lease.h"
#include "gcs/redis_link.h"
#include "gcs/store_backend.h"
#include "gcs/store_redis.h"

enum { REDIS_KEY_MAX = 96 };

struct batch;

struct mb_redis {
    uv_loop_t *loop;
    struct redis_link *link;
    char *holder;  /* "HOLDER|ADDRESS", the value of the lease */
    size_t id_len; /* of HOLDER */
    const struct mb_redis_ops *ops;
    void *arg;
    char key_lease[REDIS_KEY_MAX], key_epoch[REDIS_KEY_MAX], key_batch[REDIS_KEY_MAX];
    char key_table[MB_TABLES_TABLES][REDIS_KEY_MAX];
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
    int64_t n_batches;    /* number of the newest batch */
    int64_t seen_batches; /* of another head, while this one stood by */
    int64_t seen_left_ms; /* of that one's lease, at the last answer */
    uint64_t progress_ms;

    int is_closing_tables, is_closing;
    uint64_t closing_ms;
    int handles;
    void (*closed_cb)(void *arg);
    void *closed_arg;
};

/* ---- store_redis.c ---- */
const redisReply *redis_element(const redisReply *reply, size_t i);
/* The i-th number of an answer, or -2. */
long long redis_number_at(const redisReply *reply, size_t i);
/* What HGETALL said of a table, into the mirrors. MB_ECORRUPT: a field has another form. */
int redis_load_pairs(struct mb_tables *tables, enum mb_tables_table t, const redisReply *reply);
void redis_arm(struct mb_redis *r);
/* Not the head any more, for good; the first reason counts. */
void redis_lose(struct mb_redis *r, const struct mb_err *why);
void redis_lose_epoch(struct mb_redis *r, long long theirs);

/* ---- store_redis_write.c ---- */
extern const struct store_backend redis_backend;
void redis_undo_all(struct mb_redis *r); /* what Redis has not confirmed */
void redis_flush(struct mb_redis *r);
void redis_on_turn(uv_idle_t *turn);
void redis_tables_end(struct mb_redis *r);

#endif
