/*
 * 1. open splits s3://BUCKET/KEY, makes SCRATCH/mobula-HASH/ (HASH of the URL) and names a prefix
 *    in it.
 * 2. run opens the store and sends .bin and .idx of every key, one file after the other; each waits
 *    behind on_sent (base/s3/store.h) when its bytes are there.
 * 3. Then, key by key: delete the old .idx, let .bin go, let .idx go.
 * 4. The local files are removed.
 * A failure in 2 gives up all that wait: nothing changed. One in 3 (the network breaks between two
 * small requests) is told with what is missing. The store retries what is passing.
 */
#include "worker/data/preprocess_publish.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <uv.h>
#include "base/loop.h"
#include "base/alloc.h"
#include "base/checksum.h"
#include "base/fs.h"
#include "base/s3/store.h"
#include "base/str.h"

enum {
    TICK_MS = 100,
    DELETE_TIMEOUT_MS = 60000,
    FIRST_TIMEOUT_MS = 30000,
    OUTAGE_MS = 5 * 60 * 1000
};

/* .bin or .idx of a key on its way. */
struct file {
    struct mb_publish *publish;
    char *key;  /* of the bucket */
    char *path; /* local */
    struct mb_store_op *waiting;
    int is_started, is_done, is_published;
};

struct mb_publish {
    struct mb_publish_options o;
    char *local_prefix;
    char *directory; /* scratch; NULL: the prefix is local */
    char *bucket;    /* s3://NAME */
    char *key_prefix;
    struct file *files; /* 2 a key: .bin, .idx */
    uv_loop_t loop;
    uv_timer_t timer; /* the loop comes back for cancellation */
    struct mb_store *store;
    int has_answer;
    struct mb_err err;
};

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "--output-prefix: out of memory");
}

/* ---- open ---- */

static int set_scratch(struct mb_publish *p, struct mb_err *err)
{
    const char *base = p->o.scratch_dir;
    const char *name = strrchr(p->o.prefix, '/') + 1;
    uint64_t hash = mb_crc64nvme(0, p->o.prefix, strlen(p->o.prefix));

    if (base == NULL)
        base = getenv("TMPDIR");
    if (base == NULL || *base == '\0')
        base = "/tmp";
    /* The user's number keeps two users of one /tmp apart. */
    p->directory = mb_asprintf("%s/mobula-%u-%016" PRIx64, base, (unsigned)getuid(), hash);
    if (p->directory == NULL)
        return no_memory(err);
    p->local_prefix = mb_asprintf("%s/%s", p->directory, name);
    if (p->local_prefix == NULL)
        return no_memory(err);
    if (mkdir(p->directory, 0700) != 0) {
        struct stat st;

        if (errno != EEXIST)
            return mb_err_sys(err, errno, "--scratch-dir: %s", p->directory);
        if (lstat(p->directory, &st) != 0 || !S_ISDIR(st.st_mode) || st.st_uid != getuid())
            return mb_err_set(err, MB_EDENIED, "--scratch-dir: %s is not ours", p->directory);
    }
    return 0;
}

static int set_bucket(struct mb_publish *p, struct mb_err *err)
{
    const char *rest = p->o.prefix + 5;
    size_t n = strcspn(rest, "/");
    const char *key = rest + n + strspn(rest + n, "/");

    if (*key == '\0' || mb_ends_with(key, "/"))
        return mb_err_set(err, MB_EINVAL,
                          "--output-prefix %s: a name is missing: s3://BUCKET/DIRECTORY/NAME",
                          p->o.prefix);
    p->bucket = mb_strndup(p->o.prefix, 5 + n);
    p->key_prefix = mb_strdup(key);
    return p->bucket != NULL && p->key_prefix != NULL ? 0 : no_memory(err);
}

static int set_files(struct mb_publish *p, struct mb_err *err)
{
    p->files = mb_calloc(2 * p->o.n_keys, sizeof(*p->files));
    if (p->files == NULL)
        return no_memory(err);
    for (size_t i = 0; i < 2 * p->o.n_keys; i++) {
        struct file *f = &p->files[i];
        const char *key = p->o.keys[i / 2];
        const char *end = i % 2 == 0 ? "bin" : "idx";

        f->publish = p;
        f->key = mb_asprintf("%s_%s_document.%s", p->key_prefix, key, end);
        f->path = mb_asprintf("%s_%s_document.%s", p->local_prefix, key, end);
        if (f->key == NULL || f->path == NULL)
            return no_memory(err);
    }
    return 0;
}

