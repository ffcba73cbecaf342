/*
 * Causal attention in bf16 or fp16 as graphs of cuDNN.
 *
 * Heads of a row of qkv stand group by group, queries, then key, then value (op.h), so four strides
 * name all heads only where a group has one query head. Else each sample is a run of its own, with
 * the groups in the place of the samples.
 *
 * Forward: softmax(scale q k^T, masked) v, with max + log(sum) of each row kept. Backward, with
 * P = exp(scale q k^T - log_sum): d_v = P^T d_out, dS = P (d_out v^T - d_out . out) scale,
 * d_k = dS^T q, d_q = dS k. The shape of these graphs is what cuDNN's engines look for; other
 * orders of the same operations have none.
 *
 * Plans and their memory are made when a shape comes first and stay as long as the context. A graph
 * that no engine takes, or whose memory cannot be had, is remembered, too: its shape is not
 * cuDNN's.
 */
#include "worker/kernels/cuda/dnn.h"

#include <dlfcn.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/str.h"
#include "worker/kernels/cuda/cuda.h"
#include "worker/kernels/cuda/dnn_graph.h"

/* The oldest version that takes minus infinity as a mask and clears the sums itself. */
enum { MIN_VERSION = 91000, NEXT_MAJOR = 100000 };
enum { MAX_PLANS = 32, MAX_HEAD_DIM = 128, MAX_IDS = 16 };

/* Memory and numbers that a run names. */
enum {
    ID_Q = 1,
    ID_K,
    ID_V,
    ID_OUT,
    ID_LOG_SUM,
    ID_D_OUT,
    ID_D_Q,
    ID_D_K,
    ID_D_V,
    ID_DELTA,
    ID_D_Q_SUM,
    ID_SCALE,
    ID_MASKED,
    ID_ONE,
};

struct plan {
    struct mb_attention_shape shape;
    enum mb_dtype dtype;
    int is_backward;
    struct dnn_graph graph;
    dnn_descriptor plan; /* NULL: the shape is not cuDNN's */
    void *memory; /* of d_q's sum, then the engine's; where it is does not change: graphs know it */
    size_t sum_bytes;
};

struct mb_cuda_dnn {
    void *library, *handle;
    struct dnn_api api;
    struct plan *plans[MAX_PLANS];
    size_t n_plans;
};

/* ---- the library ---- */

static int look_up(struct mb_cuda_dnn *d)
{
    const struct {
        const char *name;
        void *to;
    } functions[] = {{"cudnnCreate", &d->api.create},
                     {"cudnnDestroy", &d->api.destroy},
                     {"cudnnSetStream", &d->api.set_stream},
                     {"cudnnGetVersion", &d->api.version},
                     {"cudnnBackendCreateDescriptor", &d->api.create_descriptor},
                     {"cudnnBackendDestroyDescriptor", &d->api.destroy_descriptor},
                     {"cudnnBackendFinalize", &d->api.finalize},
                     {"cudnnBackendSetAttribute", &d->api.set_attribute},
                     {"cudnnBackendGetAttribute", &d->api.get_attribute},
                     {"cudnnBackendExecute", &d->api.execute}};
    for (size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); i++) {
        void *symbol = dlsym(d->library, functions[i].name);
        if (symbol == NULL)
            return 0;
        memcpy(functions[i].to, &symbol, sizeof(symbol));
    }
    return d->api.version() >= MIN_VERSION && d->api.version() < NEXT_MAJOR;
}

static int is_wanted(int *wanted, struct mb_err *err)
{
    static const char *const NAMES[] = {"MOBULA_CUDA_CUDNN", "MOBULA_CUDA_TUNE"};
    *wanted = 1;
    for (size_t i = 0; i < sizeof(NAMES) / sizeof(NAMES[0]); i++) {
        const char *text = getenv(NAMES[i]);
        int64_t value = 1;
        int rc = text != NULL ? mb_parse_i64(text, 0, 1, NAMES[i], &value, err) : 0;
        if (rc != 0)
            return rc;
        *wanted = *wanted && value == 1;
    }
    return 0;
}

int mb_cuda_dnn_open(struct mb_cuda_dnn **out, struct mb_err *err)
{
    int wanted = 0, rc = is_wanted(&wanted, err);
    *out = NULL;
    if (rc != 0 || !wanted)
        return rc;
    struct mb_cuda_dnn *d = mb_calloc(1, sizeof(*d));
    if (d == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory opening cuDNN");
    d->library = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_LOCAL);
    if (d->library != NULL && look_up(d) && d->api.create(&d->handle) == 0) {
        *out = d;
        return 0;
    }
    d->handle = NULL;
    mb_cuda_dnn_close(d);
    return 0;
}

