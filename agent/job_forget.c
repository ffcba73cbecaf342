/*
 * Renamed into NODE_DIR/forgotten/N; a sweep takes the directories that were filled before it, and
 * later ones are filled meanwhile, so that loop and pool thread never work in the same one.
 * Ranks' directories have names that never come again: the sweep finds and removes them in place.
 */
#include "agent/job_forget.h"

#include <dirent.h>
#include <errno.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "agent/gang.h"
#include "agent/job_packages.h"
#include "base/alloc.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/str.h"

#define FORGOTTEN "forgotten"

static char *dir_of(const struct mb_job_forget *f, unsigned long n)
{
    return mb_asprintf("%s/" FORGOTTEN "/%lu", f->node_dir, n);
}

static void move_away(struct mb_job_forget *f, const char *path)
{
    char *dir = dir_of(f, f->filling);
    char *to = dir ? mb_asprintf("%s/%lu", dir, f->n_files) : NULL;
    struct mb_err err = {0};

    if (!to)
        mb_err_set(&err, MB_ENOMEM, "out of memory");
    else if (mb_fs_exists(path) && mb_fs_mkdir_p(dir, 0700, &err) == 0 && rename(path, to) != 0)
        mb_err_sys(&err, errno, "rename");
    if (err.code != 0)
        mb_warn("jobs", "%s stays: %s", path, err.text);
    f->n_files++;
    mb_free(to);
    mb_free(dir);
}

/* ---- the pool thread ---- */

static int has_id(const struct mb_job_forget *f, const char *id)
{
    for (size_t i = 0; id && i < f->n_swept_ids; i++)
        if (strcmp(f->swept_ids[i], id) == 0)
            return 1;
    return 0;
}

/* An attempt of a forgotten job that has ended: nobody touches its directory any more. */
static int is_forgotten(const struct mb_job_forget *f, const char *dir)
{
    char *path = mb_path_join(dir, "gang.json");
    json_t *o = path ? json_load_file(path, 0, NULL) : NULL;
    const char *state = json_string_value(json_object_get(o, "state"));
    int is = state && strcmp(state, mb_gang_state_name(MB_GANG_ENDED)) == 0 &&
             has_id(f, json_string_value(json_object_get(o, "job_id")));

    json_decref(o);
    mb_free(path);
    return is;
}

static void sweep_gangs(const struct mb_job_forget *f)
{
    char *root = mb_path_join(f->node_dir, "gangs");
    DIR *dir = root && f->n_swept_ids > 0 ? opendir(root) : NULL;
    const struct dirent *e;
    struct mb_err err = {0};

    while (dir && (e = readdir(dir))) {
        char *path = e->d_name[0] != '.' ? mb_path_join(root, e->d_name) : NULL;

        if (path && is_forgotten(f, path) && mb_fs_remove_tree(path, &err) != 0)
            mb_warn("jobs", "ranks' files of a forgotten job stay: %s", err.text);
        mb_free(path);
    }
    if (dir)
        closedir(dir);
    mb_free(root);
}

static void do_sweep(uv_work_t *work)
{
    const struct mb_job_forget *f = work->data;
    char *dir = dir_of(f, f->swept);
    struct mb_err err = {0};

    if (!dir || mb_fs_remove_tree(dir, &err) != 0)
        mb_warn("jobs", "files of forgotten jobs stay: %s", dir ? err.text : "out of memory");
    mb_free(dir);
    sweep_gangs(f);
}

/* ---- the loop ---- */

static void free_ids(char ***ids, size_t *n)
{
    for (size_t i = 0; i < *n; i++)
        mb_free((*ids)[i]);
    mb_free(*ids);
    *ids = NULL;
    *n = 0;
}

static void sweep(struct mb_job_forget *f);

static void on_swept(uv_work_t *work, int status)
{
    struct mb_job_forget *f = work->data;

    (void)status;
    f->busy = 0;
    f->swept++;
    free_ids(&f->swept_ids, &f->n_swept_ids);
    sweep(f);
    f->on_idle(f->arg);
}

static void sweep(struct mb_job_forget *f)
{
    if (f->busy || f->closing)
        return;
    if (f->swept == f->filling) { /* the newest is taken only when there is something in it */
        if (f->n_files == 0 && f->n_ids == 0)
            return;
        f->filling++;
        f->n_files = 0;
        f->swept_ids = f->ids;
        f->n_swept_ids = f->n_ids;
        f->ids = NULL;
        f->n_ids = 0;
    }
    f->work.data = f;
    f->busy = uv_queue_work(f->loop, &f->work, do_sweep, on_swept) == 0;
}

static void add_id(struct mb_job_forget *f, const char *id)
{
    char **ids = mb_reallocarray(f->ids, f->n_ids + 1, sizeof *ids);

    if (ids)
        f->ids = ids;
    if (!ids || !(ids[f->n_ids] = mb_strdup(id)))
        mb_warn("jobs", "job=%s its ranks' files stay: out of memory", id);
    else
        f->n_ids++;
}

void mb_job_forget_all(struct mb_job_forget *f, const char *job_id, const char *dir,
                       const char *log)
{
    static const char *const beside[] = {"idx", "gaps"};

    move_away(f, dir);
    move_away(f, log);
    for (size_t i = 0; i < sizeof beside / sizeof beside[0]; i++) {
        char *path = mb_asprintf("%s.%s", log, beside[i]);

        if (path)
            move_away(f, path);
        mb_free(path);
    }
    add_id(f, job_id);
    sweep(f);
}

void mb_job_forget_unpacked(struct mb_job_forget *f, const char *dir)
{
    DIR *d = opendir(dir);
    const struct dirent *e;

    while (d && (e = readdir(d))) {
        char *path = mb_job_packages_is_unpacked(e->d_name, strlen(e->d_name))
                         ? mb_path_join(dir, e->d_name)
                         : NULL;

        if (path)
            move_away(f, path);
        mb_free(path);
    }
    if (d)
        closedir(d);
    sweep(f);
}

/* Those that an earlier agent filled, as far as it has not removed them, come first. */
int mb_job_forget_init(struct mb_job_forget *f, uv_loop_t *loop, const char *node_dir,
                       void (*on_idle)(void *arg), void *arg, struct mb_err *err)
{
    char *root = mb_path_join(node_dir, FORGOTTEN);
    DIR *d = root ? opendir(root) : NULL;
    const struct dirent *e;
    unsigned long first = ULONG_MAX, end = 0;

    *f = (struct mb_job_forget){.loop = loop, .node_dir = node_dir, .on_idle = on_idle, .arg = arg};
    while (d && (e = readdir(d))) {
        char *rest;
        unsigned long no = strtoul(e->d_name, &rest, 10);

        if (e->d_name[0] == '.' || *rest != '\0' || no == ULONG_MAX)
            continue;
        first = no < first ? no : first;
        end = no >= end ? no + 1 : end;
    }
    if (d)
        closedir(d);
    if (end > 0) {
        f->swept = first;
        f->filling = end;
    }
    sweep(f);
    mb_free(root);
    return root ? 0 : mb_err_set(err, MB_ENOMEM, "out of memory");
}

void mb_job_forget_close(struct mb_job_forget *f)
{
    free_ids(&f->ids, &f->n_ids);
    free_ids(&f->swept_ids, &f->n_swept_ids);
}
