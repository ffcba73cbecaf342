/*
 * Where the log of a driver or of a rank is: on which node, under which name, and below which URL
 * its pieces were sent. A rank has one for each attempt of its gang. Inside of the head;
 * loop-thread only.
 */
#ifndef MOBULA_GCS_LOG_PLACE_H
#define MOBULA_GCS_LOG_PLACE_H

#include <stdint.h>
#include "base/err.h"

struct mb_head;
struct head_node;

enum log_whereabouts {
    LOG_NOWHERE, /* nothing has been written yet, or it is here */
    LOG_ON_NODE, /* a node that lives has it */
    LOG_GONE     /* the node that had it is gone */
};

enum { LOG_NAME_BYTES = 256, LOG_URL_BYTES = 2048 };

/* Whose log. */
struct log_whose {
    int64_t rank;    /* -1: the driver */
    int64_t attempt; /* of a rank; 0: the newest that has its nodes */
};

struct log_place {
    int64_t attempt, newest_attempt, world_size; /* of a rank; 0 when it is LOG_NOWHERE */
    struct head_node *node;                      /* of LOG_ON_NODE */
    char node_hex[9];                            /* the first digits of its id */
    char name[LOG_NAME_BYTES];                   /* of the file on the node */
    char prefix[LOG_NAME_BYTES];                 /* of its pieces below url: logs/JOB/rank-0/1/ */
    char url[LOG_URL_BYTES];                     /* "": the job sends its logs nowhere */
};

/* An enum log_whereabouts, or MB_ENOENT: there is no such rank or attempt. */
int head_log_place(struct mb_head *h, const char *job_id, const struct log_whose *whose,
                   struct log_place *out, struct mb_err *err);
/* The next attempt behind that of `whose` that has its nodes and this rank; 0: none so far. */
int64_t head_log_next_attempt(struct mb_head *h, const char *job_id, const struct log_whose *whose);
/* Its log is gone and in no store: MB_EUNAVAIL, and why. */
int head_log_place_lost(const struct log_place *p, int64_t rank, struct mb_err *err);

#endif
