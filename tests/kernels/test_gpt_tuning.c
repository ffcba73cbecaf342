/*
 * Products that come the first time are timed on GPUs: nothing else may run on the device
 * meanwhile. In the first pass of each kind no product may run beside an operation of a group; in
 * later ones some do. Groups here count and move nothing.
 */
#include "fixture.h"

#include <string.h>
#include "worker/model/gpt.h"
#include "worker/parallel/comm_impl.h"

enum { SAMPLES = 2, SEQ = 16, TOKENS = SAMPLES * SEQ, VOCAB = 16 };

static struct {
    const struct mb_backend *inner;
    uint64_t n_started, n_before; /* operations of the group, and of those that come before what is
                                     enqueued next */
    size_t n_beside;              /* products that were enqueued meanwhile */
    size_t n_products;
} seen;

/* ---- groups ---- */

static void group_enqueue(struct mb_comm *c, struct mb_device *dev, const struct mb_comm_op *op)
{
    (void)dev;
    (void)op;
    seen.n_started = ++c->n_started;
}

static void group_exchange(struct mb_comm *c, struct mb_device *dev, const struct mb_comm_op *ops,
                           size_t n)
{
    (void)n;
    group_enqueue(c, dev, ops);
}

static int group_synchronize(struct mb_comm *c, struct mb_err *err)
{
    (void)err;
    seen.n_before = c->n_started;
    return 0;
}

static void group_join(struct mb_comm *c, struct mb_device *dev, uint64_t n_ops)
{
    (void)c;
    (void)dev;
    seen.n_before = n_ops > seen.n_before ? n_ops : seen.n_before;
}

static const struct mb_comm_vtable GROUP = {.enqueue = group_enqueue,
                                            .synchronize = group_synchronize,
                                            .peek = group_synchronize,
                                            .join = group_join,
                                            .exchange = group_exchange};

/* ---- the device ---- */

static void see_product(void)
{
    seen.n_products++;
    seen.n_beside += seen.n_before < seen.n_started;
}

static void linear_forward(struct mb_context *ctx, struct mb_stream *s,
                           const struct mb_linear_forward *a)
{
    see_product();
    seen.inner->linear_forward(ctx, s, a);
}

static void linear_backward(struct mb_context *ctx, struct mb_stream *s,
                            const struct mb_linear_backward *a)
{
    see_product();
    seen.inner->linear_backward(ctx, s, a);
}

/* ---- the passes ---- */

static size_t n_beside(void)
{
    const size_t n = seen.n_beside;
    assert_true(seen.n_products > 0);
    seen.n_beside = seen.n_products = 0;
    return n;
}

static size_t forward(struct mb_gpt *m, const struct mb_gpt_step *step)
{
    static const int32_t IDS[TOKENS + 1];
    const struct mb_gpt_batch batch = {.tokens = IDS, .labels = IDS + 1};
    struct mb_err err = {0};
    if (mb_gpt_stage_forward(m, (struct mb_gpt_place){0}, &batch, step, &err) != 0)
        fail_msg("%s", err.text);
    return n_beside();
}

/* Behind a forward pass. */
static size_t backward(struct mb_gpt *m)
{
    const struct mb_gpt_step step = {.grad_scale = 1.0 / TOKENS, .iteration = 1};
    (void)forward(m, &step);
    mb_gpt_stage_backward(m, (struct mb_gpt_place){0}, &step);
    return n_beside();
}

static void check(struct fixture *f, struct mb_gpt_config c)
{
    static const struct mb_collectives SOME; /* as a GPU has them */
    struct mb_gpt *m = NULL;
    struct mb_err err = {0};
    const struct mb_backend *own = f->dev.ops;
    struct mb_backend table = *own;
    memset(&seen, 0, sizeof(seen));
    seen.inner = own;
    table.collectives = &SOME;
    table.linear_forward = linear_forward;
    table.linear_backward = linear_backward;
    f->dev.ops = &table;
    if (mb_gpt_create(&f->dev, &c, SAMPLES, &m, &err) != 0)
        fail_msg("%s", err.text);
    assert_int_equal(forward(m, NULL), 0);
    assert_true(forward(m, NULL) > 0 || c.context_group != NULL); /* whose ring turns elsewhere */
    mb_gpt_zero_grads(m);
    assert_int_equal(backward(m), 0); /* sets gradients */
    assert_int_equal(backward(m), 0); /* adds to them */
    assert_true(backward(m) > 0);
    mb_gpt_zero_grads(m);
    assert_true(backward(m) > 0);
    mb_gpt_destroy(m);
    f->dev.ops = own;
}

static struct mb_gpt_config model(void)
{
    struct mb_gpt_config c;
    mb_gpt_config_init(&c);
    c.n_layers = 2;
    c.hidden = 16;
    c.n_heads = 4;
    c.seq = c.max_positions = SEQ;
    c.vocab = c.padded_vocab = VOCAB;
    return c;
}

static void test_ranks_that_share_a_model(void **state)
{
    for (int sequence = 0; sequence < 2; sequence++) {
        struct mb_comm group = {.v = &GROUP, .rank = 0, .world_size = 2};
        struct mb_gpt_config c = model();
        c.tensor_group = &group;
        c.n_strips = 2;
        c.sequence_parallel = sequence;
        check(*state, c);
    }
}

static void test_ranks_that_share_samples(void **state)
{
    struct mb_comm group = {.v = &GROUP, .rank = 0, .world_size = 2};
    struct mb_gpt_config c = model();
    c.context_group = &group;
    check(*state, c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FIXTURE_TEST(test_ranks_that_share_a_model),
        FIXTURE_TEST(test_ranks_that_share_samples),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
