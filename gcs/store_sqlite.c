/*
 * The store on SQLite (WAL).
 *
 * Happy path:
 *  1. open: exclusive lock, schema, integrity check, every table loaded into its mirror.
 *  2. put/del: the mirror changes, the write joins the queue; the old record stays with the write.
 *  3. The writer thread takes the whole queue, applies it in one transaction and commits.
 *  4. It reports the batch through uv_async; the loop frees the old records and runs the callbacks.
 * Failure paths:
 *  5. The transaction fails (disk full, I/O error): the writer reports the batch as failed and
 * takes nothing more until the loop has undone, newest first, that batch and everything queued
 * behind it (those writes may rest on what failed); all their callbacks get the error.
 *  6. The file is damaged or not ours: open fails with MB_ECORRUPT and leaves it alone.
 *  7. close: the queue is committed first; a second head on the same file is refused by the lock.
 */
#include "gcs/store.h"

#include <assert.h>
#include <pthread.h>
#include <sqlite3.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/log.h"
#include "gcs/mirror.h"

enum { SCHEMA_VERSION = 1, APPLICATION_ID = 0x6d6f6275 /* "mobu" */ };

static const char *const table_names[MB_TABLES_TABLES] = {"meta", "kv", "nodes", "jobs",
                                                          "placement_groups"};

enum write_kind { WRITE_PUT, WRITE_DEL, WRITE_BARRIER };

/* A write on its way to the disk. Its record stays readable for the writer thread: the mirror or a
 * later write's `old` owns it, and later writes are freed later. */
struct write {
    struct write *next;
    enum write_kind kind;
    enum mb_tables_table table;
    struct mb_record *record; /* PUT: the new one (borrowed); DEL: the deleted one (owned) */
    struct mb_record *old;    /* PUT: the replaced one or NULL (owned) */
    size_t size_bytes;
    mb_tables_cb cb;
    void *cb_arg;
};

struct queue {
    struct write *head, *tail;
    size_t n;
    size_t size_bytes;
};

struct mb_tables {
    sqlite3 *db; /* the writer thread's, after open */
    sqlite3_stmt *put[MB_TABLES_TABLES];
    sqlite3_stmt *del[MB_TABLES_TABLES];
    struct mb_mirror mirror[MB_TABLES_TABLES];
    char *path;

    uv_async_t async;
    pthread_t writer;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    /* under lock */
    struct queue waiting;  /* for the writer */
    struct queue finished; /* committed, callbacks not run */
    struct queue failed;   /* the batch whose transaction failed */
    struct mb_err failure; /* why; the writer pauses while code is set */
    size_t busy;           /* writes in the transaction that runs now */
    int stopping;

    void (*closed_cb)(void *arg);
    void *closed_arg;
};

struct mb_blob mb_blob_str(const char *s)
{
    return (struct mb_blob){s, strlen(s)};
}

static void queue_push(struct queue *q, struct write *w)
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

static void queue_append(struct queue *q, struct queue *from)
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

static int sqlite_code(int rc)
{
    switch (rc & 0xff) {
    case SQLITE_OK:
        return MB_OK;
    case SQLITE_NOMEM:
        return MB_ENOMEM;
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
        return MB_ECORRUPT;
    case SQLITE_FULL:
        return MB_EFULL;
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
        return MB_EEXIST;
    default:
        return MB_EIO;
    }
}

static int sqlite_fail(struct mb_err *err, const struct mb_tables *s, const char *what, int rc)
{
    int code = sqlite_code(rc);

    if (code == MB_EEXIST)
        return mb_err_set(err, code, "store %s is in use by another head", s->path);
    return mb_err_set(err, code, "store %s: %s: %s", s->path, what,
                      s->db ? sqlite3_errmsg(s->db) : sqlite3_errstr(rc));
}

static int exec(struct mb_tables *s, const char *sql, struct mb_err *err)
{
    int rc = sqlite3_exec(s->db, sql, NULL, NULL, NULL);

    return rc == SQLITE_OK ? 0 : sqlite_fail(err, s, sql, rc);
}

/* First column of the first row of a query, as an integer or as text compared with `expect`. */
static int query_int(struct mb_tables *s, const char *sql, int *out, struct mb_err *err)
{
    sqlite3_stmt *st = NULL;
    int rc = sqlite3_prepare_v2(s->db, sql, -1, &st, NULL);

    if (rc == SQLITE_OK && (rc = sqlite3_step(st)) == SQLITE_ROW) {
        *out = sqlite3_column_int(st, 0);
        rc = SQLITE_OK;
    }
    sqlite3_finalize(st);
    return rc == SQLITE_OK ? 0 : sqlite_fail(err, s, sql, rc);
}

