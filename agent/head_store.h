/*
 * What --store means for the head of this node: a file, memory, or a Redis shared with other heads.
 * Blocking, at start only.
 */
#ifndef MOBULA_AGENT_HEAD_STORE_H
#define MOBULA_AGENT_HEAD_STORE_H

#include "agent/options.h"
#include "gcs/head.h"

struct mb_head_store {
    char *path;     /* sqlite */
    char *password; /* of --store-password-file; NULL: none */
    char holder[320];
    char cluster[2 * MB_NODE_ID_BYTES + 1]; /* "" if this node was in none */
};

/* 1: the store is shared, the head may have to stand by. */
int mb_head_store_is_shared(const char *store);
/* Fills the part of out that keeps things, records and packages; it borrows from s. */
int mb_head_store_open(const struct mb_agent_options *opts, struct mb_head_store *s,
                       struct mb_head_opts *out, struct mb_err *err);
void mb_head_store_close(struct mb_head_store *s);

#endif
