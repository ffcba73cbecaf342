/*
 * The micro batches of a global batch, through this rank's stage of the model.
 *
 *  1. worker/parallel/pipeline.h says what comes next; alone, a stage does forward and backward
 *     passes in turns.
 *  2. The first stage reads tokens, the last one labels; a stage between them reads no data. With
 *     several chunks it is the first stage's first and the last one's last. What neighbours send
 *     each other is the residual stream of a micro batch and its gradient, of a tensor group each
 *     rank its own to the same place of the next stage; chunks make a ring of the stages.
 *  3. With several chunks all that comes between two passes is one exchange, and is waited for.
 *  4. With one, what is received is waited for, in host memory with all that was sent before: so
 * nothing is written while it is still being sent. Between GPUs trainer_links.c says what waits for
 * what. The end waits for the rest. Failures: data that end, a token outside the vocabulary; a
 * neighbour that is gone is found where it is waited for, with the communicator's text.
 */
#include <assert.h>
#include "worker/kernels/range.h"
#include "worker/trainer.h"

/* Of a global batch. */
struct batch {
    struct mb_trainer *t;
    enum mb_split split;
    int64_t n_micro;
    int trains;                                              /* 0: an evaluation */
    struct mb_comm_transfer transfers[MB_COMM_EXCHANGE_MAX]; /* since the last pass, of chunks */
    size_t n_transfers;
};

static int is_last_chunk(const struct mb_trainer *t, const struct mb_pipeline_step *s)
{
    return t->pp_rank + 1 == t->pp_size && s->chunk + 1 == t->pipeline.at.n_chunks;
}

static struct mb_gpt_place place_of(const struct mb_pipeline_step *s)
{
    return (struct mb_gpt_place){s->chunk, s->slot, s->gradient};
}

static double mask_sum(const struct mb_trainer *t)
{
    size_t n = (size_t)t->args.micro_batch_size * (size_t)t->args.seq_length;
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        sum += (double)t->loss_mask[i];
    }
    return sum;
}

/* The loss is scaled where it is: the last chunk has just read the micro batch. */
static double grad_scale(const struct batch *b, const struct mb_pipeline_step *s)
{
    const struct mb_trainer *t = b->t;
    const double parts = (double)(b->n_micro * t->args.data_parallel_size);
    const double per_micro = (double)(t->args.micro_batch_size * t->args.seq_length);
    if (!is_last_chunk(t, s)) {
        return 0;
    }
    const double tokens = t->args.calculate_per_token_loss ? per_micro : mask_sum(t);
    return tokens > 0 ? t->loss_scale.scale / (tokens * parts) : 0;
}

static struct mb_gpt_step step_of(const struct batch *b, const struct mb_pipeline_step *s)
{
    const struct mb_trainer *t = b->t;
    const int64_t k = (int64_t)s->micro_batch;
    const int64_t slice = t->args.micro_batch_size * t->args.data_parallel_size;
    return (struct mb_gpt_step){.iteration = t->iteration + 1,
                                .first_sample =
                                    (uint64_t)(k * slice + t->args.micro_batch_size * t->data_rank),
                                .is_last = k + 1 == b->n_micro};
}

static int forward(struct batch *b, const struct mb_pipeline_step *s, struct mb_err *err)
{
    struct mb_trainer *t = b->t;
    const struct mb_gpt_batch batch = {t->tokens, t->labels, t->loss_mask, t->position_ids};
    const struct mb_gpt_step step = step_of(b, s);
    if ((t->pp_rank == 0 && s->chunk == 0) || is_last_chunk(t, s)) {
        int rc = mb_loader_next(t->loaders[b->split], t->tokens, t->labels, t->loss_mask,
                                t->position_ids, err);
        if (rc != 0) {
            return mb_err_wrap(err, "%s data", mb_split_name(b->split));
        }
    }
    return mb_gpt_stage_forward(t->gpt, place_of(s), &batch, b->trains ? &step : NULL, err);
}

/* Before it is written again: what is sent in host memory was waited for when something came. */
static int free_gradient(struct mb_trainer *t, struct mb_err *err)
{
    return mb_trainer_links_devices(t) ? mb_trainer_wait_link(t, MB_LINK_GRADIENT_OUT, err) : 0;
}

static int backward(struct batch *b, const struct mb_pipeline_step *s, struct mb_err *err)
{
    struct mb_gpt_step step = step_of(b, s);
    step.grad_scale = grad_scale(b, s);
    if (step.is_last) {
        mb_trainer_overlap(b->t, &step, s->chunk + 1 == b->t->pipeline.at.n_chunks);
    }
    int rc = is_last_chunk(b->t, s) ? free_gradient(b->t, err) : 0; /* others' has been received */
    if (rc == 0) {
        mb_gpt_stage_backward(b->t->gpt, place_of(s), &step);
    }
    return rc;
}

/* ---- between stages ---- */

static int receive(struct mb_trainer *t, enum mb_link_kind kind, void *in, size_t n,
                   enum mb_comm_type type, struct mb_err *err)
{
    mb_comm_recv(t->links[kind].comm, &t->dev, in, n, type, t->links[kind].peer);
    return mb_trainer_wait_link(t, kind, err);
}

