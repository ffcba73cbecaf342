/*
 * What makes the static client a smaller program than the full one: fewer verbs, and no gRPC, so
 * that it cannot ask a GCS for the address of the Jobs API. Both are said by name.
 */
#include "cli/gcs_ask.h"
#include "cli/options.h"

const struct mb_verb *const mb_verbs[] = {&mb_verb_status, &mb_verb_job, &mb_verb_version, NULL};
const struct mb_verb *const mb_ray_verbs[] = {&mb_verb_status, &mb_verb_job, NULL};
const char *const mb_absent_verbs[] = {"start",        "stop",      "train",      "run",
                                       "preprocess",   "tokenizer", "checkpoint", "drain",
                                       "health-check", NULL};

int mb_gcs_ask_api_url(const char *address, uint64_t timeout_ms, char **out, struct mb_err *err)
{
    (void)timeout_ms;
    *out = NULL;
    return mb_err_set(err, MB_EUNSUPPORTED,
                      "%s is the address of a GCS, and the client speaks the Jobs API only",
                      address);
}
