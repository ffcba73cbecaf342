/*
 *  1. Processes of this machine, of whichever node: by their directory, program, open files, and by
 *     the environment they were started with, where PYTHONPATH of a driver and its ranks leads
 * there.
 *  2. Gangs: one of the job that has not ended uploads, or saves yet.
 *  3. Whatever a gang has its --save directory or its store in stays, for people: how the driver
 *     ended does not tell whether the checkpoints are anywhere else (a pipe, a trap, a script that
 *     goes on).
 * What cannot be read uses nothing; of a gang's record that cannot be read the caller is told.
 */
#include "agent/job_users.h"

#include <dirent.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "agent/gang.h"
#include "agent/job_packages.h"
#include "base/alloc.h"
#include "base/buf.h"
#include "base/fs.h"
#include "base/str.h"

enum { ENVIRON_MAX = 8 << 20, PATH_BYTES = 4096 };

struct look {
    struct mb_job_use *uses;
    size_t n;
    const char *prefixes[2]; /* NODE_DIR/jobs/, as it is named and as the kernel names it */
    int is_unread;           /* the record of some gang */
};

/* ---- text that may name them ---- */

/* at: behind a prefix, end: of the text. */
static void mark_one(const struct look *l, const char *at, const char *end)
{
    const char *slash = memchr(at, '/', (size_t)(end - at));

    if (slash == NULL || !mb_job_packages_is_unpacked(slash + 1, (size_t)(end - slash - 1)))
        return;
    for (size_t i = 0; i < l->n; i++)
        if (strlen(l->uses[i].id) == (size_t)(slash - at) &&
            memcmp(l->uses[i].id, at, (size_t)(slash - at)) == 0)
            l->uses[i].is_used = 1;
}

static void mark_in(const struct look *l, const char *text, size_t n)
{
    for (size_t k = 0; k < 2 && l->prefixes[k] != NULL; k++) {
        const char *at = text, *end = text + n;
        size_t len = strlen(l->prefixes[k]);

        while ((at = memmem(at, (size_t)(end - at), l->prefixes[k], len)) != NULL) {
            at += len;
            mark_one(l, at, end);
        }
    }
}

/* ---- processes ---- */

static void mark_link(const struct look *l, int dir_fd, const char *name)
{
    char target[PATH_BYTES];
    ssize_t n = readlinkat(dir_fd, name, target, sizeof(target));

    if (n > 0)
        mark_in(l, target, (size_t)n);
}

static void look_at_process(const struct look *l, const char *pid)
{
    char path[64];
    struct mb_buf text = {0};
    const struct dirent *e;
    DIR *d;

    snprintf(path, sizeof(path), "/proc/%.20s", pid);
    d = opendir(path);
    if (d != NULL) {
        mark_link(l, dirfd(d), "cwd");
        mark_link(l, dirfd(d), "exe");
        closedir(d);
    }
    snprintf(path, sizeof(path), "/proc/%.20s/fd", pid);
    d = opendir(path);
    while (d != NULL && (e = readdir(d)) != NULL)
        mark_link(l, dirfd(d), e->d_name);
    if (d != NULL)
        closedir(d);
    snprintf(path, sizeof(path), "/proc/%.20s/environ", pid);
    if (mb_fs_read(path, ENVIRON_MAX, &text, NULL) == 0)
        mark_in(l, mb_buf_str(&text), text.len);
    mb_buf_close(&text);
}

static void look_at_processes(const struct look *l)
{
    DIR *proc = opendir("/proc");
    const struct dirent *e;

    while (proc != NULL && (e = readdir(proc)) != NULL)
        if (e->d_name[0] >= '1' && e->d_name[0] <= '9')
            look_at_process(l, e->d_name);
    if (proc != NULL)
        closedir(proc);
}

/* ---- gangs ---- */

