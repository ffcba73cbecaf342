/*
 * Collectives by NCCL.
 *  1. The library is opened at the first use, by its name, as the loader finds it
 *     (LD_LIBRARY_PATH), then where packages put it; it stays open until the process ends, since it
 *     has threads. A failure names what was looked for, or the version that is too old.
 *  2. A thread of the group's own (launcher.h) makes the calls that may wait for a peer: a peer
 * that never comes is the caller's to notice. The communicator blocks, since one that does not has
 *     NCCL start a thread for each operation, which costs more than a small operation.
 *  3. start: the group's stream waits for what is on the compute stream, then the thread enqueues
 *     the operation and an event that marks its end. poll() asks whether the thread is done with
 *     that, and the events in order; join() lets the compute stream wait for one of them.
 *  4. destroy: finalize, which waits for peers that have agreed to end; after a failure abort, on a
 *     thread of its own, which ends kernels that wait for a peer. A thread that does not come back
 *     then keeps what it uses until the process ends, as it soon does.
 *  NCCL's own variables (NCCL_SOCKET_IFNAME, NCCL_DEBUG, ...) are read by it as ever.
 */
#include <dlfcn.h>
#include <nccl.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "worker/kernels/cuda/cuda.h"
#include "worker/kernels/launcher.h"

enum {
    OLDEST = NCCL_VERSION(2, 18, 0),
    FINALIZE_MS = 10 * 1000,
    COME_BACK_MS = 1000 /* what a call may still take after a failure, before and after the abort */
};

/* The functions used, as the header declares them. */
#define FUNCTIONS(F)                                                                               \
    F(GetVersion)                                                                                  \
    F(GetUniqueId)                                                                                 \
    F(GetErrorString)                                                                              \
    F(GetLastError)                                                                                \
    F(CommInitRankConfig)                                                                          \
    F(CommGetAsyncError)                                                                           \
    F(CommFinalize)                                                                                \
    F(CommDestroy)                                                                                 \
    F(CommAbort)                                                                                   \
    F(AllReduce)                                                                                   \
    F(Reduce)                                                                                      \
    F(ReduceScatter)                                                                               \
    F(AllGather)                                                                                   \
    F(Broadcast)                                                                                   \
    F(Send)                                                                                        \
    F(Recv)                                                                                        \
    F(GroupStart)                                                                                  \
    F(GroupEnd)

static struct {
    void *library;
    int version;
#define DECLARE(name) __typeof__(nccl##name) *name;
    FUNCTIONS(DECLARE)
#undef DECLARE
} nccl;

struct mb_group {
    struct mb_context *ctx;
    struct mb_launcher *launcher;
    ncclUniqueId id;
    uint32_t rank, world_size;
    /* The launcher's while it is busy: */
    ncclComm_t comm; /* NULL until all have met */
    struct mb_comm_op *ops;
    size_t n_ops, ops_capacity;
    struct mb_err failure; /* code 0: none */
    /* The caller's: */
    cudaStream_t stream;
    cudaEvent_t ready; /* the compute stream, at start() */
    cudaEvent_t done[MB_COLLECTIVE_IN_FLIGHT];
    uint64_t n_marked, n_done; /* operations whose event is recorded, has come */
    int is_starting;           /* an operation is not counted in n_marked yet */
};

/* ---- the library ---- */

static void *find_library(void)
{
    static const char *const NAMES[] = {"libnccl.so.2", "/usr/lib/x86_64-linux-gnu/libnccl.so.2",
                                        "/usr/lib64/libnccl.so.2",
                                        "/usr/local/cuda/lib64/libnccl.so.2"};
    void *library = NULL;
    for (size_t i = 0; i < sizeof(NAMES) / sizeof(NAMES[0]) && library == NULL; i++)
        library = dlopen(NAMES[i], RTLD_NOW | RTLD_LOCAL);
    return library;
}

