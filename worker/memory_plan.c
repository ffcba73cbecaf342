/*
 *  1. A rank's place in the layout gives the model's configuration; mb_gpt_measure() gives its
 *     arena and the number of elements, from which optimizer and checkpoints follow.
 *  2. A node's need is the sum over its ranks; ranks of one stage have one measure.
 *     Estimates are told apart: they may be too high, so what is refused is refused without them.
 *  3. Arguments of which a tensor group, a stage or a batch cannot be had are MB_EINVAL.
 * What the calculation itself needs is a table of the layers: a failure there is MB_ENOMEM.
 */
#include "worker/memory_plan.h"

#include <string.h>
#include <sys/stat.h>
#include "base/alloc.h"
#include "base/str.h"
#include "worker/args_model.h"
#include "worker/checkpoint/common.h"
#include "worker/checkpoint/exchange.h"
#include "worker/data/loader.h"
#include "worker/parallel/pipeline.h"

enum {
    FLOAT_BYTES = 4,
    PIPE_BYTES = 1 << 20,   /* of shared memory between two ranks of a host, each way */
    INDEX_BYTES = 12,       /* a sample: where it begins, and its place in the order */
    BLEND_BYTES = 10,       /* more of a blend: which data set, which sample of it */
    SEQUENCE_BYTES = 12,    /* of an .idx, at least */
    DOCUMENT_BYTES = 4,     /* of an epoch, each */
    MOCK_TOKENS = 2048,     /* of a mock document, on average */
    BATCH_ARRAYS = 4,       /* tokens, labels, loss mask, ones */
    WORK_BYTES = 8 << 20,   /* of threads, of the product library's buffers, of small things */
    GPU_RESERVE = 512 << 20 /* what cuDNN and NCCL take when they first run */
};

static int is_on_host(const struct mb_plan_gang *g)
{
    return g->dev->ops->memory == NULL;
}

/* ---- a rank's place ---- */

static uint32_t ranks_of_stage(const struct mb_args *a, uint32_t world_size)
{
    return world_size / (uint32_t)a->pipeline_model_parallel_size;
}

static uint32_t data_ranks(const struct mb_args *a, uint32_t world_size) /* context's with them */
{
    return ranks_of_stage(a, world_size) / (uint32_t)a->tensor_model_parallel_size;
}

void mb_plan_config(const struct mb_args *a, uint64_t vocab_size, uint32_t world_size,
                    uint32_t rank, struct mb_gpt_config *c)
{
    const uint64_t n_micro =
        (uint64_t)(a->global_batch_size / (a->micro_batch_size * a->data_parallel_size));
    mb_args_model(a, vocab_size, c);
    c->n_tensor_parts = (size_t)a->tensor_model_parallel_size;
    c->n_context_parts = (size_t)a->context_parallel_size;
    c->n_stages = (size_t)a->pipeline_model_parallel_size;
    c->own_stage = rank / ranks_of_stage(a, world_size);
    c->n_chunks = mb_args_chunks(a);
    const struct mb_pipeline_place place = {(uint32_t)c->own_stage, (uint32_t)c->n_stages,
                                            (uint32_t)c->n_chunks};
    c->n_in_flight = mb_pipeline_in_flight(place, n_micro);
}

static int is_shared(const struct mb_args *a)
{
    return a->tensor_model_parallel_size > 1 || a->pipeline_model_parallel_size > 1;
}

/* ---- the parts ---- */

/* Numbers that the optimizer keeps of an element: exp_avg and exp_avg_sq, or SGD's momentum. */
static double states_of(const struct mb_args *a)
{
    return strcmp(a->optimizer, "sgd") == 0 ? 1 : 2;
}

static void add(struct mb_plan *p, const char *name, double bytes, int of_device)
{
    if (bytes <= 0) {
        return;
    }
    p->rows[p->n_rows++] = (struct mb_plan_row){name, bytes};
    if (of_device) {
        p->device_bytes += bytes;
        p->n_device_rows = p->n_rows;
    } else {
        p->host_bytes += bytes;
    }
}

static void add_estimate(struct mb_plan *p, const char *name, double bytes, double estimate,
                         int of_device)
{
    add(p, name, bytes, of_device);
    *(of_device ? &p->device_estimate_bytes : &p->host_estimate_bytes) += estimate;
}

/* Of the rank's part of the parameters, those whose optimizer or checkpoint is its own. */
static double own_elements(const struct mb_args *a, uint32_t world_size, size_t n_elements)
{
    return (double)n_elements / data_ranks(a, world_size);
}

/* What a save copies (snapshot.h), in floats. */
static double save_floats(const struct mb_plan_gang *g, const struct mb_args *a, uint32_t rank,
                          size_t n_elements, size_t n_whole)
{
    const double states = a->no_save_optim ? 0 : states_of(a);
    double n = rank == 0 ? (double)n_whole : 0;
    n += states * (double)n_whole / g->world_size;
    if (is_shared(a)) {
        n += (1 + states) * own_elements(a, g->world_size, n_elements) + MB_EXCHANGE_WINDOW;
    }
    return n;
}

