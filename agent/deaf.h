/*
 * A gRPC port that takes no connections any more (base/grpc/deaf.c). The agent ends, and its front
 * process starts it again, once descriptors are free: supervisors, ranks and logs go on, as with
 * one that was killed. Until then it serves the connections that it has.
 */
#ifndef MOBULA_AGENT_DEAF_H
#define MOBULA_AGENT_DEAF_H

#include <uv.h>
#include "base/grpc/grpc.h"

/* timer is the caller's; once the port takes none any more it is used for this alone. */
void mb_deaf_watch(struct mb_grpc *g, uv_timer_t *timer);

#endif
