/*
 * From Megatron-LM's data arguments to micro batches.
 *
 * 1. check_options refuses contradictions: mock with paths, two kinds of paths, no data at all.
 * 2. Indices are opened once per prefix and list.
 * 3. For each split with samples to give: its paths (a common list cut by --split, or its own
 * list), its data set (mock, one prefix, or a blend), its sampler, its loader. Data sets hold
 * references to indices.
 * 4. mb_loader_next asks the sampler for sample numbers, the data set for seq_length + 1 ids each,
 * and lays out inputs, labels, loss mask and positions. Any failure while building destroys the
 * loaders built so far and returns the text with the split or the prefix; a failure in next leaves
 * nothing but the text.
 */
#include <ctype.h>
#include <math.h>
#include <string.h>
#include "base/alloc.h"
#include "base/checksum.h"
#include "base/str.h"
#include "worker/data/index_cache.h"
#include "worker/data/loader.h"

static const char default_split[] = "969, 30, 1";

struct mb_loader {
    struct mb_dataset *dataset;
    struct mb_sampler *sampler;
    struct mb_sampler_options start; /* where the sampler began */
    uint64_t *samples;               /* [micro_batch_size] */
    int32_t *ids;                    /* [seq_length + 1] */
    uint32_t micro_batch_size;
    uint64_t seq_length;
    int eod_mask_loss;
    int reset_position_ids;
    int32_t eod;
};

/* Prefixes of one list and, if given, their weights. */
struct blend_list {
    size_t n;
    char **prefixes;
    double *weights; /* NULL: none given */
};

static void blend_list_close(struct blend_list *b)
{
    for (size_t i = 0; i < b->n; i++)
        mb_free(b->prefixes[i]);
    mb_free(b->prefixes);
    mb_free(b->weights);
    *b = (struct blend_list){0};
}

static char *stripped(const char *s)
{
    size_t n;

    while (isspace((unsigned char)*s))
        s++;
    n = strlen(s);
    while (n > 0 && isspace((unsigned char)s[n - 1]))
        n--;
    return mb_strndup(s, n);
}

/* An even number of items is weights and prefixes if every other one is a number. */
static int has_weights(const struct mb_data_paths *paths, int *out, struct mb_err *err)
{
    size_t n_numbers = 0;
    size_t n_pairs = paths->n_items / 2;
    double ignored;

    *out = 0;
    if (paths->n_items % 2 != 0)
        return 0;
    for (size_t i = 0; i < n_pairs; i++) {
        if (mb_parse_double(paths->items[2 * i], "weight", &ignored, NULL) == 0)
            n_numbers++;
    }
    if (n_numbers > 0 && n_numbers < n_pairs)
        return mb_err_set(
            err, MB_EINVAL,
            "--data-path: %zu of %zu weights are numbers; give WEIGHT PREFIX pairs or "
            "prefixes only",
            n_numbers, n_pairs);
    *out = n_numbers > 0;
    return 0;
}

int mb_data_paths_are_weighted(const struct mb_data_paths *paths, int of_one_split)
{
    int weighted = 0;

    return has_weights(paths, &weighted, NULL) == 0 && weighted &&
           (paths->n_items > 2 || !of_one_split);
}

enum mb_blend_sizes mb_blend_sizes_of(const char *text)
{
    return strcmp(text, "0.10") == 0 ? MB_BLEND_SIZES_0_10 : MB_BLEND_SIZES_0_11;
}

static int blend_list_parse(const struct mb_data_paths *paths, struct blend_list *b,
                            struct mb_err *err)
{
    int weighted;
    size_t step;
    size_t n;
    int rc = has_weights(paths, &weighted, err);

    if (rc != 0)
        return rc;
    step = weighted ? 2 : 1;
    n = paths->n_items / step;
    b->prefixes = mb_calloc(n, sizeof(*b->prefixes));
    if (b->prefixes == NULL)
        goto no_memory;
    b->n = n;
    if (weighted) {
        b->weights = mb_calloc(n, sizeof(*b->weights));
        if (b->weights == NULL)
            goto no_memory;
    }
    for (size_t i = 0; i < n; i++) {
        b->prefixes[i] = stripped(paths->items[step * i + step - 1]);
        if (b->prefixes[i] == NULL)
            goto no_memory;
        if (weighted)
            (void)mb_parse_double(paths->items[2 * i], "weight", &b->weights[i], NULL);
    }
    return 0;
no_memory:
    blend_list_close(b);
    return mb_err_set(err, MB_ENOMEM, "--data-path: out of memory");
}

