/* The clock of this folder, which needs libc alone. */
#ifndef MOBULA_AGENT_SUPERVISE_CLOCK_H
#define MOBULA_AGENT_SUPERVISE_CLOCK_H

#include <stdint.h>
#include <time.h>

/* Monotonic milliseconds. */
static inline uint64_t mb_sup_now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

#endif
