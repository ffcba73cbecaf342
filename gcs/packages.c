/*
 * Uploaded working_dir packages: files below packages_dir, named as in their URI gcs://NAME. Nodes
 * that run a driver read them piece by piece (ReadPackage in proto/mobula/head.proto).
 *
 *  1. GET: is it there? If so it is as new again to package_sweep.c.
 *  2. PUT: the body goes piece by piece into a temporary file; then fsync on the thread pool,
 * rename, answer. A package appears whole or not at all, and memory does not grow with it. Failure
 * paths:
 *  3. A name with anything but [A-Za-z0-9._-], another protocol: refused before the body is taken.
 *  4. More than the limit: 413, as Ray says it. A client that goes away, a full disk: the temporary
 *     file is removed.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/log.h"
#include "gcs/services.h"

enum { PIECE_MAX_BYTES = 1 << 20 };

struct upload {
    struct mb_http_req *req;
    struct mb_head *h;
    uv_loop_t *loop;
    int fd;
    uint64_t size_bytes, max_bytes;
    char *temp;
    char *final;
    uv_work_t work; /* syncs the file, and reads one that the store may keep */
    int is_shared;
    struct mb_buf bytes;
    struct mb_err failure;
};

int head_package_name_is_fine(const char *name)
{
    size_t n = strlen(name);

    return n > 0 && n <= 200 && name[0] != '.' &&
           strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-") == n;
}

/* Packages of other places are fetched from there: nobody asks us for them or brings them. */
static void refuse_protocol(struct mb_http_req *req, const char *protocol)
{
    static const char *const remote[] = {"http",  "https", "s3",   "gs",
                                         "azure", "abfss", "file", NULL};
    int is_known = 0;

    for (const char *const *p = remote; *p; p++)
        is_known |= strcmp(*p, protocol) == 0;
    if (strcmp(mb_http_req_method(req), "PUT") != 0)
        mb_http_reply_text(req, 500, "500 Internal Server Error\n\nServer got itself in trouble");
    else if (is_known)
        mb_http_reply_text(req, 500,
                           "Traceback (most recent call last):\nValueError: "
                           "upload_package_to_gcs should not be called with a remote path.");
    else
        mb_http_reply_text(
            req, 500,
            "Traceback (most recent call last):\nValueError: Invalid protocol for runtime_env URI "
            "\"%.64s://%.200s\". Supported protocols: ['GCS', 'CONDA', 'PIP', 'UV', 'HTTP', "
            "'HTTPS', 'S3', 'GS', 'AZURE', 'ABFSS', 'FILE', 'LOCAL']. Original error: '%.64s' is "
            "not a valid Protocol",
            protocol, mb_http_req_param(req, "name"), protocol);
}

/* The path of the package, or NULL after the refusal was answered. */
static char *package_path(struct mb_head *h, struct mb_http_req *req)
{
    const char *protocol = mb_http_req_param(req, "protocol");
    const char *name = mb_http_req_param(req, "name");
    char *path;

    if (strcmp(protocol, "gcs") != 0) {
        refuse_protocol(req, protocol);
        return NULL;
    }
    if (!head_package_name_is_fine(name)) {
        mb_http_reply_text(req, 400,
                           "a package name has 1 to 200 of the characters A-Z a-z 0-9 . _ -");
        return NULL;
    }
    path = mb_path_join(h->packages_dir, name);
    if (!path)
        mb_http_reply_text(req, 500, "out of memory");
    return path;
}

int head_package_known(struct mb_head *h, const char *name)
{
    char *path = head_package_name_is_fine(name) ? mb_path_join(h->packages_dir, name) : NULL;
    int known = path && mb_fs_exists(path);

    mb_free(path);
    return known;
}

static void get_package(void *arg, struct mb_http_req *req)
{
    char *path = package_path(arg, req);

    if (!path)
        return;
    if (utimensat(AT_FDCWD, path, NULL, 0) == 0)
        mb_http_reply(req, 200, NULL, "", 0);
    else
        mb_http_reply_text(req, 404, "Package gcs://%s does not exist",
                           mb_http_req_param(req, "name"));
    mb_free(path);
}

