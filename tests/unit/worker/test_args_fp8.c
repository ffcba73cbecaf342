/* Megatron's arguments of FP8: what is taken, what is noted, what is refused, and where. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include "base/alloc.h"
#include "worker/args_model.h"

#define MODEL                                                                                      \
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "                     \
    "--max-position-embeddings 32 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "           \
    "--vocab-size 100 --micro-batch-size 2 --train-iters 10 "
#define GPU MODEL "--distributed-backend nccl --bf16 --accumulate-allreduce-grads-in-fp32 "

static int validate(const char *line, struct mb_args *a, struct mb_err *err)
{
    char *text = mb_strdup(line);
    const char *argv[128];
    int argc = 0;
    assert_non_null(text);
    for (char *w = strtok(text, " "); w != NULL; w = strtok(NULL, " ")) {
        argv[argc++] = w;
    }
    mb_err_clear(err);
    int rc = mb_args_parse(a, argc, argv, err);
    mb_free(text);
    return rc == 0 ? mb_args_validate(a, 0, 1, err) : rc;
}

static void the_model_is_told(void **state)
{
    (void)state;
    static const struct {
        const char *line;
        enum mb_gpt_fp8 fp8;
        int margin;
    } GIVEN[] = {{GPU, MB_GPT_NO_FP8, 0},
                 {GPU "--fp8-format hybrid", MB_GPT_FP8_HYBRID, 0},
                 {GPU "--fp8-format e4m3 --fp8-margin 2", MB_GPT_FP8_E4M3, 2}};
    for (size_t i = 0; i < sizeof GIVEN / sizeof GIVEN[0]; i++) {
        struct mb_args a;
        struct mb_err err;
        struct mb_gpt_config c;
        assert_int_equal(validate(GIVEN[i].line, &a, &err), 0);
        assert_string_equal(mb_buf_str(&a.notes), "");
        mb_args_model(&a, 100, &c);
        assert_int_equal(c.fp8, GIVEN[i].fp8);
        assert_int_equal(c.fp8_margin, GIVEN[i].margin);
        mb_args_close(&a);
    }
}

/* As Megatron-LM's Llama-3 example says it. */
static void what_has_no_effect_is_a_line_each(void **state)
{
    (void)state;
    struct mb_args a;
    struct mb_err err;
    assert_int_equal(validate(GPU "--fp8-format hybrid --fp8-amax-history-len 1024 "
                                  "--fp8-amax-compute-algo max --fp8-param-gather --fp8-interval 2 "
                                  "--fp8-recipe delayed",
                              &a, &err),
                     0);
    static const char *const NAMES[] = {"--fp8-recipe", "--fp8-interval", "--fp8-amax-history-len",
                                        "--fp8-amax-compute-algo", "--fp8-param-gather"};
    const char *at = mb_buf_str(&a.notes);
    for (size_t i = 0; i < sizeof NAMES / sizeof NAMES[0]; i++) {
        assert_int_equal(strncmp(at, "note: ", 6), 0);
        assert_int_equal(strncmp(at + 6, NAMES[i], strlen(NAMES[i])), 0);
        at = strchr(at, '\n') + 1;
    }
    assert_string_equal(at, "");
    mb_args_close(&a);
    assert_int_equal(validate(GPU "--fp8-amax-history-len 1 --fp8-recipe tensorwise", &a, &err), 0);
    assert_string_equal(mb_buf_str(&a.notes), "");
    mb_args_close(&a);
}

static void what_cannot_be_is_refused(void **state)
{
    (void)state;
    static const struct {
        const char *line, *text;
        int code;
    } BAD[] = {
        {MODEL "--distributed-backend gloo --bf16 --fp8-format hybrid",
         "--fp8-format hybrid: FP8 needs a GPU of compute capability 8.9 or higher; "
         "--distributed-backend gloo computes on the CPU",
         MB_EUNSUPPORTED},
        {MODEL "--distributed-backend nccl --fp8-format e4m3",
         "--fp8-format e4m3 needs --bf16, for all that is not in FP8", MB_EINVAL},
        {MODEL "--distributed-backend nccl --fp16 --fp8-format e4m3",
         "--fp8-format e4m3 needs --bf16, for all that is not in FP8", MB_EINVAL},
        {GPU "--fp8-format hybrid --fp8-margin 65", "fp8-margin is 65: it must be from -64 to 64",
         MB_EINVAL},
        {GPU "--no-fp8-wgrad",
         "--no-fp8-wgrad: not provided by this version; gradients of weights are formed in fp8, "
         "too",
         MB_EUNSUPPORTED},
        {GPU "--fp8-format e5m2",
         "error: argument --fp8-format: invalid choice: 'e5m2' (choose from 'e4m3', 'hybrid')",
         MB_EINVAL},
    };
    for (size_t i = 0; i < sizeof BAD / sizeof BAD[0]; i++) {
        struct mb_args a;
        struct mb_err err;
        assert_int_equal(validate(BAD[i].line, &a, &err), BAD[i].code);
        assert_string_equal(err.text, BAD[i].text);
        mb_args_close(&a);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_model_is_told),
                                       cmocka_unit_test(what_has_no_effect_is_a_line_each),
                                       cmocka_unit_test(what_cannot_be_is_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
