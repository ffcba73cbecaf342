/*
 * Which sizes the weighted blends of a run have that goes on.
 *
 * Megatron-LM core up to 0.10 makes a blend half a percent longer than what is asked of it, 0.11
 * and later do not; the sizes of its parts differ a little, too. In a cyclic order, and where it
 * changes how many epochs of a part are read, the samples that follow are others.
 *
 *  1. A run of ours says blend_sizes. One of before this argument does not: it had either.
 *  2. Megatron-LM's arguments tell its version: only 0.9 and 0.10 have renormalize_blend_weights,
 *     and those of before do not have ckpt_format yet.
 *  3. The command line's own choice counts, with a warning if it is another one.
 * Failures: none but memory; what is not known or cannot be had is said, loudly.
 */
#include "worker/args_table.h"

#include <string.h>
#include "base/alloc.h"

static const char OLD[] = "0.10", NEW[] = "0.11";
static const double SURPLUS = 0.005;

/* NULL: it does not say. */
static const char *sizes_of(const json_t *args)
{
    const char *said = json_string_value(json_object_get(args, "blend_sizes"));
    if (said != NULL) {
        return strcmp(said, OLD) == 0 ? OLD : strcmp(said, NEW) == 0 ? NEW : NULL;
    }
    if (json_object_get(args, "eval_at_start") != NULL) { /* an argument of ours */
        return NULL;
    }
    const int is_old = json_object_get(args, "renormalize_blend_weights") != NULL ||
                       json_object_get(args, "ckpt_format") == NULL;
    return is_old ? OLD : NEW;
}

static const char ELSE[] = "samples come in another order from here on, some of them again, some "
                           "never";

static int say(const struct mb_args *a, const char *theirs, struct mb_buf *notes)
{
    if (theirs == NULL && a->blend_sizes == NULL) {
        return mb_buf_printf(notes,
                             "WARNING: the checkpoint does not say which sizes its run's weighted "
                             "blend had: it has those of core %s now; if they were those of %s, "
                             "%s: give --blend-sizes %s\n",
                             NEW, OLD, ELSE, OLD);
    }
    if (theirs != NULL && a->blend_sizes != NULL && strcmp(theirs, a->blend_sizes) != 0) {
        return mb_buf_printf(notes,
                             "WARNING: --blend-sizes %s: the checkpoint's run had those of core "
                             "%s: %s\n",
                             a->blend_sizes, theirs, ELSE);
    }
    if (theirs == OLD && a->blend_sizes == NULL) {
        return mb_buf_printf(notes,
                             "note: the weighted blend has the sizes of Megatron-LM core %s, as "
                             "the checkpoint's run had them\n",
                             OLD);
    }
    return 0;
}

/* What Megatron-LM's run had and ours has not. */
static int say_lacking(const json_t *args, struct mb_buf *notes)
{
    const json_t *surplus = json_object_get(args, "mid_level_dataset_surplus");
    int bad = 0;
    if (json_is_true(json_object_get(args, "renormalize_blend_weights"))) {
        bad = mb_buf_printf(notes,
                            "WARNING: the checkpoint's run had --renormalize-blend-weights, which "
                            "is not provided: %s\n",
                            ELSE);
    }
    if (!bad && json_is_number(surplus) && json_number_value(surplus) != SURPLUS) {
        bad = mb_buf_printf(notes,
                            "WARNING: the checkpoint's run had --mid-level-dataset-surplus %g, "
                            "here it is %g: if that changes how many epochs of a prefix are read, "
                            "%s\n",
                            json_number_value(surplus), SURPLUS, ELSE);
    }
    return bad;
}

int mb_args_settle_blend(struct mb_args *a, const char *args_json, int is_weighted,
                         struct mb_buf *notes, struct mb_err *err)
{
    json_error_t je;
    json_t *args = json_loads(args_json, 0, &je); /* was read before */
    const char *theirs = sizes_of(args);
    int bad = is_weighted && (say(a, theirs, notes) || say_lacking(args, notes));
    if (!bad && a->blend_sizes == NULL && theirs != NULL) {
        a->blend_sizes = mb_strdup(theirs);
        bad = a->blend_sizes == NULL;
    }
    json_decref(args);
    return bad ? mb_err_set(err, MB_ENOMEM, "out of memory for the arguments") : 0;
}
