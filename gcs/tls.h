/*
 * A gRPC runtime that is secured as Ray's variables say: RAY_USE_TLS, RAY_TLS_SERVER_CERT,
 * RAY_TLS_SERVER_KEY, RAY_TLS_CA_CERT. Whoever talks to a head or an agent makes his runtime here,
 * so that no channel of the cluster is left plain. Blocking, start-up only.
 */
#ifndef MOBULA_GCS_TLS_H
#define MOBULA_GCS_TLS_H

#include "base/grpc/grpc.h"

/* RAY_USE_TLS is 1 or true, in any case; MB_EINVAL for a word that is no bool. */
int mb_gcs_use_tls(int *out, struct mb_err *err);
/* As mb_grpc_create(); a variable that is missing, or a bad file, is said by its name. */
int mb_gcs_grpc_create(uv_loop_t *loop, struct mb_grpc **out, struct mb_err *err);
/* The files' paths become absolute in this environment: those who inherit it work elsewhere. */
int mb_gcs_tls_hand_down(struct mb_err *err);

#endif
