/* The verbs of the full program. */
#include "cli/options.h"

const struct mb_verb *const mb_verbs[] = {&mb_verb_start,
                                          &mb_verb_stop,
                                          &mb_verb_status,
                                          &mb_verb_job,
                                          &mb_verb_train,
                                          &mb_verb_run,
                                          &mb_verb_preprocess,
                                          &mb_verb_tokenizer,
                                          &mb_verb_checkpoint,
                                          &mb_verb_drain,
                                          &mb_verb_health_check,
                                          &mb_verb_version,
                                          NULL};

/* What `ray` has too. */
const struct mb_verb *const mb_ray_verbs[] = {
    &mb_verb_start, &mb_verb_stop, &mb_verb_status, &mb_verb_job, &mb_verb_health_check, NULL};

const char *const mb_absent_verbs[] = {NULL};
