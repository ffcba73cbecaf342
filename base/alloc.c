/*
 * Allocation with an armed failure.
 *
 *  1. Every entry point asks should_fail() first; unarmed, that is one relaxed atomic load.
 *  2. Armed with n, the n-th question answers yes once, disarms itself and leaves a mark, so that a
 *     sweep (n = 1, 2, ... until the mark stays away) visits every allocation of a code path.
 *  3. Text functions measure first and allocate exactly, so that one call is one allocation.
 */
#include "base/alloc.h"

#include <malloc.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { HUGE_PAGE_BYTES = 2 << 20 };

static atomic_ulong fail_in; /* 0: not armed; 1: the next allocation fails */
static atomic_int did_fail;

static int should_fail(void)
{
    unsigned long left = atomic_load_explicit(&fail_in, memory_order_relaxed);

    while (left != 0) {
        if (atomic_compare_exchange_weak(&fail_in, &left, left - 1)) {
            if (left > 1)
                return 0;
            atomic_store(&did_fail, 1);
            return 1;
        }
    }
    return 0;
}

void mb_alloc_fail_nth(unsigned long nth)
{
    atomic_store(&did_fail, 0);
    atomic_store(&fail_in, nth);
}

int mb_alloc_did_fail(void)
{
    return atomic_load(&did_fail);
}

void *mb_alloc(size_t size_bytes)
{
    if (should_fail())
        return NULL;
    return malloc(size_bytes == 0 ? 1 : size_bytes);
}

void *mb_calloc(size_t n, size_t size_bytes)
{
    size_t total_bytes;

    /* calloc() checks as well, but sanitizers take an overflow there for a bug of the program. */
    if (__builtin_mul_overflow(n, size_bytes, &total_bytes) || should_fail())
        return NULL;
    return calloc(1, total_bytes == 0 ? 1 : total_bytes);
}

void *mb_alloc_huge(size_t size_bytes)
{
    void *p = NULL;

    if (size_bytes < HUGE_PAGE_BYTES / 2)
        return mb_alloc(size_bytes);
    if (should_fail() || posix_memalign(&p, HUGE_PAGE_BYTES, size_bytes) != 0)
        return NULL;
    /* A kernel that has none to give only makes it slower. */
    (void)madvise(p, size_bytes, MADV_HUGEPAGE);
    return p;
}

void *mb_realloc(void *p, size_t size_bytes)
{
    if (should_fail())
        return NULL;
    return realloc(p, size_bytes == 0 ? 1 : size_bytes);
}

void *mb_reallocarray(void *p, size_t n, size_t size_bytes)
{
    size_t total_bytes;

    if (__builtin_mul_overflow(n, size_bytes, &total_bytes))
        return NULL;
    return mb_realloc(p, total_bytes);
}

void mb_free(void *p)
{
    free(p);
}

/* s[0..len) and a 0. */
static char *copy_of(const char *s, size_t len)
{
    char *copy = mb_alloc(len + 1);

    if (copy == NULL)
        return NULL;
    memcpy(copy, s, len);
    copy[len] = '\0';
    return copy;
}

char *mb_strdup(const char *s)
{
    return s == NULL ? NULL : copy_of(s, strlen(s));
}

char *mb_strndup(const char *s, size_t n)
{
    return s == NULL ? NULL : copy_of(s, strnlen(s, n));
}

void mb_give_back(void)
{
    malloc_trim(0);
}

char *mb_vasprintf(const char *fmt, va_list ap)
{
    va_list measure;
    int len;
    char *text;

    va_copy(measure, ap);
    len = vsnprintf(NULL, 0, fmt, measure);
    va_end(measure);
    if (len < 0)
        return NULL;
    text = mb_alloc((size_t)len + 1);
    if (text == NULL)
        return NULL;
    vsnprintf(text, (size_t)len + 1, fmt, ap);
    return text;
}

char *mb_asprintf(const char *fmt, ...)
{
    va_list ap;
    char *text;

    va_start(ap, fmt);
    text = mb_vasprintf(fmt, ap);
    va_end(ap);
    return text;
}