static int check_integrity(struct mb_tables *s, struct mb_err *err)
{
    sqlite3_stmt *st = NULL;
    int rc = sqlite3_prepare_v2(s->db, "PRAGMA quick_check(1)", -1, &st, NULL);
    int result = 0;

    if (rc == SQLITE_OK)
        rc = sqlite3_step(st);
    if (rc != SQLITE_ROW) {
        result = sqlite_fail(err, s, "integrity check", rc);
    } else {
        const char *text = (const char *)sqlite3_column_text(st, 0);
        if (!text || strcmp(text, "ok") != 0)
            result = mb_err_set(err, MB_ECORRUPT, "store %s is damaged: %s", s->path,
                                text ? text : "no answer from the integrity check");
    }
    sqlite3_finalize(st);
    return result;
}

static int load_table(struct mb_tables *s, enum mb_tables_table t, struct mb_err *err)
{
    char sql[96];
    sqlite3_stmt *st = NULL;
    int rc, result = 0;

    snprintf(sql, sizeof sql, "SELECT ns,k,v FROM %s ORDER BY ns,k", table_names[t]);
    rc = sqlite3_prepare_v2(s->db, sql, -1, &st, NULL);
    while (rc == SQLITE_OK || rc == SQLITE_ROW) {
        rc = sqlite3_step(st);
        if (rc != SQLITE_ROW)
            break;
        struct mb_blob col[3];
        for (int i = 0; i < 3; i++) {
            col[i].p = sqlite3_column_blob(st, i);
            col[i].n = (size_t)sqlite3_column_bytes(st, i);
        }
        struct mb_record *r = mb_record_new(col[0], col[1], col[2]);
        if (!r || mb_mirror_reserve(&s->mirror[t], 1) != 0) {
            mb_free(r);
            result = mb_err_set(err, MB_ENOMEM, "store %s: out of memory while loading", s->path);
            break;
        }
        mb_free(mb_mirror_swap_in(&s->mirror[t], r));
    }
    if (result == 0 && rc != SQLITE_DONE)
        result = sqlite_fail(err, s, sql, rc);
    sqlite3_finalize(st);
    return result;
}

static int prepare_schema(struct mb_tables *s, struct mb_err *err)
{
    int version = 0, app = 0, n_tables = 0;
    int rc = query_int(s, "PRAGMA user_version", &version, err);

    if (rc == 0)
        rc = query_int(s, "PRAGMA application_id", &app, err);
    if (rc == 0)
        rc = query_int(s, "SELECT count(*) FROM sqlite_master", &n_tables, err);
    if (rc != 0)
        return rc;
    if (n_tables > 0 && app != APPLICATION_ID)
        return mb_err_set(err, MB_ECORRUPT, "store %s is an SQLite file of another program",
                          s->path);
    if (version > SCHEMA_VERSION)
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "store %s has schema version %d, this program knows up to %d", s->path,
                          version, SCHEMA_VERSION);
    if (version == SCHEMA_VERSION)
        return 0;
    rc = exec(s, "BEGIN IMMEDIATE", err);
    for (int t = 0; rc == 0 && t < MB_TABLES_TABLES; t++) {
        char sql[160];
        snprintf(sql, sizeof sql,
                 "CREATE TABLE %s(ns BLOB NOT NULL, k BLOB NOT NULL, v BLOB NOT NULL, "
                 "PRIMARY KEY(ns,k)) WITHOUT ROWID",
                 table_names[t]);
        rc = exec(s, sql, err);
    }
    if (rc == 0)
        rc = exec(s, "PRAGMA application_id=1836016245", err);
    if (rc == 0)
        rc = exec(s, "PRAGMA user_version=1", err);
    return rc == 0 ? exec(s, "COMMIT", err) : rc;
}

