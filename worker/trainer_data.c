/*
 * The trainer's data: from the arguments to loaders and the host's buffers of a micro batch.
 *
 *  1. How many samples of each split; splits without a share or a path are absent.
 *  2. Every rank makes its own loaders. With --data-cache-path each reads what is there, and rank 0
 *     writes what is not.
 *  3. Ranks compare a checksum of their indices: a directory that is not the same on all nodes must
 *     not make them read different samples. If they differ, all build them anew, in memory;
 *     if they still do, the data are not the same.
 * Failures: the loaders' own, on each rank that meets them; a lack of memory.
 */
#include <inttypes.h>
#include "base/alloc.h"
#include "worker/data/index_cache.h"
#include "worker/trainer.h"

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

/* Whether all ranks say the same number. Collective. */
static int is_everybodys(struct mb_trainer *t, uint64_t number, int *out, struct mb_err *err)
{
    int64_t most[2]; /* of the numbers, and of their complements: the smallest's */
    most[0] = (int64_t)number;
    most[1] = (int64_t)~number;
    mb_comm_allreduce(t->comm, NULL, most, 2, MB_COMM_I64, MB_COMM_MAX);
    int rc = mb_comm_synchronize(t->comm, err);
    *out = most[0] == ~most[1];
    return rc;
}

static void say_notes(const struct mb_trainer *t, struct mb_buf *notes)
{
    mb_trainer_say(t, "%s", mb_buf_str(notes));
    mb_buf_reset(notes);
}

/* Of the same cache, or of none. Collective. */
static int build_alike(struct mb_trainer *t, struct mb_data_options *o,
                       struct mb_index_cache *cache, struct mb_err *err)
{
    int is_alike = 0;
    int rc = mb_loaders_build(o, t->loaders, err);
    say_notes(t, cache->notes);
    if (rc == 0) {
        rc = is_everybodys(t, mb_loaders_digest(t->loaders), &is_alike, err);
    }
    if (rc != 0 || is_alike) {
        return rc;
    }
    mb_trainer_say(
        t,
        "WARNING: --data-cache-path: ranks found different indices in %s; they are built "
        "anew\n",
        cache->dir);
    for (int i = 0; i < MB_N_SPLITS; i++) {
        mb_loader_destroy(t->loaders[i]);
        t->loaders[i] = NULL;
    }
    /* In memory: what is there may be the order that a run has trained in so far. */
    cache->reads_nothing = 1;
    cache->writes = 0;
    rc = mb_loaders_build(o, t->loaders, err);
    say_notes(t, cache->notes);
    if (rc == 0) {
        rc = is_everybodys(t, mb_loaders_digest(t->loaders), &is_alike, err);
    }
    return rc != 0 || is_alike
               ? rc
               : mb_err_set(err, MB_EINVAL,
                            "ranks have different data: what --data-path names is not the same on "
                            "all nodes");
}

static int build_loaders(struct mb_trainer *t, struct mb_data_options *o, struct mb_err *err)
{
    const struct mb_tokenizer_options tokenizer = mb_trainer_tokenizer_options(&t->args);
    struct mb_cache_identity identity = {0};
    struct mb_buf notes = {0};
    struct mb_index_cache cache = {.dir = t->args.data_cache_path,
                                   .tokenizer = &identity,
                                   .writes = t->rank == 0,
                                   .notes = &notes};
    if (cache.dir == NULL || *cache.dir == '\0') {
        return mb_loaders_build(o, t->loaders, err);
    }
    int rc = mb_cache_identity_make(&tokenizer, &identity, err);
    o->cache = &cache;
    rc = rc == 0 ? build_alike(t, o, &cache, err) : rc;
    mb_buf_close(&notes);
    mb_cache_identity_close(&identity);
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
    rc = build_loaders(t, &o, err);
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
