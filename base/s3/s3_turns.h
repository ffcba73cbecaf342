/*
 * Who of a store's transfers may go on: one queue for the parts of all files, big and small alike.
 * A part is prepared (read once for its checksum, in the pool) while at most S3_AHEAD more than fit
 * the connections are, and is sent while at most s->parallel are. Loop-thread only.
 */
#ifndef MOBULA_BASE_S3_TURNS_H
#define MOBULA_BASE_S3_TURNS_H

#include <stdint.h>

struct s3;

enum { S3_AHEAD = 4 };

enum s3_turn_state {
    S3_TURN_NONE,
    S3_TURN_WAITS,   /* to be prepared */
    S3_TURN_HOLDS,   /* is prepared, or was */
    S3_TURN_WAITS_2, /* to be sent */
    S3_TURN_SENDS
};

struct s3_turn { /* embedded by its user, zeroed */
    struct s3_turn *prev, *next;
    enum s3_turn_state state;
    int32_t priority; /* lower goes first, then the lower order */
    uint64_t order;
    void (*go)(void *arg);
    void *arg;
};

struct s3_turns {
    struct s3_turn *first[2], *last[2]; /* waiting to be prepared, to be sent */
    unsigned n_held, n_sending;
    uint64_t last_order;
    int running; /* s3_turns_run() is on the stack */
};

/* go(arg) runs when it may be prepared; perhaps before this returns. */
void s3_turn_prepare(struct s3 *s, struct s3_turn *t, void (*go)(void *arg), void *arg);
/* go(arg) runs when it may be sent; perhaps before this returns. From NONE or HOLDS. */
void s3_turn_send(struct s3 *s, struct s3_turn *t, void (*go)(void *arg), void *arg);
/* Where it waits it takes its new place at once. */
void s3_turn_set_priority(struct s3 *s, struct s3_turn *t, int32_t priority);
/* From any state; others go on. */
void s3_turn_end(struct s3 *s, struct s3_turn *t);
/* After s->parallel has grown. */
void s3_turns_run(struct s3 *s);

#endif
