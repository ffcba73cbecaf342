/* Python's repr() of a float: the shortest decimal that reads back as the same double, with an
 * exponent below 1e-4 and from 1e16. */
#include "worker/data/repr.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

char *mb_repr_double(double v, char *out)
{
    char text[40];
    char digits[24] = "0";
    size_t n = 0;
    int exponent;
    char *p = out;

    for (int precision = 0; precision < 17; precision++) {
        snprintf(text, sizeof(text), "%.*e", precision, v);
        if (strtod(text, NULL) == v)
            break;
    }
    if (!isfinite(v)) {
        strcpy(out, isnan(v) ? "nan" : v > 0 ? "inf" : "-inf");
        return out;
    }
    exponent = atoi(strchr(text, 'e') + 1);
    for (const char *c = text; *c != 'e'; c++) {
        if (*c >= '0' && *c <= '9')
            digits[n++] = *c;
    }
    while (n > 1 && digits[n - 1] == '0')
        n--;
    if (text[0] == '-')
        *p++ = '-';
    if (exponent < -4 || exponent >= 16) {
        *p++ = digits[0];
        if (n > 1) {
            *p++ = '.';
            memcpy(p, digits + 1, n - 1);
            p += n - 1;
        }
        snprintf(p, 6, "e%+03d", exponent);
        return out;
    }
    if (exponent < 0) {
        p += snprintf(p, 8, "0.%.*s", -exponent - 1, "0000");
        memcpy(p, digits, n);
        p[n] = '\0';
        return out;
    }
    for (int i = 0; i <= exponent; i++)
        *p++ = (size_t)i < n ? digits[i] : '0';
    *p++ = '.';
    if (n > (size_t)exponent + 1) {
        memcpy(p, digits + exponent + 1, n - (size_t)exponent - 1);
        p += n - (size_t)exponent - 1;
    } else {
        *p++ = '0';
    }
    *p = '\0';
    return out;
}
