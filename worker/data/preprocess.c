/*
 * What follows what.
 *
 * 1. Check the options, open the input, load the tokenizer, open the output; if an earlier run left
 *    a journal, seek the input to where it came.
 * 2. The ring (preprocess_ring.c) reads and tokenizes on threads; the calling thread takes chunks
 * in order, writes them, counts, reports, and every few seconds asks for a durable point.
 * 3. At the end all outputs are made whole and fsynced, then renamed.
 * The first bad line in input order, a read or write error, or a cancellation ends it: threads are
 * joined and earlier output files stay as they were. The temporary files go, too, unless the same
 * call could succeed later (cancelled, connection lost): then a durable point is made of what is
 * there.
 */
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "worker/data/preprocess_private.h"

enum {
    MAX_WORKERS = 1024,
    MAX_PARTITIONS = 1024,
    DEFAULT_LOG_INTERVAL = 1000,
    DEFAULT_RESUME_MS = 5000,
    TICK_MS = 100
};

struct run {
    const struct mb_preprocess_options *o;
    const char *const *keys;
    size_t n_keys;
    size_t n_lanes;
    uint64_t log_interval, resume_us;
    struct mb_input *input;
    struct mb_tokenizer *tokenizer;
    struct mb_journal_identity identity;
    int has_identity;
    struct mb_output *output;
    struct mb_ring *ring;
    struct mb_journal at; /* the next line to write, and all counts */
    uint64_t opened;      /* sources announced; number of the last one + 1 */
    uint64_t n_shown;     /* bad lines */
    uint64_t before_us;   /* worked by earlier runs */
    uint64_t bytes_before;
    uint64_t started_us, ticked_us, saved_us;
    int is_resumed, is_whole; /* whole: only renames were missing */
    int is_committing;        /* this run renames: its files are whole and its journal says so */
    int output_failed;        /* what lies behind the last durable point is undefined */
};

/* ---- set-up ---- */

static int check_options(struct run *r, struct mb_err *err)
{
    static const char *const text_only[] = {"text"};
    const struct mb_preprocess_options *o = r->o;

    if (o->n_inputs == 0 || o->output_prefix == NULL)
        return mb_err_set(err, MB_EINVAL, "--input and --output-prefix are required");
    if (o->workers < 1 || o->workers > MAX_WORKERS)
        return mb_err_set(err, MB_EINVAL, "--workers %u is outside 1 to %d", o->workers,
                          MAX_WORKERS);
    if (o->partitions > MAX_PARTITIONS)
        return mb_err_set(err, MB_EINVAL, "--partitions %u is outside 1 to %d", o->partitions,
                          MAX_PARTITIONS);
    r->keys = o->n_json_keys > 0 ? o->json_keys : text_only;
    r->n_keys = o->n_json_keys > 0 ? o->n_json_keys : 1;
    r->n_lanes = o->partitions > 0 ? o->partitions : 1;
    r->log_interval = o->log_interval > 0 ? o->log_interval : DEFAULT_LOG_INTERVAL;
    r->resume_us = 1000 * (o->resume_interval_ms > 0 ? o->resume_interval_ms : DEFAULT_RESUME_MS);
    for (size_t a = 0; a < r->n_keys; a++) {
        if (r->keys[a][0] == '\0' || strchr(r->keys[a], '/') != NULL)
            return mb_err_set(
                err, MB_EINVAL,
                "--json-keys: \"%s\": a key becomes part of a file name: it cannot be "
                "empty or have a '/'",
                r->keys[a]);
        for (size_t b = 0; b < a; b++) {
            if (strcmp(r->keys[a], r->keys[b]) == 0)
                return mb_err_set(err, MB_EINVAL, "--json-keys: %s is given twice", r->keys[a]);
        }
    }
    return 0;
}

static int open_tokenizer(struct run *r, struct mb_err *err)
{
    int rc = mb_tokenizer_create(&r->o->tokenizer, &r->tokenizer, err);

    if (rc == 0 && r->o->append_eod && mb_tokenizer_eod(r->tokenizer) < 0)
        rc = mb_err_set(err, MB_EINVAL, "--append-eod: the tokenizer has no eod token");
    return rc;
}

