/*
 * The trainer's data: from the arguments to loaders and the host's buffers of a micro batch.
 *
 *  1. How many samples of each split; splits without a share or a path are absent.
 *  2. Every rank opens the data, and the ranks compare what they found (trainer_alike.c).
 *  3. Every rank makes its own loaders, and the ranks compare a checksum of their indices: weights
 *     that are not the same on all nodes end the run. With --data-cache-path each reads what is
 *     there; if they differ, all build them anew first, in memory.
 *  4. Rank 0 writes to the cache what was not there.
 * Each step may take long on some rank: parallel/long_step.h says who is waited for.
 * Failures: the loaders' own, on each rank that meets them; data that differ; a disk that hangs; a
 * lack of memory.
 */
#include <inttypes.h>
#include <string.h>
#include "base/alloc.h"
#include "base/log.h"
#include "base/str.h"
#include "worker/data/index_cache.h"
#include "worker/parallel/long_step.h"
#include "worker/trainer.h"
#include "worker/trainer_alike.h"

enum { SAY_MS = 5000 };

static const char BUILDING[] = "building the data's indices";

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "out of memory building the trainer's data");
}

static struct mb_data_paths paths_of(const struct mb_args_list *l)
{
    return (struct mb_data_paths){(const char *const *)l->items, l->n};
}

int mb_trainer_settle_blend(struct mb_trainer *t, const struct mb_checkpoint_state *s,
                            struct mb_err *err)
{
    struct mb_args *a = &t->args;
    const struct mb_data_paths common = paths_of(&a->data_path),
                               own[] = {paths_of(&a->train_data_path),
                                        paths_of(&a->valid_data_path),
                                        paths_of(&a->test_data_path)};
    int is_weighted = mb_data_paths_are_weighted(&common, 0);
    struct mb_buf notes = {0};
    for (size_t i = 0; i < sizeof own / sizeof own[0]; i++) {
        is_weighted |= mb_data_paths_are_weighted(&own[i], 1);
    }
    int rc = mb_args_settle_blend(a, s->args_json, is_weighted, &notes, err);
    if (rc == 0) {
        mb_trainer_say(t, "%s", mb_buf_str(&notes));
    }
    mb_buf_close(&notes);
    return rc;
}

/* Validation and test data that were given no share or no path are absent, as in Megatron. */
static int drop_absent_splits(const struct mb_args *a, struct mb_data_options *o,
                              struct mb_err *err)
{
    struct mb_split_matrix m = {0};
    int rc = o->data_path.n_items > 0 ? mb_split_parse(a->split, &m, err) : 0;
    if (rc != 0 || o->mock) {
        return rc;
    }
    for (int i = MB_SPLIT_VALID; i < MB_N_SPLITS; i++) {
        if (o->data_path.n_items > 0 ? !m.present[i] : o->split_path[i].n_items == 0) {
            o->n_samples[i] = 0;
        }
    }
    return 0;
}

/* What the steps below work on. It stays where a step hangs. */
struct building {
    struct mb_trainer *t;
    struct mb_data_options o;
    struct mb_data_watch watch;
    struct mb_cache_identity identity;
    struct mb_index_cache cache;
    struct mb_buf notes;
    struct mb_data_sources *sources;
    struct mb_data_facts facts;
    struct mb_loader *loaders[MB_N_SPLITS];
    uint64_t digest; /* of their indices */
    struct mb_long_step step;
};

/* ---- steps, each on its own thread ---- */

static int open_data(void *arg, struct mb_err *err)
{
    struct building *b = arg;
    int rc = mb_data_open(&b->o, &b->sources, err);
    const int compares = rc == 0 && b->t->world_size > 1;
    return compares ? mb_data_facts_make(b->sources, &b->facts, err) : rc;
}

static int build_loaders(void *arg, struct mb_err *err)
{
    struct building *b = arg;
    int rc = mb_loaders_build(&b->o, b->sources, b->loaders, err);
    b->digest = rc == 0 && b->t->world_size > 1 ? mb_loaders_digest(b->loaders) : 0;
    return rc;
}

static int store_indices(void *arg, struct mb_err *err)
{
    struct building *b = arg;
    return b->t->rank == 0 ? mb_loaders_store(b->loaders, &b->cache, err) : 0;
}

