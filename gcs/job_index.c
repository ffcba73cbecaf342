/* libc's balanced tree, and a list. */
#include "gcs/job_index.h"

#include <search.h>
#include <string.h>

static int compare(const void *a, const void *b)
{
    const struct mb_job_entry *x = a, *y = b;

    return strcmp(x->id, y->id);
}

int mb_job_index_add(struct mb_job_index *x, struct mb_job_entry *e)
{
    if (!tsearch(e, &x->tree, compare))
        return MB_ENOMEM;
    x->n++;
    return 0;
}

static void unlink_ended(struct mb_job_index *x, struct mb_job_entry *e)
{
    *(e->before ? &e->before->after : &x->oldest) = e->after;
    *(e->after ? &e->after->before : &x->newest) = e->before;
    e->before = e->after = NULL;
    e->has_ended = 0;
    x->n_ended--;
}

void mb_job_index_remove(struct mb_job_index *x, struct mb_job_entry *e)
{
    if (e->has_ended)
        unlink_ended(x, e);
    tdelete(e, &x->tree, compare);
    x->n--;
}

void *mb_job_index_find(const struct mb_job_index *x, const char *id)
{
    struct mb_job_entry key = {.id = id};
    struct mb_job_entry *const *at = tfind(&key, &x->tree, compare);

    return at ? (*at)->record : NULL;
}

void mb_job_index_ended(struct mb_job_index *x, struct mb_job_entry *e)
{
    if (e->has_ended)
        return;
    e->has_ended = 1;
    e->before = x->newest;
    *(x->newest ? &x->newest->after : &x->oldest) = e;
    x->newest = e;
    x->n_ended++;
}

void *mb_job_index_surplus(const struct mb_job_index *x, size_t keep)
{
    return x->n_ended > keep ? x->oldest->record : NULL;
}