static void on_closed(void *arg)
{
    struct mb_store **store = arg;

    *store = NULL;
}

static void close_loop(struct mb_publish *p)
{
    if (p->store != NULL)
        mb_store_close(p->store, on_closed, &p->store);
    while (p->store != NULL)
        mb_loop_turn(&p->loop);
    uv_close((uv_handle_t *)&p->timer, NULL);
    uv_run(&p->loop, UV_RUN_DEFAULT);
    uv_loop_close(&p->loop);
}

static void on_timer(uv_timer_t *timer)
{
    (void)timer; /* the loop returns */
}

static int open_loop(struct mb_publish *p, struct mb_err *err)
{
    int rc;

    if (uv_loop_init(&p->loop) != 0)
        return no_memory(err);
    uv_timer_init(&p->loop, &p->timer);
    uv_timer_start(&p->timer, on_timer, TICK_MS, TICK_MS);
    rc = mb_store_open(&p->loop, p->bucket, &p->store, err);
    if (rc != 0) {
        mb_err_wrap(err, "--output-prefix");
        close_loop(p);
    }
    return rc;
}

static int is_cancelled(struct mb_publish *p)
{
    if (p->err.code == 0 && p->o.cancelled_cb != NULL && p->o.cancelled_cb(p->o.ctx))
        mb_err_set(&p->err, MB_ECANCELED, "cancelled");
    return p->err.code != 0;
}

static void on_listed(void *arg, const struct mb_store_result *r)
{
    struct mb_publish *p = arg;

    p->has_answer = 1;
    /* An account that may write here but not list is told nothing more. */
    if (r->error != 0 && strstr(r->text, "AccessDenied") == NULL)
        mb_err_set(&p->err, r->error, "%s", r->text);
}

/* A wrong bucket, name or secret is told before the work and not after it. */
static int check_access(struct mb_publish *p, struct mb_err *err)
{
    int rc = open_loop(p, err);

    if (rc != 0)
        return rc;
    p->has_answer = 0;
    rc = mb_store_list(p->store, p->files[1].key, FIRST_TIMEOUT_MS, on_listed, p, err);
    while (rc == 0 && !p->has_answer && !is_cancelled(p))
        mb_loop_turn(&p->loop);
    close_loop(p);
    if (rc == 0 && p->err.code != 0)
        rc = mb_err_set(err, p->err.code, "--output-prefix %s: %s", p->o.prefix, p->err.text);
    return rc;
}

int mb_publish_open(const struct mb_publish_options *o, struct mb_publish **out, struct mb_err *err)
{
    struct mb_publish *p = mb_calloc(1, sizeof(*p));
    int rc = 0;

    if (p == NULL)
        return no_memory(err);
    p->o = *o;
    if (!mb_starts_with(o->prefix, "s3://")) {
        p->local_prefix = mb_strdup(o->prefix);
        rc = p->local_prefix != NULL ? 0 : no_memory(err);
    } else {
        rc = set_bucket(p, err);
        if (rc == 0)
            rc = set_scratch(p, err);
        if (rc == 0)
            rc = set_files(p, err);
        if (rc == 0)
            rc = check_access(p, err);
    }
    if (rc != 0) {
        mb_publish_close(p);
        return rc;
    }
    *out = p;
    return 0;
}

const char *mb_publish_local_prefix(const struct mb_publish *p)
{
    return p->local_prefix;
}

void mb_publish_close(struct mb_publish *p)
{
    if (p == NULL)
        return;
    if (p->directory != NULL)
        (void)rmdir(p->directory); /* fails, as it should, while something is in it */
    for (size_t i = 0; p->files != NULL && i < 2 * p->o.n_keys; i++) {
        mb_free(p->files[i].key);
        mb_free(p->files[i].path);
    }
    mb_free(p->files);
    mb_free(p->local_prefix);
    mb_free(p->directory);
    mb_free(p->bucket);
    mb_free(p->key_prefix);
    mb_free(p);
}

