/* Any bytes as the shared credentials file and, from the first NUL on, the config file: the parser
 * stays inside them, and a source that says it has keys has both. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "base/s3/source.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char *env(void *arg, const char *name)
{
    (void)arg;
    return strcmp(name, "AWS_PROFILE") == 0 ? "p" : NULL;
}

static int on_pair(void *arg, const struct mb_s3_ini_pair *pair)
{
    const char *const *range = arg;
    if (pair->name < range[0] || pair->name + pair->n_name > range[1] || pair->value < range[0] ||
        pair->value + pair->n_value > range[1])
        abort();
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mb_s3_source s;
    struct mb_err err;
    const char *text = (const char *)data;
    const char *range[2] = {text, text + size};
    const char *nul = size ? memchr(text, '\0', size) : NULL;
    size_t n = nul ? (size_t)(nul - text) : size;
    if (mb_s3_ini_parse(text, size, on_pair, range) != 0)
        abort();
    if (mb_s3_source_choose(env, NULL, "r", &s, &err) != 0)
        abort();
    int rc = mb_s3_source_read_files(&s, env, NULL, "r", text, n, nul, size - n, &err);
    if (rc == 0 && s.kind == MB_S3_FROM_KEYS && (!s.keys.access_key || !s.keys.secret_key))
        abort();
    if (rc == 0 && s.kind == MB_S3_FROM_ROLE && (!s.role_arn || !s.token_file))
        abort();
    mb_s3_source_close(&s);
    return 0;
}
