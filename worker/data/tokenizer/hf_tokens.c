/*
 * Added and special tokens, as AutoTokenizer of transformers 4.57 has them in the end.
 *
 * 1. tokenizer.json lists added tokens; one that the model has keeps the model's id, another gets
 *    the next free one. (An id in the file that is neither is refused: the peer would ignore it.)
 * 2. tokenizer_config.json names a class, which brings defaults for the special tokens and says
 *    whether bos and eos go around the text; without the name, config.json's model_type gives it.
 * 3. Its added_tokens_decoder are added; if it has none, special_tokens_map.json is read over it.
 * 4. Special tokens (bos, eos, unk, sep, pad, cls, mask, then the additional ones) that are not
 *    among the added tokens are added, which may make the vocabulary larger.
 * A class that is not in the table is refused by its name.
 */
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "worker/data/tokenizer/hf_private.h"

enum { MAX_FILE_BYTES = 64 << 20 };

enum { BOS, EOS, UNK, SEP, PAD, CLS, MASK, N_SPECIAL };

static const char *const special_names[N_SPECIAL] = {
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"};

struct class_rule {
    const char *name;               /* without "Fast" */
    const char *special[N_SPECIAL]; /* defaults */
    int sets_template; /* add_bos_token and add_eos_token count, with these defaults: */
    int adds_bos;
    int keeps_prefix_space; /* add_prefix_space cannot change the pre_tokenizer */
};

static const struct class_rule rules[] = {
    {.name = "PreTrainedTokenizer"},
    {.name = "TokenizersBackend"}, /* what transformers 5 calls it */
    {.name = "GPT2Tokenizer",
     .special = {[BOS] = "<|endoftext|>", [EOS] = "<|endoftext|>", [UNK] = "<|endoftext|>"}},
    {.name = "Qwen2Tokenizer",
     .special = {[EOS] = "<|endoftext|>", [UNK] = "<|endoftext|>", [PAD] = "<|endoftext|>"}},
    {.name = "GPTNeoXTokenizer",
     .special = {[BOS] = "<|endoftext|>", [EOS] = "<|endoftext|>", [UNK] = "<|endoftext|>"},
     .sets_template = 1},
    {.name = "LlamaTokenizer",
     .special = {[BOS] = "<s>", [EOS] = "</s>", [UNK] = "<unk>"},
     .sets_template = 1,
     .adds_bos = 1,
     .keeps_prefix_space = 1},
    {.name = "CohereTokenizer",
     .special = {[BOS] = "<BOS_TOKEN>", [EOS] = "<|END_OF_TURN_TOKEN|>", [UNK] = "<UNK>"},
     .sets_template = 1,
     .adds_bos = 1},
    {.name = "BloomTokenizer",
     .special = {[BOS] = "<s>", [EOS] = "</s>", [UNK] = "<unk>", [PAD] = "<pad>"}},
};

static const struct {
    const char *model_type;
    const char *class_name;
} models[] = {
    {"gpt2", "GPT2Tokenizer"},         {"opt", "GPT2Tokenizer"},
    {"llama", "LlamaTokenizer"},       {"mistral", "LlamaTokenizer"},
    {"qwen2", "Qwen2Tokenizer"},       {"qwen2_moe", "Qwen2Tokenizer"},
    {"qwen3", "Qwen2Tokenizer"},       {"qwen3_moe", "Qwen2Tokenizer"},
    {"gpt_neox", "GPTNeoXTokenizer"},  {"olmo", "GPTNeoXTokenizer"},
    {"cohere", "CohereTokenizer"},     {"bloom", "BloomTokenizer"},
    {"falcon", "PreTrainedTokenizer"},
};

int mb_hf_json_file(const char *dir, const char *name, json_t **out, struct mb_err *err)
{
    char *path = mb_path_join(dir, name);
    struct mb_buf text = {0};
    json_error_t problem;
    int rc = 0;

    *out = NULL;
    if (path == NULL)
        return mb_err_set(err, MB_ENOMEM, "tokenizer: out of memory");
    if (mb_fs_exists(path))
        rc = mb_fs_read(path, MAX_FILE_BYTES, &text, err);
    if (rc == 0 && text.len > 0) {
        /* model_max_length is often 10^30, which is no integer of C. */
        *out = json_loadb((const char *)text.data, text.len, JSON_DECODE_INT_AS_REAL, &problem);
        if (!json_is_object(*out)) {
            rc = mb_err_set(err, MB_ECORRUPT, "%s:%d: %s", path, problem.line,
                            *out == NULL ? problem.text : "not an object");
            json_decref(*out);
            *out = NULL;
        }
    }
    mb_buf_close(&text);
    mb_free(path);
    return rc;
}

/* ---- the list ---- */

static struct mb_added_token *find(const struct mb_hf_added *a, const char *text, size_t n)
{
    for (size_t i = 0; i < a->n; i++)
        if (a->tokens[i].n == n && memcmp(a->tokens[i].text, text, n) == 0)
            return &a->tokens[i];
    return NULL;
}

/* The id of a token anywhere, -1 if there is none such. */
static int32_t id_of(const struct mb_hf_added *a, const struct mb_hf_vocab *v, const char *text,
                     size_t n)
{
    const struct mb_added_token *t = find(a, text, n);

    return t != NULL ? t->id : mb_bpe_map_find(&v->map, (const uint8_t *)text, n);
}

/* The id that the next new token gets (added_vocabulary.rs, add_tokens). */
static int32_t next_id(const struct mb_hf_added *a, const struct mb_hf_vocab *v)
{
    int32_t size = (int32_t)v->n_tokens, max = -1;

    for (size_t i = 0; i < a->n; i++)
        max = a->tokens[i].id > max ? a->tokens[i].id : max;
    return max >= size ? max + 1 : size;
}

/* t->id < 0: any. */
static int add(struct mb_hf_added *a, const struct mb_hf_vocab *v, const struct mb_added_token *t,
               struct mb_err *err)
{
    struct mb_added_token *known = find(a, t->text, t->n);
    int32_t id = id_of(a, v, t->text, t->n);
    int is_new = id < 0;

    if (t->n == 0)
        return 0;
    if (is_new)
        id = next_id(a, v);
    if (t->id >= 0 && t->id != id)
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "added token \"%.40s\": id %d; it can only have %d here", t->text, t->id,
                          id);
    if (known != NULL) {
        if (known->normalized != t->normalized)
            return mb_err_set(err, MB_EUNSUPPORTED,
                              "added token \"%.40s\" is given twice and once normalized: not "
                              "provided",
                              t->text);
        *known = (struct mb_added_token){known->text,
                                         known->n,
                                         id,
                                         t->single_word,
                                         t->lstrip,
                                         t->rstrip,
                                         t->normalized,
                                         known->special | t->special};
        return 0;
    }
    if (a->n == a->cap) {
        size_t cap = a->cap > 0 ? 2 * a->cap : 64;
        struct mb_added_token *tokens =
            cap <= MB_HF_MAX_ADDED ? mb_reallocarray(a->tokens, cap, sizeof(*tokens)) : NULL;
        if (tokens == NULL)
            return mb_err_set(err, cap > MB_HF_MAX_ADDED ? MB_EUNSUPPORTED : MB_ENOMEM,
                              "added tokens: more than %d, or out of memory", MB_HF_MAX_ADDED);
        a->tokens = tokens;
        a->cap = cap;
    }
    a->tokens[a->n] = *t;
    a->tokens[a->n].id = id;
    a->tokens[a->n].text = mb_strndup(t->text, t->n);
    if (a->tokens[a->n].text == NULL)
        return mb_err_set(err, MB_ENOMEM, "added tokens: out of memory");
    a->n++;
    a->vocab_size += (uint64_t)is_new;
    return 0;
}

