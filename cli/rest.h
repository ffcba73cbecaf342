/*
 * The Jobs REST API, from a program without a loop of its own: every call blocks until its answer
 * or its deadline. One struct, one thread.
 */
#ifndef MOBULA_CLI_REST_H
#define MOBULA_CLI_REST_H

#include <jansson.h>
#include "base/buf.h"
#include "base/err.h"
#include "cli/options.h"
#include "cli/wire.h"

struct mb_rest {
    struct mb_wire *wire;
    char *base_url;     /* http://host:port, no slash at the end */
    struct mb_buf auth; /* "Authorization: Bearer TOKEN"; empty: none */
    const char *headers[3];
    uint64_t timeout_ms; /* of one call */
};

/* address: of --address, NULL: RAY_API_SERVER_ADDRESS, then RAY_ADDRESS, then
 * http://127.0.0.1:8265. A HOST:PORT without a scheme is the GCS, which is asked where the API is.
 */
int mb_rest_open(struct mb_rest *rest, const struct mb_cli *cli, const char *address,
                 struct mb_err *err);
void mb_rest_close(struct mb_rest *rest);

struct mb_rest_answer {
    long status;
    struct mb_buf body;
};

/* 0: an answer came, whatever its status; the caller closes answer->body. body_json NULL: none. */
int mb_rest_call(struct mb_rest *rest, const char *method, const char *path,
                 const json_t *body_json, struct mb_rest_answer *answer, struct mb_err *err);
/* The same with the bytes of a file as body. */
int mb_rest_put_file(struct mb_rest *rest, const char *path, int fd, size_t n,
                     struct mb_rest_answer *answer, struct mb_err *err);
/* A call that must be answered with 200 and JSON; *out is owned by the caller. MB_ENOENT for 404,
 * MB_EDENIED for 401 and 403, MB_EUNSUPPORTED for 501, MB_EUNAVAIL for 503; texts of the server
 * become one line. A string of the answer may have a NUL, as a log may. */
int mb_rest_json(struct mb_rest *rest, const char *method, const char *path,
                 const json_t *body_json, json_t **out, struct mb_err *err);

#endif
