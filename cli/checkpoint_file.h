/* What `mobula checkpoint inspect` and `convert` do with a file of tensors: safetensors by its
 * name, FILE.safetensors, else torch.save's. */
#ifndef MOBULA_CLI_CHECKPOINT_FILE_H
#define MOBULA_CLI_CHECKPOINT_FILE_H

#include "base/err.h"

int mb_is_file(const char *path); /* 1: a regular file */
/* Prints every tensor, as one JSON object with json; with checks_bytes it reads all that has
 * checksums first. */
int mb_tensors_inspect(const char *path, int json, int checks_bytes, struct mb_err *err);
/* Into a file of the other kind, and says so. */
int mb_tensors_convert(const char *path, const char *target, int json, struct mb_err *err);

#endif
