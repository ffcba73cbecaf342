/*
 * Lines to tokens, the work of one thread on one chunk.
 *
 * 1. Lines are parsed until they have some text, all texts are tokenized in one go, then for each
 * key of each line the ids are appended in the file's form. A line that cannot be read, and each of
 * several of which one has a text that cannot be tokenized, goes alone.
 * 2. A text without tokens makes no sequence; eod goes to the document's last sequence, if it has
 * one.
 * 3. A line that is no UTF-8 is parsed again with U+FFFD in the place of what is broken, if that
 * was asked for.
 * 4. A line that fails ends the chunk: what was made of it is then never written, nor is any later
 * chunk. Or, if bad lines are skipped, what was made of that line is taken back, and it is noted.
 */
#include <string.h>
#include "base/alloc.h"
#include "base/str.h"
#include "worker/data/preprocess_private.h"

enum { KEPT_BYTES = 8 << 20, GO_BYTES = 64 << 10 };

int mb_chunk_init(struct mb_chunk *c, size_t n_keys, size_t n_lanes)
{
    c->parts = mb_calloc(n_keys * n_lanes, sizeof(*c->parts));
    c->n_keys = c->parts != NULL ? n_keys : 0;
    c->n_lanes = n_lanes;
    return c->parts != NULL ? 0 : MB_ENOMEM;
}

void mb_chunk_close(struct mb_chunk *c)
{
    for (size_t i = 0; i < c->n_keys * c->n_lanes; i++) {
        mb_buf_close(&c->parts[i].tokens);
        mb_buf_close(&c->parts[i].lengths);
        mb_buf_close(&c->parts[i].n_sequences);
    }
    mb_free(c->parts);
    mb_buf_close(&c->text);
    mb_buf_close(&c->documents);
    mb_buf_close(&c->bad);
}

void mb_chunk_trim(struct mb_chunk *c)
{
    if (c->text.cap > KEPT_BYTES)
        mb_buf_close(&c->text);
    for (size_t i = 0; i < c->n_keys * c->n_lanes; i++) {
        if (c->parts[i].tokens.cap > KEPT_BYTES)
            mb_buf_close(&c->parts[i].tokens);
    }
}

int mb_chunk_worker_init(struct mb_chunk_worker *w, const char *const *keys, size_t n_keys,
                         struct mb_err *err)
{
    int rc = mb_tokenizer_scratch_create(w->tokenizer, &w->scratch, err);

    if (rc == 0)
        rc = mb_jsonl_create(keys, n_keys, &w->json, err);
    return rc;
}

void mb_chunk_worker_close(struct mb_chunk_worker *w)
{
    mb_jsonl_destroy(w->json);
    mb_tokenizer_scratch_destroy(w->scratch);
    mb_ids_close(&w->ids);
    mb_buf_close(&w->repaired);
    mb_buf_close(&w->texts);
    mb_buf_close(&w->ends);
    mb_buf_close(&w->counts);
    mb_buf_close(&w->documents);
}

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "out of memory");
}

/* ---- parsing ---- */

static void forget_lines(struct mb_chunk_worker *w)
{
    mb_buf_reset(&w->texts);
    mb_buf_reset(&w->counts);
    mb_buf_reset(&w->documents);
}

/* The line that was parsed last is to be tokenized. */
static int note_line(struct mb_chunk_worker *w, size_t n_keys, struct mb_chunk_document d)
{
    int rc = 0;

    for (size_t k = 0; rc == 0 && k < n_keys; k++) {
        uint32_t count = (uint32_t)mb_jsonl_n_texts(w->json, k);

        rc = mb_buf_add(&w->counts, &count, sizeof(count));
        for (size_t i = 0; rc == 0 && i < count; i++) {
            size_t place[2];

            place[0] = mb_jsonl_place(w->json, k, i, &place[1]);
            d.text_bytes += place[1];
            rc = mb_buf_add(&w->texts, place, sizeof(place));
        }
    }
    return rc == 0 ? mb_buf_add(&w->documents, &d, sizeof(d)) : rc;
}

/* Parses a line, repaired if need be. */
static int parse_alone(struct mb_chunk_worker *w, struct mb_chunk *c, const uint8_t *line, size_t n)
{
    struct mb_chunk_document d = {0};
    int rc = mb_jsonl_parse(w->json, line, n, &c->err);

    forget_lines(w);
    if (rc == MB_EINVAL && w->repairs_utf8 && !mb_utf8_valid(line, n)) {
        mb_buf_reset(&w->repaired);
        if (mb_buf_utf8(&w->repaired, line, n) != 0)
            return no_memory(&c->err);
        rc = mb_jsonl_parse(w->json, w->repaired.data, w->repaired.len, &c->err);
        c->n_repaired += rc == 0;
    }
    if (rc != 0)
        return rc;
    d.json_chars = mb_jsonl_n_chars(w->json);
    return note_line(w, c->n_keys, d) == 0 ? 0 : no_memory(&c->err);
}

