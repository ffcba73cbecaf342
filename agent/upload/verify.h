/*
 * Checks that the newest checkpoint of a store is whole: latest pointer -> manifest -> every file's
 * size and CRC64NVME, read back from the store. Loop-thread only.
 */
#ifndef MOBULA_AGENT_UPLOAD_VERIFY_H
#define MOBULA_AGENT_UPLOAD_VERIFY_H

#include <stdint.h>
#include "base/err.h"
#include "base/s3/store.h"

struct mb_verify_result {
    int64_t iteration; /* -1: not even the pointer could be read */
    uint64_t n_files;
    uint64_t total_bytes;
};

/* err->code 0: whole. MB_ENOENT: no checkpoint there. MB_ECORRUPT: err names the file. Runs once.
 */
typedef void (*mb_verify_cb)(void *arg, const struct mb_err *err,
                             const struct mb_verify_result *result);

/* scratch_dir must exist; one file of the checkpoint lies in it at a time, and none at the end.
 * store must stay open until cb has run. */
int mb_verify_start(struct mb_store *store, const char *scratch_dir, mb_verify_cb cb, void *arg,
                    struct mb_err *err);

#endif
