/* What `mobula checkpoint inspect` and `convert` say of a model. */
#ifndef MOBULA_CLI_CHECKPOINT_MODEL_H
#define MOBULA_CLI_CHECKPOINT_MODEL_H

#include "worker/checkpoint/hf/convert.h"

const char *mb_model_kind(enum mb_model_kind kind);
void mb_model_print(const char *dir, const struct mb_model_facts *f);
int mb_model_print_json(const char *event, const char *dir, const struct mb_model_facts *f,
                        struct mb_err *err);

#endif
