/*
 * The runtime: completion queue, poller thread, way back to the loop, orderly end.
 *
 *  1. Every operation handed to the library carries a tag; n_ops counts them.
 *  2. The poller thread blocks in the completion queue. With the first finished tag it hands the
 *     queue over: it appends the tag to a list under the lock, wakes the loop and waits. What the
 *     loop starts now ends without waking another thread, and no two threads contend for the
 *     connection, which costs more than the calls themselves.
 *  3. On the loop on_async() runs done() of each tag of the list, then of what the queue has by
 *     now (bounded; the rest in the next turns). After a turn in which nothing was finished the
 *     poller gets the queue back. Nothing else calls back, so no callback ever runs inside the
 *     call that asked for it.
 *  4. mb_grpc_stop(): servers shut down, calls and streams are cancelled, channels settle; their
 *     tags come back.
 *  5. When n_ops is 0 the queue is shut down; the poller ends and wakes the loop a last time; it is
 *     joined, the handles are closed, what is left of servers and channels is freed, stopped_cb
 *     runs.
 *  6. Creation fails: an async handle that exists already is closed by the loop, and the memory
 *     goes with it.
 *
 * Traps of the library (1.51) that this folder hides:
 *  - GRPC_OP_SEND_MESSAGE empties the byte buffer it is given: a buffer is sent once.
 *  - Servers set SO_REUSEPORT by default, and two of them share a port without an error.
 *  - GRPC_OP_RECV_CLOSE_ON_SERVER ends when the call ends: it has its own tag, and a server call is
 *    released only when that tag and the answer's are back.
 *  - Callback completion queues are not polled by themselves: hence a thread.
 *  - A channel destroyed between the TCP connection and the peer's SETTINGS leaves that connection
 *    behind, socket and memory: see mb_grpc_channel_settle().
 *  - Channels to one target share a connection and its back-off unless told otherwise.
 *  - With the library's retries on, a stream cancelled in the middle of traffic sometimes (2 in
 * 100) never ends: its status does not come back. Retries are off; who wants them decides above.
 *  - A read without a message means half-close or cancellation; only
 *    grpc_call_failed_before_recv_message() tells them apart.
 *  - A message is looked at when all of it is here, and unpacked without a limit (bound.c).
 *  - The library aborts when malloc() fails; only our own allocations fail softly.
 */
#include <dlfcn.h>
#include <grpc/support/log.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/grpc/internal.h"
#include "base/log.h"

#ifdef __SANITIZE_THREAD__
/* The library is not instrumented: tell the sanitizer that a tag crosses it in order. */
void __tsan_acquire(void *addr);
void __tsan_release(void *addr);
#else
#define __tsan_acquire(addr) ((void)(addr))
#define __tsan_release(addr) ((void)(addr))
#endif

/*
 * Debian's Abseil is built without NDEBUG: each of its mutexes keeps a graph of lock orders, a
 * tenth of what a call costs. A C++ function turns that off; it is asked for by its name, which
 * depends on the inline namespace of the build. Not found: calls cost that tenth more, nothing else
 * changes.
 */
static void stop_deadlock_detection(void)
{
    static const char *const names[] = {
        "_ZN4absl7debian329SetMutexDeadlockDetectionModeENS0_15OnDeadlockCycleE",
        "_ZN4absl12lts_2022062329SetMutexDeadlockDetectionModeENS0_15OnDeadlockCycleE",
        "_ZN4absl12lts_2023080229SetMutexDeadlockDetectionModeENS0_15OnDeadlockCycleE",
        "_ZN4absl29SetMutexDeadlockDetectionModeENS_15OnDeadlockCycleE",
    };
    union {
        void *found;
        void (*set_mode)(int mode);
    } symbol = {NULL};

    for (size_t i = 0; symbol.found == NULL && i < sizeof(names) / sizeof(names[0]); i++)
        symbol.found = dlsym(RTLD_DEFAULT, names[i]);
    if (symbol.found != NULL)
        symbol.set_mode(0 /* OnDeadlockCycle::kIgnore */);
}