static void free_upload(struct upload *u)
{
    if (u->fd >= 0)
        close(u->fd);
    if (u->temp)
        unlink(u->temp); /* gone already when it was renamed */
    mb_buf_close(&u->bytes);
    mb_free(u->temp);
    mb_free(u->final);
    mb_free(u);
}

static void fail_upload(struct upload *u, int status, const char *text)
{
    mb_http_reply_text(u->req, status, "%s", text);
    free_upload(u);
}

static void refuse_size(struct upload *u)
{
    mb_http_reply_text(u->req, 413, "Maximum request body size %llu exceeded.",
                       (unsigned long long)u->max_bytes);
    free_upload(u);
}

static void on_kept(void *arg, const struct mb_err *err)
{
    struct upload *u = arg;

    if (err->code != 0) {
        fail_upload(u, 500, err->text);
        return;
    }
    mb_http_reply(u->req, 200, NULL, "", 0);
    free_upload(u);
}

/* It is here. With a shared store it goes there too, or the client is told that it does not. */
static void finish_upload(struct upload *u)
{
    struct mb_err err = {0};

    mb_info("jobs", "package stored path=%s bytes=%llu", u->final,
            (unsigned long long)u->size_bytes);
    if (u->h->store && head_package_can_keep(u->h, u->size_bytes)) {
        if (head_package_keep(u->h, strrchr(u->final, '/') + 1,
                              head_blob(mb_buf_str(&u->bytes), u->bytes.len), on_kept, u,
                              &err) != 0)
            fail_upload(u, 500, err.text);
        return;
    }
    if (u->h->redis)
        mb_http_reply_header(u->req, "X-Mobula-Package", "on-this-head-only");
    mb_http_reply(u->req, 200, NULL, "", 0);
    free_upload(u);
}

/* On a pool thread. */
static void sync_file(uv_work_t *work)
{
    struct upload *u = work->data;

    if (fsync(u->fd) != 0)
        mb_err_sys(&u->failure, errno, "fsync");
    else if (u->is_shared && u->size_bytes <= HEAD_KEPT_PACKAGE_BYTES)
        mb_fs_read(u->temp, HEAD_KEPT_PACKAGE_BYTES, &u->bytes, &u->failure);
}

static void on_synced(uv_work_t *work, int status)
{
    struct upload *u = work->data;

    if (status != 0 || u->failure.code != 0) {
        fail_upload(u, 500, status != 0 ? uv_strerror(status) : u->failure.text);
    } else if (rename(u->temp, u->final) != 0) {
        fail_upload(u, 500, strerror(errno));
    } else {
        finish_upload(u);
    }
}

static int on_piece(void *arg, struct mb_http_req *req, const void *p, size_t n, int error_code)
{
    struct upload *u = arg;
    struct mb_err err = {0};

    (void)req;
    if (n > 0) {
        u->size_bytes += n;
        if (u->size_bytes > u->max_bytes) {
            refuse_size(u);
            return MB_EFULL;
        }
        if (mb_fs_write_all(u->fd, p, n, &err) != 0) {
            fail_upload(u, 500, err.text);
            return err.code;
        }
        return 0;
    }
    if (error_code != 0) {
        fail_upload(u, 500, "the upload was broken off");
        return 0;
    }
    u->work.data = u;
    u->is_shared = u->h->redis != NULL;
    int rc = uv_queue_work(u->loop, &u->work, sync_file, on_synced);
    if (rc != 0)
        fail_upload(u, 500, uv_strerror(rc));
    return 0;
}

