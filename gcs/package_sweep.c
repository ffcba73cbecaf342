/*
 * Uploaded packages go when nobody needs them any more.
 *
 *  1. Every so often a pool thread lists the packages whose last upload or look-up (their mtime) is
 *     older than the keep time: a client that was told "it is there" has that long to submit. Those
 *     that a job names which has not ended are kept, however old, and not listed.
 *  2. Back on the loop, where look-ups are answered and jobs submitted, both are asked again of
 * each that is listed. The others get a hidden name, which no request can name: from now on they
 * are not there.
 *  3. The next round's thread removes hidden files, and the parts of uploads and restores that an
 *     earlier process left: a part bears the number of the process that writes it.
 * Failure paths: a directory that cannot be read, a name that cannot be changed: next round. The
 * head stops meanwhile: the thread's result is dropped.
 */
#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/runtime_env.h"
#include "gcs/services.h"

enum { SWEEP_MS = 60 * 1000, DUE_MAX = 256, NAME_BYTES = 256 };

struct head_sweep {
    uv_work_t work;
    struct mb_head *h; /* NULL: the head has gone */
    uint64_t before_unix_ms;
    uint32_t parts_token;
    json_t *needed; /* when the thread began; it only reads */
    size_t n_due;
    char due[DUE_MAX][NAME_BYTES];
    char dir[];
};

/* ---- the pool thread ---- */

/* NAME.TTTTTTTTRRRRRRRR.part: the process's number, and a random one. */
enum { PART_BYTES = 1 + 8 + 8 + 5 };

char *head_package_temp(const struct mb_head *h, const char *path)
{
    return mb_asprintf("%s.%08x%08x.part", path, h->parts_token, (unsigned)mb_random_u64());
}

static int is_part(const char *name)
{
    size_t n = strlen(name);

    return n > 5 && strcmp(name + n - 5, ".part") == 0;
}

static int is_left(const struct head_sweep *s, const char *name)
{
    size_t n = strlen(name);
    char token[16];

    snprintf(token, sizeof token, ".%08x", s->parts_token);
    return is_part(name) && (n < PART_BYTES || memcmp(name + n - PART_BYTES, token, 9) != 0);
}

static int is_old(const struct head_sweep *s, const struct stat *st)
{
    uint64_t used_ms =
        (uint64_t)st->st_mtim.tv_sec * 1000 + (uint64_t)st->st_mtim.tv_nsec / 1000000;

    return used_ms < s->before_unix_ms;
}

static void look_at(struct head_sweep *s, const char *name)
{
    char *path = mb_asprintf("%s/%s", s->dir, name);
    struct stat st;

    if (path && lstat(path, &st) == 0 && S_ISREG(st.st_mode)) {
        if (name[0] == '.' || is_left(s, name))
            unlink(path);
        else if (!is_part(name) && is_old(s, &st) && strlen(name) < NAME_BYTES &&
                 !json_object_get(s->needed, name))
            snprintf(s->due[s->n_due++], NAME_BYTES, "%s", name);
    }
    mb_free(path);
}

static void do_list(uv_work_t *work)
{
    struct head_sweep *s = work->data;
    DIR *d = opendir(s->dir);
    const struct dirent *e;

    while (d && s->n_due < DUE_MAX && (e = readdir(d)))
        look_at(s, e->d_name);
    if (d)
        closedir(d);
}

/* ---- the loop ---- */

/* The names of the packages of jobs that have not ended, as keys. */
static json_t *needed(struct mb_head *h)
{
    json_t *names = json_object();

    for (size_t i = 0; i < h->n_jobs; i++) {
        const char *text = json_string_value(json_object_get(h->jobs[i]->info, "runtime_env_json"));
        struct mb_runtime_env env;
        if (!text || mb_job_is_terminal(h->jobs[i]->state) || !strstr(text, "gcs://"))
            continue;
        json_t *json = json_loads(text, 0, NULL);
        if (mb_runtime_env_parse(json, &env, NULL) == 0)
            for (size_t k = 0; k < env.n_refs; k++)
                json_object_set_new(names, env.refs[k].rest, json_true());
        json_decref(json);
    }
    return names;
}

/* Unless it was looked up, or came again, since the thread read its age. */
static void hide(const struct head_sweep *s, const char *name)
{
    struct mb_head *h = s->h;
    char *from = mb_asprintf("%s/%s", h->packages_dir, name);
    char *to = mb_asprintf("%s/.%s", h->packages_dir, name);
    struct stat st;

    if (from && to && lstat(from, &st) == 0 && is_old(s, &st) && rename(from, to) == 0) {
        mb_info("jobs", "package removed, no job needs it name=%s", name);
        if (h->redis && h->store)
            head_package_drop(h, name);
    }
    mb_free(from);
    mb_free(to);
}

static void free_sweep(struct head_sweep *s)
{
    json_decref(s->needed);
    mb_free(s);
}

static void on_listed(uv_work_t *work, int status)
{
    struct head_sweep *s = work->data;

    if (s->h) {
        json_t *names = status == 0 && s->n_due > 0 ? needed(s->h) : NULL;
        for (size_t i = 0; names && i < s->n_due; i++)
            if (!json_object_get(names, s->due[i]))
                hide(s, s->due[i]);
        json_decref(names);
        s->h->sweep = NULL;
    }
    free_sweep(s);
}

void head_packages_tick(struct mb_head *h, uint64_t now_ms)
{
    uint64_t every = h->package_keep_ms < SWEEP_MS ? h->package_keep_ms : SWEEP_MS;
    size_t n = strlen(h->packages_dir) + 1;

    if (h->sweep || n == 1 || now_ms < h->swept_ms + every)
        return;
    h->swept_ms = now_ms;
    struct head_sweep *s = mb_calloc(1, sizeof *s + n);
    if (!s)
        return;
    memcpy(s->dir, h->packages_dir, n);
    s->h = h;
    s->needed = needed(h);
    s->parts_token = h->parts_token;
    s->before_unix_ms = mb_unix_ms() - h->package_keep_ms;
    s->work.data = s;
    h->sweep = s;
    if (uv_queue_work(h->loop, &s->work, do_list, on_listed) != 0) {
        h->sweep = NULL;
        free_sweep(s);
    }
}

void head_packages_close(struct mb_head *h)
{
    if (h->sweep)
        h->sweep->h = NULL;
    h->sweep = NULL;
}
