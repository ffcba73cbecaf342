/*
 * Looking at the tracker file.
 *
 *  1. The file is looked at every half second (its directory may not exist yet, and network file
 *     systems tell no events). Absent, empty or no whole integer: nothing new.
 *  2. The iteration that the tracker named when the attempt began is remembered in a file of its
 * own, so that a restarted agent knows which checkpoints are the attempt's.
 *  3. The named directory is not there, or cannot be walked: said in the log, looked at again.
 */
#include "agent/upload/tracker.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include "agent/upload/manifest.h"
#include "base/alloc.h"
#include "base/buf.h"
#include "base/fs.h"
#include "base/log.h"

enum { LOOK_MS = 500, TEXT_MAX = 64 };

struct mb_tracker {
    char *dir;
    char *path;
    mb_tracker_cb cb;
    void *arg;
    int64_t known;
    uv_timer_t timer;
};

/* -1: nothing that counts. */
static int64_t read_number(const char *path)
{
    struct mb_buf text = {0};
    int64_t iteration = -1;

    if (mb_fs_read(path, TEXT_MAX, &text, NULL) != MB_OK ||
        mb_latest_parse(mb_buf_str(&text), text.len, &iteration, NULL) != MB_OK)
        iteration = -1;
    mb_buf_close(&text);
    return iteration;
}

void mb_tracker_look(struct mb_tracker *t)
{
    char name[MB_CHECKPOINT_KEY_MAX];
    struct mb_walk w = {0};
    int64_t iteration;
    char *dir;
    int rc;

    if (t == NULL || !mb_fs_exists(t->path))
        return;
    iteration = read_number(t->path);
    if (iteration < 0 || iteration == t->known)
        return;
    dir = mb_path_join(t->dir, mb_iteration_dir(iteration, name));
    rc = dir != NULL ? mb_walk_dir(dir, &w) : MB_ENOMEM;
    if (rc == MB_OK && w.n > 0) {
        t->known = iteration;
        t->cb(t->arg, iteration, dir, &w);
    } else {
        mb_warn("upload", "the tracker names iteration %" PRId64 ", but %s cannot be read yet (%s)",
                iteration, name, mb_code_name(rc));
    }
    mb_walk_close(&w);
    mb_free(dir);
}

static void on_timer(uv_timer_t *timer)
{
    mb_tracker_look(timer->data);
}

static void load_known(struct mb_tracker *t, const char *state_path)
{
    char text[32];
    struct mb_err err;
    int n;

    if (mb_fs_exists(state_path)) {
        t->known = read_number(state_path);
        return;
    }
    t->known = mb_fs_exists(t->path) ? read_number(t->path) : -1;
    n = t->known >= 0 ? snprintf(text, sizeof(text), "%" PRId64 "\n", t->known)
                      : snprintf(text, sizeof(text), "none\n");
    if (mb_fs_write_atomic(state_path, text, (size_t)n, 0644, &err) != MB_OK)
        mb_warn("upload", "a restart might take an old checkpoint for a new one: %s", err.text);
}

int mb_tracker_start(uv_loop_t *loop, const char *dir, const char *state_path, mb_tracker_cb cb,
                     void *arg, struct mb_tracker **out, struct mb_err *err)
{
    struct mb_tracker *t = mb_calloc(1, sizeof(*t));

    if (t != NULL) {
        t->dir = mb_strdup(dir);
        t->path = mb_path_join(dir, MB_LATEST_KEY);
    }
    if (t == NULL || t->dir == NULL || t->path == NULL) {
        if (t != NULL) {
            mb_free(t->dir);
            mb_free(t->path);
        }
        mb_free(t);
        return mb_err_set(err, MB_ENOMEM, "no memory to watch %s", dir);
    }
    t->cb = cb;
    t->arg = arg;
    load_known(t, state_path);
    uv_timer_init(loop, &t->timer);
    t->timer.data = t;
    uv_timer_start(&t->timer, on_timer, LOOK_MS, LOOK_MS);
    *out = t;
    return MB_OK;
}

static void on_closed(uv_handle_t *h)
{
    struct mb_tracker *t = h->data;

    mb_free(t->dir);
    mb_free(t->path);
    mb_free(t);
}

void mb_tracker_stop(struct mb_tracker *t)
{
    if (t != NULL)
        uv_close((uv_handle_t *)&t->timer, on_closed);
}