static int prepare_statements(struct mb_tables *s, struct mb_err *err)
{
    char sql[160];
    int rc = SQLITE_OK;

    for (int t = 0; rc == SQLITE_OK && t < MB_TABLES_TABLES; t++) {
        snprintf(sql, sizeof sql,
                 "INSERT INTO %s(ns,k,v) VALUES(?1,?2,?3) "
                 "ON CONFLICT(ns,k) DO UPDATE SET v=excluded.v",
                 table_names[t]);
        rc = sqlite3_prepare_v3(s->db, sql, -1, SQLITE_PREPARE_PERSISTENT, &s->put[t], NULL);
        if (rc != SQLITE_OK)
            break;
        snprintf(sql, sizeof sql, "DELETE FROM %s WHERE ns=?1 AND k=?2", table_names[t]);
        rc = sqlite3_prepare_v3(s->db, sql, -1, SQLITE_PREPARE_PERSISTENT, &s->del[t], NULL);
    }
    return rc == SQLITE_OK ? 0 : sqlite_fail(err, s, "preparing statements", rc);
}

static int open_db(struct mb_tables *s, int sync_full, struct mb_err *err)
{
    int rc = sqlite3_open_v2(
        s->path, &s->db, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX, NULL);

    if (rc != SQLITE_OK)
        return sqlite_fail(err, s, "open", rc);
    sqlite3_extended_result_codes(s->db, 1);
    sqlite3_busy_timeout(s->db, 1000); /* a head that is just ending may still hold the lock */
    rc = exec(s, "PRAGMA locking_mode=EXCLUSIVE", err);
    if (rc == 0)
        rc = exec(s, "PRAGMA journal_mode=WAL", err);
    if (rc == 0)
        rc = exec(s, sync_full ? "PRAGMA synchronous=FULL" : "PRAGMA synchronous=NORMAL", err);
    if (rc == 0)
        rc = prepare_schema(s, err);
    if (rc == 0)
        rc = check_integrity(s, err);
    for (int t = 0; rc == 0 && t < MB_TABLES_TABLES; t++)
        rc = load_table(s, (enum mb_tables_table)t, err);
    return rc == 0 ? prepare_statements(s, err) : rc;
}

/* ---- the writer thread ---- */

static int bind_blob(sqlite3_stmt *st, int i, struct mb_blob b)
{
    return sqlite3_bind_blob64(st, i, b.n > 0 ? b.p : "", b.n, SQLITE_STATIC);
}

static int apply(struct mb_tables *s, const struct write *w)
{
    if (w->kind == WRITE_BARRIER)
        return SQLITE_OK;
    sqlite3_stmt *st = w->kind == WRITE_PUT ? s->put[w->table] : s->del[w->table];
    int rc = bind_blob(st, 1, mb_record_ns(w->record));

    if (rc == SQLITE_OK)
        rc = bind_blob(st, 2, mb_record_key(w->record));
    if (rc == SQLITE_OK && w->kind == WRITE_PUT)
        rc = bind_blob(st, 3, mb_record_value(w->record));
    if (rc == SQLITE_OK)
        rc = sqlite3_step(st);
    sqlite3_reset(st);
    sqlite3_clear_bindings(st);
    return rc == SQLITE_DONE ? SQLITE_OK : rc;
}

static int commit_batch(struct mb_tables *s, const struct queue *batch, struct mb_err *err)
{
    int rc = sqlite3_exec(s->db, "BEGIN IMMEDIATE", NULL, NULL, NULL);

    for (const struct write *w = batch->head; rc == SQLITE_OK && w; w = w->next)
        rc = apply(s, w);
    if (rc == SQLITE_OK)
        rc = sqlite3_exec(s->db, "COMMIT", NULL, NULL, NULL);
    if (rc == SQLITE_OK)
        return 0;
    int code = sqlite_fail(err, s, "write", rc);
    if (!sqlite3_get_autocommit(s->db))
        sqlite3_exec(s->db, "ROLLBACK", NULL, NULL, NULL);
    return code;
}

static void *writer_main(void *arg)
{
    struct mb_tables *s = arg;

    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (s->failure.code != 0 || (!s->waiting.head && !s->stopping))
            pthread_cond_wait(&s->wake, &s->lock);
        if (!s->waiting.head)
            break;
        struct queue batch = s->waiting;
        struct mb_err err = {0};
        memset(&s->waiting, 0, sizeof s->waiting);
        s->busy = batch.n;
        pthread_mutex_unlock(&s->lock);
        int rc = commit_batch(s, &batch, &err);
        pthread_mutex_lock(&s->lock);
        s->busy = 0;
        if (rc == 0) {
            queue_append(&s->finished, &batch);
        } else {
            queue_append(&s->failed, &batch);
            s->failure = err;
        }
        uv_async_send(&s->async);
    }
    s->stopping = 2;
    uv_async_send(&s->async);
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* ---- the loop's side ---- */

