/*
 * The store's core: mirrors, and writes on their way to a backend.
 *
 *  1. put/del: the mirror changes, the write goes to the backend; the old record stays with it.
 *  2. The backend kept it: the old record is freed, the callback runs.
 * Failure paths:
 *  3. The backend could not: that write and everything behind it (it may rest on what failed) is
 *     undone, newest first; all their callbacks get the error.
 *  4. Too many writes wait, or memory is out: the call fails and nothing changed.
 */
#include <assert.h>
#include <string.h>
#include "base/alloc.h"
#include "base/log.h"
#include "gcs/store_backend.h"

const char *const store_table_names[MB_TABLES_TABLES] = {"meta", "kv", "nodes", "jobs",
                                                         "placement_groups"};

struct mb_blob mb_blob_str(const char *s)
{
    return (struct mb_blob){s, strlen(s)};
}

void store_queue_push(struct store_queue *q, struct store_write *w)
{
    w->next = NULL;
    if (q->tail)
        q->tail->next = w;
    else
        q->head = w;
    q->tail = w;
    q->n++;
    q->size_bytes += w->size_bytes;
}

void store_queue_append(struct store_queue *q, struct store_queue *from)
{
    if (!from->head)
        return;
    if (q->tail)
        q->tail->next = from->head;
    else
        q->head = from->head;
    q->tail = from->tail;
    q->n += from->n;
    q->size_bytes += from->size_bytes;
    memset(from, 0, sizeof *from);
}

/* ---- life ---- */

struct mb_tables *tables_create(const char *name)
{
    struct mb_tables *s = mb_calloc(1, sizeof *s);

    if (s && !(s->name = mb_strdup(name))) {
        mb_free(s);
        return NULL;
    }
    return s;
}

void tables_free(struct mb_tables *s)
{
    for (int t = 0; t < MB_TABLES_TABLES; t++)
        mb_mirror_close(&s->mirror[t]);
    mb_free(s->name);
    mb_free(s);
}

int tables_load(struct mb_tables *s, enum mb_tables_table t, struct mb_blob ns, struct mb_blob key,
                struct mb_blob value)
{
    struct mb_record *r = mb_record_new(ns, key, value);

    if (!r || mb_mirror_reserve(&s->mirror[t], 1) != 0) {
        mb_free(r);
        return MB_ENOMEM;
    }
    mb_free(mb_mirror_swap_in(&s->mirror[t], r));
    return 0;
}

void mb_tables_close(struct mb_tables *s, void (*cb)(void *arg), void *arg)
{
    s->closed_cb = cb;
    s->closed_arg = arg;
    s->backend->close(s->self);
}

void tables_closed(struct mb_tables *s)
{
    void (*cb)(void *) = s->closed_cb;
    void *arg = s->closed_arg;

    tables_free(s);
    if (cb)
        cb(arg);
}

/* ---- what comes back from the backend ---- */

static void write_done(struct mb_tables *s, struct store_write *w, const struct mb_err *err)
{
    s->n_held--;
    s->held_bytes -= w->size_bytes;
    if (w->cb)
        w->cb(w->cb_arg, err);
    mb_free(w);
}

void tables_kept(struct mb_tables *s, struct store_queue *q)
{
    struct mb_err ok = {0};
    struct store_write *w = q->head;

    memset(q, 0, sizeof *q);
    while (w) {
        struct store_write *next = w->next;
        mb_free(w->old);
        if (w->kind == STORE_DEL)
            mb_free(w->record);
        write_done(s, w, &ok);
        w = next;
    }
}

static struct store_write *reversed(struct store_write *w)
{
    struct store_write *out = NULL;

    while (w) {
        struct store_write *next = w->next;
        w->next = out;
        out = w;
        w = next;
    }
    return out;
}

/* Puts the mirror back to what it was before w, the newest write. */
static void undo_one(struct mb_tables *s, const struct store_write *w)
{
    struct mb_mirror *m = &s->mirror[w->table];

    if (w->kind == STORE_PUT) {
        struct mb_blob ns = mb_record_ns(w->record), key = mb_record_key(w->record);
        struct mb_record *mine = w->old ? mb_mirror_swap_in(m, w->old) : mb_mirror_take(m, ns, key);
        assert(mine == w->record);
        mb_free(mine);
    } else if (w->kind == STORE_DEL) {
        /* The array never shrinks, so there is room for what was taken out. */
        mb_free(mb_mirror_swap_in(m, w->record));
    }
}