static uint8_t flag(const json_t *o, const char *name, int missing)
{
    const json_t *value = json_object_get(o, name);

    return (uint8_t)(json_is_boolean(value) ? json_is_true(value) : missing);
}

/* A token as a string (then special) or as an object; 0 if it is neither. */
static int token_of(const json_t *value, int special, struct mb_added_token *out)
{
    const json_t *content = json_is_object(value) ? json_object_get(value, "content") : value;

    if (!json_is_string(content))
        return 0;
    *out = (struct mb_added_token){.text = json_string_value(content),
                                   .n = json_string_length(content),
                                   .id = -1,
                                   .special = special ? 1 : flag(value, "special", 0)};
    out->single_word = flag(value, "single_word", 0);
    out->lstrip = flag(value, "lstrip", 0);
    out->rstrip = flag(value, "rstrip", 0);
    out->normalized = flag(value, "normalized", !out->special);
    return 1;
}

int mb_hf_added_read(const json_t *added, const struct mb_hf_vocab *v, struct mb_hf_added *a,
                     struct mb_err *err)
{
    a->vocab_size = v->n_tokens;
    a->bos = a->eos = a->adds_bos = a->adds_eos = a->add_prefix_space = -1;
    for (size_t i = 0; i < json_array_size(added); i++) {
        const json_t *one = json_array_get(added, i);
        const json_t *id = json_object_get(one, "id");
        struct mb_added_token t;
        int rc;

        if (!json_is_object(one) || !token_of(one, 0, &t) || !json_is_integer(id) ||
            json_integer_value(id) < 0 || json_integer_value(id) > MB_BPE_MAX_IDS)
            return mb_err_set(err, MB_ECORRUPT,
                              "added_tokens, entry %zu: content and id were expected", i);
        t.id = (int32_t)json_integer_value(id);
        rc = add(a, v, &t, err);
        if (rc != 0)
            return rc;
    }
    return 0;
}

