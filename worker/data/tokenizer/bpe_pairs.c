/*
 * 1. The entries are put in the order of their buckets; of equal pairs, which share a bucket, the
 * last stays. 2. Buckets get their numbers, the big ones first, while there is room: the numbers
 * are tried in turn until all pairs of the bucket fall into empty slots. 3. Should a bucket find
 * none, everything is done again with more slots.
 */
#include <string.h>
#include "base/alloc.h"
#include "base/err.h"
#include "worker/data/tokenizer/bpe_pairs.h"

enum { PER_BUCKET = 5, MAX_BUCKET = 64, MAX_TRIES = 16 };
enum { AHEAD = 4, FAR_AHEAD = 16 }; /* buckets whose memory is asked for */
#define EMPTY UINT64_MAX

struct maker {
    struct mb_bpe_pairs *t;
    const uint64_t *sorted; /* by bucket */
    uint32_t *starts;       /* [n_buckets + 1] */
    size_t n_buckets;
};

static size_t bucket_of(const struct mb_bpe_pairs *t, uint64_t entry)
{
    return (size_t)(mb_bpe_pair_hash(entry >> MB_BPE_RANK_BITS) >> t->bucket_shift);
}

/* Orders by bucket, keeping the order inside. */
static void sort(struct maker *m, const uint64_t *entries, size_t n, uint64_t *sorted)
{
    for (size_t i = 0; i < n; i++)
        m->starts[bucket_of(m->t, entries[i]) + 1]++;
    for (size_t i = 0; i < m->n_buckets; i++)
        m->starts[i + 1] += m->starts[i];
    for (size_t i = 0; i < n; i++)
        sorted[m->starts[bucket_of(m->t, entries[i])]++] = entries[i];
    /* Each start has moved to the next one's place. */
    memmove(m->starts + 1, m->starts, m->n_buckets * sizeof(*m->starts));
    m->starts[0] = 0;
}

/* The entries of a bucket without those that a later one of the same pair replaces. */
static size_t distinct(const struct maker *m, size_t bucket, uint64_t *out)
{
    size_t n = 0;

    for (uint32_t i = m->starts[bucket]; i < m->starts[bucket + 1]; i++) {
        size_t k = 0;

        while (k < n && out[k] >> MB_BPE_RANK_BITS != m->sorted[i] >> MB_BPE_RANK_BITS)
            k++;
        if (k == MAX_BUCKET)
            return MAX_BUCKET + 1;
        out[k] = m->sorted[i];
        n += k == n;
    }
    return n;
}

static int place(struct mb_bpe_pairs *t, size_t bucket, const uint64_t *entries, size_t n)
{
    size_t at[MAX_BUCKET];

    for (uint32_t move = 0; move <= UINT8_MAX; move++) {
        size_t i = 0;

        for (; i < n; i++) {
            uint64_t hash = mb_bpe_pair_hash(entries[i] >> MB_BPE_RANK_BITS);

            at[i] = mb_bpe_pair_moved(hash, (uint8_t)move, t->n_slots);
            if (t->slots[at[i]] != EMPTY)
                break;
            t->slots[at[i]] = entries[i];
        }
        if (i == n) {
            t->moves[bucket] = (uint8_t)move;
            return 1;
        }
        while (i-- > 0)
            t->slots[at[i]] = EMPTY;
    }
    return 0;
}

/* The size that a bucket counts as when the big ones go first. */
static size_t size_class(const struct maker *m, size_t bucket)
{
    size_t n = m->starts[bucket + 1] - m->starts[bucket];

    return n < MAX_BUCKET ? n : MAX_BUCKET;
}

/* Asks for the slots that a bucket is tried at first. */
static void ask(const struct maker *m, size_t bucket)
{
    for (uint32_t i = m->starts[bucket]; i < m->starts[bucket + 1]; i++) {
        uint64_t hash = mb_bpe_pair_hash(m->sorted[i] >> MB_BPE_RANK_BITS);

        __builtin_prefetch(&m->t->slots[mb_bpe_pair_moved(hash, 0, m->t->n_slots)]);
    }
}

static int place_all(const struct maker *m, const uint32_t *order)
{
    uint64_t entries[MAX_BUCKET];

    for (size_t i = 0; i < m->n_buckets; i++) {
        if (i + FAR_AHEAD < m->n_buckets)
            __builtin_prefetch(&m->sorted[m->starts[order[i + FAR_AHEAD]]]);
        if (i + AHEAD < m->n_buckets)
            ask(m, order[i + AHEAD]);

        size_t n = distinct(m, order[i], entries);

        if (n > MAX_BUCKET || (n > 0 && !place(m->t, order[i], entries, n)))
            return 0;
    }
    return 1;
}

static void by_size(const struct maker *m, uint32_t *order)
{
    size_t ends[MAX_BUCKET + 2] = {0}; /* of the buckets of at least so many pairs */

    for (size_t i = 0; i < m->n_buckets; i++)
        ends[MAX_BUCKET - size_class(m, i) + 1]++;
    for (size_t i = 0; i <= MAX_BUCKET; i++)
        ends[i + 1] += ends[i];
    for (size_t i = 0; i < m->n_buckets; i++)
        order[ends[MAX_BUCKET - size_class(m, i)]++] = (uint32_t)i;
}

static int make(struct maker *m, uint64_t *sorted, uint32_t *order, const uint64_t *entries,
                size_t n)
{
    struct mb_bpe_pairs *t = m->t;

    sort(m, entries, n, sorted);
    m->sorted = sorted;
    by_size(m, order);
    t->n_slots = n + n / 2 + 16;
    for (int tries = 0; tries < MAX_TRIES; tries++, t->n_slots += t->n_slots / 8) {
        mb_free(t->slots);
        t->slots = mb_alloc_huge(t->n_slots * sizeof(*t->slots));
        if (t->slots == NULL)
            return MB_ENOMEM;
        memset(t->slots, 0xff, t->n_slots * sizeof(*t->slots));
        if (place_all(m, order))
            return 0;
    }
    return MB_EUNSUPPORTED;
}

int mb_bpe_pairs_make(struct mb_bpe_pairs *t, const uint64_t *entries, size_t n)
{
    struct maker m = {.t = t};
    uint64_t *sorted = mb_reallocarray(NULL, n + 1, sizeof(*sorted));
    uint32_t *order;
    unsigned bits = 4;
    int rc = MB_ENOMEM;

    *t = (struct mb_bpe_pairs){0};
    while (((size_t)PER_BUCKET << bits) < n)
        bits++;
    t->bucket_shift = 64 - bits;
    m.n_buckets = (size_t)1 << bits;
    t->moves = mb_calloc(m.n_buckets + 3, sizeof(*t->moves));
    m.starts = mb_calloc(m.n_buckets + 1, sizeof(*m.starts));
    order = mb_reallocarray(NULL, m.n_buckets, sizeof(*order));
    if (sorted != NULL && t->moves != NULL && m.starts != NULL && order != NULL)
        rc = make(&m, sorted, order, entries, n);
    if (rc != 0)
        mb_bpe_pairs_close(t);
    mb_free(sorted);
    mb_free(m.starts);
    mb_free(order);
    return rc;
}

void mb_bpe_pairs_close(struct mb_bpe_pairs *t)
{
    mb_free(t->slots);
    mb_free(t->moves);
    *t = (struct mb_bpe_pairs){0};
}
