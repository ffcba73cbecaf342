#include "gcs/redis_bound.h"

#include "base/log.h"

#if HIREDIS_MAJOR < 1
/* Answers within an answer are those of our scripts, of a few numbers each. */
enum { NESTED_MAX = 1024 };

static void *create_array(const redisReadTask *task, int elements)
{
    const struct redis_bound *bound = task->privdata;
    size_t max = bound->elements_max;

    if (task->parent && max > NESTED_MAX)
        max = NESTED_MAX;
    if (elements > 0 && (size_t)elements > max) {
        mb_warn("store", "Redis announces an answer of %d elements; at most %zu are taken",
                elements, max);
        return NULL;
    }
    return bound->create_array(task, elements);
}

void redis_bound_reader(struct redis_bound *bound, redisReader *reader, size_t elements_max)
{
    bound->elements_max = elements_max;
    bound->fn = *reader->fn;
    bound->create_array = reader->fn->createArray;
    bound->fn.createArray = create_array;
    reader->fn = &bound->fn;
    redisReaderSetPrivdata(reader, bound);
}
#else
/* hiredis counts by itself since 1.0, and says what it refused. */
void redis_bound_reader(struct redis_bound *bound, redisReader *reader, size_t elements_max)
{
    bound->elements_max = elements_max;
    reader->maxelements = (long long)elements_max;
}
#endif
