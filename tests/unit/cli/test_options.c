/* Option tables: parsing, refusals with suggestions, the ways of `ray`, help and completion. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "cli/options.h"

struct values {
    int flag;
    const char *text;
    int64_t number;
    double real;
    uint64_t time_ms, size_bytes;
    struct mb_words keys;
};

#define ROW(name_, letter_, arg_, kind_, field_, min_, max_)                                       \
    {                                                                                              \
        name_, letter_, arg_, kind_, offsetof(struct values, field_), "help of it", min_, max_     \
    }
static const struct mb_option options[] = {
    ROW("force", 'f', NULL, MB_OPTION_FLAG, flag, 0, 0),
    ROW("node-name", 0, "NAME", MB_OPTION_STRING, text, 0, 0),
    ROW("num-gpus", 0, "N", MB_OPTION_INT, number, 0, 1024),
    ROW("share", 0, "X", MB_OPTION_DOUBLE, real, 0, 0),
    ROW("grace", 'g', "TIME", MB_OPTION_DURATION, time_ms, 0, 0),
    ROW("memory", 0, "BYTES", MB_OPTION_SIZE, size_bytes, 0, 0),
    ROW("keys", 0, "KEY...", MB_OPTION_WORDS, keys, 0, 0),
    {0},
};
static const struct mb_verb start = {
    .name = "start", .summary = "starts", .options = options, .no_words = 1};
static const struct mb_verb run = {.name = "run", .summary = "runs", .options = options};
static const struct mb_verb *const all[] = {&start, &run, NULL};
static const struct mb_verb job = {.name = "job", .summary = "jobs", .subverbs = all};
static const struct mb_verb *const top[] = {&start, &job, NULL};

struct outcome {
    int rc, n_words;
    struct values v;
    struct mb_err err;
    char *argv[16];
};

/* line is split at spaces, in place. */
static struct outcome *parse(const struct mb_verb *verb, const char *line, int ray_mode, int stop)
{
    static struct outcome o;
    static char copy[256];
    struct mb_cli cli = {.program = ray_mode ? "ray" : "mobula", .ray_mode = ray_mode};
    char *save = NULL;
    int argc = 0;

    memset(&o, 0, sizeof(o));
    snprintf(copy, sizeof(copy), "%s", line);
    for (char *w = strtok_r(copy, " ", &save); w != NULL; w = strtok_r(NULL, " ", &save))
        o.argv[argc++] = w;
    o.rc = mb_options_parse(&cli, verb, argc, o.argv, stop, &o.v, &o.n_words, &o.err);
    return &o;
}

static void test_every_kind(void **state)
{
    struct outcome *o = parse(&start,
                              "start -f --node-name=a=b --num-gpus 8 --share 0.5 -g 90s "
                              "--memory 2GiB",
                              0, 0);

    (void)state;
    assert_int_equal(o->rc, 0);
    assert_int_equal(o->v.flag, 1);
    assert_string_equal(o->v.text, "a=b");
    assert_int_equal(o->v.number, 8);
    assert_true(o->v.real > 0.49 && o->v.real < 0.51);
    assert_int_equal(o->v.time_ms, 90000);
    assert_int_equal(o->v.size_bytes, (uint64_t)2 << 30);
}

static void test_words_keep_their_order(void **state)
{
    struct outcome *o = parse(&run, "run a --force b -- --num-gpus c", 0, 0);

    (void)state;
    assert_int_equal(o->rc, 0);
    assert_int_equal(o->n_words, 4);
    assert_string_equal(o->argv[1], "a");
    assert_string_equal(o->argv[2], "b");
    assert_string_equal(o->argv[3], "--num-gpus");
    assert_string_equal(o->argv[4], "c");
    o = parse(&run, "run --force python --lr 3", 0, 1);
    assert_int_equal(o->rc, 0);
    assert_int_equal(o->n_words, 3);
    assert_string_equal(o->argv[2], "--lr");
}

