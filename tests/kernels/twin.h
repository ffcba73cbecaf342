/*
 * The same call on two backends: the CPU's in fp32, which is the oracle, and another one in each
 * dtype. Inputs are fresh random numbers, representable in the dtype; outputs are poisoned with NaN
 * before the call, on both sides, and a NaN that is left never passes.
 */
#ifndef MOBULA_TESTS_KERNELS_TWIN_H
#define MOBULA_TESTS_KERNELS_TWIN_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "fixture.h"

struct twin {
    struct mb_device cpu, gpu;
    enum mb_dtype dtype; /* of what pair_input() and pair_output() make */
    uint64_t seed, n_drawn;
};

/* One array on both devices; on the GPU of dtype. */
struct pair {
    size_t n;
    enum mb_dtype dtype;
    float *cpu;
    void *gpu;
};

#define TWIN_TEST(name) cmocka_unit_test_setup_teardown(name, twin_setup, twin_teardown)

/* An operation on both, with a struct each. */
#define RUN(t, op, for_cpu, for_gpu)                                                               \
    do {                                                                                           \
        (t)->cpu.ops->op((t)->cpu.ctx, (t)->cpu.stream, &(for_cpu));                               \
        (t)->gpu.ops->op((t)->gpu.ctx, (t)->gpu.stream, &(for_gpu));                               \
    } while (0)

/* The other backend is the CPU's, too: what it has besides fp32 is compared. */
int twin_is_cpu(const struct twin *t);
/* n numbers are more than patience is worth: where the other backend is the CPU's, since GPUs have
 * more kernels, and under a tool that makes a GPU slow, which MOBULA_TEST_PATIENCE says in numbers.
 * The check is left out. */
int twin_is_slow(const struct twin *t, size_t n);
/* Runs a check in all dtypes that the backend has. MOBULA_TEST_SHARE=i/n: every nth check from the
 * ith on, for n processes side by side. */
void twin_in_all(struct twin *t, void (*check)(struct twin *t, size_t k), size_t n_cases);
/* The bound of the dtype that the check runs in; fp16's is an eighth of bf16's. */
double twin_bound(const struct twin *t, double fp32, double bf16);

/* cmocka set-up and tear-down; the seed is printed, MOBULA_TEST_SEED sets it. */
int twin_setup(void **state);
int twin_teardown(void **state);

double twin_unit(struct twin *t); /* [0, 1) */
/* Uniform in [-scale, scale]. */
struct pair pair_input(struct twin *t, size_t n, double scale);
struct pair pair_output(struct twin *t, size_t n);
/* fp32 on both sides: statistics, sums (with numbers in them: what is added to must be kept). */
struct pair pair_input_f32(struct twin *t, size_t n, double scale);
struct pair pair_output_f32(struct twin *t, size_t n);
struct pair pair_zeros_f32(struct twin *t, size_t n);
/* After a change of its CPU side. */
void pair_upload_f32(struct twin *t, const struct pair *p);
/* n ids in [0, limit). */
void pair_ids(struct twin *t, size_t n, size_t limit, int32_t **cpu, int32_t **gpu);
/* Uninitialised device memory of the GPU and of the CPU. */
void *twin_memory(struct mb_device *dev, size_t size_bytes);
void twin_synchronize(struct twin *t);
/* Downloads of both sides as floats, to be freed with mb_free(). */
float *pair_download(struct twin *t, const struct pair *p, int from_gpu);

/* |gpu - cpu| / |cpu| over the whole array is at most bound, and no element is further away than 8
 * times what that is for one element (the largest seen is 2.2 times). */
void assert_pair(struct twin *t, const char *what, const struct pair *p, double bound);
/* Relative to least where the elements are smaller: a logarithm's absolute error is what counts. */
void assert_pair_from(struct twin *t, const char *what, const struct pair *p, double bound,
                      double least);

#endif
