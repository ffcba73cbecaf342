/* The inside of a push, shared by its files only: push.c (files, part, manifest, pointer, life) and
 * push_look.c (what the store has, the claim, what earlier calls left). */
#ifndef MOBULA_AGENT_UPLOAD_PUSH_INTERNAL_H
#define MOBULA_AGENT_UPLOAD_PUSH_INTERNAL_H

#include "agent/upload/claim.h"
#include "agent/upload/manifest.h"
#include "agent/upload/push.h"
#include "agent/upload/push_hash.h"
#include "agent/upload/push_journal.h"
#include "agent/upload/push_source.h"
#include "base/s3/store.h"

enum { PUSH_SMALL_TIMEOUT_MS = 60000, PUSH_LATEST_MAX_BYTES = MB_LATEST_MAX_BYTES };

struct push_slot {
    struct mb_push *p;
    struct mb_push_file *file; /* NULL: free */
    char *key, *path;
    uint64_t done_bytes;
};

struct mb_push {
    uv_loop_t *loop;
    struct mb_store *store;
    struct mb_push_source source;
    struct mb_push_journal *journal;
    char *job_id;
    int force, abandon;
    mb_push_cb cb;
    void *arg;
    struct mb_push_status status;
    struct mb_manifest there; /* what stands at the manifest's key */
    int is_listed;            /* ... and the claim is ours */
    struct mb_push_hash *hash;
    struct mb_push_file **order; /* to be sent */
    size_t n_order, next;
    size_t next_abort; /* files, then orphans */
    unsigned busy;
    unsigned n_sending;
    unsigned pointer_tries, part_tries;
    struct mb_err no_looks;  /* why uploads without an id cannot be looked for; code 0: they can */
    char *part_etag;         /* of the part that stands there; NULL: none */
    char manifest_etag[200]; /* of the whole one */
    /* What the pointer is to become, and of what it was: "" for nothing. */
    char pointer[MB_LATEST_MAX_BYTES], pointer_etag[200];
    size_t pointer_len;
    int has_pointer;
    struct push_slot slots[MB_STORE_FILES_AT_ONCE];
    int finishing, store_closed, is_through;
    struct mb_err result;
};

void push_finish(struct mb_push *p, const struct mb_err *err);
void push_fail(struct mb_push *p, int code, const char *what, const char *text);
/* A request came back; 0: the push is over, nothing more may be begun. */
int push_came_back(struct mb_push *p);
/* 1: it runs. */
int push_started(struct mb_push *p, int rc, const struct mb_err *err);
char *push_key_of(const struct mb_push *p, const char *path);
/* Of the claim and the manifest. */
struct mb_claim_opts push_claim(const struct mb_push *p, const char *place);

void push_begin_sending(struct mb_push *p);
void push_get_pointer(struct mb_push *p);

/* ---- push_look.c ---- */
/* The answer to the first request, for the pointer. push_begin_sending(), push_get_pointer() or an
 * end follow. */
void push_on_first_look(void *arg, const struct mb_store_result *r);

#endif
