/*
 * Ranks that share every sample: the sums of their losses and gradients are those of one rank with
 * whole samples (within 2e-6 of the largest of the tensor), dropout included. Each rank is a thread
 * with a device of its own.
 */
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "fixture.h"
#include "tests/unit/worker/comm_world.h"
#include "worker/model/gpt.h"

enum { RANKS_MAX = 4, N_SEQ = 24, N_SAMPLES = 2, N_VOCAB = 11, N_MICRO = 2 };
enum { N_TOKENS = N_SEQ * N_SAMPLES };

/* Of one rank after a step, for the test's thread. */
struct outcome {
    float *grads; /* to be freed */
    size_t n;
    double loss, n_tokens;
};

struct run {
    struct mb_gpt_config c;
    int32_t tokens[N_MICRO * N_TOKENS], labels[N_MICRO * N_TOKENS];
    float mask[N_MICRO * N_TOKENS];
    struct mb_device dev[RANKS_MAX]; /* opened before there are threads */
    struct outcome of[RANKS_MAX];
};

static atomic_int n_failed; /* of other threads, where cmocka cannot fail a test */

static int failed(int rc, const struct mb_err *err)
{
    if (rc != 0) {
        fprintf(stderr, "%s\n", err->text);
        n_failed++;
    }
    return rc != 0;
}

/* Two steps: the second sets what the first adds to zeros. */
static int train(struct run *r, struct mb_gpt *m, struct outcome *o, struct mb_err *err)
{
    for (int times = 0; times < 2; times++) {
        mb_gpt_zero_grads(m);
        for (size_t k = 0; k < N_MICRO; k++) {
            const struct mb_gpt_batch batch = {.tokens = r->tokens + k * N_TOKENS,
                                               .labels = r->labels + k * N_TOKENS,
                                               .loss_mask = k == 0 ? NULL : r->mask + k * N_TOKENS};
            const struct mb_gpt_step step = {.grad_scale = 0.125,
                                             .iteration = 17,
                                             .first_sample = k * N_SAMPLES,
                                             .is_last = k + 1 == N_MICRO};
            int rc = mb_gpt_forward_backward(m, &batch, &step, err);
            if (rc == 0 && times == 0)
                rc = mb_gpt_forward(m, &batch, err);
            if (rc != 0)
                return rc;
        }
        int rc = mb_gpt_take_loss(m, &o->loss, &o->n_tokens, err);
        if (rc != 0)
            return rc;
    }
    return 0;
}

static void rank_main(struct mb_comm *c, void *arg)
{
    struct run *r = arg;
    const uint32_t rank = c != NULL ? mb_comm_rank(c) : 0;
    struct outcome *o = &r->of[rank];
    struct mb_gpt_config config = r->c;
    struct mb_device *dev = &r->dev[rank];
    struct mb_gpt *m = NULL;
    struct mb_comm *ring = NULL;
    struct mb_err err = {0};
    int rc = c != NULL ? mb_comm_create_group(c, 0, 1, mb_comm_world_size(c), &ring, &err) : 0;
    config.context_group = ring;
    if (rc == 0)
        rc = mb_gpt_create(dev, &config, N_SAMPLES, &m, &err);
    if (rc == 0)
        rc = train(r, m, o, &err);
    if (rc == 0) {
        o->n = mb_gpt_n_elements(m);
        o->grads = mb_calloc(o->n, sizeof(*o->grads));
        dev->ops->copy_out(dev->ctx, dev->stream, o->grads, mb_gpt_grads(m),
                           o->n * sizeof(*o->grads));
        rc = dev->ops->synchronize(dev->ctx, dev->stream, &err);
    }
    failed(rc, &err);
    if (c != NULL) { /* nobody leaves whom another waits for */
        mb_comm_barrier(c);
        failed(mb_comm_synchronize(c, &err), &err);
    }
    mb_gpt_destroy(m);
    mb_comm_destroy(ring);
}

static void open_devices(struct run *r, uint32_t n)
{
    struct mb_err err = {0};
    for (uint32_t i = 0; i < n; i++)
        if (mb_backend_open(MOBULA_CPU_BACKEND, 0, &r->dev[i], &err) != 0)
            fail_msg("%s", err.text);
}

static void close_devices(struct run *r, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        mb_backend_close(&r->dev[i]);
}