/* What rank 0 read and wrote is said once; what is wrong with a node's own directory, only its
 * ranks know. */
static void say_notes(const struct mb_trainer *t, struct mb_buf *notes)
{
    mb_trainer_say(t, "%s", mb_buf_str(notes));
    for (const char *line = mb_buf_str(notes); t->rank != 0 && *line != '\0';) {
        const int n = (int)strcspn(line, "\n");
        if (mb_starts_with(line, "WARNING: ")) {
            mb_warn("trainer", "%.*s", n, line);
        }
        line += line[n] != '\0' ? n + 1 : n;
    }
    mb_buf_reset(notes);
}

static void begins(void *arg, const char *verb, const char *what)
{
    mb_long_step_begins(arg, verb, what);
}

static void say_waits(void *arg, const char *text)
{
    mb_trainer_say(arg, "> %s\n", text);
}

/* Collective. */
static int go(struct building *b, const char *what, int (*run)(void *arg, struct mb_err *err),
              struct mb_err *err)
{
    int hangs = 0;
    b->step.run = run;
    int rc = mb_long_step_run(b->t->comm, &b->step, what, &hangs, err);
    if (hangs) {
        b->t->hangs = 1; /* b and what it uses stay */
        return rc;
    }
    say_notes(b->t, &b->notes);
    return rc;
}

/* ---- the whole ---- */

static void drop_loaders(struct building *b)
{
    for (int i = 0; i < MB_N_SPLITS; i++) {
        mb_loader_destroy(b->loaders[i]);
        b->loaders[i] = NULL;
    }
}

/* Where they are from several caches that are not the same. Collective. */
static int build_anew(struct building *b, int *is_alike, struct mb_err *err)
{
    mb_trainer_say(b->t,
                   "WARNING: --data-cache-path: ranks found different indices in %s; they are "
                   "built anew\n",
                   b->cache.dir);
    drop_loaders(b);
    /* In memory: what is there may be the order that a run has trained in so far. */
    b->cache.reads_nothing = 1;
    int rc = go(b, BUILDING, build_loaders, err);
    return rc == 0 ? mb_trainer_is_everybodys(b->t, b->digest, is_alike, err) : rc;
}

/* Each has its node's --data-args-path, whose weights may be others. Collective. */
static int agree(struct building *b, struct mb_err *err)
{
    int is_alike = 0;
    int rc = mb_trainer_is_everybodys(b->t, b->digest, &is_alike, err);
    if (rc == 0 && !is_alike && b->o.cache != NULL) {
        rc = build_anew(b, &is_alike, err);
    }
    return rc != 0 || is_alike ? rc : mb_trainer_name_odd(b->t, b->digest, err);
}

static int build_alike(struct building *b, struct mb_err *err)
{
    int rc = go(b, "opening the data", open_data, err);
    if (rc == 0) {
        rc = mb_trainer_compare_data(b->t, b->sources, &b->facts, err);
    }
    if (rc == 0) {
        rc = go(b, BUILDING, build_loaders, err);
    }
    if (rc == 0) {
        rc = agree(b, err);
    }
    return rc == 0 && b->o.cache != NULL ? go(b, "keeping the data's indices", store_indices, err)
                                         : rc;
}

static int take_cache(struct building *b, struct mb_err *err)
{
    const struct mb_tokenizer_options tokenizer = mb_trainer_tokenizer_options(&b->t->args);
    const char *dir = b->t->args.data_cache_path;
    if (dir == NULL || *dir == '\0') {
        return 0;
    }
    b->cache = (struct mb_index_cache){
        .dir = dir, .tokenizer = &b->identity, .notes = &b->notes, .watch = &b->watch};
    b->o.cache = &b->cache;
    return mb_cache_identity_make(&tokenizer, &b->identity, err);
}

