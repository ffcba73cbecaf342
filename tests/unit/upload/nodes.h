/*
 * Uploaders for tests, each a node of an attempt of a gang, on one loop: what they are told and
 * what they say. A place is a directory for all of them and a store.
 */
#ifndef MOBULA_TESTS_UNIT_UPLOAD_NODES_H
#define MOBULA_TESTS_UNIT_UPLOAD_NODES_H

#include <stdint.h>
#include <uv.h>
#include "agent/upload/upload.h"

enum { NODE_SEEN_MAX = 300, NODE_ERROR_MAX = 1400 };

struct place {
    char dir[64];
    char url[200]; /* of the store */
    uv_loop_t loop;
    uv_timer_t deadline;
    unsigned n_open; /* uploaders */
};

struct node {
    struct place *at;
    struct mb_upload *u;
    const char *gang;
    uint32_t attempt, rank, num_nodes, keep_last, local_keep_last;
    int64_t committed[NODE_SEEN_MAX], dropped[NODE_SEEN_MAX];
    size_t n_committed, n_dropped;
    char error[NODE_ERROR_MAX]; /* the last one */
    int64_t left[8], never[8];  /* those that it said so of */
    size_t n_left, n_never;
    int64_t next_iteration;
    int is_closed;
    int watches, has_ended, n_sealed; /* the tracker file */
};

/* name: of the directory, below /tmp. The program ends with a line after deadline_ms. */
void place_open(struct place *p, const char *name, uint64_t deadline_ms);
/* 0: a test failed, and what it had on its stack is gone: the loop may not be run any more. */
int place_can_close(const struct place *p);
void place_close(struct place *p); /* after the test's own handles: runs the loop to its end */

#define RUN_UNTIL(p, condition)                                                                    \
    while (!(condition))                                                                           \
    uv_run(&(p)->loop, UV_RUN_ONCE)
void run_for(struct place *p, uint64_t ms);
void run_until_idle(struct place *p, struct node *const *nodes, size_t n);

void node_dir(const struct node *n, char *out, size_t size);
void node_open(struct node *n); /* also again, with the journal that is there */
void node_close(struct node *n);
int node_journal_has(const struct node *n, const char *record);
void node_launch(struct node *n);      /* opened, and in the list of writers */
void node_adopt_ended(struct node *n); /* its agent is started again after its ranks have ended */
int has(const int64_t *list, size_t n, int64_t iteration);
/* The directory of an iteration, which is made. */
void node_iteration_dir(const struct node *n, int64_t iteration, char *out, size_t size);

#endif
