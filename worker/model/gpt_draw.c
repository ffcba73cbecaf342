/*
 * The initial weights.
 *
 * Element e of a whole parameter takes normal e % 4 of Philox block e / 4 under (seed, hash of the
 * name): four words give four normals by Box-Muller in double. Weights of embeddings, qkv, fc1 and
 * output have the given deviation; those that write to the residual stream have it divided by
 * sqrt(2 layers); norms are 1 (0 where the difference from 1 is kept), biases 0. An element depends
 * on nothing else, so a rank draws its part, and threads draw a piece of it side by side.
 */
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include "base/alloc.h"
#include "worker/kernels/philox.h"
#include "worker/model/gpt_internal.h"

enum { DRAW_PIECE = 1 << 22 };
/* Of a piece that is smaller one thread draws all. */
enum { DRAW_THREADS_MAX = 16, DRAW_BLOCKS_MIN = 1 << 14 };

static const uint32_t INIT_DOMAIN = 0x696e6974; /* keeps these draws apart from dropout's sites */

/* FNV-1a: the parameter's share of the counter. */
static uint32_t hash_name(const char *name)
{
    uint32_t h = 2166136261u;
    for (; *name != '\0'; name++)
        h = (h ^ (uint8_t)*name) * 16777619u;
    return h;
}

/* What is drawn of a parameter. */
struct drawing {
    uint64_t seed;
    uint32_t stream;
    double std;
    const struct mb_param *p;
};

static void draw_blocks(const struct drawing *d, size_t first_block, size_t n_blocks, float *out)
{
    const double to_unit = 1.0 / 4294967296.0, two_pi = 6.283185307179586;
    for (size_t b = 0; b < n_blocks; b++) {
        struct mb_philox r = mb_philox(d->seed, first_block + b, d->stream, INIT_DOMAIN);
        for (size_t i = 0; i < 4; i += 2) {
            double radius = d->std * sqrt(-2 * log(((double)r.word[i] + 0.5) * to_unit));
            double angle = two_pi * ((double)r.word[i + 1] + 0.5) * to_unit;
            out[4 * b + i] = (float)(radius * cos(angle));
            out[4 * b + i + 1] = (float)(radius * sin(angle));
        }
    }
}

/* Elements [first, first + n) of the whole parameter. */
static void draw_run(const struct drawing *d, size_t first, size_t n, float *out)
{
    while (n > 0) {
        const size_t skip = first % 4;
        float block[4];
        size_t k = n / 4 * 4;
        if (skip == 0 && k > 0) {
            draw_blocks(d, first / 4, k / 4, out);
        } else {
            k = 4 - skip < n ? 4 - skip : n;
            draw_blocks(d, first / 4, 1, block);
            memcpy(out, block + skip, k * sizeof(*out));
        }
        first += k;
        out += k;
        n -= k;
    }
}

/* Elements [from, to) of this rank's part. */
static void draw_part(const struct drawing *d, size_t from, size_t to, float *out)
{
    const struct mb_param *p = d->p;
    while (from < to) {
        const size_t at = from % p->run, left = p->run - at;
        const size_t n = to - from < left ? to - from : left;
        draw_run(d, p->start + from / p->run * p->stride + at, n, out);
        from += n;
        out += n;
    }
}

struct share {
    pthread_t thread;
    const struct drawing *d;
    size_t from, to;
    float *out;
};

static void *draw_share(void *arg)
{
    const struct share *s = arg;
    draw_part(s->d, s->from, s->to, s->out);
    return NULL;
}

/* As many as may run here, and as there is work for. */
static size_t threads_for(size_t n_blocks)
{
    cpu_set_t set;
    size_t n = sched_getaffinity(0, sizeof(set), &set) == 0 ? (size_t)CPU_COUNT(&set) : 1;
    size_t most = n_blocks / DRAW_BLOCKS_MIN;
    n = n < DRAW_THREADS_MAX ? n : DRAW_THREADS_MAX;
    n = n < most ? n : most;
    return n > 0 ? n : 1;
}

/* The first share is the caller's; one whose thread cannot be made is, too. */
static void draw_piece(const struct drawing *d, size_t first, size_t n_elements, float *out)
{
    struct share shares[DRAW_THREADS_MAX];
    const size_t n_blocks = (n_elements + 3) / 4, n = threads_for(n_blocks);
    int is_running[DRAW_THREADS_MAX] = {0};
    for (size_t i = 0; i < n; i++) {
        const size_t from = 4 * (n_blocks * i / n), to = 4 * (n_blocks * (i + 1) / n);
        shares[i] = (struct share){.d = d,
                                   .from = first + from,
                                   .to = first + (to < n_elements ? to : n_elements),
                                   .out = out + from};
        if (i > 0)
            is_running[i] = pthread_create(&shares[i].thread, NULL, draw_share, &shares[i]) == 0;
    }
    for (size_t i = 0; i < n; i++)
        if (!is_running[i])
            draw_share(&shares[i]);
    for (size_t i = 0; i < n; i++)
        if (is_running[i])
            pthread_join(shares[i].thread, NULL);
}

static int ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), n_end = strlen(end);
    return n >= n_end && strcmp(s + n - n_end, end) == 0;
}

static void draw_param(struct mb_gpt *m, const struct mb_param *p, float *piece)
{
    double std = (double)m->c.init_std;
    if (ends_with(p->name, "linear_proj.weight") || ends_with(p->name, "linear_fc2.weight"))
        std /= sqrt(2.0 * (double)m->c.n_layers);
    const struct drawing d = {m->c.seed, hash_name(p->name), std, p};
    if (p->n_dims == 1) /* a norm's weight; what stays out of here is already zero */
        for (size_t i = 0; i < DRAW_PIECE && i < p->n; i++)
            piece[i] = 1;
    for (size_t first = 0; first < p->n; first += DRAW_PIECE) {
        size_t n = p->n - first < DRAW_PIECE ? p->n - first : DRAW_PIECE;
        if (p->n_dims == 2)
            draw_piece(&d, first, n, piece);
        mb_master_copy_in(m->dev, &m->weights, p->offset + first, n, piece);
    }
}

int mb_gpt_params_draw(struct mb_gpt *m, struct mb_err *err)
{
    float *piece = mb_calloc(DRAW_PIECE, sizeof(*piece));
    if (piece == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory drawing the initial weights");
    for (size_t i = 0; i < m->n_params; i++)
        if (m->params[i].n_dims == 2 || !(m->c.norm_1p || ends_with(m->params[i].name, "bias")))
            draw_param(m, &m->params[i], piece);
    mb_free(piece);
    return m->dev->ops->synchronize(m->dev->ctx, m->dev->stream, err);
}
