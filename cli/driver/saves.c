/*
 *  1. An iteration is noted once; the list is in the order of iterations.
 *  2. Of durable ones the newest DURABLE_KEPT stay: a save that is heard of only after so many
 * newer commits does not happen, since a node has at most 256 under way (agent/upload/plan.c).
 */
#include "cli/driver/saves.h"

#include <string.h>
#include "base/alloc.h"

enum { DURABLE_KEPT = 256, FIRST_CAPACITY = 16 };

struct save {
    int64_t iteration;
    enum mb_drv_save save;
};

struct mb_drv_saves {
    struct save *list; /* ascending */
    size_t n, capacity;
    int64_t forgotten; /* the newest durable one that is no longer in the list, -1: none */
};

struct mb_drv_saves *mb_drv_saves_create(void)
{
    struct mb_drv_saves *s = mb_calloc(1, sizeof(*s));

    if (s)
        s->forgotten = -1;
    return s;
}

void mb_drv_saves_destroy(struct mb_drv_saves *s)
{
    if (!s)
        return;
    mb_free(s->list);
    mb_free(s);
}

static void forget_oldest_durable(struct mb_drv_saves *s)
{
    size_t n_durable = 0, oldest = s->n;

    for (size_t i = s->n; i-- > 0;) {
        if (s->list[i].save != MB_DRV_SAVE_DURABLE)
            continue;
        n_durable++;
        oldest = i;
    }
    if (n_durable > DURABLE_KEPT) {
        if (s->list[oldest].iteration > s->forgotten) /* an older one may become durable late */
            s->forgotten = s->list[oldest].iteration;
        memmove(s->list + oldest, s->list + oldest + 1, (--s->n - oldest) * sizeof(*s->list));
    }
}

static int insert(struct mb_drv_saves *s, size_t at, struct save save)
{
    if (s->n == s->capacity) {
        size_t capacity = s->capacity ? 2 * s->capacity : FIRST_CAPACITY;
        struct save *list = mb_reallocarray(s->list, capacity, sizeof(*list));

        if (!list)
            return MB_ENOMEM;
        s->list = list;
        s->capacity = capacity;
    }
    memmove(s->list + at + 1, s->list + at, (s->n++ - at) * sizeof(*s->list));
    s->list[at] = save;
    return MB_OK;
}

int mb_drv_saves_note(struct mb_drv_saves *s, int64_t iteration, enum mb_drv_save save)
{
    size_t at = s->n;

    while (at > 0 && s->list[at - 1].iteration > iteration)
        at--;
    if (at == 0 || s->list[at - 1].iteration != iteration) {
        if (insert(s, at, (struct save){iteration, save}) != MB_OK)
            return MB_ENOMEM;
    } else if (save > s->list[at - 1].save) {
        s->list[at - 1].save = save;
    }
    forget_oldest_durable(s);
    return MB_OK;
}

static uint32_t n_durable_from(const struct mb_drv_saves *s, size_t at)
{
    uint32_t n = 0;

    for (; at < s->n; at++)
        n += s->list[at].save >= MB_DRV_SAVE_DURABLE;
    return n;
}

int mb_drv_saves_is_open(const struct mb_drv_saves *s, int64_t iteration)
{
    size_t at = s->n;

    while (at > 0 && s->list[at - 1].iteration > iteration)
        at--;
    if (at > 0 && s->list[at - 1].iteration == iteration)
        return s->list[at - 1].save < MB_DRV_SAVE_DURABLE;
    return iteration > s->forgotten;
}

int64_t mb_drv_saves_given_up(const struct mb_drv_saves *s)
{
    for (size_t i = 0; i < s->n; i++)
        if (s->list[i].save == MB_DRV_SAVE_GIVEN_UP || s->list[i].save == MB_DRV_SAVE_OUTDATED)
            return s->list[i].iteration;
    return -1;
}

int64_t mb_drv_saves_open(const struct mb_drv_saves *s, int64_t after, uint32_t keep_last)
{
    for (size_t i = 0; i < s->n; i++) {
        const struct save *save = &s->list[i];

        if (save->iteration <= after || save->save >= MB_DRV_SAVE_DURABLE ||
            (save->save == MB_DRV_SAVE_GIVEN_UP && i + 1 < s->n))
            continue;
        if (keep_last == 0 || n_durable_from(s, i + 1) < keep_last)
            return save->iteration;
    }
    return -1;
}
