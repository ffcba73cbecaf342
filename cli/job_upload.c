/*
 *  1. Each entry of working_dir and py_modules that is no URI is looked at: a directory is hashed,
 * a package that is a file as well; a wheel has its name.
 *  2. If the head does not have the package yet, it is zipped into a temporary file (unlinked at
 *     once) and sent; what is a package already is sent as it is.
 *  3. Its gcs:// URI takes the entry's place.
 * Failure paths: neither a directory nor a package, or more than the head takes: nothing of it is
 * sent, and nothing submitted.
 */
#include "cli/job_upload.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/printable.h"
#include "base/str.h"
#include "cli/package.h"

struct uploads {
    struct mb_rest *rest;
    const char **excludes; /* NULL-terminated; NULL: not asked yet, nor are the limits */
    struct mb_head_limits limits;
    struct mb_err *err;
};

/* ---- the head ---- */

int mb_job_ask_limits(struct mb_rest *rest, struct mb_head_limits *out, struct mb_err *err)
{
    json_t *answer = NULL;
    int rc = mb_rest_json(rest, "GET", "/api/mobula/limits", NULL, &answer, err);
    json_int_t limit = json_integer_value(json_object_get(answer, "max_package_bytes"));

    *out = (struct mb_head_limits){.package_bytes = MB_PACKAGE_MAX_BYTES};
    out->places_drivers = json_is_true(json_object_get(answer, "places_drivers"));
    out->kept_bytes =
        (uint64_t)json_integer_value(json_object_get(answer, "max_kept_package_bytes"));
    json_decref(answer);
    if (limit > 0)
        out->package_bytes = (uint64_t)limit;
    return rc == MB_ENOENT ? 0 : rc;
}

/* 503: a head that does not serve yet, or a standby; later it may. */
static int refusal_code(long status)
{
    return status == 503 ? MB_EUNAVAIL : MB_ESTATE;
}

static int has_package(struct mb_rest *rest, const char *path, int *has, struct mb_err *err)
{
    struct mb_rest_answer answer;
    int rc = mb_rest_call(rest, "GET", path, NULL, &answer, err);

    if (rc != 0)
        return rc;
    *has = answer.status == 200;
    if (answer.status != 200 && answer.status != 404)
        rc = mb_err_set(err, refusal_code(answer.status), "%s: status %ld", path, answer.status);
    mb_buf_close(&answer.body);
    return rc;
}

/* ---- one package ---- */

/* A file without a name, in TMPDIR or /tmp. A container may have neither, or only such that cannot
 * be written: then it is in memory. */
static int open_unnamed(struct mb_err *err)
{
    const char *tmp = getenv("TMPDIR");
    char *name = mb_asprintf("%s/mobula-package-XXXXXX", tmp != NULL ? tmp : "/tmp");
    int fd = name != NULL ? mkostemp(name, O_CLOEXEC) : -1;

    if (fd >= 0)
        unlink(name);
    else if (name != NULL && tmp == NULL && (errno == ENOENT || errno == EROFS || errno == EACCES))
        fd = memfd_create("mobula-package", MFD_CLOEXEC);
    if (fd < 0)
        mb_err_sys(err, name != NULL ? errno : ENOMEM, "%s", name != NULL ? name : "package");
    mb_free(name);
    return fd;
}

/* What is sent: the archive itself, or the zip. -1 and err. */
static int open_package(const struct mb_package *p, const char *path, struct mb_err *err)
{
    int fd = p->is_archive ? open(path, O_RDONLY | O_CLOEXEC) : open_unnamed(err);

    if (fd < 0 && p->is_archive)
        mb_err_sys(err, errno, "%s", path);
    if (fd >= 0 && !p->is_archive && mb_package_zip(p, path, fd, err) != 0) {
        close(fd);
        fd = -1;
    }
    return fd;
}

static int put_package(struct uploads *u, const struct mb_package *p, const char *local,
                       const char *path)
{
    int fd = open_package(p, local, u->err), rc = 0;
    struct mb_rest_answer answer;
    struct stat st;

    if (fd < 0)
        return u->err->code;
    if (fstat(fd, &st) != 0)
        rc = mb_err_sys(u->err, errno, "package");
    if (rc == 0)
        rc = mb_rest_put_file(u->rest, path, fd, (size_t)st.st_size, &answer, u->err);
    if (rc == 0) {
        if (answer.status != 200)
            rc = mb_err_set(u->err, refusal_code(answer.status),
                            "%s: the head refused it: status %ld: %.200s", local, answer.status,
                            mb_buf_str(&answer.body));
        mb_buf_close(&answer.body);
    }
    close(fd);
    return rc;
}

