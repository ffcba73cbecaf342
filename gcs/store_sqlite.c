/*
 * The store on SQLite (WAL).
 *
 * Happy path:
 *  1. open: exclusive lock, every check below, every table loaded into its mirror.
 *  2. A turn of the loop gathers its writes and shows them to the writer thread together, which
 *     so is not woken for the first of many. The writer takes all that waits, applies it in one
 *     transaction, together with the number of the batch, and commits; then it writes that number
 *     beside the store.
 *  3. It reports the batch through uv_async; the loop hands it back to the core.
 * Failure paths:
 *  4. The transaction fails (disk full, I/O error): the writer reports the batch as failed and
 *     takes nothing more until the loop has undone that batch and everything queued behind it.
 *  5. Damage is refused with MB_ECORRUPT, before anything is written, and the files stay as they
 *     are: a foreign file, a page that is not one, a record whose checksum (CRC32C of namespace,
 * key and value with their lengths) is another, a missing file beside a journal.
 *  6. SQLite passes over a journal (WAL) that is missing or torn, as after a power loss. The number
 *     beside the store says that batches were acknowledged which it does not have: refused too,
 *     unless the machine was started anew since and the store was not opened with sync_full. That
 *     line has a checksum: a damaged boot id would be taken for another boot. Damaged, it is
 * refused; without one (removed, as that error advises) nothing can be demanded, which is said.
 *  7. close: the queue is committed first; a second head on the same file is refused by the lock.
 */
#include "gcs/store.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sqlite3.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/checksum.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/store_backend.h"
#include "gcs/store_mark.h"

enum {
    SCHEMA_VERSION = 2,         /* 1: records without checksums, no batch number */
    APPLICATION_ID = 0x6d6f6275 /* "mobu" */
};

struct sqlite_store {
    struct mb_tables *tables;
    sqlite3 *db; /* the writer thread's, after open */
    sqlite3_stmt *put[MB_TABLES_TABLES];
    sqlite3_stmt *del[MB_TABLES_TABLES];
    sqlite3_stmt *count; /* the number of the batch */
    char *path;
    int sync_full;

    int64_t batch; /* the last one committed; the writer's, after open */
    int mark_fd;   /* its number beside the store */
    char boot_id[STORE_BOOT_ID_SIZE];

    uv_async_t async;
    uv_idle_t turn;             /* active while pending has writes */
    struct store_queue pending; /* of this turn of the loop, not shown to the writer yet */
    int n_handles;              /* of the two above, not closed yet */
    pthread_t writer;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    /* under lock */
    struct store_queue waiting;  /* for the writer */
    struct store_queue finished; /* committed, callbacks not run */
    struct store_queue failed;   /* the batch whose transaction failed */
    struct mb_err failure;       /* why; the writer pauses while code is set */
    int stopping;
};

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
    case SQLITE_READONLY:
    case SQLITE_PERM:
        return MB_EDENIED;
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
        return MB_EEXIST;
    default:
        return MB_EIO;
    }
}

/* What to do about it. */
static const char *next_step(int code)
{
    switch (code) {
    case MB_ECORRUPT:
        return "; nothing was changed. Put a copy of it back, or move it and the files named like "
               "it away to begin with empty tables";
    case MB_EFULL:
        return "; make room on its disk";
    case MB_EDENIED:
        return "; the head must be able to write it and its directory";
    default:
        return "";
    }
}

static int store_fail(struct mb_err *err, const struct sqlite_store *s, int code, const char *what,
                      const char *detail)
{
    return mb_err_set(err, code, "store %s: %s%s%s%s", s->path, what, *detail ? ": " : "", detail,
                      next_step(code));
}

static int sqlite_fail(struct mb_err *err, const struct sqlite_store *s, const char *what, int rc)
{
    int code = sqlite_code(rc);

    if (code == MB_EEXIST)
        return mb_err_set(err, code, "store %s is in use by another head", s->path);
    return store_fail(err, s, code, what, s->db ? sqlite3_errmsg(s->db) : sqlite3_errstr(rc));
}

static int exec(struct sqlite_store *s, const char *sql, struct mb_err *err)
{
    int rc = sqlite3_exec(s->db, sql, NULL, NULL, NULL);

    return rc == SQLITE_OK ? 0 : sqlite_fail(err, s, sql, rc);
}

