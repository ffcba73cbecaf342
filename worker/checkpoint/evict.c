/*
 * Removing older checkpoints.
 *
 *  1. List DIR/iter_NNNNNNN, choose.
 *  2. Rename each to a hidden name that the next save would clear away, too, then remove it.
 * Failures: the text names the directory; a kill leaves a hidden directory.
 */
#include "worker/checkpoint/evict.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/str.h"
#include "worker/checkpoint/common.h"

static int by_number(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

size_t mb_checkpoint_choose_evicted(const struct mb_checkpoint_keep *k, int64_t newest,
                                    int64_t *iterations, size_t n)
{
    size_t n_older = 0, n_out = 0;
    if (k->keep_last <= 0 || n == 0) {
        return 0;
    }
    qsort(iterations, n, sizeof *iterations, by_number);
    for (size_t i = 0; i < n; i++) {
        n_older += iterations[i] < newest;
    }
    /* The newest itself is one of those that are kept. */
    size_t kept = (size_t)k->keep_last - 1 < n_older ? (size_t)k->keep_last - 1 : n_older;
    for (size_t i = 0; i + kept < n_older; i++) {
        int64_t it = iterations[i];
        int retained = k->retain_interval > 0 && it % k->retain_interval == 0;
        if (!retained && (k->is_durable == NULL || k->is_durable(k->arg, it))) {
            iterations[n_out++] = it;
        }
    }
    return n_out;
}

static int is_iteration(const struct dirent *e)
{
    int64_t n;
    char name[32];
    if (!mb_starts_with(e->d_name, "iter_") ||
        mb_parse_i64(e->d_name + 5, 0, INT64_MAX, "iteration", &n, NULL) != 0) {
        return 0;
    }
    mb_checkpoint_iter_name(n, name);
    return strcmp(name, e->d_name) == 0; /* as we write it */
}

static int remove_one(const char *dir, int64_t iteration, struct mb_err *err)
{
    char name[32];
    mb_checkpoint_iter_name(iteration, name);
    char *path = mb_path_join(dir, name);
    char *hidden = mb_asprintf("%s/.%s.of-evicted", dir, name);
    int rc = path != NULL && hidden != NULL
                 ? mb_fs_remove_tree(hidden, err)
                 : mb_err_set(err, MB_ENOMEM, "checkpoint: out of memory");
    if (rc == 0 && rename(path, hidden) != 0 && errno != ENOENT) {
        rc = mb_err_sys(err, errno, "%s: renaming it to %s", path, hidden);
    }
    if (rc == 0) {
        rc = mb_fs_remove_tree(hidden, err);
    }
    mb_free(path);
    mb_free(hidden);
    return rc;
}

int mb_checkpoint_evict(const char *dir, const struct mb_checkpoint_keep *k, int64_t newest,
                        size_t *n_evicted, struct mb_err *err)
{
    struct dirent **list = NULL;
    int rc = 0, n = 0;
    *n_evicted = 0;
    if (k->keep_last <= 0) {
        return 0;
    }
    n = scandir(dir, &list, is_iteration, NULL);
    if (n < 0) {
        return mb_err_sys(err, errno, "%s", dir);
    }
    int64_t *iterations = mb_calloc((size_t)n + 1, sizeof *iterations);
    if (iterations == NULL) {
        rc = mb_err_set(err, MB_ENOMEM, "checkpoint: out of memory");
    }
    for (int i = 0; i < n; i++) {
        if (rc == 0) {
            (void)mb_parse_i64(list[i]->d_name + 5, 0, INT64_MAX, "iteration", &iterations[i],
                               NULL); /* is_iteration() has seen that it is one */
        }
        free(list[i]); /* scandir's own */
    }
    free(list);
    size_t n_out = rc == 0 ? mb_checkpoint_choose_evicted(k, newest, iterations, (size_t)n) : 0;
    for (size_t i = 0; i < n_out && rc == 0; i++) {
        rc = remove_one(dir, iterations[i], err);
        *n_evicted += rc == 0;
    }
    mb_free(iterations);
    return rc;
}