/* What says beforehand that it is too large is refused before anything is written. */
static int is_too_large(struct mb_head *h, struct mb_http_req *req)
{
    const char *length = mb_http_req_header(req, "Content-Length");

    if (!length || strtoull(length, NULL, 10) <= h->max_package_bytes)
        return 0;
    mb_http_reply_text(req, 413, "Maximum request body size %llu exceeded.",
                       (unsigned long long)h->max_package_bytes);
    return 1;
}

static void put_package(void *arg, struct mb_http_req *req)
{
    struct mb_head *h = arg;
    char *path = package_path(h, req);
    struct upload *u;

    if (!path || is_too_large(h, req)) {
        mb_free(path);
        return;
    }
    u = mb_calloc(1, sizeof *u);
    if (!u) {
        mb_free(path);
        mb_http_reply_text(req, 500, "out of memory");
        return;
    }
    u->req = req;
    u->h = h;
    u->loop = h->loop;
    u->max_bytes = h->max_package_bytes;
    u->final = path;
    u->fd = -1;
    u->temp = mb_asprintf("%s.%016llx.part", path, (unsigned long long)mb_random_u64());
    if (u->temp)
        u->fd = open(u->temp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (u->fd < 0)
        fail_upload(u, 500, u->temp ? strerror(errno) : "out of memory");
    else
        mb_http_req_body_cb(req, on_piece, u);
}

/* For our own client, which says more about a directory that is too large than a 413 can. */
static void limits(void *arg, struct mb_http_req *req)
{
    struct mb_head *h = arg;

    json_t *o = json_pack("{s:I, s:b}", "max_package_bytes", (json_int_t)h->max_package_bytes,
                          "places_drivers", 1);

    if (o && h->redis)
        json_object_set_new(o, "max_kept_package_bytes", json_integer(HEAD_KEPT_PACKAGE_BYTES));
    mb_http_reply_json(req, 200, o);
}

int head_packages_routes(struct mb_head *h, struct mb_err *err)
{
    static const struct mb_http_route routes[] = {
        {"GET", "/api/packages/{protocol}/{name}", get_package, 0},
        {"GET", "/api/mobula/limits", limits, 0},
        {"PUT", "/api/packages/{protocol}/{name}", put_package, MB_HTTP_BODY_STREAM},
    };

    return mb_http_server_add(h->http, routes, sizeof routes / sizeof routes[0], h, err);
}

/* ---- for nodes that run a driver ---- */

static void read_package(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    static uint8_t piece[PIECE_MAX_BYTES]; /* loop thread only */
    struct mb_head *h = arg;
    const Mobula__V1__ReadPackageRequest *q = (const Mobula__V1__ReadPackageRequest *)request;
    Mobula__V1__ReadPackageReply reply = MOBULA__V1__READ_PACKAGE_REPLY__INIT;
    char *path;
    struct stat st;
    ssize_t n = -1;
    int fd;

    if (!head_admits(h, req))
        return;
    path = head_package_known(h, q->name) ? mb_path_join(h->packages_dir, q->name) : NULL;
    fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    mb_free(path);
    if (fd < 0) {
        mb_grpc_reply_error(req, MB_GRPC_NOT_FOUND, "the package gcs://%.200s is not on this head",
                            q->name);
        return;
    }
    if (fstat(fd, &st) == 0)
        n = pread(fd, piece, q->max_bytes < sizeof piece ? q->max_bytes : sizeof piece,
                  (off_t)(q->offset & INT64_MAX));
    close(fd);
    if (n < 0) {
        mb_grpc_reply_error(req, MB_GRPC_INTERNAL, "the package cannot be read");
        return;
    }
    reply.size = (uint64_t)st.st_size;
    reply.data.data = piece;
    reply.data.len = (size_t)n;
    mb_grpc_reply(req, &reply.base);
}

int head_packages_methods(struct mb_head *h, struct mb_err *err)
{
    static const struct mb_grpc_method methods[] = {
        {"/mobula.v1.Head/ReadPackage", &mobula__v1__read_package_request__descriptor, read_package,
         NULL, 0},
    };

    return mb_grpc_server_add(h->server, methods, 1, h, err);
}