static void fill(struct run *r, struct fixture *f)
{
    for (size_t i = 0; i < COUNT(r->tokens); i++) {
        r->tokens[i] = (int32_t)(random_unit(f) * N_VOCAB);
        r->labels[i] = (int32_t)(random_unit(f) * N_VOCAB);
        r->mask[i] = random_unit(f) < 0.7 ? 1.0f : 0.0f;
    }
}

/* Of the flat buffers, gaps included, which hold zeros. */
static void compare(const struct run *whole, const struct run *parts, uint32_t n)
{
    const struct outcome *want = &whole->of[0];
    double *expected = mb_calloc(want->n, sizeof(*expected));
    float *sum = mb_calloc(want->n, sizeof(*sum));
    double loss = 0, n_tokens = 0;
    assert_non_null(expected);
    assert_non_null(sum);
    for (size_t i = 0; i < want->n; i++)
        expected[i] = (double)want->grads[i];
    for (uint32_t r = 0; r < n; r++) {
        assert_int_equal(parts->of[r].n, want->n);
        for (size_t i = 0; i < want->n; i++)
            sum[i] += parts->of[r].grads[i];
        loss += parts->of[r].loss;
        n_tokens += parts->of[r].n_tokens;
    }
    assert_close("gradients", sum, expected, want->n, 2e-6);
    assert_true(n_tokens == want->n_tokens);
    assert_true(loss > 0 && fabs(loss - want->loss) < 1e-6 * want->loss);
    mb_free(expected);
    mb_free(sum);
}

static void check(struct fixture *f, const struct mb_gpt_config *c, uint32_t n, uint64_t tcp_only)
{
    struct run whole = {.c = *c}, parts;
    fill(&whole, f);
    parts = whole;
    open_devices(&whole, 1);
    open_devices(&parts, n);
    rank_main(NULL, &whole);
    struct comm_world w = {
        .n = n, .timeout_ms = 60000, .tcp_only = tcp_only, .body = rank_main, .arg = &parts};
    assert_int_equal(comm_world_run(&w), 0);
    assert_int_equal(atomic_load(&n_failed), 0);
    compare(&whole, &parts, n);
    close_devices(&parts, n);
    close_devices(&whole, 1);
    for (uint32_t r = 0; r < n; r++)
        mb_free(parts.of[r].grads);
    mb_free(whole.of[0].grads);
}

static struct mb_gpt_config model(void)
{
    struct mb_gpt_config c;
    mb_gpt_config_init(&c);
    c.n_layers = 2;
    c.hidden = 8;
    c.ffn_hidden = 12;
    c.n_heads = 4;
    c.seq = N_SEQ;
    c.max_positions = N_SEQ + 1;
    c.vocab = N_VOCAB;
    c.padded_vocab = 16;
    c.init_std = 0.3f;
    c.hidden_dropout = c.attention_dropout = 0.25f;
    return c;
}

static void test_rings(void **state)
{
    for (uint32_t n = 2; n <= RANKS_MAX; n++)
        for (int form = 0; form < 3; form++) {
            struct mb_gpt_config c = model();
            if (form == 1) {
                c.hidden_dropout = c.attention_dropout = 0;
                c.recompute_layers = 1;
            } else if (form == 2) {
                c.positions = MB_GPT_ROPE;
                c.norm = MB_GPT_RMSNORM;
                c.swiglu = c.untie_output = 1;
                c.n_groups = 2;
            }
            check(*state, &c, n, form == 0 ? ~0ULL : 0);
        }
}

static void refuse(struct mb_comm *c, void *arg)
{
    struct run *r = arg;
    struct mb_gpt_config config = r->c;
    struct mb_gpt *m = NULL;
    struct mb_err err = {0};
    config.seq = 22; /* 2 * 2 does not divide it */
    config.context_group = c;
    if (mb_gpt_create(&r->dev[mb_comm_rank(c)], &config, N_SAMPLES, &m, &err) != MB_EINVAL ||
        strstr(err.text, "seq-length should be a multiple of 2 * context-parallel-size") == NULL)
        n_failed++;
}

static void test_refusal(void **state)
{
    struct run r = {.c = model()};
    struct comm_world w = {.n = 2, .timeout_ms = 60000, .body = refuse, .arg = &r};
    (void)state;
    open_devices(&r, w.n);
    assert_int_equal(comm_world_run(&w), 0);
    assert_int_equal(atomic_load(&n_failed), 0);
    close_devices(&r, w.n);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FIXTURE_TEST(test_rings),
        FIXTURE_TEST(test_refusal),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
