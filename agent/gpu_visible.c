/*
 * Word by word: a MIG identifier stays as it is, all else becomes the driver's number, so that two
 * ways to name a device are seen to be one.
 */
#include "agent/gpu_visible.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>
#include "base/str.h"

static int add(struct mb_gpu_choice *out, const char *name, int device, const char *word,
               struct mb_err *err)
{
    if (out->n == MB_GPUS_MAX)
        return mb_err_set(err, MB_EINVAL, "%s names more than %d GPUs", name, MB_GPUS_MAX);
    for (unsigned i = 0; i < out->n; i++)
        if (strcmp(out->at[i].word, word) == 0)
            return mb_err_set(err, MB_EINVAL, "%s names GPU %s twice", name, word);
    out->at[out->n].device = device;
    snprintf(out->at[out->n].word, sizeof(out->at[out->n].word), "%s", word);
    out->n++;
    return MB_OK;
}

static int add_device(struct mb_gpu_choice *out, const char *name, int device, struct mb_err *err)
{
    char word[16];

    snprintf(word, sizeof(word), "%d", device);
    return add(out, name, device, word, err);
}

static int by_uuid(const char *name, const char *word, const struct mb_gpu_known *known,
                   struct mb_gpu_choice *out, struct mb_err *err)
{
    int found = -1;

    for (unsigned i = 0; i < known->n_devices && i < MB_GPUS_MAX; i++) {
        if (!mb_starts_with(known->uuid[i], word))
            continue;
        if (found >= 0)
            return mb_err_set(err, MB_EINVAL, "%s: more than one GPU begins with %s", name, word);
        found = (int)i;
    }
    if (found < 0)
        return mb_err_set(err, MB_EINVAL, "%s names %s, which this machine does not have", name,
                          word);
    return add_device(out, name, found, err);
}

static int take_word(const char *name, const char *word, const struct mb_gpu_known *known,
                     struct mb_gpu_choice *out, struct mb_err *err)
{
    struct mb_err bad = {0};
    int64_t n = 0;

    if (mb_starts_with(word, "MIG-")) {
        if (known->has_part == NULL || !known->has_part(known->arg, word))
            return mb_err_set(err, MB_EINVAL, "%s names %s, which this machine does not have", name,
                              word);
        return add(out, name, MB_GPU_PART, word, err);
    }
    if (mb_starts_with(word, "GPU-"))
        return by_uuid(name, word, known, out, err);
    if (mb_parse_i64(word, 0, INT32_MAX, name, &n, &bad) != MB_OK)
        return mb_err_set(err, MB_EINVAL,
                          "%s has %s: it takes numbers, GPU-UUIDs and MIG identifiers", name, word);
    if (n >= known->n_devices)
        return mb_err_set(err, MB_EINVAL, "%s names GPU %s, this machine has %u", name, word,
                          known->n_devices);
    return add_device(out, name, (int)n, err);
}

/* The next word without the blanks around it; 0 at the end of the list. */
static int next_word(const char **at, char word[MB_GPU_WORD_MAX])
{
    const char *begin = *at, *end;

    while (isspace((unsigned char)*begin))
        begin++;
    end = begin + strcspn(begin, ",");
    *at = *end == ',' ? end + 1 : end;
    while (end > begin && isspace((unsigned char)end[-1]))
        end--;
    snprintf(word, MB_GPU_WORD_MAX, "%.*s", (int)(end - begin), begin);
    return end > begin;
}

int mb_gpus_choose(const char *name, const char *list, const struct mb_gpu_known *known,
                   struct mb_gpu_choice *out, struct mb_err *err)
{
    char word[MB_GPU_WORD_MAX];
    int rc = MB_OK;

    out->n = 0;
    if (list == NULL) {
        for (unsigned i = 0; i < known->n_devices && i < MB_GPUS_MAX && rc == MB_OK; i++)
            rc = add_device(out, name, (int)i, err);
        return rc;
    }
    while (rc == MB_OK && next_word(&list, word) && strcmp(word, "-1") != 0 &&
           strcmp(word, "NoDevFiles") != 0 && strcmp(word, "none") != 0 &&
           strcmp(word, "void") != 0)
        rc = take_word(name, word, known, out, err);
    if (rc != MB_OK)
        out->n = 0;
    return rc;
}
