/*
 * The tasks of a Slurm step become a cluster for the length of one gang: the first task is head,
 * node and driver, the first task of every other node is a node, the rest wait. No daemon stays.
 * Blocking; the main thread of a verb.
 */
#ifndef MOBULA_CLI_SLURM_STEP_H
#define MOBULA_CLI_SLURM_STEP_H

#include "cli/options.h"
#include "cli/slurm.h"

/* Called in a process of its own, once, when the head is up: drives the gang at HOST:PORT and
 * returns the exit status. */
typedef int (*mb_slurm_drive)(void *arg, const char *gcs_address);

/* The whole life of this task; returns its exit status. Errors are printed. */
int mb_slurm_step(struct mb_cli *cli, const struct mb_slurm *s, mb_slurm_drive drive, void *arg);

#endif
