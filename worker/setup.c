/*
 * From arguments to a trainer that can take its first step; the lines are Megatron-LM's, in its
 * order.
 *
 *  1. Say what the run is: sizes, arguments, tokenizer.
 *  2. Meet the other ranks: listen, report the endpoint, wait for start, connect. Alone, nothing.
 *  3. Open the backend beside the executable, let the GPUs meet, print the memory plan and refuse
 * it if it does not fit, build the model.
 *  4. Build the optimizer (the rank's share of it with --use-distributed-optimizer) and the
 * schedule.
 *  5. Load a checkpoint, which decides how many samples are consumed; then build the data.
 * Failures: any step's error text names what was wrong; mb_trainer_close() undoes what was done.
 */
#include "worker/trainer.h"

#include <arpa/inet.h>
#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/str.h"
#include "worker/data/tokenizer/tokenizer.h"
#include "worker/memory_plan.h"
#include "worker/tensorboard.h"
#include "worker/trainer_alike.h"

enum { MINUTE_MS = 60 * 1000, START_TIMEOUT_MS = 24 * 60 * MINUTE_MS };

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "out of memory building the trainer");
}

/* ---- what the run is ---- */

static int say_arguments(struct mb_trainer *t, struct mb_err *err)
{
    const struct mb_args *a = &t->args;
    struct mb_buf dump = {0};
    mb_trainer_say(t,
                   "using world size: %u, data-parallel size: %u, context-parallel size: %u, "
                   "hierarchical context-parallel sizes: None"
                   "tensor-model-parallel size: %u, encoder-tensor-model-parallel size: 0, "
                   "pipeline-model-parallel size: %u, encoder-pipeline-model-parallel size: 0, "
                   "pipeline-model-parallel size: %u \n",
                   t->world_size, t->dp_size / t->cp_size, t->cp_size, t->tp_size, t->pp_size,
                   t->pp_size);
    if (a->virtual_pipeline_model_parallel_size != MB_ARGS_NONE) {
        mb_trainer_say(t, "Number of virtual stages per pipeline stage: %" PRId64 "\n",
                       a->virtual_pipeline_model_parallel_size);
    }
    mb_trainer_say(t, "%s", mb_buf_str(&a->notes));
    const char *connections = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    if (a->sequence_parallel && (connections == NULL || strcmp(connections, "1") != 0)) {
        mb_trainer_say(t, "note: CUDA_DEVICE_MAX_CONNECTIONS is not 1, which Megatron-LM requires "
                          "with --sequence-parallel; here it need not be\n");
    }
    mb_trainer_say(t, "using torch.%s for parameters ...\n",
                   mb_args_computes_in_bf16(a) ? "bfloat16"
                   : a->fp16                   ? "float16"
                                               : "float32");
    if (mb_args_dump(a, &dump) != 0) {
        mb_buf_close(&dump);
        return no_memory(err);
    }
    mb_trainer_say(t,
                   "------------------------ arguments ------------------------\n%s"
                   "-------------------- end of arguments ---------------------\n",
                   mb_buf_str(&dump));
    mb_buf_close(&dump);
    if (a->train_samples != MB_ARGS_NONE) {
        mb_trainer_say(t, "setting training iterations to %" PRId64 "\n", a->train_iters);
    }
    t->ramp = mb_args_ramp(a);
    t->batch = mb_batch_ramp_at(&t->ramp, 0);
    if (a->rampup_batch_size.n > 0) {
        mb_trainer_say(t,
                       "INFO:megatron.core.num_microbatches_calculator:setting number of "
                       "microbatches to ramp up: from global batch size %" PRId64 " to %" PRId64
                       " with batch size increments %" PRId64 " over %" PRId64 " samples\n",
                       t->ramp.start, t->ramp.full, t->ramp.increment, t->ramp.samples);
        return 0;
    }
    mb_trainer_say(t,
                   "INFO:megatron.core.num_microbatches_calculator:setting number of microbatches "
                   "to constant %" PRId64 "\n",
                   a->global_batch_size / (a->micro_batch_size * a->data_parallel_size));
    return 0;
}