/* First column of the first row of a query, as an integer. */
static int query_int(struct sqlite_store *s, const char *sql, int64_t *out, struct mb_err *err)
{
    sqlite3_stmt *st = NULL;
    int rc = sqlite3_prepare_v2(s->db, sql, -1, &st, NULL);

    if (rc == SQLITE_OK && (rc = sqlite3_step(st)) == SQLITE_ROW) {
        *out = sqlite3_column_int64(st, 0);
        rc = SQLITE_OK;
    }
    sqlite3_finalize(st);
    return rc == SQLITE_OK ? 0 : sqlite_fail(err, s, sql, rc);
}

static int check_integrity(struct sqlite_store *s, struct mb_err *err)
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
            result = store_fail(err, s, MB_ECORRUPT, "damaged", text ? text : "");
    }
    sqlite3_finalize(st);
    return result;
}

/* ---- checksums ---- */

static uint32_t add_blob(uint32_t crc, struct mb_blob b)
{
    uint64_t n = b.n;

    crc = mb_crc32c(crc, &n, sizeof n);
    return b.n > 0 ? mb_crc32c(crc, b.p, b.n) : crc;
}

/* Lengths are in it, so that a byte cannot move from one field to the next. */
static uint32_t record_sum(struct mb_blob ns, struct mb_blob key, struct mb_blob value)
{
    return add_blob(add_blob(add_blob(0, ns), key), value);
}

/* ---- the number beside the store ---- */

static char *mark_path(const struct sqlite_store *s)
{
    return mb_asprintf("%s-batch", s->path);
}

static void write_mark(struct sqlite_store *s)
{
    char text[STORE_MARK_BYTES + 1];

    store_mark_format(s->batch, s->boot_id, text);
    if (pwrite(s->mark_fd, text, STORE_MARK_BYTES, 0) < 0)
        mb_warn("store", "%s-batch: %s; a journal that is lost would not be noticed", s->path,
                strerror(errno));
}

/* The number beside the store (-1: none), and the boot it was written in. */
static int read_mark(const struct sqlite_store *s, int64_t *batch, char boot_id[STORE_BOOT_ID_SIZE],
                     struct mb_err *err)
{
    char *path = mark_path(s);

    if (!path)
        return mb_err_set(err, MB_ENOMEM, "store %s: out of memory", s->path);
    int rc = store_mark_read(path, batch, boot_id, err);
    mb_free(path);
    return rc == MB_ECORRUPT ? mb_err_set(err, rc,
                                          "store %s-batch is damaged, or no file of ours; nothing "
                                          "was changed. Put a copy of it back, or remove it if the "
                                          "store itself is whole",
                                          s->path)
                             : rc;
}

static int check_mark(struct sqlite_store *s, struct mb_err *err)
{
    char boot_id[STORE_BOOT_ID_SIZE], detail[160];
    int64_t acknowledged = 0;
    int rc = read_mark(s, &acknowledged, boot_id, err);

    if (rc == 0 && acknowledged < 0 && s->batch > 0)
        mb_warn(
            "store",
            "store %s-batch is missing or empty: if the end of the journal (-wal) was lost with "
            "it, that cannot be noticed",
            s->path);
    if (rc != 0 || acknowledged <= s->batch)
        return rc;
    snprintf(detail, sizeof detail, "it ends with batch %lld, but batch %lld was acknowledged",
             (long long)s->batch, (long long)acknowledged);
    if (strcmp(boot_id, s->boot_id) != 0 && !s->sync_full) {
        mb_warn("store",
                "store %s: %s: the machine was started anew since; --store-sync full "
                "keeps what a power loss takes",
                s->path, detail);
        return 0;
    }
    return store_fail(err, s, MB_ECORRUPT, "its journal (-wal) is missing or damaged", detail);
}

/* Written at once: one of before gets its checksum. */
static int open_mark(struct sqlite_store *s, struct mb_err *err)
{
    char *path = mark_path(s);

    if (!path)
        return mb_err_set(err, MB_ENOMEM, "store %s: out of memory", s->path);
    s->mark_fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    int rc = s->mark_fd >= 0 ? 0 : mb_err_sys(err, errno, "store %s-batch", s->path);
    mb_free(path);
    if (rc != 0)
        return rc;
    write_mark(s);
    /* Later ones go over this one. A new file that was never flushed may be zeros after a power
     * loss, and those are damage. */
    if (fdatasync(s->mark_fd) != 0)
        return mb_err_sys(err, errno, "store %s-batch", s->path);
    return 0;
}

/* ---- open ---- */

static int load_table(struct sqlite_store *s, enum mb_tables_table t, int64_t version,
                      struct mb_err *err)
{
    char sql[96];
    sqlite3_stmt *st = NULL;
    int rc, result = 0;