void tables_undo(struct mb_tables *s, struct store_queue *q, const struct mb_err *err)
{
    struct mb_err failure = *err;
    struct store_write *newest = reversed(q->head);

    if (q->n > 0)
        mb_error("store", "%zu writes undone: %s", q->n, failure.text);
    memset(q, 0, sizeof *q);
    for (struct store_write *w = newest; w; w = w->next)
        undo_one(s, w);
    struct store_write *w = reversed(newest); /* callbacks oldest first */
    while (w) {
        struct store_write *next = w->next;
        write_done(s, w, &failure);
        w = next;
    }
}

/* ---- writing ---- */

static struct store_write *new_write(enum store_kind kind, enum mb_tables_table table,
                                     mb_tables_cb cb, void *arg)
{
    struct store_write *w = mb_calloc(1, sizeof *w);

    if (w) {
        w->kind = kind;
        w->table = table;
        w->cb = cb;
        w->cb_arg = arg;
    }
    return w;
}

static int has_room(const struct mb_tables *s, size_t more_bytes, struct mb_err *err)
{
    if (s->n_held < MB_TABLES_QUEUE_MAX && s->held_bytes + more_bytes <= MB_TABLES_QUEUE_BYTES_MAX)
        return 1;
    mb_err_set(err, MB_EFULL, "%s: too many writes wait to be kept", s->name);
    return 0;
}

static void submit(struct mb_tables *s, struct store_write *w)
{
    s->n_held++;
    s->held_bytes += w->size_bytes;
    s->backend->submit(s->self, w);
}

static int no_memory(const struct mb_tables *s, struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "%s: out of memory", s->name);
}

int mb_tables_put(struct mb_tables *s, enum mb_tables_table table, struct mb_blob ns,
                  struct mb_blob key, struct mb_blob value, mb_tables_cb cb, void *arg,
                  struct mb_err *err)
{
    size_t size_bytes = sizeof(struct mb_record) + ns.n + key.n + value.n;

    if (!has_room(s, size_bytes, err))
        return MB_EFULL;
    struct mb_record *r = mb_record_new(ns, key, value);
    struct store_write *w = new_write(STORE_PUT, table, cb, arg);
    if (!r || !w || mb_mirror_reserve(&s->mirror[table], 1) != 0) {
        mb_free(r);
        mb_free(w);
        return no_memory(s, err);
    }
    w->record = r;
    w->size_bytes = size_bytes;
    w->old = mb_mirror_swap_in(&s->mirror[table], r);
    submit(s, w);
    return 0;
}

int mb_tables_del(struct mb_tables *s, enum mb_tables_table table, struct mb_blob ns,
                  struct mb_blob key, mb_tables_cb cb, void *arg, struct mb_err *err)
{
    if (!has_room(s, 0, err))
        return MB_EFULL;
    struct store_write *w = new_write(STORE_DEL, table, cb, arg);
    if (!w)
        return no_memory(s, err);
    w->record = mb_mirror_take(&s->mirror[table], ns, key);
    if (!w->record)
        w->kind = STORE_BARRIER;
    submit(s, w);
    return 0;
}

int mb_tables_barrier(struct mb_tables *s, mb_tables_cb cb, void *arg, struct mb_err *err)
{
    if (!has_room(s, 0, err))
        return MB_EFULL;
    struct store_write *w = new_write(STORE_BARRIER, MB_TABLES_META, cb, arg);
    if (!w)
        return no_memory(s, err);
    submit(s, w);
    return 0;
}

/* ---- reading ---- */

int mb_tables_get(const struct mb_tables *s, enum mb_tables_table table, struct mb_blob ns,
                  struct mb_blob key, struct mb_blob *value)
{
    int found;
    size_t i = mb_mirror_find(&s->mirror[table], ns, key, &found);

    if (found && value)
        *value = mb_record_value(s->mirror[table].items[i]);
    return found;
}

int mb_tables_each(const struct mb_tables *s, enum mb_tables_table table, struct mb_blob ns,
                   struct mb_blob prefix, mb_tables_visit visit, void *arg)
{
    const struct mb_mirror *m = &s->mirror[table];
    int found, rc = 0;

    for (size_t i = mb_mirror_find(m, ns, prefix, &found); rc == 0 && i < m->n; i++) {
        struct mb_blob rns = mb_record_ns(m->items[i]), key = mb_record_key(m->items[i]);
        if (rns.n != ns.n || (ns.n && memcmp(rns.p, ns.p, ns.n) != 0) || key.n < prefix.n ||
            (prefix.n && memcmp(key.p, prefix.p, prefix.n) != 0))
            break;
        rc = visit(arg, key, mb_record_value(m->items[i]));
    }
    return rc;
}

size_t mb_tables_count(const struct mb_tables *s, enum mb_tables_table table)
{
    return s->mirror[table].n;
}