/* Of the trainer's loaders. Collective. */
static int build(struct mb_trainer *t, const struct mb_data_options *o, struct mb_err *err)
{
    struct building *b = mb_calloc(1, sizeof *b);
    if (b == NULL) {
        return no_memory(err);
    }
    b->t = t;
    b->o = *o;
    b->step = (struct mb_long_step){.arg = b,
                                    .stall_ms = mb_trainer_timeout_ms(t),
                                    .say_ms = SAY_MS,
                                    .say = say_waits,
                                    .say_arg = t};
    mb_long_step_init(&b->step);
    b->watch = (struct mb_data_watch){begins, &b->step};
    b->o.watch = &b->watch;
    int rc = take_cache(b, err);
    if (rc == 0) {
        rc = build_alike(b, err);
    }
    if (t->hangs) {
        return rc;
    }
    if (rc != 0) {
        drop_loaders(b);
    }
    memcpy(t->loaders, b->loaders, sizeof b->loaders);
    mb_data_facts_close(&b->facts);
    mb_data_close(b->sources);
    mb_buf_close(&b->notes);
    mb_cache_identity_close(&b->identity);
    mb_long_step_close(&b->step);
    mb_free(b);
    return rc;
}

int mb_trainer_build_data(struct mb_trainer *t, struct mb_err *err)
{
    struct mb_args *a = &t->args;
    if (a->blend_sizes == NULL && (a->blend_sizes = mb_strdup("0.11")) == NULL) {
        return no_memory(err); /* settled now: what is saved says so */
    }
    struct mb_data_schedule s = {
        .train_iters = (uint64_t)a->train_iters,
        .train_samples = a->train_samples != MB_ARGS_NONE ? (uint64_t)a->train_samples : 0,
        .global_batch_size = (uint64_t)a->global_batch_size,
        .eval_interval = (uint64_t)a->eval_interval,
        .eval_iters = (uint64_t)a->eval_iters};
    struct mb_data_options o = {.data_path = paths_of(&a->data_path),
                                .split_path = {paths_of(&a->train_data_path),
                                               paths_of(&a->valid_data_path),
                                               paths_of(&a->test_data_path)},
                                .blend_sizes = mb_blend_sizes_of(a->blend_sizes),
                                .split = a->split,
                                .mock = a->mock_data != 0,
                                .seq_length = (uint64_t)a->seq_length,
                                .seed = (uint32_t)a->seed,
                                .consumed_samples = {(uint64_t)a->consumed_train_samples,
                                                     (uint64_t)a->consumed_valid_samples, 0},
                                .micro_batch_size = (uint32_t)a->micro_batch_size,
                                .dp_rank = t->data_rank,
                                .dp_size = t->dp_size / t->cp_size,
                                .no_data_sharding = !a->data_sharding,
                                .eod_mask_loss = a->eod_mask_loss != 0,
                                .reset_position_ids = a->reset_position_ids != 0,
                                .vocab_size = t->vocab_size,
                                .eod = t->eod};
    size_t n = (size_t)a->micro_batch_size * (size_t)a->seq_length;
    int rc = mb_sampler_type_parse(a->dataloader_type, &o.dataloader_type, err);
    if (rc == 0) {
        rc = mb_data_sizes(&s, o.n_samples, err);
    }
    if (rc == 0) {
        rc = drop_absent_splits(a, &o, err);
    }
    if (rc != 0) {
        return rc;
    }
    mb_trainer_say(
        t,
        "> building train, validation, and test datasets ...\n"
        " > datasets target sizes (minimum size):\n"
        "    train:      %" PRIu64 "\n    validation: %" PRIu64 "\n    test:       %" PRIu64 "\n"
        "> building train, validation, and test datasets for GPT ...\n",
        o.n_samples[MB_SPLIT_TRAIN], o.n_samples[MB_SPLIT_VALID], o.n_samples[MB_SPLIT_TEST]);
    rc = build(t, &o, err);
    if (rc != 0) {
        return rc;
    }
    mb_trainer_say(t, "> finished creating GPT datasets ...\n");
    t->tokens = mb_calloc(n, sizeof *t->tokens);
    t->labels = mb_calloc(n, sizeof *t->labels);
    t->loss_mask = mb_calloc(n, sizeof *t->loss_mask);
    t->position_ids = a->reset_position_ids ? mb_calloc(n, sizeof *t->position_ids) : NULL;
    if (a->reset_position_ids && t->position_ids == NULL) {
        return no_memory(err);
    }
    return t->tokens != NULL && t->labels != NULL && t->loss_mask != NULL ? 0 : no_memory(err);
}
