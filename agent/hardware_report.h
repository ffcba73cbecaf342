/*
 * Tells the head, which is Ray's dashboard mostly, every 5 s what this machine is doing
 * (hardware.h), while the node is ALIVE and its head has readers for that: a real one, or ours
 * where there are GPUs. Loop-thread only.
 */
#ifndef MOBULA_AGENT_HARDWARE_REPORT_H
#define MOBULA_AGENT_HARDWARE_REPORT_H

#include <uv.h>
#include "agent/gpu_figures.h"
#include "agent/node.h"

struct mb_hardware_report;

struct mb_hardware_report_opts {
    struct mb_node *node;
    const char *ip;
    const char *dir;                      /* whose disk counts; all are borrowed */
    const struct mb_gpu_figures *figures; /* NULL: there are none */
};

int mb_hardware_report_start(uv_loop_t *loop, const struct mb_hardware_report_opts *opts,
                             struct mb_hardware_report **out, struct mb_err *err);
/* The node is ALIVE, perhaps at another head than before. */
void mb_hardware_report_alive(struct mb_hardware_report *r);
/* Before the node closes. cb runs once, perhaps at once; r is gone then. */
void mb_hardware_report_stop(struct mb_hardware_report *r, void (*cb)(void *arg), void *arg);

#endif
