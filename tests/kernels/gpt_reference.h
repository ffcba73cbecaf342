/* The model in double, of the shape that test_gpt.c trains, written from the reference operations.
 */
#ifndef MOBULA_TESTS_KERNELS_GPT_REFERENCE_H
#define MOBULA_TESTS_KERNELS_GPT_REFERENCE_H

#include "fixture.h"
#include "worker/model/gpt.h"

enum {
    SEQ = 5,
    HIDDEN = 8,
    SAMPLES = 2,
    TOKENS = SEQ * SAMPLES,
    VOCAB = 11,
    PADDED = 16,
    LAYERS = 2
};

struct reference {
    const struct mb_gpt *m;
    const double *w; /* the flat buffer */
    const int32_t *tokens, *labels;
    const double *mask;
    const struct mb_gpt_step *step; /* NULL: no dropout */
    double grad_scale;
};

/* Fails the test if there is none. */
const struct mb_param *param_named(const struct mb_gpt *m, const char *name);

/* sum(mask * loss) of SAMPLES samples of SEQ tokens */
double reference_loss(const struct reference *r);

#endif
