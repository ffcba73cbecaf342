/*
 * Answers.
 *
 * 1. A reply function makes a libmicrohttpd response and gives it to mb_http_req_answer().
 * 2. If the connection waits for it (suspended), it is resumed and the server queues the response;
 *    if the handler answered inside its own call, the server queues it on return.
 * 3. To a request that announces too much body an answer is written while its head is looked at.
 *    libmicrohttpd has none on its way then: a request is looked at after the one before it was
 *    answered. It reads and drops what comes, and hangs up: it has no answer of its own.
 * 4. A streaming answer is pulled by libmicrohttpd; "not now" suspends the connection until
 *    mb_http_resume().
 * Failures: the client is gone: the answer is dropped and the request freed. Memory is out: the
 * connection is closed without an answer, which the client sees as a broken connection.
 */
#include <assert.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <jansson.h>
#include "base/alloc.h"
#include "base/http/internal.h"
#include "base/log.h"

enum { PULL_BLOCK_BYTES = 32 * 1024 };

static const char server_error[] = "500 Internal Server Error\n\nServer got itself in trouble";

void mb_http_req_answer(struct mb_http_req *req, int status, struct MHD_Response *response)
{
    assert(!req->response && req->status == 0);
    req->status = status;
    req->response = response;
    for (size_t i = 0; response && i < req->n_reply_headers; i++) {
        if (MHD_add_response_header(response, req->reply_headers[i].name,
                                    req->reply_headers[i].value) != MHD_YES)
            mb_warn("http", "response header %s refused", req->reply_headers[i].name);
    }
    req->owed = 0;
    if (!req->srv)
        mb_http_req_free_if_done(req);
    else
        mb_http_req_resume_connection(req);
}

static void set_content_type(struct MHD_Response *response, const char *content_type)
{
    if (response && content_type)
        MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, content_type);
}

void mb_http_reply_past(const struct mb_http_req *req, int status, const char *content_type,
                        const void *body, size_t n)
{
    int fd = MHD_get_connection_info(req->conn, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
    int is_head = req->method && strcmp(req->method, "HEAD") == 0;
    struct mb_buf out = {0};
    int rc = mb_buf_printf(&out, "HTTP/1.1 %d %s\r\nConnection: close\r\nContent-Length: %zu\r\n",
                           status, MHD_get_reason_phrase_for((unsigned)status), n);
    if (rc == 0 && content_type)
        rc = mb_buf_printf(&out, "Content-Type: %s\r\n", content_type);
    for (size_t i = 0; rc == 0 && i < req->n_reply_headers; i++)
        rc = mb_buf_printf(&out, "%s: %s\r\n", req->reply_headers[i].name,
                           req->reply_headers[i].value);
    if (rc == 0)
        rc = mb_buf_puts(&out, "\r\n");
    if (rc == 0 && !is_head)
        rc = mb_buf_add(&out, body, n);
    if (rc != 0 || send(fd, out.data, out.len, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)out.len)
        mb_debug("http", "a refusal could not be sent");
    shutdown(fd, SHUT_WR);
    mb_buf_close(&out);
}

void mb_http_reply(struct mb_http_req *req, int status, const char *content_type, const void *body,
                   size_t n)
{
    if (req->at_once) {
        mb_http_reply_past(req, status, content_type, body, n);
        req->discard = 1;
        mb_http_req_answer(req, status, NULL);
        return;
    }
    /* The cast only drops const: MUST_COPY makes the library read, never write. */
    struct MHD_Response *response =
        MHD_create_response_from_buffer(n, n ? (void *)body : (void *)"", MHD_RESPMEM_MUST_COPY);
    set_content_type(response, content_type);
    mb_http_req_answer(req, status, response);
}

void mb_http_reply_text(struct mb_http_req *req, int status, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    char *text = mb_vasprintf(fmt, ap);
    va_end(ap);
    const char *body = text ? text : server_error;
    mb_http_reply(req, text ? status : 500, "text/plain; charset=utf-8", body, strlen(body));
    mb_free(text);
}

void mb_http_reply_json(struct mb_http_req *req, int status, void *json)
{
    char *text = json ? json_dumps(json, JSON_ENCODE_ANY) : NULL;
    json_decref(json);
    if (!text) {
        mb_http_reply_text(req, 500, "%s", server_error);
        return;
    }
    mb_http_reply(req, status, "application/json; charset=utf-8", text, strlen(text));
    free(text);
}

void mb_http_reply_header(struct mb_http_req *req, const char *name, const char *value)
{
    struct mb_http_pair *grown =
        mb_reallocarray(req->reply_headers, req->n_reply_headers + 1, sizeof *req->reply_headers);
    if (!grown)
        goto nomem;
    req->reply_headers = grown;
    struct mb_http_pair pair = {mb_strdup(name), mb_strdup(value)};
    if (!pair.name || !pair.value) {
        mb_free((char *)pair.name);
        mb_free((char *)pair.value);
        goto nomem;
    }
    req->reply_headers[req->n_reply_headers++] = pair;
    return;
nomem:
    mb_warn("http", "out of memory: header %s left out of an answer", name);
}

/* ---- streaming ---- */

static ssize_t on_pull(void *arg, uint64_t pos, char *buf, size_t max)
{
    struct mb_http_req *req = arg;
    long n;
    (void)pos;
    if (req->srv->stopping || req->client_gone)
        return MHD_CONTENT_READER_END_WITH_ERROR;
    do {
        req->resume_in_pull = 0;
        req->in_pull = 1;
        n = req->pull(req->pull_arg, buf, max);
        req->in_pull = 0;
    } while (n == 0 && req->resume_in_pull);
    if (n == MB_HTTP_PULL_END)
        return MHD_CONTENT_READER_END_OF_STREAM;
    if (n < 0)
        return MHD_CONTENT_READER_END_WITH_ERROR;
    assert((size_t)n <= max);
    if (n == 0) {
        req->suspended = 1;
        MHD_suspend_connection(req->conn);
    }
    return n;
}

void mb_http_reply_stream(struct mb_http_req *req, int status, const char *content_type,
                          mb_http_pull_cb pull, void (*free_cb)(void *arg), void *arg)
{
    struct MHD_Response *response = NULL;
    if (req->srv) {
        response = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, PULL_BLOCK_BYTES, on_pull,
                                                     req, NULL);
        set_content_type(response, content_type);
    }
    if (!response) {
        if (free_cb)
            free_cb(arg);
        mb_http_req_answer(req, status, NULL);
        return;
    }
    req->pull = pull;
    req->pull_free = free_cb;
    req->pull_arg = arg;
    mb_http_req_answer(req, status, response);
}

void mb_http_resume(struct mb_http_req *req)
{
    if (req->in_pull)
        req->resume_in_pull = 1;
    else if (req->srv)
        mb_http_req_resume_connection(req);
}
