/*
 * xz through liblzma: streams one after the other, padding between them, checksums checked. Memory
 * is what the file asks for, at most MEMORY_MAX (xz -9 needs 65 MiB); a file made with a larger
 * dictionary is refused with that number.
 */
#include <lzma.h>
#include "base/alloc.h"
#include "worker/data/input/codec.h"

#define MEMORY_MAX (80ull << 20)

struct xz {
    lzma_stream stream;
    int is_done;
};

static int xz_create(struct mb_codec **out, struct mb_err *err)
{
    static const lzma_stream init = LZMA_STREAM_INIT;
    struct xz *x = mb_calloc(1, sizeof(*x));

    if (x == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    x->stream = init;
    if (lzma_stream_decoder(&x->stream, MEMORY_MAX, LZMA_CONCATENATED) != LZMA_OK) {
        mb_free(x);
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    *out = (struct mb_codec *)x;
    return 0;
}

static int failed(struct xz *x, lzma_ret rc, struct mb_err *err)
{
    switch (rc) {
    case LZMA_MEM_ERROR:
        return mb_err_set(err, MB_ENOMEM, "xz: out of memory");
    case LZMA_MEMLIMIT_ERROR:
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "xz needs %llu MiB for this file's dictionary, at most %llu are allowed; "
                          "pipe it through xz -dc with --input -",
                          (unsigned long long)(lzma_memusage(&x->stream) >> 20), MEMORY_MAX >> 20);
    case LZMA_OPTIONS_ERROR:
        return mb_err_set(err, MB_EUNSUPPORTED, "xz: a filter that liblzma does not know");
    case LZMA_FORMAT_ERROR:
        return mb_err_set(err, MB_ECORRUPT, "damaged xz (no stream header where one should be)");
    default:
        return mb_err_set(err, MB_ECORRUPT, "damaged xz (%s)",
                          rc == LZMA_DATA_ERROR ? "invalid data or checksum" : "no progress");
    }
}

static int xz_step(struct mb_codec *c, struct mb_codec_io *io, struct mb_err *err)
{
    struct xz *x = (struct xz *)c;
    lzma_ret rc;

    if (x->is_done)
        return 1;
    x->stream.next_in = io->in;
    x->stream.avail_in = io->in_bytes;
    x->stream.next_out = io->out;
    x->stream.avail_out = io->out_bytes;
    rc = lzma_code(&x->stream, io->at_end ? LZMA_FINISH : LZMA_RUN);
    io->in = x->stream.next_in;
    io->in_bytes = x->stream.avail_in;
    io->out = x->stream.next_out;
    io->out_bytes = x->stream.avail_out;
    x->is_done = rc == LZMA_STREAM_END;
    /* Without progress twice; the caller sees that itself and knows that the file is cut. */
    if (rc == LZMA_BUF_ERROR)
        return 0;
    if (rc != LZMA_OK && rc != LZMA_STREAM_END)
        return failed(x, rc, err);
    return x->is_done;
}

static void xz_destroy(struct mb_codec *c)
{
    struct xz *x = (struct xz *)c;

    lzma_end(&x->stream);
    mb_free(x);
}

const struct mb_codec_ops mb_codec_xz = {"xz", ".xz", xz_create, xz_step, xz_destroy};
