/*
 * What the files of the head share: head.c, store.c, line.c.
 */
#ifndef MOBULA_TESTS_SIM_HEAD_INTERNAL_H
#define MOBULA_TESTS_SIM_HEAD_INTERNAL_H

#include "tests/sim/sim.h"

/* head.c */
void head_written(struct world *w, struct write *x); /* it is on the disk */
void head_apply(struct world *w, int job, enum mb_job_input input);

/* store.c */
void store_open(struct world *w);
void store_crashed(struct world *w);
void store_put(struct world *w, enum table table, int key, const struct record *r,
               enum done_kind done, int job);
/* Behind what was written until now; N_TABLES: nothing but that. */
struct write *store_enqueue(struct world *w, enum table table, int key, enum done_kind done,
                            int job);
/* Answers when all that was written until now is on the disk. */
void store_reply(struct world *w, const struct msg *q, struct msg *reply);

/* line.c: jobs that wait for their turn */
void line_create(struct world *w);
void line_order(struct world *w, int order[MAX_JOBS]); /* in which a head that begins takes them */
void line_add(struct world *w, int job, int forced);
void line_ready(struct world *w, int job); /* its record is on the disk */
void line_adopt(struct world *w, int job); /* its driver runs already */
void line_leave(struct world *w, int job);
void line_pump(struct world *w);

#endif
