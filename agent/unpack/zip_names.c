/*
 * 1. The record at the end says how long the directory before it is; of a zip with 64-bit numbers
 *    another record in front says it. 2. Each record of the directory has a name, who made it and
 *    where its entry is; entries come in that order. 3. A name is given back only where libarchive
 *    has changed exactly it: where the two disagree for another reason libarchive's counts.
 * Failure paths: whatever does not fit into the file ends the search; then no name is known.
 */
#include "agent/unpack/zip_names.h"

#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"

enum {
    END_BYTES = 22,
    END64_BYTES = 56,
    LOCATOR_BYTES = 20,
    RECORD_BYTES = 46,
    COMMENT_MAX_BYTES = 65535,
};
enum { MADE_BY_FAT = 0, MADE_BY_HPFS = 6, MADE_BY_NTFS = 10, MADE_BY_VFAT = 14 };

static uint64_t number(const uint8_t *p, int n)
{
    uint64_t v = 0;

    while (n-- > 0)
        v = v << 8 | p[n];
    return v;
}

static int is_record(const uint8_t *p, char kind, char more)
{
    return p[0] == 'P' && p[1] == 'K' && p[2] == (uint8_t)kind && p[3] == (uint8_t)more;
}

/* ---- where the directory is ---- */

/* The last record that can be the end; size if there is none. */
static size_t find_end(const uint8_t *data, size_t size)
{
    for (size_t back = END_BYTES; back <= size && back <= END_BYTES + COMMENT_MAX_BYTES; back++)
        if (is_record(data + size - back, 5, 6))
            return size - back;
    return size;
}

/* *end: where it ends; its first byte is returned, *end if there is none. */
static size_t find_directory(const uint8_t *data, size_t size, size_t *end)
{
    size_t at = find_end(data, size);
    uint64_t len;

    *end = at;
    if (at == size)
        return at;
    len = number(data + at + 12, 4);
    if (len == UINT32_MAX) {
        if (at < LOCATOR_BYTES + END64_BYTES || !is_record(data + at - LOCATOR_BYTES, 6, 7))
            return at;
        at -= LOCATOR_BYTES + END64_BYTES;
        if (!is_record(data + at, 6, 6))
            return *end;
        *end = at;
        len = number(data + at + 40, 8);
    }
    return len <= *end ? *end - (size_t)len : *end;
}

/* ---- names ---- */

static int is_changed(const struct mb_zip_name *z)
{
    return memchr(z->name, '\\', z->len) != NULL && memchr(z->name, '/', z->len) == NULL &&
           memchr(z->name, '\0', z->len) == NULL;
}

static int has_backslashes(const struct mb_zip_name *z)
{
    return z->system == MADE_BY_FAT || z->system == MADE_BY_HPFS || z->system == MADE_BY_NTFS ||
           z->system == MADE_BY_VFAT;
}

/* The record at *at, which moves behind it. 0: there is none. */
static int next(const uint8_t *data, size_t *at, size_t end, struct mb_zip_name *out)
{
    const uint8_t *p;
    size_t len;

    if (end - *at < RECORD_BYTES)
        return 0;
    p = data + *at;
    if (!is_record(p, 1, 2))
        return 0;
    *out = (struct mb_zip_name){.offset = number(p + 42, 4),
                                .name = p + RECORD_BYTES,
                                .len = (uint16_t)number(p + 28, 2),
                                .system = p[5]};
    len = RECORD_BYTES + out->len + (size_t)number(p + 30, 2) + (size_t)number(p + 32, 2);
    if (len > end - *at)
        return 0;
    *at += len;
    return 1;
}

/* Entries beyond 4 GiB have one offset here: those are in order as they are. */
static int by_offset(const void *a, const void *b)
{
    const struct mb_zip_name *x = a, *y = b;

    if (x->offset != y->offset)
        return x->offset < y->offset ? -1 : 1;
    return x->name < y->name ? -1 : x->name > y->name;
}

int mb_zip_names_init(struct mb_zip_names *out, const uint8_t *data, size_t size, size_t max)
{
    struct mb_zip_name z;
    size_t end, begin = find_directory(data, size, &end), n = 0;
    int any = 0;

    *out = (struct mb_zip_names){NULL, 0};
    for (size_t at = begin; next(data, &at, end, &z); n++)
        any |= is_changed(&z);
    if (!any || n > max)
        return 0;
    out->list = mb_reallocarray(NULL, n, sizeof(*out->list));
    if (out->list == NULL)
        return MB_ENOMEM;
    for (size_t at = begin; out->n < n && next(data, &at, end, &out->list[out->n]);)
        out->n++;
    qsort(out->list, out->n, sizeof(*out->list), by_offset);
    return 0;
}

char *mb_zip_names_get(const struct mb_zip_names *z, size_t i, const char *taken, int *rc)
{
    const struct mb_zip_name *it = i < z->n ? &z->list[i] : NULL;
    char *raw, *slashes, *out;

    if (it == NULL || !is_changed(it))
        return NULL;
    raw = mb_strndup((const char *)it->name, it->len);
    slashes = raw != NULL ? mb_strdup(raw) : NULL;
    for (char *p = slashes; p != NULL && *p != '\0'; p++)
        *p = *p == '\\' ? '/' : *p;
    out = has_backslashes(it) ? slashes : raw;
    if (slashes == NULL) {
        *rc = MB_ENOMEM;
        out = NULL;
    } else if (taken != NULL && strcmp(taken, out == raw ? slashes : raw) != 0) {
        out = NULL; /* it is as it should be, or not the entry that is here */
    }
    if (out != raw)
        mb_free(raw);
    if (out != slashes)
        mb_free(slashes);
    return out;
}

void mb_zip_names_close(struct mb_zip_names *z)
{
    mb_free(z->list);
    *z = (struct mb_zip_names){NULL, 0};
}
