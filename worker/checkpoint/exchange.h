/*
 * From parts of tensors to whole ones and back, for ranks that share a model.
 *
 * The flat buffer of the whole model passes by all ranks window after window, each the sum of what
 * ranks give, as bits: nobody else has any where one gives; who wants some of it takes that. So a
 * rank needs memory for a window and for what it keeps, and every rank's network carries the whole
 * buffer once. Collective; host memory. The thread that owns the communicator.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_EXCHANGE_H
#define MOBULA_WORKER_CHECKPOINT_EXCHANGE_H

#include "worker/checkpoint/checkpoint.h"

enum { MB_EXCHANGE_WINDOW = 1 << 20 /* floats */ };

/* What a rank gives, or wants. */
struct mb_exchange_side {
    float *p; /* its element 0 is element begin of the flat buffer; NULL: nothing */
    size_t begin, end;
    int is_part; /* 1: of the rank's own flat buffer, 0: of the whole model's */
    /* Instead of p: gives elements [begin, end) of the whole model's, p[0] being begin. */
    int (*read)(void *arg, float *p, size_t begin, size_t end, struct mb_err *err);
    void *arg;
};

/* m's tensors, layout and n_elements count. window: MB_EXCHANGE_WINDOW floats, aligned to
 * 8 bytes. What one rank cannot
 * read fails all, as mb_checkpoint_agree() does. */
int mb_checkpoint_exchange(const struct mb_checkpoint_model *m, struct mb_comm *comm,
                           const struct mb_exchange_side *give, const struct mb_exchange_side *take,
                           float *window, struct mb_err *err);

#endif
