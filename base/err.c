/*
 * Errors as a code and a line of text.
 *
 *  1. Text is formatted into a local buffer first, because callers may pass err->text as an
 *     argument of the new text, and only then copied over.
 *  2. store() keeps the promises of the header: one line (control bytes become spaces), cut at the
 *     bound without splitting a UTF-8 sequence.
 *  3. Everything works with err == NULL; nothing here allocates, so reporting MB_ENOMEM cannot
 * fail.
 */
#include "base/err.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include "base/str.h"

static void store(struct mb_err *err, int code, const char *text)
{
    size_t len = strlen(text);

    if (len >= MB_ERR_TEXT_MAX)
        len = MB_ERR_TEXT_MAX - 1;
    len = mb_utf8_floor(text, len);
    err->code = code;
    for (size_t i = 0; i < len; i++) {
        unsigned char c = (unsigned char)text[i];

        err->text[i] = c < 0x20 || c == 0x7f ? ' ' : text[i];
    }
    err->text[len] = '\0';
}

int mb_err_vset(struct mb_err *err, int code, const char *fmt, va_list ap)
{
    char text[MB_ERR_TEXT_MAX + 1];

    if (err == NULL)
        return code;
    if (vsnprintf(text, sizeof(text), fmt, ap) < 0)
        text[0] = '\0';
    store(err, code, text);
    return code;
}

int mb_err_set(struct mb_err *err, int code, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    mb_err_vset(err, code, fmt, ap);
    va_end(ap);
    return code;
}

static int code_of_errno(int errno_value)
{
    switch (errno_value) {
    case ENOENT:
    case ENOTDIR:
        return MB_ENOENT;
    case EEXIST:
    case EADDRINUSE:
        return MB_EEXIST;
    case ENOMEM:
        return MB_ENOMEM;
    case EINVAL:
    case ENAMETOOLONG:
        return MB_EINVAL;
    case EACCES:
    case EPERM:
    case EROFS:
        return MB_EDENIED;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
    case EMFILE:
    case ENFILE:
        return MB_EFULL;
    case ETIMEDOUT:
        return MB_ETIMEOUT;
    case ECANCELED:
        return MB_ECANCELED;
    case ECONNREFUSED:
    case ECONNRESET:
    case ECONNABORTED:
    case EHOSTUNREACH:
    case ENETUNREACH:
    case ENOTCONN:
    case EPIPE:
        return MB_EUNAVAIL;
    case ENOSYS:
    case EOPNOTSUPP:
        return MB_EUNSUPPORTED;
    default:
        return MB_EIO;
    }
}

int mb_err_sys(struct mb_err *err, int errno_value, const char *fmt, ...)
{
    char what[MB_ERR_TEXT_MAX];
    char reason[128];
    va_list ap;
    int code = code_of_errno(errno_value);

    if (err == NULL)
        return code;
    va_start(ap, fmt);
    if (vsnprintf(what, sizeof(what), fmt, ap) < 0)
        what[0] = '\0';
    va_end(ap);
    return mb_err_set(err, code, "%s: %s", what, strerror_r(errno_value, reason, sizeof(reason)));
}

int mb_err_wrap(struct mb_err *err, const char *fmt, ...)
{
    char what[MB_ERR_TEXT_MAX];
    va_list ap;

    if (err == NULL)
        return MB_EIO;
    va_start(ap, fmt);
    if (vsnprintf(what, sizeof(what), fmt, ap) < 0)
        what[0] = '\0';
    va_end(ap);
    return mb_err_set(err, err->code, "%s: %s", what, err->text);
}

void mb_err_clear(struct mb_err *err)
{
    if (err == NULL)
        return;
    err->code = MB_OK;
    err->text[0] = '\0';
}

/* Names and exit statuses by -code. */
static const struct {
    const char *name;
    int exit_status;
} codes[] = {
    {"OK", 0},        {"EINVAL", 64},   {"ENOMEM", 70},     {"EIO", 74},      {"ENOENT", 66},
    {"EEXIST", 72},   {"ETIMEOUT", 75}, {"ECANCELED", 130}, {"EUNAVAIL", 69}, {"EPROTO", 76},
    {"ECORRUPT", 65}, {"EDENIED", 77},  {"EFULL", 73},      {"ESTATE", 71},   {"EUNSUPPORTED", 78},
};

static const int n_codes = (int)(sizeof(codes) / sizeof(codes[0]));

const char *mb_code_name(int code)
{
    if (code > 0 || code <= -n_codes)
        return "?";
    return codes[-code].name;
}

int mb_exit_status(int code)
{
    if (code > 0 || code <= -n_codes)
        return 70;
    return codes[-code].exit_status;
}