struct source {
    struct blend_list blend;
    struct mb_index **indices; /* one per prefix */
};

static void source_close(struct source *s)
{
    for (size_t i = 0; s->indices != NULL && i < s->blend.n; i++)
        mb_index_unref(s->indices[i]);
    mb_free(s->indices);
    blend_list_close(&s->blend);
    s->indices = NULL;
}

static int source_open(const struct mb_data_paths *paths, const struct mb_data_watch *watch,
                       struct source *s, struct mb_err *err)
{
    int rc = blend_list_parse(paths, &s->blend, err);

    if (rc != 0)
        return rc;
    s->indices = mb_calloc(s->blend.n, sizeof(struct mb_index *));
    if (s->indices == NULL)
        rc = mb_err_set(err, MB_ENOMEM, "--data-path: out of memory");
    for (size_t i = 0; rc == 0 && i < s->blend.n; i++) {
        if (watch != NULL)
            watch->begins(watch->arg, "opening", s->blend.prefixes[i]);
        rc = mb_index_open(s->blend.prefixes[i], &s->indices[i], err);
    }
    if (rc != 0)
        source_close(s);
    return rc;
}

/* Of which the split's share is one; NULL: its paths are its own. */
static const char *split_text(const struct mb_data_options *o, enum mb_split split)
{
    if (o->split_path[split].n_items > 0)
        return NULL;
    return o->mock ? "1,1,1" : o->split != NULL ? o->split : default_split;
}

static struct mb_dataset_options dataset_options(const struct mb_data_options *o,
                                                 enum mb_split split,
                                                 const struct mb_split_matrix *matrix,
                                                 int64_t n_samples)
{
    return (struct mb_dataset_options){
        .split = split,
        .seq_length = o->seq_length,
        .seed = o->seed,
        .n_samples = n_samples,
        .vocab_size = o->vocab_size,
        .eod = o->eod,
        .share = matrix->end[split] - matrix->begin[split],
        .cache = o->cache,
        .split_text = split_text(o, split),
        .matrix = matrix,
    };
}

static int create_one(const struct mb_data_options *o, enum mb_split split,
                      const struct mb_split_matrix *matrix, struct mb_index *index,
                      int64_t n_samples, struct mb_dataset **out, struct mb_err *err)
{
    struct mb_dataset_options d = dataset_options(o, split, matrix, n_samples);
    uint64_t n_sequences = index != NULL ? mb_index_n_sequences(index) : MB_MOCK_DOCUMENTS;

    mb_split_range(matrix, split, n_sequences, &d.begin, &d.end);
    return mb_dataset_create(index, &d, out, err);
}

/* Of a part with this weight: the samples that are built, and what it adds to the blend's size.
 * Half a percent more are built, since the draw may take from one a little more than its share. */
static uint64_t samples_of_part(enum mb_blend_sizes sizes, uint64_t target, double weight,
                                uint64_t *in_blend)
{
    const double surplus = 1.0 + 0.005;

    if (sizes == MB_BLEND_SIZES_0_10) {
        *in_blend = (uint64_t)ceil((double)target * weight * surplus);
        return *in_blend;
    }
    *in_blend = (uint64_t)ceil((double)target * weight);
    return (uint64_t)ceil((double)*in_blend * surplus);
}

static int create_blend(const struct mb_data_options *o, enum mb_split split,
                        const struct mb_split_matrix *matrix, const struct source *s,
                        struct mb_dataset **out, struct mb_err *err)
{
    size_t n = s->blend.n;
    struct mb_dataset **parts = mb_calloc(n, sizeof(struct mb_dataset *));
    double *weights = mb_calloc(n, sizeof(*weights));
    struct mb_cache_key *keys = mb_calloc(n, sizeof(*keys));
    uint64_t size = 0;
    int rc = 0;

