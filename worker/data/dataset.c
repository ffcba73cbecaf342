/*
 * One split of one prefix: which tokens make up sample i.
 *
 * 1. create counts the split's tokens T. No sequence or fewer than two tokens: MB_EINVAL that says
 *    which flags to change (Megatron-LM loops for ever there).
 * 2. plan: epochs until n_samples fit; whether the last epoch is shuffled apart because little of
 * it is used.
 * 3. What the cache has is taken; else build_documents, build_samples, build_shuffle draw from one
 * MT19937 in this order, and the cache gets it.
 * 4. get: shuffle index -> sample start -> seq_length + 1 tokens across documents.
 * Memory out at any step frees what was built. A corrupt token shows up in get only.
 */
#include <string.h>
#include "base/alloc.h"
#include "base/checksum.h"
#include "worker/data/dataset_private.h"
#include "worker/data/index_cache.h"
#include "worker/data/random.h"

static const int32_t mock_low = 1;
static const int32_t mock_high = 4096;

uint64_t mb_dataset_length(const struct mb_dataset *d, int32_t seq)
{
    if (d->index == NULL)
        return (uint64_t)d->mock_lengths[seq];
    return (uint64_t)mb_index_length(d->index, (uint64_t)seq);
}

static const char *name_of(const struct mb_dataset *d)
{
    return d->index != NULL ? mb_index_prefix(d->index) : "mock data";
}

static int no_memory(const struct mb_dataset *d, struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "%s: out of memory for the index of split '%s'", name_of(d),
                      mb_split_name(d->o.split));
}

static int make_mock_lengths(struct mb_dataset *d, struct mb_err *err)
{
    d->mock_lengths = mb_reallocarray(NULL, MB_MOCK_DOCUMENTS, sizeof(*d->mock_lengths));
    if (d->mock_lengths == NULL)
        return no_memory(d, err);
    mb_default_rng0_integers(mock_low, mock_high, d->mock_lengths, MB_MOCK_DOCUMENTS);
    return 0;
}

static int count_tokens(const struct mb_dataset *d, struct mb_dataset_plan *plan,
                        struct mb_err *err)
{
    plan->n_sequences = d->o.end - d->o.begin;
    if (plan->n_sequences == 0)
        return mb_err_set(err, MB_EINVAL,
                          "%s: split '%s' is empty: %llu sequences, share %g; use --split 100,0,0 "
                          "--eval-iters 0 or more data",
                          name_of(d), mb_split_name(d->o.split),
                          (unsigned long long)plan->n_sequences, d->o.share);
    for (uint64_t i = d->o.begin; i < d->o.end; i++)
        plan->epoch_tokens += mb_dataset_length(d, (int32_t)i);
    if (plan->epoch_tokens < 2)
        return mb_err_set(err, MB_EINVAL,
                          "%s: split '%s' is empty: %llu tokens in %llu sequences, share %g; use "
                          "--split 100,0,0 --eval-iters 0 or more data",
                          name_of(d), mb_split_name(d->o.split),
                          (unsigned long long)plan->epoch_tokens,
                          (unsigned long long)plan->n_sequences, d->o.share);
    return 0;
}

/* gpt_dataset.py _get_num_epochs and the rule of the separate final epoch. */
static int make_plan(const struct mb_dataset *d, struct mb_dataset_plan *plan, int *separate,
                     struct mb_err *err)
{
    uint64_t s = d->o.seq_length;
    uint64_t wanted = 0;
    uint64_t all_tokens;

    if (d->o.n_samples > 0 && __builtin_mul_overflow((uint64_t)d->o.n_samples, s, &wanted))
        goto too_many;
    wanted++;
    plan->n_epochs = d->o.n_samples < 0 ? 1 : (wanted - 1) / plan->epoch_tokens + 1;
    if (__builtin_mul_overflow(plan->n_epochs, plan->epoch_tokens, &all_tokens) ||
        __builtin_mul_overflow(plan->n_epochs, plan->n_sequences, &plan->n_documents) ||
        plan->n_documents > UINT32_MAX)
        goto too_many;
    plan->n_samples = (all_tokens - 1) / s;
    if (plan->n_samples >= UINT32_MAX - 1)
        goto too_many;
    plan->n_first = plan->n_samples;
    plan->n_together = plan->n_documents;
    *separate = 0;
    if (plan->n_epochs > 1) {
        uint64_t before = (all_tokens - plan->epoch_tokens - 1) / s;
        uint64_t from_final = (uint64_t)d->o.n_samples - before;
        uint64_t per_epoch = (plan->epoch_tokens - 1) / s;

        *separate = from_final < (uint64_t)(0.80 * (double)per_epoch);
        if (*separate) {
            plan->n_first = before;
            plan->n_together = plan->n_documents - plan->n_sequences;
        }
    }
    return 0;
too_many:
    return mb_err_set(
        err, MB_EINVAL,
        "%s: split '%s': %lld samples of %llu tokens are too many for an index; train "
        "fewer or use more data",
        name_of(d), mb_split_name(d->o.split), (long long)d->o.n_samples, (unsigned long long)s);
}