/* As argparse's nargs='+': up to the next flag, the last flag counts, "-" is a word. */
static void test_several_words(void **state)
{
    struct outcome *o = parse(&start, "start --keys text title - --force --num-gpus 2", 0, 0);

    (void)state;
    assert_int_equal(o->rc, 0);
    assert_int_equal(o->v.flag, 1);
    assert_int_equal(o->v.number, 2);
    assert_int_equal(o->v.keys.n, 3);
    assert_string_equal(o->v.keys.at[0], "text");
    assert_string_equal(o->v.keys.at[1], "title");
    assert_string_equal(o->v.keys.at[2], "-");
    o = parse(&start, "start --keys a b --keys=c=d", 0, 0);
    assert_int_equal(o->rc, 0);
    assert_int_equal(o->v.keys.n, 1);
    assert_string_equal(o->v.keys.at[0], "c=d");
}

static void test_refusals_name_the_flag(void **state)
{
    static const struct {
        const char *line, *text;
    } bad[] = {{"start --nmu-gpus 3", "did you mean --num-gpus?"},
               {"start --foce", "did you mean --force?"},
               {"start --zzzzzzzzzzz", "unknown flag --zzzzzzzzzzz"},
               {"start -x", "unknown flag"},
               {"start --num-gpus", "--num-gpus needs a value: N"},
               {"start --keys --force", "--keys needs a value: KEY..."},
               {"start --num-gpus x", "--num-gpus"},
               {"start --num-gpus 1025", "--num-gpus"},
               {"start --force=1", "--force takes no value"},
               {"start --grace soon", "--grace"},
               {"start --share abc", "--share"},
               {"start word", "unexpected argument word"}};

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct outcome *o = parse(&start, bad[i].line, 0, 0);

        assert_int_equal(o->rc, MB_EINVAL);
        if (strstr(o->err.text, bad[i].text) == NULL)
            fail_msg("%s: %s", bad[i].line, o->err.text);
    }
}

static void test_ray_passes_over_what_it_does_not_know(void **state)
{
    struct outcome *o = parse(
        &start, "start --dashboard-host 0.0.0.0 --metrics-export-port=8080 --num-gpus 2 --plasma",
        1, 0);

    (void)state;
    assert_int_equal(o->rc, 0);
    assert_int_equal(o->v.number, 2);
    assert_int_equal(parse(&start, "start --num-gpus x", 1, 0)->rc, MB_EINVAL);
    o = parse(&run, "run --unknown id", 1, 0); /* it takes words: id is one */
    assert_int_equal(o->rc, 0);
    assert_int_equal(o->n_words, 1);
}

static void test_verbs_are_suggested(void **state)
{
    struct mb_err err;

    (void)state;
    assert_ptr_equal(mb_options_find_verb(top, "job", &err), &job);
    assert_null(mb_options_find_verb(top, "strat", &err));
    assert_non_null(strstr(err.text, "did you mean start?"));
    assert_null(mb_options_find_verb(top, "qqqqqqqq", &err));
    assert_non_null(strstr(err.text, "--help"));
}

static void expect_completion(const char *a, const char *b, const char *expected)
{
    char *words[] = {(char *)(uintptr_t)a, (char *)(uintptr_t)b};
    char *text = NULL;
    size_t n = 0;
    FILE *out = open_memstream(&text, &n);

    mb_options_complete(top, words, b != NULL ? 2 : 1, out);
    fclose(out);
    assert_string_equal(text, expected);
    free(text);
}

static void test_completion(void **state)
{
    (void)state;
    expect_completion("", NULL, "start\njob\n");
    expect_completion("st", NULL, "start\n");
    expect_completion("job", "r", "run\n");
    expect_completion("start", "--n", "--node-name\n--num-gpus\n");
    expect_completion("start", "--he", "--help\n");
    expect_completion("nothing", "x", "");
}

static void test_help_shows_every_option(void **state)
{
    struct mb_cli cli = {.program = "mobula", .parent = "job"};
    char *text = NULL;
    size_t n = 0;
    FILE *out = open_memstream(&text, &n);

    (void)state;
    mb_options_help(&cli, &run, out);
    fclose(out);
    assert_non_null(strstr(text, "usage: mobula job run"));
    for (const struct mb_option *o = options; o->name != NULL; o++)
        assert_non_null(strstr(text, o->name));
    free(text);
}

/* ---- errors ---- */

static const struct mb_option with_json[] = {
    ROW("json", 0, NULL, MB_OPTION_FLAG, flag, 0, 0),
    ROW("node-name", 0, "NAME", MB_OPTION_STRING, text, 0, 0),
    {0},
};
static const struct mb_verb answers = {.name = "answers", .options = with_json};

