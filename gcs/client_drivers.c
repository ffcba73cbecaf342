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
    req->n_events = report->n_events;
    req->events = mb_wire_messages(a, &mobula__v1__driver_event__descriptor, report->n_events);
    if (!req->events)
        return MB_ENOMEM;
    for (size_t i = 0; i < report->n_events; i++) {
        const struct mb_job_event *e = &report->events[i];
        Mobula__V1__DriverEvent *m = req->events[i];
        m->submission_id = mb_wire_str(e->submission_id);
        m->kind = (int32_t)e->kind;
        m->start_no = e->start_no;
        m->pid = e->pid;
        m->exit_code = e->exit_code;
        m->text = mb_wire_str(e->text);
        m->log_tail = mb_wire_str(e->log_tail);
    }
    return 0;
}

static int put_drivers(struct mb_arena *a, const struct mb_gcs_drivers *report,
                       Mobula__V1__ReportDriversRequest *req)
{
    req->n_running = report->n_running;
    req->running = mb_wire_messages(a, &mobula__v1__running_driver__descriptor, report->n_running);
    req->n_unknown = req->n_unknown_no = report->n_unknown;
    req->unknown = mb_arena_calloc(a, report->n_unknown + 1, sizeof *req->unknown);
    req->unknown_no = mb_arena_calloc(a, report->n_unknown + 1, sizeof *req->unknown_no);
    if (!req->running || !req->unknown || !req->unknown_no)
        return MB_ENOMEM;
    for (size_t i = 0; i < report->n_running; i++) {
        req->running[i]->submission_id = mb_wire_str(report->running[i].submission_id);
        req->running[i]->start_no = report->running[i].start_no;
    }
    for (size_t i = 0; i < report->n_unknown; i++) {
        req->unknown[i] = mb_wire_str(report->unknown[i].submission_id);
        req->unknown_no[i] = report->unknown[i].start_no;
    }
    return 0;
}

static int put_offer(struct mb_arena *a, const struct mb_gcs_drivers *report,
                     Mobula__V1__ReportDriversRequest *req)
{
    req->takes_drivers = report->takes_drivers;
    req->http_address = mb_wire_str(report->http_address);
    req->n_totals = report->n_totals;
    req->totals = mb_wire_messages(a, &mobula__v1__driver_amount__descriptor, report->n_totals);
    if (!req->totals)
        return MB_ENOMEM;
    for (size_t i = 0; i < report->n_totals; i++) {
        req->totals[i]->name = mb_wire_str(report->totals[i].name);
        req->totals[i]->amount = report->totals[i].amount;
    }
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
    if (put_events(&a, report, &req) != 0 || put_drivers(&a, report, &req) != 0 ||
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
