/*
 * Looking at the tracker file.
 *
 *  1. inotify tells when a writer has closed the file, or moved another one in its place: then it
 * is whole and counts at once. The watch is on its directory, begun as soon as that exists.
 *  2. Besides, the file is looked at every half second: network file systems tell nothing of what
 *     other machines write, and inotify can be used up. Then the number counts when two looks in a
 *     row agree. Which of the two it is stands in the log.
 *  3. Absent, empty or no whole integer ("release" is what nobody trained): nothing new.
 *  4. A trainer names iterations in their order. So between the one that was known and the one that
 *     is named now every directory is a save that was named while nobody looked: it is sealed, the
 *     oldest first. Unless it has other files than the named one: a trainer that was restarted
 *     inside the attempt may have left it half-written and never come to its number again. What was
 *     there before the attempt, and is as it was, is none of its saves.
 *  5. One of these has other files, was seen and is gone, is empty or, after TRIES_MAX looks,
 * cannot be read: lost, and told. One that goes away while the tracker names an older one was given
 * up by its trainer.
 *  6. The trainer goes back to an older iteration: that one is sealed, and what is newer was there
 *     before from now on.
 *  7. All that is in a file (tracker_memory.h), so that a restarted agent goes on.
 *  8. The trainer names the known one once more, and its directory is another one than then: saved
 *     anew (a run that begins again in the directory of a former one), so it is sealed.
 *  9. The named directory is not there, or cannot be walked: said in the log, looked at again. When
 *     no process is left that could still write it: lost, and told; and so are those before it,
 *     which nothing tells from half-written ones.
 * 10. Which directories are there cannot be listed: looked at again. At the last look those that
 *     are remembered have their turn.
 */
#include "agent/upload/tracker.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>
#include "agent/upload/manifest.h"
#include "agent/upload/tracker_memory.h"
#include "base/alloc.h"
#include "base/buf.h"
#include "base/checksum.h"
#include "base/fs.h"
#include "base/log.h"

#define WATCHED (IN_CLOSE_WRITE | IN_CREATE | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO)

enum { LOOK_MS = 500, TEXT_MAX = 64, TRIES_MAX = 20 };

struct mb_tracker {
    char *dir;
    char *path;
    char *state_path;
    const struct mb_tracker_ops *ops;
    void *arg;
    struct mb_tracker_memory memory;
    unsigned tries; /* to read one that the tracker has passed */
    int64_t said;   /* that it cannot be read yet; -1: nothing */
    int64_t seen;   /* at the last look, not closed for certain; -1: nothing */
    uint64_t file;  /* a fingerprint of the tracker file when its number was looked into last */
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

static int64_t named_now(const struct mb_tracker *t)
{
    return mb_fs_exists(t->path) ? read_number(t->path) : -1;
}

static void remember(struct mb_tracker *t)
{
    struct mb_err err;

    if (mb_tracker_memory_write(&t->memory, t->state_path, &err) != MB_OK)
        mb_warn("upload", "a restart might take an old checkpoint for a new one: %s", err.text);
}

/* The files of one iteration, and its directory, owned by the caller on every return. */
static int walk(const struct mb_tracker *t, int64_t iteration, char **dir, struct mb_walk *w)
{
    char name[MB_CHECKPOINT_KEY_MAX];
    int rc;

    *w = (struct mb_walk){0};
    *dir = mb_path_join(t->dir, mb_iteration_dir(iteration, name));
    if (*dir == NULL)
        return MB_ENOMEM;
    rc = mb_walk_dir_again(*dir, w);
    return rc == MB_OK && w->n == 0 ? MB_ENOENT : rc;
}

/* One number of the names of all files, in any order; 0: there are none. */
struct names {
    uint64_t as_they_are;
    uint64_t without_iteration; /* model_0000100.pt of 100 is model_0000200.pt of 200 */
};

/* A number inside a name that is the iteration counts as no number. */
static uint64_t name_without(const char *name, int64_t iteration)
{
    uint64_t crc = 0;

    while (*name != '\0') {
        size_t n_digits = strspn(name, "0123456789"), n = n_digits > 0 ? n_digits : 1;
        int is_it = n_digits > 0 && strtoll(name, NULL, 10) == iteration;

        crc = mb_crc64nvme(crc, is_it ? "#" : name, is_it ? 1 : n);
        name += n;
    }
    return mb_crc64nvme(crc, "", 1);
}

static struct names names_of(const struct mb_walk *w, int64_t iteration)
{
    struct names sum = {w->n, w->n};

