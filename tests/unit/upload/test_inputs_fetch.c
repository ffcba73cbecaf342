/* Fetching from a store that is a directory: right files, every failure told once, nothing left. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <uv.h>
#include "agent/upload/inputs.h"
#include "base/alloc.h"
#include "base/fs.h"

static char root[] = "/tmp/mobula-inputs-XXXXXX";
static char cache[64], data[64], single[64], model[64], missing[64];

struct heard {
    int n_done, n_texts;
    int cancel_at; /* cancel when so many texts came; 0: never */
    struct mb_inputs *in;
    struct mb_err err;
    char *paths[4];
    size_t n;
};

static void on_text(void *arg, const char *text)
{
    struct heard *h = arg;

    assert_true(text[0] != '\0' && strchr(text, '\n') == NULL);
    h->n_texts++;
    if (h->n_texts == h->cancel_at)
        mb_inputs_cancel(h->in);
}

static void on_done(void *arg, const struct mb_err *err, const char *const *paths)
{
    struct heard *h = arg;

    h->n_done++;
    h->err = *err;
    for (size_t i = 0; i < h->n && err->code == MB_OK; i++)
        h->paths[i] = strdup(paths[i]);
}

static const struct mb_inputs_ops ops = {on_text, on_done};

static void forget(struct heard *h)
{
    for (size_t i = 0; i < h->n; i++)
        free(h->paths[i]);
}

/* The start's code, or what on_done said. */
static int run(struct heard *h, const struct mb_input *list, size_t n)
{
    uv_loop_t loop;
    struct mb_err err = {0};
    int rc;

    h->n = n;
    assert_int_equal(uv_loop_init(&loop), 0);
    rc = mb_inputs_start(&loop, cache, list, n, &ops, h, &h->in, &err);
    uv_run(&loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&loop), 0); /* no handle is left */
    assert_int_equal(h->n_done, rc == MB_OK ? 1 : 0);
    return rc != MB_OK ? rc : h->err.code;
}

static void write_file(const char *name, const char *text)
{
    char path[160];
    struct mb_err err;

    snprintf(path, sizeof(path), "%s/store/%s", root, name);
    *strrchr(path, '/') = '\0';
    assert_int_equal(mb_fs_mkdir_p(path, 0755, &err), 0);
    snprintf(path, sizeof(path), "%s/store/%s", root, name);
    assert_int_equal(mb_fs_write_atomic(path, text, strlen(text), 0644, &err), 0);
}

static void assert_file(const char *path, const char *ending, const char *text)
{
    char name[256];
    struct mb_buf b = {0};
    struct mb_err err;

    snprintf(name, sizeof(name), "%s%s", path, ending);
    assert_int_equal(mb_fs_read(name, 1000, &b, &err), 0);
    assert_string_equal(mb_buf_str(&b), text);
    mb_buf_close(&b);
}

static int make_store(void **state)
{
    (void)state;
    assert_non_null(mkdtemp(root));
    snprintf(cache, sizeof(cache), "%s/cache", root);
    snprintf(data, sizeof(data), "file://%s/store/sets/x", root);
    snprintf(single, sizeof(single), "file://%s/store/vocab.json", root);
    snprintf(model, sizeof(model), "file://%s/store/models/m", root);
    snprintf(missing, sizeof(missing), "file://%s/store/none", root);
    write_file("sets/x.bin", "tokens");
    write_file("sets/x.idx", "index");
    write_file("vocab.json", "{}");
    write_file("models/m/tokenizer.json", "[1]");
    write_file("models/m/merges.txt", "a b");
    write_file("models/m/model.safetensors", "weights");
    write_file("models/m/deeper/tokenizer.json", "no");
    return 0;
}

static int clear(void **state)
{
    (void)state;
    return mb_fs_remove_tree(cache, NULL);
}

static int remove_root(void **state)
{
    (void)state;
    return mb_fs_remove_tree(root, NULL);
}

static void all_kinds_and_again(void **state)
{
    const struct mb_input list[] = {
        {data, MB_INPUT_DATASET}, {single, MB_INPUT_FILE}, {model, MB_INPUT_TOKENIZER}};
    char path[256];

    (void)state;
    for (int again = 0; again < 2; again++) {
        struct heard h = {0};

        assert_int_equal(run(&h, list, 3), 0);
        assert_int_equal(h.n_texts, again ? 3 : 6);
        assert_file(h.paths[0], ".bin", "tokens");
        assert_file(h.paths[0], ".idx", "index");
        assert_file(h.paths[1], "", "{}");
        assert_file(h.paths[2], "/tokenizer.json", "[1]");
        assert_file(h.paths[2], "/merges.txt", "a b");
        snprintf(path, sizeof(path), "%s/model.safetensors", h.paths[2]);
        assert_false(mb_fs_exists(path));
        snprintf(path, sizeof(path), "%s/deeper", h.paths[2]);
        assert_false(mb_fs_exists(path));
        forget(&h);
    }
}

static void what_is_not_there_is_named(void **state)
{
    const struct mb_input lists[][2] = {
        {{data, MB_INPUT_DATASET}, {missing, MB_INPUT_DATASET}},
        {{data, MB_INPUT_DATASET}, {missing, MB_INPUT_FILE}},
        {{data, MB_INPUT_DATASET}, {missing, MB_INPUT_TOKENIZER}},
        {{data, MB_INPUT_DATASET}, {missing, MB_INPUT_CHECKPOINT}},
    };

    (void)state;
    for (size_t i = 0; i < 4; i++) {
        struct heard h = {0};

        assert_int_equal(run(&h, lists[i], 2), MB_ENOENT);
        assert_non_null(strstr(h.err.text, missing));
    }
}

static void a_cancel_at_any_point_ends_it_once(void **state)
{
    const struct mb_input list[] = {{data, MB_INPUT_DATASET}, {model, MB_INPUT_TOKENIZER}};

    (void)state;
    for (int at = 1; at <= 4; at++) {
        struct heard h = {.cancel_at = at};
        int rc = run(&h, list, 2);

        /* Said at the very end, it may come too late. */
        assert_true(rc == MB_ECANCELED || (at == 4 && rc == 0));
        forget(&h);
        clear(NULL);
    }
}

static void every_allocation_may_fail(void **state)
{
    const struct mb_input list[] = {
        {data, MB_INPUT_DATASET}, {model, MB_INPUT_TOKENIZER}, {single, MB_INPUT_FILE}};
    unsigned long nth = 1;

    (void)state;
    for (int failed = 1; failed; nth++) {
        struct heard h = {0};
        int rc;

        mb_alloc_fail_nth(nth);
        rc = run(&h, list, 3);
        failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        assert_true(failed ? rc != MB_OK || h.err.code == MB_OK : rc == MB_OK);
        if (rc == MB_OK)
            assert_file(h.paths[0], ".bin", "tokens");
        forget(&h);
        clear(NULL);
    }
    assert_true(nth > 30);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(all_kinds_and_again, clear),
        cmocka_unit_test_teardown(what_is_not_there_is_named, clear),
        cmocka_unit_test_teardown(a_cancel_at_any_point_ends_it_once, clear),
        cmocka_unit_test_teardown(every_allocation_may_fail, clear),
    };
    return cmocka_run_group_tests(tests, make_store, remove_root);
}
