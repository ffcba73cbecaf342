/*
 * The pipeline of a tokenizer.json. Every component has a row in one of the tables below; one that
 * has none is refused by its name.
 *
 * 1. normalizer: null, NFC, or a sequence of at most that.
 * 2. pre_tokenizer: Split and Digits cut the text, ByteLevel ends the sequence; it may add a space
 *    in front and cut by GPT-2's pattern. A Split whose pattern is that of a family cuts with the
 *    family's scanner.
 * 3. post_processor: ByteLevel (moves offsets, no ids), TemplateProcessing (ids around the text).
 * 4. decoder: ByteLevel or null; decoding is always of bytes.
 * What was made before a failure stays in p; the caller closes it.
 */
#include <string.h>
#include "base/alloc.h"
#include "worker/data/tokenizer/hf_private.h"

static const char *type_of(const json_t *part)
{
    const char *type = json_string_value(json_object_get(part, "type"));

    return type != NULL ? type : "(no type)";
}

static int is_type(const json_t *part, const char *type)
{
    return strcmp(type_of(part), type) == 0;
}

static int refuse(struct mb_err *err, const char *kind, const json_t *part)
{
    return mb_err_set(err, MB_EUNSUPPORTED, "%s %.60s is not provided", kind, type_of(part));
}

/* A member that is true, false or absent (then `missing`). */
static int flag(const json_t *part, const char *name, int missing)
{
    const json_t *value = json_object_get(part, name);

    return json_is_boolean(value) ? json_is_true(value) : missing;
}

static int read_normalizer(const json_t *part, struct mb_hf_parts *p, struct mb_err *err)
{
    const json_t *list = json_object_get(part, "normalizers");

    if (part == NULL || json_is_null(part))
        return 0;
    if (is_type(part, "NFC")) {
        p->nfc = 1;
        return 0;
    }
    if (!is_type(part, "Sequence") || !json_is_array(list))
        return refuse(err, "normalizer", part);
    for (size_t i = 0; i < json_array_size(list); i++) {
        if (!is_type(json_array_get(list, i), "NFC"))
            return refuse(err, "normalizer", json_array_get(list, i));
        p->nfc = 1;
    }
    return 0;
}

/* NULL: there are as many as there may be. */
static struct mb_hf_stage *new_stage(struct mb_hf_parts *p, struct mb_err *err)
{
    struct mb_hf_stage *stage;

    if (p->n_stages == MB_HF_MAX_STAGES) {
        mb_err_set(err, MB_EUNSUPPORTED, "pre_tokenizer: more than %d that cut", MB_HF_MAX_STAGES);
        return NULL;
    }
    stage = &p->stages[p->n_stages++];
    *stage = (struct mb_hf_stage){.behavior = MB_HF_ISOLATED};
    return stage;
}

static int add_regex(struct mb_hf_parts *p, const char *pattern, size_t n,
                     enum mb_hf_behavior behavior, int invert, struct mb_err *err)
{
    struct mb_hf_stage *stage = new_stage(p, err);

    if (stage == NULL)
        return MB_EUNSUPPORTED;
    stage->behavior = behavior;
    stage->invert = invert;
    return mb_split_regex_create(pattern, n, &stage->regex, err);
}

static int add_family(struct mb_hf_parts *p, enum mb_split_family family, struct mb_err *err)
{
    struct mb_hf_stage *stage = new_stage(p, err);

    if (stage == NULL)
        return MB_EUNSUPPORTED;
    stage->family = family;
    return 0;
}

static int read_behavior(const json_t *part, enum mb_hf_behavior *out, struct mb_err *err)
{
    static const char *const names[] = {"Removed", "Isolated", "MergedWithPrevious",
                                        "MergedWithNext", "Contiguous"};
    const char *name = json_string_value(json_object_get(part, "behavior"));

    for (size_t i = 0; name != NULL && i < sizeof(names) / sizeof(*names); i++) {
        if (strcmp(names[i], name) == 0) {
            *out = (enum mb_hf_behavior)i;
            return 0;
        }
    }
    return mb_err_set(err, MB_ECORRUPT, "pre_tokenizer Split: behavior %.40s is unknown",
                      name != NULL ? name : "(none)");
}

