/* The JSON line scanner never reads past the line; every line with a text that jansson accepts it
 * accepts too (but for raw NUL bytes, where jansson is lax, and deep nesting), and both read the
 * same text. */
#include <jansson.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "worker/data/jsonl.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void compare(const struct mb_jsonl *j, const json_t *root)
{
    const json_t *value = json_object_get(root, "text");
    size_t n;
    const uint8_t *text;

    if (!json_is_string(value))
        return;
    if (mb_jsonl_n_texts(j, 0) != 1)
        abort();
    text = mb_jsonl_text(j, 0, 0, &n);
    if (n != json_string_length(value) || memcmp(text, json_string_value(value), n) != 0)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const keys[] = {"text"};
    struct mb_jsonl *j;
    struct mb_err err;
    json_error_t problem;
    json_t *root;
    int rc;

    if (mb_jsonl_create(keys, 1, &j, &err) != 0)
        return 0;
    rc = mb_jsonl_parse(j, data, size, &err);
    root = json_loadb((const char *)data, size, JSON_ALLOW_NUL, &problem);
    if (rc == 0 && root != NULL)
        compare(j, root);
    /* What jansson reads as an object with a text, we read. */
    if (rc != 0 && root != NULL && json_is_string(json_object_get(root, "text")) &&
        strstr(err.text, "too deep") == NULL && memchr(data, 0, size) == NULL)
        abort();
    json_decref(root);
    mb_jsonl_destroy(j);
    return 0;
}
