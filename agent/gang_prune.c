/*
 *  1. Every directory with a readable gang.json in state ENDED is a candidate; its time is that of
 *     gang.json, which was written last when the attempt ended.
 *  2. Removing fails: said in the log, tried again when the next attempt ends.
 *  3. It saved into what was unpacked for a job, and the job does not say so yet (job_unpacked.h):
 * its record stays until then, as nothing else tells.
 *  4. More than LIST_MAX candidates: the rest has its turn the next time.
 */
#include "agent/gang_prune.h"

#include <dirent.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "agent/gang.h"
#include "agent/job_packages.h"
#include "agent/job_unpacked.h"
#include "agent/job_users.h"
#include "base/alloc.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/str.h"

enum { LIST_MAX = 1024 };

static int newest_first(const void *a, const void *b)
{
    const struct mb_gang_ended *x = a, *y = b;

    if (x->ended_s != y->ended_s)
        return x->ended_s < y->ended_s ? 1 : -1;
    return strcmp(x->name, y->name);
}

void mb_gang_prune_decide(struct mb_gang_ended *list, size_t n, int64_t now_s)
{
    if (n > 0)
        qsort(list, n, sizeof(*list), newest_first);
    for (size_t i = 0; i < n; i++)
        list[i].is_surplus = i >= MB_GANG_KEPT_MAX || now_s - list[i].ended_s > MB_GANG_KEPT_S;
}

int mb_gang_dir_has_ended(const char *dir, int64_t *ended_s)
{
    char *path = mb_path_join(dir, "gang.json");
    json_t *o = path != NULL ? json_load_file(path, 0, NULL) : NULL;
    const char *state = json_string_value(json_object_get(o, "state"));
    struct stat st;
    int ended = state != NULL && strcmp(state, mb_gang_state_name(MB_GANG_ENDED)) == 0 &&
                stat(path, &st) == 0;

    if (ended)
        *ended_s = st.st_mtime;
    json_decref(o);
    mb_free(path);
    return ended;
}

static int lies_in_unpacked(const char *place)
{
    static const char jobs[] = "/jobs/";
    const char *path = mb_job_users_path_of(place), *at = path, *end;
    int is = 0;

    while (!is && at != NULL && (at = strstr(at, jobs)) != NULL) {
        char *job;

        at += sizeof(jobs) - 1;
        end = strchr(at, '/');
        job = end != NULL ? mb_asprintf("%.*s", (int)(end - path), path) : NULL;
        is = job != NULL && mb_job_packages_are_in(job) && !mb_job_unpacked_is_kept(job);
        mb_free(job);
    }
    return is;
}

static int is_told_by_nothing_else(const char *dir)
{
    char *path = mb_path_join(dir, "gang.json");
    json_t *gang = path != NULL ? json_load_file(path, 0, NULL) : NULL;
    const json_t *checkpoint = json_object_get(gang, "checkpoint");
    int is = lies_in_unpacked(json_string_value(json_object_get(checkpoint, "local_dir"))) ||
             lies_in_unpacked(json_string_value(json_object_get(checkpoint, "url")));

    json_decref(gang);
    mb_free(path);
    return is;
}

void mb_gang_prune(const char *root, int64_t now_s)
{
    struct mb_gang_ended *list = mb_calloc(LIST_MAX, sizeof(*list));
    DIR *dir = list != NULL ? opendir(root) : NULL;
    struct dirent *e;
    size_t n = 0;

    while (dir != NULL && n < LIST_MAX && (e = readdir(dir)) != NULL) {
        char *path = e->d_name[0] != '.' ? mb_path_join(root, e->d_name) : NULL;

        if (path != NULL && mb_gang_dir_has_ended(path, &list[n].ended_s)) {
            list[n].name = path;
            n++;
        } else {
            mb_free(path);
        }
    }
    if (dir != NULL)
        closedir(dir);
    if (list != NULL)
        mb_gang_prune_decide(list, n, now_s);
    for (size_t i = 0; i < n; i++) {
        struct mb_err err;

        if (!list[i].is_surplus || is_told_by_nothing_else(list[i].name))
            mb_gang_prune_ended(list[i].name);
        else if (mb_fs_remove_tree(list[i].name, &err) != MB_OK)
            mb_warn("gang", "an old attempt stays on disk: %s", err.text);
        mb_free(list[i].name);
    }
    mb_free(list);
}

void mb_gang_prune_ended(const char *dir)
{
    static const char *const names[] = {"spec", "upload.journal", "upload.journal.new",
                                        "tracker.known"};

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        char *path = mb_path_join(dir, names[i]);

        if (path != NULL)
            unlink(path);
        mb_free(path);
    }
}
