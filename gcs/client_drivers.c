/* The report of a node's drivers to a head that runs elsewhere. */
#include <string.h>
#include "gcs/client_internal.h"
#include "gcs/runner.h"
#include "proto/mobula/head.pb-c.h"

static void complete_report(struct mb_gcs_op *op, const struct mb_err *err,
                            const ProtobufCMessage *reply)
{
    const Mobula__V1__ReportDriversReply *m = (const Mobula__V1__ReportDriversReply *)reply;

    ((mb_gcs_drivers_cb)op->cb)(op->cb_arg, err, m ? m->wanted : NULL, m ? m->n_wanted : 0,
                                m ? m->stop : NULL, m ? m->n_stop : 0);
}

int mb_gcs_report_drivers(struct mb_gcs *c, const struct mb_gcs_drivers *report,
                          uint64_t timeout_ms, mb_gcs_drivers_cb cb, void *arg,
                          struct mb_gcs_op **op, struct mb_err *err)
{
    static const struct gcs_method method = {"/mobula.v1.Head/ReportDrivers",
                                             &mobula__v1__report_drivers_reply__descriptor,
                                             complete_report};
    Mobula__V1__ReportDriversRequest req = MOBULA__V1__REPORT_DRIVERS_REQUEST__INIT;
    struct mb_arena a = {0};
    Mobula__V1__DriverEvent *rows = mb_arena_calloc(&a, report->n_events + 1, sizeof *rows);
    Mobula__V1__DriverEvent **list = mb_arena_calloc(&a, report->n_events + 1, sizeof *list);
    char **unknown = mb_arena_calloc(&a, report->n_unknown + 1, sizeof *unknown);
    int rc = rows && list && unknown ? 0 : gcs_no_memory(err);

    for (size_t i = 0; rc == 0 && i < report->n_events; i++) {
        const struct mb_job_event *e = &report->events[i];
        mobula__v1__driver_event__init(&rows[i]);
        rows[i].submission_id = mb_wire_str(e->submission_id);
        rows[i].kind = (int32_t)e->kind;
        rows[i].pid = e->pid;
        rows[i].exit_code = e->exit_code;
        rows[i].text = mb_wire_str(e->text ? e->text : "");
        rows[i].log_tail = mb_wire_str(e->log_tail ? e->log_tail : "");
        list[i] = &rows[i];
    }
    for (size_t i = 0; rc == 0 && i < report->n_unknown; i++)
        unknown[i] = mb_wire_str(report->unknown[i]);
    req.node_id = mb_wire_bytes(report->node_id, MB_NODE_ID_BYTES);
    req.n_events = report->n_events;
    req.events = list;
    req.n_unknown = report->n_unknown;
    req.unknown = unknown;
    if (rc == 0)
        rc = gcs_repeatable(c, &method, &req.base, timeout_ms, (gcs_any_cb)cb, arg, op, err);
    mb_arena_close(&a);
    return rc;
}
