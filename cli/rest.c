/*
 * 1. find the address and the token; 2. send one request; 3. map
 * the status: 200 is JSON; 400, 401/403, 404, 501 and 503 have codes of their own, all else is
 * MB_ESTATE with the last line of what the server said (Ray's servers answer with whole
 * tracebacks).
 */
#include "cli/rest.h"

#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/str.h"
#include "cli/gcs_ask.h"
#include "gcs/token.h"

enum { API_PORT = 8265 };
static const size_t BODY_MAX_BYTES = (size_t)256 << 20;
static const uint64_t CALL_TIMEOUT_MS = 120 * 1000, GCS_TIMEOUT_MS = 5 * 1000;

/* ---- address ---- */

static const char *pick_address(const struct mb_cli *cli, const char *flag)
{
    const char *api = getenv("RAY_API_SERVER_ADDRESS"), *ray = getenv("RAY_ADDRESS");
    const char *from_env = api != NULL && *api != '\0' ? api : ray;

    if (from_env != NULL && (*from_env == '\0' || strcmp(from_env, "auto") == 0))
        from_env = NULL;
    if (cli->ray_mode && from_env != NULL)
        return from_env; /* as Ray does, even against an explicit --address */
    return flag != NULL ? flag : from_env;
}

/* A HOST:PORT without a scheme is the GCS, as Ray's RAY_ADDRESS is: it knows where the API is. */
static int url_of(const char *address, char **out, struct mb_err *err)
{
    size_t n;

    if (address == NULL) {
        *out = mb_asprintf("http://127.0.0.1:%d", API_PORT);
    } else if (mb_starts_with(address, "http://") || mb_starts_with(address, "https://")) {
        n = strlen(address);
        while (n > 0 && address[n - 1] == '/')
            n--;
        *out = mb_strndup(address, n);
    } else {
        int rc = mb_gcs_ask_api_url(address, GCS_TIMEOUT_MS, out, err);

        if (rc != 0) {
            mb_err_wrap(err,
                        "asking the GCS at %s for the Jobs API (or give its URL: --address "
                        "http://HOST:%d)",
                        address, API_PORT);
            return rc;
        }
    }
    return *out ? 0 : mb_err_set(err, MB_ENOMEM, "out of memory");
}

int mb_rest_open(struct mb_rest *rest, const struct mb_cli *cli, const char *address,
                 struct mb_err *err)
{
    char *token = NULL;
    int rc;

    memset(rest, 0, sizeof(*rest));
    rest->timeout_ms = CALL_TIMEOUT_MS;
    rc = url_of(pick_address(cli, address), &rest->base_url, err);
    if (rc == 0)
        rc = mb_token_load(NULL, &token, err);
    if (rc == 0 && token != NULL &&
        mb_buf_printf(&rest->auth, "Authorization: Bearer %s", token) != 0)
        rc = mb_err_set(err, MB_ENOMEM, "out of memory");
    if (rc == 0)
        rc = mb_wire_open(&rest->wire, err);
    mb_free(token);
    rest->headers[0] = "Content-Type: application/json";
    rest->headers[1] = rest->auth.len > 0 ? mb_buf_str(&rest->auth) : NULL;
    if (rc != 0)
        mb_rest_close(rest);
    return rc;
}

void mb_rest_close(struct mb_rest *rest)
{
    mb_wire_close(rest->wire);
    mb_free(rest->base_url);
    mb_buf_close(&rest->auth);
    memset(rest, 0, sizeof(*rest));
}

/* ---- calls ---- */

static int fetch(struct mb_rest *rest, struct mb_wire_request *request, const char *path,
                 struct mb_rest_answer *answer, struct mb_err *err)
{
    char *url = mb_asprintf("%s%s", rest->base_url, path);
    int rc;

