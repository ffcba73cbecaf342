/*
 *  1. A node directory with gcs.sqlite in it is a head's.
 *  2. One whose front process lives is in use: two heads never share a store.
 *  3. Of the others the newest counts; its files are the store, the job directories with the logs,
 *     packages and identity.json, all of which the agent reads when it starts (as after a crash).
 */
#include "cli/start_resume.h"

#include <dirent.h>
#include <errno.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/str.h"
#include "cli/local.h"

/* 1 if dir holds a store; *out is when it was last written to, through any of its files. */
static int written(const char *dir, struct timespec *out)
{
    static const char *const files[] = {"gcs.sqlite", "gcs.sqlite-wal", "gcs.sqlite-batch"};
    int n = 0;

    *out = (struct timespec){0};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        char *path = mb_path_join(dir, files[i]);
        struct stat st;

        if (path != NULL && lstat(path, &st) == 0 && S_ISREG(st.st_mode)) {
            n++;
            if (st.st_mtim.tv_sec > out->tv_sec ||
                (st.st_mtim.tv_sec == out->tv_sec && st.st_mtim.tv_nsec > out->tv_nsec))
                *out = st.st_mtim;
        }
        mb_free(path);
    }
    return n > 0;
}

static int runs(const char *dir)
{
    struct mb_local_node node;

    if (mb_local_find(dir, &node, NULL) != 0)
        return 0;
    mb_free(node.dir);
    return 1;
}

static int is_later(const struct timespec *a, const struct timespec *b)
{
    return a->tv_sec != b->tv_sec ? a->tv_sec > b->tv_sec : a->tv_nsec > b->tv_nsec;
}

int mb_start_resume_find(const char *temp_dir, char **out, struct mb_err *err)
{
    struct timespec newest = {0}, at;
    struct dirent *entry;
    DIR *d = opendir(temp_dir);
    int rc = 0;

    *out = NULL;
    if (d == NULL)
        return mb_err_sys(err, errno, "%s", temp_dir);
    while (rc == 0 && (entry = readdir(d)) != NULL) {
        char *dir;

        if (!mb_starts_with(entry->d_name, "node_"))
            continue;
        dir = mb_path_join(temp_dir, entry->d_name);
        if (dir == NULL)
            rc = mb_err_set(err, MB_ENOMEM, "out of memory");
        if (dir != NULL && written(dir, &at) && !runs(dir) &&
            (*out == NULL || is_later(&at, &newest))) {
            char *former = *out;

            *out = dir;
            dir = former;
            newest = at;
        }
        mb_free(dir);
    }
    closedir(d);
    if (rc != 0) {
        mb_free(*out);
        *out = NULL;
    }
    return rc;
}

int mb_start_resume_take(const char *dir, struct mb_err *err)
{
    char *path = mb_path_join(dir, "node.json");
    int rc = path != NULL ? 0 : mb_err_set(err, MB_ENOMEM, "out of memory");

    if (rc == 0 && unlink(path) != 0 && errno != ENOENT)
        rc = mb_err_sys(err, errno, "%s", path);
    mb_free(path);
    return rc;
}
