/*
 * Lines to tokens, the work of one thread on one chunk.
 *
 * 1. Each line is parsed; for each key each text is tokenized, ids are appended in the file's form.
 * 2. A text without tokens makes no sequence; eod goes to the document's last sequence, if it has
 * one.
 * 3. The first line that fails ends the chunk: its text gets FILE:LINE in front. What was made of
 * the chunk is then never written, nor is any later chunk.
 */
#include <string.h>
#include "base/alloc.h"
#include "worker/data/preprocess_private.h"

int mb_chunk_init(struct mb_chunk *c, size_t n_keys)
{
    c->keys = mb_calloc(n_keys, sizeof(*c->keys));
    c->n_keys = c->keys != NULL ? n_keys : 0;
    return c->keys != NULL ? 0 : MB_ENOMEM;
}

void mb_chunk_close(struct mb_chunk *c)
{
    for (size_t k = 0; k < c->n_keys; k++) {
        mb_buf_close(&c->keys[k].tokens);
        mb_buf_close(&c->keys[k].lengths);
        mb_buf_close(&c->keys[k].n_sequences);
    }
    mb_free(c->keys);
    mb_buf_close(&c->text);
    mb_buf_close(&c->documents);
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
}

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "out of memory");
}

static int add_ids(const struct mb_chunk_worker *w, struct mb_buf *out, struct mb_err *err)
{
    size_t n = w->ids.n;

    if (w->dtype == MB_INDEX_I32)
        return mb_buf_add(out, w->ids.data, n * sizeof(int32_t)) == 0 ? 0 : no_memory(err);
    if (mb_buf_reserve(out, n * sizeof(uint16_t)) != 0)
        return no_memory(err);
    for (size_t i = 0; i < n; i++) {
        uint16_t id = (uint16_t)w->ids.data[i];
        memcpy(out->data + out->len + i * sizeof(id), &id, sizeof(id));
    }
    out->len += n * sizeof(uint16_t);
    return 0;
}

static int add_sequence(const struct mb_chunk_worker *w, struct mb_chunk_key *key,
                        struct mb_err *err)
{
    int32_t length = (int32_t)w->ids.n;

    if (w->ids.n > INT32_MAX)
        return mb_err_set(err, MB_EINVAL, "a text of %zu tokens is too long", w->ids.n);
    if (mb_buf_add(&key->lengths, &length, sizeof(length)) != 0)
        return no_memory(err);
    return add_ids(w, &key->tokens, err);
}

static int add_eod(struct mb_chunk_worker *w, struct mb_chunk_key *key, struct mb_err *err)
{
    int32_t length;
    uint8_t *last = key->lengths.data + key->lengths.len - sizeof(length);

    memcpy(&length, last, sizeof(length));
    length++;
    memcpy(last, &length, sizeof(length));
    w->ids.n = 0;
    if (mb_ids_reserve(&w->ids, 1) != 0)
        return no_memory(err);
    w->ids.data[w->ids.n++] = mb_tokenizer_eod(w->tokenizer);
    return add_ids(w, &key->tokens, err);
}

static int add_document(struct mb_chunk_worker *w, struct mb_chunk *c, size_t k,
                        struct mb_chunk_document *d, struct mb_err *err)
{
    struct mb_chunk_key *key = &c->keys[k];
    uint32_t n_sequences = 0;
    int rc = 0;

    for (size_t i = 0; i < mb_jsonl_n_texts(w->json, k); i++) {
        size_t n;
        const uint8_t *text = mb_jsonl_text(w->json, k, i, &n);

        w->ids.n = 0;
        rc = mb_tokenizer_encode(w->tokenizer, w->scratch, text, n, &w->ids, err);
        if (rc == 0 && w->ids.n > 0) {
            rc = add_sequence(w, key, err);
            n_sequences++;
        }
        if (rc != 0)
            return rc;
        d->text_bytes += n;
    }
    if (w->append_eod && n_sequences > 0)
        rc = add_eod(w, key, err);
    if (rc == 0 && mb_buf_add(&key->n_sequences, &n_sequences, sizeof(n_sequences)) != 0)
        rc = no_memory(err);
    return rc;
}

static int run_line(struct mb_chunk_worker *w, struct mb_chunk *c, const uint8_t *line, size_t n)
{
    struct mb_chunk_document d = {.json_chars = mb_utf8_count(line, n)};
    int rc = mb_jsonl_parse(w->json, line, n, &c->err);

    for (size_t k = 0; rc == 0 && k < c->n_keys; k++)
        rc = add_document(w, c, k, &d, &c->err);
    if (rc == 0 && mb_buf_add(&c->documents, &d, sizeof(d)) != 0)
        rc = no_memory(&c->err);
    return rc;
}

static void reset(struct mb_chunk *c)
{
    mb_buf_reset(&c->documents);
    for (size_t k = 0; k < c->n_keys; k++) {
        mb_buf_reset(&c->keys[k].tokens);
        mb_buf_reset(&c->keys[k].lengths);
        mb_buf_reset(&c->keys[k].n_sequences);
    }
}

void mb_chunk_run(struct mb_chunk_worker *w, struct mb_chunk *c)
{
    const uint8_t *end = c->text.data + c->text.len;
    const uint8_t *next;
    uint64_t number = c->first_line;

    reset(c);
    c->rc = 0;
    for (const uint8_t *p = c->text.data; p < end; p = next, number++) {
        next = memchr(p, '\n', (size_t)(end - p));
        next = next != NULL ? next + 1 : end;
        c->rc = run_line(w, c, p, (size_t)(next - p));
        if (c->rc != 0) {
            mb_err_wrap(&c->err, "%s:%llu", w->path, (unsigned long long)number);
            return;
        }
    }
}
