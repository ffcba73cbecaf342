/*
 *  1. A write goes to the local store at once; when it is kept there it is published: its mark, if
 *     it is a new record, then the record; a deletion in the other order. Then it counts as kept.
 *     One at a time, in order.
 *  2. sync: list the records of the KV and the marks; every record of the tables is put, or of
 * those that are there only what may still change. A record that the tables do not have: with our
 * mark it was deleted here while the head was away, and goes; with the mark of another store it is
 * read and judged by the nodes of the cluster, and those whose store is gone are read again and
 * adopted when all are judged. Failure paths:
 *  3. The local store fails: what it did not keep is undone.
 *  4. The head cannot be reached: the same request again every RETRY_MS.
 *  5. close: what is not published within CLOSE_MS is kept here only; the next sync publishes it.
 */
#include "gcs/store_kv.h"

#include <assert.h>
#include <jansson.h>
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/store_backend.h"

enum { RETRY_MS = 1000, CLOSE_MS = 2000, TRY_MS = 10000 };

enum { STORE_ID_BYTES = 16 };

static const char *const cluster_key = "published_to", *const store_key = "store_id";

/* What is done to one record of the KV; LIST_NODES is about none. */
enum step {
    PUT_MARK,
    PUT_RECORD,
    DEL_RECORD,
    DEL_MARK,
    GET_MARK,
    LIST_NODES,
    JUDGE_RECORD,
    ADOPT_RECORD,
};

struct task {
    enum step step;
    char *id; /* the key behind the prefix; owned */
};

struct mb_kv_store {
    uv_loop_t *loop;
    const char *prefix;
    const struct mb_kv_store_ops *ops;
    void *arg;
    char mark[2 * STORE_ID_BYTES + 1]; /* this store's id, the text of its marks */
    struct mb_tables *tables, *local;
    struct mb_gcs *gcs; /* NULL: held */
    struct mb_gcs_op *op;
    uv_timer_t timer; /* the next turn, or the next try */
    uv_timer_t closer;
    struct store_queue waiting;
    size_t n_local;   /* of the waiting, from the oldest: kept in the local store */
    size_t n_refused; /* from the newest: not even taken by it */
    size_t n_undone;  /* answers of the local store still to come for writes that were undone */
    struct mb_err refusal;

    /* What is being published: the steps of the oldest write, or those of a sync. */
    struct task *tasks;
    size_t n_tasks, cap_tasks, at;
    int is_write; /* the tasks are those of waiting.head */
    int is_busy;
    int has_warned;

    int sync_wanted, is_syncing, is_synced;
    int all_wanted, is_all; /* settled records too: by the next sync, by this one */
    int has_asked_nodes;    /* this sync */
    json_t *records;        /* ids in the KV, while a sync lists */
    int closing, is_late;
    int handles;
};

static void turn(struct mb_kv_store *s, uint64_t delay_ms);

static uint64_t retry_ms(const struct mb_kv_store *s)
{
    return s->closing ? 0 : RETRY_MS;
}

/* ---- names ---- */

static int is_published(const struct mb_kv_store *s, const struct store_write *w)
{
    struct mb_blob ns, key;
    size_t n = strlen(s->prefix);

    if (w->kind == STORE_BARRIER || w->table != MB_TABLES_KV)
        return 0;
    ns = mb_record_ns(w->record);
    key = mb_record_key(w->record);
    return ns.n == 3 && memcmp(ns.p, "job", 3) == 0 && key.n > n &&
           memcmp(key.p, s->prefix, n) == 0;
}

static int local_record(const struct mb_kv_store *s, const char *id, struct mb_blob *value)
{
    char *key = mb_asprintf("%s%s", s->prefix, id);
    int found =
        key && mb_tables_get(s->local, MB_TABLES_KV, mb_blob_str("job"), mb_blob_str(key), value);

    mb_free(key);
    return found;
}

/* ---- tasks ---- */

static void clear_tasks(struct mb_kv_store *s)
{
    for (size_t i = 0; i < s->n_tasks; i++)
        mb_free(s->tasks[i].id);
    s->n_tasks = s->at = 0;
}

