/* Ranges for profilers: formatted only when somebody is told. Nothing fails. */
#include "worker/kernels/range.h"

#include <stdarg.h>
#include <stdio.h>

void mb_range_begin(const struct mb_device *dev, const char *fmt, ...)
{
    char name[MB_RANGE_NAME_MAX];
    if (!dev->tells_ranges)
        return;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(name, sizeof(name), fmt, ap);
    va_end(ap);
    dev->ops->range_begin(dev->ctx, name);
}

void mb_range_end(const struct mb_device *dev)
{
    if (dev->tells_ranges)
        dev->ops->range_end(dev->ctx);
}