/* A text of which every character stands for itself. */
static int escape_pattern(const char *text, size_t n, struct mb_buf *out)
{
    for (size_t i = 0; i < n; i++) {
        int rc = strchr("\\^$.[]|()?*+{}", text[i]) != NULL
                     ? mb_buf_add(out, (char[]){'\\', text[i]}, 2)
                     : mb_buf_add(out, &text[i], 1);
        if (rc != 0)
            return rc;
    }
    return 0;
}

static int read_split(const json_t *part, struct mb_hf_parts *p, struct mb_err *err)
{
    const json_t *pattern = json_object_get(part, "pattern");
    const json_t *regex = json_object_get(pattern, "Regex");
    const json_t *plain = json_object_get(pattern, "String");
    int invert = flag(part, "invert", 0), rc;
    enum mb_hf_behavior behavior = MB_HF_ISOLATED;
    enum mb_split_family family;
    struct mb_buf escaped = {0};

    rc = read_behavior(part, &behavior, err);
    if (rc != 0)
        return rc;
    if (!json_is_string(regex != NULL ? regex : plain))
        return mb_err_set(err, MB_ECORRUPT, "pre_tokenizer Split: pattern is no Regex or String");
    /* A family's pattern leaves no gaps, so that removing them is no difference. */
    if (regex != NULL && (behavior == MB_HF_ISOLATED || (behavior == MB_HF_REMOVED && invert)) &&
        mb_split_recognise(json_string_value(regex), &family))
        return add_family(p, family, err);
    if (regex != NULL) {
        rc = add_regex(p, json_string_value(regex), json_string_length(regex), behavior, invert,
                       err);
        return rc == 0 ? 0 : mb_err_wrap(err, "pre_tokenizer Split");
    }
    rc = escape_pattern(json_string_value(plain), json_string_length(plain), &escaped);
    if (rc != 0)
        rc = mb_err_set(err, MB_ENOMEM, "pre_tokenizer Split: out of memory");
    else
        rc = add_regex(p, mb_buf_str(&escaped), escaped.len, behavior, invert, err);
    mb_buf_close(&escaped);
    return rc;
}

static int read_bytelevel(const json_t *part, struct mb_hf_parts *p, struct mb_err *err)
{
    if (flag(part, "add_prefix_space", 1)) {
        if (p->n_stages > 0)
            return mb_err_set(err, MB_EUNSUPPORTED,
                              "pre_tokenizer ByteLevel: add_prefix_space behind another one is not "
                              "provided");
        p->add_prefix_space = 1;
    }
    return flag(part, "use_regex", 1) ? add_family(p, MB_SPLIT_GPT2, err) : 0;
}

static int read_one(const json_t *part, struct mb_hf_parts *p, int *is_last, struct mb_err *err)
{
    if (*is_last)
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "pre_tokenizer %.60s behind ByteLevel is not provided", type_of(part));
    if (is_type(part, "Split"))
        return read_split(part, p, err);
    if (is_type(part, "Digits"))
        return add_regex(p, "\\p{N}", 5,
                         flag(part, "individual_digits", 0) ? MB_HF_ISOLATED : MB_HF_CONTIGUOUS, 0,
                         err);
    if (!is_type(part, "ByteLevel"))
        return refuse(err, "pre_tokenizer", part);
    *is_last = 1;
    return read_bytelevel(part, p, err);
}

static int read_pre_tokenizer(const json_t *part, struct mb_hf_parts *p, struct mb_err *err)
{
    const json_t *list = json_object_get(part, "pretokenizers");
    int is_last = 0, rc = 0;

    if (part == NULL || json_is_null(part))
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "pre_tokenizer null is not provided: byte-level BPE needs ByteLevel");
    if (is_type(part, "Sequence") && json_is_array(list)) {
        for (size_t i = 0; rc == 0 && i < json_array_size(list); i++)
            rc = read_one(json_array_get(list, i), p, &is_last, err);
    } else {
        rc = read_one(part, p, &is_last, err);
        p->outer_is_bytelevel = is_last;
    }
    if (rc == 0 && !is_last)
        rc = mb_err_set(err, MB_EUNSUPPORTED,
                        "pre_tokenizer %.60s without ByteLevel is not provided", type_of(part));
    return rc;
}

/* ---- post-processor ---- */

static int add_ids(const json_t *special, const char *name, int32_t *ids, size_t *n,
                   struct mb_err *err)
{
    const json_t *list = json_object_get(json_object_get(special, name), "ids");