static int add_task(struct mb_kv_store *s, enum step step, const char *id, size_t n)
{
    char *copy = mb_strndup(id, n);

    if (copy && s->n_tasks == s->cap_tasks) {
        size_t cap = s->cap_tasks ? 2 * s->cap_tasks : 8;
        struct task *tasks = mb_reallocarray(s->tasks, cap, sizeof *tasks);
        if (!tasks) {
            mb_free(copy);
            return MB_ENOMEM;
        }
        s->tasks = tasks;
        s->cap_tasks = cap;
    }
    if (!copy)
        return MB_ENOMEM;
    s->tasks[s->n_tasks++] = (struct task){step, copy};
    return 0;
}

static struct store_write *pop(struct mb_kv_store *s)
{
    struct store_write *w = s->waiting.head;

    s->waiting.head = w->next;
    if (!w->next)
        s->waiting.tail = NULL;
    s->waiting.n--;
    s->waiting.size_bytes -= w->size_bytes;
    s->n_local--;
    return w;
}

static void keep_oldest(struct mb_kv_store *s)
{
    struct store_queue q = {0};

    store_queue_push(&q, pop(s));
    s->is_write = 0;
    tables_kept(s->tables, &q);
}

static void sync_done(struct mb_kv_store *s, const struct mb_err *err)
{
    clear_tasks(s);
    json_decref(s->records);
    s->records = NULL;
    s->is_syncing = 0;
    s->is_synced = err->code == 0 && s->gcs;
    s->all_wanted |= s->is_all && !s->is_synced;
    if (s->closing)
        return;
    if (err->code != 0)
        s->ops->on_failed(s->arg, err);
    else if (s->is_synced)
        s->ops->on_synced(s->arg);
}

/* A step is over. */
static void on_step(struct mb_kv_store *s, const struct mb_err *err)
{
    s->op = NULL;
    s->is_busy = 0;
    if (err->code != 0 && s->is_syncing) {
        sync_done(s, err);
        turn(s, retry_ms(s));
        return;
    }
    if (err->code != 0) {
        if (!s->has_warned++ && !s->closing)
            mb_warn("jobs", "not published yet, and tried again: %s", err->text);
        turn(s, retry_ms(s));
        return;
    }
    s->has_warned = 0;
    s->at++;
    turn(s, 0);
}

static void on_count(void *arg, const struct mb_err *err, int64_t count)
{
    (void)count;
    on_step(arg, err);
}

static int is_our_mark(const struct mb_kv_store *s, struct mb_blob value)
{
    return value.n == strlen(s->mark) && memcmp(value.p, s->mark, value.n) == 0;
}

/* t: a record that the tables do not have. */
static int on_mark_read(struct mb_kv_store *s, struct task t, struct mb_blob mark)
{
    size_t n = strlen(t.id);
    int rc = 0;

    if (is_our_mark(s, mark)) {
        rc = add_task(s, DEL_RECORD, t.id, n);
        return rc ? rc : add_task(s, DEL_MARK, t.id, n);
    }
    if (!s->has_asked_nodes)
        rc = add_task(s, LIST_NODES, "", 0);
    s->has_asked_nodes = 1;
    return rc ? rc : add_task(s, JUDGE_RECORD, t.id, n);
}

static int on_record_read(struct mb_kv_store *s, struct task t, struct mb_blob value)
{
    enum mb_kv_store_verdict verdict = s->ops->judge(s->arg, t.id, value);

    if (verdict == MB_KV_STORE_REFUSE)
        return MB_ESTATE;
    return verdict == MB_KV_STORE_ADOPT ? add_task(s, ADOPT_RECORD, t.id, strlen(t.id)) : 0;
}

static int on_record_found(struct mb_kv_store *s, struct task t, struct mb_blob value)
{
    char *key = mb_asprintf("%s%s", s->prefix, t.id);

    if (!key)
        return MB_ENOMEM;
    s->ops->on_found(s->arg, mb_blob_str(key), value);
    mb_free(key);
    return 0;
}

static int fail_step(struct mb_err *err, int rc)
{
    return rc == 0
               ? 0
               : mb_err_set(err, rc, "%s",
                            rc == MB_ENOMEM ? "out of memory" : "another agent writes jobs here");
}

