/*
 * One question to a GCS, from a program without a loop of its own: blocks until the answer or the
 * deadline. The cluster's token is found as gcs/token.h says.
 */
#ifndef MOBULA_CLI_GCS_ASK_H
#define MOBULA_CLI_GCS_ASK_H

#include <stdint.h>
#include "base/err.h"

/* 0 if a GCS answers the handshake at "host:port". */
int mb_gcs_ask_alive(const char *address, uint64_t timeout_ms, struct mb_err *err);

/* "http://host:port" of the cluster's Jobs API, owned by the caller: what the head keeps in the
 * internal KV (namespace and key "dashboard"). A loopback host in it means the GCS's own host. */
int mb_gcs_ask_api_url(const char *address, uint64_t timeout_ms, char **out, struct mb_err *err);

#endif