/* ---- run ---- */

static void on_sent(void *arg, struct mb_store_op *op)
{
    struct file *f = arg;

    f->waiting = op;
}

static void note(struct mb_publish *p, const struct mb_store_result *r)
{
    if (r->error != 0 && p->err.code == 0)
        mb_err_set(&p->err, r->error, "%s", r->text);
}

static void on_put(void *arg, const struct mb_store_result *r)
{
    struct file *f = arg;

    f->waiting = NULL;
    f->is_done = 1;
    f->is_published = r->error == 0;
    note(f->publish, r);
}

static void on_deleted(void *arg, const struct mb_store_result *r)
{
    struct mb_publish *p = arg;

    p->has_answer = 1;
    note(p, r);
}

static void send_file(struct mb_publish *p, struct file *f)
{
    struct mb_store_put_file req = {
        .key = f->key, .path = f->path, .outage_ms = OUTAGE_MS, .on_sent = on_sent};

    if (is_cancelled(p) || mb_store_put_file(p->store, &req, on_put, f, &p->err) != 0)
        return;
    f->is_started = 1;
    while (f->waiting == NULL && !f->is_done && !is_cancelled(p))
        mb_loop_turn(&p->loop);
}

/* From here on a cancellation waits: a few small requests are left. */
static void let_go(struct mb_publish *p, struct file *f)
{
    if (p->err.code != 0)
        return;
    mb_store_put_go(f->waiting);
    while (!f->is_done)
        mb_loop_turn(&p->loop);
}

static void publish_key(struct mb_publish *p, struct file *bin, struct file *idx)
{
    p->has_answer = 0;
    if (p->err.code != 0 ||
        mb_store_delete(p->store, idx->key, DELETE_TIMEOUT_MS, on_deleted, p, &p->err) != 0)
        return;
    while (!p->has_answer)
        mb_loop_turn(&p->loop);
    let_go(p, bin);
    let_go(p, idx);
}

static void give_up(struct mb_publish *p)
{
    for (size_t i = 0; i < 2 * p->o.n_keys; i++) {
        struct file *f = &p->files[i];

        if (!f->is_started || f->is_done || f->waiting == NULL)
            continue;
        mb_store_put_give_up(f->waiting);
        while (!f->is_done)
            mb_loop_turn(&p->loop);
    }
}

static int explain(struct mb_publish *p, size_t n_published, struct mb_err *err)
{
    if (n_published == 0)
        return mb_err_set(err, p->err.code,
                          "upload: %s; the objects are as they were, the files stay in %s",
                          p->err.text, p->directory);
    return mb_err_set(err, p->err.code,
                      "upload: %s; %zu of %zu objects are new, an .idx that is missing was not "
                      "written; the files stay in %s",
                      p->err.text, n_published - 1, 2 * p->o.n_keys, p->directory);
}

int mb_publish_run(struct mb_publish *p, struct mb_err *err)
{
    size_t n = 2 * p->o.n_keys;
    size_t n_published = 0; /* 1 + objects, as soon as one may have changed */
    int rc;

    if (p->directory == NULL)
        return 0;
    rc = open_loop(p, err);
    if (rc != 0)
        return rc;
    for (size_t i = 0; i < n && p->err.code == 0; i++)
        send_file(p, &p->files[i]);
    if (!is_cancelled(p)) {
        for (size_t i = 0; i < n && p->err.code == 0; i += 2)
            publish_key(p, &p->files[i], &p->files[i + 1]);
        n_published = 1;
        for (size_t i = 0; i < n; i++)
            n_published += p->files[i].is_published ? 1 : 0;
    }
    rc = p->err.code;
    give_up(p);
    close_loop(p);
    if (rc != 0)
        return explain(p, n_published, err);
    for (size_t i = 0; i < n; i++) {
        if (unlink(p->files[i].path) != 0 && errno != ENOENT)
            rc = mb_err_sys(err, errno, "remove %s", p->files[i].path);
    }
    return rc;
}
