/*
 * Whose signals count. A batch system sends SIGTERM to every process of a job at once, which would
 * end agents before the gang that runs on them; with MOBULA_SIGNALS=parent only the parent's do.
 * Header only.
 */
#ifndef MOBULA_AGENT_SUPERVISE_SENDER_H
#define MOBULA_AGENT_SUPERVISE_SENDER_H

#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

/* 1: it counts. Sender 0 is the kernel, which tells of a parent's death. */
static inline int mb_sender_counts(const struct signalfd_siginfo *info)
{
    const char *from = getenv("MOBULA_SIGNALS");

    return from == NULL || strcmp(from, "parent") != 0 || info->ssi_pid == 0 ||
           info->ssi_pid == (uint32_t)getppid();
}

#endif
