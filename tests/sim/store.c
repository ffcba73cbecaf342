/*
 * The head's store, in the order of gcs/store_sqlite.c: records in memory, committed in groups.
 *
 *  1. A write changes memory at once and the disk with its batch.
 *  2. SIGKILL: a batch on its way is on the disk as a whole or not at all; later ones are gone.
 */
#include <string.h>
#include "tests/sim/head_internal.h"

static void commit_later(struct world *w);

static void batch_to_disk(struct store *s)
{
    for (size_t i = 0; i < s->n_batch; i++)
        if (s->queue[i].table != N_TABLES)
            s->disk[s->queue[i].table][s->queue[i].key] = s->queue[i].r;
}

static void committed(struct world *w, int a, int b)
{
    struct store *s = &w->store;
    size_t n = s->n_batch;
    static struct write done[MAX_WRITES];

    (void)a;
    (void)b;
    batch_to_disk(s);
    memcpy(done, s->queue, n * sizeof(done[0]));
    memmove(s->queue, s->queue + n, (s->n - n) * sizeof(s->queue[0]));
    s->n -= n;
    s->n_batch = 0;
    sim_crash_point(w); /* on the disk, and nobody was told */
    for (size_t i = 0; i < n; i++) {
        head_written(w, &done[i]);
        sim_crash_point(w);
    }
    line_pump(w);
    commit_later(w);
}

static void commit_later(struct world *w)
{
    struct store *s = &w->store;

    if (s->n == 0 || s->n_batch > 0)
        return;
    s->n_batch = s->n;
    int slow = w->now_ms < w->slow_disk_until_ms;
    if (slow)
        faults_acted(w, w->slow_disk_number);
    sim_at(w, sim_agent_proc(0), (uint64_t)(slow ? 200 + sim_below(w, 2000) : 1 + sim_below(w, 6)),
           committed, 0, 0);
}

struct write *store_enqueue(struct world *w, enum table table, int key, enum done_kind done,
                            int job)
{
    struct store *s = &w->store;

    if (s->n == MAX_WRITES)
        sim_out_of_room(w, MAX_WRITES, "writes wait");
    struct write *x = &s->queue[s->n++];
    memset(x, 0, sizeof(*x));
    x->table = table;
    x->key = key;
    x->done = done;
    x->job = job;
    if (table != N_TABLES)
        x->r = s->mem[table][key];
    commit_later(w);
    return x;
}

void store_put(struct world *w, enum table table, int key, const struct record *r,
               enum done_kind done, int job)
{
    w->store.mem[table][key] = *r;
    store_enqueue(w, table, key, done, job);
}

void store_reply(struct world *w, const struct msg *q, struct msg *reply)
{
    if (w->store.n == 0) {
        sim_reply(w, q, reply);
        return;
    }
    struct write *x = store_enqueue(w, N_TABLES, 0, DONE_REPLY, 0);
    x->request = *q;
    x->reply = *reply;
}

void store_open(struct world *w)
{
    memcpy(w->store.mem, w->store.disk, sizeof(w->store.mem));
    w->store.n = w->store.n_batch = 0;
}

void store_crashed(struct world *w)
{
    if (w->store.n_batch > 0 && sim_below(w, 2))
        batch_to_disk(&w->store);
}
