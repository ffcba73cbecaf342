/*
 * Looking at the tracker file.
 *
 *  1. inotify tells when a writer has closed the file, or moved another one in its place: then it
 * is whole and counts at once. The watch is on its directory, begun as soon as that exists.
 *  2. Besides, the file is looked at every half second: network file systems tell nothing of what
 *     other machines write, and inotify can be used up. Then the number counts when two looks in a
 *     row agree. Which of the two it is stands in the log.
 *  3. Absent, empty or no whole integer ("release" is what nobody trained): nothing new.
 *  4. The iteration that the tracker named when the attempt began is remembered in a file of its
 *     own, so that a restarted agent knows which checkpoints are the attempt's.
 *  5. The named directory is not there, or cannot be walked: said in the log, looked at again.
 */
#include "agent/upload/tracker.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/vfs.h>
#include <unistd.h>
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
    int64_t seen; /* at the last look, not closed for certain; -1: nothing */
    uv_timer_t timer;
    uv_poll_t poll;
    int fd; /* of inotify; -1: none */
    int is_watched;
    int handles; /* open */
};

/* File systems on which other machines write. Source: statfs(2), and their own headers. */
static const struct {
    long magic;
    const char *name;
} network[] = {{0x6969, "nfs"},        {0xFF534D42, "cifs"},   {0xFE534D42, "smb2"},
               {0x517B, "smb"},        {0x65735546, "fuse"},   {0x00C36400, "ceph"},
               {0x0BD00BD0, "lustre"}, {0x47504653, "gpfs"},   {0x01021997, "9p"},
               {0x5346414F, "afs"},    {0x19830326, "beegfs"}, {0x7461636F, "ocfs2"},
               {0x01161970, "gfs2"}};

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

static void look(struct mb_tracker *t, int is_closed)
{
    char name[MB_CHECKPOINT_KEY_MAX];
    struct mb_walk w = {0};
    int64_t iteration = mb_fs_exists(t->path) ? read_number(t->path) : -1, before = t->seen;
    char *dir;
    int rc;

    t->seen = iteration;
    if (iteration < 0 || iteration == t->known || (!is_closed && iteration != before))
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

void mb_tracker_look(struct mb_tracker *t)
{
    if (t != NULL)
        look(t, 1);
}

/* ---- what the kernel tells ---- */

static void on_events(uv_poll_t *poll, int status, int events)
{
    struct mb_tracker *t = poll->data;
    union {
        struct inotify_event event; /* for its alignment */
        char bytes[4096];
    } buf;
    int is_closed = 0;
    ssize_t n;

    (void)status;
    (void)events;
    while ((n = read(t->fd, buf.bytes, sizeof(buf.bytes))) > 0)
        for (ssize_t at = 0; at < n;) {
            const struct inotify_event *e = (const struct inotify_event *)(buf.bytes + at);

            is_closed |= e->len > 0 && strcmp(e->name, MB_LATEST_KEY) == 0;
            if (e->mask & IN_IGNORED) /* the directory is gone; another one may come */
                t->is_watched = 0;
            at += (ssize_t)(sizeof(*e) + e->len);
        }
    if (is_closed)
        look(t, 1);
}

static const char *network_name(const char *dir)
{
    struct statfs st;

    for (size_t i = 0; statfs(dir, &st) == 0 && i < sizeof(network) / sizeof(*network); i++)
        if ((long)(st.f_type & 0xFFFFFFFF) == network[i].magic)
            return network[i].name;
    return NULL;
}

/* Begins the watch, once there is something to watch. */
static void watch(struct mb_tracker *t)
{
    const char *name;

    if (t->is_watched || !mb_fs_exists(t->dir))
        return;
    t->is_watched = 1; /* or cannot be: said once */
    name = network_name(t->dir);
    if (name != NULL)
        mb_warn("upload",
                "%s lies on %s, where nobody tells what other nodes write: its tracker file is "
                "looked at every %d ms",
                t->dir, name, LOOK_MS);
    if (t->fd < 0 || inotify_add_watch(t->fd, t->dir, IN_CLOSE_WRITE | IN_MOVED_TO) < 0)
        mb_warn("upload", "inotify cannot watch %s (%s): its tracker file is looked at every %d ms",
                t->dir, strerror(errno), LOOK_MS);
    else if (name == NULL)
        mb_info("upload", "the tracker file in %s is watched by inotify", t->dir);
}

static void on_timer(uv_timer_t *timer)
{
    struct mb_tracker *t = timer->data;

    watch(t);
    look(t, 0);
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
    t->seen = -1;
    load_known(t, state_path);
    t->fd = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    uv_timer_init(loop, &t->timer);
    t->timer.data = t;
    t->handles = 1;
    if (t->fd >= 0 && uv_poll_init(loop, &t->poll, t->fd) == 0) {
        t->poll.data = t;
        t->handles = 2;
        uv_poll_start(&t->poll, UV_READABLE, on_events);
    }
    watch(t);
    uv_timer_start(&t->timer, on_timer, LOOK_MS, LOOK_MS);
    *out = t;
    return MB_OK;
}

static void on_closed(uv_handle_t *h)
{
    struct mb_tracker *t = h->data;

    if (--t->handles > 0)
        return;
    if (t->fd >= 0)
        close(t->fd);
    mb_free(t->dir);
    mb_free(t->path);
    mb_free(t);
}

void mb_tracker_stop(struct mb_tracker *t)
{
    if (t == NULL)
        return;
    if (t->handles > 1)
        uv_close((uv_handle_t *)&t->poll, on_closed);
    uv_close((uv_handle_t *)&t->timer, on_closed);
}
