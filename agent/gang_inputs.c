/*
 * What the ranks of a gang read from object stores.
 *
 *  1. Launch.inputs are fetched (inputs.h); the driver hears how it goes.
 *  2. Their URLs in argv become paths.
 *  3. The ranks are spawned.
 * Failures: LAUNCH_FAILED with the text; a stop meanwhile cancels, nothing was spawned.
 */
#include "agent/gang_run.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/log.h"

static int take_paths(Mobula__V1__Launch *l, const char *const *paths)
{
    for (size_t i = 0; i < l->n_inputs; i++)
        for (size_t k = 0; k < l->n_argv; k++) {
            int rc;
            char *word = mb_input_replace(l->argv[k], l->inputs[i]->url, paths[i], &rc);

            if (rc != MB_OK)
                return rc;
            if (word != NULL) {
                mb_free(l->argv[k]); /* protobuf-c's, from malloc as well */
                l->argv[k] = word;
            }
        }
    return MB_OK;
}

static void on_input_text(void *arg, const char *text)
{
    struct mb_gang_run *r = arg;

    mb_info("inputs", "job=%s attempt=%u: %s", r->job_id, r->attempt, text);
    mb_control_note(r, text);
}

static void on_inputs(void *arg, const struct mb_err *err, const char *const *paths)
{
    struct mb_gang_run *r = arg;

    r->inputs = NULL;
    if (!mb_gang_run_fetched(r, "fetching inputs", err))
        return;
    if (take_paths(r->launch, paths) != MB_OK)
        mb_gang_run_launch_failed(r, MB_ENOMEM, "no memory for the paths of inputs");
    else
        mb_gang_run_spawn(r);
}

static const struct mb_inputs_ops inputs_ops = {on_input_text, on_inputs};

/* Where they are kept: MOBULA_INPUT_DIR of the agent, else beside the directories of all nodes that
 * share a temp dir. Absolute: ranks have working directories of their own. */
static char *inputs_dir(const struct mb_gang_run *r)
{
    const char *given = getenv("MOBULA_INPUT_DIR");
    char *node = given == NULL ? realpath(r->owner->opts.node_dir, NULL) : NULL;
    char *slash = node != NULL ? strrchr(node, '/') : NULL;
    char *out = NULL;

    if (given != NULL)
        out = mb_strdup(given);
    else if (slash != NULL)
        out = mb_asprintf("%.*s/inputs", (int)(slash - node), node);
    mb_free(node);
    return out;
}

void mb_gang_inputs_begin(struct mb_gang_run *r)
{
    const Mobula__V1__Launch *l = r->launch;
    struct mb_input *list = mb_calloc(l->n_inputs + 1, sizeof(*list));
    char *dir = inputs_dir(r);
    struct mb_err err;
    int rc =
        list != NULL && dir != NULL ? MB_OK : mb_err_set(&err, MB_ENOMEM, "no memory for inputs");

    for (size_t i = 0; i < l->n_inputs && rc == MB_OK; i++)
        list[i] = (struct mb_input){l->inputs[i]->url, (enum mb_input_kind)l->inputs[i]->kind};
    if (rc == MB_OK && l->n_inputs > 0)
        rc = mb_inputs_start(r->owner->loop, dir, list, l->n_inputs, &inputs_ops, r, &r->inputs,
                             &err);
    mb_free(list);
    mb_free(dir);
    if (rc != MB_OK)
        mb_gang_run_launch_failed(r, rc, err.text);
    else if (r->inputs == NULL)
        mb_gang_run_spawn(r);
}

/* A worker's ranks read their own shards only; what a foreign trainer reads is its matter. */
int mb_gang_wants_shard(void *arg, const char *path)
{
    const struct mb_gang_run *r = arg;
    uint32_t ranks[MB_GANG_RANKS_MAX];

    for (size_t i = 0; i < r->n_ranks; i++)
        ranks[i] = r->ranks[i].rank;
    return !r->is_worker || mb_input_wants(path, r->world_size, ranks, r->n_ranks);
}
