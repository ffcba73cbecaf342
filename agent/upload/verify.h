/*
 * Checks that a checkpoint of a store is whole: latest pointer -> manifest -> every file's size and
 * CRC64NVME, read back from the store, many at a time, written nowhere. Loop-thread only.
 */
#ifndef MOBULA_AGENT_UPLOAD_VERIFY_H
#define MOBULA_AGENT_UPLOAD_VERIFY_H

#include <stdint.h>
#include "base/err.h"
#include "base/s3/store.h"

struct mb_verify;

struct mb_verify_result {
    int64_t iteration; /* -1: not even the pointer could be read */
    uint64_t n_files;  /* checked */
    uint64_t total_bytes;
    uint64_t all_files; /* of the manifest */
    uint64_t all_bytes;
    uint64_t done_bytes; /* read, files that are not through included */
};

/* err->code 0: whole. MB_ENOENT: no checkpoint there. MB_ECORRUPT: err names the first file of the
 * manifest's order that is bad, among those that were looked at. Runs once. */
typedef void (*mb_verify_cb)(void *arg, const struct mb_err *err,
                             const struct mb_verify_result *result);

/* iteration: -1 for the one the pointer names. store must stay open until cb has run; closing it is
 * how to end early. */
int mb_verify_start(struct mb_store *store, int64_t iteration, mb_verify_cb cb, void *arg,
                    struct mb_verify **out, struct mb_err *err);
void mb_verify_status(const struct mb_verify *v, struct mb_verify_result *out);

#endif
