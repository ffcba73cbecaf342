/*
 * Asks for the table of nodes, once, and says what follows of it.
 *
 *  1. A head of 2.60 or newer: its programs look for a raylet of their machine; nothing is asked.
 *  2. No answer: it is said, and nothing else follows.
 */
#include "agent/neighbour.h"

#include <string.h>
#include "base/alloc.h"
#include "base/log.h"
#include "gcs/client.h"

enum { CALL_MS = 10000 };

struct look {
    const struct mb_gcs *gcs;
    const char *ip;
};

static int is_rays_own(const struct mb_gcs_node *node)
{
    for (size_t i = 0; i < node->n_labels; i++)
        if (strcmp(node->labels[i].key, MB_NODE_LABEL_VERSION) == 0)
            return 0;
    return 1;
}

static void on_nodes(void *arg, const struct mb_err *err, const struct mb_gcs_node *nodes, size_t n)
{
    struct look *look = arg;
    int found = 0;

    for (size_t i = 0; err->code == MB_OK && i < n; i++)
        found |= !nodes[i].is_dead && strcmp(nodes[i].ip, look->ip) == 0 && is_rays_own(&nodes[i]);
    if (found)
        mb_warn("node",
                "a node of Ray %s has the address %s too: programs here that call ray.init may "
                "take this node for it and abort; another --node-ip-address avoids that",
                mb_gcs_ray_version(look->gcs), look->ip);
    else if (err->code != MB_OK && err->code != MB_ECANCELED)
        mb_info("node", "what else is at this address is not known: %s", err->text);
    mb_free(look);
}

void mb_neighbour_look(struct mb_gcs *gcs, const char *ip)
{
    struct look *look;
    struct mb_err err;

    if (mb_gcs_is_modern(gcs))
        return;
    look = mb_calloc(1, sizeof(*look));
    if (look == NULL)
        return;
    look->gcs = gcs;
    look->ip = ip;
    if (mb_gcs_nodes(gcs, CALL_MS, on_nodes, look, NULL, &err) != MB_OK) {
        mb_info("node", "what else is at this address is not known: %s", err.text);
        mb_free(look);
    }
}
