/*
 * Writing metrics.
 *
 *  1. Label values may hold anything: backslash, double quote and line feed are escaped.
 *  2. Whole numbers are written without an exponent, so that counters of bytes stay exact up to
 *     2^53; others with 17 digits.
 */
#include "agent/metrics.h"

#include <math.h>
#include "base/err.h"

int mb_metric_family(struct mb_buf *out, const char *name, enum mb_metric_type type,
                     const char *help)
{
    return mb_buf_printf(out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name,
                         type == MB_METRIC_COUNTER ? "counter" : "gauge");
}

static int put_escaped(struct mb_buf *out, const char *s)
{
    int rc = MB_OK;

    for (; *s != '\0' && rc == MB_OK; s++)
        switch (*s) {
        case '\\':
            rc = mb_buf_puts(out, "\\\\");
            break;
        case '"':
            rc = mb_buf_puts(out, "\\\"");
            break;
        case '\n':
            rc = mb_buf_puts(out, "\\n");
            break;
        default:
            rc = mb_buf_add(out, s, 1);
        }
    return rc;
}

static int put_value(struct mb_buf *out, double value)
{
    if (isnan(value))
        return mb_buf_puts(out, "NaN\n");
    if (isinf(value))
        return mb_buf_puts(out, value > 0 ? "+Inf\n" : "-Inf\n");
    if (value == floor(value) && fabs(value) < 9007199254740992.0)
        return mb_buf_printf(out, "%.0f\n", value);
    return mb_buf_printf(out, "%.17g\n", value);
}

int mb_metric_sample(struct mb_buf *out, const char *name, const char *const *labels, double value)
{
    size_t before = out->len;
    int rc = mb_buf_puts(out, name);

    for (size_t i = 0; rc == MB_OK && labels != NULL && labels[i] != NULL; i += 2) {
        rc = mb_buf_printf(out, "%s%s=\"", i == 0 ? "{" : ",", labels[i]);
        if (rc == MB_OK)
            rc = put_escaped(out, labels[i + 1]);
        if (rc == MB_OK)
            rc = mb_buf_puts(out, labels[i + 2] == NULL ? "\"}" : "\"");
    }
    if (rc == MB_OK)
        rc = mb_buf_puts(out, " ");
    if (rc == MB_OK)
        rc = put_value(out, value);
    if (rc != MB_OK)
        out->len = before; /* a half sample would spoil the whole page */
    return rc;
}
