/*
 *  1. libyaml gives events; a value is made of them from the top down, never deeper than the bound,
 *     so that the stack is bounded too. Each event makes at most one value: what is made is not
 *     larger than the text allows.
 *  2. A plain word is null, a bool, a number or else text (PyYAML's resolver.py).
 * Failure paths:
 *  3. libyaml's own complaints, with the line where it stands. 4. What the header names.
 */
#include "cli/yaml_json.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <yaml.h>
#include "base/alloc.h"

enum { NUMBER_MAX = 80 };

struct reader {
    yaml_parser_t parser;
    yaml_event_t event; /* the newest; valid until the next */
    struct mb_err *err;
};

static int refuse(struct reader *r, const char *what)
{
    return mb_err_set(r->err, MB_EINVAL, "line %zu: %s", r->event.start_mark.line + 1, what);
}

/* libyaml's marks are those of the place where it gave up. */
static int complain(struct reader *r)
{
    const yaml_parser_t *p = &r->parser;

    if (p->error == YAML_MEMORY_ERROR)
        return mb_err_set(r->err, MB_ENOMEM, "out of memory");
    return mb_err_set(r->err, MB_EINVAL, "line %zu: %s%s%s", p->problem_mark.line + 1,
                      p->problem != NULL ? p->problem : "no YAML", p->context != NULL ? ", " : "",
                      p->context != NULL ? p->context : "");
}

static int next(struct reader *r)
{
    yaml_event_delete(&r->event);
    if (!yaml_parser_parse(&r->parser, &r->event)) {
        memset(&r->event, 0, sizeof(r->event));
        return complain(r);
    }
    return 0;
}

/* ---- scalars ---- */

static int is_one_of(const char *word, const char *const *words)
{
    for (; *words != NULL; words++)
        if (strcmp(word, *words) == 0)
            return 1;
    return 0;
}

/* yes, Yes and YES, but not yEs. */
static int is_cased(const char *word, const char *lower)
{
    size_t n = strlen(lower);

    if (strcasecmp(word, lower) != 0)
        return 0;
    return strcmp(word, lower) == 0 ||
           (isupper((unsigned char)word[0]) &&
            (strcmp(word + 1, lower + 1) == 0 || strspn(word, "ABCDEFGHIJKLMNOPQRSTUVWXYZ") == n));
}

static int is_any_case(const char *word, const char *const *words)
{
    for (; *words != NULL; words++)
        if (is_cased(word, *words))
            return 1;
    return 0;
}

/* -1: it is none of a form that YAML has; 0: out holds its digits without underscores, as strtoll
 * takes them in *base. */
static int int_form(const char *word, char out[NUMBER_MAX], int *base)
{
    const char *p = word + (*word == '-' || *word == '+');
    const char *digits = "0123456789_";
    size_t n = 0;

    *base = 10;
    if (p[0] == '0' && p[1] != '\0') {
        *base = p[1] == 'x' ? 16 : p[1] == 'b' ? 2 : 8;
        digits = *base == 16 ? "0123456789abcdefABCDEF_" : *base == 2 ? "01_" : "01234567_";
        p += *base == 8 ? 1 : 2;
    } else if (!isdigit((unsigned char)*p)) {
        return -1;
    }
    if (*p == '\0' || p[strspn(p, digits)] != '\0' || strspn(p, "_") == strlen(p))
        return -1;
    if (*word == '-')
        out[n++] = '-';
    for (; *p != '\0' && n < NUMBER_MAX - 1; p++)
        if (*p != '_')
            out[n++] = *p;
    out[n] = '\0';
    return 0;
}

/* [-+]? digits . digits (e sign digits)?, the point is needed, as PyYAML has it. */
static int is_float_form(const char *word)
{
    const char *p = word + (*word == '-' || *word == '+');
    size_t before = isdigit((unsigned char)*p) ? strspn(p, "0123456789_") : 0, after;

    p += before;
    if (*p++ != '.')
        return 0;
    after = strspn(p, "0123456789_");
    if (before == 0 && (after == 0 || *p == '_'))
        return 0;
    p += after;
    if (*p == 'e' || *p == 'E') {
        if (p[1] != '-' && p[1] != '+')
            return 0;
        p += 2;
        after = strspn(p, "0123456789");
        if (after == 0)
            return 0;
        p += after;
    }
    return *p == '\0';
}