struct mb_tokenizer_options mb_trainer_tokenizer_options(const struct mb_args *a)
{
    return (struct mb_tokenizer_options){
        .type = a->tokenizer_type,
        .vocab_file = a->vocab_file,
        .merge_file = a->merge_file,
        .vocab_size = a->vocab_size != MB_ARGS_NONE ? a->vocab_size : 0,
        .tokenizer_model = a->tokenizer_model,
        .leaves_out_special_tokens = !a->tokenizer_hf_include_special_tokens,
        .tiktoken_pattern = a->tiktoken_pattern,
        .tiktoken_num_special_tokens = a->tiktoken_num_special_tokens,
        .tiktoken_special_tokens = (const char *const *)a->tiktoken_special_tokens.items,
        .n_tiktoken_special_tokens = a->tiktoken_special_tokens.n,
    };
}

static int build_tokenizer(struct mb_trainer *t, struct mb_err *err)
{
    struct mb_args *a = &t->args;
    struct mb_tokenizer *tokenizer = NULL;
    const struct mb_tokenizer_options o = mb_trainer_tokenizer_options(a);
    mb_trainer_say(t, "> building %s tokenizer ...\n", a->tokenizer_type);
    int rc = mb_tokenizer_create(&o, &tokenizer, err);
    if (rc != 0) {
        return a->checkpoint_tokenizer.is_taken
                   ? mb_err_wrap(err,
                                 "--use-checkpoint-args: the checkpoint's tokenizer (the command "
                                 "line's is used with "
                                 "--no-use-tokenizer-model-from-checkpoint-args)")
                   : rc;
    }
    t->vocab_size = mb_tokenizer_vocab_size(tokenizer);
    a->true_vocab_size = (int64_t)t->vocab_size;
    t->eod = mb_tokenizer_eod(tokenizer);
    mb_tokenizer_destroy(tokenizer);
    a->padded_vocab_size =
        (int64_t)mb_gpt_padded_vocab(t->vocab_size, (size_t)a->make_vocab_size_divisible_by,
                                     (size_t)a->tensor_model_parallel_size);
    if (a->checkpoint_padded_vocab_size > 0) {
        a->padded_vocab_size = a->checkpoint_padded_vocab_size;
    }
    if (a->padded_vocab_size < a->true_vocab_size) {
        return mb_err_set(err, MB_EINVAL,
                          "the tokenizer has %" PRId64 " tokens, the checkpoint %" PRId64
                          " rows for them",
                          a->true_vocab_size, a->padded_vocab_size);
    }
    mb_trainer_say(t,
                   " > padded vocab (size: %" PRIu64 ") with %" PRIu64
                   " dummy tokens (new size: %" PRId64 ")\n",
                   t->vocab_size, (uint64_t)a->padded_vocab_size - t->vocab_size,
                   a->padded_vocab_size);
    return 0;
}

/* ---- meeting the other ranks ---- */

