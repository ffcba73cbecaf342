/* Halves pass through the window, piece by piece; the stream keeps the pieces in order. */
#include "worker/kernels/master.h"

static size_t piece_of(size_t n)
{
    return n < MB_MASTER_WINDOW ? n : MB_MASTER_WINDOW;
}

void mb_master_copy_out(const struct mb_device *dev, const struct mb_master *w, size_t begin,
                        size_t n, float *host)
{
    if (w->whole != NULL) {
        dev->ops->copy_out(dev->ctx, dev->stream, host, w->whole + begin, n * sizeof(float));
        return;
    }
    for (size_t at = 0, k; at < n; at += k) {
        k = piece_of(n - at);
        dev->ops->join(dev->ctx, dev->stream, w->window, w->upper + begin + at,
                       w->lower + begin + at, k);
        dev->ops->copy_out(dev->ctx, dev->stream, host + at, w->window, k * sizeof(float));
    }
}

void mb_master_copy_in(const struct mb_device *dev, const struct mb_master *w, size_t begin,
                       size_t n, const float *host)
{
    if (w->whole != NULL) {
        dev->ops->copy_in(dev->ctx, dev->stream, w->whole + begin, host, n * sizeof(float));
        return;
    }
    for (size_t at = 0, k; at < n; at += k) {
        k = piece_of(n - at);
        dev->ops->copy_in(dev->ctx, dev->stream, w->window, host + at, k * sizeof(float));
        dev->ops->split(dev->ctx, dev->stream, w->upper + begin + at, w->lower + begin + at,
                        w->window, k);
    }
}

void mb_master_squared_norm(const struct mb_device *dev, const struct mb_master *w, size_t begin,
                            size_t n, double *sum)
{
    if (w->whole != NULL) {
        dev->ops->squared_norm(dev->ctx, dev->stream, w->whole + begin, n, sum);
        return;
    }
    for (size_t at = 0, k; at < n; at += k) {
        k = piece_of(n - at);
        dev->ops->join(dev->ctx, dev->stream, w->window, w->upper + begin + at,
                       w->lower + begin + at, k);
        dev->ops->squared_norm(dev->ctx, dev->stream, w->window, k, sum);
    }
}