static int make_int(struct reader *r, const char *digits, int base, json_t **out)
{
    long long value;

    errno = 0;
    value = strtoll(digits, NULL, base);
    if (errno == ERANGE)
        return refuse(r, "a number that does not fit into 64 bits; quote it if it is text");
    *out = json_integer(value);
    return 0;
}

static int make_float(struct reader *r, const char *word, json_t **out)
{
    char plain[NUMBER_MAX];
    size_t n = 0;
    double value;

    for (; *word != '\0' && n < sizeof(plain) - 1; word++)
        if (*word != '_')
            plain[n++] = *word;
    plain[n] = '\0';
    value = strtod(plain, NULL);
    if (!isfinite(value))
        return refuse(r, "a number that JSON does not have; quote it if it is text");
    *out = json_real(value);
    return 0;
}

static int make_plain(struct reader *r, const char *word, json_t **out)
{
    static const char *const nulls[] = {"", "~", "null", "Null", "NULL", NULL};
    static const char *const trues[] = {"yes", "true", "on", NULL};
    static const char *const falses[] = {"no", "false", "off", NULL};
    static const char *const odd[] = {".inf",  "+.inf", "-.inf", ".Inf", "+.Inf", "-.Inf", ".INF",
                                      "+.INF", "-.INF", ".nan",  ".NaN", ".NAN",  NULL};
    char digits[NUMBER_MAX];
    int base;

    if (is_one_of(word, nulls))
        *out = json_null();
    else if (is_any_case(word, trues))
        *out = json_true();
    else if (is_any_case(word, falses))
        *out = json_false();
    else if (is_one_of(word, odd))
        return refuse(r, "a number that JSON does not have; quote it if it is text");
    else if (strlen(word) < NUMBER_MAX && int_form(word, digits, &base) == 0)
        return make_int(r, digits, base, out);
    else if (strlen(word) < NUMBER_MAX && is_float_form(word))
        return make_float(r, word, out);
    else
        *out = json_string(word);
    return 0;
}

/* Of YAML's own tags only !!str says something else than the word itself. */
static int check_tag(struct reader *r, const yaml_char_t *tag, int *is_text)
{
    static const char *const known[] = {"!",           YAML_INT_TAG, YAML_FLOAT_TAG, YAML_BOOL_TAG,
                                        YAML_NULL_TAG, YAML_SEQ_TAG, YAML_MAP_TAG,   NULL};
    const char *t = (const char *)tag;

    if (t == NULL)
        return 0;
    if (strcmp(t, YAML_STR_TAG) == 0)
        *is_text = 1;
    else if (!is_one_of(t, known))
        return refuse(r, "a tag that is not one of YAML's own");
    return 0;
}

static int make_scalar(struct reader *r, json_t **out)
{
    const char *word = (const char *)r->event.data.scalar.value;
    size_t n = r->event.data.scalar.length;
    int is_text = r->event.data.scalar.style != YAML_PLAIN_SCALAR_STYLE;
    int rc = check_tag(r, r->event.data.scalar.tag, &is_text);

    if (rc == 0 && memchr(word, '\0', n) != NULL)
        return refuse(r, "a text with a NUL");
    if (rc == 0 && is_text)
        *out = json_stringn(word, n);
    else if (rc == 0)
        rc = make_plain(r, word, out);
    if (rc == 0 && *out == NULL)
        rc = refuse(r, "a text that is not UTF-8, or out of memory");
    return rc;
}

/* ---- what is made of several ---- */

static int make_value(struct reader *r, int depth, json_t **out);

static int make_list(struct reader *r, int depth, json_t *list)
{
    json_t *item;
    int rc;

    while ((rc = next(r)) == 0 && r->event.type != YAML_SEQUENCE_END_EVENT) {
        rc = make_value(r, depth + 1, &item);
        if (rc == 0 && json_array_append_new(list, item) != 0)
            rc = mb_err_set(r->err, MB_ENOMEM, "out of memory");
        if (rc != 0)
            break;
    }
    return rc;
}

