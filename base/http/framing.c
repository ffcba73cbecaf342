/*
 * Where a request ends, and how much its head may be: what libmicrohttpd leaves open.
 *
 * 1. Two readers that see the end of a request at different bytes (a proxy and this server) take
 *    one's body for the other's next request. So whatever can be read in two ways is refused with
 *    400 and the connection closed, unread (RFC 9112 sections 5.1, 6.1, 6.3): more than one
 *    Content-Length, one beside Transfer-Encoding, a coding that is not just "chunked" or comes
 *    with HTTP/1.0, a name that is no token ("Content-Length :") or is one of these two with more
 *    behind it, a value with a CR, a NUL or another control character than a tab.
 * 2. A continued line is refused, too (section 5.2): libmicrohttpd 0.9 glues it onto the header's
 *    name, and ends a value at a NUL. Neither is seen in what it hands out, but in where that lies:
 *    the head is one piece of its memory, a line's end and a colon are NULs. So what is between a
 *    name, its value, the next name and the head's end has to be just that. Not seen: a NUL at the
 *    end of a value before an LF alone, which look like CR and LF. 0.9.77 and later make blanks of
 * a continuation, as they may. Refused though they are legal: blanks behind "chunked" or a
 * Content-Length. libmicrohttpd does not know them then, and would read the body to the
 * connection's end.
 * 3. A head of more than 64 KiB or 500 lines: 431. libmicrohttpd has a limit of its own, of memory
 *    for both, which depends on how they are mixed and is above these.
 * 4. A Content-Length that is no number is refused by libmicrohttpd 0.9.75 before anybody is asked,
 *    with an answer whose header block is there twice. It says so in its log first: then the answer
 *    is written past it, and the socket is shut for the other one.
 * Failure: a log line of another version is not recognised; then its own answer stands.
 */
#include <stddef.h>
#include <string.h>
#include <strings.h>
#include "base/http/internal.h"
#include "base/log.h"

enum { HEAD_MAX_BYTES = 64 * 1024, HEAD_MAX_LINES = 500, MAX_DIGITS = 18 };

static const char length_text[] = "400: Bad Request\n\nContent-Length is not one whole number";
static const char broken_text[] =
    "400: Bad Request\n\na header is continued on the next line, or has a NUL";

/* RFC 9110 section 5.6.2. */
static int is_token(const char *s, size_t n)
{
    static const char others[] = "!#$%&'*+-.^_`|~0123456789";
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    size_t i = 0;

    while (i < n && s[i] != '\0' && (strchr(letters, s[i]) || strchr(others, s[i])))
        i++;
    return n > 0 && i == n;
}

/* One of the names that say where a request ends, and more behind it. */
static int goes_on(const char *name)
{
    static const char *const names[] = {MHD_HTTP_HEADER_CONTENT_LENGTH,
                                        MHD_HTTP_HEADER_TRANSFER_ENCODING};

    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        size_t n = strlen(names[i]);

        if (strncasecmp(name, names[i], n) == 0 && name[n] != '\0')
            return 1;
    }
    return 0;
}

static int has_control(const char *s, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (((unsigned char)s[i] < ' ' && s[i] != '\t') || s[i] == 0x7f)
            return 1;
    return 0;
}

/* ---- one line of the head after the other ---- */

struct lines {
    int layout_known;
    const char *end; /* of the value before; NULL: none */
    const char *bad; /* what is wrong */
};

/* Only NULs from one to the other, so many: they were `n_lines` line ends, of one byte or two. */
static int are_line_ends(const char *from, const char *to, ptrdiff_t n_lines)
{
    if (to - from < n_lines || to - from > 2 * n_lines)
        return 0;
    while (from < to && *from == '\0')
        from++;
    return from == to;
}

/* The value is what came behind the name's colon and its blanks. */
static int is_beside(const char *name_end, const char *value)
{
    const char *p = name_end + 1;

    while (*p == ' ' || *p == '\t')
        p++;
    return p == value;
}

static enum MHD_Result check_line(void *arg, enum MHD_ValueKind kind, const char *name,
                                  size_t n_name, const char *value, size_t n_value)
{
    struct lines *l = arg;

    (void)kind;
    if (!is_token(name, n_name) || goes_on(name))
        l->bad = "400: Bad Request\n\na header's name is no name";
    else if (!value || has_control(value, n_value))
        l->bad = "400: Bad Request\n\na header has a control character";
    else if (l->layout_known &&
             (!is_beside(name + n_name, value) || (l->end && !are_line_ends(l->end, name, 1))))
        l->bad = broken_text;
    else
        l->end = value + n_value;
    return l->bad ? MHD_NO : MHD_YES;
}

/* head: its first byte, in libmicrohttpd's memory. What is wrong with one of its lines, or NULL. */
static const char *check_lines(struct MHD_Connection *conn, const char *head)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(conn, MHD_CONNECTION_INFO_REQUEST_HEADER_SIZE);
    struct lines l = {.layout_known = strncmp(MHD_get_version(), "0.", 2) == 0};

    MHD_get_connection_values_n(conn, MHD_HEADER_KIND, check_line, &l);
    if (!l.bad && l.layout_known && l.end && info &&
        !are_line_ends(l.end, head + info->header_size, 2))
        l.bad = broken_text;
    return l.bad;
}

/* ---- the head ---- */

static int head_is_too_large(const struct mb_http_req *req)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(req->conn, MHD_CONNECTION_INFO_REQUEST_HEADER_SIZE);

    return req->n_headers > HEAD_MAX_LINES || (info && info->header_size > HEAD_MAX_BYTES);
}

int mb_http_framing_check(const struct mb_http_req *req, const char *method, const char *version,
                          const char **text)
{
    unsigned n_lengths = 0, n_codings = 0;
    const char *coding = "chunked";

    if (head_is_too_large(req)) {
        *text = "431: Request Header Fields Too Large\n\nat most 64 KiB and 500 lines";
        return 431;
    }
    *text = check_lines(req->conn, method);
    if (*text)
        return 400;
    for (size_t i = 0; i < req->n_headers; i++) {
        const struct mb_http_pair *h = &req->headers[i];

        n_lengths += strcasecmp(h->name, MHD_HTTP_HEADER_CONTENT_LENGTH) == 0;
        if (strcasecmp(h->name, MHD_HTTP_HEADER_TRANSFER_ENCODING) == 0) {
            n_codings++;
            coding = h->value;
        }
    }
    if (n_lengths > 1) {
        *text = length_text;
        return 400;
    }
    if (n_codings > 0 && (n_codings > 1 || n_lengths > 0 || strcasecmp(coding, "chunked") != 0 ||
                          strcmp(version, MHD_HTTP_VERSION_1_1) != 0)) {
        *text = "400: Bad Request\n\nTransfer-Encoding has to be chunked, in HTTP/1.1, and without "
                "Content-Length";
        return 400;
    }
    return 0;
}

static int has_bad_length(struct MHD_Connection *conn)
{
    const char *length =
        MHD_lookup_connection_value(conn, MHD_HEADER_KIND, MHD_HTTP_HEADER_CONTENT_LENGTH);

    return length && (length[0] == '\0' || strspn(length, "0123456789") != strlen(length) ||
                      strlen(length) > MAX_DIGITS);
}

void mb_http_framing_refused(struct mb_http_server *srv)
{
    for (const struct mb_http_req *req = srv->reqs; req; req = req->next)
        if (!req->started && req->conn && has_bad_length(req->conn))
            mb_http_reply_past(req, 400, "text/plain; charset=utf-8", length_text,
                               sizeof length_text - 1);
}