static int move(struct batch *b, const struct mb_pipeline_step *s, struct mb_err *err)
{
    struct mb_trainer *t = b->t;
    const struct mb_gpt_ports at = mb_gpt_ports(t->gpt, place_of(s));
    const struct mb_link *next = &t->links[MB_LINK_OUTPUT];
    const struct mb_link *before = &t->links[MB_LINK_GRADIENT_OUT];
    const enum mb_comm_type type = mb_gpt_comm_type(mb_gpt_config(t->gpt)->dtype);
    switch (s->act) {
    case MB_PIPELINE_SEND_OUTPUT:
        mb_comm_send(next->comm, &t->dev, at.out, at.n, type, next->peer);
        /* An evaluation overwrites it next; a stage that receives in host memory waits there. */
        return b->trains || (t->pp_rank > 0 && !mb_trainer_links_devices(t))
                   ? 0
                   : mb_trainer_wait_link(t, MB_LINK_OUTPUT, err);
    case MB_PIPELINE_SEND_GRADIENT:
        mb_comm_send(before->comm, &t->dev, at.gradient, at.n, type, before->peer);
        return 0;
    case MB_PIPELINE_RECEIVE_INPUT:
        return receive(t, MB_LINK_INPUT, at.in, at.n, type, err);
    case MB_PIPELINE_RECEIVE_GRADIENT: {
        int rc = free_gradient(t, err);
        return rc == 0 ? receive(t, MB_LINK_GRADIENT_IN, at.gradient, at.n, type, err) : rc;
    }
    case MB_PIPELINE_FORWARD:
    case MB_PIPELINE_BACKWARD:
        break;
    }
    return 0;
}

static void add_transfer(struct batch *b, const struct mb_pipeline_step *s)
{
    static const enum mb_link_kind LINKS[] = {[MB_PIPELINE_SEND_OUTPUT] = MB_LINK_OUTPUT,
                                              [MB_PIPELINE_SEND_GRADIENT] = MB_LINK_GRADIENT_OUT,
                                              [MB_PIPELINE_RECEIVE_INPUT] = MB_LINK_INPUT,
                                              [MB_PIPELINE_RECEIVE_GRADIENT] = MB_LINK_GRADIENT_IN};
    const struct mb_gpt_ports at = mb_gpt_ports(b->t->gpt, place_of(s));
    assert(b->n_transfers < MB_COMM_EXCHANGE_MAX);
    b->transfers[b->n_transfers++] = (struct mb_comm_transfer){
        .is_send = s->act == MB_PIPELINE_SEND_OUTPUT || s->act == MB_PIPELINE_SEND_GRADIENT,
        .buf = s->act == MB_PIPELINE_SEND_OUTPUT     ? at.out
               : s->act == MB_PIPELINE_RECEIVE_INPUT ? at.in
                                                     : at.gradient,
        .n = at.n,
        .peer = b->t->links[LINKS[s->act]].peer};
}

static int exchange(struct batch *b, struct mb_err *err)
{
    struct mb_trainer *t = b->t;
    struct mb_comm *c = t->links[MB_LINK_OUTPUT].comm; /* each is the same */
    if (b->n_transfers == 0) {
        return 0;
    }
    mb_range_begin(&t->dev, "exchange of %zu", b->n_transfers);
    mb_comm_exchange(c, &t->dev, b->transfers, b->n_transfers,
                     mb_gpt_comm_type(mb_gpt_config(t->gpt)->dtype));
    b->n_transfers = 0;
    int rc = mb_comm_synchronize(c, err);
    mb_range_end(&t->dev);
    return rc;
}

int mb_trainer_pass_batch(struct mb_trainer *t, enum mb_split split, int64_t n_micro, int trains,
                          struct mb_err *err)
{
    static const char *const NAMES[] = {[MB_PIPELINE_FORWARD] = "forward",
                                        [MB_PIPELINE_BACKWARD] = "backward",
                                        [MB_PIPELINE_SEND_OUTPUT] = "send output",
                                        [MB_PIPELINE_SEND_GRADIENT] = "send gradient",
                                        [MB_PIPELINE_RECEIVE_INPUT] = "receive input",
                                        [MB_PIPELINE_RECEIVE_GRADIENT] = "receive gradient"};
    struct batch b = {.t = t, .split = split, .n_micro = n_micro, .trains = trains};
    struct mb_pipeline_step s;
    int rc = 0;
    mb_pipeline_start(&t->pipeline, (uint64_t)n_micro, !trains);
    while (rc == 0 && mb_pipeline_next(&t->pipeline, &s)) {
        const int is_pass = s.act == MB_PIPELINE_FORWARD || s.act == MB_PIPELINE_BACKWARD;
        if (!is_pass && t->pipeline.at.n_chunks > 1) {
            add_transfer(&b, &s);
            continue;
        }
        rc = exchange(&b, err);
        mb_range_begin(&t->dev, "%s %zu", NAMES[s.act], (size_t)s.micro_batch + 1);
        if (rc == 0 && s.act == MB_PIPELINE_FORWARD) {
            rc = forward(&b, &s, err);
        } else if (rc == 0 && s.act == MB_PIPELINE_BACKWARD) {
            rc = backward(&b, &s, err);
        } else if (rc == 0) {
            rc = move(&b, &s, err);
        }
        mb_range_end(&t->dev);
    }
    if (rc == 0) {
        rc = exchange(&b, err);
    }
    return rc == 0 ? mb_trainer_wait_links(t, err) : rc;
}