static void on_value(void *arg, const struct mb_err *err, const void *value, size_t n)
{
    struct mb_kv_store *s = arg;
    struct mb_err why = *err;
    struct task t = s->tasks[s->at]; /* the array may move */
    struct mb_blob read = {value, n};

    if (why.code == MB_ENOENT) /* deleted by its owner since it was listed */
        why = (struct mb_err){0};
    else if (why.code == 0 && !s->closing)
        fail_step(&why, t.step == GET_MARK       ? on_mark_read(s, t, read)
                        : t.step == JUDGE_RECORD ? on_record_read(s, t, read)
                                                 : on_record_found(s, t, read));
    on_step(s, &why);
}

static void on_nodes(void *arg, const struct mb_err *err, const struct mb_gcs_node *nodes, size_t n)
{
    struct mb_kv_store *s = arg;
    struct mb_err why = *err;

    if (why.code == 0 && !s->closing)
        fail_step(&why, s->ops->on_nodes(s->arg, nodes, n));
    on_step(s, &why);
}

/* ns and key of what a step is about; the key is the caller's. */
static char *target(const struct mb_kv_store *s, const struct task *t, const char **ns)
{
    int is_mark = t->step == PUT_MARK || t->step == DEL_MARK || t->step == GET_MARK;

    *ns = is_mark ? "mobula" : "job";
    return mb_asprintf("%s%s", is_mark ? MB_KV_STORE_MARK : s->prefix, t->id);
}

/* A record was written or deleted here since the sync was planned; the write that did so follows.
 */
static int is_over(const struct mb_kv_store *s, const struct task *t)
{
    int is_put = t->step == PUT_MARK || t->step == PUT_RECORD;

    return s->is_syncing && local_record(s, t->id, NULL) != is_put;
}

static int send_step(struct mb_kv_store *s, const struct task *t, struct mb_err *err)
{
    struct mb_blob value = mb_blob_str(s->mark);
    const char *ns;
    char *key = target(s, t, &ns);
    int rc;

    if (!key)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    if (t->step == PUT_RECORD && s->is_write)
        value = mb_record_value(s->waiting.head->record);
    else if (t->step == PUT_RECORD)
        local_record(s, t->id, &value);
    if (t->step == PUT_MARK || t->step == PUT_RECORD)
        rc = mb_gcs_kv_put(s->gcs, ns, key, value.p, value.n, 1, TRY_MS, on_count, s, &s->op, err);
    else if (t->step == DEL_MARK || t->step == DEL_RECORD)
        rc = mb_gcs_kv_del(s->gcs, ns, key, 0, TRY_MS, on_count, s, &s->op, err);
    else if (t->step == LIST_NODES)
        rc = mb_gcs_nodes(s->gcs, TRY_MS, on_nodes, s, &s->op, err);
    else
        rc = mb_gcs_kv_get(s->gcs, ns, key, TRY_MS, on_value, s, &s->op, err);
    mb_free(key);
    return rc;
}

/* ---- sync ---- */

struct visit {
    struct mb_kv_store *s;
    const json_t *marks;
    int rc;
};

/* It is there as it was put, and nobody has a reason to change it. */
static int is_left_out(const struct visit *v, const char *id)
{
    const struct mb_kv_store *s = v->s;

    return !s->is_all && json_object_get(s->records, id) && json_object_get(v->marks, id) &&
           s->ops->is_settled(s->arg, id);
}

static int plan_record(void *arg, struct mb_blob key, struct mb_blob value)
{
    struct visit *v = arg;
    size_t n = strlen(v->s->prefix);
    const char *id = (const char *)key.p + n;
    char *text = mb_strndup(id, key.n - n);

    (void)value;
    if (!text)
        v->rc = MB_ENOMEM;
    int is_put = v->rc == 0 && !is_left_out(v, text);
    if (is_put && !json_object_get(v->marks, text))
        v->rc = add_task(v->s, PUT_MARK, id, key.n - n);
    if (is_put && v->rc == 0)
        v->rc = add_task(v->s, PUT_RECORD, id, key.n - n);
    mb_free(text);
    return v->rc;
}

/* What is in the KV and not here. */
static int plan_unknown(struct mb_kv_store *s, const json_t *marks)
{
    const char *id;
    json_t *value;
    int rc = 0;

    json_object_foreach(s->records, id, value)
    {
        if (rc != 0 || local_record(s, id, NULL))
            continue;
        rc = json_object_get(marks, id) ? add_task(s, GET_MARK, id, strlen(id))
                                        : s->ops->on_foreign(s->arg, id);
    }
    return rc;
}

