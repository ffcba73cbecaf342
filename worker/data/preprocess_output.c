/*
 * The files of a run. PREFIX.preprocess/ holds `lock`, `journal` and, for key number K, K.LANE.bin,
 * K.LANE.lengths, K.LANE.documents and at the end K.idx.
 *
 * 1. open makes the directory, takes the lock, reads the journal. If it is of the same input,
 *    options and tokenizer, the files are cut to its marks (or, when it was whole, its renames are
 *    finished). Otherwise what lies there is removed, and that is said.
 * 2. save notes how far the outputs are and lets the keeper thread make that durable: fdatasync of
 *    the files first, the journal after them. Appends go on meanwhile, behind the marks.
 * 3. prepare makes .bin and .idx of all keys whole and writes the journal as "committing"; commit
 *    renames all.
 * 4. close removes the directory, or leaves it for a later run.
 * A kill at any moment leaves either a journal whose marks are all on disk, or none: then the next
 * run begins anew. The lock is a flock, so it dies with the process; the directory is only removed
 * by who holds it, and whoever gets the lock of a directory that is gone tries again.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/str.h"
#include "worker/data/preprocess_private.h"

enum { LOCK_TRIES = 100, OTHER_FILES = 64 /* inputs, connections, what we were started with */ };

struct mb_output {
    struct mb_output_options o; /* borrowed parts outlive it */
    char *directory, *lock_path, *journal_path;
    int lock_fd;
    struct mb_index_writer **writers; /* one per key */
    struct mb_journal journal;        /* the identity and the marks of the next save */
    int has_journal;                  /* one of this output is on disk */
    int is_done;                      /* committed: nothing is worth keeping */

    /* The keeper: text is its while has_work. */
    pthread_t keeper;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int keeper_runs, has_work, stops;
    struct mb_buf text;
    int rc;
    struct mb_err err;
};

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "preprocess: out of memory");
}

static void notice(const struct mb_output *out, const char *what)
{
    char text[MB_ERR_TEXT_MAX];

    snprintf(text, sizeof(text), "%s: %s", out->directory, what);
    if (out->o.notice_cb != NULL)
        out->o.notice_cb(out->o.ctx, text);
}

/* ---- directory and lock ---- */

/* 1: this is the lock of the directory that is there; 0: it was removed meanwhile. */
static int is_current(const struct mb_output *out)
{
    struct stat mine, there;

    return fstat(out->lock_fd, &mine) == 0 && stat(out->lock_path, &there) == 0 &&
           mine.st_ino == there.st_ino && mine.st_dev == there.st_dev;
}

static int take_lock(struct mb_output *out, struct mb_err *err)
{
    if (flock(out->lock_fd, LOCK_EX | LOCK_NB) == 0)
        return 0;
    if (errno == EWOULDBLOCK)
        return mb_err_set(
            err, MB_ESTATE,
            "--output-prefix %s: another process is writing there (it holds %s); wait "
            "for it or give another prefix",
            out->o.prefix, out->lock_path);
    if (errno != ENOSYS && errno != EOPNOTSUPP && errno != ENOLCK)
        return mb_err_sys(err, errno, "lock %s", out->lock_path);
    notice(out, "this file system has no locks: do not run two on one --output-prefix");
    return 0;
}