static int build_documents(struct mb_dataset *d, const struct mb_dataset_plan *plan,
                           struct mb_mt19937 *mt, struct mb_err *err)
{
    uint64_t n = plan->n_documents;

    d->document_index = mb_reallocarray(NULL, (size_t)n, sizeof(*d->document_index));
    if (d->document_index == NULL)
        return no_memory(d, err);
    d->n_documents = n;
    for (uint64_t i = 0; i < n; i++)
        d->document_index[i] = (int32_t)(d->o.begin + i % plan->n_sequences);
    mb_shuffle_i32(mt, d->document_index, (size_t)plan->n_together);
    if (d->separate_final_epoch)
        mb_shuffle_i32(mt, d->document_index + plan->n_together, (size_t)plan->n_sequences);
    return 0;
}

void mb_dataset_next_start(const struct mb_dataset *d, struct mb_sample_start *at)
{
    uint64_t needed = d->o.seq_length + 1;

    for (;;) {
        uint64_t left = mb_dataset_length(d, d->document_index[at->position]) - at->offset;
        if (needed <= left) {
            at->offset += (uint32_t)(needed - 1);
            return;
        }
        needed -= left;
        at->position++;
        at->offset = 0;
    }
}

static int build_samples(struct mb_dataset *d, const struct mb_dataset_plan *plan,
                         struct mb_err *err)
{
    struct mb_sample_start at = {0, 0};

    d->sample_index = mb_reallocarray(NULL, (size_t)plan->n_samples + 1, sizeof(*d->sample_index));
    if (d->sample_index == NULL)
        return no_memory(d, err);
    d->n_samples = plan->n_samples;
    d->sample_index[0] = at;
    for (uint64_t i = 1; i <= plan->n_samples; i++) {
        mb_dataset_next_start(d, &at);
        d->sample_index[i] = at;
    }
    return 0;
}

static int build_shuffle(struct mb_dataset *d, const struct mb_dataset_plan *plan,
                         struct mb_mt19937 *mt, struct mb_err *err)
{
    d->shuffle_index = mb_reallocarray(NULL, (size_t)plan->n_samples, sizeof(*d->shuffle_index));
    if (d->shuffle_index == NULL)
        return no_memory(d, err);
    for (uint64_t i = 0; i < plan->n_samples; i++)
        d->shuffle_index[i] = (uint32_t)i;
    mb_shuffle_u32(mt, d->shuffle_index, (size_t)plan->n_first);
    mb_shuffle_u32(mt, d->shuffle_index + plan->n_first, (size_t)(plan->n_samples - plan->n_first));
    return 0;
}

static int build_indices(struct mb_dataset *d, const struct mb_dataset_plan *plan,
                         struct mb_err *err)
{
    struct mb_mt19937 mt;
    int rc;

    mb_mt19937_seed(&mt, d->o.seed);
    rc = build_documents(d, plan, &mt, err);
    if (rc == 0)
        rc = build_samples(d, plan, err);
    if (rc == 0)
        rc = build_shuffle(d, plan, &mt, err);
    return rc;
}

static int build(struct mb_dataset *d, struct mb_err *err)
{
    struct mb_dataset_plan plan = {0};
    int is_loaded = 0;
    int rc = d->index == NULL ? make_mock_lengths(d, err) : 0;

    if (rc == 0)
        rc = count_tokens(d, &plan, err);
    if (rc == 0)
        rc = make_plan(d, &plan, &d->separate_final_epoch, err);
    if (rc != 0)
        return rc;
    d->n_epochs = plan.n_epochs;
    if (d->o.cache != NULL)
        rc = mb_index_cache_load(d, &plan, &is_loaded, err);
    if (rc != 0 || is_loaded)
        return rc;
    return build_indices(d, &plan, err);
}

int mb_dataset_create(struct mb_index *index, const struct mb_dataset_options *o,
                      struct mb_dataset **out, struct mb_err *err)
{
    uint64_t n_sequences = index != NULL ? mb_index_n_sequences(index) : MB_MOCK_DOCUMENTS;
    struct mb_dataset *d;
    int rc;

