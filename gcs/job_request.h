/* Checks a JobSubmitRequest as Ray does, with Ray's error texts. Pure. */
#ifndef MOBULA_GCS_JOB_REQUEST_H
#define MOBULA_GCS_JOB_REQUEST_H

#include <jansson.h>
#include "base/err.h"

/* 0, or MB_EINVAL with the text of Ray's TypeError. Nulls and empty ids are removed from request,
 * which must be an object; truth values of number fields become 0 or 1. */
int mb_job_request_check(json_t *request, struct mb_err *err);

#endif
