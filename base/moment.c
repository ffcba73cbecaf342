/*
 *  1. "@" and a decimal number; 2. RFC 3339, whose fraction is cut to milliseconds; 3. else a
 *  duration. Whatever is left over makes it none of these.
 */
#include "base/moment.h"

#include <ctype.h>
#include <string.h>
#include <time.h>
#include "base/str.h"

enum { DATE_CHARS = 19 /* 2026-11-22T10:00:00 */ };

#define SECONDS_MAX 253402300800.0 /* the year 10000 */

static int refuse(const char *what, const char *s, struct mb_err *err)
{
    return mb_err_set(err, MB_EINVAL,
                      "%s: expected a duration like 90m, a time like 2026-11-22T10:00:00Z or "
                      "@SECONDS since 1970, got \"%s\"",
                      what, s);
}

static int parse_epoch(const char *s, const char *what, uint64_t *out, struct mb_err *err)
{
    double seconds;

    if (!isdigit((unsigned char)s[1]) || mb_parse_double(s + 1, what, &seconds, NULL) != 0 ||
        !(seconds >= 1 && seconds < SECONDS_MAX))
        return refuse(what, s, err);
    *out = (uint64_t)(seconds * 1000 + 0.5);
    return MB_OK;
}

static int two_digits(const char *s)
{
    return isdigit((unsigned char)s[0]) && isdigit((unsigned char)s[1])
               ? 10 * (s[0] - '0') + s[1] - '0'
               : -1;
}

/* Minutes east of UTC of "Z", "+01:00"; MB_EINVAL. */
static int parse_offset(const char *s, int *minutes)
{
    int hours, rest;

    *minutes = 0;
    if ((s[0] == 'Z' || s[0] == 'z') && s[1] == '\0')
        return MB_OK;
    if ((s[0] != '+' && s[0] != '-') || strlen(s) != 6 || s[3] != ':')
        return MB_EINVAL;
    hours = two_digits(s + 1);
    rest = two_digits(s + 4);
    if (hours < 0 || hours > 23 || rest < 0 || rest > 59)
        return MB_EINVAL;
    *minutes = (s[0] == '-' ? -1 : 1) * (60 * hours + rest);
    return MB_OK;
}

static int parse_date(const char *s, const char *what, uint64_t *out, struct mb_err *err)
{
    struct tm t = {0};
    char date[DATE_CHARS + 1];
    const char *end;
    uint64_t fraction_ms = 0, scale = 100;
    int minutes;
    int64_t seconds;

    memcpy(date, s, DATE_CHARS);
    date[DATE_CHARS] = '\0';
    date[10] = 'T'; /* also t, or a blank */
    end = strptime(date, "%Y-%m-%dT%H:%M:%S", &t);
    if (end == NULL || *end != '\0')
        return refuse(what, s, err);
    end = s + DATE_CHARS;
    if (*end == '.')
        for (end++; isdigit((unsigned char)*end); end++, scale /= 10)
            fraction_ms += scale * (uint64_t)(*end - '0');
    if (parse_offset(end, &minutes) != MB_OK)
        return refuse(what, s, err);
    seconds = (int64_t)timegm(&t) - 60 * minutes;
    if (seconds < 1)
        return refuse(what, s, err);
    *out = (uint64_t)seconds * 1000 + fraction_ms;
    return MB_OK;
}

int mb_moment_parse(const char *s, uint64_t now_unix_ms, const char *what, uint64_t *out,
                    struct mb_err *err)
{
    uint64_t ms;

    if (s[0] == '@')
        return parse_epoch(s, what, out, err);
    if (strlen(s) > DATE_CHARS && s[4] == '-' && s[7] == '-')
        return parse_date(s, what, out, err);
    if (mb_parse_duration_ms(s, what, &ms, NULL) != 0 ||
        __builtin_add_overflow(now_unix_ms, ms, &ms) || (double)ms >= SECONDS_MAX * 1000)
        return refuse(what, s, err);
    *out = ms;
    return MB_OK;
}
