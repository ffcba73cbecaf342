/*
 *  1. an uploaded package is a file below packages_dir on the head's node; a remote one, and on
 *  other nodes an uploaded one, becomes a file of the job; a file:// one is read where it is;
 *  2. each is unpacked into a directory of its own: JOB_DIR/working_dir, JOB_DIR/py_modules/N;
 *  3. of a remote archive whose only entry is a directory, that directory is the content (as Ray
 *  does: such archives are what source hosts offer for download).
 *  A package that is not there, is no archive or leaves its directory: an error that names it.
 */
#include "agent/job_packages.h"

#include <dirent.h>
#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "agent/unpack/run.h"
#include "base/alloc.h"
#include "base/buf.h"
#include "base/fs.h"
#include "base/str.h"

static int init_item(struct mb_job_package *p, const struct mb_runtime_env_ref *ref, size_t i,
                     const char *packages_dir, const char *job_dir)
{
    p->place = ref->place;
    p->is_module = ref->is_module;
    p->uri = mb_strdup(ref->uri);
    if (ref->place == MB_RUNTIME_ENV_IN_PLACE) {
        p->dir = mb_strdup(ref->rest);
        return p->uri != NULL && p->dir != NULL ? 0 : MB_ENOMEM;
    }
    p->dir = ref->is_module ? mb_asprintf("%s/py_modules/%zu", job_dir, i)
                            : mb_path_join(job_dir, "working_dir");
    if (ref->place == MB_RUNTIME_ENV_UPLOADED && packages_dir != NULL) {
        p->file = mb_path_join(packages_dir, ref->rest);
    } else if (mb_starts_with(ref->uri, "file://")) {
        p->file = mb_strdup(ref->rest);
    } else {
        p->file = mb_asprintf("%s/package-%zu", job_dir, i);
        p->is_missing = p->is_fetched = 1;
    }
    return p->uri != NULL && p->dir != NULL && p->file != NULL ? 0 : MB_ENOMEM;
}

static int init_items(struct mb_job_packages *out, const struct mb_runtime_env *env,
                      const char *packages_dir, const char *job_dir)
{
    if (env->n_refs == 0)
        return 0;
    out->items = mb_calloc(env->n_refs, sizeof(*out->items));
    if (out->items == NULL)
        return MB_ENOMEM;
    out->n = env->n_refs;
    for (size_t i = 0; i < out->n; i++) {
        if (init_item(&out->items[i], &env->refs[i], i, packages_dir, job_dir) != 0)
            return MB_ENOMEM;
        if (!out->items[i].is_module)
            out->working_dir = out->items[i].dir;
    }
    return 0;
}

int mb_job_packages_init(struct mb_job_packages *out, const char *runtime_env_json,
                         const char *packages_dir, const char *job_dir, struct mb_err *err)
{
    json_t *json = json_loads(runtime_env_json, 0, NULL);
    struct mb_runtime_env env;
    int rc = mb_runtime_env_parse(json, &env, err);

    *out = (struct mb_job_packages){0};
    if (rc == 0 && init_items(out, &env, packages_dir, job_dir) != 0) {
        mb_job_packages_close(out);
        rc = mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    json_decref(json);
    return rc;
}

void mb_job_packages_close(struct mb_job_packages *p)
{
    for (size_t i = 0; i < p->n; i++) {
        mb_free(p->items[i].uri);
        mb_free(p->items[i].file);
        mb_free(p->items[i].dir);
    }
    mb_free(p->items);
    *p = (struct mb_job_packages){0};
}

struct mb_job_package *mb_job_packages_missing(struct mb_job_packages *p)
{
    for (size_t i = 0; i < p->n; i++) {
        if (p->items[i].is_missing)
            return &p->items[i];
    }
    return NULL;
}

/* The name of the only entry of dir if that is a directory, owned by the caller; else NULL. */
static char *only_folder(const char *dir)
{
    DIR *d = opendir(dir);
    const struct dirent *e;
    char *name = NULL, *path;
    struct stat st;
    int n = 0;

    while (d != NULL && (e = readdir(d)) != NULL) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
            continue;
        mb_free(name);
        name = ++n == 1 ? mb_strdup(e->d_name) : NULL;
    }
    if (d != NULL)
        closedir(d);
    path = name != NULL ? mb_path_join(dir, name) : NULL;
    if (path == NULL || lstat(path, &st) != 0 || !S_ISDIR(st.st_mode)) {
        mb_free(path);
        path = NULL;
    }
    mb_free(name);
    return path;
}

