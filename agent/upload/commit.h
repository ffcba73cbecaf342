/*
 * The last two steps of an iteration: its manifest, once every node's part is in the store, in
 * place of the claim under which the files were sent (claim.h), and the latest pointer. Any node
 * may do it, several may try at once; one of them wins and the others see it. Loop-thread only.
 */
#ifndef MOBULA_AGENT_UPLOAD_COMMIT_H
#define MOBULA_AGENT_UPLOAD_COMMIT_H

#include <stdint.h>
#include <uv.h>
#include "agent/upload/manifest.h"
#include "base/err.h"
#include "base/s3/store.h"

struct mb_commit;

struct mb_commit_opts { /* copied */
    int64_t iteration;
    uint32_t num_nodes;
    uint32_t node_rank; /* of this node */
    int is_beside;      /* its files lie beside the manifest of another writer (claim.h) */
    struct mb_manifest_writer writer;
    uint64_t give_up_at_ms; /* monotonic; 0: wait for the other parts for ever */
};

/* err->code MB_OK: manifest and pointer are there, and is_moved: this call has moved the pointer.
 * MB_ESTATE: a newer writer has taken over. Runs once, never from inside a call. */
typedef void (*mb_commit_cb)(void *arg, const struct mb_err *err, int is_moved);

/* store is borrowed until cb or cancel. */
int mb_commit_start(uv_loop_t *loop, struct mb_store *store, const struct mb_commit_opts *opts,
                    mb_commit_cb cb, void *arg, struct mb_commit **out, struct mb_err *err);
/* 1: parts of other nodes are missing, and it looks again after a pause. NULL is legal: 0. */
int mb_commit_waits(const struct mb_commit *c);
void mb_commit_give_up_at(struct mb_commit *c, uint64_t give_up_at_ms); /* NULL is legal */
void mb_commit_cancel(struct mb_commit *c); /* cb does not run any more; NULL is legal */

#endif