static int look_up(void *library, struct mb_err *err)
{
    void *symbol;
#define LOOK_UP(name)                                                                              \
    symbol = dlsym(library, "nccl" #name);                                                         \
    if (symbol == NULL)                                                                            \
        return mb_err_set(err, MB_EUNSUPPORTED, "libnccl.so.2 has no nccl" #name);                 \
    memcpy(&nccl.name, &symbol, sizeof(symbol));
    FUNCTIONS(LOOK_UP)
#undef LOOK_UP
    return 0;
}

static void version_text(int version, char text[32])
{
    snprintf(text, 32, "NCCL %d.%d.%d", version / 10000, version / 100 % 100, version % 100);
}

static int check_version(struct mb_err *err)
{
    char have[32], want[32];
    ncclResult_t r = nccl.GetVersion(&nccl.version);
    if (r != ncclSuccess)
        return mb_err_set(err, MB_EUNSUPPORTED, "NCCL does not say its version (result %d)",
                          (int)r);
    version_text(nccl.version, have);
    version_text(OLDEST, want);
    return nccl.version >= OLDEST ? 0
                                  : mb_err_set(err, MB_EUNSUPPORTED,
                                               "%s is too old: %s or newer is needed", have, want);
}

static int open_library(struct mb_err *err)
{
    if (nccl.library != NULL)
        return 0;
    void *library = find_library();
    if (library == NULL)
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "libnccl.so.2 (NCCL) is neither in the library path nor where packages "
                          "put it; several GPUs need it");
    int rc = look_up(library, err);
    if (rc == 0)
        rc = check_version(err);
    if (rc == 0)
        nccl.library = library;
    else
        dlclose(library);
    return rc;
}

static int nccl_version(int *number, char text[32], struct mb_err *err)
{
    int rc = open_library(err);
    if (rc == 0) {
        *number = nccl.version;
        version_text(nccl.version, text);
    }
    return rc;
}

static int refuse(const struct mb_group *g, ncclResult_t r, struct mb_err *err)
{
    const char *detail = nccl.GetLastError(g != NULL ? g->comm : NULL);
    int code = r == ncclRemoteError || r == ncclSystemError ? MB_EUNAVAIL : MB_EIO;
    size_t n = detail != NULL ? strcspn(detail, "\n") : 0;
    return mb_err_set(err, code, "NCCL: %s%s%.*s", nccl.GetErrorString(r), n > 0 ? ": " : "",
                      (int)n, n > 0 ? detail : "");
}

static int refuse_cuda(cudaError_t e, struct mb_err *err)
{
    return mb_err_set(err, MB_EIO, "%s (CUDA error %d)", cudaGetErrorString(e), (int)e);
}

/* ---- a group ---- */

static int nccl_new_id(uint8_t id[MB_COLLECTIVE_ID_BYTES], struct mb_err *err)
{
    _Static_assert(sizeof(ncclUniqueId) == MB_COLLECTIVE_ID_BYTES, "an id is an ncclUniqueId");
    ncclUniqueId made;
    int rc = open_library(err);
    if (rc != 0)
        return rc;
    ncclResult_t r = nccl.GetUniqueId(&made);
    if (r != ncclSuccess)
        return refuse(NULL, r, err);
    memcpy(id, &made, sizeof(made));
    return 0;
}

/* ---- what the launcher calls ---- */

static void keep(struct mb_group *g, ncclResult_t r)
{
    if (r != ncclSuccess)
        (void)refuse(g, r, &g->failure);
}

static void meet(void *arg)
{
    struct mb_group *g = arg;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm = NULL;
    cudaError_t e = cudaSetDevice(g->ctx->index); /* the thread's, for all its calls */
    if (e != cudaSuccess) {
        (void)refuse_cuda(e, &g->failure);
        return;
    }
    config.blocking = 1;
    keep(g, nccl.CommInitRankConfig(&comm, (int)g->world_size, g->id, (int)g->rank, &config));
    g->comm = g->failure.code == 0 ? comm : NULL;
}

static void finalize(void *arg)
{
    struct mb_group *g = arg;
    keep(g, nccl.CommFinalize(g->comm));
}

/* Bounded: peers have agreed to end, but may die in the middle of it. */
static int ends_well(struct mb_group *g)
{
    if (!mb_launcher_wait(g->launcher, FINALIZE_MS) || g->comm == NULL)
        return 0;
    mb_launcher_post(g->launcher, finalize, g);
    return mb_launcher_wait(g->launcher, FINALIZE_MS) && g->failure.code == 0;
}

static void abort_comm(void *arg)
{
    struct mb_group *g = arg;
    cudaSetDevice(g->ctx->index);
    nccl.CommAbort(g->comm);
}

/* A call that waits for a peer returns by the abort. One in which all meet has nothing on the
 * device that would have to be ended, and no communicator that could be. 0: the abort does not
 * return. */
static int end_comm(struct mb_group *g, int failed)
{
    if (!failed && ends_well(g)) {
        nccl.CommDestroy(g->comm);
        return 1;
    }
    (void)mb_launcher_wait(g->launcher, COME_BACK_MS);
    if (g->comm != NULL && !mb_launcher_call(abort_comm, g, MB_COLLECTIVE_END_MS))
        return 0;
    (void)mb_launcher_wait(g->launcher, COME_BACK_MS);
    return 1;
}

static int nccl_destroy(struct mb_group *g, int failed)
{
    if (g == NULL)
        return 1;
    cudaSetDevice(g->ctx->index);
    if (g->launcher != NULL) {
        if (!end_comm(g, failed))
            return 0; /* its thread has *g */
        if (!mb_launcher_destroy(g->launcher))
            return 1; /* its call has *g, but nothing on the device */
    }
    for (size_t i = 0; i < MB_COLLECTIVE_IN_FLIGHT; i++)
        if (g->done[i] != NULL)
            cudaEventDestroy(g->done[i]);
    if (g->ready != NULL)
        cudaEventDestroy(g->ready);
    if (g->stream != NULL)
        cudaStreamDestroy(g->stream);
    mb_free(g->ops);
    mb_free(g);
    return 1;
}

/* Its stream goes before the compute stream's: what it waits for is done, and others wait for it.
 */
static cudaError_t create_stream(struct mb_group *g)
{
    int least, greatest;
    cudaError_t e = cudaSetDevice(g->ctx->index);
    if (e == cudaSuccess)
        e = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    if (e == cudaSuccess)
        e = cudaStreamCreateWithPriority(&g->stream, cudaStreamNonBlocking, greatest);
    if (e == cudaSuccess)
        e = cudaEventCreateWithFlags(&g->ready, cudaEventDisableTiming);
    for (size_t i = 0; i < MB_COLLECTIVE_IN_FLIGHT && e == cudaSuccess; i++)
        e = cudaEventCreateWithFlags(&g->done[i], cudaEventDisableTiming);
    return e;
}

static int nccl_create(struct mb_context *ctx, const uint8_t id[MB_COLLECTIVE_ID_BYTES],
                       uint32_t rank, uint32_t world_size, struct mb_group **out,
                       struct mb_err *err)
{
    int rc = open_library(err);
    if (rc != 0)
        return rc;
    struct mb_group *g = mb_calloc(1, sizeof(*g));
    if (g == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory creating a group of GPUs");
    g->ctx = ctx;
    g->rank = rank;
    g->world_size = world_size;
    memcpy(&g->id, id, sizeof(g->id));
    cudaError_t e = create_stream(g);
    rc = e != cudaSuccess ? refuse_cuda(e, err) : mb_launcher_create(&g->launcher, err);
    if (rc != 0) {
        (void)nccl_destroy(g, 1);
        return rc;
    }
    mb_launcher_post(g->launcher, meet, g);
    *out = g;
    return 0;
}

/* ---- operations ---- */

static ncclDataType_t type_of(enum mb_comm_type type)
{
    static const ncclDataType_t TYPES[] = {[MB_COMM_F32] = ncclFloat32,
                                           [MB_COMM_F64] = ncclFloat64,
                                           [MB_COMM_I64] = ncclInt64,
                                           [MB_COMM_BF16] = ncclBfloat16,
                                           [MB_COMM_F16] = ncclFloat16};
    return TYPES[type];
}

static size_t size_of(enum mb_comm_type type)
{
    return type == MB_COMM_F32 ? 4 : type == MB_COMM_BF16 || type == MB_COMM_F16 ? 2 : 8;
}

static ncclResult_t launch(struct mb_group *g, const struct mb_comm_op *op)
{
    const ncclDataType_t type = type_of(op->type);
    const ncclRedOp_t reduce = op->reduce == MB_COMM_MAX ? ncclMax : ncclSum;
    const size_t share = op->n / g->world_size;
    void *own = (char *)op->buf + g->rank * share * size_of(op->type);
    const int peer = (int)op->peer;
    switch (op->kind) {
    case MB_COMM_OP_ALLREDUCE:
        return nccl.AllReduce(op->buf, op->buf, op->n, type, reduce, g->comm, g->stream);
    case MB_COMM_OP_REDUCE:
        return nccl.Reduce(op->buf, op->buf, op->n, type, reduce, peer, g->comm, g->stream);
    case MB_COMM_OP_REDUCE_SCATTER:
        return nccl.ReduceScatter(op->buf, own, share, type, reduce, g->comm, g->stream);
    case MB_COMM_OP_ALLGATHER:
        return nccl.AllGather(own, op->buf, share, type, g->comm, g->stream);
    case MB_COMM_OP_BROADCAST:
        return nccl.Broadcast(op->buf, op->buf, op->n, type, peer, g->comm, g->stream);
    case MB_COMM_OP_SEND:
        return nccl.Send(op->buf, op->n, type, peer, g->comm, g->stream);
    case MB_COMM_OP_RECV:
        return nccl.Recv(op->buf, op->n, type, peer, g->comm, g->stream);
    case MB_COMM_OP_BARRIER:
        break;
    }
    return ncclInvalidArgument;
}

/* What is between start and end begins at once. */
static ncclResult_t launch_all(struct mb_group *g)
{
    ncclResult_t r = nccl.GroupStart(), end;
    if (r != ncclSuccess)
        return r;
    for (size_t i = 0; i < g->n_ops && r == ncclSuccess; i++)
        r = launch(g, &g->ops[i]);
    end = nccl.GroupEnd();
    return r == ncclSuccess ? end : r;
}

/* On the launcher's thread. */
static void enqueue(void *arg)
{
    struct mb_group *g = arg;
    keep(g, g->n_ops == 1 ? launch(g, g->ops) : launch_all(g));
    if (g->failure.code != 0)
        return;
    cudaError_t e = cudaEventRecord(g->done[g->n_marked % MB_COLLECTIVE_IN_FLIGHT], g->stream);
    if (e != cudaSuccess)
        (void)refuse_cuda(e, &g->failure);
}

static int keep_ops(struct mb_group *g, const struct mb_comm_op *ops, size_t n_ops,
                    struct mb_err *err)
{
    if (n_ops > g->ops_capacity) {
        mb_free(g->ops);
        g->ops = mb_calloc(n_ops, sizeof(*ops));
        g->ops_capacity = g->ops != NULL ? n_ops : 0;
    }
    if (g->ops == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory for operations between GPUs");
    memcpy(g->ops, ops, n_ops * sizeof(*ops));
    g->n_ops = n_ops;
    return 0;
}

static int nccl_start(struct mb_group *g, struct mb_stream *after, const struct mb_comm_op *ops,
                      size_t n_ops, struct mb_err *err)
{
    int rc = keep_ops(g, ops, n_ops, err);
    if (rc != 0)
        return rc;
    cudaError_t e = cudaEventRecord(g->ready, after->cuda);
    if (e == cudaSuccess)
        e = cudaStreamWaitEvent(g->stream, g->ready, 0);
    if (e != cudaSuccess)
        return refuse_cuda(e, err);
    g->is_starting = 1;
    mb_launcher_post(g->launcher, enqueue, g);
    return 0;
}

static int count_done(struct mb_group *g, struct mb_err *err)
{
    while (g->n_done < g->n_marked) {
        cudaError_t e = cudaEventQuery(g->done[g->n_done % MB_COLLECTIVE_IN_FLIGHT]);
        if (e == cudaErrorNotReady) {
            cudaGetLastError(); /* it would look like the next launch's */
            return 0;
        }
        if (e != cudaSuccess)
            return refuse_cuda(e, err);
        g->n_done++;
    }
    return 0;
}

/* While the launcher is idle: what it met with, and what became of operations behind its back. */
static int check(struct mb_group *g, struct mb_err *err)
{
    ncclResult_t state = ncclSuccess;
    if (g->failure.code != 0)
        return mb_err_set(err, g->failure.code, "%s", g->failure.text);
    ncclResult_t r = nccl.CommGetAsyncError(g->comm, &state);
    if (r == ncclSuccess)
        r = state;
    return r == ncclSuccess || r == ncclInProgress ? 0 : refuse(g, r, err);
}

static int nccl_poll(struct mb_group *g, uint64_t *n_done, struct mb_err *err)
{
    const int is_idle = mb_launcher_is_idle(g->launcher);
    int rc = is_idle ? check(g, err) : 0;
    if (rc != 0)
        return rc;
    if (is_idle && g->is_starting) {
        g->n_marked++;
        g->is_starting = 0;
    }
    rc = count_done(g, err);
    *n_done = g->n_done;
    return rc != 0 ? rc : !is_idle;
}

/* An event that was recorded anew since stands for a later operation, which is as well. */
static int nccl_join(struct mb_group *g, struct mb_stream *stream, uint64_t n, struct mb_err *err)
{
    cudaError_t e =
        cudaStreamWaitEvent(stream->cuda, g->done[(n - 1) % MB_COLLECTIVE_IN_FLIGHT], 0);
    return e == cudaSuccess ? 0 : refuse_cuda(e, err);
}

const struct mb_collectives mb_cuda_collectives = {
    .version = nccl_version,
    .new_id = nccl_new_id,
    .create = nccl_create,
    .start = nccl_start,
    .poll = nccl_poll,
    .join = nccl_join,
    .destroy = nccl_destroy,
};
