/*
 * A stream read through a codec.
 *
 * 1. The first read takes the first bytes and finds the codec.
 * 2. Plain: what was taken is handed out, then reads go straight to the raw stream.
 * 3. Compressed: raw bytes come in blocks; each read steps the codec until it makes something.
 * 4. The raw stream ends: fine where the archive may end, else it is cut (MB_ECORRUPT).
 */
#include <string.h>
#include "base/alloc.h"
#include "worker/data/input/codec.h"
#include "worker/data/input/stream.h"

enum { RAW_BYTES = 256 * 1024 };

struct decode {
    struct mb_stream base;
    struct mb_stream *raw;
    const char *name; /* borrowed */
    const struct mb_codec_ops *ops;
    struct mb_codec *codec;
    uint8_t *block;
    size_t at;
    size_t len;
    int is_known; /* the first bytes were looked at */
    int raw_ended;
    int may_end;
    int is_idle; /* the last step took and made nothing */
};

static void copy_counts(struct decode *d)
{
    atomic_store(&d->base.done_bytes, atomic_load(&d->raw->done_bytes));
    atomic_store(&d->base.total_bytes, atomic_load(&d->raw->total_bytes));
}

static int refill(struct decode *d, struct mb_err *err)
{
    ssize_t got;

    if (d->at > 0)
        memmove(d->block, d->block + d->at, d->len - d->at);
    d->len -= d->at;
    d->at = 0;
    if (d->len == RAW_BYTES)
        return mb_err_set(err, MB_ECORRUPT, "damaged %s (no progress)", d->ops->name);
    got = d->raw->ops->read(d->raw, d->block + d->len, RAW_BYTES - d->len, err);
    copy_counts(d);
    if (got < 0)
        return (int)got;
    d->raw_ended = got == 0;
    d->len += (size_t)got;
    return 0;
}

static int look(struct decode *d, struct mb_err *err)
{
    int rc = 0;

    while (rc == 0 && d->len < MB_CODEC_MAGIC_BYTES && !d->raw_ended)
        rc = refill(d, err);
    if (rc == 0)
        rc = mb_codec_find(d->block, d->len, &d->ops, err);
    if (rc == 0)
        rc = mb_codec_check_name(d->name, d->len, d->ops, err);
    if (rc == 0 && d->ops != NULL)
        rc = d->ops->create(&d->codec, err);
    d->is_known = rc == 0;
    return rc;
}

static ssize_t read_plain(struct decode *d, void *p, size_t n, struct mb_err *err)
{
    size_t have = d->len - d->at;
    ssize_t got;

    if (have > 0) {
        if (have > n)
            have = n;
        memcpy(p, d->block + d->at, have);
        d->at += have;
        return (ssize_t)have;
    }
    if (d->raw_ended)
        return 0;
    got = d->raw->ops->read(d->raw, p, n, err);
    copy_counts(d);
    d->raw_ended = got == 0;
    return got;
}

static ssize_t read_packed(struct decode *d, void *p, size_t n, struct mb_err *err)
{
    struct mb_codec_io io = {.out = p, .out_bytes = n};

    while (io.out_bytes == n) {
        size_t in_bytes;
        int rc;

        if ((d->at == d->len || d->is_idle) && !d->raw_ended) {
            rc = refill(d, err);
            if (rc != 0)
                return rc;
        }
        in_bytes = d->len - d->at;
        io.in = d->block + d->at;
        io.in_bytes = in_bytes;
        io.at_end = d->raw_ended;
        rc = d->ops->step(d->codec, &io, err);
        if (rc < 0)
            return rc;
        d->may_end = rc;
        d->at = d->len - io.in_bytes;
        d->is_idle = io.in_bytes == in_bytes && io.out_bytes == n;
        if (!d->is_idle || !d->raw_ended)
            continue;
        if (d->may_end && io.in_bytes == 0)
            return 0;
        return mb_err_set(err, MB_ECORRUPT, "damaged or cut %s (it ends too early); fetch it again",
                          d->ops->name);
    }
    return (ssize_t)(n - io.out_bytes);
}

static ssize_t decode_read(struct mb_stream *s, void *p, size_t n, struct mb_err *err)
{
    struct decode *d = (struct decode *)s;

    if (!d->is_known) {
        int rc = look(d, err);
        if (rc != 0)
            return rc;
    }
    return d->ops == NULL ? read_plain(d, p, n, err) : read_packed(d, p, n, err);
}

/* Only of plain bytes, and if the raw stream can. */
static int decode_seek(struct mb_stream *s, uint64_t offset, struct mb_err *err)
{
    struct decode *d = (struct decode *)s;
    int rc = d->is_known ? 0 : look(d, err);

    if (rc == 0 && (d->ops != NULL || d->raw->ops->seek == NULL))
        return MB_EUNSUPPORTED;
    if (rc == 0)
        rc = d->raw->ops->seek(d->raw, offset, err);
    if (rc != 0)
        return rc;
    d->at = d->len = 0;
    d->raw_ended = 0;
    return 0;
}

static void decode_cancel(struct mb_stream *s)
{
    struct decode *d = (struct decode *)s;

    d->raw->ops->cancel(d->raw);
}

static void decode_close(struct mb_stream *s)
{
    struct decode *d = (struct decode *)s;

    d->raw->ops->close(d->raw);
    if (d->codec != NULL)
        d->ops->destroy(d->codec);
    mb_free(d->block);
    mb_free(d);
}

int mb_stream_decode(struct mb_stream *raw, const char *name, struct mb_stream **out,
                     struct mb_err *err)
{
    static const struct mb_stream_ops ops = {decode_read, decode_seek, decode_cancel, decode_close};
    struct decode *d = mb_calloc(1, sizeof(*d));

    if (d == NULL || (d->block = mb_alloc(RAW_BYTES)) == NULL) {
        mb_free(d);
        raw->ops->close(raw);
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    d->base.ops = &ops;
    d->raw = raw;
    d->name = name;
    copy_counts(d);
    *out = &d->base;
    return 0;
}
