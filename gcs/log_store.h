/*
 * A log that is read from a job's object store, where agent/log_keeper.h sent it piece by piece:
 * for when the node that had the file is gone. Inside of the head; loop-thread only.
 */
#ifndef MOBULA_GCS_LOG_STORE_H
#define MOBULA_GCS_LOG_STORE_H

#include "gcs/log_source.h"

struct log_store;

struct log_store_opts { /* copied */
    const char *url;
    const char *prefix; /* of the pieces: logs/JOB/rank-0/1/ */
    struct log_start start;
    int may_be_empty;         /* else MB_EUNAVAIL when nothing of it is there */
    void (*ready)(void *arg); /* from the loop: peek again */
    void *arg;
};

/* MB_EUNAVAIL: too many logs are read from stores. MB_EUNSUPPORTED: start is a time, which the
 * store does not know. MB_EINVAL: the url. */
int head_log_store_open(struct mb_head *h, const struct log_store_opts *opts,
                        struct log_store **out, struct mb_err *err);
/* As head_log_peek(). A gap, which never reached the store, is passed over. */
int head_log_store_peek(struct log_store *s, size_t max, struct log_piece *out, struct mb_err *err);
void head_log_store_advance(struct log_store *s, size_t n);
/* The first byte that is there, and the one behind the last; 0 before the first piece. */
uint64_t head_log_store_first(const struct log_store *s);
uint64_t head_log_store_end(const struct log_store *s);
void head_log_store_close(struct log_store *s); /* NULL is legal; ready runs no more */

#endif
