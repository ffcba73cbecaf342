/*
 * The RayJob's deadline from the head's agent, which alone asks the API server, to those of the
 * other nodes: by the cluster's KV, one key for each RayCluster, since a store may outlive one.
 * Loop-thread only.
 */
#ifndef MOBULA_AGENT_RAYJOB_NEWS_H
#define MOBULA_AGENT_RAYJOB_NEWS_H

#include <stdint.h>
#include <uv.h>
#include "agent/node.h"
#include "base/err.h"

struct mb_rayjob_news;
struct mb_rayjob_news_opts { /* borrowed until the end */
    struct mb_node *node;
    const char *cluster; /* NULL: not known */
    uint64_t look_ms;
    int tells; /* the head's; else it asks */
};
/* on_deadline: of who asks; MB_DEADLINE_NEVER is one. Again when it has become another. */
int mb_rayjob_news_start(uv_loop_t *loop, const struct mb_rayjob_news_opts *opts,
                         void (*on_deadline)(void *arg, uint64_t unix_ms), void *arg,
                         struct mb_rayjob_news **out, struct mb_err *err);
void mb_rayjob_news_tell(struct mb_rayjob_news *n, uint64_t unix_ms); /* NULL is legal */
void mb_rayjob_news_stop(struct mb_rayjob_news *n, void (*cb)(void *arg), void *arg); /* frees n */

#endif
