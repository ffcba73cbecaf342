/*
 * SIGTERM and SIGINT on a loop, with their sender. Loop-thread only.
 */
#ifndef MOBULA_BASE_SIGNALS_H
#define MOBULA_BASE_SIGNALS_H

#include <sys/signalfd.h>
#include <uv.h>
#include "base/err.h"

/* info->ssi_signo, info->ssi_pid: the signal and who sent it. */
typedef void (*mb_signals_cb)(void *arg, const struct signalfd_siginfo *info);

struct mb_signals { /* embedded by its owner */
    uv_poll_t poll;
    int fd;
    mb_signals_cb cb;
    void *arg;
    void (*on_closed)(void *arg);
};

/* Blocks both for this thread and those it starts; before any other thread exists. */
void mb_signals_block(void);
int mb_signals_start(struct mb_signals *s, uv_loop_t *loop, mb_signals_cb cb, void *arg,
                     struct mb_err *err);
/* No callback after this call but on_closed (may be NULL). Once, after a start that succeeded. */
void mb_signals_close(struct mb_signals *s, void (*on_closed)(void *arg));

#endif
