/* Time and randomness. Decision modules take time as an argument; only shells call these.
 * Any thread. */
#ifndef MOBULA_BASE_CLOCK_H
#define MOBULA_BASE_CLOCK_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

uint64_t mb_mono_ms(void); /* monotonic milliseconds; deadlines are made of this */
uint64_t mb_mono_us(void);
uint64_t mb_unix_ms(void); /* wall clock, for people and for wire formats */

/* A condition whose timed waits go by the clock that nobody sets. 0, or what pthread_cond_init()
 * returns. */
int mb_cond_init(pthread_cond_t *out);

/* Cryptographic random bytes from getrandom(2); aborts only if the kernel has none. */
void mb_random_bytes(void *p, size_t n);
uint64_t mb_random_u64(void);

/* Exponential back-off with full jitter: uniform in [0, min(cap, base << attempt)], attempt from 0;
 * `random` is any 64 random bits, so that simulations replay. */
uint64_t mb_backoff_ms(unsigned attempt, uint64_t base_ms, uint64_t cap_ms, uint64_t random);

#endif
