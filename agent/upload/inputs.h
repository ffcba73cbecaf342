/*
 * What a gang's ranks read from an object store: data sets, tokenizers, a base model. Fetched
 * before the ranks start into a directory of the node that all its ranks and all jobs share.
 * Loop-thread only.
 *
 * DIR/<hash of URL, sizes and ETags>/NAME: so a path means the same bytes for ever, and an object
 * that is replaced becomes another directory; those that nobody needs any more are for people to
 * remove. Files appear under their names when they are whole; who fetches holds a flock on the
 * directory, others wait for it. What is there with the right size is not fetched again.
 */
#ifndef MOBULA_AGENT_UPLOAD_INPUTS_H
#define MOBULA_AGENT_UPLOAD_INPUTS_H

#include <stddef.h>
#include <stdint.h>
#include <uv.h>
#include "base/err.h"

enum mb_input_kind {
    MB_INPUT_DATASET = 0,   /* URL.bin and URL.idx */
    MB_INPUT_FILE = 1,      /* one object */
    MB_INPUT_TOKENIZER = 2, /* one object, or the small files of a "directory" */
    MB_INPUT_CHECKPOINT = 3 /* the newest whole checkpoint below URL, without optimizer state */
};

struct mb_input {
    const char *url;
    enum mb_input_kind kind;
};

struct mb_inputs_ops {
    /* Progress for people, at most every few seconds, without a newline. */
    void (*on_text)(void *arg, const char *text);
    /* Exactly once, never from inside mb_inputs_start(). err->code 0: paths[i], borrowed, is where
     * input i is. The handle dies with it. */
    void (*on_done)(void *arg, const struct mb_err *err, const char *const *paths);
};

struct mb_inputs;

/* list is copied. */
int mb_inputs_start(uv_loop_t *loop, const char *dir, const struct mb_input *list, size_t n,
                    const struct mb_inputs_ops *ops, void *arg, struct mb_inputs **out,
                    struct mb_err *err);
void mb_inputs_cancel(struct mb_inputs *in); /* on_done follows, with MB_ECANCELED */

/* Pure: is the word the URL, or --flag=URL? Then the new word, else NULL with *rc 0. */
char *mb_input_replace(const char *word, const char *url, const char *path, int *rc);

/* Pure: a file of a checkpoint that ranks ranks[0..n) of a world of this size read: state and
 * weights rank 0; of the optimizer each its range. What has another name: everybody. */
int mb_input_wants(const char *file, uint32_t world_size, const uint32_t *ranks, size_t n);

#endif
