/*
 *  1. What a killed conversion left at TARGET.mobula-convert, as a file in it says, goes.
 *  2. The directory is made with that file in it, and filled.
 *  3. The file goes, the directory is on disk, it gets its name, and so is that.
 * Failures: something that is no conversion's; the source in it; what write and the disk say.
 */
#include "worker/checkpoint/hf/target.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/str.h"

static const char MARKER[] = ".mobula-convert"; /* in a partial target: it is ours to remove */

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "out of memory making a directory");
}

static int is_empty(const char *dir, int *out, struct mb_err *err)
{
    DIR *d = opendir(dir);
    if (d == NULL) {
        return mb_err_sys(err, errno, "%s", dir);
    }
    int n = 0;
    while (readdir(d) != NULL) {
        n++;
    }
    closedir(d);
    *out = n <= 2;
    return 0;
}

int mb_target_check(const char *target, struct mb_err *err)
{
    int empty = 1;
    int rc = mb_fs_exists(target) ? is_empty(target, &empty, err) : 0;
    return rc != 0 || empty
               ? rc
               : mb_err_set(err, MB_EEXIST, "%s is not empty: nothing is overwritten", target);
}

/* Whether dir is where, or anywhere above it. */
static int holds(const char *dir, const char *where)
{
    char *outer = realpath(dir, NULL), *inner = realpath(where, NULL);
    size_t n = outer != NULL ? strlen(outer) : 0;
    int held = outer != NULL && inner != NULL && strncmp(outer, inner, n) == 0 &&
               (inner[n] == '\0' || inner[n] == '/');
    mb_free(outer);
    mb_free(inner);
    return held;
}

/* Removes what a killed conversion left at partial, and nothing else. */
static int clear_partial(const char *partial, const char *marker, const char *source,
                         struct mb_err *err)
{
    if (!mb_fs_exists(partial)) {
        return 0;
    }
    if (holds(partial, source)) {
        return mb_err_set(err, MB_EINVAL,
                          "%s would be overwritten while it is read: choose another "
                          "target",
                          source);
    }
    int ours = mb_fs_exists(marker);
    int rc = ours ? 0 : is_empty(partial, &ours, err);
    if (rc == 0 && !ours) {
        rc = mb_err_set(err, MB_EEXIST,
                        "%s is no conversion's: nothing is overwritten; move it away", partial);
    }
    return rc == 0 ? mb_fs_remove_tree(partial, err) : rc;
}

static int fill(const char *target, const char *partial, const char *marker,
                int (*write)(void *arg, const char *dir, struct mb_err *err), void *arg,
                struct mb_err *err)
{
    char *parent =
        mb_path_join(target, ".."); /* now: behind the rename nothing but the disk fails */
    int rc = parent != NULL ? mb_fs_mkdir_p(partial, 0755, err) : no_memory(err);
    if (rc == 0) {
        rc = mb_fs_write_atomic(marker, "", 0, 0644, err);
    }
    if (rc == 0) {
        rc = write(arg, partial, err);
    }
    if (rc == 0 && unlink(marker) != 0) {
        rc = mb_err_sys(err, errno, "%s", marker);
    }
    if (rc == 0) {
        rc = mb_fs_sync_dir(partial, err);
    }
    if (rc == 0 && rename(partial, target) != 0) {
        rc = mb_err_sys(err, errno, "%s: renaming it to %s", partial, target);
    }
    if (rc != 0) {
        mb_fs_remove_tree(partial, NULL);
    } else {
        rc = mb_fs_sync_dir(parent, err);
    }
    mb_free(parent);
    return rc;
}

int mb_target_write(const char *target, const char *source,
                    int (*write)(void *arg, const char *dir, struct mb_err *err), void *arg,
                    struct mb_err *err)
{
    size_t len = strlen(target);
    while (len > 1 && target[len - 1] == '/') {
        len--;
    }
    char *partial = mb_asprintf("%.*s.mobula-convert", (int)len, target);
    char *marker = partial != NULL ? mb_path_join(partial, MARKER) : NULL;
    int rc = marker != NULL ? clear_partial(partial, marker, source, err) : no_memory(err);
    if (rc == 0) {
        rc = fill(target, partial, marker, write, arg, err);
    }
    mb_free(partial);
    mb_free(marker);
    return rc;
}