static int unpack(struct mb_job_packages *all, struct mb_job_package *p, const char *unpacker,
                  struct mb_unpack_child *child, struct mb_err *err)
{
    int rc = mb_fs_mkdir_p(p->dir, 0755, err);
    char *inner;

    if (rc == 0)
        rc = mb_unpack_run(unpacker, p->file, p->dir, child, err);
    if (p->is_fetched)
        unlink(p->file);
    if (rc != 0 || p->place != MB_RUNTIME_ENV_REMOTE)
        return rc;
    inner = only_folder(p->dir);
    if (inner != NULL) {
        if (all->working_dir == p->dir)
            all->working_dir = inner;
        mb_free(p->dir);
        p->dir = inner;
    }
    return 0;
}

int mb_job_packages_unpack(struct mb_job_packages *p, const char *unpacker,
                           struct mb_unpack_child *child, struct mb_err *err)
{
    int rc = 0;

    for (size_t i = 0; i < p->n && rc == 0; i++) {
        struct mb_job_package *item = &p->items[i];

        if (!mb_fs_exists(item->file != NULL ? item->file : item->dir))
            rc = mb_err_set(err, MB_ENOENT, "%s %.500s does not exist on this node",
                            item->is_module ? "py_modules:" : "working_dir", item->uri);
        else if (item->file != NULL)
            rc = unpack(p, item, unpacker, child, err);
    }
    return rc;
}

static int is_name(const char *path, size_t n, const char *name)
{
    size_t len = strlen(name);

    return n >= len && memcmp(path, name, len) == 0 &&
           (n == len || strchr("/:", path[len]) != NULL);
}

int mb_job_packages_is_unpacked(const char *path, size_t n)
{
    static const char archive[] = "package-";

    return is_name(path, n, "working_dir") || is_name(path, n, "py_modules") ||
           (n >= sizeof(archive) && memcmp(path, archive, sizeof(archive) - 1) == 0);
}

int mb_job_packages_are_in(const char *job_dir)
{
    DIR *d = opendir(job_dir);
    const struct dirent *e;
    int found = 0;

    while (d != NULL && !found && (e = readdir(d)) != NULL)
        found = mb_job_packages_is_unpacked(e->d_name, strlen(e->d_name));
    if (d != NULL)
        closedir(d);
    return found;
}

char *mb_job_packages_python_path(const struct mb_job_packages *p, const char *old)
{
    struct mb_buf b = {0};
    int rc = mb_buf_puts(&b, "");

    for (int modules = 1; modules >= 0; modules--) {
        for (size_t i = 0; i < p->n && rc == 0; i++) {
            if (p->items[i].is_module == modules)
                rc = mb_buf_printf(&b, "%s%s", b.len > 0 ? ":" : "", p->items[i].dir);
        }
    }
    if (rc == 0 && old != NULL && *old != '\0')
        rc = mb_buf_printf(&b, "%s%s", b.len > 0 ? ":" : "", old);
    if (rc == 0)
        return b.len > 0 ? mb_buf_take(&b) : mb_strdup("");
    mb_buf_close(&b);
    return NULL;
}

int mb_job_setup_failed(struct mb_err *err)
{
    char text[MB_ERR_TEXT_MAX];

    snprintf(text, sizeof(text), "%s", err->text);
    return mb_err_set(err, err->code,
                      "runtime_env setup failed: Failed to set up runtime environment. %.800s",
                      text);
}
