/*
 * Gradients of all ranks with the same part of the model become one sum.
 *
 *  1. Without --overlap-grad-reduce: one operation over the whole buffer after the backward pass,
 *     a reduce-scatter where each rank updates its range only, else an all-reduce.
 *  2. With it: during the last micro batch's backward pass the model says which gradients are
 *     final; they gather into buckets, and a bucket is reduced while the pass goes on. With the
 *     distributed optimizer a rank's range is one stretch of the whole buffer, so that a bucket has
 *     one owner or two: each part is reduced to its owner. While products are being tuned each
 *     bucket is waited for, as nothing may run beside them.
 *  3. An embedding that the pipeline's first and last stage have both is one parameter: its
 *     gradients, which are all-reduced in any case, are summed over the two stages behind that. So
 *     both stages have the same bits, and make the same weights of them.
 *  4. With --grad-reduce-in-bf16 what travels and is summed in 1 and 2 are gradients rounded to
 *     bf16, from a buffer of their own; the sum is widened before 3, which is fp32 in any case.
 *  5. All end with this rank's share of the squared norm.
 * Failures are the communicator's, which keeps them until it is waited for.
 */
#include "worker/trainer.h"

/* Of the flat buffer, from its start on: the embedding that another stage has, too. */
static size_t tied_elements(const struct mb_trainer *t)
{
    size_t n = 0;
    return t->tied_comm != NULL ? mb_gpt_params(t->gpt, &n)->n : 0;
}

/* Gradients [begin, end) as they are summed. */
static void *summed(struct mb_trainer *t, size_t begin, size_t end, enum mb_comm_type *type)
{
    float *grads = mb_gpt_grads(t->gpt);
    *type = t->grads_bf16 != NULL ? MB_COMM_BF16 : MB_COMM_F32;
    if (t->grads_bf16 == NULL) {
        return grads + begin;
    }
    t->dev.ops->to_bf16(t->dev.ctx, t->dev.stream, t->grads_bf16 + begin, grads + begin,
                        end - begin);
    return t->grads_bf16 + begin;
}

static void sum_on_all(struct mb_trainer *t, size_t begin, size_t end)
{
    enum mb_comm_type type;
    void *p = summed(t, begin, end, &type);
    mb_comm_allreduce(t->dp_comm, &t->dev, p, end - begin, type, MB_COMM_SUM);
}

static void reduce_range(struct mb_trainer *t, size_t begin, size_t end)
{
    const size_t tied_end = tied_elements(t);
    size_t whole_end = !t->args.use_distributed_optimizer ? end : tied_end;
    if (begin < whole_end) { /* the tied embedding comes as a whole: with the buffer's first part */
        whole_end = whole_end < end ? whole_end : end;
        sum_on_all(t, begin, whole_end);
        begin = whole_end;
    }
    for (uint32_t r = t->dp_size; r-- > 0;) {
        size_t from = begin, to = end;
        if (mb_buckets_part(t->n_elements, t->dp_size, r, &from, &to)) {
            enum mb_comm_type type;
            void *p = summed(t, from, to, &type);
            mb_comm_reduce(t->dp_comm, &t->dev, p, to - from, type, MB_COMM_SUM, r);
        }
    }
}

static void gradients_final(void *arg, size_t begin, size_t end)
{
    struct mb_trainer *t = arg;
    size_t from, to;
    if (mb_buckets_add(&t->buckets, begin, end, &from, &to)) {
        struct mb_err kept; /* by the communicator */
        reduce_range(t, from, to);
        if (mb_gpt_is_tuning(t->gpt)) {
            (void)mb_comm_synchronize(t->dp_comm, &kept);
        }
    }
}

void mb_trainer_overlap(struct mb_trainer *t, struct mb_gpt_step *step, int is_first)
{
    const int64_t given = t->args.ddp_bucket_size;
    if (t->args.overlap_grad_reduce && t->dp_size > 1) {
        if (is_first) {
            mb_buckets_start(&t->buckets, t->n_elements,
                             given != MB_ARGS_NONE ? (size_t)given
                                                   : mb_buckets_default(t->dp_size));
        }
        step->grads_final = gradients_final;
        step->arg = t;
    }
}