static void write_done(struct write *w, const struct mb_err *err)
{
    if (w->cb)
        w->cb(w->cb_arg, err);
    mb_free(w);
}

static void run_finished(struct queue *q)
{
    struct mb_err ok = {0};

    for (struct write *w = q->head, *next; w; w = next) {
        next = w->next;
        mb_free(w->old);
        if (w->kind == WRITE_DEL)
            mb_free(w->record);
        write_done(w, &ok);
    }
}

/* Newest first, so that each write finds the mirror as it left it. */
static void undo(struct mb_tables *s, const struct queue *q)
{
    struct write *stack = NULL;

    for (struct write *w = q->head, *next; w; w = next) {
        next = w->next;
        w->next = stack;
        stack = w;
    }
    for (struct write *w = stack; w; w = w->next) {
        struct mb_mirror *m = &s->mirror[w->table];
        if (w->kind == WRITE_PUT) {
            struct mb_blob ns = mb_record_ns(w->record), key = mb_record_key(w->record);
            struct mb_record *mine =
                w->old ? mb_mirror_swap_in(m, w->old) : mb_mirror_take(m, ns, key);
            assert(mine == w->record);
            mb_free(mine);
        } else if (w->kind == WRITE_DEL && w->record) {
            /* The array never shrinks, so there is room for what was taken out. */
            mb_free(mb_mirror_swap_in(m, w->record));
        }
    }
    /* Callbacks oldest first. */
    struct write *ordered = NULL;
    for (struct write *w = stack, *next; w; w = next) {
        next = w->next;
        w->next = ordered;
        ordered = w;
    }
    struct mb_err err = s->failure;
    for (struct write *w = ordered, *next; w; w = next) {
        next = w->next;
        write_done(w, &err);
    }
}

static void on_closed(uv_handle_t *handle)
{
    struct mb_tables *s = handle->data;
    void (*cb)(void *) = s->closed_cb;
    void *arg = s->closed_arg;

    for (int t = 0; t < MB_TABLES_TABLES; t++)
        mb_mirror_close(&s->mirror[t]);
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->wake);
    mb_free(s->path);
    mb_free(s);
    if (cb)
        cb(arg);
}

static void close_db(struct mb_tables *s)
{
    for (int t = 0; t < MB_TABLES_TABLES; t++) {
        sqlite3_finalize(s->put[t]);
        sqlite3_finalize(s->del[t]);
    }
    sqlite3_close(s->db);
    s->db = NULL;
}

static void on_async(uv_async_t *async)
{
    struct mb_tables *s = async->data;
    struct queue finished, failed = {0};
    int stopped;

    pthread_mutex_lock(&s->lock);
    finished = s->finished;
    memset(&s->finished, 0, sizeof s->finished);
    if (s->failure.code != 0) {
        failed = s->failed;
        memset(&s->failed, 0, sizeof s->failed);
        queue_append(&failed, &s->waiting);
    }
    stopped = s->stopping == 2;
    pthread_mutex_unlock(&s->lock);

    run_finished(&finished);
    if (failed.head) {
        mb_error("store", "%zu writes undone: %s", failed.n, s->failure.text);
        undo(s, &failed);
        pthread_mutex_lock(&s->lock);
        mb_err_clear(&s->failure);
        pthread_cond_signal(&s->wake);
        pthread_mutex_unlock(&s->lock);
    }
    if (stopped && s->db) {
        pthread_join(s->writer, NULL);
        close_db(s);
        uv_close((uv_handle_t *)&s->async, on_closed);
    }
}

static int enqueue(struct mb_tables *s, struct write *w, struct mb_err *err)
{
    int rc = 0;

    pthread_mutex_lock(&s->lock);
    if (s->waiting.n + s->busy >= MB_TABLES_QUEUE_MAX ||
        s->waiting.size_bytes + w->size_bytes > MB_TABLES_QUEUE_BYTES_MAX) {
        rc = mb_err_set(err, MB_EFULL, "store %s: too many writes wait for the disk", s->path);
    } else {
        queue_push(&s->waiting, w);
        pthread_cond_signal(&s->wake);
    }
    pthread_mutex_unlock(&s->lock);
    return rc;
}