static void say_resumed(struct run *r)
{
    char text[MB_ERR_TEXT_MAX];

    snprintf(
        text, sizeof(text),
        "going on at %s:%llu, where an earlier run was cut off; %llu documents and %llu tokens "
        "are done (--no-resume starts over)",
        mb_input_name(r->input, (uint32_t)r->at.source), (unsigned long long)r->at.line,
        (unsigned long long)r->at.n_documents, (unsigned long long)r->at.n_tokens);
    if (r->o->notice_cb != NULL)
        r->o->notice_cb(r->o->ctx, text);
}

static int seek(struct run *r, struct mb_err *err)
{
    struct mb_input_place to = {(uint32_t)r->at.source, r->at.offset, r->at.line};

    if (r->at.source >= mb_input_n_sources(r->input))
        return mb_err_set(err, MB_ECORRUPT,
                          "%s.preprocess/journal names an input that is not there; --no-resume "
                          "starts over",
                          r->o->output_prefix);
    say_resumed(r);
    r->opened = r->at.source; /* it is announced again */
    return mb_input_seek(r->input, &to, err);
}

static int open_output(struct run *r, struct mb_err *err)
{
    struct mb_output_options o = {
        .prefix = r->o->output_prefix,
        .keys = r->keys,
        .n_keys = r->n_keys,
        .n_lanes = (unsigned)r->n_lanes,
        .dtype = mb_index_dtype_for_vocab(mb_tokenizer_vocab_size(r->tokenizer)),
        .starts_over = r->o->no_resume,
        .notice_cb = r->o->notice_cb,
        .ctx = r->o->ctx,
    };
    int rc;

    if (!r->o->no_resume) {
        rc = mb_preprocess_identity(r->o, r->keys, r->n_keys, r->input, &r->identity, err);
        if (rc < 0)
            return rc;
        o.identity = rc == 1 ? &r->identity : NULL;
        r->has_identity = rc == 1;
    }
    rc = mb_output_open(&o, &r->output, &r->at, err);
    if (rc < 0)
        return rc;
    r->before_us = r->at.elapsed_us;
    r->is_resumed = rc > 0;
    r->is_whole = rc == 2;
    return rc == 1 ? seek(r, err) : 0;
}

static int start_ring(struct run *r, struct mb_err *err)
{
    struct mb_chunk_worker tools = {
        .tokenizer = r->tokenizer,
        .dtype = mb_index_dtype_for_vocab(mb_tokenizer_vocab_size(r->tokenizer)),
        .append_eod = r->o->append_eod,
        .skips_bad_lines = r->o->skip_bad_lines,
        .repairs_utf8 = r->o->repair_utf8,
    };
    struct mb_ring_options o = {
        .input = r->input,
        .workers = r->o->workers,
        .keys = r->keys,
        .n_keys = r->n_keys,
        .n_lanes = r->n_lanes,
        .tools = &tools,
    };

    r->bytes_before = mb_input_bytes_done(r->input);
    return mb_ring_start(&o, &r->ring, err);
}

/* Tells of every source up to number n, once. */
static void announce(struct run *r, uint32_t n)
{
    for (; r->opened <= n; r->opened++) {
        if (r->o->opening_cb != NULL)
            r->o->opening_cb(r->o->ctx, mb_input_name(r->input, (uint32_t)r->opened));
    }
}

static int set_up(struct run *r, struct mb_err *err)
{
    struct mb_input_options in = {
        .words = r->o->inputs, .n_words = r->o->n_inputs, .max_line_bytes = r->o->max_line_bytes};
    int rc = check_options(r, err);

    if (rc == 0)
        rc = mb_input_open(&in, &r->input, err);
    if (rc == 0)
        announce(r, 0);
    if (rc == 0)
        rc = open_tokenizer(r, err);
    if (rc == 0)
        rc = open_output(r, err);
    if (rc == 0 && !r->is_whole)
        rc = start_ring(r, err);
    return rc;
}

/* ---- progress ---- */

