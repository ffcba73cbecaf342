/* A device, tensors that live on it and in double, and comparisons that print what they saw. */
#ifndef MOBULA_TESTS_KERNELS_FIXTURE_H
#define MOBULA_TESTS_KERNELS_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "worker/kernels/backend.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

/* An operation with its struct. */
#define RUN_OP(f, op, args) ((f)->dev.ops->op((f)->dev.ctx, (f)->dev.stream, &(args)))

#define FIXTURE_TEST(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

/* The same numbers three times: for the reference, on the device, and downloaded. */
struct tensor {
    size_t n;
    double *ref;
    float *dev;
    float *host;
};

struct fixture {
    struct mb_device dev;
    void *blocks[256]; /* host memory of the tensors */
    size_t n_blocks;
    uint64_t n_drawn; /* position in the random stream */
};

/* cmocka group or test set-up and tear-down: *state is a struct fixture. The device is the CPU, or
 * that of the backend at MOBULA_TEST_BACKEND. */
int fixture_setup(void **state);
int fixture_teardown(void **state);

/* Skips the test where the backend lacks an MB_FEATURE_*. */
void fixture_needs(struct fixture *f, uint32_t feature);

/* Uniform in [-scale, scale], representable as float; zeros when scale is 0. */
struct tensor tensor_new(struct fixture *f, size_t n, double scale);
/* n ids in [0, limit), on host and device. */
int32_t *ids_new(struct fixture *f, size_t n, size_t limit, int32_t **dev);
double random_unit(struct fixture *f); /* [0, 1) */
void synchronize(struct fixture *f);   /* fails the test on a device error */
/* host to the device, and back. */
void tensor_upload(struct fixture *f, const struct tensor *t);
const float *tensor_download(struct fixture *f, struct tensor *t);
/* sum(out * d_out): the scalar whose gradients backward computes from d_out. */
double tensor_contract(const double *out, const struct tensor *d_out);

/* max |got - want| <= tolerance * max(1e-3, max |want|), else the test fails. */
void assert_close(const char *what, const float *got, const double *want, size_t n,
                  double tolerance);

/* got is the gradient of fn by x[0..n), compared as above with central differences of step 1e-5; fn
 * reads x. */
typedef double scalar_fn(void *arg);
void assert_gradient(const char *what, const float *got, double *x, size_t n, scalar_fn *fn,
                     void *arg, double tolerance);

/* What is on the device, compared as above: with ref, or as the gradient of fn by x. */
void assert_tensor(struct fixture *f, const char *what, struct tensor *t, double tolerance);
void assert_tensor_gradient(struct fixture *f, const char *what, struct tensor *got,
                            const struct tensor *x, scalar_fn *fn, void *arg, double tolerance);

#endif
