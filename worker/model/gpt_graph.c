/*
 * Passes that are captured once and run again: the host enqueues one thing instead of hundreds.
 *
 *  1. A pass of a kind runs as it is the first time: products are tuned, plans of attention and
 * their memory are made. The second time its operations are captured, and run; from then on they
 * are run again.
 *  2. Two passes are of one kind if the host would enqueue the same calls with the same arguments:
 * the same direction, place and, of a backward pass, gradients set or added to. What else differs
 * from pass to pass lies in device memory: the batch, and struct mb_pass, which is written before
 * each pass.
 *  3. A pass that tells somebody which gradients are final runs as it is: that is a call of the
 * host's between operations.
 * Failures: after a capture that fails all passes run as they are; mb_gpt_graphs_failure() says
 * why. A graph that fails is the stream's, as an operation that fails.
 */
#include <assert.h>
#include "base/alloc.h"
#include "worker/model/gpt_internal.h"

/* Of a chunk and slot: forward passes of training and of an evaluation; backward passes, gradients
 * in one of two places, set or added to. */
enum { KINDS_OF_PLACE = 2 + 2 * 2, KINDS_OF_MODEL = 2 };

const char *mb_gpt_graphs_refused(const struct mb_device *dev, const struct mb_gpt_config *c)
{
    if (dev->ops->graph_begin == NULL)
        return "this device has none";
    if (mb_gpt_tensor_parts(c) > 1)
        return "ranks that share a model form sums between its operations";
    if (mb_gpt_context_parts(c) > 1)
        return "between ranks that share samples keys and values go round";
    if (c->batch_positions && c->positions == MB_GPT_LEARNED)
        return "positions that begin anew are other operations with each batch";
    return NULL;
}

int mb_gpt_graphs_create(struct mb_gpt *m, struct mb_err *err)
{
    m->captures = m->c.graphs && mb_gpt_graphs_refused(m->dev, &m->c) == NULL;
    if (!m->captures)
        return 0;
    m->graphs_max = m->n_chunks * m->n_slots * KINDS_OF_PLACE + KINDS_OF_MODEL;
    m->graphs = mb_calloc(m->graphs_max, sizeof(*m->graphs));
    return m->graphs != NULL ? 0 : mb_err_set(err, MB_ENOMEM, "out of memory for CUDA graphs");
}

void mb_gpt_graphs_free(struct mb_gpt *m)
{
    for (size_t i = 0; i < m->n_graphs; i++)
        m->dev->ops->graph_destroy(m->dev->ctx, m->graphs[i].graph);
    mb_free(m->graphs);
}

void mb_gpt_graph_pass(struct mb_gpt *m, const struct mb_gpt_step *step)
{
    if (!m->captures || step == NULL)
        return;
    const struct mb_pass now = {.first_sample = step->first_sample,
                                .iteration = (uint32_t)step->iteration,
                                .grad_scale = (float)step->grad_scale};
    m->dev->ops->copy_in(m->dev->ctx, m->dev->stream, m->pass, &now, sizeof(now));
}

static int is_same(const struct mb_gpt_graph *a, const struct mb_gpt_graph *b)
{
    return a->what == b->what && a->at.chunk == b->at.chunk && a->at.slot == b->at.slot &&
           a->at.gradient == b->at.gradient && a->sets_grads == b->sets_grads;
}

static struct mb_gpt_graph *find(const struct mb_gpt *m, const struct mb_gpt_graph *like)
{
    for (size_t i = 0; i < m->n_graphs; i++)
        if (is_same(&m->graphs[i], like))
            return &m->graphs[i];
    return NULL;
}

/* The forward pass is the same wherever gradients are, and so is what has no place. */
static struct mb_gpt_graph kind_of(const struct mb_gpt *m, enum mb_gpt_captured what,
                                   struct mb_gpt_place at)
{
    struct mb_gpt_graph kind = {.what = what, .at = {at.chunk, at.slot, 0}};
    if (what == MB_GPT_BACKWARD) {
        kind.at.gradient = at.gradient;
        kind.sets_grads = mb_gpt_has_old_grads(m);
    }
    return kind;
}

void mb_gpt_graph_run(const struct mb_gpt_pass *p, enum mb_gpt_captured what,
                      struct mb_gpt_place at, mb_gpt_enqueue_fn *enqueue)
{
    struct mb_gpt *m = p->m;
    const struct mb_device *dev = m->dev;
    const int tells = what == MB_GPT_BACKWARD && p->step->grads_final != NULL;
    if (!m->captures || m->graph_failure.code != 0 || tells) {
        enqueue(p);
        return;
    }
    const struct mb_gpt_graph kind = kind_of(m, what, at);
    struct mb_gpt_graph *g = find(m, &kind);
    if (g == NULL) {
        assert(m->n_graphs < m->graphs_max);
        m->graphs[m->n_graphs++] = kind;
        enqueue(p);
        return;
    }
    if (g->graph == NULL && dev->ops->graph_begin(dev->ctx, dev->stream, &m->graph_failure) == 0) {
        enqueue(p);
        g->graph = dev->ops->graph_end(dev->ctx, dev->stream, &m->graph_failure);
    }
    if (g->graph != NULL)
        dev->ops->graph_run(dev->ctx, dev->stream, g->graph);
    else
        enqueue(p);
}

const char *mb_gpt_graphs_failure(const struct mb_gpt *m)
{
    return m->graph_failure.code != 0 ? m->graph_failure.text : NULL;
}
