/*
 * A blend: sample i comes from the data set that is furthest behind its weight.
 *
 * 1. The weights are normalised. 2. For i = 0 .. size-1 the data set with the largest
 * weight * max(i, 1) - given so far is chosen, the first of equals, and gives its next sample; the
 * cache may have that.
 * 3. A data set asked for more samples than it has is MB_EINVAL that names it.
 * Until the blend is complete the data sets stay the caller's.
 */
#include <string.h>
#include "base/alloc.h"
#include "worker/data/dataset_private.h"
#include "worker/data/index_cache.h"

static int check_weights(const double *weights, size_t n, struct mb_err *err)
{
    double sum = 0.0;

    if (n == 0 || n > INT16_MAX)
        return mb_err_set(err, MB_EINVAL, "a blend of %zu data sets is not possible (1 to %d are)",
                          n, INT16_MAX);
    for (size_t i = 0; i < n; i++) {
        if (!(weights[i] >= 0.0 && weights[i] < 1e300))
            return mb_err_set(err, MB_EINVAL, "--data-path: weight %g is not a positive number",
                              weights[i]);
        sum += weights[i];
    }
    if (!(sum > 0.0))
        return mb_err_set(err, MB_EINVAL, "--data-path: all weights are zero");
    return 0;
}

static void draw(struct mb_dataset *d, const double *weights, int64_t *given)
{
    for (uint64_t i = 0; i < d->n_samples; i++) {
        double at = i > 1 ? (double)i : 1.0;
        size_t best = 0;
        double most = weights[0] * at - (double)given[0];

        for (size_t k = 1; k < d->n_children; k++) {
            double behind = weights[k] * at - (double)given[k];
            if (behind > most) {
                most = behind;
                best = k;
            }
        }
        d->blend_dataset[i] = (int16_t)best;
        d->blend_sample[i] = given[best]++;
    }
}

static int check_given(const struct mb_dataset *d, const int64_t *given, struct mb_err *err)
{
    for (size_t k = 0; k < d->n_children; k++) {
        const struct mb_dataset *child = d->children[k];
        if ((uint64_t)given[k] > child->n_samples)
            return mb_err_set(
                err, MB_EINVAL,
                "%s: the blend of split '%s' needs %lld samples of it, it gives %llu; "
                "change its weight or use more data",
                child->index != NULL ? mb_index_prefix(child->index) : "mock data",
                mb_split_name(child->o.split), (long long)given[k],
                (unsigned long long)child->n_samples);
    }
    return 0;
}

int mb_dataset_blend(struct mb_dataset *const *datasets, const double *weights, size_t n,
                     uint64_t size, const struct mb_index_cache *cache,
                     const struct mb_cache_key *keys, struct mb_dataset **out, struct mb_err *err)
{
    struct mb_dataset *d = NULL;
    int is_loaded = 0;
    double *shares = NULL;
    int64_t *given = NULL;
    int rc = check_weights(weights, n, err);

    if (rc != 0)
        return rc;
    d = mb_calloc(1, sizeof(*d));
    shares = mb_reallocarray(NULL, n, sizeof(*shares));
    given = mb_calloc(n, sizeof(*given));
    if (d == NULL || shares == NULL || given == NULL)
        goto no_memory;
    d->o = datasets[0]->o;
    d->n_samples = size;
    d->children = mb_reallocarray(NULL, n, sizeof(*d->children));
    d->blend_dataset = mb_reallocarray(NULL, (size_t)size, sizeof(*d->blend_dataset));
    d->blend_sample = mb_reallocarray(NULL, (size_t)size, sizeof(*d->blend_sample));
    if (d->children == NULL || d->blend_dataset == NULL || d->blend_sample == NULL)
        goto no_memory;
    memcpy(d->children, datasets, n * sizeof(*datasets));
    d->n_children = n;
    mb_normalize(weights, n, shares);
    if (cache != NULL)
        rc = mb_index_cache_load_blend(d, cache, keys, shares, &is_loaded, err);
    if (rc == 0 && !is_loaded) {
        draw(d, shares, given);
        rc = check_given(d, given, err);
    }
    if (rc != 0)
        goto out;
    *out = d;
    d = NULL;
    goto out;
no_memory:
    rc = mb_err_set(err, MB_ENOMEM, "a blend of %llu samples: out of memory",
                    (unsigned long long)size);
out:
    if (d != NULL)
        d->n_children = 0; /* they are still the caller's */
    mb_dataset_destroy(d);
    mb_free(shares);
    mb_free(given);
    return rc;
}
