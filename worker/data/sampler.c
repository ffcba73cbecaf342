/*
 * 1. single: a position that moves micro_batch_size * dp_size on; the rank's slice of it is the
 *    batch. Less than a whole step left: MB_ESTATE.
 * 2. cyclic: the epoch's permutation is made when the epoch begins (or when a resumed run enters
 * it) and walked to its end; a rest that fills no batch is dropped and the next epoch begins, where
 *    consumed_samples says.
 * Bad counts are MB_EINVAL at creation; memory out while an epoch begins leaves the position as it
 * was.
 */
#include <assert.h>
#include <string.h>
#include "base/alloc.h"
#include "worker/data/random.h"
#include "worker/data/sampler.h"

struct mb_sampler {
    struct mb_sampler_options o;
    uint64_t step; /* micro_batch_size * dp_size */
    /* cyclic */
    uint32_t *order; /* this epoch's permutation; NULL before the first batch of an epoch */
    uint64_t n_order;
    uint64_t next;   /* position in order */
    uint64_t stride; /* between this rank's positions */
    uint64_t base;   /* added to what order says */
};

int mb_sampler_type_parse(const char *s, enum mb_sampler_type *out, struct mb_err *err)
{
    if (strcmp(s, "single") == 0)
        *out = MB_SAMPLER_SINGLE;
    else if (strcmp(s, "cyclic") == 0)
        *out = MB_SAMPLER_CYCLIC;
    else
        return mb_err_set(err, MB_EINVAL,
                          "--dataloader-type %s is not provided (choose from single, cyclic)", s);
    return 0;
}

static int check_options(const struct mb_sampler_options *o, struct mb_err *err)
{
    uint64_t step = (uint64_t)o->micro_batch_size * o->dp_size;
    uint64_t active;

    if (step == 0 || o->dp_rank >= o->dp_size)
        return mb_err_set(err, MB_EINVAL,
                          "micro batch size %u, data-parallel rank %u of %u: not possible",
                          o->micro_batch_size, o->dp_rank, o->dp_size);
    if (o->type == MB_SAMPLER_SINGLE && o->consumed_samples >= o->n_samples)
        return mb_err_set(err, MB_EINVAL, "no samples left to consume: %llu consumed of %llu",
                          (unsigned long long)o->consumed_samples,
                          (unsigned long long)o->n_samples);
    if (o->type == MB_SAMPLER_SINGLE)
        return 0;
    active = o->n_samples - o->n_samples % step;
    if (active == 0)
        return mb_err_set(
            err, MB_EINVAL,
            "the data set has %llu samples, a micro batch on every data-parallel rank "
            "needs %llu (%u times %u); use more data or a smaller --micro-batch-size",
            (unsigned long long)o->n_samples, (unsigned long long)step, o->micro_batch_size,
            o->dp_size);
    if (o->consumed_samples % active % step != 0)
        return mb_err_set(
            err, MB_EINVAL,
            "%llu consumed samples do not end on a whole micro batch of all ranks (%llu "
            "samples); resume with the batch and data-parallel sizes of the checkpoint",
            (unsigned long long)o->consumed_samples, (unsigned long long)step);
    return 0;
}

int mb_sampler_create(const struct mb_sampler_options *o, struct mb_sampler **out,
                      struct mb_err *err)
{
    struct mb_sampler *s;
    int rc = check_options(o, err);

    if (rc != 0)
        return rc;
    s = mb_calloc(1, sizeof(*s));
    if (s == NULL)
        return mb_err_set(err, MB_ENOMEM, "sampler: out of memory");
    s->o = *o;
    s->step = (uint64_t)o->micro_batch_size * o->dp_size;
    *out = s;
    return 0;
}

void mb_sampler_destroy(struct mb_sampler *s)
{
    if (s == NULL)
        return;
    mb_free(s->order);
    mb_free(s);
}

static int next_single(struct mb_sampler *s, uint64_t *out, struct mb_err *err)
{
    uint64_t first = s->o.consumed_samples + (uint64_t)s->o.dp_rank * s->o.micro_batch_size;

    if (s->o.n_samples - s->o.consumed_samples < s->step)
        return mb_err_set(err, MB_ESTATE, "no samples left to consume: %llu consumed of %llu",
                          (unsigned long long)s->o.consumed_samples,
                          (unsigned long long)s->o.n_samples);
    for (uint32_t i = 0; i < s->o.micro_batch_size; i++)
        out[i] = first + i;
    s->o.consumed_samples += s->step;
    return 0;
}

/* MegatronPretrainingRandomSampler.__iter__ up to its first batch. */
static int begin_epoch(struct mb_sampler *s, struct mb_err *err)
{
    uint64_t mbs = s->o.micro_batch_size;
    uint64_t active = s->o.n_samples - s->o.n_samples % s->step;
    uint64_t epoch = s->o.consumed_samples / active;
    uint64_t at = s->o.consumed_samples % active;
    uint64_t bucket = s->o.n_samples / s->step * mbs;
    int rc;

    s->n_order = s->o.no_data_sharding ? s->o.n_samples / mbs * mbs : bucket;
    s->stride = s->o.no_data_sharding ? s->o.dp_size : 1;
    s->next = s->o.no_data_sharding ? at + s->o.dp_rank : at / s->o.dp_size;
    s->base = s->o.no_data_sharding ? 0 : s->o.dp_rank * bucket;
    s->order = mb_reallocarray(NULL, (size_t)s->n_order, sizeof(*s->order));
    if (s->order == NULL)
        return mb_err_set(err, MB_ENOMEM, "the order of an epoch: out of memory");
    /* torch seeds its generator with the low 32 bits. */
    rc = mb_randperm((uint32_t)epoch, s->n_order, s->order, err);
    if (rc != 0) {
        mb_free(s->order);
        s->order = NULL;
    }
    return rc;
}

static int has_batch(const struct mb_sampler *s)
{
    uint64_t last = s->next + (s->o.micro_batch_size - 1) * s->stride;

    return s->order != NULL && last < s->n_order;
}

static int next_cyclic(struct mb_sampler *s, uint64_t *out, struct mb_err *err)
{
    if (!has_batch(s)) {
        int rc;
        mb_free(s->order);
        s->order = NULL;
        rc = begin_epoch(s, err);
        if (rc != 0)
            return rc;
        assert(has_batch(s)); /* an epoch begins at a whole step before its active end */
    }
    for (uint32_t i = 0; i < s->o.micro_batch_size; i++) {
        out[i] = s->base + s->order[s->next];
        s->next += s->stride;
    }
    s->o.consumed_samples += s->step;
    return 0;
}

int mb_sampler_next(struct mb_sampler *s, uint64_t *out, struct mb_err *err)
{
    if (s->o.type == MB_SAMPLER_SINGLE)
        return next_single(s, out, err);
    return next_cyclic(s, out, err);
}

uint64_t mb_sampler_consumed(const struct mb_sampler *s)
{
    return s->o.consumed_samples;
}
