/*
 * Time and randomness, straight from the kernel.
 *
 *  1. CLOCK_MONOTONIC and CLOCK_REALTIME cannot fail with valid arguments on Linux.
 *  2. getrandom(2) may be interrupted or give less than asked; the loop goes on. A kernel without
 *     it cannot run this program, and secrets must not fall back to something weaker: abort.
 */
#include "base/clock.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/random.h>
#include <time.h>

static uint64_t clock_us(clockid_t id)
{
    struct timespec ts;

    clock_gettime(id, &ts);
    return (uint64_t)ts.tv_sec * 1000000u + (uint64_t)ts.tv_nsec / 1000u;
}

uint64_t mb_mono_ms(void)
{
    return clock_us(CLOCK_MONOTONIC) / 1000u;
}

uint64_t mb_mono_us(void)
{
    return clock_us(CLOCK_MONOTONIC);
}

uint64_t mb_unix_ms(void)
{
    return clock_us(CLOCK_REALTIME) / 1000u;
}

int mb_cond_init(pthread_cond_t *out)
{
    pthread_condattr_t monotonic;
    int rc = pthread_condattr_init(&monotonic);

    if (rc != 0)
        return rc;
    rc = pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    if (rc == 0)
        rc = pthread_cond_init(out, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return rc;
}

void mb_random_bytes(void *p, size_t n)
{
    uint8_t *at = p;

    while (n > 0) {
        ssize_t got = getrandom(at, n, 0);

        if (got < 0) {
            if (errno == EINTR)
                continue;
            abort();
        }
        at += got;
        n -= (size_t)got;
    }
}

uint64_t mb_random_u64(void)
{
    uint64_t v;

    mb_random_bytes(&v, sizeof(v));
    return v;
}

uint64_t mb_backoff_ms(unsigned attempt, uint64_t base_ms, uint64_t cap_ms, uint64_t random)
{
    uint64_t limit_ms = cap_ms;

    if (attempt < 64 && base_ms <= (cap_ms >> attempt))
        limit_ms = base_ms << attempt;
    if (limit_ms == UINT64_MAX)
        return random;
    return random % (limit_ms + 1);
}
