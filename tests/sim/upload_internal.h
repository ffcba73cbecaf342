/* What the simulated uploader's files share: upload.c, upload_claim.c. */
#ifndef MOBULA_TESTS_SIM_UPLOAD_INTERNAL_H
#define MOBULA_TESTS_SIM_UPLOAD_INTERNAL_H

#include <sys/types.h>
#include "tests/sim/sim.h"

enum { UPLOAD_OP_PREPARE };

struct run *upload_run_at(struct world *w, int machine, int run);
void upload_writer_of(const struct run *r, char hex[8], struct mb_manifest_writer *out);
off_t upload_journal_size(struct world *w, int machine, int run);
/* A record was just written: the kill may have come in the middle of it. */
void upload_noted(struct world *w, int machine, int run, off_t before, int rc);
void upload_drop(struct world *w, int machine, int run, struct mb_plan_iteration *it,
                 const char *why);
void upload_replace(char **at, char *text); /* takes text */
/* By rank, at a place (agent/upload/claim.h). */
const struct object *upload_objects_of(struct world *w, int job, int64_t iteration,
                                       const char *place);
char *upload_etag_of(const struct object *o); /* NULL: there is none */
void upload_check_manifest(struct world *w, int job, int64_t iteration);
int upload_request(struct world *w, int machine, int run, int op, int64_t iteration, int x);

/* ---- upload_claim.c ---- */
void upload_on_prepared(struct world *w, int machine, int run, int64_t iteration);

#define NOTE(w, machine, run, call)                                                                \
    do {                                                                                           \
        off_t before_ = upload_journal_size(w, machine, run);                                      \
        int rc_ = (call);                                                                          \
        upload_noted(w, machine, run, before_, rc_);                                               \
    } while (0)

#endif
