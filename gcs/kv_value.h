/*
 * Reads an InternalKVGetReply (proto/ray/gcs_service.proto) piece by piece, as it lies on the wire:
 * its value, up to 512 MiB, need not be in memory in one place, nor twice. No I/O, any thread.
 */
#ifndef MOBULA_GCS_KV_VALUE_H
#define MOBULA_GCS_KV_VALUE_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

enum { MB_KV_STATUS_MAX = 4096 }; /* bytes of a GcsStatus */

struct mb_kv_value {
    int what;        /* comes next: a field's tag, its number, its length */
    unsigned shift;  /* of the varint that is being read */
    uint64_t varint; /* so far */
    uint64_t field;
    uint64_t left; /* bytes of the field that are still to come */
    int has_value;
    size_t status_len;
    uint8_t status[MB_KV_STATUS_MAX];
};

/* A piece of the value; what is not 0 ends the reading. */
typedef int (*mb_kv_sink)(void *arg, const void *p, size_t n, struct mb_err *err);

void mb_kv_value_init(struct mb_kv_value *v);
/* The next piece of the reply. MB_EPROTO when it is no such reply, or what sink says. */
int mb_kv_value_feed(struct mb_kv_value *v, const uint8_t *p, size_t n, mb_kv_sink sink, void *arg,
                     struct mb_err *err);
/* That was all of it: 0, MB_EPROTO when there should be more, or what its status says, with the
 * codes of gcs/client.h. */
int mb_kv_value_end(const struct mb_kv_value *v, struct mb_err *err);

#endif