void mb_cuda_dnn_close(struct mb_cuda_dnn *d)
{
    if (d == NULL)
        return;
    for (size_t i = 0; i < d->n_plans; i++) {
        dnn_graph_end(&d->plans[i]->graph);
        cudaFree(d->plans[i]->memory);
        mb_free(d->plans[i]);
    }
    if (d->handle != NULL)
        d->api.destroy(d->handle);
    if (d->library != NULL)
        dlclose(d->library);
    mb_free(d);
}

size_t mb_cuda_dnn_version(const struct mb_cuda_dnn *d)
{
    return d != NULL ? d->api.version() : 0;
}

/* ---- where things lie ---- */

/* What a run covers: `batch` times `heads` query heads, `keys` heads of keys for each. */
struct extent {
    int64_t runs, batch, heads, keys, seq, channels;
    int64_t qkv_batch, qkv_head, qkv_row, out_batch, out_head, out_row;
    enum dnn_data_type type; /* for graphs */
};

static struct extent extent_of(const struct mb_attention_shape *s)
{
    const int64_t seq = (int64_t)s->seq, d = (int64_t)s->head_dim, groups = (int64_t)s->n_groups;
    const int64_t per_group = (int64_t)(s->n_heads / s->n_groups);
    const int64_t row = groups * (per_group + 2) * d, out_row = groups * per_group * d;
    struct extent e = {.seq = seq, .channels = d, .qkv_row = row, .out_row = out_row};
    if (per_group == 1) {
        e.runs = 1;
        e.batch = (int64_t)s->n_samples;
        e.heads = e.keys = groups;
        e.qkv_batch = seq * row;
        e.qkv_head = 3 * d;
        e.out_batch = seq * out_row;
    } else {
        e.runs = (int64_t)s->n_samples;
        e.batch = groups;
        e.heads = per_group;
        e.keys = 1;
        e.qkv_batch = (per_group + 2) * d;
        e.qkv_head = d;
        e.out_batch = per_group * d;
    }
    e.out_head = d;
    return e;
}

static struct dnn_layout layout(int64_t a, int64_t b, int64_t c, int64_t d)
{
    return (struct dnn_layout){{a, b, c, d}, {b * c * d, c * d, d, 1}};
}

/* The same elements with rows and columns exchanged. */
static struct dnn_layout transposed(struct dnn_layout l)
{
    return (struct dnn_layout){{l.size[0], l.size[1], l.size[3], l.size[2]},
                               {l.stride[0], l.stride[1], l.stride[3], l.stride[2]}};
}

static struct dnn_layout of_queries(const struct extent *e)
{
    return (struct dnn_layout){{e->batch, e->heads, e->seq, e->channels},
                               {e->qkv_batch, e->qkv_head, e->qkv_row, 1}};
}

static struct dnn_layout of_keys(const struct extent *e)
{
    return (struct dnn_layout){{e->batch, e->keys, e->seq, e->channels},
                               {e->qkv_batch, e->qkv_head, e->qkv_row, 1}};
}

static struct dnn_layout of_out(const struct extent *e)
{
    return (struct dnn_layout){{e->batch, e->heads, e->seq, e->channels},
                               {e->out_batch, e->out_head, e->out_row, 1}};
}

/* ---- graphs ---- */

static dnn_descriptor apply(struct dnn_graph *g, enum dnn_pointwise mode, dnn_descriptor x,
                            dnn_descriptor b, const struct dnn_layout *l)
{
    dnn_descriptor y = dnn_inner(g, DNN_FLOAT, l);
    dnn_pointwise(g, mode, DNN_FLOAT, x, b, NULL, y);
    return y;
}

/* Scores of keys behind their query become minus infinity. */
static dnn_descriptor mask(struct dnn_graph *g, dnn_descriptor scores, const struct dnn_layout *l)
{
    dnn_descriptor row = dnn_inner(g, DNN_INT32, l), column = dnn_inner(g, DNN_INT32, l);
    dnn_descriptor seen = dnn_inner(g, DNN_BOOLEAN, l), out = dnn_inner(g, DNN_FLOAT, l);
    dnn_index(g, 2, scores, row);
    dnn_index(g, 3, scores, column);
    dnn_pointwise(g, DNN_CMP_GE, DNN_BOOLEAN, row, column, NULL, seen);
    dnn_pointwise(g, DNN_BINARY_SELECT, DNN_FLOAT, scores, dnn_scalar(g, ID_MASKED), seen, out);
    return out;
}

