/* Hugging Face models: the map of rows, config.json and arguments there and back. The real
 * transformers is in tests/integration/worker/test_hf.py. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include "base/alloc.h"
#include "worker/checkpoint/hf/map.h"

static struct mb_hf_shape llama_shape(void)
{
    return (struct mb_hf_shape){.family = MB_HF_LLAMA,
                                .n_layers = 3,
                                .hidden = 64,
                                .ffn = 112,
                                .n_heads = 8,
                                .n_groups = 2,
                                .head_dim = 24,
                                .max_positions = 64,
                                .vocab = 200,
                                .padded_vocab = 256,
                                .norm_eps = 1e-5,
                                .untied = 1,
                                .rope_base = 500000,
                                .rope_interpolation = 1,
                                .rope_factor = 8};
}

/* Of the same width and vocabulary. */
static struct mb_hf_shape gpt2_shape(void)
{
    struct mb_hf_shape s = llama_shape();
    s.family = MB_HF_GPT2;
    s.n_layers = 2;
    s.ffn = 240;
    s.n_heads = s.n_groups = 4;
    s.head_dim = 16;
    s.max_positions = 32;
    s.untied = 0;
    s.rope_base = 0;
    s.rope_factor = 0;
    s.biases = s.gelu_erf = 1;
    s.attention_dropout = 0.25;
    s.hidden_dropout = 0.5;
    return s;
}

/* Runs of either side, in its order, are its rows one after the other. */
static void check_map(const struct mb_hf_shape *s)
{
    struct mb_hf_map m;
    struct mb_err err = {0};
    assert_int_equal(mb_hf_map_create(s, &m, &err), 0);
    for (int side = 0; side < 2; side++) {
        size_t k = 0;
        mb_hf_map_sort(&m, (enum mb_hf_side)side);
        for (size_t i = 0; i < m.n_tensors[side]; i++) {
            const struct mb_hf_tensor *t = &m.tensors[side][i];
            uint64_t row = 0;
            for (; k < m.n_runs && m.runs[k].tensor[side] == i; k++) {
                const struct mb_hf_tensor *other = &m.tensors[1 - side][m.runs[k].tensor[1 - side]];
                assert_int_equal(m.runs[k].row[side], row);
                assert_int_equal(other->columns, t->columns);
                assert_true(m.runs[k].row[1 - side] + m.runs[k].n_rows <= other->rows);
                row += m.runs[k].n_rows;
            }
            assert_int_equal(row, t->rows == s->padded_vocab ? s->vocab : t->rows);
        }
        assert_int_equal(k, m.n_runs);
    }
    mb_hf_map_close(&m);
}

static void the_map_covers_every_row_once(void **state)
{
    (void)state;
    struct mb_hf_shape s = llama_shape();
    check_map(&s);
    s.biases = 1;
    s.untied = 0;
    s.n_groups = 8;
    check_map(&s);
    s = gpt2_shape();
    check_map(&s);
    s.untied = 1;
    check_map(&s);
    for (unsigned long nth = 1;; nth++) {
        struct mb_hf_map m;
        struct mb_err err = {0};
        mb_alloc_fail_nth(nth);
        int rc = mb_hf_map_create(&s, &m, &err);
        int failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        if (!failed) {
            assert_int_equal(rc, 0);
            mb_hf_map_close(&m);
            break;
        }
        assert_int_equal(rc, MB_ENOMEM);
    }
}

static void texts_say_the_shape(void **state)
{
    (void)state;
    struct mb_hf_shape shapes[] = {llama_shape(), gpt2_shape(), llama_shape()};
    shapes[2].rope_factor = 0;
    shapes[2].rope_interpolation = 4;
    shapes[2].biases = 1;
    for (size_t i = 0; i < 3; i++) {
        struct mb_hf_shape got;
        struct mb_err err = {0};
        char *args = mb_hf_args_text(&shapes[i]);
        assert_int_equal(mb_hf_args_parse("args", args, 0, &got, &err), 0);
        got.rope_interpolation = got.family == MB_HF_GPT2 ? 1 : got.rope_interpolation;
        assert_memory_equal(&got, &shapes[i], sizeof got);
        assert_int_equal(mb_hf_args_parse("args", args, 100, &got, &err), 0);
        assert_int_equal(got.vocab, 100);
        assert_int_equal(mb_hf_args_parse("args", args, 300, &got, &err), MB_EINVAL);
        assert_string_equal(err.text, "args: a vocabulary of 300 is more than the 256 rows");
        char *config = mb_hf_config_text(&shapes[i], "float32");
        assert_int_equal(mb_hf_config_parse("c", config, strlen(config), &got, &err), 0);
        got.padded_vocab = 256;
        assert_memory_equal(&got, &shapes[i], sizeof got);
        mb_free(args);
        mb_free(config);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_map_covers_every_row_once),
        cmocka_unit_test(texts_say_the_shape),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