static struct write *new_write(enum write_kind kind, enum mb_tables_table table, mb_tables_cb cb,
                               void *arg)
{
    struct write *w = mb_calloc(1, sizeof *w);

    if (w) {
        w->kind = kind;
        w->table = table;
        w->cb = cb;
        w->cb_arg = arg;
    }
    return w;
}

int mb_tables_put(struct mb_tables *s, enum mb_tables_table table, struct mb_blob ns,
                  struct mb_blob key, struct mb_blob value, mb_tables_cb cb, void *arg,
                  struct mb_err *err)
{
    struct mb_mirror *m = &s->mirror[table];
    struct mb_record *r = mb_record_new(ns, key, value);
    struct write *w = new_write(WRITE_PUT, table, cb, arg);
    int rc = MB_ENOMEM;

    if (!r || !w || mb_mirror_reserve(m, 1) != 0) {
        mb_err_set(err, rc, "store %s: out of memory", s->path);
        goto fail;
    }
    w->record = r;
    w->size_bytes = sizeof *r + ns.n + key.n + value.n;
    w->old = mb_mirror_swap_in(m, r);
    rc = enqueue(s, w, err);
    if (rc == 0)
        return 0;
    if (w->old)
        mb_mirror_swap_in(m, w->old);
    else
        mb_mirror_take(m, ns, key);
fail:
    mb_free(r);
    mb_free(w);
    return rc;
}

int mb_tables_del(struct mb_tables *s, enum mb_tables_table table, struct mb_blob ns,
                  struct mb_blob key, mb_tables_cb cb, void *arg, struct mb_err *err)
{
    struct write *w = new_write(WRITE_DEL, table, cb, arg);

    if (!w)
        return mb_err_set(err, MB_ENOMEM, "store %s: out of memory", s->path);
    w->record = mb_mirror_take(&s->mirror[table], ns, key);
    if (!w->record)
        w->kind = WRITE_BARRIER;
    int rc = enqueue(s, w, err);
    if (rc != 0) {
        if (w->record)
            mb_mirror_swap_in(&s->mirror[table], w->record);
        mb_free(w);
    }
    return rc;
}

int mb_tables_barrier(struct mb_tables *s, mb_tables_cb cb, void *arg, struct mb_err *err)
{
    struct write *w = new_write(WRITE_BARRIER, MB_TABLES_META, cb, arg);

    if (!w)
        return mb_err_set(err, MB_ENOMEM, "store %s: out of memory", s->path);
    int rc = enqueue(s, w, err);
    if (rc != 0)
        mb_free(w);
    return rc;
}

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

int mb_tables_open_sqlite(uv_loop_t *loop, const char *path, int sync_full, struct mb_tables **out,
                          struct mb_err *err)
{
    struct mb_tables *s = mb_calloc(1, sizeof *s);
    int rc;

    *out = NULL;
    if (!s || !(s->path = mb_strdup(path))) {
        mb_free(s);
        return mb_err_set(err, MB_ENOMEM, "store %s: out of memory", path);
    }
    rc = open_db(s, sync_full, err);
    if (rc == 0) {
        pthread_mutex_init(&s->lock, NULL);
        pthread_cond_init(&s->wake, NULL);
        s->async.data = s;
        int uv = uv_async_init(loop, &s->async, on_async);
        if (uv != 0)
            rc = mb_err_set(err, MB_EIO, "store %s: %s", path, uv_strerror(uv));
    }
    if (rc == 0) {
        int e = pthread_create(&s->writer, NULL, writer_main, s);
        if (e == 0) {
            *out = s;
            return 0;
        }
        rc = mb_err_sys(err, e, "store %s: writer thread", path);
        close_db(s);
        uv_close((uv_handle_t *)&s->async, on_closed); /* frees s */
        return rc;
    }
    close_db(s);
    for (int t = 0; t < MB_TABLES_TABLES; t++)
        mb_mirror_close(&s->mirror[t]);
    mb_free(s->path);
    mb_free(s);
    return rc;
}

void mb_tables_close(struct mb_tables *s, void (*cb)(void *arg), void *arg)
{
    s->closed_cb = cb;
    s->closed_arg = arg;
    pthread_mutex_lock(&s->lock);
    s->stopping = 1;
    pthread_cond_signal(&s->wake);
    pthread_mutex_unlock(&s->lock);
}
