/*
 * 1. The translated pattern is compiled once; where the machine allows no JIT the interpreter of
 *    PCRE2 does the same. 2. Every match is searched from where the last one ended, with bounds for
 *    steps, stack and heap, so that a pattern that explodes on some text is an error of that text.
 */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <string.h>
#include "base/alloc.h"
#include "worker/data/tokenizer/split_regex.h"
#include "worker/data/tokenizer/split_regex_private.h"

enum {
    STACK_START_BYTES = 32 << 10,
    STACK_MAX_BYTES = 8 << 20,
    HEAP_MAX_KIB = 8 << 10,
    STEPS_MAX = 50 * 1000 * 1000,
    PATTERN_MAX_BYTES = 64 << 10
};

struct mb_split_regex {
    pcre2_code *code;
    char *pattern;
    int has_jit;
};

struct mb_split_regex_work {
    pcre2_match_data *data;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
};

int mb_split_regex_compile(const char *pattern, size_t n, void **code, struct mb_err *err)
{
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    PCRE2_SIZE at;
    int problem;
    PCRE2_UCHAR text[128];

    if (context == NULL)
        return mb_err_set(err, MB_ENOMEM, "pattern: out of memory");
    pcre2_set_newline(context, PCRE2_NEWLINE_LF);
    *code = pcre2_compile((PCRE2_SPTR)pattern, n,
                          PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C,
                          &problem, &at, context);
    pcre2_compile_context_free(context);
    if (*code != NULL)
        return 0;
    pcre2_get_error_message(problem, text, sizeof(text));
    return mb_err_set(err, MB_EINVAL, "%s, at byte %zu of the translated pattern", (char *)text,
                      (size_t)at);
}

int mb_split_regex_create(const char *pattern, size_t n, struct mb_split_regex **out,
                          struct mb_err *err)
{
    struct mb_split_regex *r = NULL;
    struct mb_buf translated = {0};
    void *code = NULL;
    int rc;

    if (n > PATTERN_MAX_BYTES)
        return mb_err_set(err, MB_EUNSUPPORTED, "pattern: %zu bytes; at most %d are provided", n,
                          PATTERN_MAX_BYTES);
    rc = mb_split_regex_translate(pattern, n, &translated, err);
    if (rc == 0)
        rc = mb_split_regex_compile(mb_buf_str(&translated), translated.len, &code, err);
    if (rc == 0) {
        r = mb_calloc(1, sizeof(*r));
        if (r != NULL)
            r->pattern = mb_strndup(pattern, n);
        if (r == NULL || r->pattern == NULL)
            rc = mb_err_set(err, MB_ENOMEM, "pattern: out of memory");
    }
    mb_buf_close(&translated);
    if (rc != 0) {
        mb_free(r);
        pcre2_code_free(code);
        return rc;
    }
    r->code = code;
    r->has_jit = pcre2_jit_compile(r->code, PCRE2_JIT_COMPLETE) == 0;
    *out = r;
    return 0;
}

void mb_split_regex_destroy(struct mb_split_regex *r)
{
    if (r == NULL)
        return;
    pcre2_code_free(r->code);
    mb_free(r->pattern);
    mb_free(r);
}

const char *mb_split_regex_pattern(const struct mb_split_regex *r)
{
    return r->pattern;
}

int mb_split_regex_work_create(struct mb_split_regex_work **out, struct mb_err *err)
{
    struct mb_split_regex_work *w = mb_calloc(1, sizeof(*w));

    if (w != NULL) {
        w->data = pcre2_match_data_create(1, NULL);
        w->context = pcre2_match_context_create(NULL);
        w->stack = pcre2_jit_stack_create(STACK_START_BYTES, STACK_MAX_BYTES, NULL);
    }
    /* Without a JIT there is no stack for it either; the interpreter needs none. */
    if (w == NULL || w->data == NULL || w->context == NULL) {
        mb_split_regex_work_destroy(w);
        return mb_err_set(err, MB_ENOMEM, "pattern: out of memory");
    }
    pcre2_set_match_limit(w->context, STEPS_MAX);
    pcre2_set_heap_limit(w->context, HEAP_MAX_KIB);
    if (w->stack != NULL)
        pcre2_jit_stack_assign(w->context, NULL, w->stack);
    *out = w;
    return 0;
}

void mb_split_regex_work_destroy(struct mb_split_regex_work *w)
{
    if (w == NULL)
        return;
    pcre2_match_data_free(w->data);
    pcre2_match_context_free(w->context);
    if (w->stack != NULL)
        pcre2_jit_stack_free(w->stack);
    mb_free(w);
}

static size_t char_length(const uint8_t *p, size_t left)
{
    size_t n = *p < 0x80 ? 1 : *p < 0xe0 ? 2 : *p < 0xf0 ? 3 : 4;

    return n < left ? n : left;
}

static int search(const struct mb_split_regex *r, struct mb_split_regex_work *w,
                  const uint8_t *text, size_t n, size_t at)
{
    if (r->has_jit)
        return pcre2_jit_match(r->code, text, n, at, 0, w->data, w->context);
    return pcre2_match(r->code, text, n, at, PCRE2_NO_UTF_CHECK, w->data, w->context);
}

int mb_split_regex_next(const struct mb_split_regex *r, struct mb_split_regex_work *w,
                        struct mb_split_walk *walk, size_t *start, size_t *end, struct mb_err *err)
{
    while (walk->at <= walk->n) {
        int rc = search(r, w, walk->text, walk->n, walk->at);
        const PCRE2_SIZE *found = pcre2_get_ovector_pointer(w->data);
        PCRE2_UCHAR text[128];

        if (rc == PCRE2_ERROR_NOMATCH)
            break;
        if (rc < 0) {
            pcre2_get_error_message(rc, text, sizeof(text));
            return mb_err_set(err, rc == PCRE2_ERROR_NOMEMORY ? MB_ENOMEM : MB_EINVAL,
                              "pattern %.60s: %s at byte %zu of a text of %zu", r->pattern,
                              (char *)text, walk->at, walk->n);
        }
        if (found[0] == found[1] && walk->any && found[1] == walk->last_end) {
            if (walk->at >= walk->n)
                break;
            walk->at += char_length(walk->text + walk->at, walk->n - walk->at);
            continue;
        }
        *start = found[0];
        *end = found[1];
        walk->at = walk->last_end = found[1];
        walk->any = 1;
        return 1;
    }
    walk->at = walk->n + 1;
    return 0;
}
