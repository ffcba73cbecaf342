/*
 * What the store has when the run begins, for --resume. The store's keys are the agents', so the
 * agent of the first node is asked.
 *
 *  1. All nodes could be launched: the question goes out, the launch is held back.
 *  2. The answer decides, for all nodes alike; they are launched.
 *  3. The agent is away (it is started again), or busy: it is asked again, for as long as its
 *     node is given to come back (schedule_redial() in node.c).
 *  4. The attempt ended meanwhile: the next one asks. The store's own error: a failure of the
 *     driver, which another attempt may mend if it is one of those.
 */
#include "base/clock.h"
#include "base/str.h"
#include "cli/driver/internal.h"
#include "proto/mobula/agent.pb-c.h"

enum { ASK_MS = 120000 /* a listing of a large store is long */, AGAIN_MS = 500 };

static void launch_all(struct driver *d)
{
    for (uint32_t i = 0; i < d->n_nodes; i++)
        if (d->nodes[i].driver && !mb_drv_node_ended(d->state, i))
            drv_node_launch(&d->nodes[i]);
}

static int is_wanted(const struct driver *d)
{
    return !d->closing && d->asking_attempt == d->attempt &&
           mb_drv_phase(d->state) == MB_DRV_LAUNCH;
}

static void ask(struct driver *d);

static void on_again(uv_timer_t *t)
{
    if (is_wanted(t->data))
        ask(t->data);
}

static void on_looked(void *arg, int status, const char *detail, const ProtobufCMessage *reply)
{
    struct driver *d = arg;
    const Mobula__V1__LookReply *r = (const void *)reply;
    struct mb_err err = {0};
    int rc;

    if (!is_wanted(d))
        return;
    if (status == MB_GRPC_UNAVAILABLE && mb_mono_ms() < d->ask_until_ms) {
        uv_timer_start(&d->pause, on_again, AGAIN_MS, 0);
        return;
    }
    d->asking_attempt = 0;
    if (status != MB_GRPC_OK)
        rc = mb_err_set(&err, mb_grpc_status_code(status),
                        "--resume: node 0 was asked about %s: %s", d->opts->checkpoint_url, detail);
    else if (r->code != MB_OK)
        rc = mb_err_set(&err, r->code, "--resume: %s", r->text);
    else
        rc = mb_resume_decide(d->opts->resume, d->opts->checkpoint_url, r->latest, r->newest_whole,
                              &err);
    if (rc < 0) {
        drv_failed(d, &err);
        return;
    }
    d->resumes = rc;
    d->store_was_asked = 1;
    launch_all(d);
}

static void ask(struct driver *d)
{
    Mobula__V1__LookRequest q = MOBULA__V1__LOOK_REQUEST__INIT;
    struct mb_err err = {0};

    q.url = (char *)(uintptr_t)d->opts->checkpoint_url;
    if (mb_grpc_unary(d->nodes[0].channel, "/mobula.v1.NodeAgent/Look", &q.base,
                      &mobula__v1__look_reply__descriptor, ASK_MS, on_looked, d, NULL, &err) < 0)
        drv_failed(d, &err);
}

void drv_launch(struct driver *d)
{
    if (d->opts->resume == MB_RESUME_NEVER || d->store_was_asked || d->committed >= 0) {
        launch_all(d);
        return;
    }
    d->asking_attempt = d->attempt;
    d->ask_until_ms = mb_mono_ms() + d->opts->lease_ms;
    ask(d);
}
