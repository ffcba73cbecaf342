/*
 * The inside of the store, shared by its core (store.c) and the places that keep it
 * (store_sqlite.c, store_redis.c, store_memory.c) only.
 *
 * The core owns the mirrors and every write; a backend takes writes in order and gives each back
 * exactly once: kept (tables_kept) or not (tables_undo). Loop thread only, but a backend may read
 * the records of the writes it holds on a thread of its own.
 */
#ifndef MOBULA_GCS_STORE_BACKEND_H
#define MOBULA_GCS_STORE_BACKEND_H

#include "gcs/mirror.h"
#include "gcs/store.h"

enum store_kind { STORE_PUT, STORE_DEL, STORE_BARRIER };

/* A write on its way. Its record stays readable for the backend: the mirror or a later write's
 * `old` owns it, and later writes are freed later. */
struct store_write {
    struct store_write *next;
    enum store_kind kind;
    enum mb_tables_table table;
    struct mb_record *record; /* PUT: the new one (borrowed); DEL: the deleted one (owned) */
    struct mb_record *old;    /* PUT: the replaced one or NULL (owned) */
    size_t size_bytes;
    mb_tables_cb cb;
    void *cb_arg;
};

struct store_queue {
    struct store_write *head, *tail;
    size_t n;
    size_t size_bytes;
};

struct store_backend {
    /* Takes w. It comes back by tables_kept() or tables_undo(), never from inside this call. */
    void (*submit)(void *self, struct store_write *w);
    /* Keeps or fails what it holds, frees itself, then calls tables_closed(). */
    void (*close)(void *self);
};

struct mb_tables {
    struct mb_mirror mirror[MB_TABLES_TABLES];
    const struct store_backend *backend;
    void *self;
    char *name;    /* "store /path/gcs.sqlite", the beginning of error texts */
    size_t n_held; /* writes at the backend */
    size_t held_bytes;
    void (*closed_cb)(void *arg);
    void *closed_arg;
};

extern const char *const store_table_names[MB_TABLES_TABLES];

void store_queue_push(struct store_queue *q, struct store_write *w);
void store_queue_append(struct store_queue *q, struct store_queue *from); /* from is empty then */

/* Empty tables; NULL when memory is out. */
struct mb_tables *tables_create(const char *name);
void tables_free(struct mb_tables *s);
/* One record that the backend has kept since before; MB_ENOMEM. */
int tables_load(struct mb_tables *s, enum mb_tables_table t, struct mb_blob ns, struct mb_blob key,
                struct mb_blob value);
/* Everything in q is safe: callbacks run, q is empty. */
void tables_kept(struct mb_tables *s, struct store_queue *q);
/* Nothing in q is: q must hold every write the backend was given and has not returned. */
void tables_undo(struct mb_tables *s, struct store_queue *q, const struct mb_err *err);
/* Frees s and tells whoever closed it. */
void tables_closed(struct mb_tables *s);

#endif