    if (parts == NULL || weights == NULL || keys == NULL) {
        rc = mb_err_set(err, MB_ENOMEM, "--data-path: out of memory");
        goto out;
    }
    if (s->blend.weights != NULL)
        mb_normalize(s->blend.weights, n, weights);
    for (size_t i = 0; i < n; i++) {
        int64_t wanted = -1;
        if (s->blend.weights != NULL) {
            if (!(weights[i] >= 0.0 && weights[i] <= 1.0)) {
                rc = mb_err_set(err, MB_EINVAL, "--data-path: weight %g of %s is not possible",
                                s->blend.weights[i], s->blend.prefixes[i]);
                goto out;
            }
            uint64_t share;
            wanted =
                (int64_t)samples_of_part(o->blend_sizes, o->n_samples[split], weights[i], &share);
            size += share;
        }
        rc = create_one(o, split, matrix, s->indices[i], wanted, &parts[i], err);
        if (rc != 0)
            goto out;
        if (o->cache != NULL) {
            struct mb_dataset_options d = dataset_options(o, split, matrix, wanted);
            keys[i] = mb_index_cache_key(&d, s->indices[i]);
        }
        if (s->blend.weights == NULL) {
            weights[i] = (double)mb_dataset_n_samples(parts[i]);
            size += mb_dataset_n_samples(parts[i]);
        }
    }
    if (s->blend.weights == NULL && size > o->n_samples[split])
        size = o->n_samples[split];
    rc = mb_dataset_blend(parts, weights, n, size, o->cache, keys, out, err);
out:
    for (size_t i = 0; rc != 0 && parts != NULL && i < n; i++)
        mb_dataset_destroy(parts[i]);
    mb_free(parts);
    mb_free(weights);
    mb_free(keys);
    return rc;
}

/* source NULL: mock data. own_list: the paths belong to this split alone. */
static int create_dataset(const struct mb_data_options *o, enum mb_split split,
                          const struct mb_split_matrix *matrix, const struct source *source,
                          int own_list, struct mb_dataset **out, struct mb_err *err)
{
    const char *name = mb_split_name(split);

    if (!matrix->present[split])
        return mb_err_set(err, MB_EINVAL,
                          "split '%s' has no share in --split %s but %llu samples are asked of it; "
                          "give it a share, or use --eval-iters 0",
                          name, o->split != NULL ? o->split : default_split,
                          (unsigned long long)o->n_samples[split]);
    if (source == NULL)
        return create_one(o, split, matrix, NULL, (int64_t)o->n_samples[split], out, err);
    if (source->blend.n == 1 && (source->blend.weights == NULL || own_list))
        return create_one(o, split, matrix, source->indices[0], (int64_t)o->n_samples[split], out,
                          err);
    return create_blend(o, split, matrix, source, out, err);
}

static int loader_create(const struct mb_data_options *o, enum mb_split split,
                         struct mb_dataset *dataset, struct mb_loader **out, struct mb_err *err)
{
    struct mb_sampler_options so = {
        .type = o->dataloader_type,
        .no_data_sharding = o->no_data_sharding,
        .n_samples = mb_dataset_n_samples(dataset),
        .consumed_samples = o->consumed_samples[split],
        .micro_batch_size = o->micro_batch_size,
        .dp_rank = o->dp_rank,
        .dp_size = o->dp_size,
    };
    struct mb_loader *l = mb_calloc(1, sizeof(*l));
    int rc;

    if (l == NULL)
        return mb_err_set(err, MB_ENOMEM, "loader: out of memory");
    rc = mb_sampler_create(&so, &l->sampler, err);
    if (rc != 0) {
        mb_err_wrap(err, "split '%s'", mb_split_name(split));
        goto fail;
    }
    l->samples = mb_calloc(o->micro_batch_size, sizeof(*l->samples));
    l->ids = mb_reallocarray(NULL, (size_t)o->seq_length + 1, sizeof(*l->ids));
    if (l->samples == NULL || l->ids == NULL) {
        rc = mb_err_set(err, MB_ENOMEM, "loader: out of memory");
        goto fail;
    }
    l->micro_batch_size = o->micro_batch_size;
    l->seq_length = o->seq_length;
    l->eod_mask_loss = o->eod_mask_loss;
    l->reset_position_ids = o->reset_position_ids;
    l->eod = o->eod;
    l->start = so;
    l->dataset = dataset;
    *out = l;
    return 0;
fail:
    mb_loader_destroy(l);
    return rc;
}

void mb_loader_destroy(struct mb_loader *l)
{
    if (l == NULL)
        return;
    mb_dataset_destroy(l->dataset);
    mb_sampler_destroy(l->sampler);
    mb_free(l->samples);
    mb_free(l->ids);
    mb_free(l);
}

