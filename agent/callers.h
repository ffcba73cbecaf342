/* Who calls a service that starts programs. */
#ifndef MOBULA_AGENT_CALLERS_H
#define MOBULA_AGENT_CALLERS_H

/* peer: as gRPC has it ("ipv4:10.0.0.1:4711"). 1: a process of this machine, also one that used the
 * node's own address. */
int mb_caller_is_local(const char *peer, const char *node_ip);

/* What another one is told. */
#define MB_CALLER_NEEDS_TOKEN                                                                      \
    "launching from another machine needs the cluster's token: start head and nodes with a "       \
    "token, not with --no-token"

#endif