    memset(answer, 0, sizeof(*answer));
    if (url == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    request->url = url;
    request->headers = rest->headers;
    /* A megabyte a second is the least that an upload may do. */
    request->timeout_ms = rest->timeout_ms + (uint64_t)request->body_len / 1000;
    request->max_answer_bytes = BODY_MAX_BYTES;
    rc = mb_wire_fetch(rest->wire, request, &answer->status, &answer->body, err);
    mb_free(url);
    if (rc != 0) {
        mb_err_wrap(err, "%s", rest->base_url);
        mb_buf_close(&answer->body);
    }
    return rc;
}

int mb_rest_call(struct mb_rest *rest, const char *method, const char *path,
                 const json_t *body_json, struct mb_rest_answer *answer, struct mb_err *err)
{
    char *text = body_json != NULL ? json_dumps(body_json, JSON_COMPACT) : NULL;
    struct mb_wire_request request = {
        .method = method, .body = text, .body_len = text != NULL ? strlen(text) : 0, .body_fd = -1};
    int rc = fetch(rest, &request, path, answer, err);

    free(text);
    return rc;
}

int mb_rest_put_file(struct mb_rest *rest, const char *path, int fd, size_t n,
                     struct mb_rest_answer *answer, struct mb_err *err)
{
    struct mb_wire_request request = {.method = "PUT", .body_fd = fd, .body_len = n};

    return fetch(rest, &request, path, answer, err);
}

/* The last line of the body that says something: a head of Ray ends a traceback inside another one
 * with a line that is a full stop. */
static const char *last_line(struct mb_buf *body)
{
    char *text = (char *)body->data;
    char *newline;

    while (body->len > 0 &&
           (strchr("\r\n", text[body->len - 1]) != NULL ||
            (body->len > 1 && text[body->len - 1] == '.' && text[body->len - 2] == '\n')))
        text[--body->len] = '\0';
    newline = body->len > 0 ? strrchr(text, '\n') : NULL;
    return newline != NULL ? newline + 1 : mb_buf_str(body);
}

int mb_rest_json(struct mb_rest *rest, const char *method, const char *path,
                 const json_t *body_json, json_t **out, struct mb_err *err)
{
    struct mb_rest_answer answer;
    json_error_t why;
    int rc = mb_rest_call(rest, method, path, body_json, &answer, err);

    if (rc != 0)
        return rc;
    if (answer.status == 200) {
        *out = json_loadb(mb_buf_str(&answer.body), answer.body.len,
                          JSON_DECODE_ANY | JSON_ALLOW_NUL, &why);
        if (*out == NULL)
            rc = mb_err_set(err, MB_EPROTO, "%s%s: the answer is not JSON: %s", rest->base_url,
                            path, why.text);
    } else if (answer.status == 400) {
        rc = mb_err_set(err, MB_EINVAL, "%s", last_line(&answer.body));
    } else if (answer.status == 404) {
        rc = mb_err_set(err, MB_ENOENT, "%s", last_line(&answer.body));
    } else if (answer.status == 401 || answer.status == 403) {
        rc = mb_err_set(err, MB_EDENIED, "%s: %s%s", rest->base_url, last_line(&answer.body),
                        rest->auth.len > 0
                            ? ": use the head's own, a copy of its token file"
                            : ": copy the head's token file to ~/.ray/auth_token (mode 0600), or "
                              "set RAY_AUTH_TOKEN; RAY_AUTH_MODE=disabled sends none");
    } else if (answer.status == 501) {
        rc = mb_err_set(err, MB_EUNSUPPORTED, "%s", last_line(&answer.body));
    } else if (answer.status == 503) {
        rc = mb_err_set(err, MB_EUNAVAIL, "%s: %s", rest->base_url, last_line(&answer.body));
    } else {
        rc = mb_err_set(err, MB_ESTATE, "%s%s: status %ld: %s", rest->base_url, path, answer.status,
                        last_line(&answer.body));
    }
    mb_buf_close(&answer.body);
    return rc;
}
