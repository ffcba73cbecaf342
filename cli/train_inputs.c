/*
 * A word belongs to the last --flag before it, or is --flag=URL; the flag says what it is. The same
 * URL under two flags of one kind is fetched once.
 */
#include "cli/train_inputs.h"

#include <string.h>
#include "base/alloc.h"
#include "base/str.h"

/* As in proto/mobula/agent.proto, Input.Kind. */
enum kind { DATASET = 0, ONE_FILE = 1, TOKENIZER = 2, CHECKPOINT = 3 };

static const struct {
    const char *flag;
    enum kind kind;
} flags[] = {
    {"--data-path", DATASET},         {"--train-data-path", DATASET},
    {"--valid-data-path", DATASET},   {"--test-data-path", DATASET},
    {"--vocab-file", ONE_FILE},       {"--merge-file", ONE_FILE},
    {"--tokenizer-model", TOKENIZER}, {"--pretrained-checkpoint", CHECKPOINT},
    {"--load", CHECKPOINT}, /* of train it was taken out before */
};

static int is_url(const char *s)
{
    return mb_starts_with(s, "s3://") || mb_starts_with(s, "gs://");
}

/* -1: no flag of the table. */
static int kind_of(const char *flag, size_t len)
{
    for (size_t i = 0; i < sizeof(flags) / sizeof(flags[0]); i++)
        if (strlen(flags[i].flag) == len && strncmp(flags[i].flag, flag, len) == 0)
            return (int)flags[i].kind;
    return -1;
}

static int add(struct mb_driver_input *list, size_t *n, const char *flag, size_t flag_len,
               const char *url, struct mb_err *err)
{
    int kind = kind_of(flag, flag_len);

    if (kind < 0 && flag_len == 6 && strncmp(flag, "--save", 6) == 0)
        return mb_err_set(err, MB_EINVAL,
                          "--save %.300s: it takes a directory; --checkpoint-url makes what is "
                          "saved there durable in a store",
                          url);
    if (kind < 0)
        return MB_OK; /* its own matter */
    for (size_t i = 0; i < *n; i++)
        if (list[i].kind == kind && strcmp(list[i].url, url) == 0)
            return MB_OK;
    for (size_t i = 0; i < *n; i++)
        if (strcmp(list[i].url, url) == 0)
            return mb_err_set(err, MB_EINVAL, "%.300s: it cannot be two kinds of input at once",
                              url);
    list[(*n)++] = (struct mb_driver_input){url, kind, kind == CHECKPOINT};
    return MB_OK;
}

int mb_train_inputs(char **words, int n, struct mb_driver_input **out, size_t *n_out,
                    struct mb_err *err)
{
    struct mb_driver_input *list = mb_calloc((size_t)n + 1, sizeof(*list));
    const char *flag = "";
    size_t n_list = 0;
    int rc = list != NULL ? MB_OK : mb_err_set(err, MB_ENOMEM, "out of memory");

    for (int i = 0; i < n && rc == MB_OK; i++) {
        const char *equals = strchr(words[i], '=');

        if (!mb_starts_with(words[i], "--")) {
            if (is_url(words[i]))
                rc = add(list, &n_list, flag, strlen(flag), words[i], err);
            continue;
        }
        if (equals != NULL && is_url(equals + 1))
            rc = add(list, &n_list, words[i], (size_t)(equals - words[i]), equals + 1, err);
        flag = equals != NULL ? "" : words[i];
    }
    if (rc != MB_OK) {
        mb_free(list);
        return rc;
    }
    *out = list;
    *n_out = n_list;
    return MB_OK;
}