/* The address by which this host reaches MASTER_ADDR: peers reach us by it, too. */
static void own_address(char out[INET6_ADDRSTRLEN])
{
    const char *given = getenv("MOBULA_NODE_IP"), *master = getenv("MASTER_ADDR");
    snprintf(out, INET6_ADDRSTRLEN, "%s", given != NULL ? given : "127.0.0.1");
    if (given != NULL || master == NULL) {
        return;
    }
    struct addrinfo hints = {.ai_socktype = SOCK_DGRAM}, *list = NULL;
    struct sockaddr_storage own;
    socklen_t len = sizeof own;
    if (getaddrinfo(master, "9", &hints, &list) != 0) {
        return;
    }
    int fd = socket(list->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    /* Connecting a datagram socket sends nothing: it only chooses the route. */
    if (fd >= 0 && connect(fd, list->ai_addr, list->ai_addrlen) == 0 &&
        getsockname(fd, (struct sockaddr *)&own, &len) == 0) {
        const void *address = own.ss_family == AF_INET6
                                  ? (const void *)&((struct sockaddr_in6 *)&own)->sin6_addr
                                  : (const void *)&((struct sockaddr_in *)&own)->sin_addr;
        inet_ntop(own.ss_family, address, out, INET6_ADDRSTRLEN);
    }
    if (fd >= 0) {
        close(fd);
    }
    freeaddrinfo(list);
}

/* The threads that save agree among themselves, over a communicator of their own. */
static int saves_asynchronously(const struct mb_trainer *t)
{
    return t->args.async_save && t->args.save != NULL;
}

uint64_t mb_trainer_timeout_ms(const struct mb_trainer *t)
{
    return (uint64_t)t->args.distributed_timeout_minutes * MINUTE_MS;
}

static int meet_through_agent(struct mb_trainer *t, struct mb_err *err)
{
    char address[INET6_ADDRSTRLEN];
    struct mb_comm_listener *l = NULL;
    struct mb_report start = {0};
    own_address(address);
    struct mb_comm_options o = {.rank = t->rank,
                                .world_size = t->world_size,
                                .address = address,
                                .timeout_ms = mb_trainer_timeout_ms(t)};
    int rc = mb_comm_listen(&o, &l, err);
    if (rc != 0) {
        return rc;
    }
    struct mb_report endpoint = {.type = MB_REPORT_ENDPOINT,
                                 .text = (char *)(uintptr_t)mb_comm_listener_endpoint(l)};
    rc = mb_report_client_send(t->report, &endpoint, err);
    if (rc == 0) {
        /* Another node may still fetch its data; the agent's end of the socket is the sign of life.
         */
        rc = mb_report_client_wait_start(t->report, START_TIMEOUT_MS, &start, err);
    }
    if (rc == 0) {
        rc = mb_comm_connect(l, (const char *const *)start.endpoints, start.n_endpoints, &t->comm,
                             err);
    }
    if (rc == 0 && saves_asynchronously(t)) {
        mb_comm_barrier(t->comm); /* who is through with the first meeting may come to the second */
        rc = mb_comm_synchronize(t->comm, err);
        if (rc == 0) {
            rc = mb_comm_connect(l, (const char *const *)start.endpoints, start.n_endpoints,
                                 &t->save_comm, err);
        }
    }
    mb_report_close(&start);
    mb_comm_listener_destroy(l);
    return rc;
}

int mb_trainer_meet(struct mb_trainer *t, struct mb_err *err)
{
    if (t->comm != NULL) {
        return 0;
    }
    mb_trainer_say(t, "> initializing torch distributed ...\n");
    int rc = t->report != NULL ? meet_through_agent(t, err) : mb_comm_create_single(&t->comm, err);
    if (rc == 0 && t->report == NULL && saves_asynchronously(t)) {
        rc = mb_comm_create_single(&t->save_comm, err);
    }
    if (rc != 0) {
        return mb_err_wrap(err, "rank %u", t->rank);
    }
    return 0;
}

/* Whether this rank has all of the model. */
static int is_alone(const struct mb_trainer *t)
{
    return t->tp_size == 1 && t->pp_size == 1;
}

/* Megatron-LM's order: rank = tp + T * (cp + C * (data + D * pp)). */
static void find_place(struct mb_trainer *t)
{
    t->tp_size = (uint32_t)t->args.tensor_model_parallel_size;
    t->pp_size = (uint32_t)t->args.pipeline_model_parallel_size;
    t->cp_size = (uint32_t)t->args.context_parallel_size;
    t->dp_size = t->world_size / (t->tp_size * t->pp_size);
    t->tp_rank = t->rank % t->tp_size;
    t->dp_rank = t->rank / t->tp_size % t->dp_size;
    t->cp_rank = t->dp_rank % t->cp_size;
    t->data_rank = t->dp_rank / t->cp_size;
    t->pp_rank = t->rank / (t->tp_size * t->dp_size);
}

static int form_groups(struct mb_trainer *t, struct mb_err *err)
{
    const uint32_t stage = t->tp_size * t->dp_size; /* ranks of one */
    const uint32_t first = t->rank % stage;         /* the same place in the first stage */
    const int is_at_end = t->pp_rank == 0 || t->pp_rank + 1 == t->pp_size;
    int rc = 0;
    t->dp_comm = is_alone(t) ? t->comm : NULL;
    if (t->tp_size > 1) {
        rc = mb_comm_create_group(t->comm, t->rank - t->tp_rank, 1, t->tp_size, &t->tp_comm, err);
    }
    if (rc == 0 && t->cp_size > 1) {
        rc = mb_comm_create_group(t->comm, t->rank - t->tp_size * t->cp_rank, t->tp_size,
                                  t->cp_size, &t->cp_comm, err);
    }
    if (rc == 0 && !is_alone(t)) {
        rc = mb_comm_create_group(t->comm, t->pp_rank * stage + t->tp_rank, t->tp_size, t->dp_size,
                                  &t->dp_comm, err);
    }
    if (rc == 0 && t->pp_size > 1) {
        rc = mb_comm_create_group(t->comm, first, stage, t->pp_size, &t->pp_comm, err);
    }
    if (rc == 0 && t->pp_size > 1 && is_at_end && !t->args.untie_embeddings_and_output_weights) {
        rc = mb_comm_create_group(t->comm, first, stage * (t->pp_size - 1), 2, &t->tied_comm, err);
    }
    if (rc != 0) {
        return mb_err_wrap(err, "rank %u", t->rank);
    }
    mb_trainer_say(t,
                   "> initialized tensor model parallel with size %u\n"
                   "> initialized pipeline model parallel with size %u\n",
                   t->tp_size, t->pp_size);
    if (t->cp_size > 1) {
        mb_trainer_say(t, "> initialized context parallel with size %u\n", t->cp_size);
    }
    mb_trainer_say(t, "> %s\n", mb_comm_describe(t->comm));
    mb_trainer_say(t, "> setting random seeds to %" PRId64 " ...\n", t->args.seed);
    return 0;
}

/* ---- device and model ---- */

static int open_beside(struct mb_trainer *t, const char *library, struct mb_err *err)
{
    static const char *const PLACES[] = {"../lib", ".", "../lib/mobula"};
    char *dir = mb_fs_self_dir(err);
    int rc = dir != NULL ? MB_ENOENT : MB_EIO;
    for (size_t i = 0; i < sizeof PLACES / sizeof PLACES[0] && rc == MB_ENOENT; i++) {
        char *place = mb_path_join(dir, PLACES[i]);
        char *path = place != NULL ? mb_path_join(place, library) : NULL;
        rc = path != NULL ? mb_backend_open(path, 0, &t->dev, err) : no_memory(err);
        mb_free(path);
        mb_free(place);
    }
    mb_free(dir);
    return rc;
}

/* The GPU where nccl is asked for, which is the default, and never silently the CPU instead. Each
 * rank sees one GPU: its agent has chosen it. */
static int open_backend(struct mb_trainer *t, struct mb_err *err)
{
    if (strcmp(t->args.distributed_backend, "nccl") != 0) {
        return open_beside(t, "libmobula_cpu.so", err);
    }
    if (t->args.deterministic_mode &&
        (setenv("MOBULA_CUDA_TUNE", "0", 1) != 0 || setenv("NCCL_ALGO", "Ring", 0) != 0)) {
        return no_memory(err);
    }
    int rc = open_beside(t, "libmobula_cuda.so", err);
    if (rc == MB_ENOENT) {
        rc = mb_err_set(err, MB_EUNSUPPORTED,
                        "this build has no CUDA backend (libmobula_cuda.so); --distributed-backend "
                        "gloo trains on the CPU");
    }
    return rc != 0 ? mb_err_wrap(err, "--distributed-backend nccl") : 0;
}

/* Takes *c also on failure, when it becomes NULL. There need not be one. */
static int meet_on_device(struct mb_trainer *t, struct mb_comm **c, struct mb_err *err)
{
    struct mb_comm *host = *c;
    if (host == NULL || mb_comm_world_size(host) == 1 || t->dev.ops->collectives == NULL) {
        return 0;
    }
    *c = NULL;
    int rc = mb_comm_create_device(host, &t->dev, mb_trainer_timeout_ms(t), c, err);
    if (rc != 0) {
        return mb_err_wrap(err, "rank %u", t->rank);
    }
    mb_trainer_say(t, "> %s\n", mb_comm_describe(*c));
    return 0;
}

/* GPUs reach each other through a library of their own; the carrier of the host stays for the rest.
 * Ranks that share a model have nothing on GPUs to tell the whole world. */
static int meet_on_devices(struct mb_trainer *t, struct mb_err *err)
{
    int rc = meet_on_device(t, &t->cp_comm, err);
    if (is_alone(t)) {
        rc = rc == 0 ? meet_on_device(t, &t->comm, err) : rc;
        t->dp_comm = t->comm;
        return rc;
    }
    struct mb_comm **const groups[] = {&t->tp_comm, &t->dp_comm, &t->tied_comm};
    for (size_t i = 0; i < sizeof groups / sizeof groups[0] && rc == 0; i++) {
        rc = meet_on_device(t, groups[i], err);
    }
    return rc == 0 ? mb_trainer_make_links(t, err) : rc;
}

/* The rank's own parameters are in the order of the whole model's, with some left out. */
static void list_parts(struct mb_trainer *t)
{
    size_t n = 0, at = 0;
    const struct mb_param *own = mb_gpt_params(t->gpt, &n);
    for (size_t i = 0; i < t->n_tensors && at < n; i++) {
        if (strcmp(t->tensors[i].name, own[at].name) == 0) {
            const struct mb_param *p = &own[at++];
            const int is_on_all = p->n == p->n_whole;
            t->parts[i] = (struct mb_checkpoint_part){
                p->offset, p->n,      p->start,
                p->run,    p->stride, p->is_copy || (is_on_all && t->tp_rank > 0)};
        }
    }
    assert(at == n);
}

/* Checkpoints hold whole tensors, in the order of a rank that has all of them. */
static int list_tensors(struct mb_trainer *t, struct mb_err *err)
{
    const struct mb_param *p;
    int rc = mb_gpt_whole_params(mb_gpt_config(t->gpt), &t->whole_params, &t->n_tensors,
                                 &t->n_whole_elements, err);
    if (rc != 0) {
        return rc;
    }
    p = t->whole_params;
    t->tensors = mb_calloc(t->n_tensors, sizeof *t->tensors);
    t->parts = is_alone(t) ? NULL : mb_calloc(t->n_tensors, sizeof *t->parts);
    if (t->tensors == NULL || (!is_alone(t) && t->parts == NULL)) {
        return no_memory(err);
    }
    for (size_t i = 0; i < t->n_tensors; i++) {
        t->tensors[i] = (struct mb_checkpoint_tensor){
            p[i].name, p[i].n_dims, {p[i].shape[0], p[i].shape[1]}, p[i].offset, p[i].n};
    }
    if (t->parts != NULL) {
        list_parts(t);
    }
    t->n_elements = mb_gpt_n_elements(t->gpt);
    mb_comm_range(t->n_elements, t->dp_size, t->dp_rank, &t->begin, &t->end);
    t->layout = (struct mb_checkpoint_layout){t->parts, t->n_elements, t->begin, t->end};
    return 0;
}

/* Of all ranks the same: each strip is a sum of theirs. Collective. */
static int strips_of_environment(struct mb_trainer *t, size_t *out, struct mb_err *err)
{
    static const char NAME[] = "MOBULA_TENSOR_STRIPS";
    const char *text = getenv(NAME);
    int64_t n = 0;
    int is_alike = 0;
    int rc = text != NULL ? mb_parse_i64(text, 0, MB_GPT_STRIPS_MAX, NAME, &n, err) : 0;
    *out = (size_t)n;
    if (rc == 0) {
        rc = mb_trainer_is_everybodys(t, (uint64_t)n, &is_alike, err);
    }
    if (rc != 0 || is_alike) {
        return rc;
    }
    return mb_err_set(err, MB_EINVAL,
                      "%s is not the same on all ranks: here it is %s; ranks that share a model "
                      "would sum strips of different rows",
                      NAME, text != NULL ? text : "not set");
}

/* What comes of --cuda-graph-impl local: it is no reason not to train. */
static void say_graphs(const struct mb_trainer *t, const struct mb_gpt_config *c)
{
    const char *why = mb_gpt_graphs_refused(&t->dev, c);
    if (!c->graphs) {
        return;
    }
    if (why != NULL) {
        mb_trainer_say(t, " > no CUDA graphs: %s\n", why);
        return;
    }
    mb_trainer_say(t, " > CUDA graphs: a pass is captured when it comes the second time%s\n",
                   t->args.overlap_grad_reduce && t->dp_size > 1
                       ? ", but the backward pass of a step's last micro batch, in which "
                         "--overlap-grad-reduce begins sums"
                       : "");
}

/* Each part of the model once: its first data parallel rank, of those that share samples the first,
 * too. */
static void say_parameters(const struct mb_trainer *t, size_t n)
{
    if (t->dp_rank == 0) {
        printf(" > number of parameters on (tensor, pipeline) model parallel rank (%u, %u): %zu\n",
               t->tp_rank, t->pp_rank, n);
        fflush(stdout);
    }
}

static int build_model(struct mb_trainer *t, struct mb_err *err)
{
    const struct mb_args *a = &t->args;
    struct mb_gpt_config c;
    void *norm = NULL;
    mb_plan_config(a, t->vocab_size, t->world_size, t->rank, &c);
    c.tensor_group = t->tp_comm;
    c.context_group = t->cp_comm;
    const struct mb_pipeline_place place = {t->pp_rank, t->pp_size, c.n_chunks};
    const uint64_t n_micro =
        (uint64_t)(a->global_batch_size / (a->micro_batch_size * a->data_parallel_size));
    mb_trainer_say(t, "building GPT model ...\n");
    size_t n_parameters = 0;
    int rc = strips_of_environment(t, &c.n_strips, err);
    if (rc == 0) {
        rc = mb_pipeline_init(&t->pipeline, place, n_micro, err);
    }
    if (rc == 0) {
        rc = mb_gpt_count_parameters(&c, &n_parameters, err);
    }
    if (rc == 0) { /* said first: what does not fit is refused next */
        say_parameters(t, n_parameters);
        mb_trainer_say(t, " > backend: %s\n", t->dev.ops->describe(t->dev.ctx));
        say_graphs(t, &c);
        rc = mb_trainer_plan(t, err);
    }
    if (rc == 0) {
        rc = mb_gpt_create(&t->dev, &c, (size_t)a->micro_batch_size, &t->gpt, err);
    }
    if (rc == 0) {
        rc = t->dev.ops->alloc(t->dev.ctx, sizeof(double), &norm, err);
    }
    t->norm_device = norm;
    return rc == 0 ? list_tensors(t, err) : rc;
}

/* ---- optimizer ---- */

static int build_optimizer(struct mb_trainer *t, struct mb_err *err)
{
    const struct mb_args *a = &t->args;
    struct mb_optimizer_config c = {.rule = strcmp(a->optimizer, "sgd") == 0 ? MB_OPTIMIZER_SGD
                                                                             : MB_OPTIMIZER_ADAM,
                                    .beta1 = a->adam_beta1,
                                    .beta2 = a->adam_beta2,
                                    .eps = a->adam_eps,
                                    .sgd_momentum = a->sgd_momentum,
                                    .decoupled = !isnan(a->decoupled_lr)};
    size_t n_params = 0;
    const struct mb_param *params = mb_gpt_params(t->gpt, &n_params);
    size_t begin = a->use_distributed_optimizer ? t->begin : 0;
    size_t end = a->use_distributed_optimizer ? t->end : t->n_elements;
    if (a->grad_reduce_in_bf16 && t->dp_size > 1) {
        void *memory = NULL;
        int rc = t->dev.ops->alloc(t->dev.ctx, t->n_elements * sizeof *t->grads_bf16, &memory, err);
        if (rc != 0) {
            return mb_err_wrap(err, "--grad-reduce-in-bf16: gradients of %zu elements",
                               t->n_elements);
        }
        t->grads_bf16 = memory;
    }
    return mb_optimizer_create(&t->dev, &c, params, n_params, mb_gpt_master(t->gpt),
                               mb_gpt_grads(t->gpt), begin, end, &t->optimizer, err);
}

/* Better now than after hours of training. */
static int check_save_dir(const struct mb_trainer *t, struct mb_err *err)
{
    const char *dir = t->args.save;
    int rc = dir != NULL ? mb_fs_mkdir_p(dir, 0755, err) : 0;
    if (rc == 0 && dir != NULL && access(dir, W_OK | X_OK) != 0) {
        rc = mb_err_sys(err, errno, "%s", dir);
    }
    return rc != 0 ? mb_err_wrap(err, "--save") : 0;
}

int mb_trainer_create(struct mb_trainer *t, struct mb_err *err)
{
    struct mb_timer timers[] = {{.name = "model-and-optimizer-setup"},
                                {.name = "train/valid/test-data-iterators-setup"}};
    uint64_t from_us = mb_mono_us();
    t->last_saved = -1;
    find_place(t);
    int rc = check_save_dir(t, err);
    if (rc == 0) {
        rc = say_arguments(t, err);
    }
    if (rc == 0) {
        rc = build_tokenizer(t, err);
    }
    if (rc == 0) {
        rc = mb_trainer_meet(t, err);
    }
    if (rc == 0) {
        rc = form_groups(t, err);
    }
    if (rc == 0) {
        rc = mb_trainer_compare_tokenizers(t, err);
    }
    if (rc == 0) {
        rc = mb_trainer_open_tensorboard(t, err);
    }
    if (rc == 0) {
        rc = open_backend(t, err);
    }
    if (rc == 0) {
        rc = meet_on_devices(t, err);
    }
    if (rc != 0) {
        return rc;
    }
    mb_trainer_say(t, "time to initialize megatron (seconds): %.3f\n",
                   (double)(mb_mono_us() - from_us) / 1e6);
    mb_trainer_say_datetime(t, "after megatron is initialized");
    from_us = mb_mono_us();
    rc = build_model(t, err);
    if (rc == 0) {
        rc = build_optimizer(t, err);
    }
    if (rc == 0) {
        rc = mb_trainer_build_saver(t, err);
    }
    if (rc == 0) {
        rc = mb_trainer_build_schedule(t, err);
    }
    t->loss_scaling = mb_args_loss_scale(&t->args);
    mb_loss_scale_start(&t->loss_scale, &t->loss_scaling);
    if (rc == 0 && (t->args.load != NULL || t->args.pretrained_checkpoint != NULL)) {
        rc = mb_trainer_load(t, err);
    }
    if (rc != 0) {
        return rc;
    }
    timers[0].ms = (double)(mb_mono_us() - from_us) / 1000;
    mb_trainer_say_datetime(t, "after model, optimizer, and learning rate scheduler are built");
    from_us = mb_mono_us();
    rc = mb_trainer_build_data(t, err);
    timers[1].ms = (double)(mb_mono_us() - from_us) / 1000;
    if (rc == 0) {
        mb_trainer_say_datetime(t, "after dataloaders are built");
        mb_trainer_say(t, "done with setup ...\n");
        rc = mb_trainer_say_timers(t, timers, 2, err);
    }
    return rc;
}

void mb_trainer_close(struct mb_trainer *t)
{
    mb_tensorboard_close(t->tensorboard);
    mb_saver_destroy(t->saver);
    mb_comm_destroy(t->save_comm);
    mb_trainer_close_links(t);
    mb_comm_destroy(t->tp_comm); /* groups before their world */
    mb_comm_destroy(t->cp_comm);
    mb_comm_destroy(t->pp_comm);
    mb_comm_destroy(t->tied_comm);
    if (!is_alone(t)) { /* else it is the world's other name */
        mb_comm_destroy(t->dp_comm);
    }
    mb_comm_destroy(t->comm); /* before the memory and the device that it uses */
    for (int i = 0; i < MB_N_SPLITS; i++) {
        mb_loader_destroy(t->loaders[i]);
    }
    mb_free(t->tokens);
    mb_free(t->labels);
    mb_free(t->position_ids);
    mb_free(t->loss_mask);
    mb_free(t->tensors);
    mb_free(t->parts);
    mb_free(t->whole_params);
    mb_pipeline_close(&t->pipeline);
    mb_optimizer_destroy(t->optimizer);
    mb_gpt_destroy(t->gpt);
    if (t->grads_bf16 != NULL) {
        t->dev.ops->free(t->dev.ctx, t->grads_bf16);
    }
    if (t->norm_device != NULL) {
        t->dev.ops->free(t->dev.ctx, t->norm_device);
    }
    mb_backend_close(&t->dev);
}
