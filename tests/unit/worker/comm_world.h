/* A gang inside one test program: every rank is a thread with its own communicator. */
#ifndef MOBULA_TESTS_COMM_WORLD_H
#define MOBULA_TESTS_COMM_WORLD_H

#include <stdatomic.h>
#include <stdio.h>
#include "worker/parallel/comm.h"

/* cmocka's asserts longjmp, which only its own thread may do: ranks count what is wrong instead. */
extern atomic_int comm_world_wrong;
#define CHECK(x)                                                                                   \
    do {                                                                                           \
        if (!(x)) {                                                                                \
            atomic_fetch_add(&comm_world_wrong, 1);                                                \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #x);                                \
        }                                                                                          \
    } while (0)

struct comm_world {
    uint32_t n;
    uint64_t timeout_ms;
    uint64_t tcp_only; /* bit per rank */
    void (*body)(struct mb_comm *c, void *arg);
    void *arg;
    int body_destroys; /* 1: c is body's from then on */
};

/* Runs body on every rank at once; returns 0, or -1 if a rank could not join. */
int comm_world_run(const struct comm_world *w);

/* Whether the caller's is the only thread of the program. */
int comm_world_is_alone(void);

#endif
