/*
 * What would fit. Candidates are the arguments with little changed, measured by the same plan, in
 * the order of what a change costs:
 *
 *  1. one change: a smaller micro batch (the largest that fits), full recompute, the distributed
 *     optimizer; each that fits is told;
 *  2. if none does: all of them together, with the largest micro batch that fits;
 *  3. the model over more ranks of the same gang: the smallest tensor or pipeline parallel size;
 *  4. if nothing fits so far: over a gang of more ranks, as many on a node as now.
 * A candidate that Megatron-LM's rules forbid is no candidate. Of what does not fit the least is
 * remembered, to be told if nothing fits.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include "base/str.h"
#include "worker/memory_plan.h"

enum { MAX_GROWTH = 1024, MAX_TENSOR = 8, CHANGES_MAX = 256 };

struct search {
    const struct mb_plan_gang *g;
    const struct mb_args *a;
    const struct mb_plan_room *room;
    struct mb_buf *out;
    int n_told, rc;
    double least_bytes;
    char least[CHANGES_MAX];
};

struct change {
    int64_t micro_batch, tensor, pipeline;
    int recompute, zero;
    uint32_t world_size;
};

static struct change none(const struct search *s)
{
    return (struct change){s->a->micro_batch_size,
                           s->a->tensor_model_parallel_size,
                           s->a->pipeline_model_parallel_size,
                           0,
                           0,
                           s->g->world_size};
}

static int recomputes_all(const struct mb_args *a)
{
    return a->recompute_granularity != NULL && strcmp(a->recompute_granularity, "full") == 0 &&
           strcmp(a->recompute_method, "uniform") == 0;
}

/* Strings are borrowed: *out is only measured. 0: no such run. */
static int apply(const struct search *s, const struct change *c, struct mb_args *out)
{
    static char full[] = "full", uniform[] = "uniform";
    const int64_t model = c->tensor * c->pipeline * s->a->context_parallel_size;
    *out = *s->a;
    if (c->world_size % model != 0) {
        return 0;
    }
    out->micro_batch_size = c->micro_batch;
    out->tensor_model_parallel_size = c->tensor;
    out->pipeline_model_parallel_size = c->pipeline;
    out->data_parallel_size = c->world_size / model;
    out->use_distributed_optimizer |= c->zero;
    if (c->recompute) {
        out->recompute_granularity = full;
        out->recompute_method = uniform;
    }
    if (s->a->checkpoint_padded_vocab_size <= 0) {
        out->padded_vocab_size = (int64_t)mb_gpt_padded_vocab(
            s->g->vocab_size, (size_t)s->a->make_vocab_size_divisible_by, (size_t)c->tensor);
    }
    return s->a->global_batch_size % (c->micro_batch * out->data_parallel_size) == 0;
}

static void describe(const struct search *s, const struct change *c, char out[CHANGES_MAX])
{
    const struct mb_args *a = s->a;
    struct mb_buf b = {0};
    int rc = 0;
    if (c->micro_batch != a->micro_batch_size) {
        rc |= mb_buf_printf(&b, " --micro-batch-size %" PRId64, c->micro_batch);
    }
    if (c->recompute) {
        rc |= mb_buf_printf(&b, " --recompute-granularity full --recompute-method uniform "
                                "--recompute-num-layers 1");
    }
    if (c->zero) {
        rc |= mb_buf_printf(&b, " --use-distributed-optimizer");
    }
    if (c->tensor != a->tensor_model_parallel_size) {
        rc |= mb_buf_printf(&b, " --tensor-model-parallel-size %" PRId64, c->tensor);
    }
    if (c->pipeline != a->pipeline_model_parallel_size) {
        rc |= mb_buf_printf(&b, " --pipeline-model-parallel-size %" PRId64, c->pipeline);
    }
    if (c->world_size != s->g->world_size) {
        rc |= mb_buf_printf(&b, " on %" PRIu32 " ranks", c->world_size);
    }
    snprintf(out, CHANGES_MAX, "%s", rc == 0 ? mb_buf_str(&b) : " (out of memory)");
    mb_buf_close(&b);
}

static double bytes_of(const struct search *s, const struct mb_plan_room *need)
{
    return need->device_bytes > s->room->device_bytes || s->room->device_bytes > 0
               ? need->device_bytes
               : need->host_bytes;
}

