/*
 * Lines of "NAME VALUE...", in one order, the last is the CRC32C of all before it. A reader takes
 * exactly what the writer writes: any other text is refused as damaged.
 */
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/checksum.h"
#include "base/str.h"
#include "worker/data/preprocess_journal.h"

#define FIRST_LINE "mobula preprocess journal 1\n"

static const char *const phases[] = {"running", "committing"};

static const struct {
    const char *name;
    size_t offset;
} counts[] = {
#define COUNT(f)                                                                                   \
    {                                                                                              \
#f, offsetof(struct mb_journal, f)                                                         \
    }
    COUNT(source),           COUNT(offset),      COUNT(line),       COUNT(n_lines),
    COUNT(n_documents),      COUNT(n_sequences), COUNT(n_tokens),   COUNT(n_bad_lines),
    COUNT(n_repaired_lines), COUNT(json_chars),  COUNT(text_bytes), COUNT(elapsed_us),
};

static const struct {
    const char *name;
    size_t offset;
} hashes[] = {
    {"input", offsetof(struct mb_journal, identity.input)},
    {"options", offsetof(struct mb_journal, identity.options)},
    {"tokenizer", offsetof(struct mb_journal, identity.tokenizer)},
};

enum { N_COUNTS = sizeof(counts) / sizeof(counts[0]), N_HASHES = 3, WORDS_MAX = 4 };

void mb_journal_close(struct mb_journal *j)
{
    mb_free(j->marks);
    j->marks = NULL;
    j->n_marks = 0;
}

int mb_journal_write(const struct mb_journal *j, struct mb_buf *out)
{
    size_t begin = out->len;
    int rc = mb_buf_puts(out, FIRST_LINE);

    for (size_t i = 0; rc == 0 && i < N_HASHES; i++)
        rc = mb_buf_printf(out, "%s %s\n", hashes[i].name, (const char *)j + hashes[i].offset);
    if (rc == 0)
        rc = mb_buf_printf(out, "phase %s\n", phases[j->phase]);
    for (size_t i = 0; rc == 0 && i < N_COUNTS; i++) {
        uint64_t v;
        memcpy(&v, (const char *)j + counts[i].offset, sizeof(v));
        rc = mb_buf_printf(out, "%s %llu\n", counts[i].name, (unsigned long long)v);
    }
    if (rc == 0)
        rc = mb_buf_printf(out, "marks %zu\n", j->n_marks);
    for (size_t i = 0; rc == 0 && i < j->n_marks; i++)
        rc = mb_buf_printf(out, "mark %llu %llu %llu\n", (unsigned long long)j->marks[i].bin_bytes,
                           (unsigned long long)j->marks[i].n_sequences,
                           (unsigned long long)j->marks[i].n_documents);
    if (rc == 0)
        rc = mb_buf_printf(out, "crc32c %08x\n", mb_crc32c(0, out->data + begin, out->len - begin));
    return rc;
}

/* ---- reading ---- */

struct reader {
    const char *at, *end;
    char line[256];
    char *words[WORDS_MAX];
    size_t n_words;
};

/* The next line, cut at its spaces; 0 if there is none or it is too long. */
static int next_line(struct reader *r)
{
    const char *newline = memchr(r->at, '\n', (size_t)(r->end - r->at));
    size_t n = newline != NULL ? (size_t)(newline - r->at) : 0;
    char *p = r->line;

    if (newline == NULL || n >= sizeof(r->line) || memchr(r->at, '\0', n) != NULL)
        return 0;
    memcpy(r->line, r->at, n);
    r->line[n] = '\0';
    r->at = newline + 1;
    for (r->n_words = 0; p != NULL && r->n_words < WORDS_MAX;) {
        r->words[r->n_words++] = p;
        p = strchr(p, ' ');
        if (p != NULL)
            *p++ = '\0';
    }
    return p == NULL;
}

/* The next line has this name and n values. */
static int take(struct reader *r, const char *name, size_t n)
{
    return next_line(r) && r->n_words == 1 + n && strcmp(r->words[0], name) == 0;
}

static int number(const char *s, uint64_t *out)
{
    uint64_t v = 0;

    if (*s == '\0' || (s[0] == '0' && s[1] != '\0'))
        return 0;
    for (; *s != '\0'; s++) {
        unsigned digit = (unsigned)(*s - '0');
        if (digit > 9 || v > (UINT64_MAX - digit) / 10)
            return 0;
        v = v * 10 + digit;
    }
    *out = v;
    return 1;
}

static int take_number(struct reader *r, const char *name, uint64_t *out)
{
    return take(r, name, 1) && number(r->words[1], out);
}

static int read_head(struct reader *r, struct mb_journal *j)
{
    uint8_t bytes[32];

    for (size_t i = 0; i < N_HASHES; i++) {
        if (!take(r, hashes[i].name, 1) || strlen(r->words[1]) != 64 ||
            mb_unhex(r->words[1], bytes, sizeof(bytes)) != 0)
            return 0;
        memcpy((char *)j + hashes[i].offset, r->words[1], 65);
    }
    if (!take(r, "phase", 1))
        return 0;
    if (strcmp(r->words[1], phases[MB_JOURNAL_COMMITTING]) == 0)
        j->phase = MB_JOURNAL_COMMITTING;
    else if (strcmp(r->words[1], phases[MB_JOURNAL_RUNNING]) != 0)
        return 0;
    for (size_t i = 0; i < N_COUNTS; i++) {
        uint64_t v;
        if (!take_number(r, counts[i].name, &v))
            return 0;
        memcpy((char *)j + counts[i].offset, &v, sizeof(v));
    }
    return 1;
}

static int read_marks(struct reader *r, struct mb_journal *j)
{
    uint64_t n;

    if (!take_number(r, "marks", &n) || n == 0 || n > MB_JOURNAL_MAX_MARKS)
        return 0;
    j->marks = mb_calloc((size_t)n, sizeof(*j->marks));
    if (j->marks == NULL)
        return 0;
    j->n_marks = (size_t)n;
    for (size_t i = 0; i < j->n_marks; i++) {
        if (!take(r, "mark", 3) || !number(r->words[1], &j->marks[i].bin_bytes) ||
            !number(r->words[2], &j->marks[i].n_sequences) ||
            !number(r->words[3], &j->marks[i].n_documents))
            return 0;
    }
    return 1;
}

/* The CRC line is exactly what the writer would put there. */
static int read_end(struct reader *r, const char *text)
{
    char want[16];

    snprintf(want, sizeof(want), "%08x", mb_crc32c(0, text, (size_t)(r->at - text)));
    return take(r, "crc32c", 1) && strcmp(r->words[1], want) == 0 && r->at == r->end;
}

int mb_journal_read(const void *text, size_t n, struct mb_journal *out, struct mb_err *err)
{
    struct reader r = {.at = text, .end = (const char *)text + n};
    size_t first = strlen(FIRST_LINE);

    if (n >= first && memcmp(text, FIRST_LINE, first) == 0) {
        r.at += first;
        if (read_head(&r, out) && read_marks(&r, out) && read_end(&r, text))
            return 0;
    }
    mb_journal_close(out);
    *out = (struct mb_journal){0};
    return mb_err_set(err, MB_ECORRUPT, "the journal is damaged or of another version");
}

const char *mb_journal_difference(const struct mb_journal_identity *a,
                                  const struct mb_journal_identity *b)
{
    if (strcmp(a->input, b->input) != 0)
        return "the input";
    if (strcmp(a->options, b->options) != 0)
        return "the options";
    return strcmp(a->tokenizer, b->tokenizer) != 0 ? "the tokenizer" : NULL;
}