static int check_options(const struct mb_data_options *o, struct mb_err *err)
{
    int has_own = 0;
    int has_common = o->data_path.n_items > 0;

    for (int i = 0; i < MB_N_SPLITS; i++) {
        has_own |= o->split_path[i].n_items > 0;
        if (o->n_samples[i] > INT64_MAX / 2)
            return mb_err_set(err, MB_EINVAL, "split '%s': %llu samples are too many",
                              mb_split_name((enum mb_split)i), (unsigned long long)o->n_samples[i]);
    }
    if (o->mock + has_common + has_own != 1)
        return mb_err_set(err, MB_EINVAL,
                          "a single data source must be provided: one of --data-path, "
                          "--train-data-path with --valid- and --test-data-path, or --mock-data");
    if (has_own && o->split != NULL)
        return mb_err_set(err, MB_EINVAL,
                          "--split does not go with --train-, --valid- or --test-data-path");
    for (int i = 0; has_own && i < MB_N_SPLITS; i++) {
        if (o->n_samples[i] > 0 && o->split_path[i].n_items == 0)
            return mb_err_set(err, MB_EINVAL,
                              "%llu samples of split '%s' are asked; give --%s-data-path, or use "
                              "--eval-iters 0",
                              (unsigned long long)o->n_samples[i], mb_split_name((enum mb_split)i),
                              mb_split_name((enum mb_split)i));
    }
    return 0;
}

/* The common list, and each split's own; of those that are not there n is 0. */
struct mb_data_sources {
    struct source lists[1 + MB_N_SPLITS];
};

int mb_data_open(const struct mb_data_options *o, struct mb_data_sources **out, struct mb_err *err)
{
    struct mb_data_sources *s;
    int rc = check_options(o, err);

    if (rc != 0)
        return rc;
    s = mb_calloc(1, sizeof(*s));
    if (s == NULL)
        return mb_err_set(err, MB_ENOMEM, "--data-path: out of memory");
    if (o->data_path.n_items > 0)
        rc = source_open(&o->data_path, o->watch, &s->lists[0], err);
    for (int i = 0; rc == 0 && i < MB_N_SPLITS; i++) {
        if (o->n_samples[i] > 0 && o->split_path[i].n_items > 0)
            rc = source_open(&o->split_path[i], o->watch, &s->lists[1 + i], err);
    }
    if (rc != 0) {
        mb_data_close(s);
        return rc;
    }
    *out = s;
    return 0;
}

void mb_data_close(struct mb_data_sources *s)
{
    for (size_t i = 0; s != NULL && i < 1 + MB_N_SPLITS; i++)
        source_close(&s->lists[i]);
    mb_free(s);
}

size_t mb_data_n_indices(const struct mb_data_sources *s)
{
    size_t n = 0;

    for (size_t i = 0; i < 1 + MB_N_SPLITS; i++)
        n += s->lists[i].blend.n;
    return n;
}

struct mb_index *mb_data_index(const struct mb_data_sources *s, size_t i)
{
    const struct source *list = s->lists;

    for (; i >= list->blend.n; list++)
        i -= list->blend.n;
    return list->indices[i];
}

static int build_split(const struct mb_data_options *o, enum mb_split split,
                       const struct mb_data_sources *s, struct mb_loader **out, struct mb_err *err)
{
    struct mb_split_matrix matrix = {.end = {1.0, 1.0, 1.0}, .present = {1, 1, 1}};
    const int has_own = o->split_path[split].n_items > 0;
    const struct source *source = o->mock ? NULL : has_own ? &s->lists[1 + split] : &s->lists[0];
    struct mb_dataset *dataset = NULL;
    int rc = has_own ? 0 : mb_split_parse(split_text(o, split), &matrix, err);

    if (rc == 0)
        rc = create_dataset(o, split, &matrix, source, has_own, &dataset, err);
    if (rc == 0)
        rc = loader_create(o, split, dataset, out, err);
    if (rc != 0)
        mb_dataset_destroy(dataset);
    return rc;
}

int mb_loaders_build(const struct mb_data_options *o, const struct mb_data_sources *s,
                     struct mb_loader *out[MB_N_SPLITS], struct mb_err *err)
{
    struct mb_loader *built[MB_N_SPLITS] = {NULL};
    int rc = 0;

    for (int i = 0; rc == 0 && i < MB_N_SPLITS; i++) {
        if (o->watch != NULL)
            o->watch->begins(o->watch->arg, "building indices of split",
                             mb_split_name((enum mb_split)i));
        if (o->n_samples[i] > 0)
            rc = build_split(o, (enum mb_split)i, s, &built[i], err);
    }
    for (int i = 0; i < MB_N_SPLITS; i++) {
        if (rc != 0)
            mb_loader_destroy(built[i]);
        else
            out[i] = built[i];
    }
    return rc;
}