static void on_marks(void *arg, const struct mb_err *err, const char *const *keys, size_t n)
{
    struct mb_kv_store *s = arg;
    struct mb_err why = *err;
    json_t *marks = json_object();
    struct visit v = {.s = s, .marks = marks};

    s->op = NULL;
    s->is_busy = 0;
    for (size_t i = 0; why.code == 0 && i < n; i++)
        json_object_set_new(marks, keys[i] + strlen(MB_KV_STORE_MARK), json_true());
    if (why.code == 0 && !s->gcs)
        mb_err_set(&why, MB_ECANCELED, "the head changed meanwhile");
    if (why.code == 0) {
        v.rc = plan_unknown(s, marks);
        if (v.rc == 0)
            mb_tables_each(s->local, MB_TABLES_KV, mb_blob_str("job"), mb_blob_str(s->prefix),
                           plan_record, &v);
        fail_step(&why, v.rc);
    }
    json_decref(marks);
    if (why.code != 0)
        sync_done(s, &why);
    turn(s, why.code == 0 ? 0 : retry_ms(s));
}

static void on_records(void *arg, const struct mb_err *err, const char *const *keys, size_t n)
{
    struct mb_kv_store *s = arg;
    struct mb_err why = *err;

    s->op = NULL;
    for (size_t i = 0; why.code == 0 && i < n; i++)
        json_object_set_new(s->records, keys[i] + strlen(s->prefix), json_true());
    if (why.code == 0 && !s->gcs)
        mb_err_set(&why, MB_ECANCELED, "the head changed meanwhile");
    if (why.code == 0 &&
        mb_gcs_kv_keys(s->gcs, "mobula", MB_KV_STORE_MARK, TRY_MS, on_marks, s, &s->op, &why) == 0)
        return;
    s->is_busy = 0;
    sync_done(s, &why);
    turn(s, retry_ms(s));
}

static void begin_sync(struct mb_kv_store *s)
{
    struct mb_err err = {0};

    s->sync_wanted = 0;
    s->is_all = s->all_wanted;
    s->all_wanted = 0;
    s->is_syncing = 1;
    s->is_synced = 0;
    clear_tasks(s); /* of a write, too: it begins again behind this */
    s->is_write = s->has_asked_nodes = 0;
    s->records = json_object();
    s->is_busy = s->records &&
                 mb_gcs_kv_keys(s->gcs, "job", s->prefix, TRY_MS, on_records, s, &s->op, &err) == 0;
    if (s->is_busy)
        return;
    if (err.code == 0)
        mb_err_set(&err, MB_ENOMEM, "out of memory");
    sync_done(s, &err);
    turn(s, retry_ms(s));
}

static void end_sync(struct mb_kv_store *s)
{
    struct mb_err ok = {0}, err = {0};
    const char *cluster = mb_gcs_cluster_id(s->gcs);

    if (mb_tables_put(s->local, MB_TABLES_META, mb_blob_str(""), mb_blob_str(cluster_key),
                      mb_blob_str(cluster), NULL, NULL, &err) != 0)
        mb_warn("jobs", "the cluster of the published jobs is not noted: %s", err.text);
    sync_done(s, &ok);
}

int mb_kv_store_has_served(const struct mb_kv_store *s, const char *cluster_hex)
{
    struct mb_blob value;

    return mb_tables_get(s->local, MB_TABLES_META, mb_blob_str(""), mb_blob_str(cluster_key),
                         &value) &&
           value.n == strlen(cluster_hex) && memcmp(value.p, cluster_hex, value.n) == 0;
}

void mb_kv_store_sync(struct mb_kv_store *s, struct mb_gcs *gcs, int all)
{
    s->gcs = gcs;
    s->all_wanted |= all;
    s->sync_wanted = 1;
    turn(s, 0);
}

void mb_kv_store_hold(struct mb_kv_store *s)
{
    s->gcs = NULL;
    s->is_synced = s->sync_wanted = 0;
    s->all_wanted = 1;
}

/* ---- writes ---- */

