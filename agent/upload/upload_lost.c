/*
 * Nodes that are gone: what they have not sent by now never comes.
 *
 *  1. The driver names them when it ends the attempt. For every iteration on its way here the part
 * of each is looked for, one request at a time.
 *  2. It is there, and of this attempt: that node sent all it had to, the iteration can be whole.
 *  3. It is not there, or of another attempt: the iteration is dropped, whatever else is missing.
 *  4. The store does not answer: asked again after a pause, as long as the iteration is wanted.
 */
#include <stdio.h>
#include <string.h>
#include "agent/upload/upload_internal.h"
#include "base/alloc.h"
#include "base/log.h"

static int is_ours(const struct mb_upload *u, const struct mb_store_result *r)
{
    struct mb_manifest_writer writer = upload_writer(u);
    struct mb_manifest m = {0};
    struct mb_err err = {0};
    int ours = mb_manifest_decode(r->data, r->data_len, "part file", &m, &err) == MB_OK &&
               mb_manifest_is_of(&m, &writer);

    mb_manifest_close(&m);
    return ours;
}

static void on_part(void *arg, const struct mb_store_result *r)
{
    struct mb_upload *u = arg;
    struct mb_plan_iteration *it = u->lost_it;
    char what[80];

    u->lost_it = NULL;
    if (u->closing)
        return;
    if (r->error != MB_OK && r->error != MB_ENOENT) {
        mb_warn("upload", "looking for the part of a lost node: %s", r->text);
        upload_back_off(u, 1);
        return;
    }
    if (r->error == MB_OK && is_ours(u, r)) {
        it->n_lost_seen++;
    } else {
        snprintf(what, sizeof(what), "node %u was lost before it had sent its part",
                 u->lost[it->n_lost_seen]);
        upload_drop(u, it, what, "");
    }
    upload_kick(u);
}

void upload_look_for_lost(struct mb_upload *u)
{
    char key[MB_CHECKPOINT_KEY_MAX];
    struct mb_err err;

    for (size_t i = 0; u->lost_it == NULL && i < mb_plan_count(u->plan); i++) {
        struct mb_plan_iteration *it = mb_plan_at(u->plan, i);

        if ((it->state != MB_PLAN_UPLOADING && it->state != MB_PLAN_PART) ||
            it->n_lost_seen >= u->n_lost)
            continue;
        mb_part_key(it->iteration, u->lost[it->n_lost_seen], u->opts.num_nodes, key);
        u->lost_it = it;
        if (mb_store_get(u->store, key, MB_MANIFEST_MAX_BYTES, UPLOAD_SMALL_TIMEOUT_MS, on_part, u,
                         &err) != MB_OK) {
            u->lost_it = NULL;
            mb_warn("upload", "looking for the part of a lost node: %s", err.text);
            upload_back_off(u, 1);
            return;
        }
    }
}

static int knows(const struct mb_upload *u, uint32_t node)
{
    for (size_t i = 0; i < u->n_lost; i++)
        if (u->lost[i] == node)
            return 1;
    return 0;
}

int mb_upload_lost(struct mb_upload *u, const uint32_t *nodes, size_t n, struct mb_err *err)
{
    /* Told again they come in any order: the known ones stay in front. */
    uint32_t *all = mb_reallocarray(u->lost, u->n_lost + n + 1, sizeof(*all));

    if (all == NULL)
        return mb_err_set(err, MB_ENOMEM, "no memory to note which nodes were lost");
    u->lost = all;
    for (size_t i = 0; i < n; i++)
        if (nodes[i] < u->opts.num_nodes && nodes[i] != u->opts.node_rank && !knows(u, nodes[i]))
            u->lost[u->n_lost++] = nodes[i];
    upload_kick(u);
    return MB_OK;
}
