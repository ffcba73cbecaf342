/*
 * Allocation. Everything mobula allocates goes through here, so that a test can make the n-th
 * allocation fail (mb_alloc_fail_nth) and prove that every failure path cleans up.
 * Memory comes from malloc: it may be handed to free() of C libraries, and theirs to mb_free().
 * Threads: any. The failure counter is process-wide and meant for single-threaded tests.
 */
#ifndef MOBULA_BASE_ALLOC_H
#define MOBULA_BASE_ALLOC_H

#include <stdarg.h>
#include <stddef.h>

void *mb_alloc(size_t size_bytes);            /* NULL when memory is out; size 0 gives 1 byte */
void *mb_calloc(size_t n, size_t size_bytes); /* zeroed; overflow of the product gives NULL */
/* For a big table that is read all over: on huge pages where the kernel has some to give, since
 * with small ones each look would cost a walk of the page table as well. Not zeroed. */
void *mb_alloc_huge(size_t size_bytes);
void *mb_realloc(void *p, size_t size_bytes); /* on NULL the old block is untouched */
void *mb_reallocarray(void *p, size_t n, size_t size_bytes);
void mb_free(void *p);          /* NULL is legal */
char *mb_strdup(const char *s); /* NULL in, NULL out */
char *mb_strndup(const char *s, size_t n);
char *mb_asprintf(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
char *mb_vasprintf(const char *fmt, va_list ap) __attribute__((format(printf, 1, 0)));

/* What was freed goes back to the kernel; for after a burst, since the heap would keep it. Takes
 * about as long as the heap has pages to look at: 1 ms for tens of MiB. */
void mb_give_back(void);

/* Tests: the nth allocation from now (1 = the next) fails, once. 0 switches it off. */
void mb_alloc_fail_nth(unsigned long nth);
/* Tests: 1 if the armed failure happened since mb_alloc_fail_nth(). */
int mb_alloc_did_fail(void);

#endif