static int is_below(const struct look *l, const struct mb_job_use *use, const char *path)
{
    size_t n = strlen(use->id);

    for (size_t k = 0; k < 2 && l->prefixes[k] != NULL; k++) {
        size_t len = strlen(l->prefixes[k]);

        if (mb_starts_with(path, l->prefixes[k]) && strncmp(path + len, use->id, n) == 0 &&
            path[len + n] == '/')
            return 1;
    }
    return 0;
}

const char *mb_job_users_path_of(const char *place)
{
    static const char scheme[] = "file://";

    if (place != NULL && mb_starts_with(place, scheme))
        place += sizeof(scheme) - 1;
    return place != NULL && place[0] == '/' ? place : NULL;
}

/* As it was given or where it leads. */
static int lies_in(const struct look *l, const struct mb_job_use *use, const char *place)
{
    const char *path = mb_job_users_path_of(place);
    char *real;
    int is;

    if (path == NULL)
        return 0;
    real = realpath(path, NULL);
    is = is_below(l, use, path) || (real != NULL && is_below(l, use, real));
    free(real); /* realpath's own */
    return is;
}

static void look_at_gang(const struct look *l, const json_t *gang)
{
    const json_t *checkpoint = json_object_get(gang, "checkpoint");
    const char *state = json_string_value(json_object_get(gang, "state"));
    const char *job_id = json_string_value(json_object_get(gang, "job_id"));
    const char *dir = json_string_value(json_object_get(checkpoint, "local_dir"));
    const char *url = json_string_value(json_object_get(checkpoint, "url"));
    int has_ended = state != NULL && strcmp(state, mb_gang_state_name(MB_GANG_ENDED)) == 0;

    for (size_t i = 0; state != NULL && i < l->n; i++) {
        struct mb_job_use *use = &l->uses[i];

        if (!has_ended && job_id != NULL && strcmp(job_id, use->id) == 0)
            use->is_used = 1;
        if (lies_in(l, use, dir) || lies_in(l, use, url))
            use->is_kept = 1;
    }
}

static void look_at_gangs(struct look *l, const char *root)
{
    DIR *dir = opendir(root);
    const struct dirent *e;

    while (dir != NULL && (e = readdir(dir)) != NULL) {
        char *path = e->d_name[0] != '.' ? mb_asprintf("%s/%s/gang.json", root, e->d_name) : NULL;
        json_t *gang = path != NULL ? json_load_file(path, 0, NULL) : NULL;

        if (gang != NULL)
            look_at_gang(l, gang);
        else if (path != NULL && mb_fs_exists(path))
            l->is_unread = 1;
        json_decref(gang);
        mb_free(path);
    }
    if (dir != NULL)
        closedir(dir);
}

/* Other nodes of this machine may have ranks of the same gang, in the same directory. */
static void look_at_nodes(struct look *l, const char *node_dir)
{
    char *above = mb_path_join(node_dir, "..");
    DIR *dir = above != NULL ? opendir(above) : NULL;
    const struct dirent *e;

    while (dir != NULL && (e = readdir(dir)) != NULL) {
        char *root = e->d_name[0] != '.' ? mb_asprintf("%s/%s/gangs", above, e->d_name) : NULL;

        if (root != NULL)
            look_at_gangs(l, root);
        mb_free(root);
    }
    if (dir != NULL)
        closedir(dir);
    mb_free(above);
}

int mb_job_users_look(const char *node_dir, struct mb_job_use *uses, size_t n)
{
    char *real = realpath(node_dir, NULL);
    char *named = mb_asprintf("%s/jobs/", node_dir);
    char *known = real != NULL ? mb_asprintf("%s/jobs/", real) : NULL;
    struct look l = {.uses = uses, .n = n, .prefixes = {named, known}};

    for (size_t i = 0; i < n; i++) /* out of memory: look again */
        uses[i].is_used = named == NULL || known == NULL;
    if (named != NULL && known != NULL) {
        look_at_processes(&l);
        look_at_nodes(&l, node_dir);
    }
    mb_free(known);
    mb_free(named);
    free(real); /* realpath's own */
    return l.is_unread;
}