int mb_loaders_store(struct mb_loader *const loaders[MB_N_SPLITS],
                     const struct mb_index_cache *cache, struct mb_err *err)
{
    int is_swept = 0;
    int rc = 0;

    for (int i = 0; rc == 0 && i < MB_N_SPLITS; i++) {
        if (loaders[i] != NULL)
            rc = mb_index_cache_store(loaders[i]->dataset, cache, &is_swept, err);
    }
    return rc;
}

uint64_t mb_loaders_digest(struct mb_loader *const loaders[MB_N_SPLITS])
{
    uint64_t sum = 0;

    for (int i = 0; i < MB_N_SPLITS; i++) {
        uint64_t own = loaders[i] != NULL ? mb_dataset_digest(loaders[i]->dataset) : 0;
        sum = mb_crc64nvme(sum, &own, sizeof(own));
    }
    return sum;
}

static void fill_row(const struct mb_loader *l, int32_t *tokens, int32_t *labels, float *loss_mask,
                     int32_t *position_ids)
{
    uint64_t s = l->seq_length;
    int32_t position = 0;

    if (tokens != NULL)
        memcpy(tokens, l->ids, (size_t)s * sizeof(*tokens));
    if (labels != NULL)
        memcpy(labels, l->ids + 1, (size_t)s * sizeof(*labels));
    for (uint64_t t = 0; t < s; t++) {
        int is_eod = l->eod >= 0 && l->ids[t] == l->eod;
        if (loss_mask != NULL)
            loss_mask[t] = l->eod_mask_loss && is_eod ? 0.0f : 1.0f;
        if (position_ids != NULL)
            position_ids[t] = position;
        position = l->reset_position_ids && is_eod ? 0 : position + 1;
    }
}

int mb_loader_next(struct mb_loader *l, int32_t *tokens, int32_t *labels, float *loss_mask,
                   int32_t *position_ids, struct mb_err *err)
{
    uint64_t s = l->seq_length;
    int rc = mb_sampler_next(l->sampler, l->samples, err);

    for (uint32_t b = 0; rc == 0 && b < l->micro_batch_size; b++) {
        rc = mb_dataset_get(l->dataset, l->samples[b], l->ids, err);
        if (rc == 0)
            fill_row(l, tokens != NULL ? tokens + b * s : NULL,
                     labels != NULL ? labels + b * s : NULL,
                     loss_mask != NULL ? loss_mask + b * s : NULL,
                     position_ids != NULL ? position_ids + b * s : NULL);
    }
    return rc;
}

int mb_loader_rewind(struct mb_loader *l, struct mb_err *err)
{
    struct mb_sampler *fresh = NULL;
    int rc = mb_sampler_create(&l->start, &fresh, err);

    if (rc != 0)
        return rc;
    mb_sampler_destroy(l->sampler);
    l->sampler = fresh;
    return 0;
}

uint64_t mb_loader_n_samples(const struct mb_loader *l)
{
    return mb_dataset_n_samples(l->dataset);
}

uint64_t mb_loader_consumed(const struct mb_loader *l)
{
    return mb_sampler_consumed(l->sampler);
}

const uint64_t *mb_loader_last_samples(const struct mb_loader *l)
{
    return l->samples;
}

const struct mb_dataset *mb_loader_dataset(const struct mb_loader *l)
{
    return l->dataset;
}

int mb_data_sizes(const struct mb_data_schedule *s, uint64_t out[MB_N_SPLITS], struct mb_err *err)
{
    uint64_t gbs = s->global_batch_size;
    uint64_t iters = s->train_iters;
    uint64_t evaluations = 1;

    if (gbs == 0)
        return mb_err_set(err, MB_EINVAL, "--global-batch-size is 0");
    if (s->train_samples > 0)
        iters = s->train_samples / gbs;
    if (s->eval_iters > 0) {
        if (s->eval_interval == 0)
            return mb_err_set(err, MB_EINVAL, "--eval-interval is 0; use --eval-iters 0 for none");
        evaluations = iters / s->eval_interval + 1;
    }
    out[MB_SPLIT_TRAIN] = s->train_samples;
    if ((s->train_samples == 0 && __builtin_mul_overflow(iters, gbs, &out[MB_SPLIT_TRAIN])) ||
        __builtin_mul_overflow(s->eval_iters, gbs, &out[MB_SPLIT_TEST]) ||
        __builtin_mul_overflow(out[MB_SPLIT_TEST], evaluations, &out[MB_SPLIT_VALID]))
        return mb_err_set(err, MB_EINVAL, "the number of samples does not fit 64 bits");
    return 0;
}
