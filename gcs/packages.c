/*
 * Uploaded working_dir packages: files below packages_dir, named as in their URI gcs://NAME. Nodes
 * that run a driver read them piece by piece (ReadPackage in proto/mobula/head.proto).
 *
 *  1. GET: is it there? If so it is as new again to package_sweep.c.
 *  2. PUT: package_upload.c.
 * Failure path:
 *  3. A name with anything but [A-Za-z0-9._-], another protocol: refused before the body is taken.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "gcs/services.h"

enum { PIECE_MAX_BYTES = 1 << 20 };

int head_package_name_is_fine(const char *name)
{
    size_t n = strlen(name);

    return n > 0 && n <= 200 && name[0] != '.' &&
           strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._+-") == n;
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
                           "a package name has 1 to 200 of the characters A-Z a-z 0-9 . _ + -");
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

static void put_package(void *arg, struct mb_http_req *req)
{
    char *path = package_path(arg, req);

    if (path)
        head_package_upload(arg, req, path);
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
    if (fd < 0 && h->restore) { /* the node asks again */
        mb_grpc_reply_error(req, MB_GRPC_UNAVAILABLE, "the packages are being restored");
        return;
    }
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
