/*
 * 1. The tracker, or the iteration asked for, gives the directory; without a tracker all files are
 *    plain ones.
 * 2. A walk takes every file with size and time; names that no store can hold are refused here,
 *    before anything is sent.
 * 3. mobula's own format says how many files an iteration has: all must be there. A directory of
 *    one node of several would otherwise become a checkpoint that nobody can load.
 */
#include "agent/upload/push_source.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "agent/upload/evict.h"
#include "agent/upload/manifest.h"
#include "agent/upload/walk.h"
#include "base/alloc.h"
#include "base/fs.h"
#include "base/str.h"

enum { TRACKER_MAX_BYTES = 64, STATE_MAX_BYTES = 1 << 20 };

void mb_push_source_close(struct mb_push_source *s)
{
    for (size_t i = 0; i < s->n_files; i++) {
        mb_free(s->files[i].path);
        mb_free(s->files[i].etag);
        mb_free(s->files[i].done_etag);
        mb_free(s->files[i].upload_id);
        mb_free(s->files[i].stale_id);
    }
    mb_free(s->files);
    if (s->is_held)
        close(s->held_fd);
    mb_free(s->root);
    *s = (struct mb_push_source){0};
}

static int compare_paths(const void *a, const void *b)
{
    return strcmp(((const struct mb_push_file *)a)->path, ((const struct mb_push_file *)b)->path);
}

struct mb_push_file *mb_push_source_find(struct mb_push_source *s, const char *path)
{
    struct mb_push_file key = {.path = (char *)(uintptr_t)path};

    return s->n_files == 0 ? NULL
                           : bsearch(&key, s->files, s->n_files, sizeof(*s->files), compare_paths);
}

/* The iteration a tracker names: MB_ENOENT without a tracker. */
static int read_tracker(const char *dir, int64_t *out, struct mb_err *err)
{
    char *path = mb_path_join(dir, MB_LATEST_KEY);
    struct mb_buf text = {0};
    int rc = path ? mb_fs_read(path, TRACKER_MAX_BYTES, &text, err)
                  : mb_err_set(err, MB_ENOMEM, "out of memory");

    if (rc == 0 && mb_starts_with(mb_buf_str(&text), "release"))
        rc = mb_err_set(err, MB_EUNSUPPORTED,
                        "%s says \"release\", which is no iteration: --plain pushes the files as "
                        "they are",
                        path);
    else if (rc == 0 && mb_latest_parse(text.data, text.len, out, err) != 0)
        rc = mb_err_set(err, MB_ECORRUPT,
                        "%s does not hold a whole iteration number: its writer is not ready, or "
                        "was killed",
                        path);
    mb_buf_close(&text);
    mb_free(path);
    return rc;
}

static int check_name(const char *path, struct mb_err *err)
{
    if (!mb_utf8_valid(path, strlen(path)))
        return mb_err_set(err, MB_EINVAL, "the name of \"%s\" is not UTF-8", path);
    for (const char *p = path; *p; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7f)
            return mb_err_set(err, MB_EINVAL, "the name of \"%s\" has control characters", path);
    return 0;
}

static int take_files(struct mb_push_source *s, struct mb_walk *w, struct mb_err *err)
{
    int rc = 0;

    s->files = mb_calloc(w->n + 1, sizeof(*s->files));
    if (!s->files)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    for (size_t i = 0; rc == 0 && i < w->n; i++) {
        struct mb_push_file *f = &s->files[s->n_files];

        rc = check_name(w->files[i].path, err);
        f->path = rc == 0 ? mb_strdup(w->files[i].path) : NULL;
        if (rc == 0 && !f->path)
            rc = mb_err_set(err, MB_ENOMEM, "out of memory");
        if (rc != 0)
            break;
        f->size_bytes = w->files[i].size_bytes;
        f->print = w->states[i];
        s->total_bytes += f->size_bytes;
        s->n_files++;
    }
    if (rc == 0 && s->n_files > 1)
        qsort(s->files, s->n_files, sizeof(*s->files), compare_paths);
    return rc;
}

static int needs(struct mb_push_source *s, const char *name, struct mb_err *err)
{
    if (mb_push_source_find(s, name))
        return 0;
    return mb_err_set(err, MB_ENOENT,
                      "%s is partial: %s is not there (a directory of one node of several? its "
                      "job's agents push all of them)",
                      s->root, name);
}

