/*
 * Job records by id, and those that have ended in the order in which they did: what is looked up
 * with every request, and what may be forgotten first. Pure; entries are intrusive and owned by
 * the caller. Loop-thread only.
 */
#ifndef MOBULA_GCS_JOB_INDEX_H
#define MOBULA_GCS_JOB_INDEX_H

#include <stddef.h>
#include "base/err.h"

struct mb_job_entry {
    const char *id; /* borrowed, the same for as long as the entry is in the index */
    void *record;
    struct mb_job_entry *before, *after; /* among those that have ended */
    int has_ended;
};

struct mb_job_index { /* all 0: empty */
    void *tree;
    size_t n, n_ended;
    struct mb_job_entry *oldest, *newest; /* of those that have ended */
};

/* 0, or MB_ENOMEM. The id is not in the index yet. */
int mb_job_index_add(struct mb_job_index *x, struct mb_job_entry *e);
void mb_job_index_remove(struct mb_job_index *x, struct mb_job_entry *e);
/* The record of this id, or NULL. */
void *mb_job_index_find(const struct mb_job_index *x, const char *id);
/* It ended, later than all that ended before. Once more: nothing. */
void mb_job_index_ended(struct mb_job_index *x, struct mb_job_entry *e);
/* What is to be forgotten so that at most `keep` stay that have ended: the one that ended first.
 * NULL: nothing. Never one that has not ended. */
void *mb_job_index_surplus(const struct mb_job_index *x, size_t keep);

#endif