static double load_floats(const struct mb_plan_gang *g, const struct mb_args *a, size_t n_elements,
                          size_t n_whole)
{
    if (a->load == NULL && a->pretrained_checkpoint == NULL) {
        return 0;
    }
    const double states = a->no_load_optim ? 0 : states_of(a);
    return is_shared(a)
               ? MB_EXCHANGE_WINDOW + (double)n_elements + states * (double)n_whole / g->world_size
               : MB_EXCHANGE_WINDOW + own_elements(a, g->world_size, n_elements);
}

static void add_checkpoints(const struct mb_plan_gang *g, const struct mb_args *a, uint32_t rank,
                            size_t n_elements, size_t n_whole, struct mb_plan *p)
{
    double save = 0, load = load_floats(g, a, n_elements, n_whole);
    if (a->save != NULL) {
        save = a->async_save || is_shared(a) ? save_floats(g, a, rank, n_elements, n_whole)
                                             : MB_CHECKPOINT_PIECE;
    }
    if (a->async_save && a->save != NULL) {
        add(p, "host memory: snapshot of a save", save * FLOAT_BYTES, 0);
    } else {
        add(p, "host memory: while it saves", save * FLOAT_BYTES, 0);
        load = load > save ? load - save : 0; /* never both at once */
    }
    add(p, "host memory: while it loads", load * FLOAT_BYTES, 0);
}

/* ---- the data ---- */

static double file_bytes(const char *prefix, const char *suffix)
{
    char *path = mb_asprintf("%s%s", prefix, suffix);
    struct stat st;
    const double n = path != NULL && stat(path, &st) == 0 ? (double)st.st_size : 0;
    mb_free(path);
    return n;
}

/* Documents of one split over all its epochs; of an .idx that cannot be read the loader tells. */
static double documents(const struct mb_args *a, const struct mb_args_list *paths, double n_samples)
{
    double sequences = 0, tokens = 0;
    for (size_t i = 0; i < paths->n; i++) {
        sequences += file_bytes(paths->items[i], ".idx") / SEQUENCE_BYTES;
        tokens += file_bytes(paths->items[i], ".bin") / sizeof(uint16_t);
    }
    if (a->mock_data) {
        sequences = MB_MOCK_DOCUMENTS / (double)MB_N_SPLITS;
        tokens = sequences * MOCK_TOKENS;
    }
    const double epochs = tokens > 0 ? n_samples * (double)a->seq_length / tokens + 1 : 0;
    return sequences * epochs;
}

/* estimate: of the bytes, those that are guessed from the sizes of files, or of splits that the
 * data need not have. */
static double data_bytes(const struct mb_args *a, double *estimate)
{
    const struct mb_args_list *own[MB_N_SPLITS] = {&a->train_data_path, &a->valid_data_path,
                                                   &a->test_data_path};
    const struct mb_data_schedule s = {
        .train_iters = (uint64_t)a->train_iters,
        .train_samples = a->train_samples != MB_ARGS_NONE ? (uint64_t)a->train_samples : 0,
        .global_batch_size = (uint64_t)a->global_batch_size,
        .eval_interval = (uint64_t)a->eval_interval,
        .eval_iters = (uint64_t)a->eval_iters};
    uint64_t n_samples[MB_N_SPLITS] = {0};
    double bytes = 0;
    *estimate = 0;
    if (mb_data_sizes(&s, n_samples, NULL) != 0) {
        return 0; /* refused with its own text when the data are built */
    }
    for (int i = 0; i < MB_N_SPLITS; i++) {
        const struct mb_args_list *paths = a->data_path.n > 0 ? &a->data_path : own[i];
        const double n = (double)n_samples[i];
        if (n_samples[i] == 0) {
            continue;
        }
        const double of_split = n * (INDEX_BYTES + (paths->n > 1 ? BLEND_BYTES : 0)) +
                                (a->mock_data ? DOCUMENT_BYTES * (double)MB_MOCK_DOCUMENTS : 0);
        *(i == MB_SPLIT_TRAIN ? &bytes : estimate) += of_split; /* the others may be absent */
        *estimate += DOCUMENT_BYTES * documents(a, paths, n);
    }
    return bytes + *estimate;
}

/* ---- a rank ---- */

static int measure(const struct mb_plan_gang *g, const struct mb_args *a, uint32_t rank,
                   struct mb_gpt_sizes *sizes, size_t *n_whole, struct mb_err *err)
{
    struct mb_gpt_config c;
    struct mb_param *whole = NULL;
    size_t n_params = 0;
    mb_plan_config(a, g->vocab_size, g->world_size, rank, &c);
    int rc = mb_gpt_measure(g->dev, &c, (size_t)a->micro_batch_size, sizes, err);
    if (rc == 0) {
        rc = mb_gpt_whole_params(&c, &whole, &n_params, n_whole, err);
    }
    mb_free(whole);
    return rc;
}

