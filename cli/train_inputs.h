/*
 * What of a trainer's command line lies in an object store: the nodes fetch it before the ranks
 * start, and put the local path in its place (agent/upload/inputs.h). Pure.
 */
#ifndef MOBULA_CLI_TRAIN_INPUTS_H
#define MOBULA_CLI_TRAIN_INPUTS_H

#include "base/err.h"
#include "cli/driver/driver.h"

/* URLs of words[0..n) (borrowed from them) into *out, owned by the caller, each once. MB_EINVAL for
 * an argument that cannot be one. */
int mb_train_inputs(char **words, int n, struct mb_driver_input **out, size_t *n_out,
                    struct mb_err *err);

#endif
