/* Reads and checks a JobSubmitRequest as Ray does, with Ray's error texts. Pure. */
#ifndef MOBULA_GCS_JOB_REQUEST_H
#define MOBULA_GCS_JOB_REQUEST_H

#include <jansson.h>
#include <stddef.h>
#include "base/err.h"

/* Keys of a job's metadata that mean something here; a stock Ray head just keeps them. */
#define MB_JOB_KEY_KEY       "mobula_submission_key" /* who sent it: makes a repetition harmless */
#define MB_JOB_PIPEFAIL_KEY  "mobula_pipefail"  /* "1"; "0" is nothing, anything else is refused */
#define MB_JOB_DRIVER_ON_KEY "mobula_driver_on" /* "gpu-node": where there are GPUs */

/* The object of a body. MB_EPROTO: it is none, which is all that Ray says of it. MB_EINVAL, and
 * why: it is one to Ray, and has what cannot be kept here as it is: U+0000, half a surrogate pair,
 * a number beyond 64 bits. *out is then NULL; else the caller's. */
int mb_job_request_parse(const char *body, size_t n, json_t **out, struct mb_err *err);

/* 0, or MB_EINVAL with the text of Ray's TypeError. Nulls and empty ids are removed from request,
 * which must be an object; truth values of number fields become 0 or 1. */
int mb_job_request_check(json_t *request, struct mb_err *err);

#endif
