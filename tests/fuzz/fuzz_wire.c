/*
 * Any bytes as Ray's messages of nodes, placement groups and jobs: refused, or read into structs
 * whose every id, name and list may be used. The first byte chooses the message.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "gcs/wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static volatile size_t seen; /* what was read is used, so that it is really read */

static void use_text(const char *s)
{
    seen += s ? strlen(s) : 0;
}

static void read_node(const uint8_t *p, size_t n)
{
    Ray__Rpc__GcsNodeInfo *m = ray__rpc__gcs_node_info__unpack(NULL, n, p);
    struct mb_arena a = {0};
    struct mb_gcs_node node;

    if (m != NULL && mb_wire_get_node(&a, m, &node) == 0) {
        use_text(node.ip);
        for (size_t i = 0; i < node.n_labels; i++) {
            use_text(node.labels[i].key);
            use_text(node.labels[i].value);
        }
        for (size_t i = 0; i < node.n_resources; i++)
            use_text(node.resources[i].name);
        if (mb_wire_node(&a, &node) == NULL)
            abort(); /* what was read can be sent again */
    }
    mb_arena_close(&a);
    if (m != NULL)
        ray__rpc__gcs_node_info__free_unpacked(m, NULL);
}

static void read_group(const uint8_t *p, size_t n)
{
    Ray__Rpc__PlacementGroupTableData *m = ray__rpc__placement_group_table_data__unpack(NULL, n, p);
    struct mb_arena a = {0};
    struct mb_gcs_pg group;

    if (m != NULL && mb_wire_get_pg(&a, m, &group) == 0) {
        for (size_t i = 0; i < group.n_bundles; i++)
            for (size_t k = 0; k < group.bundles[i].n_resources; k++)
                use_text(group.bundles[i].resources[k].name);
        if (mb_wire_pg_spec(&a, &group) == NULL)
            abort();
    }
    mb_arena_close(&a);
    if (m != NULL)
        ray__rpc__placement_group_table_data__free_unpacked(m, NULL);
}

static void read_job(const uint8_t *p, size_t n)
{
    Ray__Rpc__JobTableData *m = ray__rpc__job_table_data__unpack(NULL, n, p);
    struct mb_gcs_job job;

    if (m != NULL && mb_wire_get_job(m, &job) == 0)
        use_text(job.entrypoint);
    if (m != NULL)
        ray__rpc__job_table_data__free_unpacked(m, NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0)
        return 0;
    switch (data[0] % 3) {
    case 0:
        read_node(data + 1, size - 1);
        break;
    case 1:
        read_group(data + 1, size - 1);
        break;
    default:
        read_job(data + 1, size - 1);
    }
    return 0;
}
