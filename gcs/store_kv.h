/*
 * Tables of a job agent below a head that is Ray's. They are kept in a SQLite file here, as those
 * of a head are; what Ray reads of jobs (namespace "job", a prefix of the key) is in the internal
 * KV of that head too before a write counts as kept. Each such record has a mark in the KV
 * (namespace "mobula"), put before it and deleted after it, since the record itself must not have a
 * field that Ray does not know: whoever finds a record without a mark knows that another agent
 * wrote it. The mark's text is a random id of the store, by which a second store below the same
 * head leaves alone what is not its own.
 *
 * While the head cannot be reached writes wait, and are safe here. Loop-thread only.
 */
#ifndef MOBULA_GCS_STORE_KV_H
#define MOBULA_GCS_STORE_KV_H

#include "gcs/client.h"
#include "gcs/store.h"

#define MB_KV_STORE_MARK "job-agent:" /* and the rest of the record's key behind the prefix */

struct mb_kv_store;

enum mb_kv_store_verdict { MB_KV_STORE_LEAVE, MB_KV_STORE_ADOPT, MB_KV_STORE_REFUSE };

/* Called from the loop, never from inside a call. */
struct mb_kv_store_ops {
    /* The KV has everything that is here. */
    void (*on_synced)(void *arg);
    /* The head could not be asked, or refused; nothing is published until the next sync. */
    void (*on_failed)(void *arg, const struct mb_err *err);
    /* 1: the record of this id changes no more, here or by the hand of another agent. */
    int (*is_settled)(void *arg, const char *id);
    /* A record in the KV without a mark of ours. id: the key behind the prefix. Not 0: the sync
     * fails with that code, nothing is published. */
    int (*on_foreign)(void *arg, const char *id);
    /* Every node of the cluster, as asked after records of another store were listed and before
     * they are judged; borrowed for the call. Not 0: the sync fails with that code. */
    int (*on_nodes)(void *arg, const struct mb_gcs_node *nodes, size_t n);
    /* A record with the mark of another store. REFUSE: the sync fails, nothing is published and
     * nothing adopted. ADOPT: that store is gone, on_found follows when all are judged. */
    enum mb_kv_store_verdict (*judge)(void *arg, const char *id, struct mb_blob value);
    /* A record to adopt. The tables do not have it; put there it is marked as ours. */
    void (*on_found)(void *arg, struct mb_blob key, struct mb_blob value);
};

/* path: of the file (store.h). The tables are the caller's and own the store: it is freed when they
 * are closed. prefix: of the records that are published; borrowed. */
int mb_kv_store_open(uv_loop_t *loop, const char *path, const char *prefix,
                     const struct mb_kv_store_ops *ops, void *arg, struct mb_kv_store **out,
                     struct mb_tables **tables, struct mb_err *err);
/* Compares with the KV of gcs (connected, borrowed until mb_kv_store_hold() or the close of the
 * tables) and publishes what is not settled or not there; everything if all is not 0, at the first
 * time, after mb_kv_store_hold() and until that succeeded. Writes follow when it is done. on_synced
 * or on_failed follows. Again while one is under way: another follows. */
void mb_kv_store_sync(struct mb_kv_store *s, struct mb_gcs *gcs, int all);
/* Nothing is published until the next sync; requests in flight still end. */
void mb_kv_store_hold(struct mb_kv_store *s);
/* 1: the tables have been published to this cluster before. */
int mb_kv_store_has_served(const struct mb_kv_store *s, const char *cluster_hex);

#endif
