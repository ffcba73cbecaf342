/*
 * Small uploaded packages in a store that heads share, so that a head that takes over has them.
 *
 *  1. keep: after an upload its bytes, which a pool thread has read, go into the KV, a part for
 *     each MiB, then a record that says how many there are; the upload is answered when that is
 *     committed.
 *  2. A head that takes over writes those that it lacks to its disk (package_restore.c).
 *  3. drop: with the file, when no job needs it (package_sweep.c).
 * Failure paths:
 *  4. Too large, or no room beside the others: it is on this head's node only, and the answer to
 *     the upload says so. A job that waits for it when another head takes over FAILS, and names it.
 *  5. Parts whose record is not committed: dropped, of a head that died at the next takeover.
 */
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/services.h"

enum { PART_BYTES = HEAD_PACKAGE_PART_BYTES, ORPHANS_MAX = 256 /* the rest next time */ };

/* Ray's heads have no such keys: namespace "mobula". A package's name has no '/'. */
static const char *const our_ns = "mobula";
#define RECORD_PREFIX HEAD_PACKAGE_RECORD
#define PART_PREFIX   "package_part:"

static char *record_key(const char *name)
{
    return mb_asprintf(RECORD_PREFIX "%s", name);
}

static char *part_key(const char *name, size_t i)
{
    return mb_asprintf(PART_PREFIX "%s/%zu", name, i);
}

static int get(struct mb_head *h, const char *key, struct mb_blob *out)
{
    return key && mb_tables_get(h->store, MB_TABLES_KV, mb_blob_str(our_ns), mb_blob_str(key), out);
}

static uint64_t size_in(struct mb_blob record)
{
    char text[24];

    snprintf(text, sizeof text, "%.*s", (int)(record.n < 23 ? record.n : 23),
             (const char *)record.p);
    return strtoull(text, NULL, 10);
}

size_t head_package_count_parts(uint64_t size_bytes)
{
    return (size_t)((size_bytes + PART_BYTES - 1) / PART_BYTES);
}

static int add_size(void *arg, struct mb_blob key, struct mb_blob value)
{
    (void)key;
    *(uint64_t *)arg += size_in(value);
    return 0;
}

int head_package_can_keep(struct mb_head *h, uint64_t size_bytes)
{
    uint64_t kept = 0;

    head_packages_each(h, add_size, &kept);
    return h->redis && size_bytes <= HEAD_KEPT_PACKAGE_BYTES &&
           kept + size_bytes <= HEAD_KEPT_PACKAGES_BYTES;
}

static int put(struct mb_head *h, char *key, struct mb_blob value, mb_tables_cb cb, void *arg,
               struct mb_err *err)
{
    int rc = key ? mb_tables_put(h->store, MB_TABLES_KV, mb_blob_str(our_ns), mb_blob_str(key),
                                 value, cb, arg, err)
                 : mb_err_set(err, MB_ENOMEM, "out of memory");

    mb_free(key);
    return rc;
}

static void del(struct mb_head *h, char *key)
{
    struct mb_err err = {0};

    if (!key || mb_tables_del(h->store, MB_TABLES_KV, mb_blob_str(our_ns), mb_blob_str(key), NULL,
                              NULL, &err) != 0)
        mb_warn("jobs", "a package stays in the store: %s", key ? err.text : "out of memory");
    mb_free(key);
}

/* An upload that is being kept: its parts go again if its record is not committed. */
struct keeping {
    struct mb_head *h;
    size_t n_parts;
    mb_tables_cb cb;
    void *arg;
    char name[];
};

static void drop_parts(struct mb_head *h, const char *name, size_t n)
{
    for (size_t i = 0; i < n; i++)
        del(h, part_key(name, i));
}

/* MB_ENOMEM: what is there is not known. */
static int drop(struct mb_head *h, const char *name)
{
    char *key = record_key(name);
    struct mb_blob record;
    size_t n = get(h, key, &record) ? head_package_count_parts(size_in(record)) : 0;

    if (n > 0)
        del(h, record_key(name));
    drop_parts(h, name, n);
    mb_free(key);
    return key ? 0 : MB_ENOMEM;
}

void head_package_drop(struct mb_head *h, const char *name)
{
    if (drop(h, name) != 0)
        mb_warn("jobs", "the package %s stays in the store: out of memory", name);
}

