/*
 * zstd through libzstd: frames one after the other, skippable ones too, checksums checked where a
 * frame has one. The window may have 128 MiB, as for the zstd program (--long); only then is that
 * much memory used.
 */
#include <zstd.h>
#include <zstd_errors.h>
#include "base/alloc.h"
#include "worker/data/input/codec.h"

struct zstd {
    ZSTD_DStream *stream;
    int in_frame;
};

static int zstd_create(struct mb_codec **out, struct mb_err *err)
{
    struct zstd *z = mb_calloc(1, sizeof(*z));

    if (z == NULL || (z->stream = ZSTD_createDStream()) == NULL) {
        mb_free(z);
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    *out = (struct mb_codec *)z;
    return 0;
}

static int failed(size_t rc, struct mb_err *err)
{
    switch (ZSTD_getErrorCode(rc)) {
    case ZSTD_error_memory_allocation:
        return mb_err_set(err, MB_ENOMEM, "zstd: out of memory");
    case ZSTD_error_frameParameter_windowTooLarge:
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "zstd: the window of this file is larger than 128 MiB; pipe it through "
                          "zstd -dc --long=31 with --input -");
    case ZSTD_error_dictionary_wrong:
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "zstd: made with a dictionary; pipe it through zstd -dc -D DICTIONARY "
                          "with --input -");
    case ZSTD_error_checksum_wrong:
        return mb_err_set(err, MB_ECORRUPT, "damaged zstd (its checksum is wrong)");
    case ZSTD_error_prefix_unknown:
        return mb_err_set(err, MB_ECORRUPT, "damaged zstd (no frame header where one should be)");
    default:
        return mb_err_set(err, MB_ECORRUPT, "damaged zstd (%s)", ZSTD_getErrorName(rc));
    }
}

static int zstd_step(struct mb_codec *c, struct mb_codec_io *io, struct mb_err *err)
{
    struct zstd *z = (struct zstd *)c;
    ZSTD_inBuffer in = {io->in, io->in_bytes, 0};
    ZSTD_outBuffer out = {io->out, io->out_bytes, 0};
    size_t rc;

    if (!z->in_frame && io->in_bytes == 0)
        return 1;
    rc = ZSTD_decompressStream(z->stream, &out, &in);
    if (ZSTD_isError(rc))
        return failed(rc, err);
    io->in += in.pos;
    io->in_bytes -= in.pos;
    io->out += out.pos;
    io->out_bytes -= out.pos;
    z->in_frame = rc != 0;
    return !z->in_frame;
}

static void zstd_destroy(struct mb_codec *c)
{
    struct zstd *z = (struct zstd *)c;

    ZSTD_freeDStream(z->stream);
    mb_free(z);
}

const struct mb_codec_ops mb_codec_zstd = {"zstd", ".zst", zstd_create, zstd_step, zstd_destroy};