    snprintf(sql, sizeof sql, "SELECT ns,k,v%s FROM %s ORDER BY ns,k", version >= 2 ? ",c" : "",
             store_table_names[t]);
    rc = sqlite3_prepare_v2(s->db, sql, -1, &st, NULL);
    while (result == 0 && (rc == SQLITE_OK || rc == SQLITE_ROW)) {
        rc = sqlite3_step(st);
        if (rc != SQLITE_ROW)
            break;
        struct mb_blob col[3];
        for (int i = 0; i < 3; i++) {
            col[i].p = sqlite3_column_blob(st, i);
            col[i].n = (size_t)sqlite3_column_bytes(st, i);
        }
        if (version >= 2 &&
            sqlite3_column_int64(st, 3) != (int64_t)record_sum(col[0], col[1], col[2])) {
            char what[64];
            snprintf(what, sizeof what, "a record of table %s fails its checksum",
                     store_table_names[t]);
            result = store_fail(err, s, MB_ECORRUPT, what, "");
        } else if (tables_load(s->tables, t, col[0], col[1], col[2]) != 0) {
            result = mb_err_set(err, MB_ENOMEM, "store %s: out of memory while loading", s->path);
        }
    }
    if (result == 0 && rc != SQLITE_DONE)
        result = sqlite_fail(err, s, sql, rc);
    sqlite3_finalize(st);
    return result;
}

static int create_schema(struct sqlite_store *s, struct mb_err *err)
{
    int rc = exec(s, "BEGIN IMMEDIATE", err);

    for (int t = 0; rc == 0 && t < MB_TABLES_TABLES; t++) {
        char sql[176];
        snprintf(sql, sizeof sql,
                 "CREATE TABLE %s(ns BLOB NOT NULL, k BLOB NOT NULL, v BLOB NOT NULL, "
                 "c INTEGER NOT NULL, PRIMARY KEY(ns,k)) WITHOUT ROWID",
                 store_table_names[t]);
        rc = exec(s, sql, err);
    }
    if (rc == 0)
        rc = exec(s, "CREATE TABLE batches(one INTEGER PRIMARY KEY, n INTEGER NOT NULL)", err);
    if (rc == 0)
        rc = exec(s, "INSERT INTO batches VALUES(1,0)", err);
    if (rc == 0)
        rc = exec(s, "PRAGMA application_id=1836016245", err);
    if (rc == 0)
        rc = exec(s, "PRAGMA user_version=2", err);
    return rc == 0 ? exec(s, "COMMIT", err) : rc;
}

/* SQL function: the checksum of a record. */
static void sql_sum(sqlite3_context *ctx, int argc, sqlite3_value **argv)
{
    struct mb_blob b[3];

    for (int i = 0; i < argc && i < 3; i++) {
        b[i].p = sqlite3_value_blob(argv[i]);
        b[i].n = (size_t)sqlite3_value_bytes(argv[i]);
    }
    sqlite3_result_int64(ctx, record_sum(b[0], b[1], b[2]));
}

/* From version 1: every record gets its checksum, in one transaction. */
static int upgrade_schema(struct sqlite_store *s, struct mb_err *err)
{
    int rc = sqlite3_create_function(s->db, "record_sum", 3, SQLITE_UTF8 | SQLITE_DETERMINISTIC,
                                     NULL, sql_sum, NULL, NULL);

    rc = rc == SQLITE_OK ? exec(s, "BEGIN IMMEDIATE", err)
                         : sqlite_fail(err, s, "checksum function", rc);
    for (int t = 0; rc == 0 && t < MB_TABLES_TABLES; t++) {
        char sql[128];
        snprintf(sql, sizeof sql, "ALTER TABLE %s ADD COLUMN c INTEGER NOT NULL DEFAULT 0",
                 store_table_names[t]);
        rc = exec(s, sql, err);
        snprintf(sql, sizeof sql, "UPDATE %s SET c=record_sum(ns,k,v)", store_table_names[t]);
        if (rc == 0)
            rc = exec(s, sql, err);
    }
    if (rc == 0)
        rc = exec(s, "CREATE TABLE batches(one INTEGER PRIMARY KEY, n INTEGER NOT NULL)", err);
    if (rc == 0)
        rc = exec(s, "INSERT INTO batches VALUES(1,0)", err);
    if (rc == 0)
        rc = exec(s, "PRAGMA user_version=2", err);
    return rc == 0 ? exec(s, "COMMIT", err) : rc;
}

