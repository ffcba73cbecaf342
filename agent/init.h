/* What supervisor.c needs of the front process's connection beyond supervisor.h. Loop-thread only.
 */
#ifndef MOBULA_AGENT_INIT_H
#define MOBULA_AGENT_INIT_H

#include <stdint.h>
#include <uv.h>
#include "base/err.h"

struct mb_init;

/* A spawn that waits for its answer; owned by the caller, who keeps it until cb or detach. */
struct mb_init_spawn {
    struct mb_init_spawn *next;
    const char *path;                                /* of the spec, absolute */
    void (*cb)(void *arg, const struct mb_err *err); /* err NULL: the supervisor listens */
    void *arg;
};

uv_loop_t *mb_init_loop(struct mb_init *init);
int mb_init_spawn(struct mb_init *init, struct mb_init_spawn *spawn, struct mb_err *err);
void mb_init_spawn_detach(struct mb_init *init, struct mb_init_spawn *spawn);
/* Detach, and init kills the supervisor unless it has answered. An init that hangs reads that after
 * the request itself, so that nothing of it stays when it goes on. */
void mb_init_spawn_drop(struct mb_init *init, struct mb_init_spawn *spawn);
uint64_t mb_init_launch_timeout_ms(const struct mb_init *init);

#endif
