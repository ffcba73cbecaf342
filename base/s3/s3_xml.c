/*
 * XML to events with expat.
 *
 * 1. A start tag pushes its name; text of the innermost element is collected; an end tag reports.
 * 2. Leading white space before the document is skipped: CompleteMultipartUpload keeps a connection
 *    alive with it.
 * Failures: malformed XML, a DTD (no entity tricks), depth or size beyond the bounds, memory.
 */
#include "base/s3/s3_xml.h"

#include <expat.h>
#include <stdio.h>
#include <string.h>
#include "base/buf.h"

enum { MAX_DEPTH = 16, MAX_NAME_BYTES = 64, MAX_TEXT_BYTES = 64 * 1024 };

struct parse {
    XML_Parser parser;
    char names[MAX_DEPTH + 1][MAX_NAME_BYTES];
    int depth;
    struct mb_buf text;
    mb_s3_xml_cb cb;
    void *arg;
    int rc;
};

static void stop(struct parse *p, int rc)
{
    p->rc = rc;
    XML_StopParser(p->parser, XML_FALSE);
}

static const char *local_name(const char *name)
{
    const char *colon = strrchr(name, ':');
    return colon ? colon + 1 : name;
}

static void on_start(void *arg, const XML_Char *name, const XML_Char **attributes)
{
    struct parse *p = arg;
    (void)attributes;
    if (p->depth == MAX_DEPTH) {
        stop(p, MB_EPROTO);
        return;
    }
    snprintf(p->names[++p->depth], MAX_NAME_BYTES, "%s", local_name(name));
    mb_buf_reset(&p->text);
}

static void on_text(void *arg, const XML_Char *s, int n)
{
    struct parse *p = arg;
    if (p->text.len + (size_t)n > MAX_TEXT_BYTES)
        stop(p, MB_EPROTO);
    else if (mb_buf_add(&p->text, s, (size_t)n) != 0)
        stop(p, MB_ENOMEM);
}

static void on_end(void *arg, const XML_Char *name)
{
    struct parse *p = arg;
    static const char blanks[] = " \t\r\n";
    (void)name;
    const char *text = mb_buf_str(&p->text);
    text += strspn(text, blanks);
    while (p->text.len > 0 && strchr(blanks, p->text.data[p->text.len - 1]))
        p->text.data[--p->text.len] = '\0';
    int rc = p->cb(p->arg, p->names[p->depth - 1], p->names[p->depth], text);
    p->depth--;
    mb_buf_reset(&p->text);
    if (rc < 0)
        stop(p, rc);
}

static void on_doctype(void *arg, const XML_Char *name, const XML_Char *sysid,
                       const XML_Char *pubid, int has_internal_subset)
{
    (void)name;
    (void)sysid;
    (void)pubid;
    (void)has_internal_subset;
    stop(arg, MB_EPROTO);
}

int mb_s3_xml_parse(const void *data, size_t n, mb_s3_xml_cb cb, void *arg, struct mb_err *err)
{
    struct parse p = {.cb = cb, .arg = arg};
    const char *s = data;
    while (n > 0 && strchr(" \t\r\n", *s) && *s) {
        s++;
        n--;
    }
    p.parser = XML_ParserCreate(NULL);
    if (!p.parser)
        return mb_err_set(err, MB_ENOMEM, "XML: out of memory");
    XML_SetUserData(p.parser, &p);
    XML_SetElementHandler(p.parser, on_start, on_end);
    XML_SetCharacterDataHandler(p.parser, on_text);
    XML_SetStartDoctypeDeclHandler(p.parser, on_doctype);
    enum XML_Status status =
        n > 0x7fffffff ? XML_STATUS_ERROR : XML_Parse(p.parser, s, (int)n, XML_TRUE);
    int rc = p.rc;
    if (status != XML_STATUS_OK && rc == 0)
        rc = MB_EPROTO;
    if (rc != 0)
        mb_err_set(err, rc, "XML of %zu bytes: %s (line %lu)", n,
                   XML_ErrorString(XML_GetErrorCode(p.parser)),
                   (unsigned long)XML_GetCurrentLineNumber(p.parser));
    XML_ParserFree(p.parser);
    mb_buf_close(&p.text);
    return rc;
}

static int on_error_field(void *arg, const char *parent, const char *name, const char *text)
{
    struct mb_s3_xml_error *e = arg;
    if (strcmp(parent, "Error") != 0)
        return strcmp(name, "Error") == 0 ? 0 : parent[0] ? 0 : MB_ENOENT;
    if (strcmp(name, "Code") == 0)
        snprintf(e->code, sizeof e->code, "%s", text);
    else if (strcmp(name, "Message") == 0)
        snprintf(e->message, sizeof e->message, "%s", text);
    else if (strcmp(name, "Region") == 0)
        snprintf(e->region, sizeof e->region, "%s", text);
    return 0;
}

int mb_s3_xml_error_parse(const void *p, size_t n, struct mb_s3_xml_error *out)
{
    memset(out, 0, sizeof *out);
    return mb_s3_xml_parse(p, n, on_error_field, out, NULL) == 0 && out->code[0] != '\0';
}