static void forward_graph(struct dnn_graph *g, const struct extent *e)
{
    const struct dnn_layout score = layout(e->batch, e->heads, e->seq, e->seq);
    const struct dnn_layout row = layout(e->batch, e->heads, e->seq, 1);
    const struct dnn_layout q = of_queries(e), v = of_keys(e), k = transposed(v), o = of_out(e);

    dnn_descriptor x = dnn_inner(g, DNN_FLOAT, &score);
    dnn_matmul(g, dnn_outer(g, ID_Q, e->type, &q), dnn_outer(g, ID_K, e->type, &k), x);
    x = mask(g, apply(g, DNN_MUL, x, dnn_scalar(g, ID_SCALE), &score), &score);
    dnn_descriptor maximum = dnn_inner(g, DNN_FLOAT, &row);
    dnn_reduce(g, DNN_REDUCE_MAX, x, maximum);
    x = apply(g, DNN_EXP, apply(g, DNN_SUB, x, maximum, &score), NULL, &score);
    dnn_descriptor sum = dnn_inner(g, DNN_FLOAT, &row);
    dnn_reduce(g, DNN_REDUCE_ADD, x, sum);
    dnn_pointwise(g, DNN_ADD, DNN_FLOAT, maximum, apply(g, DNN_LOG, sum, NULL, &row), NULL,
                  dnn_outer(g, ID_LOG_SUM, DNN_FLOAT, &row));
    dnn_descriptor p = dnn_inner(g, e->type, &score);
    dnn_pointwise(g, DNN_DIV, DNN_FLOAT, x, sum, NULL, p);
    dnn_matmul(g, p, dnn_outer(g, ID_V, e->type, &v), dnn_outer(g, ID_OUT, e->type, &o));
}

/* to = x^T y, summed over the query heads of a key's head where there are several. */
static void gradient_of_keys(struct dnn_graph *g, const struct extent *e, dnn_descriptor x,
                             dnn_descriptor y, dnn_descriptor to)
{
    const struct dnn_layout score = layout(e->batch, e->heads, e->seq, e->seq);
    const struct dnn_layout turned = transposed(score);
    const struct dnn_layout full = layout(e->batch, e->heads, e->seq, e->channels);
    dnn_descriptor x_t = dnn_inner(g, e->type, &turned);
    dnn_reshape(g, x, x_t);
    if (e->heads == e->keys) {
        dnn_matmul(g, x_t, y, to);
        return;
    }
    dnn_descriptor of_heads = dnn_inner(g, e->type, &full);
    dnn_matmul(g, x_t, y, of_heads);
    dnn_reduce(g, DNN_REDUCE_ADD, of_heads, to);
}