/* Tensor parallel ranks but the first have it as the first has, or the first stage has it. */
static int is_another_s(const struct mb_trainer *t, const struct mb_param *p)
{
    return p->is_copy || (t->tp_rank > 0 && p->n == p->n_whole);
}

int mb_trainer_count_zeros(struct mb_trainer *t, double *n_zeros, struct mb_err *err)
{
    struct mb_device *d = &t->dev;
    const float *grads = mb_gpt_grads(t->gpt);
    size_t n = 0;
    const struct mb_param *p = mb_gpt_params(t->gpt, &n);
    d->ops->zero(d->ctx, d->stream, t->norm_device, sizeof *n_zeros);
    for (size_t i = 0; i < n; i++) { /* without what lies between parameters */
        const size_t begin = p[i].offset > t->begin ? p[i].offset : t->begin;
        const size_t last = p[i].offset + p[i].n, end = last < t->end ? last : t->end;
        if (begin < end && !is_another_s(t, &p[i])) {
            d->ops->count_zeros(d->ctx, d->stream, grads + begin, end - begin, t->norm_device);
        }
    }
    d->ops->copy_out(d->ctx, d->stream, n_zeros, t->norm_device, sizeof *n_zeros);
    return d->ops->synchronize(d->ctx, d->stream, err);
}

int mb_trainer_squared_norm(struct mb_trainer *t, const struct mb_master *flat, size_t begin,
                            size_t end, double *out, struct mb_err *err)
{
    struct mb_device *d = &t->dev;
    size_t n = 0, at = begin; /* [at, end) is not counted yet */
    const struct mb_param *p = mb_gpt_params(t->gpt, &n);
    d->ops->zero(d->ctx, d->stream, t->norm_device, sizeof *out);
    for (size_t i = 0; i < n; i++) {
        if (is_another_s(t, &p[i]) && p[i].offset + p[i].n > at && p[i].offset < end) {
            if (p[i].offset > at) {
                mb_master_squared_norm(d, flat, at, p[i].offset - at, t->norm_device);
            }
            at = p[i].offset + p[i].n;
        }
    }
    if (at < end) {
        mb_master_squared_norm(d, flat, at, end - at, t->norm_device);
    }
    d->ops->copy_out(d->ctx, d->stream, out, t->norm_device, sizeof *out);
    return d->ops->synchronize(d->ctx, d->stream, err);
}

int mb_trainer_reduce_gradients(struct mb_trainer *t, double *norm2, struct mb_err *err)
{
    float *grads = mb_gpt_grads(t->gpt);
    if (t->args.overlap_grad_reduce && t->dp_size > 1) {
        /* Every bucket is under way. */
    } else if (t->tied_comm != NULL) {
        reduce_range(t, 0, t->n_elements);
    } else if (t->args.use_distributed_optimizer) {
        enum mb_comm_type type;
        void *p = summed(t, 0, t->n_elements, &type);
        mb_comm_reduce_scatter(t->dp_comm, &t->dev, p, t->n_elements, type, MB_COMM_SUM);
    } else {
        sum_on_all(t, 0, t->n_elements);
    }
    int rc = mb_comm_synchronize(t->dp_comm, err);
    if (rc == 0 && t->grads_bf16 != NULL) {
        t->dev.ops->from_bf16(t->dev.ctx, t->dev.stream, grads, t->grads_bf16, t->n_elements);
    }
    if (rc == 0 && t->tied_comm != NULL) {
        mb_comm_allreduce(t->tied_comm, &t->dev, grads, tied_elements(t), MB_COMM_F32, MB_COMM_SUM);
        rc = mb_comm_synchronize(t->tied_comm, err);
    }
    /* Each rank its range in all cases, so that all give the same norm. */
    const struct mb_master flat = {.whole = grads};
    return rc != 0 ? rc : mb_trainer_squared_norm(t, &flat, t->begin, t->end, norm2, err);
}