/* Library messages are hints for debugging: what matters comes back as a status, but for callers
 * that got no further than TLS. */
static void on_library_log(gpr_log_func_args *args)
{
    mb_debug("grpc", "%s", args->message);
    mb_grpc_refused_handshake(args->file, args->message);
    mb_grpc_deaf_heard(args->file, args->message);
}

/* ---- tags ---- */

static void push_finished(struct mb_grpc *g, struct mb_grpc_tag *tag)
{
    int was_empty;

    tag->next = NULL;
    pthread_mutex_lock(&g->lock);
    was_empty = g->finished_head == NULL;
    if (was_empty)
        g->finished_head = tag;
    else
        g->finished_tail->next = tag;
    g->finished_tail = tag;
    pthread_mutex_unlock(&g->lock);
    if (was_empty)
        uv_async_send(&g->async);
}

/* The poller's: returns when the loop has run out of finished tags. */
static void hand_over(struct mb_grpc *g, struct mb_grpc_tag *tag)
{
    pthread_mutex_lock(&g->lock);
    g->loop_has_queue = 1;
    pthread_mutex_unlock(&g->lock);
    push_finished(g, tag);
    pthread_mutex_lock(&g->lock);
    while (g->loop_has_queue)
        pthread_cond_wait(&g->given_back, &g->lock);
    pthread_mutex_unlock(&g->lock);
}

