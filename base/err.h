/*
 * Errors: a negative code that programs branch on, and a text that people read.
 *
 * Every fallible function returns 0 or a negative MB_E* and, when it fails, fills the caller's
 * struct mb_err. Each boundary adds its context in front with mb_err_wrap(); whoever decides what
 * the failure means logs it, once. `err` may be NULL everywhere: the code alone is then returned.
 * Threads: a struct mb_err belongs to one caller; the functions share no state.
 */
#ifndef MOBULA_BASE_ERR_H
#define MOBULA_BASE_ERR_H

#include <stdarg.h>

enum mb_code {
    MB_OK = 0,
    MB_EINVAL = -1,       /* bad input from outside: argument, flag, field */
    MB_ENOMEM = -2,       /* an allocation failed */
    MB_EIO = -3,          /* the operating system refused a read, write or call */
    MB_ENOENT = -4,       /* the named thing does not exist */
    MB_EEXIST = -5,       /* the named thing exists already */
    MB_ETIMEOUT = -6,     /* a deadline passed */
    MB_ECANCELED = -7,    /* the caller or a shutdown cancelled it */
    MB_EUNAVAIL = -8,     /* a peer cannot be reached, or went away */
    MB_EPROTO = -9,       /* a peer sent something the protocol does not allow */
    MB_ECORRUPT = -10,    /* bytes on disk or in a bucket fail their check */
    MB_EDENIED = -11,     /* authentication or permission */
    MB_EFULL = -12,       /* a bounded queue, a quota or a disk is full */
    MB_ESTATE = -13,      /* not possible in the present state */
    MB_EUNSUPPORTED = -14 /* understood, and not provided */
};

enum { MB_ERR_TEXT_MAX = 1024 };

struct mb_err {
    int code;                   /* MB_OK or MB_E* */
    char text[MB_ERR_TEXT_MAX]; /* one line, UTF-8, cut at the bound, never a secret */
};

/* Fill err and return code, so that `return mb_err_set(err, MB_EINVAL, "...")` reads as one
 * thought. */
int mb_err_set(struct mb_err *err, int code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
int mb_err_vset(struct mb_err *err, int code, const char *fmt, va_list ap)
    __attribute__((format(printf, 3, 0)));

/* From an errno value: the code it maps to (ENOENT -> MB_ENOENT, ...), text "fmt: strerror". */
int mb_err_sys(struct mb_err *err, int errno_value, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Prepend "fmt: " to the text; the code stays and is returned. Without err the code is not known
 * here: MB_EIO, so that `return mb_err_wrap(...)` never turns a failure into success. */
int mb_err_wrap(struct mb_err *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

void mb_err_clear(struct mb_err *err);

/* "EINVAL" for MB_EINVAL and so on; "?" for a number that is no code. */
const char *mb_code_name(int code);

/*
 * Process exit status for a code, as docs/operations.md lists them (sysexits style): OK 0,
 * EINVAL 64, ECORRUPT 65, ENOENT 66, EUNAVAIL 69, ENOMEM 70, ESTATE 71, EEXIST 72, EFULL 73,
 * EIO 74, ETIMEOUT 75, EPROTO 76, EDENIED 77, EUNSUPPORTED 78, ECANCELED 130; 70 (internal) for a
 * number that is no code.
 */
int mb_exit_status(int code);

#endif
