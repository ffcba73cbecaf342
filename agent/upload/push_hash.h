/* CRC64NVME of all files of a source, in the pool, into files[].crc64nvme. */
#ifndef MOBULA_AGENT_UPLOAD_PUSH_HASH_H
#define MOBULA_AGENT_UPLOAD_PUSH_HASH_H

#include <stdatomic.h>
#include <uv.h>
#include "agent/upload/push_source.h"
#include "base/err.h"

struct mb_push_hash;

/* cb runs once, from the loop; source is borrowed until then. */
int mb_push_hash_start(uv_loop_t *loop, struct mb_push_source *source,
                       void (*cb)(void *arg, const struct mb_err *err), void *arg,
                       struct mb_push_hash **out, struct mb_err *err);
void mb_push_hash_cancel(struct mb_push_hash *h); /* cb still runs, soon */

/* Blocking: of one file, which must have size_bytes (MB_ESTATE). cancelled may be NULL. */
int mb_file_crc64nvme(const char *path, uint64_t size_bytes, const atomic_int *cancelled,
                      uint64_t *out, struct mb_err *err);

#endif