    if (o->seq_length == 0 || o->seq_length > INT32_MAX)
        return mb_err_set(err, MB_EINVAL, "--seq-length %llu is outside 1 to %d",
                          (unsigned long long)o->seq_length, INT32_MAX);
    if (n_sequences > INT32_MAX || o->end > n_sequences || o->begin > o->end)
        return mb_err_set(err, MB_EINVAL,
                          "%s: %llu sequences are too many for one prefix (limit %d)",
                          index != NULL ? mb_index_prefix(index) : "mock data",
                          (unsigned long long)n_sequences, INT32_MAX);
    if (index == NULL && o->eod < 0)
        return mb_err_set(err, MB_EINVAL, "mock data needs a tokenizer with an eod token");
    d = mb_calloc(1, sizeof(*d));
    if (d == NULL)
        return mb_err_set(err, MB_ENOMEM, "data set: out of memory");
    d->o = *o;
    d->index = index != NULL ? mb_index_ref(index) : NULL;
    rc = build(d, err);
    if (rc != 0) {
        mb_dataset_destroy(d);
        return rc;
    }
    d->o.cache = NULL; /* the caller's */
    d->o.split_text = NULL;
    d->o.matrix = NULL;
    *out = d;
    return 0;
}

void mb_dataset_destroy(struct mb_dataset *d)
{
    if (d == NULL)
        return;
    for (size_t i = 0; i < d->n_children; i++)
        mb_dataset_destroy(d->children[i]);
    mb_free(d->children);
    mb_free(d->blend_dataset);
    mb_free(d->blend_sample);
    mb_free(d->mock_lengths);
    mb_free(d->document_index);
    mb_free(d->sample_index);
    mb_free(d->shuffle_index);
    mb_free(d->cache_base);
    mb_free(d->cache_description);
    mb_index_unref(d->index);
    mb_free(d);
}

uint64_t mb_dataset_n_samples(const struct mb_dataset *d)
{
    return d->n_samples;
}

static void read_mock(const struct mb_dataset *d, int32_t seq, uint64_t offset, uint64_t n,
                      int32_t *out)
{
    uint64_t last = mb_dataset_length(d, seq) - 1;

    for (uint64_t i = 0; i < n; i++) {
        uint64_t id = offset + i + 1;
        if (d->o.vocab_size > 0)
            id %= d->o.vocab_size;
        out[i] = offset + i == last ? d->o.eod : (int32_t)id;
    }
}

static int read_tokens(const struct mb_dataset *d, int32_t seq, uint64_t offset, uint64_t n,
                       int32_t *out, struct mb_err *err)
{
    if (d->index == NULL) {
        read_mock(d, seq, offset, n, out);
        return 0;
    }
    return mb_index_read(d->index, (uint64_t)seq, offset, n, d->o.vocab_size, out, err);
}

int mb_dataset_get(const struct mb_dataset *d, uint64_t i, int32_t *out, struct mb_err *err)
{
    struct mb_sample_start at;
    uint64_t needed;

    if (d->n_children > 0)
        return mb_dataset_get(d->children[d->blend_dataset[i]], (uint64_t)d->blend_sample[i], out,
                              err);
    at = d->sample_index[d->shuffle_index[i]];
    needed = d->o.seq_length + 1;
    for (;;) {
        int32_t seq = d->document_index[at.position];
        uint64_t left = mb_dataset_length(d, seq) - at.offset;
        uint64_t n = needed < left ? needed : left;
        int rc = read_tokens(d, seq, at.offset, n, out, err);

        if (rc != 0)
            return rc;
        needed -= n;
        if (needed == 0)
            return 0;
        out += n;
        at.position++;
        at.offset = 0;
    }
}

void mb_dataset_get_indices(const struct mb_dataset *d, struct mb_dataset_indices *out)
{
    *out = (struct mb_dataset_indices){
        .document_index = d->document_index,
        .n_documents = d->n_documents,
        .sample_index = d->sample_index,
        .n_samples = d->n_samples,
        .shuffle_index = d->shuffle_index,
        .n_epochs = d->n_epochs,
        .separate_final_epoch = d->separate_final_epoch,
        .blend_dataset = d->blend_dataset,
        .blend_sample = d->blend_sample,
    };
}

uint64_t mb_dataset_digest(const struct mb_dataset *d)
{
    uint64_t sum = mb_crc64nvme(0, &d->n_samples, sizeof(d->n_samples));

    for (size_t i = 0; i < d->n_children; i++) {
        uint64_t child = mb_dataset_digest(d->children[i]);
        sum = mb_crc64nvme(sum, &child, sizeof(child));
    }
    if (d->n_children > 0) {
        sum = mb_crc64nvme(sum, d->blend_dataset, d->n_samples * sizeof(*d->blend_dataset));
        return mb_crc64nvme(sum, d->blend_sample, d->n_samples * sizeof(*d->blend_sample));
    }
    sum = mb_crc64nvme(sum, d->document_index, d->n_documents * sizeof(*d->document_index));
    sum = mb_crc64nvme(sum, d->sample_index, (d->n_samples + 1) * sizeof(*d->sample_index));
    return mb_crc64nvme(sum, d->shuffle_index, d->n_samples * sizeof(*d->shuffle_index));
}
