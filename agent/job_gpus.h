/*
 * The GPUs of a driver: a bundle in the node's ledger under a placement group id of the driver's
 * own, so that no gang and no other driver gets the same devices. Loop-thread only; a ledger that
 * is NULL has none. Survives an agent's restart as the ledger does.
 */
#ifndef MOBULA_AGENT_JOB_GPUS_H
#define MOBULA_AGENT_JOB_GPUS_H

#include "agent/ledger.h"

/* n > 0 devices, until mb_job_gpus_release(). *visible: "0,3", owned by the caller. MB_EFULL: not
 * as many are free. */
int mb_job_gpus_claim(struct mb_ledger *l, const char *submission_id, uint32_t n, char **visible,
                      struct mb_err *err);
/* The driver lives on under a new agent: what the ledger knows it holds, stays held. 1 if it holds
 * something. */
int mb_job_gpus_adopt(struct mb_ledger *l, const char *submission_id);
/* 1 if something was given back. */
int mb_job_gpus_release(struct mb_ledger *l, const char *submission_id);
void mb_job_gpus_count(const struct mb_ledger *l, uint32_t *total, uint32_t *n_free);

#endif
