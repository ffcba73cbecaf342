/*
 * Happy path: 1. RUNNING until every child exited; 2. nothing left: ENDED.
 * Stop: 1. STOPPING with a deadline; 2. the signal goes out at the next tick; 3. what is left at
 * the deadline is killed every MB_SUP_KILL_AGAIN_MS until nothing is left: ENDED.
 * The first reason stays: later causes are consequences.
 */
#include "agent/supervise/plan.h"

#include <signal.h>
#include <stdio.h>

void mb_sup_plan_init(struct mb_sup_plan *plan, const struct mb_sup_spec *spec)
{
    *plan = (struct mb_sup_plan){.state = MB_SUP_PLAN_RUNNING, .spec = spec};
}

static void set_reason(struct mb_sup_plan *plan, const char *reason)
{
    if (plan->reason[0] == '\0')
        snprintf(plan->reason, sizeof(plan->reason), "%s", reason);
}

void mb_sup_plan_child_failed(struct mb_sup_plan *plan, unsigned child, uint64_t now_ms)
{
    char reason[MB_SUP_TEXT_MAX];

    if (plan->state != MB_SUP_PLAN_RUNNING || plan->spec->end_peers_after_ms < 0 ||
        plan->spec->n_children < 2 || plan->peers_at_ms != 0)
        return;
    snprintf(reason, sizeof(reason), "child %u failed", child);
    set_reason(plan, reason);
    plan->peers_at_ms = now_ms + (uint64_t)plan->spec->end_peers_after_ms;
}

void mb_sup_plan_stop(struct mb_sup_plan *plan, const char *reason, int signal, uint32_t grace_ms,
                      uint64_t now_ms)
{
    uint64_t kill_at_ms = now_ms + grace_ms;

    if (plan->state == MB_SUP_PLAN_STOPPING && kill_at_ms < plan->kill_at_ms) {
        plan->kill_at_ms = kill_at_ms;
        set_reason(plan, reason);
    }
    if (plan->state != MB_SUP_PLAN_RUNNING)
        return;
    plan->state = MB_SUP_PLAN_STOPPING;
    plan->signal = signal != 0 ? signal : plan->spec->stop_signal;
    plan->signal_due = 1;
    plan->signal_at_ms = plan->asked_ms = now_ms;
    plan->kill_at_ms = kill_at_ms;
    set_reason(plan, reason);
}

void mb_sup_plan_kill(struct mb_sup_plan *plan, const char *reason, uint64_t now_ms)
{
    if (plan->state == MB_SUP_PLAN_ENDED || plan->state == MB_SUP_PLAN_KILLING)
        return;
    plan->state = MB_SUP_PLAN_KILLING;
    plan->kill_at_ms = now_ms;
    set_reason(plan, reason);
}

void mb_sup_plan_leftovers(struct mb_sup_plan *plan, uint64_t now_ms)
{
    if (plan->state != MB_SUP_PLAN_RUNNING)
        return; /* what a stop left running keeps the grace of that stop */
    mb_sup_plan_stop(plan, plan->reason, SIGTERM, plan->spec->leftover_grace_ms, now_ms);
}

void mb_sup_plan_nothing_left(struct mb_sup_plan *plan)
{
    plan->state = MB_SUP_PLAN_ENDED;
}

void mb_sup_plan_signalled(struct mb_sup_plan *plan, uint64_t now_ms)
{
    if (plan->state == MB_SUP_PLAN_STOPPING && now_ms > plan->asked_ms)
        plan->kill_at_ms += now_ms - plan->asked_ms;
}

void mb_sup_plan_signal_failed(struct mb_sup_plan *plan, uint64_t now_ms)
{
    plan->signal_due = 1;
    plan->signal_at_ms = now_ms + MB_SUP_KILL_AGAIN_MS;
}

enum mb_sup_action mb_sup_plan_tick(struct mb_sup_plan *plan, uint64_t now_ms)
{
    if (plan->state == MB_SUP_PLAN_RUNNING && plan->peers_at_ms != 0 && now_ms >= plan->peers_at_ms)
        mb_sup_plan_stop(plan, plan->reason, 0, plan->spec->end_peers_grace_ms, now_ms);
    if (plan->state == MB_SUP_PLAN_STOPPING && now_ms >= plan->kill_at_ms)
        plan->state = MB_SUP_PLAN_KILLING;
    if (plan->state == MB_SUP_PLAN_STOPPING && plan->signal_due && now_ms >= plan->signal_at_ms) {
        plan->signal_due = 0;
        return MB_SUP_ACT_SIGNAL;
    }
    if (plan->state == MB_SUP_PLAN_KILLING && now_ms >= plan->kill_at_ms) {
        plan->kill_at_ms = now_ms + MB_SUP_KILL_AGAIN_MS;
        return MB_SUP_ACT_KILL;
    }
    return MB_SUP_ACT_NONE;
}

uint64_t mb_sup_plan_next_ms(const struct mb_sup_plan *plan)
{
    switch (plan->state) {
    case MB_SUP_PLAN_RUNNING:
        return plan->peers_at_ms != 0 ? plan->peers_at_ms : UINT64_MAX;
    case MB_SUP_PLAN_STOPPING:
        return plan->signal_due && plan->signal_at_ms < plan->kill_at_ms ? plan->signal_at_ms
                                                                         : plan->kill_at_ms;
    case MB_SUP_PLAN_KILLING:
        return plan->kill_at_ms;
    case MB_SUP_PLAN_ENDED:
        break;
    }
    return UINT64_MAX;
}
