/*
 * What follows when an attempt of a gang has failed: another attempt, after how long, or none.
 * Pure: what happened comes in, a decision comes out; time and chance are arguments.
 *
 * The rule, by exit class:
 *   lost       a node that is gone or gives the gang up, a rank that somebody killed (SIGKILL,
 *              SIGTERM, SIGINT): bad luck, repeated
 *   transient  a peer or a store that could not be reached (69, 74, 75, 76), a launch that failed
 *   crash      any other exit status or signal: repeated, unless the same rank fails the same way
 *              again at the same place, or MB_RESTART_SAME_MAX attempts in a row do, on any rank
 *   memory     out of memory, also a worker's 70 (its plan does not fit what is free): repeated
 *              once, for somebody else may have held it; the same size runs out of it again
 *   permanent  64 to 66, 72, 77, 78 (usage, data, input, permission, configuration), 126, 127;
 *              a worker's 2, a command line that it refuses: never
 * There are never more than max_restarts. The pause begins with delay_ms and doubles up to
 * MB_RESTART_DELAY_MAX_MS while attempts get nowhere; an attempt that got further than the one
 * before it begins anew.
 */
#ifndef MOBULA_CLI_DRIVER_RESTART_H
#define MOBULA_CLI_DRIVER_RESTART_H

#include <stddef.h>
#include <stdint.h>

enum {
    MB_RESTART_DELAY_MAX_MS = 300000,
    MB_RESTART_KEEP_MS = 30000,
    MB_RESTART_SOON_MS = 60000,
    MB_RESTART_SAME_MAX = 3
};

enum mb_failure_kind {
    MB_FAILURE_NONE,    /* nothing that another attempt could mend */
    MB_FAILURE_RANK,    /* rank, exit_code, signal */
    MB_FAILURE_NODE,    /* a node is gone, or gave the gang up in good order */
    MB_FAILURE_REQUEST, /* code: an agent could not do what it was asked */
};

struct mb_failure {
    enum mb_failure_kind kind;
    uint32_t rank;
    int exit_code;
    int signal;
    int code;     /* MB_E* */
    int is_usage; /* a worker that refused its command line */
    int is_out_of_memory;
    /* how far the attempt was; filled by the shell */
    int64_t iteration; /* newest that a rank reported; -1: ranks report none */
    int64_t saved;     /* newest saved, -1: none */
    uint64_t ran_ms;   /* since the ranks were launched */
};

enum mb_exit_class {
    MB_EXIT_LOST,
    MB_EXIT_TRANSIENT,
    MB_EXIT_CRASH,
    MB_EXIT_MEMORY,
    MB_EXIT_PERMANENT,
    MB_EXIT_N_CLASSES
};

struct mb_restart {
    uint32_t max_restarts;
    uint64_t delay_ms; /* of the first restart */
    uint32_t restarts; /* granted so far */
    uint32_t in_vain;  /* failures in a row without progress */
    uint32_t n_same;   /* failures in a row that are the same but for the rank */
    int has_last;
    struct mb_failure last;
};

struct mb_restart_decision {
    int again;
    uint64_t delay_ms;
    int keep_group;    /* its nodes are well: the reservation is kept for the next attempt */
    char why_not[160]; /* again is 0: the reason, "" when no restart was asked for */
};

enum mb_exit_class mb_restart_class(const struct mb_failure *f);
const char *mb_restart_class_name(enum mb_exit_class c);
/* Takes note of the failure. random: any number, for the jitter. */
void mb_restart_decide(struct mb_restart *r, const struct mb_failure *f, uint64_t random,
                       struct mb_restart_decision *out);

#endif