/* mobula's own format; a foreign one has no state.json of this form, and is taken as it is. */
static int check_complete(struct mb_push_source *s, struct mb_err *err)
{
    char *path = mb_path_join(s->root, "state.json");
    struct mb_buf text = {0};
    struct mb_err ignored;
    json_t *state = NULL;
    int64_t dp = 0;
    int rc = 0;

    if (path && mb_fs_read(path, STATE_MAX_BYTES, &text, &ignored) == 0)
        state = json_loadb(mb_buf_str(&text), text.len, 0, NULL);
    dp = json_integer_value(json_object_get(state, "data_parallel_size"));
    if (dp >= 1 && dp <= 1000000) {
        rc = needs(s, "model_tp00_pp00.safetensors", err);
        for (int64_t i = 0; rc == 0 && i < dp; i++) {
            char name[64];

            snprintf(name, sizeof(name), "optim_dp_%03" PRId64 "_of_%03" PRId64 ".safetensors", i,
                     dp);
            rc = needs(s, name, err);
        }
    }
    json_decref(state);
    mb_buf_close(&text);
    mb_free(path);
    return rc;
}

/* Which directory, and of which iteration. */
static int find_root(const char *dir, int64_t iteration, int is_plain, struct mb_push_source *s,
                     struct mb_err *err)
{
    char name[MB_CHECKPOINT_KEY_MAX];
    struct stat st;
    int rc = 0;

    s->iteration = is_plain ? -1 : iteration;
    if (stat(dir, &st) != 0 || !S_ISDIR(st.st_mode))
        return mb_err_set(err, MB_ENOENT, "%s is no directory", dir);
    if (!is_plain && iteration < 0) {
        rc = read_tracker(dir, &s->iteration, err);
        if (rc == MB_ENOENT) {
            s->iteration = -1;
            mb_err_clear(err);
            rc = 0;
        }
    }
    if (rc != 0)
        return rc;
    s->root =
        s->iteration < 0 ? mb_strdup(dir) : mb_path_join(dir, mb_iteration_dir(s->iteration, name));
    if (!s->root)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    if (stat(s->root, &st) != 0 || !S_ISDIR(st.st_mode))
        return mb_err_set(err, MB_ENOENT, "%s is partial: %s is not there", dir, name);
    return 0;
}

int mb_push_source_is_same(const struct mb_push_source *s, struct mb_err *err)
{
    for (size_t i = 0; i < s->n_files; i++) {
        char *path = mb_path_join(s->root, s->files[i].path);
        struct stat st;
        int rc =
            !path ? mb_err_set(err, MB_ENOMEM, "out of memory")
            : stat(path, &st) == 0 && mb_walk_file_state(s->files[i].path, &st) != s->files[i].print
                ? mb_err_set(err, MB_ESTATE, "%s: changed since the push began", s->files[i].path)
                : 0;

        mb_free(path);
        if (rc != 0)
            return rc;
    }
    return 0;
}

int mb_push_source_read(const char *dir, int64_t iteration, int is_plain,
                        struct mb_push_source *out, struct mb_err *err)
{
    struct mb_push_source s = {0};
    struct mb_walk w = {0};
    int rc = find_root(dir, iteration, is_plain, &s, err);

    if (rc == 0) {
        s.held_fd = mb_evict_hold(s.root);
        s.is_held = s.held_fd >= 0;
        rc = mb_walk_dir(s.root, &w);
        if (rc == MB_EFULL)
            mb_err_set(err, rc,
                       "%s has more than 1,000,000 files, or directories nest deeper than 8: a "
                       "checkpoint may not",
                       s.root);
        else if (rc != 0)
            mb_err_set(err, rc, "%s changed while it was looked at, or cannot be read", s.root);
    }
    if (rc == 0)
        rc = take_files(&s, &w, err);
    mb_walk_close(&w);
    if (rc == 0 && s.n_files == 0)
        rc = mb_err_set(err, MB_ENOENT, "%s has no files", s.root);
    if (rc == 0 && s.iteration >= 0)
        rc = check_complete(&s, err);
    if (rc == 0 && s.iteration < 0) {
        struct mb_push_file *tracker = mb_push_source_find(&s, MB_LATEST_KEY);

        if (tracker)
            tracker->is_last = 1;
    }
    if (rc != 0)
        mb_push_source_close(&s);
    else
        *out = s;
    return rc;
}
