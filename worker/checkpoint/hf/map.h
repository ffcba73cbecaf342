/*
 * Which rows of which tensor of a Hugging Face model are which rows of which of ours. Pure.
 *
 * A tensor is rows of so many columns; one without columns is a list. Hugging Face's GPT-2 keeps
 * its matrices turned round: such a tensor is described as it is after turning. Runs cover every
 * row of every tensor of Hugging Face's, and of ours all but the rows that only pad the vocabulary.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_HF_MAP_H
#define MOBULA_WORKER_CHECKPOINT_HF_MAP_H

#include "worker/checkpoint/hf/shape.h"

enum mb_hf_side { MB_HF_THEIRS, MB_HF_OURS };
enum { MB_HF_NAME_MAX = 96 };

struct mb_hf_tensor {
    char name[MB_HF_NAME_MAX];
    uint64_t rows, columns; /* columns 0: a list */
    int turned;             /* in the file its shape is [columns, rows] */
};

struct mb_hf_run {
    size_t tensor[2]; /* by side */
    uint64_t row[2];
    uint64_t n_rows;
};

struct mb_hf_map {
    struct mb_hf_tensor *tensors[2]; /* by side; ours in the order of the model's flat buffers */
    size_t n_tensors[2];
    struct mb_hf_run *runs;
    size_t n_runs;
};

/* s is checked. MB_ENOMEM only. */
int mb_hf_map_create(const struct mb_hf_shape *s, struct mb_hf_map *out, struct mb_err *err);
void mb_hf_map_close(struct mb_hf_map *m);
/* The runs in the order of side's tensors and rows. */
void mb_hf_map_sort(struct mb_hf_map *m, enum mb_hf_side side);

/* The number of values of side's tensors. */
uint64_t mb_hf_map_count(const struct mb_hf_map *m, enum mb_hf_side side);

#endif
