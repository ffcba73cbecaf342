/* What the sources of the object store share. Not for users: see store.h. */
#ifndef MOBULA_BASE_S3_INTERNAL_H
#define MOBULA_BASE_S3_INTERNAL_H

#include <stddef.h>
#include <stdint.h>
#include "base/buf.h"
#include "base/s3/store.h"

enum { MB_STORE_MAX_KEYS = 1000000 }; /* of one listing; more is MB_EFULL */

enum mb_store_kind {
    MB_STORE_PUT,
    MB_STORE_PUT_FILE,
    MB_STORE_GET,
    MB_STORE_GET_FILE,
    MB_STORE_HEAD,
    MB_STORE_LIST,
    MB_STORE_DELETE,
    MB_STORE_ABORT_UPLOADS,
    MB_STORE_LIST_UPLOADS
};

/* One operation. The backend fills the result and calls mb_store_op_finish() exactly once, from the
 * loop, after a start that returned 0. */
struct mb_store_op {
    struct mb_store *store;
    struct mb_store_op *prev;
    struct mb_store_op *next;
    enum mb_store_kind kind;
    char *key;  /* relative; of LIST: the prefix */
    char *path; /* PUT_FILE, GET_FILE (NULL: bytes are looked at only) */
    void *data; /* PUT */
    size_t data_len;
    enum mb_store_if cond;
    char *etag;     /* of the condition; of GET with is_range: of the object wanted */
    int n_repeats;  /* PUT: of a write whose condition should have failed */
    int look_first; /* PUT_FILE, this and the next */
    int leaves_strays, has_strays;
    const int *gives_up;
    size_t max_bytes; /* GET */
    int is_range;     /* GET: max_bytes from offset on */
    int has_size;     /* GET_FILE: want_bytes is known */
    int is_lazy;      /* GET_FILE: nothing is synced */
    int is_direct;    /* GET_FILE: past the page cache, if that can be */
    uint64_t want_bytes;
    uint64_t offset;
    uint64_t deadline_ms;   /* monotonic */
    uint64_t outage_ms;     /* 0: none */
    int is_outage_of_all;   /* ... it is that of mb_store_set_outage() */
    int32_t priority;       /* of files: lower goes first */
    char *resume_upload_id; /* ABORT_UPLOADS: the one, NULL: all */
    void (*on_upload_id)(void *arg, const char *upload_id);
    void (*on_sent)(void *arg, struct mb_store_op *op);
    mb_store_progress_cb progress;
    mb_store_cb cb;
    void *arg;
    int canceled;         /* the store closes: end with MB_ECANCELED soon */
    int is_told;          /* ... and the backend was told */
    uint64_t patience_ms; /* ... for so long answers to what was sent as a whole are waited for */

    struct mb_err err; /* result: code 0 is success */
    struct mb_buf body;
    uint64_t size_bytes;
    uint64_t crc64nvme;
    char out_etag[192];
    struct mb_store_entry *entries; /* owned, with owned strings */
    size_t n_entries;
    size_t cap_entries;
    void *impl; /* the backend's own state */
};

struct mb_store_backend {
    int (*start)(struct mb_store_op *op, struct mb_err *err);
    void (*cancel)(struct mb_store_op *op); /* hurry op along; it still finishes through the loop */
    /* A PUT_FILE that waits behind on_sent goes on, or gives up. NULL: there is no waiting. */
    void (*go)(struct mb_store_op *op, int gives_up);
    /* op->priority of a PUT_FILE has changed. NULL: there are no priorities. */
    void (*set_priority)(struct mb_store_op *op);
    /* No operation is left: release everything, then done(arg) from the loop. */
    void (*close)(struct mb_store *s, void (*done)(void *arg), void *arg);
    int (*has_conditions)(const struct mb_store *s);  /* NULL: it has them */
    uint64_t (*part_bytes)(const struct mb_store *s); /* NULL: 16 MiB */
    uint64_t (*retries)(const struct mb_store *s);    /* NULL: never any */
};

struct mb_store {
    uv_loop_t *loop;
    const struct mb_store_backend *backend;
    void *impl;
    char *url;
    uint64_t outage_ms; /* of every operation that has none of its own; 0: none */
    struct mb_store_op *ops;
    int closing;
    int backend_closing;
    uv_timer_t close_timer;
    void (*close_cb)(void *arg);
    void *close_arg;
};

void mb_store_op_finish(struct mb_store_op *op);
/* Adds a key to op's listing. 0, MB_ENOMEM, or MB_EFULL above MB_STORE_MAX_KEYS. */
int mb_store_op_add_entry(struct mb_store_op *op, const char *key, uint64_t size_bytes,
                          const char *etag);

/* Backends; rest is the url behind "file://" or "s3://". */
int mb_store_file_open(struct mb_store *s, const char *rest, struct mb_err *err);
int mb_store_s3_open(struct mb_store *s, const char *rest, struct mb_err *err);

#endif
