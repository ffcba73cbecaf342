/* Every --model-preset is the published model: its parameters, counted, and its operations. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include "tests/unit/worker/args_line.h"
#include "worker/args_model.h"

/* The model of rank 0, whose vocabulary is padded as the tensor parallel size wants it. */
static void model_of(const char *preset, unsigned tensor, uint64_t vocab, struct mb_gpt_config *c)
{
    char line[400];
    struct mb_args a;
    struct mb_err err;
    snprintf(line, sizeof line,
             "--model-preset %s --seq-length 2048 --lr 1e-3 --mock-data --micro-batch-size 1 "
             "--train-iters 10 --distributed-backend gloo --tokenizer-type NullTokenizer "
             "--vocab-size %llu --tensor-model-parallel-size %u",
             preset, (unsigned long long)vocab - 1, tensor);
    assert_int_equal(validate_line(line, tensor, &a, &err), 0);
    a.padded_vocab_size = (int64_t)mb_gpt_padded_vocab(vocab, 128, tensor);
    mb_args_model(&a, vocab, c);
    c->n_tensor_parts = tensor; /* which is of a rank, not of the arguments */
    mb_args_close(&a);
}

static void each_has_its_parameters(void **state)
{
    (void)state;
    static const struct {
        const char *preset;
        unsigned tensor;
        uint64_t vocab;
        size_t count; /* on rank 0 */
    } MODELS[] = {
        {"gpt3-1.7b", 1, 51200, 1652230656},      {"gpt3-3.6b", 1, 51200, 3562168320},
        {"gpt3-7.5b", 1, 51200, 7467786240},      {"gpt3-7.5b", 8, 50257, 941594624},
        {"gpt3-18.4b", 1, 51200, 18449756160},    {"gpt3-39.1b", 1, 51200, 39096041472},
        {"gpt3-76.1b", 1, 51200, 76050739200},    {"gpt3-145.6b", 1, 51200, 145622261760},
        {"gpt3-310.1b", 1, 51200, 310130540544},  {"llama3.1-8b", 1, 128256, 8030261248},
        {"llama3.1-70b", 1, 128256, 70553706496}, {"llama3.1-70b", 8, 128256, 8821940224},
    };
    for (size_t i = 0; i < sizeof MODELS / sizeof MODELS[0]; i++) {
        struct mb_gpt_config c;
        struct mb_err err;
        size_t n = 0;
        model_of(MODELS[i].preset, MODELS[i].tensor, MODELS[i].vocab, &c);
        assert_int_equal(mb_gpt_count_parameters(&c, &n, &err), 0);
        if (n != MODELS[i].count) {
            fail_msg("%s over %u: %zu", MODELS[i].preset, MODELS[i].tensor, n);
        }
    }
}

/* 12 b s l h^2 ((1 + groups/heads + s/h) + 3/2 ffn/h + vocab/(2 l h)), Megatron-LM's count. */
static void operations_of_groups_and_gates_are_megatrons(void **state)
{
    (void)state;
    struct mb_gpt_config c;
    const double l = 32, h = 4096, s = 2048;
    const double want =
        12 * s * l * h * h * (1 + 8. / 32 + s / h + 1.5 * 14336 / h + 128256 / (2 * l * h));
    model_of("llama3.1-8b", 1, 128256, &c);
    assert_true(fabs(mb_gpt_flops_per_sample(&c) / want - 1) < 1e-12);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_has_its_parameters),
        cmocka_unit_test(operations_of_groups_and_gates_are_megatrons),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