static struct mb_preprocess_progress progress(const struct run *r)
{
    return (struct mb_preprocess_progress){
        .n_documents = r->at.n_documents,
        .json_chars = r->at.json_chars,
        .text_bytes = r->at.text_bytes,
        .n_tokens = r->at.n_tokens,
        .n_sequences = r->at.n_sequences,
        .n_bad_lines = r->at.n_bad_lines,
        .n_repaired_lines = r->at.n_repaired_lines,
        .elapsed_s = (double)(r->before_us + mb_mono_us() - r->started_us) * 1e-6,
        .run_s = (double)(mb_mono_us() - r->started_us) * 1e-6,
        .input_bytes_done = mb_input_bytes_done(r->input),
        .input_bytes_total = mb_input_bytes_total(r->input),
        .input_bytes_before = r->bytes_before,
        .is_resumed = r->is_resumed,
    };
}

static void tick(struct run *r)
{
    uint64_t now_us = mb_mono_us();

    if (r->o->tick_cb == NULL || now_us - r->ticked_us < 1000 * TICK_MS)
        return;
    r->ticked_us = now_us;
    struct mb_preprocess_progress p = progress(r);
    r->o->tick_cb(r->o->ctx, &p);
}

static void count_documents(struct run *r, const struct mb_chunk *c)
{
    const uint8_t *end = c->documents.data + c->documents.len;
    struct mb_chunk_document d;

    for (const uint8_t *p = c->documents.data; p < end; p += sizeof(d)) {
        memcpy(&d, p, sizeof(d));
        r->at.n_documents++;
        r->at.json_chars += d.json_chars;
        r->at.text_bytes += d.text_bytes;
        if (r->at.n_documents % r->log_interval == 0 && r->o->progress_cb != NULL) {
            struct mb_preprocess_progress shown = progress(r);
            r->o->progress_cb(r->o->ctx, &shown);
        }
    }
}

static void show_bad(struct run *r, const struct mb_chunk *c)
{
    const char *name = mb_input_name(r->input, c->piece.at.source);
    size_t n = c->bad.len / sizeof(struct mb_chunk_bad);

    for (size_t i = 0; i < n && r->n_shown < MB_PREPROCESS_BAD_LINES_SHOWN; i++) {
        struct mb_chunk_bad bad;
        char text[MB_ERR_TEXT_MAX];

        memcpy(&bad, c->bad.data + i * sizeof(bad), sizeof(bad));
        snprintf(text, sizeof(text), "%s:%llu: %s", name,
                 (unsigned long long)(r->at.line + bad.line), bad.text);
        r->n_shown++;
        if (r->o->bad_line_cb != NULL)
            r->o->bad_line_cb(r->o->ctx, text);
    }
}

/* ---- writing ---- */

static int write_parts(struct run *r, const struct mb_chunk *c, struct mb_err *err)
{
    size_t turn = (size_t)(r->at.n_lines % r->n_lanes);

    for (size_t i = 0; i < r->n_keys * r->n_lanes; i++) {
        const struct mb_chunk_part *part = &c->parts[i];
        struct mb_index_batch batch = {
            .tokens = part->tokens.data,
            .tokens_bytes = part->tokens.len,
            .lengths = part->lengths.data,
            .n_sequences = part->lengths.len / sizeof(int32_t),
            .document_sequences = part->n_sequences.data,
            .n_documents = part->n_sequences.len / sizeof(uint32_t),
        };
        size_t lane = (i % r->n_lanes + turn) % r->n_lanes;
        int rc = mb_output_add(r->output, i / r->n_lanes, (unsigned)lane, &batch, err);

        if (rc != 0)
            return rc;
    }
    return 0;
}

/* The chunk's place in r->at: a chunk follows the one before it, or begins a source. */
static void arrive(struct run *r, const struct mb_chunk *c)
{
    if (c->piece.at.line > 0) {
        r->at.source = c->piece.at.source;
        r->at.line = c->piece.at.line;
    }
    r->at.offset = c->piece.at.offset;
    announce(r, c->piece.at.source);
}

static int fail_at(struct run *r, const struct mb_chunk *c, struct mb_err *err)
{
    if (err != NULL)
        *err = c->err;
    if (c->lacks_place)
        mb_err_wrap(err, "%s:%llu", mb_input_name(r->input, (uint32_t)r->at.source),
                    (unsigned long long)(r->at.line + c->n_lines));
    return c->rc;
}