/* The key that the newest event is, owned by the caller. */
static int take_key(struct reader *r, const json_t *object, char **key)
{
    const char *word = (const char *)r->event.data.scalar.value;
    int is_text = 0, rc;

    *key = NULL;
    if (r->event.type == YAML_ALIAS_EVENT)
        return refuse(r, "aliases (*name) are not taken, write it out");
    if (r->event.type != YAML_SCALAR_EVENT)
        return refuse(r, "a key has to be a word");
    rc = check_tag(r, r->event.data.scalar.tag, &is_text);
    if (rc != 0)
        return rc;
    if (strlen(word) != r->event.data.scalar.length)
        return refuse(r, "a key with a NUL");
    if (strcmp(word, "<<") == 0 && r->event.data.scalar.style == YAML_PLAIN_SCALAR_STYLE)
        return refuse(r, "merge keys (<<) are not taken, write it out");
    if (json_object_get(object, word) != NULL)
        return mb_err_set(r->err, MB_EINVAL, "line %zu: the key %.80s comes twice",
                          r->event.start_mark.line + 1, word);
    *key = mb_strdup(word);
    return *key != NULL ? 0 : mb_err_set(r->err, MB_ENOMEM, "out of memory");
}

static int make_object(struct reader *r, int depth, json_t *object)
{
    json_t *value;
    char *key;
    int rc;

    while ((rc = next(r)) == 0 && r->event.type != YAML_MAPPING_END_EVENT) {
        value = NULL;
        rc = take_key(r, object, &key);
        if (rc == 0)
            rc = next(r);
        if (rc == 0)
            rc = make_value(r, depth + 1, &value);
        if (rc == 0 && json_object_set_new(object, key, value) != 0)
            rc = refuse(r, "a key that is not UTF-8, or out of memory");
        mb_free(key);
        if (rc != 0)
            break;
    }
    return rc;
}

/* Of the newest event and those that belong to it. */
static int make_value(struct reader *r, int depth, json_t **out)
{
    int is_list = r->event.type == YAML_SEQUENCE_START_EVENT, ignored = 0, rc;

    *out = NULL;
    if (r->event.type == YAML_ALIAS_EVENT)
        return refuse(r, "aliases (*name) are not taken, write it out");
    if (r->event.type == YAML_SCALAR_EVENT)
        return make_scalar(r, out);
    if (depth >= MB_YAML_DEPTH_MAX)
        return mb_err_set(r->err, MB_EINVAL, "line %zu: more than %d levels",
                          r->event.start_mark.line + 1, MB_YAML_DEPTH_MAX);
    rc = check_tag(r, is_list ? r->event.data.sequence_start.tag : r->event.data.mapping_start.tag,
                   &ignored);
    if (rc != 0)
        return rc;
    *out = is_list ? json_array() : json_object();
    if (*out == NULL)
        return mb_err_set(r->err, MB_ENOMEM, "out of memory");
    rc = is_list ? make_list(r, depth, *out) : make_object(r, depth, *out);
    if (rc != 0) {
        json_decref(*out);
        *out = NULL;
    }
    return rc;
}

static int read_stream(struct reader *r, json_t **out)
{
    int rc = next(r); /* the stream begins */

    if (rc == 0)
        rc = next(r);
    if (rc == 0 && r->event.type == YAML_STREAM_END_EVENT) {
        *out = json_null();
        return 0;
    }
    if (rc == 0)
        rc = next(r); /* behind the document's begin */
    if (rc == 0)
        rc = make_value(r, 0, out);
    if (rc == 0)
        rc = next(r); /* the document's end */
    if (rc == 0)
        rc = next(r);
    if (rc == 0 && r->event.type != YAML_STREAM_END_EVENT)
        rc = refuse(r, "a second document begins");
    return rc;
}

int mb_yaml_json(const char *text, size_t n, json_t **out, struct mb_err *err)
{
    struct reader r = {.err = err};
    int rc;

    *out = NULL;
    if (n > MB_YAML_MAX_BYTES)
        return mb_err_set(err, MB_EINVAL, "more than %d MiB of YAML", MB_YAML_MAX_BYTES >> 20);
    if (!yaml_parser_initialize(&r.parser))
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    yaml_parser_set_input_string(&r.parser, (const unsigned char *)text, n);
    rc = read_stream(&r, out);
    yaml_event_delete(&r.event);
    yaml_parser_delete(&r.parser);
    if (rc != 0) {
        json_decref(*out);
        *out = NULL;
    }
    return rc;
}
