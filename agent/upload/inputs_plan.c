/*
 * What inputs of a gang are called, here and there. Pure.
 *
 * The optimizer files are optim_dp_III_of_WWW.safetensors (docs/formats.md): file I of W holds the
 * I-th W-th of the flat state. Rank r of a world reads the files that share an element with its own
 * part; parts are cut at floor(n * i / W), and what does not overlap as fractions does not as
 * elements.
 */
#include "agent/upload/inputs_plan.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "base/checksum.h"
#include "base/str.h"

enum { TOKENIZER_FILE_MAX = 64 << 20 };

int mb_input_split(const char *url, char **store, char **name, struct mb_err *err)
{
    size_t n = strlen(url);
    const char *scheme = strstr(url, "://"), *slash;

    *store = *name = NULL;
    while (n > 0 && url[n - 1] == '/')
        n--;
    slash = memrchr(url, '/', n);
    if (scheme == NULL || slash == NULL || slash <= scheme + 3)
        return mb_err_set(err, MB_EINVAL, "%.300s: a name is missing: s3://BUCKET/KEY", url);
    *store = mb_strndup(url, (size_t)(slash - url));
    *name = mb_strndup(slash + 1, (size_t)(url + n - slash - 1));
    if (*store != NULL && *name != NULL)
        return MB_OK;
    mb_free(*store);
    mb_free(*name);
    *store = *name = NULL;
    return mb_err_set(err, MB_ENOMEM, "no memory for an input");
}

int mb_input_is_of_tokenizer(const char *name, uint64_t size_bytes)
{
    static const char *const endings[] = {".json", ".txt", ".model", ".tiktoken", ".jinja"};

    if (name[0] == '\0' || name[0] == '.' || strchr(name, '/') != NULL ||
        size_bytes > TOKENIZER_FILE_MAX)
        return 0;
    for (size_t i = 0; i < sizeof(endings) / sizeof(endings[0]); i++)
        if (mb_ends_with(name, endings[i]))
            return 1;
    return 0;
}

int mb_input_version(const char *url, const struct mb_input_file *files, size_t n, char out[33])
{
    struct mb_buf text = {0};
    char hex[65];
    int rc = mb_buf_printf(&text, "%s\n", url);

    for (size_t i = 0; i < n && rc == MB_OK; i++)
        rc = mb_buf_printf(&text, "%s\n%" PRIu64 "\n%s\n", files[i].name, files[i].size_bytes,
                           files[i].etag);
    if (rc == MB_OK)
        rc = mb_sha256_hex(text.data, text.len, hex);
    if (rc == MB_OK)
        snprintf(out, 33, "%.32s", hex);
    mb_buf_close(&text);
    return rc;
}

char *mb_input_replace(const char *word, const char *url, const char *path, int *rc)
{
    const char *equals = strchr(word, '=');
    char *out = NULL;
    int is_flag = mb_starts_with(word, "--") && equals != NULL && strcmp(equals + 1, url) == 0;

    *rc = MB_OK;
    if (strcmp(word, url) == 0)
        out = mb_strdup(path);
    else if (is_flag)
        out = mb_asprintf("%.*s%s", (int)(equals + 1 - word), word, path);
    else
        return NULL;
    if (out == NULL)
        *rc = MB_ENOMEM;
    return out;
}

static int has_rank_0(const uint32_t *ranks, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (ranks[i] == 0)
            return 1;
    return 0;
}

int mb_input_wants(const char *file, uint32_t world_size, const uint32_t *ranks, size_t n)
{
    unsigned part, parts;
    int end = 0;

    if (strcmp(file, "state.json") == 0 || strcmp(file, "model_tp00_pp00.safetensors") == 0 ||
        mb_starts_with(file, "mp_rank_"))
        return has_rank_0(ranks, n);
    if (sscanf(file, "optim_dp_%u_of_%u.safetensors%n", &part, &parts, &end) != 2 || end == 0 ||
        file[end] != '\0' || part >= parts)
        return 1;
    for (size_t i = 0; i < n; i++)
        if ((uint64_t)part * world_size < ((uint64_t)ranks[i] + 1) * parts &&
            ((uint64_t)part + 1) * world_size > (uint64_t)ranks[i] * parts)
            return 1;
    return 0;
}