static int write_chunk(struct run *r, const struct mb_chunk *c, struct mb_err *err)
{
    int rc;

    if (c->piece.size_bytes > 0)
        arrive(r, c);
    if (c->rc != 0)
        return fail_at(r, c, err);
    rc = write_parts(r, c, err);
    if (rc != 0) {
        r->output_failed = 1;
        return rc;
    }
    show_bad(r, c);
    r->at.n_tokens = mb_output_n_tokens(r->output);
    r->at.n_sequences = mb_output_n_sequences(r->output);
    r->at.n_bad_lines += c->n_bad;
    r->at.n_repaired_lines += c->n_repaired;
    count_documents(r, c);
    r->at.line += c->n_lines;
    r->at.n_lines += c->n_lines;
    r->at.offset += c->piece.size_bytes;
    return 0;
}

static struct mb_journal *noted(struct run *r)
{
    r->at.elapsed_us = r->before_us + mb_mono_us() - r->started_us;
    return &r->at;
}

static int save(struct run *r, struct mb_err *err)
{
    uint64_t now_us = mb_mono_us();
    int rc;

    /* Before the first chunk there is no line to go on at. */
    if (!r->has_identity || r->at.n_lines == 0 || now_us - r->saved_us < r->resume_us)
        return 0;
    r->saved_us = now_us;
    rc = mb_output_save(r->output, noted(r), err);
    r->output_failed |= rc != 0;
    return rc;
}

static int stream(struct run *r, struct mb_err *err)
{
    for (;;) {
        struct mb_chunk *c;
        int rc;

        if (r->o->cancelled_cb != NULL && r->o->cancelled_cb(r->o->ctx))
            return mb_err_set(err, MB_ECANCELED, "cancelled; no output file was changed");
        rc = mb_ring_take(r->ring, TICK_MS, &c);
        if (rc == 0)
            return 0;
        if (rc == 1)
            rc = write_chunk(r, c, err);
        else
            rc = rc == MB_ETIMEOUT ? 0 : rc;
        if (rc == 0)
            rc = save(r, err);
        if (rc != 0)
            return rc;
        tick(r);
    }
}

/* ---- the end ---- */

/* Nothing is wrong with what was done so far: the same call may succeed later. */
static int may_pass(int rc)
{
    return rc == MB_ECANCELED || rc == MB_EUNAVAIL || rc == MB_ETIMEOUT;
}

static void append(struct mb_err *err, const char *text)
{
    size_t n = err != NULL ? strlen(err->text) : 0;

    if (err != NULL)
        snprintf(err->text + n, sizeof(err->text) - n, "%s", text);
}

/*
 * Ends with rc; says so if the same command goes on: from what is done now, or, when a write failed
 * half-way, from the last durable point. Whole files whose renames failed are kept as well.
 */
static void tear_down(struct run *r, int rc, struct mb_err *err)
{
    struct mb_err ignored;
    int has_started = r->started_us > 0;
    int has_worth = has_started ? may_pass(rc) && r->at.n_lines > 0 : rc != 0;
    int keeps = r->has_identity && (has_worth || (r->is_committing && rc != 0));

    mb_ring_stop(r->ring);
    if (keeps && has_started && !r->output_failed && !r->is_committing)
        keeps = mb_output_save_now(r->output, noted(r), &ignored) == 0;
    if (mb_output_close(r->output, keeps) && (may_pass(rc) || r->is_committing))
        append(err, "; the same command goes on from here");
    mb_tokenizer_destroy(r->tokenizer);
    mb_input_close(r->input);
}

int mb_preprocess_run(const struct mb_preprocess_options *o, struct mb_preprocess_progress *total,
                      struct mb_err *err)
{
    struct run r = {.o = o};
    uint64_t begun_us = mb_mono_us();
    int rc = set_up(&r, err);

    if (rc == 0) {
        r.started_us = r.saved_us = mb_mono_us();
        if (o->started_cb != NULL)
            o->started_cb(o->ctx, (double)(r.started_us - begun_us) * 1e-6);
    }
    if (rc == 0 && !r.is_whole)
        rc = stream(&r, err);
    if (rc == 0 && !r.is_whole)
        r.output_failed |= (rc = mb_output_prepare(r.output, noted(&r), err)) != 0;
    if (rc == MB_EFULL)
        append(err, "; no output file was changed");
    if (rc == 0 && !r.is_whole) {
        r.is_committing = 1;
        rc = mb_output_commit(r.output, err);
    }
    if (rc == 0 && total != NULL)
        *total = progress(&r);
    tear_down(&r, rc, err);
    return rc;
}
