/* The operations in double precision, written for reading, one loop per sum. */
#ifndef MOBULA_TESTS_KERNELS_REFERENCE_H
#define MOBULA_TESTS_KERNELS_REFERENCE_H

#include "worker/kernels/op.h"

void ref_embedding(const int32_t *token, const double *token_weight, const double *position_weight,
                   double *out, size_t n_tokens, size_t seq, size_t hidden);
void ref_layernorm(const double *x, const double *weight, const double *bias, double *out,
                   size_t n_rows, size_t hidden, double eps);
void ref_linear(const double *x, const double *weight, const double *bias, double *out,
                size_t n_rows, size_t n_in, size_t n_out);
void ref_rmsnorm(const double *x, const double *weight, double *out, size_t n_rows, size_t hidden,
                 double eps);
/* x [n_rows, 2 n] */
void ref_swiglu(const double *x, double *out, size_t n_rows, size_t n);
/* In place. angle [seq, rotary_dim / 2] */
void ref_rope(const struct mb_attention_shape *s, double *qkv, const double *angle,
              size_t rotary_dim);
double ref_gelu(double x, enum mb_gelu_form form);
/* The factor of element e, counted from the tensor's first. */
double ref_dropout(const struct mb_dropout *d, uint64_t e);
void ref_attention(const struct mb_attention_shape *s, const double *qkv, double *out,
                   const struct mb_dropout *d);
/* sum over tokens of mask * loss; mask NULL: ones */
double ref_cross_entropy(const double *x, const double *weight, const int32_t *label,
                         const double *mask, size_t n_tokens, size_t hidden, size_t vocab);

#endif
