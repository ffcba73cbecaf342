/* Depth first; what disappears while we look is an error, the caller looks again. */
#include "agent/upload/walk.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "agent/upload/manifest.h"
#include "base/alloc.h"
#include "base/checksum.h"
#include "base/fs.h"
#include "base/str.h"

enum { LOOKS = 3, DEPTH_MAX = 8, FILES_MAX = 1000000 };

int64_t mb_walk_mtime_ns(const struct stat *st)
{
    return (int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec;
}

static uint64_t fingerprint(const char *path, const struct stat *st)
{
    const uint64_t facts[] = {(uint64_t)st->st_size, (uint64_t)st->st_mtim.tv_sec,
                              (uint64_t)st->st_mtim.tv_nsec, (uint64_t)st->st_ino};

    return mb_crc64nvme(mb_crc64nvme(0, path, strlen(path) + 1), facts, sizeof(facts));
}

static uint64_t state_of(uint64_t print, const struct stat *st)
{
    const uint64_t facts[] = {(uint64_t)st->st_ctim.tv_sec, (uint64_t)st->st_ctim.tv_nsec};

    return mb_crc64nvme(print, facts, sizeof(facts));
}

uint64_t mb_walk_file_state(const char *path, const struct stat *st)
{
    return state_of(fingerprint(path, st), st);
}

/* An array of numbers for cap files; 0: no memory, it stays as it is. */
static int grow(uint64_t **array, size_t cap)
{
    uint64_t *grown = mb_reallocarray(*array, cap, sizeof(*grown));

    if (grown != NULL)
        *array = grown;
    return grown != NULL;
}

static int add_file(struct mb_walk *w, const char *path, const struct stat *st)
{
    char *copy;

    if (w->n == FILES_MAX)
        return MB_EFULL;
    if (w->n == w->cap) {
        size_t cap = w->cap * 2 + 16;
        struct mb_upload_file *files = mb_reallocarray(w->files, cap, sizeof(*files));

        if (files == NULL)
            return MB_ENOMEM;
        w->files = files;
        if (!grow(&w->prints, cap) || !grow(&w->states, cap))
            return MB_ENOMEM;
        w->cap = cap;
    }
    copy = mb_strdup(path);
    if (copy == NULL)
        return MB_ENOMEM;
    w->prints[w->n] = fingerprint(path, st);
    w->states[w->n] = state_of(w->prints[w->n], st);
    w->files[w->n++] = (struct mb_upload_file){
        .path = copy, .size_bytes = (uint64_t)st->st_size, .mtime_ns = mb_walk_mtime_ns(st)};
    return MB_OK;
}

static int is_ours_or_dots(const char *name)
{
    return strcmp(name, ".") == 0 || strcmp(name, "..") == 0 || mb_starts_with(name, ".mobula");
}

/* What failed just now. Only that the directory itself is not there is MB_ENOENT: what vanishes
 * from inside it, or cannot be read, must not make its files few. */
static int failed(int is_root)
{
    if (errno != ENOENT)
        return MB_EIO;
    return is_root ? MB_ENOENT : MB_ESTATE;
}

static int walk_below(struct mb_walk *w, const char *root, const char *below, int depth)
{
    char *path = mb_path_join(root, below);
    DIR *dir = path != NULL ? opendir(path) : NULL;
    struct dirent *e;
    int rc = dir != NULL ? MB_OK : path == NULL ? MB_ENOMEM : failed(below[0] == '\0');

    while (rc == MB_OK) {
        char *name, *full;
        struct stat st;

        errno = 0; /* NULL is the end, and a failure as well */
        e = readdir(dir);
        if (e == NULL) {
            rc = errno != 0 ? MB_EIO : MB_OK;
            break;
        }
        if (is_ours_or_dots(e->d_name))
            continue;
        name = below[0] != '\0' ? mb_path_join(below, e->d_name) : mb_strdup(e->d_name);
        full = name != NULL ? mb_path_join(root, name) : NULL;
        if (full == NULL)
            rc = MB_ENOMEM;
        else if (stat(full, &st) != 0)
            rc = failed(0);
        else if (S_ISDIR(st.st_mode))
            rc = depth < DEPTH_MAX ? walk_below(w, root, name, depth + 1) : MB_EFULL;
        else if (S_ISREG(st.st_mode))
            rc = add_file(w, name, &st);
        mb_free(full);
        mb_free(name);
    }
    if (dir != NULL)
        closedir(dir);
    mb_free(path);
    return rc;
}

int mb_walk_dir(const char *dir, struct mb_walk *w)
{
    int rc;

    *w = (struct mb_walk){0};
    rc = walk_below(w, dir, "", 0);
    if (rc != MB_OK)
        mb_walk_close(w);
    return rc;
}

int mb_walk_dir_again(const char *dir, struct mb_walk *w)
{
    int rc = MB_ESTATE;

    for (int i = 0; i < LOOKS && rc == MB_ESTATE; i++)
        rc = mb_walk_dir(dir, w);
    return rc;
}

static int compare(const void *a, const void *b)
{
    const uint64_t *x = a, *y = b;

    return (*x > *y) - (*x < *y);
}

void mb_walk_drop_known(struct mb_walk *w, const uint64_t *known, size_t n)
{
    size_t kept = 0;

    for (size_t i = 0; i < w->n; i++) {
        if (n > 0 && bsearch(&w->prints[i], known, n, sizeof(*known), compare) != NULL) {
            mb_free((void *)(uintptr_t)w->files[i].path);
            continue;
        }
        w->files[kept] = w->files[i];
        w->states[kept] = w->states[i];
        w->prints[kept++] = w->prints[i];
    }
    w->n = kept;
}

void mb_walk_sort_prints(struct mb_walk *w)
{
    if (w->n > 0)
        qsort(w->prints, w->n, sizeof(*w->prints), compare);
}

uint64_t mb_walk_state(const struct mb_walk *w)
{
    uint64_t sum = w->n + 1; /* never 0 of an empty directory */

    for (size_t i = 0; i < w->n; i++)
        sum += w->states[i];
    return sum;
}

void mb_walk_close(struct mb_walk *w)
{
    for (size_t i = 0; i < w->n; i++)
        mb_free((void *)(uintptr_t)w->files[i].path);
    mb_free(w->files);
    mb_free(w->prints);
    mb_free(w->states);
    *w = (struct mb_walk){0};
}

/* ---- iterations ---- */

static int ascending(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

    return (x > y) - (x < y);
}

int mb_walk_iterations(const char *dir, int64_t from, int64_t to, int64_t **out, size_t *n,
                       struct mb_err *err)
{
    DIR *d = opendir(dir);
    struct dirent *e;
    size_t cap = 0;
    int rc = MB_OK;

    *out = NULL;
    *n = 0;
    if (d == NULL)
        return errno == ENOENT ? MB_OK : mb_err_sys(err, errno, "%s", dir);
    while ((errno = 0, e = readdir(d)) != NULL) {
        int64_t iteration = mb_iteration_of_dir(e->d_name), *grown;
        struct stat st;

        if (iteration < from || iteration > to || iteration < 0 ||
            fstatat(dirfd(d), e->d_name, &st, 0) != 0 || !S_ISDIR(st.st_mode))
            continue;
        if (*n == cap) {
            grown = mb_reallocarray(*out, cap = cap * 2 + 16, sizeof(*grown));
            if (grown == NULL) {
                rc = mb_err_set(err, MB_ENOMEM, "no memory to look into %s", dir);
                break;
            }
            *out = grown;
        }
        (*out)[(*n)++] = iteration;
    }
    if (rc == MB_OK && errno != 0)
        rc = mb_err_sys(err, errno, "%s", dir);
    closedir(d);
    if (rc != MB_OK) {
        mb_free(*out);
        *out = NULL;
        *n = 0;
    } else if (*n > 0) {
        qsort(*out, *n, sizeof(**out), ascending);
    }
    return rc;
}
