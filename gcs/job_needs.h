/* What a submission asks of the node its driver is to run on, before it stands in line. Pure. */
#ifndef MOBULA_GCS_JOB_NEEDS_H
#define MOBULA_GCS_JOB_NEEDS_H

#include <jansson.h>
#include "base/err.h"

/* info: JobInfo. MB_EINVAL with Ray's sentence for an amount below zero or too fine, for 1.5 GPUs,
 * and for a resource that has a field of its own (Ray 2.60, _common/ray_option_utils.py and
 * utils.py, includes/task_options_utils.pxi): what it named would be waited for and not given. */
int mb_job_needs_check(const json_t *info, struct mb_err *err);

/* Does a label's value (NULL: no such label) match "v", "!v", "in(v, w)", "!in(v, w)"? (Ray 2.60,
 * _private/label_utils.py) */
int mb_job_label_matches(const char *selector, const char *value);

/* selector: label -> condition. MB_EINVAL with Ray's sentence for the first that is malformed (Ray
 * 2.60, the same file). */
int mb_job_selector_check(const json_t *selector, struct mb_err *err);

#endif