static int plan_write(struct mb_kv_store *s)
{
    const struct store_write *w = s->waiting.head;
    struct mb_blob key = mb_record_key(w->record);
    const char *id = (const char *)key.p + strlen(s->prefix);
    size_t n = key.n - strlen(s->prefix);
    int rc = 0;

    clear_tasks(s);
    if (w->kind == STORE_PUT && !w->old)
        rc = add_task(s, PUT_MARK, id, n);
    if (rc == 0)
        rc = add_task(s, w->kind == STORE_PUT ? PUT_RECORD : DEL_RECORD, id, n);
    if (rc == 0 && w->kind == STORE_DEL)
        rc = add_task(s, DEL_MARK, id, n);
    s->is_write = rc == 0;
    return rc;
}

/* One thing at a time; called by the timer only. */
static void do_step(struct mb_kv_store *s)
{
    struct mb_err err = {0};

    if (!s->gcs) {
        mb_err_set(&err, MB_EUNAVAIL, "not connected to the head");
        on_step(s, &err);
    } else if (s->at < s->n_tasks && is_over(s, &s->tasks[s->at])) {
        on_step(s, &err);
    } else if (s->at < s->n_tasks) {
        s->is_busy = send_step(s, &s->tasks[s->at], &err) == 0;
        if (!s->is_busy)
            on_step(s, &err);
    } else if (s->is_syncing) {
        end_sync(s);
        turn(s, 0);
    } else {
        keep_oldest(s);
        turn(s, 0);
    }
}

static void on_local_closed(void *arg);

/* Everything that the local store does not have. */
static void undo_newest(struct mb_kv_store *s, const struct mb_err *err)
{
    struct store_queue kept = {0}, undone = {0};
    struct mb_err why = *err;
    struct store_write *w = s->waiting.head;

    for (size_t i = 0; w; i++) {
        struct store_write *next = w->next;
        store_queue_push(i < s->n_local ? &kept : &undone, w);
        w = next;
    }
    s->waiting = kept;
    s->n_refused = 0;
    tables_undo(s->tables, &undone, &why);
}

static void pump(struct mb_kv_store *s)
{
    struct mb_err late = {0};

    if (s->is_busy)
        return;
    if (s->n_refused > 0 && s->n_local + s->n_refused == s->waiting.n)
        undo_newest(s, &s->refusal);
    if (s->sync_wanted && s->gcs && !s->is_syncing && !s->closing) {
        begin_sync(s);
        return;
    }
    if (s->is_syncing && s->is_late) {
        mb_err_set(&late, MB_ECANCELED, "stopping");
        sync_done(s, &late);
    }
    if (s->is_syncing) {
        do_step(s);
        return;
    }
    while (s->n_local > 0 && (!is_published(s, s->waiting.head) || s->is_late))
        keep_oldest(s);
    if (s->n_local > 0 && s->is_synced && (s->is_write || plan_write(s) == 0))
        do_step(s);
    else if (s->n_local > 0 && s->is_synced)
        turn(s, retry_ms(s)); /* no memory */
    else if (s->closing == 1 && s->waiting.n == 0) {
        s->closing = 2;
        mb_tables_close(s->local, on_local_closed, s);
    }
}

static void on_turn(uv_timer_t *timer)
{
    pump(timer->data);
}

static void turn(struct mb_kv_store *s, uint64_t delay_ms)
{
    if (s->closing < 2)
        uv_timer_start(&s->timer, on_turn, delay_ms, 0);
}

/* The local store kept it, or undid it and everything behind it. */
static void on_local(void *arg, const struct mb_err *err)
{
    struct mb_kv_store *s = arg;

    if (s->n_undone > 0) {
        s->n_undone--;
    } else if (err->code != 0) {
        s->n_undone = s->waiting.n - s->n_local - s->n_refused - 1;
        undo_newest(s, err);
    } else {
        s->n_local++;
        if (!s->is_busy)
            turn(s, 0);
    }
}

/* What the local store does not even take is undone at a turn of its own, with what follows it. */
static void submit(void *self, struct store_write *w)
{
    struct mb_kv_store *s = self;
    int rc = 0;

    store_queue_push(&s->waiting, w);
    if (s->n_refused > 0)
        rc = MB_ESTATE;
    else if (w->kind == STORE_PUT)
        rc = mb_tables_put(s->local, w->table, mb_record_ns(w->record), mb_record_key(w->record),
                           mb_record_value(w->record), on_local, s, &s->refusal);
    else if (w->kind == STORE_DEL)
        rc = mb_tables_del(s->local, w->table, mb_record_ns(w->record), mb_record_key(w->record),
                           on_local, s, &s->refusal);
    else
        rc = mb_tables_barrier(s->local, on_local, s, &s->refusal);
    if (rc == 0)
        return;
    s->n_refused++;
    if (!s->is_busy)
        turn(s, 0);
}