static void backward_graph(struct dnn_graph *g, const struct extent *e)
{
    const struct dnn_layout score = layout(e->batch, e->heads, e->seq, e->seq);
    const struct dnn_layout row = layout(e->batch, e->heads, e->seq, 1);
    const struct dnn_layout full = layout(e->batch, e->heads, e->seq, e->channels);
    const struct dnn_layout l_q = of_queries(e), l_k = of_keys(e), l_t = transposed(l_k);
    const struct dnn_layout l_o = of_out(e);

    dnn_descriptor q = dnn_outer(g, ID_Q, e->type, &l_q);
    dnn_descriptor k_t = dnn_outer(g, ID_K, e->type, &l_t);
    dnn_descriptor v_t = dnn_outer(g, ID_V, e->type, &l_t);
    dnn_descriptor d_out = dnn_outer(g, ID_D_OUT, e->type, &l_o);
    dnn_descriptor scale = dnn_scalar(g, ID_SCALE);

    /* d_out . out of a row is memory of the run's: the engine computes it in a pass of its own. */
    dnn_descriptor dot = dnn_inner(g, DNN_FLOAT, &row);
    dnn_reduce(g, DNN_REDUCE_ADD,
               apply(g, DNN_MUL, d_out, dnn_outer(g, ID_OUT, e->type, &l_o), &full), dot);
    dnn_descriptor delta = dnn_outer(g, ID_DELTA, DNN_FLOAT, &row);
    dnn_pointwise(g, DNN_MUL, DNN_FLOAT, dot, dnn_scalar(g, ID_ONE), NULL, delta);

    dnn_descriptor x = dnn_inner(g, DNN_FLOAT, &score);
    dnn_matmul(g, q, k_t, x);
    x = apply(g, DNN_MUL, x, scale, &score);
    x = apply(g, DNN_SUB, x, dnn_outer(g, ID_LOG_SUM, DNN_FLOAT, &row), &score);
    dnn_descriptor p = apply(g, DNN_EXP, mask(g, x, &score), NULL, &score);
    gradient_of_keys(g, e, p, d_out, dnn_outer(g, ID_D_V, e->type, &l_k));

    dnn_descriptor d_p = dnn_inner(g, DNN_FLOAT, &score);
    dnn_matmul(g, d_out, v_t, d_p);
    d_p = apply(g, DNN_MUL, apply(g, DNN_SUB, d_p, delta, &score), p, &score);
    dnn_descriptor d_s = apply(g, DNN_MUL, d_p, scale, &score);
    gradient_of_keys(g, e, d_s, q, dnn_outer(g, ID_D_K, e->type, &l_k));

    dnn_descriptor k = dnn_inner(g, DNN_FLOAT, &l_k);
    dnn_reshape(g, k_t, k);
    dnn_descriptor sum = dnn_outer(g, ID_D_Q_SUM, DNN_FLOAT, &full);
    dnn_matmul(g, d_s, k, sum);
    dnn_pointwise(g, DNN_IDENTITY, DNN_FLOAT, sum, NULL, NULL, dnn_outer(g, ID_D_Q, e->type, &l_q));
}

/* ---- plans ---- */

static int has_memory(struct plan *p, size_t size_bytes)
{
    if (size_bytes > 0 && cudaMalloc(&p->memory, size_bytes) != cudaSuccess) {
        cudaGetLastError();
        p->memory = NULL;
        return 0;
    }
    return 1;
}

static struct plan *new_plan(struct mb_cuda_dnn *d, const struct mb_attention_shape *shape,
                             enum mb_dtype dtype, int is_backward)
{
    struct plan *p = d->n_plans < MAX_PLANS ? mb_calloc(1, sizeof(*p)) : NULL;
    if (p == NULL)
        return NULL;
    struct extent e = extent_of(shape);
    e.type = dtype == MB_DTYPE_F16 ? DNN_HALF : DNN_BF16;
    p->shape = *shape;
    p->dtype = dtype;
    p->is_backward = is_backward;
    p->graph.api = &d->api;
    p->graph.handle = d->handle;
    if (is_backward) {
        backward_graph(&p->graph, &e);
        p->sum_bytes = (size_t)(e.batch * e.heads * e.seq * e.channels) * sizeof(float);
    } else {
        forward_graph(&p->graph, &e);
    }
    int64_t workspace_bytes = 0;
    p->plan = dnn_plan(&p->graph, &workspace_bytes);
    if (p->plan != NULL && !has_memory(p, p->sum_bytes + (size_t)workspace_bytes))
        p->plan = NULL;
    d->plans[d->n_plans++] = p;
    return p;
}

static int is_same(const struct mb_attention_shape *a, const struct mb_attention_shape *b)
{
    return a->n_samples == b->n_samples && a->seq == b->seq && a->n_heads == b->n_heads &&
           a->n_groups == b->n_groups && a->head_dim == b->head_dim;
}

/* With its memory; NULL: not for cuDNN. */
static struct plan *plan_of(struct mb_cuda_dnn *d, const struct mb_attention_shape *shape,
                            enum mb_dtype dtype, int is_backward)
{
    struct plan *p = NULL;
    for (size_t i = 0; i < d->n_plans && p == NULL; i++)
        if (d->plans[i]->is_backward == is_backward && d->plans[i]->dtype == dtype &&
            is_same(&d->plans[i]->shape, shape))
            p = d->plans[i];
    if (p == NULL)
        p = new_plan(d, shape, dtype, is_backward);
    return p != NULL && p->plan != NULL ? p : NULL;
}

static int fits(const struct mb_cuda_dnn *d, const struct mb_attention_shape *shape,
                enum mb_dtype dtype, float dropout, const void *qkv, const void *out)
{
    return d != NULL && dtype != MB_DTYPE_F32 && dropout <= 0 && shape->head_dim % 8 == 0 &&
           shape->head_dim <= MAX_HEAD_DIM && shape->seq % 8 == 0 &&
           ((uintptr_t)qkv | (uintptr_t)out) % 16 == 0;
}

