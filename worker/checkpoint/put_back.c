/*
 * A save that was killed while it put one directory in another's place, on a file system without
 * RENAME_EXCHANGE.
 *
 *  1. DIR/.iter_N.old is there and DIR/iter_N is not: the former is the checkpoint that the tracker
 *     may name. It gets its name back.
 *  2. Both are there: the new one is in place, and whole; the old one goes.
 *  3. Another rank that shares the directory was faster: nothing is left to do.
 */
#include "worker/checkpoint/common.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/str.h"

static const char SUFFIX[] = ".old";

char *mb_checkpoint_old_name(const char *dir, int64_t iteration)
{
    char iter[32];
    mb_checkpoint_iter_name(iteration, iter);
    return mb_asprintf("%s/.%s%s", dir, iter, SUFFIX);
}

static int is_old(const struct dirent *e)
{
    return mb_starts_with(e->d_name, ".iter_") && mb_ends_with(e->d_name, SUFFIX);
}

static int put_back_one(const char *old, const char *final, struct mb_err *err)
{
    if (mb_fs_exists(final)) {
        return mb_fs_remove_tree(old, err);
    }
    if (rename(old, final) == 0) {
        mb_warn("checkpoint", "%s: put back, a save was killed while it replaced it", final);
        return 0;
    }
    return mb_fs_exists(final) ? 0 : mb_err_sys(err, errno, "%s: renaming it to %s", old, final);
}

int mb_checkpoint_put_back(const char *dir, struct mb_err *err)
{
    struct dirent **list = NULL;
    int n = scandir(dir, &list, is_old, NULL);
    int rc = 0;
    if (n < 0) {
        return mb_err_sys(err, errno, "%s", dir);
    }
    for (int i = 0; i < n; i++) {
        char *name = list[i]->d_name; /* .iter_0000010.old */
        char *old = mb_path_join(dir, name);
        name[strlen(name) - strlen(SUFFIX)] = '\0';
        char *final = mb_path_join(dir, name + 1);
        if (rc == 0 && (old == NULL || final == NULL)) {
            rc = mb_err_set(err, MB_ENOMEM, "checkpoint: out of memory");
        }
        if (rc == 0) {
            rc = put_back_one(old, final, err);
        }
        mb_free(old);
        mb_free(final);
        free(list[i]); /* scandir's own */
    }
    free(list);
    return rc;
}
