/* What a runtime_env names of this machine goes to the head, before the job is submitted. Blocking.
 */
#ifndef MOBULA_CLI_JOB_UPLOAD_H
#define MOBULA_CLI_JOB_UPLOAD_H

#include <jansson.h>
#include <stdint.h>
#include "base/err.h"
#include "cli/rest.h"

struct mb_head_limits {
    uint64_t package_bytes;
    uint64_t kept_bytes; /* a head that takes over has packages up to this size; 0: there is none */
    int places_drivers;
};

/* A real Ray head has no such path: its limit stays, and it places nothing. */
int mb_job_ask_limits(struct mb_rest *rest, struct mb_head_limits *out, struct mb_err *err);
/* working_dir and py_modules: a directory, a package (or one .py file as module) that is no URI is
 * uploaded, unless the head has it, and replaced by its gcs:// URI. */
int mb_job_upload(struct mb_rest *rest, json_t *env, struct mb_err *err);

#endif
