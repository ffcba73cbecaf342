/*
 * A job that is forgotten, by DELETE or as the oldest of too many, leaves nothing behind.
 *
 *  1. A mark goes into the store, then the record is deleted (jobs.c). After that commit: the files
 *     on this node (runner.h), the gang's record in the KV, and the mark.
 *  2. At the next tick every other node that lives is told (Forget of proto/mobula/agent.proto):
 *     directories of its ranks, and a driver that an earlier head had there.
 * Failure paths:
 *  3. A node does not answer: told again after 1, 2, 4 ... 32 s, as long as it is ALIVE. If it is
 *     dead, or the head restarts meanwhile (what nodes are still to be told is in memory only), it
 *     keeps what it has; ranks' directories go there by a rule of the node's own.
 *  4. More than PENDING_MAX ids between two ticks: no job is forgotten as one of too many until the
 *     next one, and DELETE is refused.
 *  5. The id is submitted again before a node was told: that node is not told of it, and keeps what
 *     the former job left until the id is forgotten again.
 *  6. The head dies between 1's commit and the files: the next one finds the mark, and begins with
 *     the files. A mark whose job is there was never followed by a deletion: it goes.
 *  7. More than NODE_BATCHES_MAX requests wait for one node, or BATCHES_MAX for all: it keeps the
 *     files of further ones, which is said.
 */
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/services.h"
#include "proto/mobula/agent.pb-c.h"

enum {
    PENDING_MAX = 1024,
    BATCH_IDS = 256, /* of one request */
    NODE_BATCHES_MAX = 16,
    BATCHES_MAX = 4096,
    RETRY_MS = 1000,
    RETRY_DOUBLED_MAX = 5,
    TOLD_OF_AFTER = 5 /* tries without an answer */
};

#define MARK_PREFIX "job_forgotten:"

struct head_forget { /* what one node is still to be told, in one request */
    struct head_forget *next;
    struct mb_head *h; /* NULL: it is gone */
    uint8_t node_id[MB_NODE_ID_BYTES];
    uint64_t at_ms;
    unsigned tries;
    int in_flight;
    size_t n;
    char *ids[BATCH_IDS];
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
    } else {
        unsigned doubled = b->tries < RETRY_DOUBLED_MAX ? b->tries : RETRY_DOUBLED_MAX;
        b->at_ms = mb_mono_ms() + ((uint64_t)RETRY_MS << doubled);
        if (++b->tries == TOLD_OF_AFTER)
            mb_warn("jobs",
                    "a node still has the files of %zu forgotten jobs, it is asked again: "
                    "%s",
                    b->n, detail ? detail : "it does not answer");
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

/* One of this node's that is not under way and has room, also one that waits to be sent again: a
 * node that does not answer has few. NULL: none can be had. */
static struct head_forget *find_room(struct mb_head *h, const struct head_node *n)
{
    size_t n_of_node = 0;

    for (struct head_forget *b = h->forgets; b; b = b->next) {
        if (memcmp(b->node_id, n->id, sizeof b->node_id) != 0)
            continue;
        if (!b->in_flight && b->n < BATCH_IDS)
            return b;
        n_of_node++;
    }
    struct head_forget *b =
        n_of_node < NODE_BATCHES_MAX && h->n_forgets < BATCHES_MAX ? mb_calloc(1, sizeof *b) : NULL;
    if (b) {
        memcpy(b->node_id, n->id, sizeof b->node_id);
        b->h = h;
        if (n_of_node > 0) /* what comes while the node has not answered joins it */
            b->at_ms = mb_mono_ms() + RETRY_MS;
        b->next = h->forgets;
        h->forgets = b;
        h->n_forgets++;
    }
    return b;
}

/* All that is pending, for one node. */
static void add_batches(struct mb_head *h, const struct head_node *n)
{
    struct head_forget *b = NULL;

    for (size_t i = 0; i < h->n_forgotten; i++) {
        if (!b || b->n == BATCH_IDS)
            b = find_room(h, n);
        if (!b || !(b->ids[b->n] = mb_strdup(h->forgotten[i]))) {
            mb_warn("jobs", "a node keeps files of %zu forgotten jobs: %s", h->n_forgotten - i,
                    b ? "out of memory" : "too many requests wait for it, or for all nodes");
            return;
        }
        b->n++;
    }
}

void head_forget_tick(struct mb_head *h, uint64_t now_ms)
{
    const char *self = h->n_forgotten > 0 ? h->runner->node_id_hex(h->runner->self) : NULL;

    for (size_t i = 0; h->n_forgotten > 0 && i < h->n_nodes; i++) {
        char hex[2 * MB_NODE_ID_BYTES + 1];
        mb_hex(h->nodes[i]->id, MB_NODE_ID_BYTES, hex);
        if (head_node_alive(h->nodes[i]) && strcmp(hex, self) != 0)
            add_batches(h, h->nodes[i]);
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
    return h->n_forgotten + h->n_deleting >= PENDING_MAX;
}

int head_forget_mark(struct mb_head *h, const char *id, struct mb_err *err)
{
    char *key = mb_asprintf(MARK_PREFIX "%s", id);
    int rc = key ? mb_tables_put(h->store, MB_TABLES_KV, mb_blob_str("mobula"), mb_blob_str(key),
                                 mb_blob_str("1"), NULL, NULL, err)
                 : mb_err_set(err, MB_ENOMEM, "out of memory");

    mb_free(key);
    return rc;
}

void head_forget_unmark(struct mb_head *h, const char *id)
{
    struct mb_err err = {.text = "out of memory"};
    char *key = mb_asprintf(MARK_PREFIX "%s", id);

    if (!key || mb_tables_del(h->store, MB_TABLES_KV, mb_blob_str("mobula"), mb_blob_str(key), NULL,
                              NULL, &err) != 0)
        mb_warn("jobs", "job=%s is forgotten again by the next head: %s", id, err.text);
    mb_free(key);
}

struct marked {
    size_t n;
    char **ids;
};

/* What does not fit in memory stays for the head after this one. */
static int collect_mark(void *arg, struct mb_blob key, struct mb_blob value)
{
    struct marked *m = arg;
    char **grown = mb_reallocarray(m->ids, m->n + 1, sizeof *grown);
    size_t skip = strlen(MARK_PREFIX);

    (void)value;
    if (grown)
        m->ids = grown;
    if (!grown || !(grown[m->n] = mb_strndup((const char *)key.p + skip, key.n - skip)))
        return 1;
    m->n++;
    return m->n == PENDING_MAX;
}

void head_forget_resume(struct mb_head *h)
{
    struct marked m = {0};

    mb_tables_each(h->store, MB_TABLES_KV, mb_blob_str("mobula"), mb_blob_str(MARK_PREFIX),
                   collect_mark, &m);
    for (size_t i = 0; i < m.n; i++) {
        if (head_job_find(h, m.ids[i])) {
            head_forget_unmark(h, m.ids[i]);
        } else {
            mb_info("jobs", "job=%s deleted by a former head, its files go now", m.ids[i]);
            head_forget_files(h, m.ids[i]);
        }
        mb_free(m.ids[i]);
    }
    mb_free(m.ids);
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
    if (!grown || !(grown[h->n_forgotten] = mb_strdup(id))) {
        mb_warn("jobs", "job=%s other nodes are told by the next head: out of memory", id);
        return;
    }
    h->n_forgotten++;
    head_forget_unmark(h, id);
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