static void compose(const struct mb_plan_gang *g, const struct mb_args *a, uint32_t rank,
                    const struct mb_gpt_sizes *s, size_t n_whole, struct mb_plan *out)
{
    double guessed = 0;
    const double data = data_bytes(a, &guessed);
    *out = (struct mb_plan){0};
    for (size_t i = 0; i < s->n_parts; i++) {
        add(out, s->parts[i].name, (double)s->parts[i].size_bytes, 1);
    }
    out->device_bytes = s->total_bytes; /* with sizes that no part can tell, too */
    add(out, "optimizer",
        states_of(a) * FLOAT_BYTES *
            (a->use_distributed_optimizer ? own_elements(a, g->world_size, s->n_elements)
                                          : (double)s->n_elements),
        1);
    if (a->grad_reduce_in_bf16 && data_ranks(a, g->world_size) > 1) {
        add(out, "gradients: bf16, for sums", sizeof(uint16_t) * (double)s->n_elements, 1);
    }
    if (!is_on_host(g)) {
        add_estimate(out, "libraries: cuDNN, NCCL (estimate)", GPU_RESERVE, GPU_RESERVE, 1);
    } else if (a->fp16) {
        add(out, "scratch: operands in fp32", FLOAT_BYTES * (double)s->widened, 1);
    }
    add(out, "host memory: batch", BATCH_ARRAYS * FLOAT_BYTES * (double)s->batch_floats, 0);
    add_estimate(out, "host memory: indices of data", data, guessed, 0);
    add(out, "host memory: between ranks",
        (double)(g->n_local - 1) * PIPE_BYTES * (a->async_save && a->save != NULL ? 2 : 1), 0);
    add_estimate(out, "host memory: threads, libraries", WORK_BYTES, WORK_BYTES, 0);
    add_checkpoints(g, a, rank, s->n_elements, n_whole, out);
}

int mb_plan_rank(const struct mb_plan_gang *g, const struct mb_args *a, uint32_t rank,
                 struct mb_plan *out, struct mb_err *err)
{
    struct mb_gpt_sizes sizes;
    size_t n_whole = 0;
    int rc = measure(g, a, rank, &sizes, &n_whole, err);
    if (rc == 0) {
        compose(g, a, rank, &sizes, n_whole, out);
    }
    return rc;
}

static int print_row(struct mb_buf *out, const char *name, double bytes)
{
    char size[16];
    const uint64_t n = bytes < 0x1p63 ? (uint64_t)bytes : (uint64_t)INT64_MAX;
    return mb_buf_printf(out, "%-32s %12s %16llu\n", name, mb_human_bytes(n, size),
                         (unsigned long long)n);
}

int mb_plan_print(const struct mb_plan_gang *g, const struct mb_plan *p, struct mb_buf *out)
{
    int rc = mb_buf_printf(out, "%-32s %12s %16s\n", "device memory", "size", "bytes");
    for (size_t i = 0; i < p->n_rows && rc == 0; i++) {
        if (i == p->n_device_rows && !is_on_host(g)) {
            rc = print_row(out, "total", p->device_bytes);
        }
        rc = rc == 0 ? print_row(out, p->rows[i].name, p->rows[i].bytes) : rc;
    }
    if (rc != 0) {
        return rc;
    }
    return is_on_host(g) ? print_row(out, "total", p->device_bytes + p->host_bytes)
                         : print_row(out, "total of host memory", p->host_bytes);
}

/* ---- a node ---- */

static double larger(double a, double b)
{
    return a > b ? a : b;
}

int mb_plan_need(const struct mb_plan_gang *g, const struct mb_args *a, struct mb_plan_room *out,
                 struct mb_plan_room *certain, struct mb_err *err)
{
    const uint32_t stage = ranks_of_stage(a, g->world_size);
    struct mb_gpt_sizes sizes;
    struct mb_plan_room sure = {0};
    size_t n_whole = 0;
    *out = (struct mb_plan_room){0};
    for (uint32_t i = 0; i < g->n_local; i++) {
        const uint32_t rank = g->first_local + i;
        struct mb_plan p;
        int rc = i == 0 || rank % stage == 0 ? measure(g, a, rank, &sizes, &n_whole, err) : 0;
        if (rc != 0) {
            return rc;
        }
        compose(g, a, rank, &sizes, n_whole, &p);
        const double device_sure = p.device_bytes - p.device_estimate_bytes;
        out->host_bytes += p.host_bytes + (is_on_host(g) ? p.device_bytes : 0);
        sure.host_bytes += p.host_bytes - p.host_estimate_bytes + (is_on_host(g) ? device_sure : 0);
        if (!is_on_host(g)) {
            out->device_bytes = larger(out->device_bytes, p.device_bytes);
            sure.device_bytes = larger(sure.device_bytes, device_sure);
        }
    }
    if (certain != NULL) {
        *certain = sure;
    }
    return 0;
}

int mb_plan_fits(const struct mb_plan_room *need, const struct mb_plan_room *room)
{
    return need->host_bytes <= room->host_bytes && need->device_bytes <= room->device_bytes;
}
