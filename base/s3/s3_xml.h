/* S3's flat XML answers as events: pure, bounded. Entities beyond XML's own five are refused. */
#ifndef MOBULA_BASE_S3_XML_H
#define MOBULA_BASE_S3_XML_H

#include <stddef.h>
#include "base/err.h"

/* At the end of each element: its name, its parent's name ("" for the root) and its own text (white
 * space at both ends cut; "" for an element that holds others). A negative return stops the parse.
 */
typedef int (*mb_s3_xml_cb)(void *arg, const char *parent, const char *name, const char *text);

/* 0; MB_EPROTO: not XML, a DTD, deeper than 16 or a text above 64 KiB; or what cb returned. */
int mb_s3_xml_parse(const void *p, size_t n, mb_s3_xml_cb cb, void *arg, struct mb_err *err);

/* The <Error> document S3 sends. Returns 1 if this was one; fields it lacks become "". */
struct mb_s3_xml_error {
    char code[64];
    char message[256];
    char region[64];
};
int mb_s3_xml_error_parse(const void *p, size_t n, struct mb_s3_xml_error *out);

#endif
