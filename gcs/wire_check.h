/*
 * What a real GCS would die of, looked for in a message that is about to be sent to one: it aborts,
 * with all that its cluster has in memory, at ids of another length than theirs, at a placement
 * group without bundles, at a job whose driver has no worker id and at an empty batch of views
 * (docs/ray-compat.md). Text that is no UTF-8 and amounts that are no numbers are refused as well:
 * the former it cannot read. In messages of our own such text may be a name that somebody gave
 * a file, and goes. Pure; any thread.
 */
#ifndef MOBULA_GCS_WIRE_CHECK_H
#define MOBULA_GCS_WIRE_CHECK_H

#include <protobuf-c/protobuf-c.h>
#include "base/err.h"

/* MB_EINVAL: it must not be sent; err names the message and the field. */
int mb_wire_check(const ProtobufCMessage *m, struct mb_err *err);

#endif