/* Parses lines up to the first that is bad, or until they have GO_BYTES; *next is the end of them.
 */
static int parse_some(struct mb_chunk_worker *w, struct mb_chunk *c, const uint8_t *p,
                      const uint8_t *end, const uint8_t **next)
{
    const uint8_t *stop = end - p > GO_BYTES ? p + GO_BYTES : end;
    int is_first = 1;
    int rc = 0;

    forget_lines(w);
    for (*next = p; rc == 0 && p < stop; *next = p) {
        const uint8_t *line_end = memchr(p, '\n', (size_t)(end - p));
        size_t n = (size_t)((line_end != NULL ? line_end + 1 : end) - p);
        struct mb_chunk_document d = {0};

        rc = is_first ? mb_jsonl_parse(w->json, p, n, &c->err)
                      : mb_jsonl_parse_more(w->json, p, n, &c->err);
        if (rc != 0)
            break;
        d.json_chars = mb_jsonl_n_chars(w->json);
        if (note_line(w, c->n_keys, d) != 0)
            rc = no_memory(&c->err);
        is_first = 0;
        p += n;
    }
    return rc == MB_ENOMEM ? rc : 0;
}

/* ---- tokens ---- */

/* The texts of all lines that were noted. */
static int encode(struct mb_chunk_worker *w, struct mb_err *err)
{
    size_t n = w->texts.len / sizeof(struct mb_tokenizer_text);
    struct mb_tokenizer_text *texts = (void *)w->texts.data;

    mb_buf_reset(&w->ends);
    if (mb_buf_reserve(&w->ends, n * sizeof(size_t)) != 0)
        return no_memory(err);
    w->ends.len = n * sizeof(size_t);
    for (size_t i = 0; i < n; i++) {
        size_t place[2];

        memcpy(place, w->texts.data + i * sizeof(place), sizeof(place));
        texts[i] = (struct mb_tokenizer_text){mb_jsonl_at(w->json, place[0]), place[1]};
    }
    w->ids.n = 0;
    return mb_tokenizer_encode_many(w->tokenizer, w->scratch, texts, n, (void *)w->ends.data,
                                    &w->ids, err);
}

static int add_ids(const struct mb_chunk_worker *w, struct mb_buf *out, const int32_t *ids,
                   size_t n, struct mb_err *err)
{
    uint16_t *narrow;

    if (w->dtype == MB_INDEX_I32)
        return mb_buf_add(out, ids, n * sizeof(*ids)) == 0 ? 0 : no_memory(err);
    if (mb_buf_reserve(out, n * sizeof(*narrow)) != 0)
        return no_memory(err);
    narrow = (void *)(out->data + out->len);
    for (size_t i = 0; i < n; i++)
        narrow[i] = (uint16_t)ids[i];
    out->len += n * sizeof(*narrow);
    return 0;
}

static int add_sequence(const struct mb_chunk_worker *w, struct mb_chunk_part *key,
                        const int32_t *ids, size_t n, struct mb_err *err)
{
    int32_t length = (int32_t)n;

    if (n > INT32_MAX)
        return mb_err_set(err, MB_EINVAL, "a text of %zu tokens is too long", n);
    if (mb_buf_add(&key->lengths, &length, sizeof(length)) != 0)
        return no_memory(err);
    return add_ids(w, &key->tokens, ids, n, err);
}

static int add_eod(const struct mb_chunk_worker *w, struct mb_chunk_part *key, struct mb_err *err)
{
    int32_t eod = mb_tokenizer_eod(w->tokenizer);
    int32_t length;
    uint8_t *last = key->lengths.data + key->lengths.len - sizeof(length);

    memcpy(&length, last, sizeof(length));
    length++;
    memcpy(last, &length, sizeof(length));
    return add_ids(w, &key->tokens, &eod, 1, err);
}

/* The next n texts, whose ids begin at *at, are a document. */
static int add_document(const struct mb_chunk_worker *w, struct mb_chunk_part *key,
                        const size_t *ends, size_t n, size_t *at, struct mb_err *err)
{
    uint32_t n_sequences = 0;
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < n; *at = ends[i++]) {
        if (ends[i] == *at)
            continue;
        rc = add_sequence(w, key, w->ids.data + *at, ends[i] - *at, err);
        n_sequences++;
    }
    if (rc == 0 && w->append_eod && n_sequences > 0)
        rc = add_eod(w, key, err);
    if (rc == 0 && mb_buf_add(&key->n_sequences, &n_sequences, sizeof(n_sequences)) != 0)
        rc = no_memory(err);
    return rc;
}