static void on_recorded(void *arg, const struct mb_err *err)
{
    struct keeping *k = arg;
    /* A head that ends leaves them to the next one. */
    char *key = err->code != 0 && !k->h->stopping ? record_key(k->name) : NULL;

    if (key && !get(k->h, key, NULL)) /* else another upload of this name has parts there */
        drop_parts(k->h, k->name, k->n_parts);
    mb_free(key);
    k->cb(k->arg, err);
    mb_free(k);
}

static struct keeping *new_keeping(struct mb_head *h, const char *name, mb_tables_cb cb, void *arg)
{
    struct keeping *k = mb_alloc(sizeof *k + strlen(name) + 1);

    if (k) {
        *k = (struct keeping){.h = h, .cb = cb, .arg = arg};
        memcpy(k->name, name, strlen(name) + 1);
    }
    return k;
}

int head_package_keep(struct mb_head *h, const char *name, struct mb_blob bytes, mb_tables_cb cb,
                      void *arg, struct mb_err *err)
{
    struct keeping *k = new_keeping(h, name, cb, arg);
    char size[24];
    int rc = k ? 0 : mb_err_set(err, MB_ENOMEM, "out of memory");

    if (rc == 0 && drop(h, name) != 0) /* another one of this name may have had more parts */
        rc = mb_err_set(err, MB_ENOMEM, "out of memory");
    for (size_t i = 0; rc == 0 && i < head_package_count_parts(bytes.n); i++) {
        size_t at = i * PART_BYTES, left = bytes.n - at;
        rc = put(h, part_key(name, i),
                 head_blob((const char *)bytes.p + at, left < PART_BYTES ? left : PART_BYTES), NULL,
                 NULL, err);
        k->n_parts += rc == 0;
    }
    snprintf(size, sizeof size, "%zu", bytes.n);
    if (rc == 0)
        rc = put(h, record_key(name), mb_blob_str(size), on_recorded, k, err);
    if (rc != 0 && k)
        drop_parts(h, name, k->n_parts);
    if (rc != 0)
        mb_free(k);
    return rc;
}

/* ---- for a head that takes over ---- */

int head_package_kept(struct mb_head *h, const char *name, uint64_t *size_bytes)
{
    char *key = record_key(name);
    struct mb_blob record;
    int found = get(h, key, &record);

    if (found)
        *size_bytes = size_in(record);
    mb_free(key);
    return found;
}

int head_package_part(struct mb_head *h, const char *name, size_t i, struct mb_blob *out)
{
    char *key = part_key(name, i);
    int found = get(h, key, out);

    mb_free(key);
    return found;
}

int head_packages_each(struct mb_head *h, mb_tables_visit visit, void *arg)
{
    return mb_tables_each(h->store, MB_TABLES_KV, mb_blob_str(our_ns), mb_blob_str(RECORD_PREFIX),
                          visit, arg);
}

struct orphans {
    struct mb_head *h;
    size_t n;
    char *keys[ORPHANS_MAX];
};

/* "package_part:NAME/I" without the record of NAME. */
static int collect_orphan(void *arg, struct mb_blob key, struct mb_blob value)
{
    struct orphans *o = arg;
    size_t skip = strlen(PART_PREFIX);
    const char *slash = memrchr(key.p, '/', key.n);
    char *name =
        slash ? mb_strndup((const char *)key.p + skip, (size_t)(slash - (const char *)key.p) - skip)
              : NULL;
    char *record = name ? record_key(name) : NULL;

    (void)value;
    if (record && !get(o->h, record, NULL) &&
        (o->keys[o->n] = mb_strndup((const char *)key.p, key.n)))
        o->n++;
    mb_free(record);
    mb_free(name);
    return o->n == ORPHANS_MAX;
}

void head_packages_drop_orphans(struct mb_head *h)
{
    struct orphans o = {.h = h};

    mb_tables_each(h->store, MB_TABLES_KV, mb_blob_str(our_ns), mb_blob_str(PART_PREFIX),
                   collect_orphan, &o);
    if (o.n > 0)
        mb_info("jobs", "%zu parts of packages that were never whole are dropped", o.n);
    for (size_t i = 0; i < o.n; i++)
        del(h, o.keys[i]);
}
