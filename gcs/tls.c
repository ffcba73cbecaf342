/*
 *  1. RAY_USE_TLS decides; without it the other variables mean nothing, as with Ray.
 *  2. With it all three files are needed: Ray's TLS is mutual.
 */
#include "gcs/tls.h"

#include <errno.h>
#include <stdlib.h>
#include <strings.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/fs.h"

enum { CERT, KEY, CA, FILES };

static const char *const names[FILES] = {"RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY",
                                         "RAY_TLS_CA_CERT"};

static int is_one_of(const char *word, const char *a, const char *b)
{
    return strcasecmp(word, a) == 0 || strcasecmp(word, b) == 0;
}

int mb_gcs_use_tls(int *out, struct mb_err *err)
{
    const char *use = getenv("RAY_USE_TLS");

    *out = use != NULL && is_one_of(use, "1", "true");
    if (use == NULL || *use == '\0' || *out || is_one_of(use, "0", "false"))
        return MB_OK;
    return mb_err_set(err, MB_EINVAL, "RAY_USE_TLS=%.40s: expected 1 or 0", use);
}

static int read_files(struct mb_grpc_tls **out, struct mb_err *err)
{
    const char *paths[FILES];
    int use;
    int rc = mb_gcs_use_tls(&use, err);

    *out = NULL;
    if (rc != MB_OK || !use)
        return rc;
    for (int i = 0; i < FILES; i++) {
        paths[i] = getenv(names[i]);
        if (paths[i] == NULL || *paths[i] == '\0')
            return mb_err_set(err, MB_EINVAL,
                              "RAY_USE_TLS=1, and %s is not set: %s, %s and %s are needed",
                              names[i], names[CERT], names[KEY], names[CA]);
    }
    return mb_grpc_tls_read(&(struct mb_grpc_tls_files){paths[CERT], paths[KEY], paths[CA]}, out,
                            err);
}

int mb_gcs_grpc_create(uv_loop_t *loop, struct mb_grpc **out, struct mb_err *err)
{
    struct mb_grpc_tls *tls;
    int rc = read_files(&tls, err);

    if (rc != MB_OK)
        return rc;
    rc = mb_grpc_create(loop, out, err);
    if (rc == MB_OK && tls != NULL)
        mb_grpc_secure(*out, tls);
    else
        mb_grpc_tls_free(tls);
    return rc;
}

int mb_gcs_tls_hand_down(struct mb_err *err)
{
    int use;
    int rc = mb_gcs_use_tls(&use, err);

    for (int i = 0; rc == MB_OK && use && i < FILES; i++) {
        const char *path = getenv(names[i]);
        char *cwd = path != NULL && *path != '\0' ? getcwd(NULL, 0) : NULL;
        char *full = cwd != NULL ? mb_path_join(cwd, path) : NULL;

        /* Links stay: a renewed secret of Kubernetes lies behind the same link in another place.
         * What is missing is said by whoever reads it. */
        if (path != NULL && *path != '\0' && (full == NULL || setenv(names[i], full, 1) != 0))
            rc = mb_err_sys(err, errno, "the environment of drivers");
        mb_free(full);
        free(cwd); /* libc's memory */
    }
    return rc;
}
