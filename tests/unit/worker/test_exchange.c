/* Parts become a whole and parts again, and no bit of them changes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include "base/alloc.h"
#include "comm_world.h"
#include "worker/checkpoint/exchange.h"

enum { RANKS = 3, ROWS = 3, WIDTH = 5, N = ROWS * WIDTH };

/* Columns 0 and 1, 2 and 3, 4 are a rank's. */
static const size_t begins[RANKS + 1] = {0, 2, 4, WIDTH};

/* Zeros of both signs, a signalling and a quiet NaN with a payload, the smallest and the largest
 * there are, side by side. */
static const uint32_t bits[N] = {0x80000000, 0x7fa00001, 0x00000000, 0x80000000, 0x80000000,
                                 0xffc12345, 0x00000001, 0x80000001, 0x7f7fffff, 0xff800000,
                                 0x80000000, 0xffffffff, 0x3f800000, 0xbf800000, 0x80000000};

static const struct mb_checkpoint_tensor whole = {
    .name = "w", .n_dims = 2, .shape = {ROWS, WIDTH}, .n = N};

struct seen {
    int n_wrong;
};

static void on_rank(struct mb_comm *c, void *arg)
{
    const uint32_t rank = (uint32_t)mb_comm_rank(c);
    const size_t run = begins[rank + 1] - begins[rank];
    const struct mb_checkpoint_part part = {
        .n = run * ROWS, .start = begins[rank], .run = run, .stride = WIDTH};
    const struct mb_checkpoint_layout layout = {
        .parts = &part, .n_elements = part.n, .end = part.n};
    const struct mb_checkpoint_model m = {
        .comm = c, .tensors = &whole, .n_tensors = 1, .n_elements = N, .layout = &layout};
    float own[N], all[N], back[N];
    struct seen *seen = arg;
    struct mb_err err;
    float *window = mb_alloc(MB_EXCHANGE_WINDOW * sizeof *window);

    for (size_t i = 0; i < part.n; i++)
        memcpy(&own[i], &bits[part.start + i / run * WIDTH + i % run], sizeof *own);
    const struct mb_exchange_side parts = {own, 0, part.n, 1, NULL, NULL};
    const struct mb_exchange_side wholes = {all, 0, N, 0, NULL, NULL};
    const struct mb_exchange_side nothing = {NULL, 0, 0, 0, NULL, NULL};
    const struct mb_exchange_side backs = {back, 0, part.n, 1, NULL, NULL};
    int wrong = mb_checkpoint_exchange(&m, c, &parts, &wholes, window, &err) != 0 ||
                memcmp(all, bits, sizeof bits) != 0;
    wrong +=
        mb_checkpoint_exchange(&m, c, rank == 1 ? &wholes : &nothing, &backs, window, &err) != 0 ||
        memcmp(back, own, part.n * sizeof *own) != 0;
    mb_free(window);
    __atomic_add_fetch(&seen->n_wrong, wrong, __ATOMIC_SEQ_CST);
}

static void no_bit_changes(void **state)
{
    struct seen seen = {0};
    const struct comm_world w = {.n = RANKS, .timeout_ms = 30000, .body = on_rank, .arg = &seen};

    (void)state;
    assert_int_equal(comm_world_run(&w), 0);
    assert_int_equal(seen.n_wrong, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(no_bit_changes)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