static void say_left_out(const struct mb_package *p, const char *local)
{
    char after[120] = " is left out: it is neither a file nor a directory\n";
    char *name = p->n_left_out > 0 ? mb_path_join(local, p->left_out) : NULL;

    if (p->n_left_out > 1)
        snprintf(after, sizeof(after),
                 " and %zu more are left out: they are neither files nor directories\n",
                 p->n_left_out - 1);
    if (name != NULL)
        mb_printable_say(stderr, "mobula: ", name, after);
    mb_free(name);
}

static int send_package(struct uploads *u, const struct mb_package *p, const char *local)
{
    struct mb_buf path = {0};
    int has = 0, rc = 0;

    if (mb_buf_puts(&path, "/api/packages/gcs/") != 0 || mb_buf_url(&path, p->name, 0) != 0)
        rc = mb_err_set(u->err, MB_ENOMEM, "out of memory");
    if (rc == 0)
        rc = has_package(u->rest, mb_buf_str(&path), &has, u->err);
    if (rc == 0 && !has)
        rc = put_package(u, p, local, mb_buf_str(&path));
    mb_buf_close(&path);
    if (rc == 0 && u->limits.kept_bytes > 0 && p->total_bytes > u->limits.kept_bytes)
        fprintf(stderr,
                "mobula: %s has more than %llu MiB: if the head's node is lost before the job "
                "starts, the job fails\n",
                local, (unsigned long long)(u->limits.kept_bytes >> 20));
    return rc;
}

/* ---- the entries ---- */

/* runtime_env.excludes as a NULL-terminated list borrowed from env; NULL when memory is out. */
static const char **list_excludes(const json_t *env)
{
    json_t *list = json_object_get(env, "excludes"), *item;
    const char **out = mb_calloc(json_array_size(list) + 1, sizeof(*out));
    size_t i, n = 0;

    json_array_foreach(list, i, item)
    {
        if (out != NULL && json_is_string(item))
            out[n++] = json_string_value(item);
    }
    return out;
}

/* Before the first upload. */
static int prepare(struct uploads *u, const json_t *env)
{
    if (u->excludes != NULL)
        return 0;
    u->excludes = list_excludes(env);
    if (u->excludes == NULL)
        return mb_err_set(u->err, MB_ENOMEM, "out of memory");
    return mb_job_ask_limits(u->rest, &u->limits, u->err);
}

static int scan(struct uploads *u, const char *path, int is_module, struct mb_package *p)
{
    const char *field = is_module ? "py_modules:" : "working_dir";
    uint64_t max_bytes = u->limits.package_bytes;
    struct stat st;

    if (stat(path, &st) != 0)
        return mb_err_sys(u->err, errno, "%s %s", field, path);
    if (S_ISDIR(st.st_mode))
        return is_module ? mb_package_scan_module(path, u->excludes, max_bytes, p, u->err)
                         : mb_package_scan(path, u->excludes, max_bytes, p, u->err);
    if (S_ISREG(st.st_mode) && mb_package_is_archive(path, is_module))
        return mb_package_scan_archive(path, max_bytes, p, u->err);
    if (S_ISREG(st.st_mode) && is_module && mb_ends_with(path, ".py"))
        return mb_package_scan_module(path, u->excludes, max_bytes, p, u->err);
    return mb_err_set(
        u->err, MB_EINVAL, "%s %s is not a directory, nor a file that ends in %s", field, path,
        is_module ? ".py, .whl, .zip, .tar.gz, .tgz or .tar.xz" : ".zip, .tar.gz, .tgz or .tar.xz");
}

/* *uri: what takes the entry's place, owned by the caller; NULL: it stays. */
static int upload_entry(struct uploads *u, const json_t *env, const json_t *entry, int is_module,
                        json_t **uri)
{
    const char *path = json_string_value(entry);
    struct mb_package p;
    int rc;

    *uri = NULL;
    if (path == NULL || strstr(path, "://") != NULL) /* the head says what is wrong with others */
        return 0;
    rc = prepare(u, env);
    if (rc == 0)
        rc = scan(u, path, is_module, &p);
    if (rc != 0)
        return rc;
    say_left_out(&p, path);
    rc = send_package(u, &p, path);
    if (rc == 0 && (*uri = json_sprintf("gcs://%s", p.name)) == NULL)
        rc = mb_err_set(u->err, MB_ENOMEM, "out of memory");
    mb_package_close(&p);
    return rc;
}

int mb_job_upload(struct mb_rest *rest, json_t *env, struct mb_err *err)
{
    struct uploads u = {.rest = rest, .err = err};
    json_t *modules = json_object_get(env, "py_modules"), *entry, *uri;
    size_t i;
    int rc = upload_entry(&u, env, json_object_get(env, "working_dir"), 0, &uri);

    if (uri != NULL)
        json_object_set_new(env, "working_dir", uri);
    json_array_foreach(modules, i, entry)
    {
        if (rc == 0)
            rc = upload_entry(&u, env, entry, 1, &uri);
        if (rc == 0 && uri != NULL)
            json_array_set_new(modules, i, uri);
    }
    mb_free(u.excludes);
    return rc;
}