    for (size_t i = 0; i < w->n; i++) {
        const char *name = w->files[i].path;

        sum.as_they_are += mb_crc64nvme(0, name, strlen(name) + 1);
        sum.without_iteration += name_without(name, iteration);
    }
    return sum;
}

/* Both ways count: rank_1 is in every iteration, in iteration 1 as well. */
static int are_same(struct names a, struct names b)
{
    return a.as_they_are == b.as_they_are || a.without_iteration == b.without_iteration;
}

/* ---- directories beyond the known one ---- */

/* MB_OK also when nothing is there. */
static int list_newer(const struct mb_tracker *t, int64_t than, int64_t up_to, int64_t **list,
                      size_t *n)
{
    struct mb_err err;
    int rc = mb_walk_iterations(t->dir, than + 1, up_to, list, n, &err);

    if (rc != MB_OK)
        mb_warn("upload", "which iterations are there is not known: %s", err.text);
    return rc;
}

/* What is newer than the known one now is no save of what follows. */
static int take_for_old(struct mb_tracker *t)
{
    int64_t *list;
    size_t n;
    int rc = list_newer(t, t->memory.known, INT64_MAX, &list, &n);

    if (rc != MB_OK)
        return rc;
    for (size_t i = 0; i < n; i++) {
        struct mb_walk w;
        char *dir;
        rc = walk(t, list[i], &dir, &w);

        mb_tracker_memory_put(&t->memory,
                              (struct mb_tracker_dir){
                                  .iteration = list[i],
                                  .is_old = 1,
                                  .state = rc == MB_OK || rc == MB_ENOENT ? mb_walk_state(&w) : 0});
        mb_walk_close(&w);
        mb_free(dir);
    }
    mb_free(list);
    return MB_OK;
}

static int has(const int64_t *list, size_t n, int64_t iteration)
{
    for (size_t i = 0; i < n; i++)
        if (list[i] == iteration)
            return 1;
    return 0;
}

/* Nobody told until now which directories come and go. */
static void take_stock(struct mb_tracker *t)
{
    struct mb_tracker_memory *m = &t->memory;
    int64_t named = named_now(t), *list;
    size_t n;

    if (list_newer(t, m->known, INT64_MAX, &list, &n) != MB_OK)
        return;
    for (size_t i = 0; i < n; i++)
        if (mb_tracker_memory_find(m, list[i]) == NULL)
            mb_tracker_memory_put(m, (struct mb_tracker_dir){.iteration = list[i]});
    for (size_t i = m->n; i-- > 0;)
        if (m->dirs[i].iteration > named && !has(list, n, m->dirs[i].iteration))
            mb_tracker_memory_drop(m, m->dirs[i].iteration);
    mb_free(list);
}

/* Once for each. */
static void say_unreadable(struct mb_tracker *t, int64_t iteration, int rc)
{
    char name[MB_CHECKPOINT_KEY_MAX];

    if (t->said != iteration)
        mb_warn("upload", "the tracker names iteration %" PRId64 ", but %s cannot be read yet (%s)",
                t->seen, mb_iteration_dir(iteration, name), mb_code_name(rc));
    t->said = iteration;
}

/* rc: what reading it said; MB_ECORRUPT: it is not whole for certain. */
static void on_lost(struct mb_tracker *t, int64_t iteration, int rc)
{
    char text[MB_CHECKPOINT_KEY_MAX + 120], name[MB_CHECKPOINT_KEY_MAX];

    mb_iteration_dir(iteration, name);
    if (rc == MB_ENOENT)
        snprintf(text, sizeof(text),
                 "%s, or what it held, was removed before this node had taken it", name);
    else if (rc == MB_ECORRUPT)
        snprintf(text, sizeof(text),
                 "%s may be half-written: it has not the files of iteration %" PRId64
                 ", which the tracker names",
                 name, t->seen);
    else
        snprintf(text, sizeof(text), "%s cannot be read (%s)", name, mb_code_name(rc));
    t->ops->on_lost(t->arg, iteration, text);
}

/* names: of the files of the one that is named now; 0: it cannot be read. MB_OK: it is settled,
 * whatever became of it; else it is to be looked at again. */
static int seal_passed(struct mb_tracker *t, int64_t iteration, struct names names, int is_last)
{
    const struct mb_tracker_dir *known = mb_tracker_memory_find(&t->memory, iteration);
    struct mb_walk w;
    char *dir;
    int rc = walk(t, iteration, &dir, &w);

    const int was_there = known != NULL && known->is_old;

    if ((rc == MB_OK || rc == MB_ENOENT) && was_there && known->state == mb_walk_state(&w)) {
        mb_info("upload", "%s was there before, and is no save of this attempt", dir);
    } else if (rc != MB_OK && rc != MB_ENOENT && was_there && known->state == 0) {
        mb_warn("upload", "%s was there before, and cannot be read now as then: it is passed over",
                dir != NULL ? dir : "an iteration");
        rc = MB_OK;
    } else if (rc == MB_OK && are_same(names_of(&w, iteration), names)) {
        t->ops->on_sealed(t->arg, iteration, dir, &w);
    } else if (rc == MB_OK) {
        on_lost(t, iteration, MB_ECORRUPT);
    } else if (rc == MB_ENOENT || is_last || ++t->tries == TRIES_MAX) {
        on_lost(t, iteration, rc);
        rc = MB_OK;
    }
    mb_walk_close(&w);
    mb_free(dir);
    return rc == MB_ENOENT ? MB_OK : rc;
}

static int is_there(const struct mb_tracker *t, int64_t iteration)
{
    char name[MB_CHECKPOINT_KEY_MAX];
    char *dir = mb_path_join(t->dir, mb_iteration_dir(iteration, name));
    int found = dir == NULL || mb_fs_exists(dir);

    mb_free(dir);
    return found;
}

/* For the last time, and without a list of what is there. */
static void seal_remembered(struct mb_tracker *t, int64_t named, struct names names)
{
    const struct mb_tracker_memory *m = &t->memory;

    for (size_t i = 0; i < m->n && m->dirs[i].iteration < named; i++)
        if (!m->dirs[i].is_old || is_there(t, m->dirs[i].iteration))
            seal_passed(t, m->dirs[i].iteration, names, 1);
}

/* All between the known one and the one that is named now. */
static int seal_all_passed(struct mb_tracker *t, int64_t named, struct names names, int is_last)
{
    struct mb_tracker_memory *m = &t->memory;
    int64_t *list;
    size_t n, at = 0;
    int rc = list_newer(t, m->known, named - 1, &list, &n);

    if (rc != MB_OK && is_last)
        seal_remembered(t, named, names);
    if (rc != MB_OK)
        return rc;
    while (at < m->n && m->dirs[at].iteration < named) {
        struct mb_tracker_dir dir = m->dirs[at++];

        if (dir.is_old || has(list, n, dir.iteration))
            continue;
        on_lost(t, dir.iteration, MB_ENOENT);
        mb_tracker_memory_drop(m, dir.iteration);
        at--;
    }
    for (size_t i = 0; i < n && rc == MB_OK; i++) {
        rc = seal_passed(t, list[i], names, is_last);
        if (rc == MB_OK) {
            mb_tracker_memory_advance(m, list[i]);
            t->tries = 0;
        } else {
            say_unreadable(t, list[i], rc);
        }
    }
    mb_free(list);
    return rc;
}

/* ---- the tracker ---- */

static void take_named(struct mb_tracker *t, int64_t iteration, int is_last)
{
    int goes_back = iteration < t->memory.known;
    struct mb_walk w;
    char *dir;
    int rc = walk(t, iteration, &dir, &w);

    if (rc != MB_OK && !is_last) {
        say_unreadable(t, iteration, rc);
    } else if (goes_back ||
               seal_all_passed(t, iteration, names_of(&w, iteration), is_last) == MB_OK ||
               is_last) {
        uint64_t state = rc == MB_OK ? mb_walk_state(&w) : 0;

        if (rc == MB_OK)
            t->ops->on_sealed(t->arg, iteration, dir, &w);
        else
            on_lost(t, iteration, rc);
        mb_tracker_memory_advance(&t->memory, iteration);
        t->memory.known_state = state;
        if (goes_back) {
            t->memory.n = 0;
            take_for_old(t);
        }
        remember(t);
    }
    mb_walk_close(&w);
    mb_free(dir);
}

/* Another one when somebody has written it; 0: it is not there. A hard link more is no writing. */
static uint64_t file_state(const struct mb_tracker *t)
{
    uint64_t facts[3];
    struct stat st;

    if (stat(t->path, &st) != 0)
        return 0;
    facts[0] = (uint64_t)st.st_ino;
    facts[1] = (uint64_t)st.st_mtim.tv_sec;
    facts[2] = (uint64_t)st.st_mtim.tv_nsec;
    return mb_crc64nvme(0, facts, sizeof(facts));
}

/* The state of the known one's directory, of one without files when it is not there (MB_ENOENT). */
static int known_dir_state(const struct mb_tracker *t, uint64_t *state)
{
    struct mb_walk w;
    char *dir;
    int rc = walk(t, t->memory.known, &dir, &w);

    *state = rc == MB_OK || rc == MB_ENOENT ? mb_walk_state(&w) : 0;
    mb_walk_close(&w);
    mb_free(dir);
    return rc;
}

/* The known one is named, by a file that was written since the last look into it. */
static void take_again(struct mb_tracker *t, uint64_t file, int is_last)
{
    uint64_t state, known = t->memory.known_state;
    int rc = known_dir_state(t, &state);

    if (rc != MB_OK && !is_last)
        return; /* looked into again */
    t->file = file;
    if (rc == MB_OK && known != 0 && state != known)
        take_named(t, t->memory.known, is_last);
}

static void look(struct mb_tracker *t, int is_closed, int is_last)
{
    uint64_t file = file_state(t);
    int64_t iteration = named_now(t), before = t->seen;

    t->seen = iteration;
    if (iteration < 0 || (!is_closed && iteration != before))
        return;
    if (iteration != t->memory.known) {
        take_named(t, iteration, is_last);
        if (t->memory.known == iteration)
            t->file = file;
    } else if (file != t->file) {
        take_again(t, file, is_last);
    }
}

void mb_tracker_look(struct mb_tracker *t, int is_last)
{
    if (t != NULL)
        look(t, 1, is_last);
}

/* ---- what the kernel tells ---- */

/* An iteration's directory comes or goes. 1: that is to be remembered. */
static int on_dir(struct mb_tracker *t, int64_t iteration, uint32_t mask)
{
    const struct mb_tracker_dir *known = mb_tracker_memory_find(&t->memory, iteration);

    if (iteration <= t->memory.known)
        return 0;
    if (mask & (IN_CREATE | IN_MOVED_TO))
        return mb_tracker_memory_put(&t->memory, (struct mb_tracker_dir){.iteration = iteration}) ==
               MB_OK;
    if (known == NULL || iteration <= named_now(t))
        return 0;
    mb_tracker_memory_drop(&t->memory, iteration);
    return 1;
}

static void on_events(uv_poll_t *poll, int status, int events)
{
    struct mb_tracker *t = poll->data;
    union {
        struct inotify_event event; /* for its alignment */
        char bytes[4096];
    } buf;
    int is_closed = 0, is_new = 0, is_lost = 0;
    ssize_t n;

    (void)status;
    (void)events;
    while ((n = read(t->fd, buf.bytes, sizeof(buf.bytes))) > 0)
        for (ssize_t at = 0; at < n;) {
            const struct inotify_event *e = (const struct inotify_event *)(buf.bytes + at);

            if (e->len > 0 && (e->mask & IN_ISDIR))
                is_new |= on_dir(t, mb_iteration_of_dir(e->name), e->mask);
            else
                is_closed |= e->len > 0 && (e->mask & (IN_CLOSE_WRITE | IN_MOVED_TO)) &&
                             strcmp(e->name, MB_LATEST_KEY) == 0;
            is_lost |= (e->mask & IN_Q_OVERFLOW) != 0;
            if (e->mask & IN_IGNORED) /* the directory is gone; another one may come */
                t->is_watched = 0;
            at += (ssize_t)(sizeof(*e) + e->len);
        }
    if (is_lost) { /* events were: what is there tells most of them */
        take_stock(t);
        is_new = is_closed = 1;
    }
    if (is_new)
        remember(t);
    if (is_closed)
        look(t, 1, 0);
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
    if (t->fd < 0 || inotify_add_watch(t->fd, t->dir, WATCHED) < 0)
        mb_warn("upload", "inotify cannot watch %s (%s): its tracker file is looked at every %d ms",
                t->dir, strerror(errno), LOOK_MS);
    else if (name == NULL)
        mb_info("upload", "the tracker file in %s is watched by inotify", t->dir);
    take_stock(t);
    remember(t);
}

static void on_timer(uv_timer_t *timer)
{
    struct mb_tracker *t = timer->data;

    watch(t);
    look(t, 0, 0);
}

static int load(struct mb_tracker *t, struct mb_err *err)
{
    int is_whole = 0, rc = MB_OK;

    if (mb_fs_exists(t->state_path))
        rc = mb_tracker_memory_read(&t->memory, t->state_path, &is_whole, err);
    else
        t->memory.known = named_now(t);
    t->file = file_state(t);
    if (rc == MB_OK && !mb_fs_exists(t->state_path) && t->memory.known >= 0)
        known_dir_state(t, &t->memory.known_state);
    if (rc == MB_OK && !is_whole && (rc = take_for_old(t)) != MB_OK)
        mb_err_set(err, rc,
                   "which iterations lie in %s already cannot be told: they would count as saves",
                   t->dir);
    return rc;
}

static void free_tracker(struct mb_tracker *t)
{
    if (t == NULL)
        return;
    if (t->fd >= 0)
        close(t->fd);
    mb_tracker_memory_close(&t->memory);
    mb_free(t->dir);
    mb_free(t->path);
    mb_free(t->state_path);
    mb_free(t);
}

int mb_tracker_start(uv_loop_t *loop, const char *dir, const char *state_path,
                     const struct mb_tracker_ops *ops, void *arg, struct mb_tracker **out,
                     struct mb_err *err)
{
    struct mb_tracker *t = mb_calloc(1, sizeof(*t));
    int rc;

