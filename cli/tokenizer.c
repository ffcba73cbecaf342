/*
 * mobula tokenizer encode|decode|inspect: a tokenizer at hand, with the flags of preprocess.
 *
 * 1. encode reads one JSON string a line and prints one JSON array of ids a line; decode does the
 *    reverse. Lines are answered as they come: the output is flushed whenever the input has no
 * whole line left, so that a program can ask line by line through two pipes.
 * 2. inspect prints what the tokenizer is.
 * The first line that is no such JSON, or that the tokenizer refuses, ends it as "NAME:LINE: ..."
 * with its exit status; the lines before it have been answered. With --skip-bad-lines it is
 * answered with null, so that answers stay beside their lines, and counted.
 */
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/printable.h"
#include "base/str.h"
#include "cli/tokenizer_fetch.h"

enum { READ_BYTES = 1 << 20, MAX_LINE_BYTES = 1 << 30, BAD_LINES_SHOWN = 100 };

struct tokenizer_args {
    struct mb_tokenizer_flags tokenizer;
    const char *input, *invalid_utf8;
    int json, skip_bad_lines;
};

#define OPTION(name_, arg_, kind_, field_, help_)                                                  \
    {                                                                                              \
        name_, 0, arg_, MB_OPTION_##kind_, offsetof(struct tokenizer_args, field_), help_, 0, 0    \
    }

static const struct mb_option line_options[] = {
    MB_TOKENIZER_ROWS OPTION("input", "FILE", STRING, input, "instead of stdin"),
    OPTION("invalid-utf8", "replace|fail", STRING, invalid_utf8,
           "decode: bytes that are no UTF-8 become U+FFFD, or are an error"),
    OPTION("skip-bad-lines", NULL, FLAG, skip_bad_lines,
           "answer what is no such JSON with null; count it"),
    {0},
};

static const struct mb_option inspect_options[] = {
    MB_TOKENIZER_ROWS OPTION("json", NULL, FLAG, json, "print JSON, errors too"),
    {0},
};

/* One line after the other, and what answers it. */
struct talk {
    struct mb_tokenizer *tokenizer;
    struct mb_tokenizer_scratch *scratch;
    struct mb_ids ids;
    struct mb_buf bytes; /* decoded */
    struct mb_buf out;   /* answers that are not written yet */
    size_t searched;     /* bytes of the first line not answered that have no newline */
    int refuses_broken;  /* decode: bytes that are no UTF-8 are an error */
    const char *program; /* for messages */
    const char *name;    /* of the input */
    int skips_bad_lines;
    uint64_t n_bad;
    int (*answer)(struct talk *t, const json_t *value, struct mb_err *err);
};

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "out of memory");
}

/* ---- one line ---- */

/* "1, 22, 333" goes out digit by digit: this is the hot loop of encode. */
static int put_ids(struct mb_buf *out, const struct mb_ids *ids)
{
    uint8_t *p;

    if (mb_buf_reserve(out, 13 * ids->n + 4) != 0)
        return MB_ENOMEM;
    p = out->data + out->len;
    *p++ = '[';
    for (size_t i = 0; i < ids->n; i++) {
        uint8_t digits[10];
        size_t n = 0;
        uint32_t v = (uint32_t)ids->data[i];

        do
            digits[n++] = (uint8_t)('0' + v % 10);
        while ((v /= 10) > 0);
        if (i > 0) {
            *p++ = ',';
            *p++ = ' ';
        }
        while (n > 0)
            *p++ = digits[--n];
    }
    *p++ = ']';
    *p++ = '\n';
    out->len = (size_t)(p - out->data);
    return 0;
}

static int encode(struct talk *t, const json_t *value, struct mb_err *err)
{
    int rc;

    if (!json_is_string(value))
        return mb_err_set(err, MB_EINVAL, "expected a JSON string");
    t->ids.n = 0;
    rc = mb_tokenizer_encode(t->tokenizer, t->scratch, json_string_value(value),
                             json_string_length(value), &t->ids, err);
    if (rc == 0 && put_ids(&t->out, &t->ids) != 0)
        rc = no_memory(err);
    return rc;
}

static int read_ids(const json_t *value, struct mb_ids *ids, struct mb_err *err)
{
    size_t n = json_array_size(value);

    if (!json_is_array(value))
        return mb_err_set(err, MB_EINVAL, "expected a JSON array of ids");
    ids->n = 0;
    if (mb_ids_reserve(ids, n) != 0)
        return no_memory(err);
    for (size_t i = 0; i < n; i++) {
        const json_t *id = json_array_get(value, i);
        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            json_integer_value(id) > INT32_MAX)
            return mb_err_set(err, MB_EINVAL, "item %zu is no token id", i);
        ids->data[ids->n++] = (int32_t)json_integer_value(id);
    }
    return 0;
}

