/*
 * Collectives by NCCL.
 *  1. The library is opened at the first use, by its name, as the loader finds it
 *     (LD_LIBRARY_PATH), then where packages put it; it stays open until the process ends, since it
 *     has threads. A failure names what was looked for, or the version that is too old.
 *  2. create: the communicator is begun without blocking, so that a peer that never comes is the
 *     caller's to notice; poll() asks NCCL whether it is done with that, as after every operation.
 *  3. start: the group's stream waits for what is on the compute stream, then NCCL enqueues. When
 *     NCCL says that it has, an event marks the operation's end; poll() asks the events in order,
 *     and join() lets the compute stream wait for the last of them.
 *  4. destroy: finalize, which waits for peers that have agreed to end; after a failure abort,
 * which ends kernels that wait for a peer. NCCL's own variables (NCCL_SOCKET_IFNAME, NCCL_DEBUG,
 * ...) are read by it as ever.
 */
#include <dlfcn.h>
#include <nccl.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "worker/kernels/cuda/cuda.h"

enum {
    OLDEST = NCCL_VERSION(2, 18, 0), /* the first whose communicators don't block in any call */
    FINALIZE_MS = 10 * 1000,
    FINALIZE_SLEEP_NS = 1000 * 1000
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
    ncclComm_t comm;
    uint32_t rank, world_size;
    cudaStream_t stream;
    cudaEvent_t ready; /* the compute stream, at start() */
    cudaEvent_t done[MB_COLLECTIVE_IN_FLIGHT];
    uint64_t n_marked, n_done; /* operations whose event is recorded, has come */
    int is_starting;           /* an operation has no event yet */
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

/* How far NCCL has come with what it was last asked for: ncclInProgress, or its result. */
static ncclResult_t progress(const struct mb_group *g)
{
    ncclResult_t state = ncclInProgress;
    ncclResult_t r = nccl.CommGetAsyncError(g->comm, &state);
    return r != ncclSuccess ? r : state;
}

/* Bounded: peers have agreed to end, but may die in the middle of it. */
static void finalize(struct mb_group *g)
{
    const struct timespec t = {.tv_nsec = FINALIZE_SLEEP_NS};
    uint64_t deadline_ms = mb_mono_ms() + FINALIZE_MS;
    ncclResult_t r = nccl.CommFinalize(g->comm);
    if (r == ncclSuccess)
        r = progress(g);
    while (r == ncclInProgress && mb_mono_ms() < deadline_ms) {
        nanosleep(&t, NULL);
        r = progress(g);
    }
    if (r == ncclSuccess)
        nccl.CommDestroy(g->comm);
    else
        nccl.CommAbort(g->comm); /* what has failed would be waited for by the other */
}

static void nccl_destroy(struct mb_group *g, int failed)
{
    if (g == NULL)
        return;
    cudaSetDevice(g->ctx->index);
    if (g->comm != NULL && failed)
        nccl.CommAbort(g->comm);
    else if (g->comm != NULL)
        finalize(g);
    for (size_t i = 0; i < MB_COLLECTIVE_IN_FLIGHT; i++)
        if (g->done[i] != NULL)
            cudaEventDestroy(g->done[i]);
    if (g->ready != NULL)
        cudaEventDestroy(g->ready);
    if (g->stream != NULL)
        cudaStreamDestroy(g->stream);
    mb_free(g);
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
    ncclUniqueId unique;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    int rc = open_library(err);
    if (rc != 0)
        return rc;
    struct mb_group *g = mb_calloc(1, sizeof(*g));
    if (g == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory creating a group of GPUs");
    g->ctx = ctx;
    g->rank = rank;
    g->world_size = world_size;
    memcpy(&unique, id, sizeof(unique));
    config.blocking = 0;
    cudaError_t e = create_stream(g);
    if (e != cudaSuccess) {
        rc = refuse_cuda(e, err);
    } else {
        ncclResult_t r =
            nccl.CommInitRankConfig(&g->comm, (int)world_size, unique, (int)rank, &config);
        rc = r == ncclSuccess || r == ncclInProgress ? 0 : refuse(NULL, r, err);
    }
    if (rc != 0) {
        nccl_destroy(g, 1);
        return rc;
    }
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

/* What is between start and end begins at once. A communicator that does not block says of each
 * part that it is in progress, and of an end without its parts nothing. */
static ncclResult_t launch_all(struct mb_group *g, const struct mb_comm_op *ops, size_t n_ops)
{
    ncclResult_t r = nccl.GroupStart(), end;
    if (r != ncclSuccess)
        return r;
    for (size_t i = 0; i < n_ops && (r == ncclSuccess || r == ncclInProgress); i++)
        r = launch(g, &ops[i]);
    end = nccl.GroupEnd();
    return r == ncclSuccess || r == ncclInProgress ? end : r;
}

static int nccl_start(struct mb_group *g, struct mb_stream *after, const struct mb_comm_op *ops,
                      size_t n_ops, struct mb_err *err)
{
    cudaError_t e = cudaEventRecord(g->ready, after->cuda);
    if (e == cudaSuccess)
        e = cudaStreamWaitEvent(g->stream, g->ready, 0);
    if (e != cudaSuccess)
        return refuse_cuda(e, err);
    ncclResult_t r = n_ops == 1 ? launch(g, ops) : launch_all(g, ops, n_ops);
    if (r != ncclSuccess && r != ncclInProgress)
        return refuse(g, r, err);
    g->is_starting = 1;
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

static int nccl_poll(struct mb_group *g, uint64_t *n_done, struct mb_err *err)
{
    ncclResult_t r = progress(g);
    if (r != ncclSuccess && r != ncclInProgress)
        return refuse(g, r, err);
    if (r == ncclSuccess && g->is_starting) {
        cudaError_t e = cudaEventRecord(g->done[g->n_marked % MB_COLLECTIVE_IN_FLIGHT], g->stream);
        if (e != cudaSuccess)
            return refuse_cuda(e, err);
        g->n_marked++;
        g->is_starting = 0;
    }
    int rc = count_done(g, err);
    *n_done = g->n_done;
    return rc != 0 ? rc : r == ncclInProgress;
}

static int nccl_join(struct mb_group *g, struct mb_stream *stream, struct mb_err *err)
{
    if (g->n_marked == 0)
        return 0;
    cudaError_t e =
        cudaStreamWaitEvent(stream->cuda, g->done[(g->n_marked - 1) % MB_COLLECTIVE_IN_FLIGHT], 0);
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
