/*
 * A job that is forgotten, by DELETE or as the oldest of too many, leaves nothing behind.
 *
 *  1. At once: the files on this node (runner.h), and the gang's record in the KV.
 *  2. At the next tick every other node that lives is told (Forget of proto/mobula/agent.proto):
 *     directories of its ranks, and a driver that an earlier head had there.
 * Failure paths:
 *  3. A node does not answer: told again after 1, 2, 4 ... s, TRIES_MAX times. Then, or if it is
 *     dead, it keeps what it has; ranks' directories go there by a rule of the node's own.
 *  4. More than PENDING_MAX ids between two ticks: no job is forgotten as one of too many until the
 *     next one.
 *  5. The id is submitted again before a node was told: that node is not told of it, and keeps what
 *     the former job left until the id is forgotten again.
 */
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/services.h"
#include "proto/mobula/agent.pb-c.h"

enum { PENDING_MAX = 1024, BATCHES_MAX = 4096, TRIES_MAX = 5, RETRY_MS = 1000 };

struct head_forget { /* what one node is still to be told */
    struct head_forget *next;
    struct mb_head *h; /* NULL: it is gone */
    uint8_t node_id[MB_NODE_ID_BYTES];
    uint64_t at_ms;
    unsigned tries;
    int in_flight;
    size_t n;
    char *ids[];
};

static void free_batch(struct head_forget *b)
{
    for (size_t i = 0; i < b->n; i++)
        mb_free(b->ids[i]);
    mb_free(b);
}

static void drop(struct head_forget *b)
{
    for (struct head_forget **at = &b->h->forgets; *at; at = &(*at)->next) {
        if (*at == b) {
            *at = b->next;
            b->h->n_forgets--;
            break;
        }
    }
    free_batch(b);
}

/* An id that was given to another job since then is that job's: what it has on that node, also
 * after its end, is not to be taken for what the former left. */
static void leave_out_new_ones(struct head_forget *b)
{
    size_t n = 0;

    for (size_t i = 0; i < b->n; i++) {
        if (head_job_find(b->h, b->ids[i]))
            mb_free(b->ids[i]);
        else
            b->ids[n++] = b->ids[i];
    }
    b->n = n;
}

static void on_told(void *arg, int status, const char *detail, const ProtobufCMessage *reply)
{
    struct head_forget *b = arg;

    (void)reply;
    b->in_flight = 0;
    if (!b->h) {
        free_batch(b);
    } else if (status == MB_GRPC_OK) {
        drop(b);
    } else if (++b->tries >= TRIES_MAX) {
        mb_warn("jobs", "a node keeps the files of %zu forgotten jobs: %s", b->n,
                detail ? detail : "it does not answer");
        drop(b);
    } else {
        b->at_ms = mb_mono_ms() + ((uint64_t)RETRY_MS << (b->tries - 1));
    }
}

static void tell(struct head_forget *b, struct head_node *n)
{
    Mobula__V1__ForgetRequest q = MOBULA__V1__FORGET_REQUEST__INIT;
    struct mb_err err = {0};
    struct mb_grpc_channel *channel = head_node_channel(b->h, n, &err);

    q.submission_ids = b->ids;
    q.n_submission_ids = b->n;
    b->in_flight = 1;
    if (!channel || mb_grpc_unary(channel, "/mobula.v1.NodeAgent/Forget", &q.base,
                                  &mobula__v1__forget_reply__descriptor, HEAD_NODE_RPC_MS, on_told,
                                  b, NULL, &err) != 0)
        on_told(b, MB_GRPC_UNAVAILABLE, err.text, NULL);
}

/* Of all that is pending, for one node. */
static void add_batch(struct mb_head *h, const struct head_node *n)
{
    struct head_forget *b = h->n_forgets < BATCHES_MAX
                                ? mb_calloc(1, sizeof *b + h->n_forgotten * sizeof b->ids[0])
                                : NULL;

    for (size_t i = 0; b && i < h->n_forgotten; i++) {
        b->ids[i] = mb_strdup(h->forgotten[i]);
        b->n += b->ids[i] != NULL;
        if (!b->ids[i])
            break;
    }
    if (!b || b->n < h->n_forgotten)
        mb_warn("jobs", "a node keeps files of forgotten jobs: out of memory, or too many nodes do "
                        "not answer");
    if (!b)
        return;
    memcpy(b->node_id, n->id, sizeof b->node_id);
    b->h = h;
    b->next = h->forgets;
    h->forgets = b;
    h->n_forgets++;
}

void head_forget_tick(struct mb_head *h, uint64_t now_ms)
{
    const char *self = h->n_forgotten > 0 ? h->runner->node_id_hex(h->runner->self) : NULL;

    for (size_t i = 0; h->n_forgotten > 0 && i < h->n_nodes; i++) {
        char hex[2 * MB_NODE_ID_BYTES + 1];
        mb_hex(h->nodes[i]->id, MB_NODE_ID_BYTES, hex);
        if (head_node_alive(h->nodes[i]) && strcmp(hex, self) != 0)
            add_batch(h, h->nodes[i]);
    }
    for (size_t i = 0; i < h->n_forgotten; i++)
        mb_free(h->forgotten[i]);
    h->n_forgotten = 0;
    for (struct head_forget *b = h->forgets, *next; b; b = next) {
        struct head_node *n = head_node_find_id(h, b->node_id);
        next = b->next;
        if (b->in_flight || now_ms < b->at_ms)
            continue;
        leave_out_new_ones(b);
        if (b->n > 0 && n && head_node_alive(n))
            tell(b, n);
        else
            drop(b);
    }
}

int head_forget_is_full(const struct mb_head *h)
{
    return h->n_forgotten >= PENDING_MAX;
}

static void forget_gang(struct mb_head *h, const char *id)
{
    struct mb_err err = {0};
    char *key = mb_asprintf("gang:%s", id);

    if (!key ||
        (mb_tables_get(h->store, MB_TABLES_KV, mb_blob_str("mobula"), mb_blob_str(key), NULL) &&
         mb_tables_del(h->store, MB_TABLES_KV, mb_blob_str("mobula"), mb_blob_str(key), NULL, NULL,
                       &err) != 0))
        mb_warn("jobs", "job=%s the record of its gang stays: %s", id, err.text);
    mb_free(key);
}

void head_forget_files(struct mb_head *h, const char *id)
{
    char **grown = mb_reallocarray(h->forgotten, h->n_forgotten + 1, sizeof *grown);

    h->runner->forget(h->runner->self, id);
    forget_gang(h, id);
    if (grown)
        h->forgotten = grown;
    if (!grown || !(grown[h->n_forgotten] = mb_strdup(id)))
        mb_warn("jobs", "job=%s files of it stay on other nodes: out of memory", id);
    else
        h->n_forgotten++;
}

void head_forget_close(struct mb_head *h)
{
    while (h->forgets) {
        struct head_forget *b = h->forgets;

        h->forgets = b->next;
        b->h = NULL;
        if (!b->in_flight)
            free_batch(b); /* else when its call ends */
    }
    for (size_t i = 0; i < h->n_forgotten; i++)
        mb_free(h->forgotten[i]);
    mb_free(h->forgotten);
    h->forgotten = NULL;
    h->n_forgotten = h->n_forgets = 0;
}