/* A JSON string of n bytes of UTF-8, without escapes where none are needed. */
static int put_string(struct mb_buf *out, const struct mb_buf *text)
{
    json_t *string = json_stringn(mb_buf_str(text), text->len);
    char *dump = string != NULL ? json_dumps(string, JSON_ENCODE_ANY) : NULL;
    int rc = dump == NULL ? MB_ENOMEM : mb_buf_puts(out, dump);

    free(dump);
    json_decref(string);
    return rc;
}

static int decode(struct talk *t, const json_t *value, struct mb_err *err)
{
    struct mb_buf whole = {0};
    int rc = read_ids(value, &t->ids, err);

    mb_buf_reset(&t->bytes);
    if (rc == 0)
        rc = mb_tokenizer_decode(t->tokenizer, t->ids.data, t->ids.n, &t->bytes, err);
    if (rc != 0)
        return rc;
    if (!mb_utf8_valid(t->bytes.data, t->bytes.len)) {
        if (t->refuses_broken)
            return mb_err_set(err, MB_EINVAL, "the ids give bytes that are no UTF-8");
        if (mb_buf_utf8(&whole, t->bytes.data, t->bytes.len) != 0)
            rc = no_memory(err);
    }
    if (rc == 0 && (put_string(&t->out, whole.len > 0 ? &whole : &t->bytes) != 0 ||
                    mb_buf_puts(&t->out, "\n") != 0))
        rc = no_memory(err);
    mb_buf_close(&whole);
    return rc;
}

static int answer_line(struct talk *t, const uint8_t *line, size_t n, struct mb_err *err)
{
    json_error_t problem;
    json_t *value = json_loadb((const char *)line, n, JSON_DECODE_ANY | JSON_ALLOW_NUL, &problem);
    int rc;

    if (value == NULL)
        return mb_err_set(err, MB_EINVAL, "no JSON at byte %d: %s", problem.position, problem.text);
    rc = t->answer(t, value, err);
    json_decref(value);
    return rc;
}

/* ---- all lines ---- */

static int flush(struct talk *t, struct mb_err *err)
{
    int rc = mb_fs_write_all(STDOUT_FILENO, t->out.data, t->out.len, err);

    mb_buf_reset(&t->out);
    if (rc != 0)
        mb_err_wrap(err, "stdout");
    return rc;
}

/* As answer_line, with the line's name in the error, or null for a bad line. */
static int answer_or_skip(struct talk *t, const uint8_t *line, size_t n, uint64_t number,
                          struct mb_err *err)
{
    int rc = answer_line(t, line, n, err);

    if (rc != 0)
        mb_err_wrap(err, "%s:%llu", t->name, (unsigned long long)number);
    if (rc != MB_EINVAL || !t->skips_bad_lines)
        return rc;
    if (t->n_bad++ < BAD_LINES_SHOWN)
        fprintf(stderr, "%s: skipped: %s\n", t->program, err->text);
    return mb_buf_puts(&t->out, "null\n") == 0 ? 0 : no_memory(err);
}

/* Answers the whole lines of in; with at_end, what is left, too. */
static int answer_all(struct talk *t, struct mb_buf *in, int at_end, uint64_t *number,
                      struct mb_err *err)
{
    const uint8_t *p = in->data, *end = in->data + in->len;
    int rc = 0;

    while (rc == 0 && p < end) {
        const uint8_t *newline = memchr(p + t->searched, '\n', (size_t)(end - p) - t->searched);
        size_t n = newline != NULL ? (size_t)(newline - p) : (size_t)(end - p);

        t->searched = newline != NULL ? 0 : n;
        if (newline == NULL && !at_end)
            break;
        rc = answer_or_skip(t, p, n, *number, err);
        p += newline != NULL ? n + 1 : n;
        (*number)++;
        if (rc == 0 && t->out.len > READ_BYTES)
            rc = flush(t, err);
    }
    mb_buf_consume(in, (size_t)(p - in->data));
    return rc;
}

static int talk(struct talk *t, int fd, struct mb_err *err)
{
    struct mb_buf in = {0};
    struct mb_err later;
    uint64_t number = 1;
    ssize_t got = 1;
    int rc = 0;

    while (rc == 0 && got > 0) {
        if (in.len > MAX_LINE_BYTES) {
            rc = mb_err_set(err, MB_EINVAL, "%s:%llu: the line is longer than 1 GiB", t->name,
                            (unsigned long long)number);
            break;
        }
        if (mb_buf_reserve(&in, READ_BYTES) != 0) {
            rc = no_memory(err);
            break;
        }
        got = read(fd, in.data + in.len, READ_BYTES);
        if (got < 0 && errno == EINTR) {
            got = 1;
            continue;
        }
        if (got < 0) {
            rc = mb_err_sys(err, errno, "%s", t->name);
            break;
        }
        in.len += (size_t)got;
        rc = answer_all(t, &in, got == 0, &number, err);
        if (rc == 0)
            rc = flush(t, err);
    }
    if (rc != 0 && t->out.len > 0)
        (void)flush(t, &later); /* the error at hand is the one to tell */
    mb_buf_close(&in);
    return rc;
}