static void *run_poller(void *arg)
{
    struct mb_grpc *g = arg;

    for (;;) {
        grpc_event ev = grpc_completion_queue_next(g->cq, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
        struct mb_grpc_tag *tag = ev.tag;

        if (ev.type == GRPC_QUEUE_SHUTDOWN)
            break;
        if (ev.type != GRPC_OP_COMPLETE)
            continue;
        __tsan_acquire(tag);
        tag->ok = ev.success;
        hand_over(g, tag);
    }
    pthread_mutex_lock(&g->lock);
    g->poller_ended = 1;
    pthread_mutex_unlock(&g->lock);
    uv_async_send(&g->async);
    return NULL;
}

void mb_grpc_tag_start(struct mb_grpc *g, struct mb_grpc_tag *tag,
                       void (*done)(struct mb_grpc_tag *tag, int ok))
{
    tag->done = done;
    g->n_ops++;
    __tsan_release(tag);
}

void mb_grpc_tag_drop(struct mb_grpc *g)
{
    g->n_ops--;
}

int mb_grpc_batch(struct mb_grpc *g, grpc_call *call, const grpc_op *ops, size_t n_ops,
                  struct mb_grpc_tag *tag, void (*done)(struct mb_grpc_tag *tag, int ok))
{
    grpc_call_error e;

    mb_grpc_tag_start(g, tag, done);
    e = grpc_call_start_batch(call, ops, n_ops, tag, NULL);
    if (e == GRPC_CALL_OK)
        return 0;
    mb_grpc_tag_drop(g);
    mb_error("grpc", "the library refused a batch: %s", grpc_call_error_to_string(e));
    return MB_ESTATE;
}

void mb_grpc_defer(struct mb_grpc *g, struct mb_grpc_tag *tag,
                   void (*done)(struct mb_grpc_tag *tag, int ok))
{
    mb_grpc_tag_start(g, tag, done);
    tag->ok = 1;
    push_finished(g, tag);
}

/* ---- the end ---- */

static void on_handle_closed(uv_handle_t *handle)
{
    struct mb_grpc *g = handle->data;

    if (--g->n_handles > 0)
        return;
    while (g->servers.next != &g->servers)
        mb_grpc_server_free(MB_GRPC_ENTRY(g->servers.next, struct mb_grpc_server, link));
    while (g->channels.next != &g->channels)
        mb_grpc_channel_free(MB_GRPC_ENTRY(g->channels.next, struct mb_grpc_channel, link));
    g->stopped_cb(g->stopped_arg);
}

static void finish_stop(struct mb_grpc *g)
{
    pthread_join(g->poller, NULL);
    grpc_completion_queue_destroy(g->cq);
    g->cq = NULL;
    mb_grpc_deaf_forget(g);
    uv_close((uv_handle_t *)&g->async, on_handle_closed);
    uv_close((uv_handle_t *)&g->timer, on_handle_closed);
    uv_close((uv_handle_t *)&g->turn, on_handle_closed);
    uv_close((uv_handle_t *)&g->before_wait, on_handle_closed);
}

static void drain_if_idle(struct mb_grpc *g)
{
    if (!g->stopping || g->draining || g->n_ops > 0)
        return;
    g->draining = 1;
    grpc_completion_queue_shutdown(g->cq);
}

/* Runs what the queue has, without waiting. Returns how many. */
static int run_turn(struct mb_grpc *g)
{
    int n = 0;

    while (n < MB_GRPC_TURN_TAGS) {
        grpc_event ev = grpc_completion_queue_next(g->cq, gpr_inf_past(GPR_CLOCK_REALTIME), NULL);
        struct mb_grpc_tag *tag = ev.tag;

        if (ev.type != GRPC_OP_COMPLETE)
            break;
        __tsan_acquire(tag);
        n++;
        g->n_ops--;
        tag->done(tag, ev.success);
    }
    return n;
}

static void on_turn(uv_idle_t *turn)
{
    struct mb_grpc *g = turn->data;

    if (run_turn(g) > 0)
        return;
    drain_if_idle(g);
    uv_idle_stop(turn);
    pthread_mutex_lock(&g->lock);
    g->loop_has_queue = 0;
    pthread_cond_signal(&g->given_back);
    pthread_mutex_unlock(&g->lock);
}

static void on_async(uv_async_t *async)
{
    struct mb_grpc *g = async->data;
    struct mb_grpc_tag *tag;
    int poller_ended, has_queue;

    mb_grpc_deaf_tell(g);
    pthread_mutex_lock(&g->lock);
    tag = g->finished_head;
    g->finished_head = NULL;
    g->finished_tail = NULL;
    poller_ended = g->poller_ended;
    has_queue = g->loop_has_queue;
    pthread_mutex_unlock(&g->lock);
    while (tag != NULL) {
        struct mb_grpc_tag *next = tag->next; /* done() may free the tag's owner */

        g->n_ops--;
        tag->done(tag, tag->ok);
        tag = next;
    }
    if (poller_ended) {
        finish_stop(g);
    } else if (has_queue) {
        if (uv_is_active((uv_handle_t *)&g->turn))
            return; /* woken by a deferred tag: this turn of the loop has had its share */
        run_turn(g);
        uv_idle_start(&g->turn, on_turn);
    } else {
        drain_if_idle(g);
    }
}

void mb_grpc_stop(struct mb_grpc *g, mb_grpc_stopped_cb stopped_cb, void *arg)
{
    if (g->stopping)
        return;
    g->stopping = 1;
    g->stopped_cb = stopped_cb;
    g->stopped_arg = arg;
    uv_timer_stop(&g->timer);
    for (struct mb_grpc_link *l = g->servers.next; l != &g->servers; l = l->next)
        mb_grpc_server_shutdown(MB_GRPC_ENTRY(l, struct mb_grpc_server, link));
    mb_grpc_calls_cancel(g, NULL);
    mb_grpc_streams_cancel(g, NULL);
    for (struct mb_grpc_link *l = g->channels.next; l != &g->channels; l = l->next) {
        mb_grpc_fault_close(MB_GRPC_ENTRY(l, struct mb_grpc_channel, link));
        mb_grpc_channel_settle(MB_GRPC_ENTRY(l, struct mb_grpc_channel, link));
    }
    /* Not drain_if_idle(): the caller may be a callback of a server or channel. */
    uv_async_send(&g->async);
}

/* ---- deadlines of served requests ---- */

static void on_timer(uv_timer_t *timer)
{
    struct mb_grpc *g = timer->data;
    uint64_t now_ms = uv_now(g->loop);

    for (struct mb_grpc_link *l = g->servers.next; l != &g->servers; l = l->next)
        mb_grpc_server_expire(MB_GRPC_ENTRY(l, struct mb_grpc_server, link), now_ms);
    mb_grpc_arm_timer(g);
}

void mb_grpc_arm_timer(struct mb_grpc *g)
{
    uint64_t earliest_ms = UINT64_MAX;
    uint64_t now_ms = uv_now(g->loop);

    if (g->stopping)
        return;
    for (struct mb_grpc_link *l = g->servers.next; l != &g->servers; l = l->next) {
        uint64_t at_ms =
            mb_grpc_server_next_deadline(MB_GRPC_ENTRY(l, struct mb_grpc_server, link));

        if (at_ms < earliest_ms)
            earliest_ms = at_ms;
    }
    if (earliest_ms == UINT64_MAX)
        uv_timer_stop(&g->timer);
    else
        uv_timer_start(&g->timer, on_timer, earliest_ms > now_ms ? earliest_ms - now_ms : 0, 0);
}

/* ---- creation ---- */

static void on_failed_create_closed(uv_handle_t *handle)
{
    mb_free(handle->data);
}

int mb_grpc_create(uv_loop_t *loop, struct mb_grpc **out, struct mb_err *err)
{
    struct mb_grpc *g = mb_calloc(1, sizeof(*g));
    int rc;

    if (g == NULL)
        return mb_err_set(err, MB_ENOMEM, "gRPC runtime: out of memory");
    g->loop = loop;
    mb_grpc_link_init(&g->channels);
    mb_grpc_link_init(&g->calls);
    mb_grpc_link_init(&g->streams);
    mb_grpc_link_init(&g->servers);
    rc = uv_async_init(loop, &g->async, on_async);
    if (rc != 0) {
        mb_free(g);
        return mb_err_sys(err, -rc, "gRPC runtime: wake-up handle");
    }
    g->async.data = g;
    gpr_set_log_function(on_library_log);
    stop_deadlock_detection();
    grpc_init();
    g->cq = grpc_completion_queue_create_for_next(NULL);
    pthread_mutex_init(&g->lock, NULL);
    pthread_cond_init(&g->given_back, NULL);
    rc = pthread_create(&g->poller, NULL, run_poller, g);
    if (rc != 0) {
        grpc_completion_queue_shutdown(g->cq);
        grpc_completion_queue_destroy(g->cq);
        grpc_shutdown_blocking();
        pthread_mutex_destroy(&g->lock);
        pthread_cond_destroy(&g->given_back);
        uv_close((uv_handle_t *)&g->async, on_failed_create_closed);
        return mb_err_sys(err, rc, "gRPC runtime: poller thread");
    }
    uv_timer_init(loop, &g->timer);
    g->timer.data = g;
    uv_idle_init(loop, &g->turn);
    g->turn.data = g;
    uv_prepare_init(loop, &g->before_wait);
    g->before_wait.data = g;
    g->n_handles = 4;
    *out = g;
    return 0;
}

void mb_grpc_secure(struct mb_grpc *g, struct mb_grpc_tls *tls)
{
    mb_grpc_tls_free(g->tls);
    g->tls = tls;
    gpr_set_log_verbosity(GPR_LOG_SEVERITY_DEBUG); /* see refused.c */
}

void mb_grpc_quiet_faults(struct mb_grpc *g)
{
    g->quiet_faults = 1;
}

void mb_grpc_count(const struct mb_grpc *g, struct mb_grpc_counts *out)
{
    *out = g->counts;
}

const struct mb_grpc_tls *mb_grpc_tls(const struct mb_grpc *g)
{
    return g->tls;
}

void mb_grpc_destroy(struct mb_grpc *g)
{
    if (g == NULL)
        return;
    mb_grpc_tls_free(g->tls);
    pthread_mutex_destroy(&g->lock);
    pthread_cond_destroy(&g->given_back);
    mb_free(g);
    grpc_shutdown_blocking();
}
