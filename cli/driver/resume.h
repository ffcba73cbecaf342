/* --resume: whether a run goes on from what its checkpoint_url holds when it begins. Pure. */
#ifndef MOBULA_CLI_DRIVER_RESUME_H
#define MOBULA_CLI_DRIVER_RESUME_H

#include <stdint.h>
#include "base/err.h"

enum mb_resume {
    MB_RESUME_NEVER,    /* it begins as its arguments say */
    MB_RESUME_AUTO,     /* goes on if there is a checkpoint */
    MB_RESUME_REQUIRED, /* there has to be one */
};

/* text NULL: MB_RESUME_NEVER. Else its name, or MB_EINVAL. */
int mb_resume_parse(const char *text, enum mb_resume *out, struct mb_err *err);

/* how: AUTO or REQUIRED. latest: what the pointer names; -1: there is none, -2: it is damaged.
 * newest_whole: the newest whole iteration up to that, -1: none. 1: the run goes on; 0: it begins
 * anew. MB_ENOENT: one is required. MB_ECORRUPT: there are some, and a reader could take none: to
 * begin anew would hide that. */
int mb_resume_decide(enum mb_resume how, const char *url, int64_t latest, int64_t newest_whole,
                     struct mb_err *err);

#endif