/* An SQLite file that is gone or empty beside a journal that is not: SQLite would begin anew and
 * remove the journal. */
static int check_files(struct sqlite_store *s, struct mb_err *err)
{
    char boot_id[STORE_BOOT_ID_SIZE], *wal = mb_asprintf("%s-wal", s->path);
    struct stat st;
    int64_t acknowledged = 0;
    int is_empty = stat(s->path, &st) != 0 || st.st_size == 0;
    int has_journal = wal && stat(wal, &st) == 0 && st.st_size > 0;
    int rc = wal ? read_mark(s, &acknowledged, boot_id, err)
                 : mb_err_set(err, MB_ENOMEM, "store %s: out of memory", s->path);

    mb_free(wal);
    if (rc == 0 && is_empty && (has_journal || acknowledged > 0))
        rc = store_fail(err, s, MB_ECORRUPT, "the file is missing or empty",
                        "the files beside it say that it had records");
    return rc;
}

/* Reads only: what is refused stays as it is. *version 0: a new file. */
static int check_db(struct sqlite_store *s, int64_t *version, struct mb_err *err)
{
    int64_t app = 0, n_tables = 0;
    int rc = query_int(s, "PRAGMA user_version", version, err);

    if (rc == 0)
        rc = query_int(s, "PRAGMA application_id", &app, err);
    if (rc == 0)
        rc = query_int(s, "SELECT count(*) FROM sqlite_master", &n_tables, err);
    if (rc != 0)
        return rc;
    if (n_tables > 0 && app != APPLICATION_ID)
        return store_fail(err, s, MB_ECORRUPT, "an SQLite file of another program", "");
    if (n_tables == 0 && (app != 0 || *version != 0))
        return store_fail(err, s, MB_ECORRUPT, "a store without its tables", "");
    if (*version > SCHEMA_VERSION)
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "store %s has schema version %lld, this program knows up to %d; start "
                          "the newer program that wrote it",
                          s->path, (long long)*version, SCHEMA_VERSION);
    if (sqlite3_db_readonly(s->db, "main") == 1)
        return store_fail(err, s, MB_EDENIED, "it is read-only", "");
    rc = check_integrity(s, err);
    if (rc == 0 && *version >= 2)
        rc = query_int(s, "SELECT n FROM batches", &s->batch, err);
    for (int t = 0; rc == 0 && *version > 0 && t < MB_TABLES_TABLES; t++)
        rc = load_table(s, (enum mb_tables_table)t, *version, err);
    return rc == 0 ? check_mark(s, err) : rc;
}

static int prepare(struct sqlite_store *s, sqlite3_stmt **st, const char *sql)
{
    return sqlite3_prepare_v3(s->db, sql, -1, SQLITE_PREPARE_PERSISTENT, st, NULL);
}

static int prepare_statements(struct sqlite_store *s, struct mb_err *err)
{
    char sql[160];
    int rc = prepare(s, &s->count, "UPDATE batches SET n=?1");

    for (int t = 0; rc == SQLITE_OK && t < MB_TABLES_TABLES; t++) {
        snprintf(sql, sizeof sql,
                 "INSERT INTO %s(ns,k,v,c) VALUES(?1,?2,?3,?4) "
                 "ON CONFLICT(ns,k) DO UPDATE SET v=excluded.v,c=excluded.c",
                 store_table_names[t]);
        rc = prepare(s, &s->put[t], sql);
        if (rc != SQLITE_OK)
            break;
        snprintf(sql, sizeof sql, "DELETE FROM %s WHERE ns=?1 AND k=?2", store_table_names[t]);
        rc = prepare(s, &s->del[t], sql);
    }
    return rc == SQLITE_OK ? 0 : sqlite_fail(err, s, "preparing statements", rc);
}

static int open_db(struct sqlite_store *s, struct mb_err *err)
{
    int64_t version = 0;
    int rc = check_files(s, err);

    if (rc != 0)
        return rc;
    rc = sqlite3_open_v2(s->path, &s->db,
                         SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX, NULL);
    if (rc != SQLITE_OK)
        return sqlite_fail(err, s, "open", rc);
    sqlite3_extended_result_codes(s->db, 1);
    /* Closing would copy the journal into the file: not before we know that it is whole. */
    sqlite3_db_config(s->db, SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1, NULL);
    sqlite3_busy_timeout(s->db, 1000); /* a head that is just ending may still hold the lock */
    rc = exec(s, "PRAGMA locking_mode=EXCLUSIVE", err);
    if (rc == 0)
        rc = check_db(s, &version, err);
    if (rc == 0)
        rc = exec(s, "PRAGMA journal_mode=WAL", err);
    if (rc == 0)
        rc = exec(s, s->sync_full ? "PRAGMA synchronous=FULL" : "PRAGMA synchronous=NORMAL", err);
    if (rc == 0 && version < SCHEMA_VERSION)
        rc = version == 0 ? create_schema(s, err) : upgrade_schema(s, err);
    if (rc == 0)
        rc = prepare_statements(s, err);
    if (rc == 0)
        rc = open_mark(s, err);
    if (rc == 0)
        sqlite3_db_config(s->db, SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0, NULL);
    return rc;
}

