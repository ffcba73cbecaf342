/*
 * Context, memory and stream of the CPU backend. Operations run during the call, which the contract
 * allows; what fails is kept in the stream until synchronize(), as on a device that runs later.
 *  - alloc() gives zeroed memory on a 64-byte boundary and remembers it, so that close() leaves
 * nothing.
 *  - alloc() refuses at once what is larger than the machine; whether all that a trainer takes fits
 * is asked before (worker/memory_plan.h).
 *  - The first failure of a stream wins: what follows is usually its consequence.
 */
#include "worker/kernels/cpu/cpu.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/str.h"

enum { ALIGN = 64 };

int mb_cpu_open(int device_index, struct mb_context **out, struct mb_err *err)
{
    if (device_index != 0)
        return mb_err_set(err, MB_EINVAL, "device %d does not exist: the CPU is device 0",
                          device_index);
    const char *isa;
    int rc = mb_cpu_isa(&isa, err);
    if (rc != 0)
        return rc;
    struct mb_context *ctx = mb_calloc(1, sizeof(*ctx));
    if (ctx == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory opening the device");
    rc = mb_blas_open(&ctx->blas, err);
    if (rc != 0) {
        mb_free(ctx);
        return rc;
    }
    snprintf(ctx->describe, sizeof(ctx->describe),
             "CPU, %s operations, OpenBLAS %s kernels, %d thread%s", isa, ctx->blas.corename(),
             ctx->blas.n_threads, ctx->blas.n_threads == 1 ? "" : "s");
    *out = ctx;
    return 0;
}

void mb_cpu_close(struct mb_context *ctx)
{
    if (ctx == NULL)
        return;
    mb_blocks_close(&ctx->blocks, mb_free);
    mb_blas_close(&ctx->blas);
    mb_free(ctx);
}

const char *mb_cpu_describe(struct mb_context *ctx)
{
    return ctx->describe;
}

static void *align_up(void *p)
{
    uintptr_t v = (uintptr_t)p;
    return (char *)p + (ALIGN - v % ALIGN) % ALIGN;
}

/* The kernel promises more memory than there is and kills whoever takes it: refuse what cannot fit.
 */
static int check_size(size_t size_bytes, struct mb_err *err)
{
    char size[16], have[16];
    size_t machine_bytes = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    if (size_bytes <= machine_bytes)
        return 0;
    return mb_err_set(err, MB_ENOMEM, "%s are asked for, the machine has %s",
                      mb_human_bytes(size_bytes, size), mb_human_bytes(machine_bytes, have));
}

int mb_cpu_alloc(struct mb_context *ctx, size_t size_bytes, void **out, struct mb_err *err)
{
    int rc = mb_blocks_reserve(&ctx->blocks, size_bytes, err);
    if (rc == 0)
        rc = check_size(size_bytes, err);
    if (rc != 0)
        return rc;
    void *block = size_bytes <= SIZE_MAX - ALIGN ? mb_calloc(1, size_bytes + ALIGN) : NULL;
    if (block == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory allocating %zu bytes", size_bytes);
    *out = align_up(block);
    mb_blocks_add(&ctx->blocks, *out, block, size_bytes);
    return 0;
}

void mb_cpu_free(struct mb_context *ctx, void *p)
{
    mb_free(mb_blocks_take(&ctx->blocks, p));
}

void mb_cpu_allocated(struct mb_context *ctx, size_t *now_bytes, size_t *most_bytes,
                      size_t *n_blocks)
{
    *now_bytes = ctx->blocks.now_bytes;
    *most_bytes = ctx->blocks.most_bytes;
    *n_blocks = ctx->blocks.n;
}

int mb_cpu_stream_create(struct mb_context *ctx, struct mb_stream **out, struct mb_err *err)
{
    (void)ctx;
    *out = mb_calloc(1, sizeof(**out));
    return *out ? 0 : mb_err_set(err, MB_ENOMEM, "out of memory creating a stream");
}

void mb_cpu_stream_destroy(struct mb_context *ctx, struct mb_stream *stream)
{
    (void)ctx;
    mb_free(stream);
}

int mb_cpu_synchronize(struct mb_context *ctx, struct mb_stream *stream, struct mb_err *err)
{
    (void)ctx;
    int code = stream->err.code;
    if (code != 0) {
        mb_err_set(err, code, "%s", stream->err.text);
        mb_err_clear(&stream->err);
    }
    return code;
}

void mb_cpu_copy(struct mb_context *ctx, struct mb_stream *stream, void *dst, const void *src,
                 size_t size_bytes)
{
    (void)ctx;
    (void)stream;
    memcpy(dst, src, size_bytes);
}

void mb_cpu_zero(struct mb_context *ctx, struct mb_stream *stream, void *dst, size_t size_bytes)
{
    (void)ctx;
    (void)stream;
    memset(dst, 0, size_bytes);
}

float *mb_cpu_room(struct mb_context *ctx, struct mb_stream *stream, size_t n)
{
    struct mb_err err = {0};
    void *room = NULL;
    if (ctx->room != NULL && n <= ctx->n_room)
        return ctx->room;
    mb_cpu_free(ctx, ctx->room);
    ctx->room = NULL;
    ctx->n_room = 0;
    if (mb_cpu_alloc(ctx, n * sizeof(float), &room, &err) != 0) {
        if (stream->err.code == 0) {
            stream->err = err;
            mb_err_wrap(&stream->err, "an operation's operands in fp32");
        }
        return NULL;
    }
    ctx->room = room;
    ctx->n_room = n;
    return ctx->room;
}

int mb_cpu_check_ids(struct mb_stream *stream, const char *what, const int32_t *id, size_t n,
                     size_t vocab)
{
    for (size_t i = 0; i < n; i++) {
        if (id[i] >= 0 && (size_t)id[i] < vocab)
            continue;
        if (stream->err.code == 0)
            mb_err_set(&stream->err, MB_EINVAL, "%s %d at row %zu is outside the vocabulary of %zu",
                       what, id[i], i, vocab);
        return MB_EINVAL;
    }
    return 0;
}
