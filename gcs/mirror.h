/*
 * The store's tables in memory: sorted arrays of immutable records. Pure; single-threaded, except
 * that a record may be read by another thread while nothing frees it.
 */
#ifndef MOBULA_GCS_MIRROR_H
#define MOBULA_GCS_MIRROR_H

#include <stddef.h>
#include "gcs/store.h"

/* One record; the bytes of namespace, key and value follow each other in data. */
struct mb_record {
    size_t ns_len;
    size_t key_len;
    size_t value_len;
    unsigned char data[];
};

struct mb_mirror {
    struct mb_record **items; /* sorted by namespace, then key */
    size_t n;
    size_t cap;
};

struct mb_record *mb_record_new(struct mb_blob ns, struct mb_blob key, struct mb_blob value);
struct mb_blob mb_record_ns(const struct mb_record *r);
struct mb_blob mb_record_key(const struct mb_record *r);
struct mb_blob mb_record_value(const struct mb_record *r);

void mb_mirror_close(struct mb_mirror *m);
int mb_mirror_reserve(struct mb_mirror *m, size_t extra);
/* Index of the record, or of where it would be (then *found is 0). */
size_t mb_mirror_find(const struct mb_mirror *m, struct mb_blob ns, struct mb_blob key, int *found);
/* Put r (taken) in; the record it replaces, or NULL, is returned and belongs to the caller. Needs
 * room for one more: mb_mirror_reserve() before. */
struct mb_record *mb_mirror_swap_in(struct mb_mirror *m, struct mb_record *r);
/* Take the record of this key out; NULL if there is none. */
struct mb_record *mb_mirror_take(struct mb_mirror *m, struct mb_blob ns, struct mb_blob key);

#endif
