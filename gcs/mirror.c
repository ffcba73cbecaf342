/*
 * Sorted arrays with binary search: lookups and prefix scans need no hashing, and moving pointers
 * for an insert is cheap up to some 100,000 records, far above what a cluster's KV holds.
 */
#include "gcs/mirror.h"

#include <string.h>
#include "base/alloc.h"

static void put_bytes(unsigned char *to, struct mb_blob b)
{
    if (b.n > 0)
        memcpy(to, b.p, b.n);
}

struct mb_record *mb_record_new(struct mb_blob ns, struct mb_blob key, struct mb_blob value)
{
    struct mb_record *r = mb_alloc(sizeof *r + ns.n + key.n + value.n + 1);

    if (!r)
        return NULL;
    r->ns_len = ns.n;
    r->key_len = key.n;
    r->value_len = value.n;
    put_bytes(r->data, ns);
    put_bytes(r->data + ns.n, key);
    put_bytes(r->data + ns.n + key.n, value);
    r->data[ns.n + key.n + value.n] = '\0'; /* text values can be read as C strings */
    return r;
}

struct mb_blob mb_record_ns(const struct mb_record *r)
{
    return (struct mb_blob){r->data, r->ns_len};
}

struct mb_blob mb_record_key(const struct mb_record *r)
{
    return (struct mb_blob){r->data + r->ns_len, r->key_len};
}

struct mb_blob mb_record_value(const struct mb_record *r)
{
    return (struct mb_blob){r->data + r->ns_len + r->key_len, r->value_len};
}

static int blob_cmp(struct mb_blob a, struct mb_blob b)
{
    size_t n = a.n < b.n ? a.n : b.n;
    int c = n > 0 ? memcmp(a.p, b.p, n) : 0;

    if (c != 0)
        return c;
    return (a.n > b.n) - (a.n < b.n);
}

static int record_cmp(const struct mb_record *r, struct mb_blob ns, struct mb_blob key)
{
    int c = blob_cmp(mb_record_ns(r), ns);

    return c != 0 ? c : blob_cmp(mb_record_key(r), key);
}

void mb_mirror_close(struct mb_mirror *m)
{
    for (size_t i = 0; i < m->n; i++)
        mb_free(m->items[i]);
    mb_free(m->items);
    memset(m, 0, sizeof *m);
}

int mb_mirror_reserve(struct mb_mirror *m, size_t extra)
{
    size_t cap = m->cap ? m->cap : 16;

    while (cap < m->n + extra)
        cap *= 2;
    if (cap == m->cap)
        return 0;
    struct mb_record **items = mb_reallocarray(m->items, cap, sizeof *items);
    if (!items)
        return MB_ENOMEM;
    m->items = items;
    m->cap = cap;
    return 0;
}

size_t mb_mirror_find(const struct mb_mirror *m, struct mb_blob ns, struct mb_blob key, int *found)
{
    size_t lo = 0, hi = m->n;

    *found = 0;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        int c = record_cmp(m->items[mid], ns, key);

        if (c == 0) {
            *found = 1;
            return mid;
        }
        if (c < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

struct mb_record *mb_mirror_swap_in(struct mb_mirror *m, struct mb_record *r)
{
    int found;
    size_t i = mb_mirror_find(m, mb_record_ns(r), mb_record_key(r), &found);

    if (found) {
        struct mb_record *old = m->items[i];
        m->items[i] = r;
        return old;
    }
    memmove(m->items + i + 1, m->items + i, (m->n - i) * sizeof *m->items);
    m->items[i] = r;
    m->n++;
    return NULL;
}

struct mb_record *mb_mirror_take(struct mb_mirror *m, struct mb_blob ns, struct mb_blob key)
{
    int found;
    size_t i = mb_mirror_find(m, ns, key, &found);

    if (!found)
        return NULL;
    struct mb_record *r = m->items[i];
    memmove(m->items + i, m->items + i + 1, (m->n - i - 1) * sizeof *m->items);
    m->n--;
    return r;
}
