/* What shape.c and config.c share. Nobody else includes this. */
#ifndef MOBULA_WORKER_CHECKPOINT_HF_SHAPE_PRIVATE_H
#define MOBULA_WORKER_CHECKPOINT_HF_SHAPE_PRIVATE_H

#include <jansson.h>
#include "worker/checkpoint/hf/shape.h"

/* One field of an object and where it goes; null is as if it were not there. */
struct mb_hf_field {
    const char *name;
    uint64_t *size; /* one of these three */
    double *number;
    int *flag;
    int is_optional; /* the value stays */
};

int mb_hf_take(const char *name, const json_t *o, const struct mb_hf_field *f, struct mb_err *err);
int mb_hf_take_all(const char *name, const json_t *o, const struct mb_hf_field *fields, size_t n,
                   struct mb_err *err);

#endif