/* What a verb that ends with this error writes to stderr. words: after the verb's name. */
static const char *failure(char *words[], int n, int stop, int code, const char *text, int *status)
{
    static char told[4 * MB_ERR_TEXT_MAX];
    struct mb_cli cli = {.program = "mobula"};
    struct mb_err err = {0};
    struct values v = {0};
    char *argv[8] = {words[0]};
    int n_words, kept = dup(2), pipe_fds[2];
    ssize_t size;

    for (int i = 0; i < n; i++)
        argv[i] = words[i];
    if (mb_options_parse(&cli, &answers, n, argv, stop, &v, &n_words, &err) == 0) {
        err.code = code; /* as it came: mb_err_set() takes some characters out */
        snprintf(err.text, sizeof(err.text), "%s", text);
    }
    assert_int_equal(pipe(pipe_fds), 0);
    dup2(pipe_fds[1], 2);
    *status = mb_cli_fail(&cli, &err);
    dup2(kept, 2);
    close(kept);
    close(pipe_fds[1]);
    size = read(pipe_fds[0], told, sizeof(told) - 1);
    close(pipe_fds[0]);
    assert_true(size > 0);
    told[size] = '\0';
    return told;
}

#define FAILURE(stop, code, text, status, ...)                                                     \
    failure((char *[]){"answers", __VA_ARGS__},                                                    \
            (int)(sizeof((char *[]){"answers", __VA_ARGS__}) / sizeof(char *)), stop, code, text,  \
            status)

static void test_with_json_an_error_is_json(void **state)
{
    int status;

    (void)state;
    assert_string_equal(FAILURE(0, MB_ENOENT, "no \"job\"\n\x1b[2J\xc2\x9b", &status, "--json"),
                        "{\"error\": {\"code\": 66, \"name\": \"ENOENT\", \"message\": \"no "
                        "\\\"job\\\"\\n\\u001B[2J\\u009B\"}}\n");
    assert_int_equal(status, 66);
    assert_string_equal(FAILURE(0, MB_EIO, "a\xff", &status, "--json"),
                        "{\"error\": {\"code\": 74, \"name\": \"EIO\", \"message\": "
                        "\"a\xef\xbf\xbd\"}}\n");
    assert_string_equal(FAILURE(0, MB_ENOENT, "no job", &status, "x"), "mobula: no job\n");
    assert_int_equal(status, 66);
}

/* Of flags that are refused, too; but the words of a command, and values, are no flags. */
static void test_json_is_seen_wherever_it_stands(void **state)
{
    static const char refused[] = "{\"error\": {\"code\": 64, \"name\": \"EINVAL\", \"message\": "
                                  "\"answers: unknown flag --bad; see --help\"}}\n";
    int status;

    (void)state;
    assert_string_equal(FAILURE(0, 0, "", &status, "--json", "--bad"), refused);
    assert_string_equal(FAILURE(0, 0, "", &status, "--bad", "word", "--json"), refused);
    assert_string_equal(FAILURE(1, 0, "", &status, "--bad", "--json", "word"), refused);
    assert_string_equal(FAILURE(0, 0, "", &status, "--bad", "--", "--json"),
                        "mobula: answers: unknown flag --bad; see --help\n");
    assert_string_equal(FAILURE(1, 0, "", &status, "--bad", "word", "--json"),
                        "mobula: answers: unknown flag --bad; see --help\n");
    assert_string_equal(FAILURE(0, MB_EIO, "bad", &status, "--node-name", "--json"),
                        "mobula: bad\n");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_kind),
        cmocka_unit_test(test_words_keep_their_order),
        cmocka_unit_test(test_several_words),
        cmocka_unit_test(test_refusals_name_the_flag),
        cmocka_unit_test(test_ray_passes_over_what_it_does_not_know),
        cmocka_unit_test(test_verbs_are_suggested),
        cmocka_unit_test(test_completion),
        cmocka_unit_test(test_help_shows_every_option),
        cmocka_unit_test(test_with_json_an_error_is_json),
        cmocka_unit_test(test_json_is_seen_wherever_it_stands),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