    if (!json_is_array(list))
        return mb_err_set(err, MB_ECORRUPT,
                          "post_processor TemplateProcessing: special_tokens has no %.60s", name);
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *id = json_array_get(list, i);
        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            json_integer_value(id) > MB_BPE_MAX_IDS || *n == MB_HF_MAX_TEMPLATE)
            return mb_err_set(err, MB_EUNSUPPORTED,
                              "post_processor TemplateProcessing: ids of %.60s: at most %d whole "
                              "numbers are provided",
                              name, MB_HF_MAX_TEMPLATE);
        ids[(*n)++] = (int32_t)json_integer_value(id);
    }
    return 0;
}

static int read_template(const json_t *part, struct mb_hf_parts *p, struct mb_err *err)
{
    const json_t *single = json_object_get(part, "single");
    const json_t *special = json_object_get(part, "special_tokens");
    int seen = 0, rc = 0;

    if (p->has_template)
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "post_processor: a second TemplateProcessing is not provided");
    for (size_t i = 0; rc == 0 && i < json_array_size(single); i++) {
        const json_t *piece = json_array_get(single, i);
        const char *sequence =
            json_string_value(json_object_get(json_object_get(piece, "Sequence"), "id"));
        const char *name =
            json_string_value(json_object_get(json_object_get(piece, "SpecialToken"), "id"));

        if (name != NULL)
            rc = seen ? add_ids(special, name, p->after, &p->n_after, err)
                      : add_ids(special, name, p->before, &p->n_before, err);
        else if (sequence != NULL && strcmp(sequence, "A") == 0 && !seen)
            seen = 1;
        else
            rc = mb_err_set(err, MB_EUNSUPPORTED,
                            "post_processor TemplateProcessing: single must have sequence A once");
    }
    if (rc == 0 && !seen)
        rc = mb_err_set(err, MB_ECORRUPT,
                        "post_processor TemplateProcessing: single has no sequence A");
    p->has_template = 1;
    return rc;
}

static int read_post_processor(const json_t *part, struct mb_hf_parts *p, int depth,
                               struct mb_err *err)
{
    const json_t *list = json_object_get(part, "processors");
    int rc = 0;

    if (part == NULL || json_is_null(part) || is_type(part, "ByteLevel"))
        return 0;
    if (is_type(part, "TemplateProcessing"))
        return read_template(part, p, err);
    if (!is_type(part, "Sequence") || !json_is_array(list) || depth > 0)
        return refuse(err, "post_processor", part);
    for (size_t i = 0; rc == 0 && i < json_array_size(list); i++)
        rc = read_post_processor(json_array_get(list, i), p, depth + 1, err);
    return rc;
}

static int check_decoder(const json_t *part, struct mb_err *err)
{
    const json_t *list = json_object_get(part, "decoders");

    if (part == NULL || json_is_null(part) || is_type(part, "ByteLevel"))
        return 0;
    if (!is_type(part, "Sequence") || json_array_size(list) != 1 ||
        !is_type(json_array_get(list, 0), "ByteLevel"))
        return refuse(err, "decoder", part);
    return 0;
}

int mb_hf_parts_read(const json_t *normalizer, const json_t *pre_tokenizer,
                     const json_t *post_processor, const json_t *decoder, struct mb_hf_parts *p,
                     struct mb_err *err)
{
    int rc = read_normalizer(normalizer, p, err);

    if (rc == 0)
        rc = read_pre_tokenizer(pre_tokenizer, p, err);
    if (rc == 0)
        rc = read_post_processor(post_processor, p, 0, err);
    if (rc == 0)
        rc = check_decoder(decoder, err);
    /* A family that is alone is left to the engine (bytelevel.h), which is faster. */
    for (size_t i = 0; rc == 0 && p->n_stages > 1 && i < p->n_stages; i++)
        if (p->stages[i].regex == NULL)
            rc = mb_split_create(p->stages[i].family, NULL, &p->stages[i].split, err);
    return rc;
}

void mb_hf_parts_close(struct mb_hf_parts *p)
{
    for (size_t i = 0; i < p->n_stages; i++) {
        mb_split_regex_destroy(p->stages[i].regex);
        mb_split_destroy(p->stages[i].split);
    }
    p->n_stages = 0;
}
