/*
 * Which directories of ended attempts a node keeps: the 20 that ended last, and none for more than
 * 7 days. What an attempt leaves at its end is its logs and states; the environment of its ranks
 * (spec) and the memory of its uploads go at once.
 */
#ifndef MOBULA_AGENT_GANG_PRUNE_H
#define MOBULA_AGENT_GANG_PRUNE_H

#include <stddef.h>
#include <stdint.h>

enum { MB_GANG_KEPT_MAX = 20, MB_GANG_KEPT_S = 7 * 24 * 3600 };

struct mb_gang_ended {
    char *name;      /* of the directory */
    int64_t ended_s; /* unix time */
    int is_surplus;  /* the verdict */
};

/* Pure. Sorts the list, the newest first, and sets is_surplus. */
void mb_gang_prune_decide(struct mb_gang_ended *list, size_t n, int64_t now_s);

/* Blocking: removes what is surplus below root (NODE_DIR/gangs). A directory whose gang.json does
 * not say ENDED is left alone: it lives, or people have to look at it. So is one that saved into
 * what was unpacked for a job until NODE_DIR/jobs/ID/kept says so (job_unpacked.h). */
void mb_gang_prune(const char *root, int64_t now_s);
/* 1 if the attempt in dir has ended, with nothing left to do; *ended_s: its time. */
int mb_gang_dir_has_ended(const char *dir, int64_t *ended_s);
/* An attempt that has ended: what nobody needs any more, and what holds secrets. */
void mb_gang_prune_ended(const char *dir);

#endif
