/*
 * What a task of a Slurm step is to do for the gang, read from the SLURM_* variables that srun
 * sets (srun(1), OUTPUT ENVIRONMENT VARIABLES; seen with Slurm 22.05). Pure: the environment comes
 * in as a function.
 */
#ifndef MOBULA_CLI_SLURM_H
#define MOBULA_CLI_SLURM_H

#include <stdint.h>
#include "base/err.h"

enum mb_slurm_role {
    MB_SLURM_NONE,      /* not a task of a step: the gang needs a cluster that is there already */
    MB_SLURM_HEAD,      /* first task of the first node: head, node and driver */
    MB_SLURM_NODE,      /* first task of another node: a node */
    MB_SLURM_COMPANION, /* any other task: it lives as long as its node */
};

struct mb_slurm {
    enum mb_slurm_role role;
    char key[160];          /* names this run of the step, a plain file name */
    int64_t node_id;        /* 0 .. n_nodes - 1 */
    int64_t n_nodes;        /* of the step */
    int64_t tasks_per_node; /* the same on every node, else 0 */
    int64_t gpus_per_node;  /* 0: Slurm does not say */
    char launch_ip[64];     /* address of the machine srun runs on; "" if unknown */
};

/* Value of a variable or NULL; borrowed until the next call. */
typedef const char *(*mb_slurm_get)(void *arg, const char *name);

/* MB_EINVAL: a variable holds what Slurm does not write; err names it. */
int mb_slurm_read(mb_slurm_get get, void *arg, struct mb_slurm *out, struct mb_err *err);

/* The file through which the head task tells the other nodes where it is: {"address", "token"}.
 * Strings that come out are owned by the caller; MB_EPROTO: no head task has written that. */
int mb_slurm_meet_format(const char *address, const char *token, char **text, struct mb_err *err);
int mb_slurm_meet_parse(const char *text, char **address, char **token, struct mb_err *err);

#endif