/* ---- life ---- */

static void on_handle_closed(uv_handle_t *handle)
{
    struct mb_kv_store *s = handle->data;
    struct mb_tables *tables = s->tables;

    if (--s->handles > 0)
        return;
    clear_tasks(s);
    mb_free(s->tasks);
    json_decref(s->records);
    mb_free(s);
    tables_closed(tables);
}

static void on_local_closed(void *arg)
{
    struct mb_kv_store *s = arg;

    uv_close((uv_handle_t *)&s->timer, on_handle_closed);
    uv_close((uv_handle_t *)&s->closer, on_handle_closed);
}

static void on_late(uv_timer_t *timer)
{
    struct mb_kv_store *s = timer->data;

    s->is_late = 1;
    if (s->op)
        mb_gcs_op_cancel(s->op); /* its callback takes the next turn */
    else
        turn(s, 0);
}

static void close_store(void *self)
{
    struct mb_kv_store *s = self;

    s->closing = 1;
    uv_timer_start(&s->closer, on_late, s->is_synced ? CLOSE_MS : 0, 0);
    if (!s->is_busy)
        turn(s, 0);
}

struct copy {
    struct mb_tables *to;
    struct mb_blob ns;
};

static int copy_one(void *arg, struct mb_blob key, struct mb_blob value)
{
    struct copy *c = arg;

    return tables_load(c->to, MB_TABLES_KV, c->ns, key, value);
}

static int copy_tables(struct mb_kv_store *s)
{
    struct copy job = {s->tables, mb_blob_str("job")}, ours = {s->tables, mb_blob_str("mobula")};
    int rc = mb_tables_each(s->local, MB_TABLES_KV, job.ns, mb_blob_str(""), copy_one, &job);

    return rc ? rc
              : mb_tables_each(s->local, MB_TABLES_KV, ours.ns, mb_blob_str(""), copy_one, &ours);
}

/* Made once; it is in the file before any mark is published, since each waits for a write behind.
 */
static int read_store_id(struct mb_kv_store *s, struct mb_err *err)
{
    struct mb_blob id;
    uint8_t bytes[STORE_ID_BYTES];

    if (mb_tables_get(s->local, MB_TABLES_META, mb_blob_str(""), mb_blob_str(store_key), &id) &&
        id.n == sizeof s->mark - 1) {
        memcpy(s->mark, id.p, id.n);
        return 0;
    }
    mb_random_bytes(bytes, sizeof bytes);
    return mb_tables_put(s->local, MB_TABLES_META, mb_blob_str(""), mb_blob_str(store_key),
                         mb_blob_str(mb_hex(bytes, sizeof bytes, s->mark)), NULL, NULL, err);
}

int mb_kv_store_open(uv_loop_t *loop, const char *path, const char *prefix,
                     const struct mb_kv_store_ops *ops, void *arg, struct mb_kv_store **out,
                     struct mb_tables **tables, struct mb_err *err)
{
    static const struct store_backend backend = {submit, close_store};
    struct mb_kv_store *s = mb_calloc(1, sizeof *s);
    int rc = 0;

    *out = NULL;
    *tables = NULL;
    if (!s || !(s->tables = tables_create("store of jobs"))) {
        mb_free(s);
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    rc = mb_tables_open_sqlite(loop, path, 0, &s->local, err);
    if (rc == 0 && copy_tables(s) != 0)
        rc = mb_err_set(err, MB_ENOMEM, "%s: out of memory", path);
    else if (rc == 0)
        rc = read_store_id(s, err);
    if (rc != 0) {
        if (s->local)
            mb_tables_close(s->local, NULL, NULL);
        tables_free(s->tables);
        mb_free(s);
        return rc;
    }
    s->loop = loop;
    s->prefix = prefix;
    s->ops = ops;
    s->arg = arg;
    s->all_wanted = 1;
    s->handles = 2;
    uv_timer_init(loop, &s->timer);
    uv_timer_init(loop, &s->closer);
    s->timer.data = s->closer.data = s;
    s->tables->backend = &backend;
    s->tables->self = s;
    *out = s;
    *tables = s->tables;
    return 0;
}