static int enter(struct mb_output *out, struct mb_err *err)
{
    for (int i = 0; i < LOCK_TRIES; i++) {
        int rc;

        if (mkdir(out->directory, 0777) != 0 && errno != EEXIST)
            return mb_err_sys(err, errno, "--output-prefix %s: cannot create %s", out->o.prefix,
                              out->directory);
        out->lock_fd = open(out->lock_path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
        if (out->lock_fd < 0 && errno == ENOENT)
            continue;
        if (out->lock_fd < 0)
            return mb_err_sys(err, errno, "--output-prefix %s: cannot create %s", out->o.prefix,
                              out->lock_path);
        rc = take_lock(out, err);
        if (rc == 0 && is_current(out))
            return 0;
        close(out->lock_fd);
        out->lock_fd = -1;
        if (rc != 0)
            return rc;
    }
    return mb_err_set(err, MB_ESTATE, "--output-prefix %s: others come and go in %s", out->o.prefix,
                      out->directory);
}

static int is_ours(const char *name)
{
    return mb_starts_with(name, "journal") ||
           (name[0] >= '0' && name[0] <= '9' &&
            (mb_ends_with(name, ".bin") || mb_ends_with(name, ".idx") ||
             mb_ends_with(name, ".lengths") || mb_ends_with(name, ".documents")));
}

/* Removes what a run leaves here; the journal goes first, so that none outlives its files. */
static int empty(const struct mb_output *out, struct mb_err *err)
{
    DIR *dir = opendir(out->directory);
    int rc = 0;

    if (dir == NULL)
        return mb_err_sys(err, errno, "%s", out->directory);
    if (unlink(out->journal_path) != 0 && errno != ENOENT)
        rc = mb_err_sys(err, errno, "remove %s", out->journal_path);
    for (struct dirent *e; rc == 0 && (e = readdir(dir)) != NULL;) {
        if (is_ours(e->d_name) && unlinkat(dirfd(dir), e->d_name, 0) != 0 && errno != ENOENT)
            rc = mb_err_sys(err, errno, "remove %s/%s", out->directory, e->d_name);
    }
    closedir(dir);
    return rc;
}

static void leave(struct mb_output *out, int keeps)
{
    if (out->lock_fd >= 0 && !keeps && is_current(out) && empty(out, NULL) == 0) {
        unlink(out->lock_path);
        rmdir(out->directory); /* others may be in it already: then it is theirs */
    }
    if (out->lock_fd >= 0)
        close(out->lock_fd);
    out->lock_fd = -1;
}

/* ---- names ---- */

static char *prefix_of(const struct mb_output *out, size_t key)
{
    return mb_asprintf("%s_%s_document", out->o.prefix, out->o.keys[key]);
}

static char *work_of(const struct mb_output *out, size_t key)
{
    return mb_asprintf("%s/%zu", out->directory, key);
}

/* ---- opening ---- */

/* 1: a journal of the same run is there, in out->journal; 0: none that counts. */
static int read_journal(struct mb_output *out, struct mb_err *err)
{
    struct mb_buf text = {0};
    struct mb_journal found = {0};
    const char *differs;
    char what[96];
    int rc;

    rc = mb_fs_read(out->journal_path, MB_JOURNAL_MAX_BYTES, &text, err);
    if (rc != 0)
        goto out;
    rc = mb_journal_read(text.data, text.len, &found, err);
    if (rc == MB_ECORRUPT) {
        notice(out, "its journal is damaged or of another version; starting over");
        rc = 0;
        goto out;
    }
    differs = mb_journal_difference(&found.identity, out->o.identity);
    if (differs == NULL && found.n_marks == out->journal.n_marks) {
        mb_journal_close(&out->journal);
        out->journal = found;
        found = (struct mb_journal){0};
        rc = 1;
    } else {
        snprintf(what, sizeof(what), "%s changed since the run that left it; starting over",
                 differs != NULL ? differs : "the outputs");
        notice(out, what);
    }
out:
    mb_journal_close(&found);
    mb_buf_close(&text);
    return rc;
}

static int open_writer(struct mb_output *out, size_t key, int continues, struct mb_err *err)
{
    char *prefix = prefix_of(out, key), *work = work_of(out, key);
    struct mb_index_writer_options o = {
        .prefix = prefix,
        .work = work,
        .dtype = out->o.dtype,
        .n_lanes = out->o.n_lanes,
        .marks = continues ? out->journal.marks + key * out->o.n_lanes : NULL,
    };
    int rc = prefix == NULL || work == NULL ? no_memory(err)
                                            : mb_index_writer_open(&o, &out->writers[key], err);

    mb_free(prefix);
    mb_free(work);
    return rc;
}

static void close_writers(struct mb_output *out, int keeps)
{
    for (size_t k = 0; out->writers != NULL && k < out->o.n_keys; k++) {
        if (keeps && out->writers[k] != NULL)
            mb_index_writer_keep(out->writers[k]);
        mb_index_writer_destroy(out->writers[k]);
        out->writers[k] = NULL;
    }
}

static int open_writers(struct mb_output *out, int continues, struct mb_err *err)
{
    int rc = 0;

    for (size_t k = 0; rc == 0 && k < out->o.n_keys; k++)
        rc = open_writer(out, k, continues, err);
    if (rc != 0)
        close_writers(out, continues);
    return rc;
}

static int finish_renames(struct mb_output *out, struct mb_err *err)
{
    int rc = 0;

    for (size_t k = 0; rc == 0 && k < out->o.n_keys; k++) {
        char *prefix = prefix_of(out, k), *work = work_of(out, k);

        rc = prefix == NULL || work == NULL ? no_memory(err) : mb_index_finish(prefix, work, err);
        mb_free(prefix);
        mb_free(work);
    }
    out->is_done = rc == 0;
    return rc;
}

/* What mb_output_open returns. */
static int begin(struct mb_output *out, struct mb_err *err)
{
    int may_go_on = out->o.identity != NULL && !out->o.starts_over;
    int rc;

    out->has_journal = may_go_on && mb_fs_exists(out->journal_path);
    rc = out->has_journal ? read_journal(out, err) : 0;
    if (rc < 0)
        return rc;
    if (rc == 1 && out->journal.phase == MB_JOURNAL_COMMITTING) {
        rc = finish_renames(out, err);
        if (rc != MB_ENOENT)
            return rc == 0 ? 2 : rc;
        mb_err_clear(err);
        notice(out, "what an earlier run had finished is gone; starting over");
        memset(out->journal.marks, 0, out->journal.n_marks * sizeof(*out->journal.marks));
        rc = 0;
    }
    if (rc == 1) {
        rc = open_writers(out, 1, err);
        if (rc == 0)
            return 1;
        if (rc != MB_ENOENT && rc != MB_ECORRUPT)
            return rc;
        mb_err_clear(err);
        notice(out, "files that its journal tells of are not there; starting over");
        memset(out->journal.marks, 0, out->journal.n_marks * sizeof(*out->journal.marks));
    }
    rc = empty(out, err);
    if (rc != 0)
        return rc;
    out->has_journal = 0;
    return open_writers(out, 0, err);
}

/* Before anything is made: all files of a run are open at a time. */
static int check_open_files(const struct mb_output_options *o, struct mb_err *err)
{
    uint64_t n = (uint64_t)o->n_keys * (3 * (uint64_t)o->n_lanes + 1) + OTHER_FILES;
    struct rlimit files;

    if (getrlimit(RLIMIT_NOFILE, &files) != 0 || n <= files.rlim_cur)
        return 0;
    return mb_err_set(err, MB_EFULL,
                      "%zu keys in %u partitions need %llu open files and %llu are allowed "
                      "(ulimit -n): give fewer --partitions",
                      o->n_keys, o->n_lanes, (unsigned long long)n,
                      (unsigned long long)files.rlim_cur);
}

static int make(const struct mb_output_options *o, struct mb_output *out, struct mb_err *err)
{
    int rc = check_open_files(o, err);

    size_t n_marks = o->n_keys * o->n_lanes;

    out->o = *o;
    out->lock_fd = -1;
    pthread_mutex_init(&out->lock, NULL);
    pthread_cond_init(&out->changed, NULL);
    if (n_marks > MB_JOURNAL_MAX_MARKS)
        return mb_err_set(err, MB_EINVAL, "%zu keys in %u partitions: more than %d files",
                          o->n_keys, o->n_lanes, MB_JOURNAL_MAX_MARKS);
    if (rc != 0)
        return rc;
    out->directory = mb_asprintf("%s.preprocess", o->prefix);
    out->lock_path = mb_asprintf("%s.preprocess/lock", o->prefix);
    out->journal_path = mb_asprintf("%s.preprocess/journal", o->prefix);
    out->writers = mb_calloc(o->n_keys, sizeof(struct mb_index_writer *));
    out->journal.marks = mb_calloc(n_marks, sizeof(*out->journal.marks));
    out->journal.n_marks = n_marks;
    if (out->directory == NULL || out->lock_path == NULL || out->journal_path == NULL ||
        out->writers == NULL || out->journal.marks == NULL)
        return no_memory(err);
    return 0;
}

int mb_output_open(const struct mb_output_options *o, struct mb_output **out,
                   struct mb_journal *journal, struct mb_err *err)
{
    struct mb_output *new = mb_calloc(1, sizeof(*new));
    int rc;

    if (new == NULL)
        return no_memory(err);
    rc = make(o, new, err);
    if (rc == 0)
        rc = enter(new, err);
    if (rc == 0)
        rc = begin(new, err);
    if (rc < 0) {
        mb_output_close(new, 1); /* what an earlier run did stays */
        return rc;
    }
    *journal = new->journal;
    journal->marks = NULL;
    journal->n_marks = 0;
    if (rc == 0)
        *journal = (struct mb_journal){0};
    if (o->identity != NULL)
        new->journal.identity = *o->identity;
    *out = new;
    return rc;
}

/* ---- appending and durable points ---- */

int mb_output_add(struct mb_output *o, size_t key, unsigned lane, const struct mb_index_batch *b,
                  struct mb_err *err)
{
    return mb_index_writer_add_batch(o->writers[key], lane, b, err);
}

uint64_t mb_output_n_tokens(const struct mb_output *o)
{
    uint64_t n = 0;

    for (size_t k = 0; k < o->o.n_keys && o->writers[k] != NULL; k++)
        n += mb_index_writer_n_tokens(o->writers[k]);
    return n;
}

uint64_t mb_output_n_sequences(const struct mb_output *o)
{
    uint64_t n = 0;

    for (size_t k = 0; k < o->o.n_keys && o->writers[k] != NULL; k++)
        n += mb_index_writer_n_sequences(o->writers[k]);
    return n;
}

static int sync_all(struct mb_output *o, struct mb_err *err)
{
    int rc = 0;

    for (size_t k = 0; rc == 0 && k < o->o.n_keys; k++)
        rc = mb_index_writer_sync(o->writers[k], err);
    if (rc == 0)
        rc = mb_fs_write_atomic(o->journal_path, o->text.data, o->text.len, 0666, err);
    return rc;
}

static void *keep(void *arg)
{
    struct mb_output *o = arg;

    pthread_mutex_lock(&o->lock);
    for (;;) {
        int rc;

        while (!o->stops && !o->has_work)
            pthread_cond_wait(&o->changed, &o->lock);
        if (!o->has_work)
            break;
        pthread_mutex_unlock(&o->lock);
        rc = sync_all(o, &o->err);
        pthread_mutex_lock(&o->lock);
        o->has_work = 0;
        o->has_journal |= rc == 0;
        o->rc = o->rc != 0 ? o->rc : rc;
        pthread_cond_broadcast(&o->changed);
    }
    pthread_mutex_unlock(&o->lock);
    return NULL;
}

static int start_keeper(struct mb_output *o, struct mb_err *err)
{
    int code = o->keeper_runs ? 0 : pthread_create(&o->keeper, NULL, keep, o);

    if (code != 0)
        return mb_err_sys(err, code, "start of the thread that keeps the journal");
    o->keeper_runs = 1;
    return 0;
}

/* Puts marks and counts into o->text; the keeper is idle. */
static int note(struct mb_output *o, const struct mb_journal *at, enum mb_journal_phase phase,
                struct mb_err *err)
{
    struct mb_journal j = *at;

    j.identity = o->journal.identity;
    j.phase = phase;
    j.marks = o->journal.marks;
    j.n_marks = o->journal.n_marks;
    for (size_t k = 0; k < o->o.n_keys; k++) {
        int rc = mb_index_writer_mark(o->writers[k], j.marks + k * o->o.n_lanes, err);
        if (rc != 0)
            return rc;
    }
    mb_buf_reset(&o->text);
    return mb_journal_write(&j, &o->text) == 0 ? 0 : no_memory(err);
}

/* Waits until the keeper is idle; what it failed with. */
static int wait_keeper(struct mb_output *o, struct mb_err *err)
{
    int rc;

    pthread_mutex_lock(&o->lock);
    while (o->has_work)
        pthread_cond_wait(&o->changed, &o->lock);
    rc = o->rc;
    if (rc != 0 && err != NULL)
        *err = o->err;
    pthread_mutex_unlock(&o->lock);
    return rc;
}

int mb_output_save(struct mb_output *o, const struct mb_journal *at, struct mb_err *err)
{
    int is_busy, rc;

    if (o->o.identity == NULL)
        return 0;
    pthread_mutex_lock(&o->lock);
    is_busy = o->has_work;
    pthread_mutex_unlock(&o->lock);
    if (is_busy)
        return 0;
    rc = wait_keeper(o, err);
    if (rc == 0)
        rc = start_keeper(o, err);
    if (rc == 0)
        rc = note(o, at, MB_JOURNAL_RUNNING, err);
    if (rc != 0)
        return rc;
    pthread_mutex_lock(&o->lock);
    o->has_work = 1;
    pthread_cond_broadcast(&o->changed);
    pthread_mutex_unlock(&o->lock);
    return 0;
}

int mb_output_save_now(struct mb_output *o, const struct mb_journal *at, struct mb_err *err)
{
    int rc = wait_keeper(o, err);

    if (rc != 0 || o->o.identity == NULL)
        return rc;
    rc = note(o, at, MB_JOURNAL_RUNNING, err);
    if (rc == 0)
        rc = sync_all(o, err);
    o->has_journal |= rc == 0;
    return rc;
}

int mb_output_prepare(struct mb_output *o, const struct mb_journal *at, struct mb_err *err)
{
    int rc = wait_keeper(o, err);

    for (size_t k = 0; rc == 0 && k < o->o.n_keys; k++)
        rc = mb_index_writer_prepare(o->writers[k], err);
    if (rc == 0 && o->o.identity != NULL) {
        rc = note(o, at, MB_JOURNAL_COMMITTING, err);
        if (rc == 0)
            rc = mb_fs_write_atomic(o->journal_path, o->text.data, o->text.len, 0666, err);
        o->has_journal |= rc == 0;
    }
    return rc;
}

int mb_output_commit(struct mb_output *o, struct mb_err *err)
{
    return finish_renames(o, err);
}

int mb_output_close(struct mb_output *o, int keeps)
{
    int kept;

    if (o == NULL)
        return 0;
    (void)wait_keeper(o, NULL);
    pthread_mutex_lock(&o->lock);
    o->stops = 1;
    pthread_cond_broadcast(&o->changed);
    pthread_mutex_unlock(&o->lock);
    if (o->keeper_runs)
        pthread_join(o->keeper, NULL);
    kept = keeps && !o->is_done && o->has_journal;
    close_writers(o, kept);
    leave(o, kept);
    pthread_cond_destroy(&o->changed);
    pthread_mutex_destroy(&o->lock);
    mb_journal_close(&o->journal);
    mb_buf_close(&o->text);
    mb_free(o->writers);
    mb_free(o->directory);
    mb_free(o->lock_path);
    mb_free(o->journal_path);
    mb_free(o);
    return kept;
}