/* ---- the writer thread ---- */

static int bind_blob(sqlite3_stmt *st, int i, struct mb_blob b)
{
    return sqlite3_bind_blob64(st, i, b.n > 0 ? b.p : "", b.n, SQLITE_STATIC);
}

static int step(sqlite3_stmt *st)
{
    int rc = sqlite3_step(st);

    sqlite3_reset(st);
    return rc == SQLITE_DONE ? SQLITE_OK : rc;
}

static int apply(struct sqlite_store *s, const struct store_write *w)
{
    if (w->kind == STORE_BARRIER)
        return SQLITE_OK;
    sqlite3_stmt *st = w->kind == STORE_PUT ? s->put[w->table] : s->del[w->table];
    struct mb_blob ns = mb_record_ns(w->record), key = mb_record_key(w->record);
    int rc = bind_blob(st, 1, ns);

    if (rc == SQLITE_OK)
        rc = bind_blob(st, 2, key);
    if (rc == SQLITE_OK && w->kind == STORE_PUT) {
        struct mb_blob value = mb_record_value(w->record);
        rc = bind_blob(st, 3, value);
        if (rc == SQLITE_OK)
            rc = sqlite3_bind_int64(st, 4, record_sum(ns, key, value));
    }
    if (rc == SQLITE_OK)
        rc = step(st);
    sqlite3_clear_bindings(st);
    return rc;
}

static int has_records(const struct store_queue *batch)
{
    for (const struct store_write *w = batch->head; w; w = w->next)
        if (w->kind != STORE_BARRIER)
            return 1;
    return 0;
}

static int commit_batch(struct sqlite_store *s, const struct store_queue *batch, struct mb_err *err)
{
    if (!has_records(batch))
        return 0; /* nothing but questions whether what came before is kept: it is */
    int rc = sqlite3_exec(s->db, "BEGIN IMMEDIATE", NULL, NULL, NULL);

    for (const struct store_write *w = batch->head; rc == SQLITE_OK && w; w = w->next)
        rc = apply(s, w);
    if (rc == SQLITE_OK)
        rc = sqlite3_bind_int64(s->count, 1, s->batch + 1);
    if (rc == SQLITE_OK)
        rc = step(s->count);
    if (rc == SQLITE_OK)
        rc = sqlite3_exec(s->db, "COMMIT", NULL, NULL, NULL);
    if (rc == SQLITE_OK) {
        s->batch++;
        write_mark(s);
        return 0;
    }
    int code = sqlite_fail(err, s, "write", rc);
    if (!sqlite3_get_autocommit(s->db))
        sqlite3_exec(s->db, "ROLLBACK", NULL, NULL, NULL);
    return code;
}

