/* What a node needs before its parts start. Blocking; before the loop runs. */
#ifndef MOBULA_AGENT_PREPARE_H
#define MOBULA_AGENT_PREPARE_H

#include "agent/options.h"
#include "base/err.h"

int mb_agent_make_dirs(const char *node_dir, struct mb_err *err);
/* The address this machine uses towards the (first) head. */
int mb_agent_find_ip(const struct mb_agent_options *opts, char ip[64], struct mb_err *err);

#endif
