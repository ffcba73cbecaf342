/* Whose sizes a weighted blend has when a run goes on. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "tests/unit/worker/args_line.h"
#include "worker/args.h"

#define OURS "\"eval_at_start\": false, \"ckpt_format\": \"torch\""
#define ELSE "samples come in another order from here on, some of them again, some never"

static const char UNKNOWN[] = "WARNING: the checkpoint does not say which sizes its run's weighted "
                              "blend had: it has those of core 0.11 now; if they were those of "
                              "0.10, " ELSE ": give --blend-sizes 0.10\n";
static const char AS_BEFORE[] = "note: the weighted blend has the sizes of Megatron-LM core 0.10, "
                                "as the checkpoint's run had them\n";

static const struct {
    const char *line, *json, *sizes,
        *notes; /* notes: of a weighted blend; without one there are none */
} CASES[] = {
    /* ours */
    {"", "{\"blend_sizes\": \"0.11\", " OURS "}", "0.11", ""},
    {"", "{\"blend_sizes\": \"0.10\", " OURS "}", "0.10", AS_BEFORE},
    {"--blend-sizes 0.10", "{\"blend_sizes\": \"0.10\", " OURS "}", "0.10", ""},
    {"--blend-sizes 0.11", "{\"blend_sizes\": \"0.10\", " OURS "}", "0.11",
     "WARNING: --blend-sizes 0.11: the checkpoint's run had those of core 0.10: " ELSE "\n"},
    /* ours, of before there was the argument */
    {"", "{" OURS "}", NULL, UNKNOWN},
    {"--blend-sizes 0.11", "{" OURS "}", "0.11", ""},
    {"", "{\"blend_sizes\": \"1\", " OURS "}", NULL, UNKNOWN},
    /* Megatron-LM's: core 0.8, 0.10, 0.12, 0.16 */
    {"", "{\"num_layers\": 2}", "0.10", AS_BEFORE},
    {"", "{\"renormalize_blend_weights\": false, \"ckpt_format\": \"torch\"}", "0.10", AS_BEFORE},
    {"", "{\"ckpt_format\": \"torch\"}", "0.11", ""},
    {"", "{\"ckpt_format\": \"torch\", \"mid_level_dataset_surplus\": 0.005}", "0.11", ""},
    {"--blend-sizes 0.10", "{\"ckpt_format\": \"torch\"}", "0.10",
     "WARNING: --blend-sizes 0.10: the checkpoint's run had those of core 0.11: " ELSE "\n"},
    {"--blend-sizes 0.10", "{\"renormalize_blend_weights\": true}", "0.10",
     "WARNING: the checkpoint's run had --renormalize-blend-weights, which is not provided: " ELSE
     "\n"},
    {"", "{\"ckpt_format\": \"torch\", \"mid_level_dataset_surplus\": 0.05}", "0.11",
     "WARNING: the checkpoint's run had --mid-level-dataset-surplus 0.05, here it is 0.005: if "
     "that "
     "changes how many epochs of a prefix are read, " ELSE "\n"},
};

static void the_run_that_goes_on_has_those_of_before(void **state)
{
    (void)state;
    for (size_t i = 0; i < 2 * (sizeof CASES / sizeof CASES[0]); i++) {
        const int is_weighted = i % 2 == 0;
        struct mb_buf notes = {0};
        struct mb_args a;
        struct mb_err err;
        assert_int_equal(parse_line(CASES[i / 2].line, &a, &err), 0);
        assert_int_equal(mb_args_settle_blend(&a, CASES[i / 2].json, is_weighted, &notes, &err), 0);
        const char *want = CASES[i / 2].sizes;
        if (want == NULL ? a.blend_sizes != NULL : strcmp(a.blend_sizes, want) != 0) {
            fail_msg("case %zu: %s", i / 2, a.blend_sizes);
        }
        assert_string_equal(mb_buf_str(&notes), is_weighted ? CASES[i / 2].notes : "");
        mb_buf_close(&notes);
        mb_args_close(&a);
    }
}

static void memory_may_end_anywhere(void **state)
{
    (void)state;
    for (unsigned long nth = 1;; nth++) {
        struct mb_buf notes = {0};
        struct mb_args a;
        struct mb_err err;
        assert_int_equal(parse_line("", &a, &err), 0);
        mb_alloc_fail_nth(nth);
        int rc = mb_args_settle_blend(&a, "{\"renormalize_blend_weights\": true}", 1, &notes, &err);
        int failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        mb_buf_close(&notes);
        mb_args_close(&a);
        assert_int_equal(rc, failed ? MB_ENOMEM : 0);
        if (!failed) {
            break;
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_run_that_goes_on_has_those_of_before),
        cmocka_unit_test(memory_may_end_anywhere),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
