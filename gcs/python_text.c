/*
 * 1. A number has the fewest digits that give it back, with an exponent from 1e16 on and below
 *    1e-4, as float.__repr__ has it.
 * 2. A string inside of something is quoted with ', or with " if it has ' and no "; what a terminal
 *    would act upon is escaped. (What Unicode calls not printable beyond that stays as it is.)
 */
#include "gcs/python_text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/err.h"

enum { DIGITS_MAX = 17, FIXED_EXPONENT_MIN = -4, FIXED_EXPONENT_MAX = 15 };

static int add_real(double x, struct mb_buf *out)
{
    char text[40];
    int digits = 0, exponent, decimals;

    do
        snprintf(text, sizeof text, "%.*e", digits, x);
    while (strtod(text, NULL) != x && ++digits < DIGITS_MAX);
    exponent = atoi(strchr(text, 'e') + 1);
    if (exponent < FIXED_EXPONENT_MIN || exponent > FIXED_EXPONENT_MAX)
        return mb_buf_puts(out, text);
    decimals = digits - exponent;
    return mb_buf_printf(out, "%.*f", decimals > 1 ? decimals : 1, x);
}

static int add_quoted(const char *s, struct mb_buf *out)
{
    static const char escaped[] = "\n\r\t";
    const char *quote = strchr(s, '\'') && !strchr(s, '"') ? "\"" : "'";
    int rc = mb_buf_puts(out, quote);

    for (; *s != '\0' && rc == 0; s++) {
        const char *at = strchr(escaped, *s);

        if (at)
            rc = mb_buf_printf(out, "\\%c", "nrt"[at - escaped]);
        else if ((unsigned char)*s < 0x20 || *s == 0x7f)
            rc = mb_buf_printf(out, "\\x%02x", (unsigned)(unsigned char)*s);
        else
            rc = mb_buf_printf(out, "%s%c", *s == '\\' || *s == *quote ? "\\" : "", *s);
    }
    return rc == 0 ? mb_buf_puts(out, quote) : rc;
}

static int add(const json_t *v, int is_inside, struct mb_buf *out);

static int add_list(const json_t *list, struct mb_buf *out)
{
    int rc = mb_buf_puts(out, "[");

    for (size_t i = 0; i < json_array_size(list) && rc == 0; i++) {
        rc = mb_buf_puts(out, i > 0 ? ", " : "");
        if (rc == 0)
            rc = add(json_array_get(list, i), 1, out);
    }
    return rc == 0 ? mb_buf_puts(out, "]") : rc;
}

static int add_dict(const json_t *dict, struct mb_buf *out)
{
    const char *before = "", *key;
    json_t *value;
    int rc = mb_buf_puts(out, "{");

    json_object_foreach((json_t *)dict, key, value)
    {
        if (rc == 0)
            rc = mb_buf_puts(out, before);
        if (rc == 0)
            rc = add_quoted(key, out);
        if (rc == 0)
            rc = mb_buf_puts(out, ": ");
        if (rc == 0)
            rc = add(value, 1, out);
        before = ", ";
    }
    return rc == 0 ? mb_buf_puts(out, "}") : rc;
}

static int add(const json_t *v, int is_inside, struct mb_buf *out)
{
    switch (json_typeof(v)) {
    case JSON_OBJECT:
        return add_dict(v, out);
    case JSON_ARRAY:
        return add_list(v, out);
    case JSON_STRING:
        return is_inside ? add_quoted(json_string_value(v), out)
                         : mb_buf_puts(out, json_string_value(v));
    case JSON_INTEGER:
        return mb_buf_printf(out, "%" JSON_INTEGER_FORMAT, json_integer_value(v));
    case JSON_REAL:
        return add_real(json_real_value(v), out);
    case JSON_TRUE:
        return mb_buf_puts(out, "True");
    case JSON_FALSE:
        return mb_buf_puts(out, "False");
    case JSON_NULL:
    default:
        return mb_buf_puts(out, "None");
    }
}

int mb_python_str(const json_t *v, struct mb_buf *out)
{
    return add(v, 0, out);
}