void mb_hf_added_close(struct mb_hf_added *a)
{
    for (size_t i = 0; i < a->n; i++)
        mb_free((void *)(uintptr_t)a->tokens[i].text);
    mb_free(a->tokens);
    *a = (struct mb_hf_added){0};
}

/* ---- the files beside tokenizer.json ---- */

struct files {
    json_t *config;  /* tokenizer_config.json */
    json_t *special; /* special_tokens_map.json, where it counts */
    json_t *model;   /* config.json, where it counts */
};

static int find_rule(const struct files *f, const struct class_rule **out, struct mb_err *err)
{
    const char *name = json_string_value(json_object_get(f->config, "tokenizer_class"));
    const char *model = json_string_value(json_object_get(f->model, "model_type"));
    size_t n;

    *out = &rules[0];
    if (name == NULL)
        name = json_string_value(json_object_get(f->model, "tokenizer_class"));
    for (size_t i = 0; name == NULL && model != NULL && i < sizeof(models) / sizeof(*models); i++)
        if (strcmp(models[i].model_type, model) == 0)
            name = models[i].class_name;
    if (name == NULL && model != NULL)
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "config.json: model_type %.60s is not provided; tokenizer_class of "
                          "tokenizer_config.json can name the class",
                          model);
    if (name == NULL)
        return 0;
    n = strlen(name);
    if (n > 4 && strcmp(name + n - 4, "Fast") == 0)
        n -= 4;
    for (size_t i = 0; i < sizeof(rules) / sizeof(*rules); i++) {
        if (strlen(rules[i].name) == n && memcmp(rules[i].name, name, n) == 0) {
            *out = &rules[i];
            return 0;
        }
    }
    return mb_err_set(err, MB_EUNSUPPORTED,
                      "tokenizer_config.json: tokenizer_class %.60s is not "
                      "provided",
                      name);
}

/* A special token's value: special_tokens_map.json before tokenizer_config.json before the class;
 * 1 and *out, 0: there is none. */
static int special_token(const struct files *f, const struct class_rule *rule, int which,
                         struct mb_added_token *out)
{
    const char *name = special_names[which];
    const json_t *value = json_object_get(f->special, name);

    if (value == NULL)
        value = json_object_get(f->config, name);
    if (value != NULL)
        return token_of(value, 1, out);
    if (rule->special[which] == NULL)
        return 0;
    *out = (struct mb_added_token){
        .text = rule->special[which], .n = strlen(rule->special[which]), .id = -1, .special = 1};
    return 1;
}

static int add_special(struct mb_hf_added *a, const struct mb_hf_vocab *v,
                       const struct mb_added_token *t, struct mb_err *err)
{
    return find(a, t->text, t->n) == NULL ? add(a, v, t, err) : 0;
}

static int add_list(struct mb_hf_added *a, const struct mb_hf_vocab *v, const json_t *list,
                    struct mb_err *err)
{
    for (size_t i = 0; i < json_array_size(list); i++) {
        struct mb_added_token t;
        int rc = token_of(json_array_get(list, i), 1, &t) ? add_special(a, v, &t, err) : 0;
        if (rc != 0)
            return rc;
    }
    return 0;
}

static int by_id(const void *x, const void *y)
{
    const struct mb_added_token *a = x, *b = y;

    return a->id < b->id ? -1 : a->id > b->id;
}

/* added_tokens_decoder: {"ID": {token}, ...}, in the order of the ids. */
static int add_decoder(struct mb_hf_added *a, const struct mb_hf_vocab *v, json_t *decoder,
                       struct mb_err *err)
{
    size_t n = json_object_size(decoder), i = 0;
    struct mb_added_token *tokens = mb_calloc(n + 1, sizeof(*tokens));
    const char *key;
    json_t *value;
    int rc = 0;

