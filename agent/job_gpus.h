/*
 * The GPUs of a driver: a bundle in the node's ledger under a placement group id of the driver's
 * own, so that no gang and no other driver gets the same devices. Loop-thread only; a ledger that
 * is NULL has none. Survives an agent's restart as the ledger does.
 */
#ifndef MOBULA_AGENT_JOB_GPUS_H
#define MOBULA_AGENT_JOB_GPUS_H

#include "agent/job_env.h"
#include "agent/ledger.h"
#include "agent/resources.h"

/* Where drivers get their GPUs from. */
struct mb_job_gpus {
    struct mb_ledger *ledger;      /* NULL: there are none */
    const struct mb_gpus *gpus;    /* what they are called; NULL: by their numbers */
    const char *visible_env;       /* CUDA_VISIBLE_DEVICES or its like; static */
    const char *order_env;         /* mb_gpu_order_env(); static */
    void (*on_changed)(void *arg); /* some were taken or given back; NULL: nobody cares */
    void *arg;
};

/* n devices, and the variable that names them into env; 0 devices is nothing to do. */
int mb_job_gpus_take(const struct mb_job_gpus *g, const char *submission_id, uint32_t n,
                     struct mb_job_env *env, struct mb_err *err);
void mb_job_gpus_give_back(const struct mb_job_gpus *g, const char *submission_id);

/* n > 0 devices, until mb_job_gpus_release(). *visible: "0,3", owned by the caller. MB_EFULL: not
 * as many are free. */
int mb_job_gpus_claim(const struct mb_job_gpus *g, const char *submission_id, uint32_t n,
                      char **visible, struct mb_err *err);
/* The driver lives on under a new agent: what the ledger knows it holds, stays held. 1 if it holds
 * something. */
int mb_job_gpus_adopt(struct mb_ledger *l, const char *submission_id);
/* 1 if something was given back. */
int mb_job_gpus_release(struct mb_ledger *l, const char *submission_id);
void mb_job_gpus_count(const struct mb_ledger *l, uint32_t *total, uint32_t *n_free);

#endif
