/*
 * How many elements an answer of Redis may announce. hiredis allocates what a header such as
 * "*2000000000" says before anything of it has come, and looks at every element to free it again:
 * a damaged or hostile answer would take gigabytes and hold up the loop.
 */
#ifndef MOBULA_GCS_REDIS_BOUND_H
#define MOBULA_GCS_REDIS_BOUND_H

#include <hiredis.h>

/* Names and values of a table: eight million records. */
#define REDIS_ELEMENTS_MAX ((size_t)16 << 20)

struct redis_bound {
    size_t elements_max;
#if HIREDIS_MAJOR < 1
    redisReplyObjectFunctions fn;
    void *(*create_array)(const redisReadTask *task, int elements);
#endif
};

/* An answer with more fails as hiredis fails without memory. The bound must outlive the reader. */
void redis_bound_reader(struct redis_bound *bound, redisReader *reader, size_t elements_max);

#endif