    if (t != NULL) {
        *t = (struct mb_tracker){.dir = mb_strdup(dir),
                                 .path = mb_path_join(dir, MB_LATEST_KEY),
                                 .state_path = mb_strdup(state_path),
                                 .ops = ops,
                                 .arg = arg,
                                 .memory = {.known = -1},
                                 .said = -1,
                                 .seen = -1,
                                 .fd = -1};
    }
    rc = t != NULL && t->dir != NULL && t->path != NULL && t->state_path != NULL
             ? load(t, err)
             : mb_err_set(err, MB_ENOMEM, "no memory to watch %s", dir);
    if (rc != MB_OK) {
        free_tracker(t);
        return rc;
    }
    t->fd = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    uv_timer_init(loop, &t->timer);
    t->timer.data = t;
    t->handles = 1;
    if (t->fd >= 0 && uv_poll_init(loop, &t->poll, t->fd) == 0) {
        t->poll.data = t;
        t->handles = 2;
        uv_poll_start(&t->poll, UV_READABLE, on_events);
    }
    remember(t);
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
    free_tracker(t);
}

void mb_tracker_stop(struct mb_tracker *t)
{
    if (t == NULL)
        return;
    if (t->handles > 1)
        uv_close((uv_handle_t *)&t->poll, on_closed);
    uv_close((uv_handle_t *)&t->timer, on_closed);
}