/* All lines that were noted, the first into `lane`. */
static int add_lines(const struct mb_chunk_worker *w, struct mb_chunk *c, size_t lane)
{
    const uint32_t *counts = (const void *)w->counts.data;
    const size_t *ends = (const void *)w->ends.data;
    size_t n = w->documents.len / sizeof(struct mb_chunk_document);
    size_t at = 0;
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < n; i++) {
        for (size_t k = 0; rc == 0 && k < c->n_keys; k++) {
            rc = add_document(w, &c->parts[k * c->n_lanes + lane], ends, *counts, &at, &c->err);
            ends += *counts++;
        }
        lane = lane + 1 < c->n_lanes ? lane + 1 : 0;
    }
    if (rc == 0 && mb_buf_add(&c->documents, w->documents.data, w->documents.len) != 0)
        rc = no_memory(&c->err);
    return rc;
}

static int run_line(struct mb_chunk_worker *w, struct mb_chunk *c, size_t lane, const uint8_t *line,
                    size_t n)
{
    int rc = parse_alone(w, c, line, n);

    if (rc == 0)
        rc = encode(w, &c->err);
    return rc == 0 ? add_lines(w, c, lane) : rc;
}

/* ---- lines that are left out ---- */

static int note_bad(struct mb_chunk *c)
{
    struct mb_chunk_bad bad = {.line = c->n_lines};

    c->n_bad++;
    if (c->bad.len / sizeof(bad) >= MB_CHUNK_MAX_BAD)
        return 0;
    memcpy(bad.text, c->err.text, sizeof(bad.text) - 1);
    return mb_buf_add(&c->bad, &bad, sizeof(bad)) == 0 ? 0 : no_memory(&c->err);
}

/* As run_line, but a bad line leaves no trace but its note. */
static int try_line(struct mb_chunk_worker *w, struct mb_chunk *c, size_t lane, const uint8_t *line,
                    size_t n)
{
    size_t n_repaired = (size_t)c->n_repaired;
    int rc;

    for (size_t k = 0; k < c->n_keys; k++) {
        struct mb_chunk_part *part = &c->parts[k * c->n_lanes + lane];
        part->mark_tokens = part->tokens.len;
        part->mark_lengths = part->lengths.len;
        part->mark_sequences = part->n_sequences.len;
    }
    rc = run_line(w, c, lane, line, n);
    if (rc != MB_EINVAL)
        return rc;
    for (size_t k = 0; k < c->n_keys; k++) {
        struct mb_chunk_part *part = &c->parts[k * c->n_lanes + lane];
        part->tokens.len = part->mark_tokens;
        part->lengths.len = part->mark_lengths;
        part->n_sequences.len = part->mark_sequences;
    }
    c->n_repaired = n_repaired;
    return note_bad(c);
}

static void reset(struct mb_chunk *c)
{
    mb_buf_reset(&c->documents);
    mb_buf_reset(&c->bad);
    for (size_t i = 0; i < c->n_keys * c->n_lanes; i++) {
        mb_buf_reset(&c->parts[i].tokens);
        mb_buf_reset(&c->parts[i].lengths);
        mb_buf_reset(&c->parts[i].n_sequences);
    }
    c->n_lines = c->n_bad = c->n_repaired = 0;
    c->rc = 0;
    c->lacks_place = 1;
}

/* The next lines in one go, or *alone how many go alone. */
static const uint8_t *run_some(struct mb_chunk_worker *w, struct mb_chunk *c, const uint8_t *p,
                               const uint8_t *end, size_t *alone)
{
    const uint8_t *next;
    int rc = parse_some(w, c, p, end, &next);
    size_t n = w->documents.len / sizeof(struct mb_chunk_document);

    *alone = n > 0 ? 0 : 1;
    if (rc == 0 && n > 0)
        rc = encode(w, &c->err);
    if (rc != 0 && rc != MB_ENOMEM) {
        *alone = n;
        return p;
    }
    if (rc == 0 && n > 0)
        rc = add_lines(w, c, (size_t)(c->n_lines % c->n_lanes));
    c->rc = rc;
    c->n_lines += rc == 0 ? n : 0;
    return next;
}

void mb_chunk_run(struct mb_chunk_worker *w, struct mb_chunk *c)
{
    const uint8_t *end = c->text.data + c->text.len;
    const uint8_t *p = c->text.data;
    size_t alone = 0;

    reset(c);
    while (p < end && c->rc == 0) {
        p = run_some(w, c, p, end, &alone);
        for (; alone > 0 && p < end && c->rc == 0; alone--) {
            const uint8_t *next = memchr(p, '\n', (size_t)(end - p));
            size_t lane = (size_t)(c->n_lines % c->n_lanes);

            next = next != NULL ? next + 1 : end;
            if (w->skips_bad_lines)
                c->rc = try_line(w, c, lane, p, (size_t)(next - p));
            else
                c->rc = run_line(w, c, lane, p, (size_t)(next - p));
            c->n_lines += c->rc == 0;
            p = next;
        }
    }
}