/* ---- running ---- */

struct pack {
    int64_t ids[MAX_IDS];
    void *pointers[MAX_IDS];
    int64_t n;
};

static void add(struct pack *p, int64_t id, const void *pointer)
{
    p->ids[p->n] = id;
    p->pointers[p->n++] = (void *)(uintptr_t)pointer;
}

/* q, k and v of a run's first sample or of its gradients, from the beginning of its rows. */
static void add_heads(struct pack *pack, const struct extent *e, int64_t first, const void *qkv)
{
    const char *at = qkv;
    const size_t head = (size_t)e->channels * 2;
    const size_t queries = e->heads == e->keys ? 1 : (size_t)e->heads;
    add(pack, first, at);
    add(pack, first + 1, at + queries * head);
    add(pack, first + 2, at + (queries + 1) * head);
}

static void run(struct mb_cuda_dnn *d, struct mb_stream *stream, const struct plan *p,
                struct pack *pack, const struct mb_attention_shape *shape)
{
    const float scale = 1.0f / sqrtf((float)shape->head_dim), masked = -INFINITY, one = 1;
    add(pack, ID_SCALE, &scale);
    add(pack, ID_MASKED, &masked);
    if (p->is_backward)
        add(pack, ID_ONE, &one);
    int status = d->api.set_stream(d->handle, stream->cuda);
    if (status == 0)
        status = dnn_run(&p->graph, p->plan, pack->ids, pack->pointers, pack->n,
                         (char *)p->memory + p->sum_bytes);
    if (status != 0 && stream->err.code == 0)
        mb_err_set(&stream->err, MB_EIO,
                   "cuDNN refuses the attention of %zu samples, %zu heads, %zu tokens (status "
                   "%d); MOBULA_CUDA_CUDNN=0 does without it",
                   shape->n_samples, shape->n_heads, shape->seq, status);
}

int mb_cuda_dnn_attention_forward(struct mb_cuda_dnn *d, struct mb_stream *stream,
                                  const struct mb_attention_forward *a)
{
    if (!fits(d, &a->shape, a->dtype, a->dropout.probability, a->qkv, a->out))
        return 0;
    const struct plan *p = plan_of(d, &a->shape, a->dtype, 0);
    if (p == NULL)
        return 0;
    const struct extent e = extent_of(&a->shape);
    for (int64_t i = 0; i < e.runs; i++) {
        struct pack pack = {.n = 0};
        add_heads(&pack, &e, ID_Q, (const char *)a->qkv + i * e.seq * e.qkv_row * 2);
        add(&pack, ID_OUT, (const char *)a->out + i * e.seq * e.out_row * 2);
        add(&pack, ID_LOG_SUM, a->log_sum + i * e.batch * e.heads * e.seq);
        run(d, stream, p, &pack, &a->shape);
    }
    return 1;
}

int mb_cuda_dnn_attention_backward(struct mb_cuda_dnn *d, struct mb_stream *stream,
                                   const struct mb_attention_backward *a)
{
    if (!fits(d, &a->shape, a->dtype, a->dropout.probability, a->qkv, a->out) ||
        !fits(d, &a->shape, a->dtype, a->dropout.probability, a->d_qkv, a->d_out))
        return 0;
    const struct plan *p = plan_of(d, &a->shape, a->dtype, 1);
    if (p == NULL)
        return 0;
    const struct extent e = extent_of(&a->shape);
    for (int64_t i = 0; i < e.runs; i++) {
        struct pack pack = {.n = 0};
        const int64_t qkv = i * e.seq * e.qkv_row * 2, out = i * e.seq * e.out_row * 2;
        const int64_t rows = i * e.batch * e.heads * e.seq;
        add_heads(&pack, &e, ID_Q, (const char *)a->qkv + qkv);
        add_heads(&pack, &e, ID_D_Q, (const char *)a->d_qkv + qkv);
        add(&pack, ID_OUT, (const char *)a->out + out);
        add(&pack, ID_D_OUT, (const char *)a->d_out + out);
        add(&pack, ID_LOG_SUM, a->log_sum + rows);
        add(&pack, ID_DELTA, a->scratch + rows);
        add(&pack, ID_D_Q_SUM, p->memory);
        run(d, stream, p, &pack, &a->shape);
    }
    return 1;
}
