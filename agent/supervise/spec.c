/*
 * Write: 1. measure and fill a text of records; 2. replace the file atomically.
 * Read: 1. load the whole file; 2. first pass counts children and their words; 3. one allocation
 * holds the tables, whose strings point into the file's bytes; 4. second pass fills them.
 * Whatever does not parse to the last byte is refused with the name of the record.
 */
#include "agent/supervise/spec.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "agent/supervise/file.h"

static const char MAGIC[] = "mobula-supervise 1\n";

static int fail(char *text, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static int fail(char *text, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(text, MB_SUP_TEXT_MAX, fmt, ap);
    va_end(ap);
    return -1;
}

/* ---- writing ---- */

struct text {
    char *data;
    size_t len, cap;
    int failed;
};

static void add_bytes(struct text *t, const char *p, size_t n)
{
    if (t->failed)
        return;
    if (t->len + n > t->cap) {
        size_t cap = (t->len + n) * 2;
        char *grown = realloc(t->data, cap);

        if (grown == NULL) {
            t->failed = 1;
            return;
        }
        t->data = grown;
        t->cap = cap;
    }
    memcpy(t->data + t->len, p, n);
    t->len += n;
}

static void add(struct text *t, const char *key, const char *value)
{
    char head[48];
    size_t n = strlen(value);

    add_bytes(t, head, (size_t)snprintf(head, sizeof(head), "%s %zu\n", key, n));
    add_bytes(t, value, n);
    add_bytes(t, "\n", 1);
}

static void add_number(struct text *t, const char *key, long long value)
{
    char number[24];

    snprintf(number, sizeof(number), "%lld", value);
    add(t, key, number);
}

int mb_sup_spec_write(const struct mb_sup_spec *spec, const char *path, char *text)
{
    struct text t = {0};
    int rc = 0;

    add_bytes(&t, MAGIC, sizeof(MAGIC) - 1);
    add(&t, "dir", spec->dir);
    add_number(&t, "stop_signal", spec->stop_signal);
    add_number(&t, "stop_grace_ms", spec->stop_grace_ms);
    add_number(&t, "end_peers_after_ms", spec->end_peers_after_ms);
    add_number(&t, "end_peers_grace_ms", spec->end_peers_grace_ms);
    add_number(&t, "leftover_grace_ms", spec->leftover_grace_ms);
    add_number(&t, "memory_limit_bytes", (long long)spec->memory_limit_bytes);
    add_number(&t, "nofile", spec->nofile);
    add_number(&t, "core_files", spec->core_files);
    for (size_t i = 0; i < spec->n_children; i++) {
        const struct mb_sup_child *c = &spec->children[i];

        add(&t, "child", "");
        for (size_t k = 0; c->argv[k] != NULL; k++)
            add(&t, "arg", c->argv[k]);
        for (size_t k = 0; c->env[k] != NULL; k++)
            add(&t, "env", c->env[k]);
        if (c->cwd != NULL)
            add(&t, "cwd", c->cwd);
        add(&t, "log", c->log_path);
        if (c->want_report)
            add(&t, "report", "1");
    }
    if (t.failed)
        rc = fail(text, "spec %s: out of memory", path);
    else if (t.len > MB_SUP_SPEC_MAX_BYTES)
        rc = fail(text, "spec %s: %zu bytes, more than %d", path, t.len, MB_SUP_SPEC_MAX_BYTES);
    else if (mb_file_replace(AT_FDCWD, path, t.data, t.len, 0) !=
             0) /* the agent's loop writes it */
        rc = fail(text, "spec %s: %s", path, strerror(errno));
    free(t.data);
    return rc;
}

/* ---- reading ---- */

struct record {
    char *key;
    char *value;
};

/* 1: a record; 0: the end; -1: not a record. Terminates key and value in place. */
static int next_record(char **at, char *end, struct record *out)
{
    char *space, *newline, *digits_end;
    unsigned long long n;

    if (*at == end)
        return 0;
    newline = memchr(*at, '\n', (size_t)(end - *at));
    space = newline == NULL ? NULL : memchr(*at, ' ', (size_t)(newline - *at));
    if (space == NULL || space[1] < '0' || space[1] > '9')
        return -1;
    n = strtoull(space + 1, &digits_end, 10);
    if (digits_end != newline || n >= (unsigned long long)(end - newline - 1) ||
        newline[1 + n] != '\n' || memchr(newline + 1, '\0', n) != NULL)
        return -1;
    *space = '\0';
    newline[1 + n] = '\0';
    out->key = *at;
    out->value = newline + 1;
    *at = newline + 2 + n;
    return 1;
}

struct counts {
    size_t children, words;
};

static int number(const char *value, long long min, long long max, long long *out)
{
    char *end;

    errno = 0;
    *out = strtoll(value, &end, 10);
    return *value == '\0' || *end != '\0' || errno != 0 || *out < min || *out > max ? -1 : 0;
}

static int spec_field(struct mb_sup_spec *spec, const struct record *r)
{
    long long v;

    if (strcmp(r->key, "dir") == 0) {
        spec->dir = r->value;
        return r->value[0] == '/' ? 0 : -1;
    }
    if (strcmp(r->key, "memory_limit_bytes") == 0) {
        if (number(r->value, 0, INT64_MAX, &v) != 0)
            return -1;
        spec->memory_limit_bytes = (uint64_t)v;
        return 0;
    }
    if (number(r->value, -1, INT32_MAX, &v) != 0)
        return -1;
    if (strcmp(r->key, "end_peers_after_ms") == 0)
        spec->end_peers_after_ms = (int32_t)v;
    else if (v < 0)
        return -1;
    else if (strcmp(r->key, "stop_signal") == 0 && v > 0 && v < NSIG)
        spec->stop_signal = (int)v;
    else if (strcmp(r->key, "stop_grace_ms") == 0)
        spec->stop_grace_ms = (uint32_t)v;
    else if (strcmp(r->key, "end_peers_grace_ms") == 0)
        spec->end_peers_grace_ms = (uint32_t)v;
    else if (strcmp(r->key, "leftover_grace_ms") == 0)
        spec->leftover_grace_ms = (uint32_t)v;
    else if (strcmp(r->key, "nofile") == 0)
        spec->nofile = (uint32_t)v;
    else if (strcmp(r->key, "core_files") == 0)
        spec->core_files = v != 0;
    else
        return -1;
    return 0;
}

/* Where the tables of the spec are being filled. */
struct filler {
    struct mb_sup_spec *spec;
    struct mb_sup_child *children;
    const char **words; /* next free word */
    size_t n_children;
    int in_env; /* words go to env: argv of this child is closed */
};

static void close_words(struct filler *f)
{
    *f->words++ = NULL;
}

/* A child's tables follow one another, so all args come before all env, as the writer does it. */
static int child_field(struct filler *f, const struct record *r)
{
    struct mb_sup_child *c = &f->children[f->n_children - 1];

    if (strcmp(r->key, "arg") == 0) {
        if (f->in_env)
            return -1;
        *f->words++ = r->value;
    } else if (strcmp(r->key, "env") == 0) {
        if (!f->in_env) {
            close_words(f);
            c->env = f->words;
            f->in_env = 1;
        }
        *f->words++ = r->value;
    } else if (strcmp(r->key, "cwd") == 0) {
        c->cwd = r->value;
    } else if (strcmp(r->key, "log") == 0) {
        c->log_path = r->value;
        return r->value[0] == '/' ? 0 : -1;
    } else if (strcmp(r->key, "report") == 0) {
        c->want_report = 1;
    } else {
        return -1;
    }
    return 0;
}

static int end_child(struct filler *f)
{
    struct mb_sup_child *c;

    if (f->n_children == 0)
        return 0;
    c = &f->children[f->n_children - 1];
    close_words(f);
    if (!f->in_env) {
        c->env = f->words;
        close_words(f);
    }
    return c->argv[0] != NULL && c->log_path != NULL ? 0 : -1;
}

static int take_record(struct filler *f, const struct record *r)
{
    if (strcmp(r->key, "child") == 0) {
        if (end_child(f) != 0)
            return -1;
        f->children[f->n_children++].argv = f->words;
        f->in_env = 0;
        return 0;
    }
    return f->n_children == 0 ? spec_field(f->spec, r) : child_field(f, r);
}

/* Counts on a copy, because next_record() terminates strings in place. */
static int count(const char *data, size_t n, struct counts *out)
{
    char *copy = malloc(n + 1);
    char *at = copy;
    struct record r;
    int more;

    if (copy == NULL)
        return -1;
    memcpy(copy, data, n + 1);
    *out = (struct counts){0};
    while ((more = next_record(&at, copy + n, &r)) == 1) {
        out->children += strcmp(r.key, "child") == 0;
        out->words++;
    }
    free(copy);
    return more;
}

int mb_sup_spec_read(const char *path, struct mb_sup_spec *out, char *text)
{
    const size_t magic_len = sizeof(MAGIC) - 1;
    struct mb_sup_spec spec = {.stop_signal = SIGTERM, .end_peers_after_ms = -1};
    struct filler f = {.spec = &spec};
    struct counts counts;
    struct record r;
    char *data, *memory, *at;
    size_t n, tables;

    data = mb_file_read(AT_FDCWD, path, MB_SUP_SPEC_MAX_BYTES, &n);
    if (data == NULL)
        return fail(text, "spec %s: %s", path, strerror(errno));
    if (n < magic_len || memcmp(data, MAGIC, magic_len) != 0 ||
        count(data + magic_len, n - magic_len, &counts) != 0 || counts.children == 0 ||
        counts.children > MB_SUP_CHILDREN_MAX) {
        free(data);
        return fail(text, "spec %s: not a supervisor's spec of 1 to %d children", path,
                    MB_SUP_CHILDREN_MAX);
    }
    tables = counts.children * sizeof(struct mb_sup_child) +
             (counts.words + 2 * counts.children) * sizeof(char *);
    memory = calloc(1, tables + n + 1);
    if (memory == NULL) {
        free(data);
        return fail(text, "spec %s: out of memory", path);
    }
    memcpy(memory + tables, data, n + 1);
    free(data);
    f.children = (struct mb_sup_child *)(void *)memory;
    f.words = (const char **)(void *)(f.children + counts.children);
    at = memory + tables + magic_len;
    while (next_record(&at, memory + tables + n, &r) == 1) {
        if (take_record(&f, &r) != 0) {
            fail(text, "spec %s: bad record \"%s\"", path, r.key);
            free(memory);
            return -1;
        }
    }
    if (end_child(&f) != 0 || spec.dir == NULL) {
        free(memory);
        return fail(text, "spec %s: dir, arg or log is missing", path);
    }
    spec.n_children = f.n_children;
    spec.children = f.children;
    spec.memory = memory;
    *out = spec;
    return 0;
}

void mb_sup_spec_close(struct mb_sup_spec *spec)
{
    free(spec->memory);
    *spec = (struct mb_sup_spec){0};
}
