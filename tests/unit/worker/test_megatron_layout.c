/* Which part of which tensor is whose, by Megatron-LM's arguments. The real megatron-core is in
 * tests/integration/worker/test_megatron.py. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "worker/checkpoint/megatron/layout.h"

static const char ARGS[] =
    "{\"num_layers\": 2, \"hidden_size\": 48, \"num_attention_heads\": 4, \"swiglu\": true,"
    "\"group_query_attention\": false, \"num_query_groups\": 1, \"max_position_embeddings\": 8,"
    "\"padded_vocab_size\": 20, \"ffn_hidden_size\": null, \"rotary_base\": 500000.0,"
    "\"tensor_model_parallel_size\": 4, \"add_bias_linear\": true,"
    "\"untie_embeddings_and_output_weights\": true}";

static json_t *args_of(const char *text)
{
    json_t *args = json_loads(text, 0, NULL);
    assert_non_null(args);
    return args;
}

static const struct mb_megatron_tensor *find(const struct mb_megatron_layout *l, const char *name)
{
    for (size_t i = 0; i < l->n; i++) {
        if (strcmp(l->tensors[i].name, name) == 0) {
            return &l->tensors[i];
        }
    }
    fail_msg("no tensor %s", name);
    return NULL;
}

static int make(json_t *args, struct mb_megatron_layout *l, struct mb_err *err)
{
    int rc = mb_megatron_args("here", args, err);
    if (rc == 0) {
        rc = mb_megatron_sizes("here", args, l, err);
    }
    return rc == 0 ? mb_megatron_layout_create("here", args, l, err) : rc;
}

/* Every element of the whole is of one rank, once; what is split by nobody is everybody's. */
static void parts_are_the_whole(void **state)
{
    (void)state;
    struct mb_megatron_layout l = {0};
    struct mb_err err = {0};
    json_t *args = args_of(ARGS);
    assert_int_equal(make(args, &l, &err), 0);
    for (size_t i = 0; i < l.n; i++) {
        const struct mb_megatron_tensor *t = &l.tensors[i];
        const uint64_t n = t->rows * (t->columns > 0 ? t->columns : 1);
        const struct mb_megatron_part p = mb_megatron_part(t, l.tp);
        const uint64_t ranks = t->split == MB_MEGATRON_WHOLE ? 1 : l.tp;
        uint8_t *seen = calloc(n, 1);
        assert_non_null(seen);
        assert_int_equal(p.n * ranks, n);
        assert_int_equal(p.shape[0] * (t->columns > 0 ? p.shape[1] : 1), p.n);
        for (uint64_t rank = 0; rank < ranks; rank++) {
            for (uint64_t e = 0; e < p.n; e++) {
                const uint64_t at = rank * p.run + e / p.run * p.stride + e % p.run;
                assert_true(at < n);
                assert_int_equal(seen[at]++, 0);
            }
        }
        free(seen);
    }
    mb_megatron_layout_close(&l);
    json_decref(args);
}

static void gates_and_values_are_split_each(void **state)
{
    (void)state;
    struct mb_megatron_layout l = {0};
    struct mb_err err = {0};
    json_t *args = args_of(ARGS);
    assert_int_equal(make(args, &l, &err), 0);
    assert_int_equal(l.ffn, 128); /* 4 * 48 * 2 / 3 in 64s */
    assert_int_equal(l.n_groups, 4);
    assert_int_equal(l.head_dim, 12);
    assert_true(json_is_integer(json_object_get(args, "rotary_base")));
    struct mb_megatron_part p =
        mb_megatron_part(find(&l, "decoder.layers.1.mlp.linear_fc1.weight"), 4);
    assert_int_equal(p.run, 32 * 48);
    assert_int_equal(p.stride, 128 * 48);
    assert_int_equal(p.shape[0], 64);
    p = mb_megatron_part(find(&l, "decoder.layers.1.mlp.linear_fc2.weight"), 4);
    assert_int_equal(p.run, 32);
    assert_int_equal(p.stride, 128);
    p = mb_megatron_part(find(&l, "decoder.layers.0.mlp.linear_fc2.bias"), 4);
    assert_int_equal(p.n, 48);
    p = mb_megatron_part(find(&l, "output_layer.weight"), 4);
    assert_int_equal(p.shape[0], 5);
    mb_megatron_layout_close(&l);
    json_decref(args);
}

static void what_is_not_provided_is_named(void **state)
{
    (void)state;
    static const struct {
        const char *field, *value;
        int rc;
        const char *text;
    } cases[] = {
        {"num_experts", "8", MB_EUNSUPPORTED, "num_experts"},
        {"window_size", "[128, 0]", MB_EUNSUPPORTED, "window_size"},
        {"multi_latent_attention", "true", MB_EUNSUPPORTED, "multi_latent_attention"},
        {"expert_model_parallel_size", "2", MB_EUNSUPPORTED, "expert"},
        {"num_layers", "0", MB_ECORRUPT, "num_layers"},
        {"hidden_size", "\"48\"", MB_ECORRUPT, "hidden_size"},
        {"num_attention_heads", "null", MB_ECORRUPT, "num_attention_heads"},
        {"pipeline_model_parallel_size", "1000", MB_EUNSUPPORTED, "more than 1024 ranks"},
        {"padded_vocab_size", "22", MB_EINVAL, "the 22 rows of tensor embedding.word_embeddings"},
        {"ffn_hidden_size", "30", MB_EINVAL, "mlp.linear_fc1.weight"},
        {"kv_channels", "4294967297", MB_ECORRUPT, "kv_channels"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct mb_megatron_layout l = {0};
        struct mb_err err = {0};
        json_t *args = args_of(ARGS);
        json_object_set_new(args, cases[i].field,
                            json_loads(cases[i].value, JSON_DECODE_ANY, NULL));
        assert_int_equal(make(args, &l, &err), cases[i].rc);
        assert_non_null(strstr(err.text, cases[i].text));
        mb_megatron_layout_close(&l);
        json_decref(args);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parts_are_the_whole),
        cmocka_unit_test(gates_and_values_are_split_each),
        cmocka_unit_test(what_is_not_provided_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