static int open_tokenizer(struct tokenizer_args *a, struct mb_tokenizer **out, struct mb_err *err)
{
    struct mb_tokenizer_fetched fetched = {0};
    struct mb_tokenizer_options o;
    int rc;

    if (a->tokenizer.tokenizer_type == NULL)
        return mb_err_set(err, MB_EINVAL, "tokenizer: --tokenizer-type is required");
    rc = mb_tokenizer_fetch(&a->tokenizer, &fetched, err);
    if (rc == 0) {
        o = mb_tokenizer_flags_read(&a->tokenizer);
        rc = mb_tokenizer_create(&o, out, err);
    }
    mb_tokenizer_fetched_close(&fetched);
    return rc;
}

static int run_lines(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv,
                     int (*answer)(struct talk *, const json_t *, struct mb_err *))
{
    struct tokenizer_args args = {0};
    struct talk t = {.answer = answer, .program = cli->program};
    struct mb_err err;
    int fd = STDIN_FILENO;
    int n_words, rc = mb_options_parse(cli, verb, argc, argv, 0, &args, &n_words, &err);

    if (rc == 1)
        return 0;
    if (rc == 0 && args.invalid_utf8 != NULL && strcmp(args.invalid_utf8, "fail") != 0 &&
        strcmp(args.invalid_utf8, "replace") != 0)
        rc = mb_err_set(&err, MB_EINVAL, "%s: --invalid-utf8 %s: replace or fail", verb->name,
                        args.invalid_utf8);
    t.skips_bad_lines = args.skip_bad_lines;
    t.refuses_broken = args.invalid_utf8 != NULL && strcmp(args.invalid_utf8, "fail") == 0;
    if (rc == 0)
        rc = open_tokenizer(&args, &t.tokenizer, &err);
    if (rc == 0)
        rc = mb_tokenizer_scratch_create(t.tokenizer, &t.scratch, &err);
    if (rc == 0 && args.input != NULL && strcmp(args.input, "-") != 0) {
        fd = open(args.input, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            rc = mb_err_sys(&err, errno, "--input %s", args.input);
    }
    t.name = fd == STDIN_FILENO ? "stdin" : args.input;
    if (rc == 0)
        rc = talk(&t, fd, &err);
    if (t.n_bad > 0)
        fprintf(stderr, "%s: %llu bad lines skipped\n", t.program, (unsigned long long)t.n_bad);
    if (fd > STDIN_FILENO)
        close(fd);
    mb_ids_close(&t.ids);
    mb_buf_close(&t.bytes);
    mb_buf_close(&t.out);
    mb_tokenizer_scratch_destroy(t.scratch);
    mb_tokenizer_destroy(t.tokenizer);
    return rc != 0 ? mb_cli_fail(cli, &err) : 0;
}

static int run_encode(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv)
{
    return run_lines(cli, verb, argc, argv, encode);
}

static int run_decode(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv)
{
    return run_lines(cli, verb, argc, argv, decode);
}

/* ---- inspect ---- */

/* {"id": 50256, "text": "<|endoftext|>"}, or null for -1. */
static json_t *token_json(const struct mb_tokenizer *t, int32_t id)
{
    struct mb_buf bytes = {0}, text = {0};
    json_t *token;

    if (id < 0)
        return json_null();
    token = json_pack("{s:i}", "id", (int)id);
    if (mb_tokenizer_decode(t, &id, 1, &bytes, NULL) == 0 &&
        mb_buf_utf8(&text, bytes.data, bytes.len) == 0)
        json_object_set_new(token, "text", json_stringn(mb_buf_str(&text), text.len));
    mb_buf_close(&bytes);
    mb_buf_close(&text);
    return token;
}

static json_t *added_json(const struct mb_tokenizer *t)
{
    json_t *list = json_array();

    for (size_t i = 0; i < mb_tokenizer_n_added(t); i++) {
        struct mb_tokenizer_added a;

        mb_tokenizer_added(t, i, &a);
        json_array_append_new(list, json_pack("{s:i,s:o,s:b}", "id", (int)a.id, "text",
                                              json_stringn(a.text, a.n), "special", a.is_special));
    }
    return list;
}

static json_t *describe(const struct mb_tokenizer *t)
{
    return json_pack("{s:s,s:I,s:o,s:o,s:s?,s:s?,s:o}", "type", mb_tokenizer_type(t), "vocab_size",
                     (json_int_t)mb_tokenizer_vocab_size(t), "eod",
                     token_json(t, mb_tokenizer_eod(t)), "bos", token_json(t, mb_tokenizer_bos(t)),
                     "family", mb_tokenizer_family(t), "pattern", mb_tokenizer_pattern(t),
                     "added_tokens", added_json(t));
}

static void print_token(const char *name, const json_t *token)
{
    char *text = json_dumps(json_object_get(token, "text"), JSON_ENCODE_ANY);

    if (json_is_null(token))
        printf("%-12s none\n", name);
    else
        printf("%-12s %lld %s\n", name, (long long)json_integer_value(json_object_get(token, "id")),
               text != NULL ? text : "");
    free(text);
}

static void print_text(const json_t *d)
{
    const json_t *added = json_object_get(d, "added_tokens"), *a;
    const char *family = json_string_value(json_object_get(d, "family"));
    const char *pattern = json_string_value(json_object_get(d, "pattern"));
    size_t i;

    printf("%-12s %s\n", "type", json_string_value(json_object_get(d, "type")));
    printf("%-12s %lld\n", "vocab_size",
           (long long)json_integer_value(json_object_get(d, "vocab_size")));
    print_token("eod", json_object_get(d, "eod"));
    print_token("bos", json_object_get(d, "bos"));
    printf("%-12s %s\n", "family", family != NULL ? family : "none");
    printf("%-12s %s\n", "pattern", pattern != NULL ? pattern : "none");
    printf("%-12s %zu\n", "added_tokens", json_array_size(added));
    json_array_foreach(added, i, a)
    {
        char *text = json_dumps(json_object_get(a, "text"), JSON_ENCODE_ANY);
        printf("%12lld %s%s\n", (long long)json_integer_value(json_object_get(a, "id")),
               text != NULL ? text : "?",
               json_is_true(json_object_get(a, "special")) ? " special" : "");
        free(text);
    }
}

static int run_inspect(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv)
{
    struct tokenizer_args args = {0};
    struct mb_tokenizer *t = NULL;
    json_t *d = NULL;
    struct mb_err err;
    int n_words, rc = mb_options_parse(cli, verb, argc, argv, 0, &args, &n_words, &err);

    if (rc == 1)
        return 0;
    if (rc == 0)
        rc = open_tokenizer(&args, &t, &err);
    if (rc == 0 && (d = describe(t)) == NULL)
        rc = no_memory(&err);
    if (rc == 0 && args.json) {
        mb_printable_json(d, JSON_SORT_KEYS, stdout);
        putchar('\n');
    } else if (rc == 0) {
        print_text(d);
    }
    if (rc == 0 && (fflush(stdout) != 0 || ferror(stdout)))
        rc = mb_err_sys(&err, errno, "stdout");
    json_decref(d);
    mb_tokenizer_destroy(t);
    return rc != 0 ? mb_cli_fail(cli, &err) : 0;
}

/* ---- verbs ---- */

static const struct mb_verb verb_encode = {
    .name = "encode",
    .summary = "JSON strings on stdin, one a line, to JSON arrays of ids",
    .synopsis = "--tokenizer-type TYPE [OPTIONS] < LINES",
    .examples = "  echo '\"Hello world\"' | mobula tokenizer encode \\\n"
                "    --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json \\\n"
                "    --merge-file merges.txt          # [15496, 995]\n",
    .options = line_options,
    .no_words = 1,
    .run = run_encode,
};
static const struct mb_verb verb_decode = {
    .name = "decode",
    .summary = "JSON arrays of ids on stdin, one a line, to JSON strings",
    .synopsis = "--tokenizer-type TYPE [OPTIONS] < LINES",
    .examples = "  echo '[15496, 995]' | mobula tokenizer decode \\\n"
                "    --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json \\\n"
                "    --merge-file merges.txt          # \"Hello world\"\n",
    .options = line_options,
    .no_words = 1,
    .run = run_decode,
};
static const struct mb_verb verb_inspect = {
    .name = "inspect",
    .summary = "what a tokenizer is: size, eod, pattern, added tokens",
    .synopsis = "--tokenizer-type TYPE [OPTIONS]",
    .examples = "  mobula tokenizer inspect --tokenizer-type HuggingFaceTokenizer \\\n"
                "    --tokenizer-model Llama-3.1-8B --json\n",
    .options = inspect_options,
    .no_words = 1,
    .run = run_inspect,
};

static const struct mb_verb *const subverbs[] = {&verb_encode, &verb_decode, &verb_inspect, NULL};

const struct mb_verb mb_verb_tokenizer = {
    .name = "tokenizer",
    .summary = "encode and decode text, look into a tokenizer",
    .synopsis = "encode|decode|inspect --tokenizer-type TYPE [OPTIONS]",
    .examples = "  mobula tokenizer encode --help\n",
    .subverbs = subverbs,
};
