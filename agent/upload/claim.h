/*
 * The right to write an iteration. Its manifest's key holds, in this order: nothing, the claim of a
 * writer, that writer's manifest. Every step is a conditional write, so who holds the claim is
 * never in doubt, and a manifest appears only while its writer's claim stands.
 *
 *  - A claim is taken over by whoever is newer (fence.h). A manifest never is: what it lists is not
 *    written any more. Who saves that iteration as well puts its files beside, into
 * .mobula/data-..., and its manifest takes the place of the former at once, as one write.
 *  - An object is written if there is none, or in place of the one that was seen before the last
 *    look at the claim. So a writer that was stopped for hours, and whose claim is gone, cannot
 *    change what a newer one has written.
 * docs/adr/0011-a-claim-before-the-manifest.md has the proof. Loop-thread only.
 */
#ifndef MOBULA_AGENT_UPLOAD_CLAIM_H
#define MOBULA_AGENT_UPLOAD_CLAIM_H

#include <stdint.h>
#include "agent/upload/fence.h"
#include "agent/upload/manifest.h"
#include "base/err.h"
#include "base/s3/store.h"

/* ---- pure ---- */

enum mb_claim_act {
    MB_CLAIM_PUT,    /* write ours: if absent, or in place of what was found */
    MB_CLAIM_HELD,   /* ours: files go to *place */
    MB_CLAIM_BESIDE, /* a manifest of somebody else stands: files go to *place */
    MB_CLAIM_OVER    /* not ours any more */
};

enum { MB_CLAIM_PLACE_MAX = 64 };

/* found: NULL for nothing, or something that is no manifest. place: of the files
 * that this node sent already, NULL for none; out: where files go, "" for the iteration's
 * directory.
 */
enum mb_claim_act mb_claim_decide(const struct mb_manifest *found,
                                  const struct mb_manifest_writer *writer, const char *place,
                                  char out[MB_CLAIM_PLACE_MAX]);

/* ---- the shell ---- */

struct mb_claim_opts { /* texts are borrowed until cb */
    int64_t iteration;
    uint32_t num_nodes;
    struct mb_fence_writer writer;
    const char *place;
    /* By hand: the fence is not looked at, and the writer does not enter it, which would end the
     * jobs that are in it. */
    int is_unfenced;
};

struct mb_claim_answer {
    struct mb_err err; /* code MB_OK: known. MB_ECORRUPT: asking again would not help */
    const char *over;  /* NULL: the writer may go on; else why not */
    int is_fenced;     /* ... with nothing at all, not this iteration only */
    const char *place; /* where files go */
    int was_there;     /* the claim stood before: objects may be there, too */
};

/* Claim and fence. Runs once, never from inside the call; also when the store is closed. */
typedef void (*mb_claim_cb)(void *arg, const struct mb_claim_answer *answer);

int mb_claim_take(struct mb_store *store, const struct mb_claim_opts *opts, mb_claim_cb cb,
                  void *arg, struct mb_err *err);

#endif
