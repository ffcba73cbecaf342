/* The report of a node's drivers to a head that runs elsewhere, and the packages that they need. */
#include <string.h>
#include "gcs/client_internal.h"
#include "gcs/job_queue.h"
#include "gcs/runner.h"
#include "proto/mobula/head.pb-c.h"

static void complete_report(struct mb_gcs_op *op, const struct mb_err *err,
                            const ProtobufCMessage *reply)
{
    const Mobula__V1__ReportDriversReply *m = (const Mobula__V1__ReportDriversReply *)reply;

    ((mb_gcs_drivers_cb)op->cb)(op->cb_arg, err, m ? m->wanted : NULL,
                                m && m->n_wanted_no == m->n_wanted ? m->wanted_no : NULL,
                                m ? m->n_wanted : 0, m ? m->stop : NULL, m ? m->n_stop : 0);
}

/* The parts of the request, in an arena. 0 or MB_ENOMEM. */
static int put_events(struct mb_arena *a, const struct mb_gcs_drivers *report,
                      Mobula__V1__ReportDriversRequest *req)
{
    Mobula__V1__DriverEvent *rows = mb_arena_calloc(a, report->n_events + 1, sizeof *rows);
    Mobula__V1__DriverEvent **list = mb_arena_calloc(a, report->n_events + 1, sizeof *list);

    if (!rows || !list)
        return MB_ENOMEM;
    for (size_t i = 0; i < report->n_events; i++) {
        const struct mb_job_event *e = &report->events[i];
        mobula__v1__driver_event__init(&rows[i]);
        rows[i].submission_id = mb_wire_str(e->submission_id);
        rows[i].kind = (int32_t)e->kind;
        rows[i].start_no = e->start_no;
        rows[i].pid = e->pid;
        rows[i].exit_code = e->exit_code;
        rows[i].text = mb_wire_str(e->text ? e->text : "");
        rows[i].log_tail = mb_wire_str(e->log_tail ? e->log_tail : "");
        list[i] = &rows[i];
    }
    req->n_events = report->n_events;
    req->events = list;
    return 0;
}

static int put_running(struct mb_arena *a, const struct mb_gcs_drivers *report,
                       Mobula__V1__ReportDriversRequest *req)
{
    Mobula__V1__RunningDriver *rows = mb_arena_calloc(a, report->n_running + 1, sizeof *rows);
    Mobula__V1__RunningDriver **list = mb_arena_calloc(a, report->n_running + 1, sizeof *list);
    char **unknown = mb_arena_calloc(a, report->n_unknown + 1, sizeof *unknown);
    uint64_t *unknown_no = mb_arena_calloc(a, report->n_unknown + 1, sizeof *unknown_no);

    if (!rows || !list || !unknown || !unknown_no)
        return MB_ENOMEM;
    for (size_t i = 0; i < report->n_running; i++) {
        mobula__v1__running_driver__init(&rows[i]);
        rows[i].submission_id = mb_wire_str(report->running[i]);
        rows[i].start_no = report->running_no[i];
        list[i] = &rows[i];
    }
    for (size_t i = 0; i < report->n_unknown; i++) {
        unknown[i] = mb_wire_str(report->unknown[i]);
        unknown_no[i] = report->unknown_no[i];
    }
    req->n_running = report->n_running;
    req->running = list;
    req->n_unknown = report->n_unknown;
    req->unknown = unknown;
    req->n_unknown_no = report->n_unknown;
    req->unknown_no = unknown_no;
    return 0;
}

static int put_offer(struct mb_arena *a, const struct mb_gcs_drivers *report,
                     Mobula__V1__ReportDriversRequest *req)
{
    Mobula__V1__DriverAmount *rows = mb_arena_calloc(a, report->n_totals + 1, sizeof *rows);
    Mobula__V1__DriverAmount **list = mb_arena_calloc(a, report->n_totals + 1, sizeof *list);

    if (!rows || !list)
        return MB_ENOMEM;
    for (size_t i = 0; i < report->n_totals; i++) {
        mobula__v1__driver_amount__init(&rows[i]);
        rows[i].name = mb_wire_str(report->totals[i].name);
        rows[i].amount = report->totals[i].amount;
        list[i] = &rows[i];
    }
    req->takes_drivers = report->takes_drivers;
    req->http_address = mb_wire_str(report->http_address ? report->http_address : "");
    req->n_totals = report->n_totals;
    req->totals = list;
    return 0;
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
    int rc = 0;

    req.node_id = mb_wire_bytes(report->node_id, MB_NODE_ID_BYTES);
    if (put_events(&a, report, &req) != 0 || put_running(&a, report, &req) != 0 ||
        put_offer(&a, report, &req) != 0)
        rc = gcs_no_memory(err);
    if (rc == 0)
        rc = gcs_repeatable(c, &method, &req.base, timeout_ms, (gcs_any_cb)cb, arg, op, err);
    mb_arena_close(&a);
    return rc;
}

static void complete_piece(struct mb_gcs_op *op, const struct mb_err *err,
                           const ProtobufCMessage *reply)
{
    const Mobula__V1__ReadPackageReply *m = (const Mobula__V1__ReadPackageReply *)reply;

    ((mb_gcs_piece_cb)op->cb)(op->cb_arg, err, m ? m->size : 0, m ? m->data.data : NULL,
                              m ? m->data.len : 0);
}

int mb_gcs_read_package(struct mb_gcs *c, const char *name, uint64_t offset, uint32_t max_bytes,
                        uint64_t timeout_ms, mb_gcs_piece_cb cb, void *arg, struct mb_gcs_op **op,
                        struct mb_err *err)
{
    static const struct gcs_method method = {
        "/mobula.v1.Head/ReadPackage", &mobula__v1__read_package_reply__descriptor, complete_piece};
    Mobula__V1__ReadPackageRequest req = MOBULA__V1__READ_PACKAGE_REQUEST__INIT;

    req.name = mb_wire_str(name);
    req.offset = offset;
    req.max_bytes = max_bytes;
    return gcs_repeatable(c, &method, &req.base, timeout_ms, (gcs_any_cb)cb, arg, op, err);
}