    if (tokens == NULL)
        return mb_err_set(err, MB_ENOMEM, "added tokens: out of memory");
    json_object_foreach(decoder, key, value)
    {
        long id;
        char rest;
        if (sscanf(key, "%8ld%c", &id, &rest) != 1 || id < 0 || !token_of(value, 0, &tokens[i])) {
            rc = mb_err_set(err, MB_ECORRUPT,
                            "tokenizer_config.json: added_tokens_decoder, \"%.20s\": not an id "
                            "and a token",
                            key);
            break;
        }
        tokens[i++].id = (int32_t)id;
    }
    qsort(tokens, i, sizeof(*tokens), by_id);
    for (size_t k = 0; rc == 0 && k < i; k++)
        rc = add(a, v, &tokens[k], err);
    mb_free(tokens);
    return rc;
}

static int add_all_special(struct mb_hf_added *a, const struct mb_hf_vocab *v,
                           const struct files *f, const struct class_rule *rule, struct mb_err *err)
{
    int32_t ids[N_SPECIAL];
    int rc = 0;

    for (int i = 0; rc == 0 && i < N_SPECIAL; i++) {
        struct mb_added_token t;
        ids[i] = -1;
        if (!special_token(f, rule, i, &t))
            continue;
        rc = add_special(a, v, &t, err);
        ids[i] = id_of(a, v, t.text, t.n);
    }
    if (rc == 0)
        rc = add_list(a, v, json_object_get(f->config, "additional_special_tokens"), err);
    if (rc == 0)
        rc = add_list(a, v, json_object_get(f->special, "additional_special_tokens"), err);
    a->bos = ids[BOS] >= 0 ? ids[BOS] : ids[CLS]; /* Megatron-LM core fills one from the other */
    a->eos = ids[EOS] >= 0 ? ids[EOS] : ids[SEP];
    if (rc == 0 && rule->sets_template) {
        a->adds_bos = flag(f->config, "add_bos_token", rule->adds_bos);
        a->adds_eos = flag(f->config, "add_eos_token", 0);
        if ((a->adds_bos && ids[BOS] < 0) || (a->adds_eos && ids[EOS] < 0))
            rc = mb_err_set(err, MB_EINVAL,
                            "tokenizer_config.json: add_%s_token is true and there is no %s_token",
                            a->adds_bos && ids[BOS] < 0 ? "bos" : "eos",
                            a->adds_bos && ids[BOS] < 0 ? "bos" : "eos");
    }
    return rc;
}

static int prefix_space(const struct files *f, const struct class_rule *rule, struct mb_hf_added *a,
                        struct mb_err *err)
{
    const json_t *value = json_object_get(f->config, "add_prefix_space");
    int deep =
        strcmp(rule->name, "CohereTokenizer") == 0 || strcmp(rule->name, "BloomTokenizer") == 0;

    if ((deep && json_is_true(value)) || (rule->keeps_prefix_space && json_is_boolean(value)))
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "tokenizer_config.json: add_prefix_space with tokenizer_class %s is not "
                          "provided",
                          rule->name);
    a->add_prefix_space = rule->keeps_prefix_space ? -1 : json_is_true(value);
    return 0;
}

int mb_hf_added_configure(const char *dir, const struct mb_hf_vocab *v, struct mb_hf_added *a,
                          struct mb_err *err)
{
    struct files f = {0};
    const struct class_rule *rule;
    json_t *decoder;
    int rc = mb_hf_json_file(dir, "tokenizer_config.json", &f.config, err);

    decoder = json_object_get(f.config, "added_tokens_decoder");
    if (rc == 0 && decoder == NULL)
        rc = mb_hf_json_file(dir, "special_tokens_map.json", &f.special, err);
    if (rc == 0 && json_object_get(f.config, "tokenizer_class") == NULL)
        rc = mb_hf_json_file(dir, "config.json", &f.model, err);
    if (rc == 0)
        rc = find_rule(&f, &rule, err);
    if (rc == 0 && json_is_true(json_object_get(f.config, "split_special_tokens")))
        rc = mb_err_set(err, MB_EUNSUPPORTED,
                        "tokenizer_config.json: split_special_tokens is not provided");
    if (rc == 0 && decoder != NULL)
        rc = add_decoder(a, v, decoder, err);
    if (rc == 0)
        rc = add_all_special(a, v, &f, rule, err);
    if (rc == 0 && f.config != NULL)
        rc = prefix_space(&f, rule, a, err);
    json_decref(f.config);
    json_decref(f.special);
    json_decref(f.model);
    return rc;
}
