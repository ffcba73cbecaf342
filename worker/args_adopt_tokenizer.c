/*
 * The tokenizer of a checkpoint's arguments, as Megatron-LM's load_args_from_checkpoint takes it,
 * but that it must be here.
 *
 *  1. find: its type and path, untrusted texts.
 *  2. The path must be readable by every rank; who calls has asked them all
 * (mb_args_tokenizer_path).
 *  3. take: type and path replace the command line's. With
 *     --no-use-tokenizer-model-from-checkpoint-args only the type is taken, and where the command
 *     line has none: core 0.16 takes neither then, older ones the type in any case.
 *  4. A path that some rank cannot read: the command line's tokenizer, its type with its files, and
 *     a line of the notes.
 * Failures: a wrong type is MB_ECORRUPT; a path that is not there, and no tokenizer in the command
 * line, is MB_ENOENT and names it.
 */
#include "worker/args_table.h"

#include <string.h>
#include "base/alloc.h"

static const char TYPE[] = "tokenizer_type", MODEL[] = "tokenizer_model";

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "out of memory for the checkpoint's tokenizer");
}

static int copy_text(const json_t *o, const char *name, char **out, struct mb_err *err)
{
    const json_t *j = json_object_get(o, name);
    if (j == NULL || json_is_null(j)) {
        return 0;
    }
    if (!json_is_string(j)) {
        return mb_err_set(err, MB_ECORRUPT, "the checkpoint's argument %s has a wrong type", name);
    }
    int rc = mb_arg_check_text(name, json_string_value(j), err);
    if (rc != 0) {
        return rc;
    }
    *out = mb_strdup(json_string_value(j));
    return *out != NULL ? 0 : no_memory(err);
}

int mb_args_find_tokenizer(struct mb_args *a, const json_t *o, struct mb_err *err)
{
    int rc = copy_text(o, TYPE, &a->checkpoint_tokenizer.type, err);
    return rc == 0 ? copy_text(o, MODEL, &a->checkpoint_tokenizer.model, err) : rc;
}

const char *mb_args_tokenizer_path(const struct mb_args *a)
{
    return a->use_tokenizer_model_from_checkpoint_args ? a->checkpoint_tokenizer.model : NULL;
}

/* NULL: the line that there is none. */
static int take(struct mb_args *a, const char *dest, const char *text, struct mb_err *err)
{
    json_t *j = text != NULL ? json_string(text) : NULL;
    if (text != NULL && j == NULL) {
        return no_memory(err);
    }
    int rc = mb_arg_adopt(a, dest, j, err);
    json_decref(j);
    a->checkpoint_tokenizer.is_taken |= rc == 0 && text != NULL;
    return rc;
}

/* What the command line has of a tokenizer. With none but a path, the type is the checkpoint's. */
static int fall_back(struct mb_args *a, const char *why_not, struct mb_err *err)
{
    const struct mb_args_tokenizer *theirs = &a->checkpoint_tokenizer;
    if (a->tokenizer_type == NULL && a->tokenizer_model == NULL) {
        return mb_err_set(err, MB_ENOENT,
                          "the checkpoint's tokenizer, tokenizer_model %s, is not readable here: "
                          "%s; give --tokenizer-type and --tokenizer-model",
                          theirs->model, why_not);
    }
    if (mb_buf_printf(&a->notes,
                      "note: the checkpoint's tokenizer, tokenizer_model %s, is not readable here: "
                      "%s; the command line's is used\n",
                      theirs->model, why_not) != 0) {
        return no_memory(err);
    }
    return a->tokenizer_type == NULL ? take(a, TYPE, theirs->type, err) : 0;
}

int mb_args_adopt_tokenizer(struct mb_args *a, const char *why_not, struct mb_err *err)
{
    const struct mb_args_tokenizer *theirs = &a->checkpoint_tokenizer;
    if (!a->use_tokenizer_model_from_checkpoint_args) {
        return a->tokenizer_type == NULL ? take(a, TYPE, theirs->type, err) : 0;
    }
    if (theirs->model != NULL && why_not != NULL) {
        return fall_back(a, why_not, err);
    }
    int rc = take(a, MODEL, theirs->model, err);
    return rc == 0 ? take(a, TYPE, theirs->type, err) : rc;
}