static void *writer_main(void *arg)
{
    struct sqlite_store *s = arg;

    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (s->failure.code != 0 || (!s->waiting.head && !s->stopping))
            pthread_cond_wait(&s->wake, &s->lock);
        if (!s->waiting.head)
            break;
        struct store_queue batch = s->waiting;
        struct mb_err err = {0};
        memset(&s->waiting, 0, sizeof s->waiting);
        pthread_mutex_unlock(&s->lock);
        int rc = commit_batch(s, &batch, &err);
        pthread_mutex_lock(&s->lock);
        if (rc == 0) {
            store_queue_append(&s->finished, &batch);
        } else {
            store_queue_append(&s->failed, &batch);
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

static void free_store(struct sqlite_store *s)
{
    if (s->mark_fd >= 0)
        close(s->mark_fd);
    mb_free(s->path);
    mb_free(s);
}

static void on_closed(uv_handle_t *handle)
{
    struct sqlite_store *s = handle->data;
    struct mb_tables *tables = s->tables;

    if (--s->n_handles > 0)
        return;
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->wake);
    free_store(s);
    if (tables)
        tables_closed(tables);
}

static void close_handles(struct sqlite_store *s)
{
    uv_close((uv_handle_t *)&s->async, on_closed);
    uv_close((uv_handle_t *)&s->turn, on_closed);
}

static void close_db(struct sqlite_store *s)
{
    for (int t = 0; t < MB_TABLES_TABLES; t++) {
        sqlite3_finalize(s->put[t]);
        sqlite3_finalize(s->del[t]);
    }
    sqlite3_finalize(s->count);
    sqlite3_close(s->db);
    s->db = NULL;
}

static void on_async(uv_async_t *async)
{
    struct sqlite_store *s = async->data;
    struct store_queue finished = {0}, failed = {0};
    struct mb_err failure = {0};

    pthread_mutex_lock(&s->lock);
    store_queue_append(&finished, &s->finished);
    if (s->failure.code != 0) {
        failure = s->failure;
        store_queue_append(&failed, &s->failed);
        store_queue_append(&failed, &s->waiting);
        store_queue_append(&failed, &s->pending);
    }
    int stopped = s->stopping == 2;
    pthread_mutex_unlock(&s->lock);

    tables_kept(s->tables, &finished);
    if (failure.code != 0) {
        tables_undo(s->tables, &failed, &failure);
        pthread_mutex_lock(&s->lock);
        mb_err_clear(&s->failure);
        pthread_cond_signal(&s->wake);
        pthread_mutex_unlock(&s->lock);
    }
    if (stopped && s->db) {
        pthread_join(s->writer, NULL);
        close_db(s);
        close_handles(s);
    }
}

static void show_pending(struct sqlite_store *s)
{
    uv_idle_stop(&s->turn);
    pthread_mutex_lock(&s->lock);
    store_queue_append(&s->waiting, &s->pending);
    pthread_cond_signal(&s->wake);
    pthread_mutex_unlock(&s->lock);
}

static void on_turn(uv_idle_t *turn)
{
    show_pending(turn->data);
}

static void submit(void *self, struct store_write *w)
{
    struct sqlite_store *s = self;

    store_queue_push(&s->pending, w);
    uv_idle_start(&s->turn, on_turn);
}

static void close_sqlite(void *self)
{
    struct sqlite_store *s = self;

    show_pending(s);
    pthread_mutex_lock(&s->lock);
    s->stopping = 1;
    pthread_cond_signal(&s->wake);
    pthread_mutex_unlock(&s->lock);
}

static struct sqlite_store *create(const char *path, int sync_full)
{
    struct sqlite_store *s = mb_calloc(1, sizeof *s);
    char name[300];

    if (!s)
        return NULL;
    s->mark_fd = -1;
    s->sync_full = sync_full;
    store_boot_id(s->boot_id);
    snprintf(name, sizeof name, "store %s", path);
    s->path = mb_strdup(path);
    s->tables = s->path ? tables_create(name) : NULL;
    if (s->tables)
        return s;
    free_store(s);
    return NULL;
}

/* The thread and what it shares with the loop. */
static int start_writer(uv_loop_t *loop, struct sqlite_store *s, struct mb_err *err)
{
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->wake, NULL);
    s->async.data = s;
    int uv = uv_async_init(loop, &s->async, on_async);
    if (uv != 0)
        return mb_err_set(err, MB_EIO, "store %s: %s", s->path, uv_strerror(uv));
    uv_idle_init(loop, &s->turn);
    s->turn.data = s;
    s->n_handles = 2;
    int e = pthread_create(&s->writer, NULL, writer_main, s);
    return e == 0 ? 0 : mb_err_sys(err, e, "store %s: writer thread", s->path);
}

int mb_tables_open_sqlite(uv_loop_t *loop, const char *path, int sync_full, struct mb_tables **out,
                          struct mb_err *err)
{
    static const struct store_backend backend = {submit, close_sqlite};
    struct sqlite_store *s = create(path, sync_full);

    *out = NULL;
    if (!s)
        return mb_err_set(err, MB_ENOMEM, "store %s: out of memory", path);
    int rc = open_db(s, err);
    if (rc == 0)
        rc = start_writer(loop, s, err);
    if (rc == 0) {
        s->tables->backend = &backend;
        s->tables->self = s;
        *out = s->tables;
        return 0;
    }
    close_db(s);
    tables_free(s->tables);
    s->tables = NULL;
    if (uv_is_active((uv_handle_t *)&s->async))
        close_handles(s); /* frees s */
    else
        free_store(s);
    return rc;
}
