/*
 *  1. lay_out: what is saved, then, of a shared model, the share and a window.
 *  2. copy: the device's state as it is now.
 *  3. join: weights go to rank 0, of the optimizer each rank gets its range.
 */
#include "worker/checkpoint/snapshot.h"

#include "worker/checkpoint/exchange.h"

/* What of the flat buffer this rank saves of the optimizer. */
static void own_range(const struct mb_checkpoint_model *m, struct mb_comm *comm, size_t *begin,
                      size_t *end)
{
    mb_comm_range(m->n_elements, mb_comm_world_size(comm), mb_comm_rank(comm), begin, end);
}

static size_t n_states(const struct mb_checkpoint_model *m)
{
    return (size_t)(m->exp_avg != NULL) + (size_t)(m->exp_avg_sq != NULL);
}

size_t mb_snapshot_floats(const struct mb_checkpoint_model *m, struct mb_comm *comm)
{
    const struct mb_checkpoint_layout *l = m->layout;
    const size_t states = n_states(m);
    size_t begin, end;
    own_range(m, comm, &begin, &end);
    size_t n = (mb_comm_rank(comm) == 0 ? m->n_elements : 0) + states * (end - begin);
    return l != NULL ? n + (1 + states) * (l->end - l->begin) + MB_EXCHANGE_WINDOW : n;
}

void mb_snapshot_lay_out(struct mb_snapshot *s, const struct mb_checkpoint_model *m,
                         struct mb_comm *comm, float *memory)
{
    const struct mb_checkpoint_layout *l = m->layout;
    *s = (struct mb_snapshot){.model = *m};
    s->model.dev = NULL;
    s->model.comm = comm;
    s->model.layout = NULL;
    if (l != NULL) { /* first: its words of 8 bytes are summed */
        s->window = memory;
        memory += MB_EXCHANGE_WINDOW;
    }
    s->model.weights = (struct mb_master){.whole = memory};
    memory += mb_comm_rank(comm) == 0 ? m->n_elements : 0;
    if (m->exp_avg != NULL) {
        own_range(m, comm, &s->model.state_begin, &s->model.state_end);
        s->model.exp_avg = memory;
        memory += s->model.state_end - s->model.state_begin;
    }
    if (m->exp_avg_sq != NULL) {
        s->model.exp_avg_sq = memory;
        memory += s->model.state_end - s->model.state_begin;
    }
    if (l != NULL) {
        const size_t n = l->end - l->begin;
        s->weights = memory;
        s->exp_avg = m->exp_avg != NULL ? s->weights + n : NULL;
        s->exp_avg_sq = m->exp_avg_sq != NULL ? s->weights + 2 * n : NULL;
    }
}

int mb_snapshot_copy(struct mb_snapshot *s, const struct mb_checkpoint_model *from,
                     struct mb_device *dev, struct mb_err *err)
{
    const struct mb_checkpoint_layout *l = from->layout;
    const struct mb_checkpoint_model *to = &s->model;
    const int tells_weights = l != NULL || mb_comm_rank(to->comm) == 0;
    const size_t begin = l != NULL ? l->begin : 0, end = l != NULL ? l->end : to->n_elements;
    if (tells_weights) {
        mb_master_copy_out(dev, &from->weights, begin, end - begin,
                           l != NULL ? s->weights : to->weights.whole);
    }
    if (to->exp_avg != NULL) {
        const size_t first = l != NULL ? l->begin : to->state_begin;
        const size_t n = (l != NULL ? l->end : to->state_end) - first;
        const size_t at = first - from->state_begin;
        dev->ops->copy_out(dev->ctx, dev->stream, l != NULL ? s->exp_avg : to->exp_avg,
                           from->exp_avg + at, n * sizeof(float));
        if (to->exp_avg_sq != NULL) {
            dev->ops->copy_out(dev->ctx, dev->stream, l != NULL ? s->exp_avg_sq : to->exp_avg_sq,
                               from->exp_avg_sq + at, n * sizeof(float));
        }
    }
    return dev->ops->synchronize(dev->ctx, dev->stream, err);
}

int mb_snapshot_join(struct mb_snapshot *s, const struct mb_checkpoint_model *from,
                     struct mb_err *err)
{
    const struct mb_checkpoint_layout *l = from->layout;
    const struct mb_checkpoint_model *to = &s->model;
    struct mb_checkpoint_model parts = *from;
    parts.progress = to->progress;
    const size_t n_all = mb_comm_rank(to->comm) == 0 ? to->n_elements : 0;
    if (l == NULL) {
        return 0;
    }
    const struct {
        float *give, *take;
        size_t begin, end; /* of what is taken */
    } tensors[] = {{s->weights, n_all > 0 ? to->weights.whole : NULL, 0, n_all},
                   {s->exp_avg, to->exp_avg, to->state_begin, to->state_end},
                   {s->exp_avg_sq, to->exp_avg_sq, to->state_begin, to->state_end}};
    int rc = 0;
    for (size_t i = 0; i < 1 + n_states(to) && rc == 0; i++) {
        const struct mb_exchange_side give = {tensors[i].give, l->begin, l->end, 1, NULL, NULL};
        const struct mb_exchange_side take = {
            tensors[i].take, tensors[i].begin, tensors[i].end, 0, NULL, NULL};
        rc = mb_checkpoint_exchange(&parts, to->comm, &give, &take, s->window, err);
    }
    return rc;
}