/* Whether it fits; then it is told. */
static int try(struct search *s, const struct change *c)
{
    struct mb_args a;
    struct mb_plan_room need;
    struct mb_plan_gang g = *s->g;
    struct mb_err ignored; /* of a layout that the model cannot have */
    char words[CHANGES_MAX], size[16];
    g.world_size = c->world_size;
    if (!apply(s, c, &a) || mb_plan_need(&g, &a, &need, NULL, &ignored) != 0) {
        return 0;
    }
    describe(s, c, words);
    if (!mb_plan_fits(&need, s->room)) {
        if (s->least[0] == '\0' || bytes_of(s, &need) < s->least_bytes) {
            s->least_bytes = bytes_of(s, &need);
            memcpy(s->least, words, sizeof words);
        }
        return 0;
    }
    s->rc |= mb_buf_printf(s->out, "%s%s (%s)", s->n_told++ == 0 ? "would fit:" : ";", words,
                           mb_human_bytes((uint64_t)bytes_of(s, &need), size));
    return 1;
}

/* The largest micro batch below `limit`, everything else as in *c. */
static int try_micro_batches(struct search *s, struct change c, int64_t limit)
{
    for (c.micro_batch = limit; c.micro_batch > 0; c.micro_batch--) {
        if (s->a->global_batch_size % c.micro_batch == 0 && try(s, &c)) {
            return 1;
        }
    }
    return 0;
}

/* All changes that a gang of the same layout can make. */
static struct change all(const struct search *s)
{
    struct change c = none(s);
    c.recompute = !recomputes_all(s->a);
    c.zero = !s->a->use_distributed_optimizer &&
             (s->a->data_parallel_size > 1 || s->a->context_parallel_size > 1);
    return c;
}

static void try_one_change(struct search *s)
{
    struct change c;
    (void)try_micro_batches(s, none(s), s->a->micro_batch_size - 1);
    c = none(s);
    c.recompute = all(s).recompute;
    (void)(c.recompute && try(s, &c));
    c = none(s);
    c.zero = all(s).zero;
    (void)(c.zero && try(s, &c));
}

/* The model over `more` times as many ranks. */
static int try_layouts(struct search *s, struct change c, int64_t more)
{
    for (int64_t t = more; t > 0; t /= 2) { /* by heads, then by layers */
        struct change d = c;
        d.tensor = s->a->tensor_model_parallel_size * t;
        d.pipeline = s->a->pipeline_model_parallel_size * (more / t);
        if ((t == 1 || d.tensor <= MAX_TENSOR) && try(s, &d)) {
            return 1;
        }
    }
    return 0;
}

static int try_same_gang(struct search *s, struct change c)
{
    for (int64_t more = 2; more <= (int64_t)s->g->world_size; more *= 2) {
        if (try_layouts(s, c, more)) {
            return 1;
        }
    }
    return 0;
}

static void try_larger_gangs(struct search *s)
{
    struct change plain = none(s), c = all(s);
    c.micro_batch = 1;
    for (int64_t more = 2; more <= MAX_GROWTH; more *= 2) {
        if (s->g->world_size > UINT32_MAX / more) {
            return;
        }
        plain.world_size = c.world_size = s->g->world_size * (uint32_t)more;
        if (try_layouts(s, plain, more) || try_layouts(s, c, more)) {
            return;
        }
    }
}

int mb_plan_advise(const struct mb_plan_gang *g, const struct mb_args *a,
                   const struct mb_plan_room *room, struct mb_buf *out)
{
    struct search s = {.g = g, .a = a, .room = room, .out = out};
    char size[16];
    try_one_change(&s);
    if (s.n_told == 0) {
        (void)try_micro_batches(&s, all(&s), a->micro_batch_size);
    }
    if (!try_same_gang(&s, none(&s)) && s.n_told == 0) {
        struct change c = all(&s);
        c.micro_batch = 1;
        (void)try_same_gang(&s, c);
    }
    if (s.n_told == 0) {
        try_larger_gangs(&s);
    }
    if (s.n_told == 0) {
        s.rc |= mb_buf_printf(
            out, "nothing near would fit; the least is %s with%s",
            mb_human_bytes(s.least_bytes < 0x1p63 ? (uint64_t)s.least_bytes : UINT64_MAX, size),
            s.least[0] != '\0' ? s.least : " these arguments");
    }
    return s.rc;
}
