/*
 * Renamed into NODE_DIR/forgotten/N; a sweep takes the directories that were filled before it, and
 * later ones are filled meanwhile, so that loop and pool thread never work in the same one.
 */
#include "agent/job_forget.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/str.h"

#define FORGOTTEN "forgotten"

int mb_job_forget_init(struct mb_job_forget *f, uv_loop_t *loop, const char *node_dir,
                       void (*on_idle)(void *arg), void *arg, struct mb_err *err)
{
    char *dir = mb_path_join(node_dir, FORGOTTEN);
    int rc = dir ? mb_fs_remove_tree(dir, err) : mb_err_set(err, MB_ENOMEM, "out of memory");

    *f = (struct mb_job_forget){.loop = loop, .node_dir = node_dir, .on_idle = on_idle, .arg = arg};
    mb_free(dir);
    return rc;
}

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

static void do_sweep(uv_work_t *work)
{
    const struct mb_job_forget *f = work->data;
    char *dir = dir_of(f, f->swept);
    struct mb_err err = {0};

    if (!dir || mb_fs_remove_tree(dir, &err) != 0)
        mb_warn("jobs", "files of forgotten jobs stay: %s", dir ? err.text : "out of memory");
    mb_free(dir);
}

static void sweep(struct mb_job_forget *f);

static void on_swept(uv_work_t *work, int status)
{
    struct mb_job_forget *f = work->data;

    (void)status;
    f->busy = 0;
    f->swept++;
    sweep(f);
    f->on_idle(f->arg);
}

static void sweep(struct mb_job_forget *f)
{
    if (f->busy || f->closing)
        return;
    if (f->swept == f->filling) { /* the newest is taken only when there is something in it */
        if (f->n_files == 0)
            return;
        f->filling++;
        f->n_files = 0;
    }
    f->work.data = f;
    f->busy = uv_queue_work(f->loop, &f->work, do_sweep, on_swept) == 0;
}

void mb_job_forget_driver(struct mb_job_forget *f, const char *dir, const char *log)
{
    char *index = mb_asprintf("%s.idx", log);

    move_away(f, dir);
    move_away(f, log);
    if (index)
        move_away(f, index);
    mb_free(index);
    sweep(f);
}
