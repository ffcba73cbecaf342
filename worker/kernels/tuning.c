/*
 * The file: a line of text that says for what it is, then key and value of each entry, then the
 * CRC-64/NVME of all before it. The line includes the sizes, so that another layout is another
 * file's content and not a damaged one.
 */
#include "worker/kernels/tuning.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "base/checksum.h"
#include "base/fs.h"
#include "base/log.h"

enum { FILE_MAX = 4 << 20, CRC_BYTES = 8, LINE_MAX_BYTES = 200 };

struct mb_tuning {
    char *path; /* NULL: nothing is kept */
    char line[LINE_MAX_BYTES];
    size_t key_bytes, value_bytes;
    struct mb_buf entries; /* keys and values as in the file */
    int has_warned;
};

static void warn(struct mb_tuning *t, const char *what)
{
    if (!t->has_warned)
        mb_warn("tuning", "%s: %s; products are tuned again", t->path, what);
    t->has_warned = 1;
}

static size_t entry_bytes(const struct mb_tuning *t)
{
    return t->key_bytes + t->value_bytes;
}

static uint8_t *find(const struct mb_tuning *t, const void *key)
{
    for (size_t at = 0; at < t->entries.len; at += entry_bytes(t))
        if (memcmp(t->entries.data + at, key, t->key_bytes) == 0)
            return t->entries.data + at + t->key_bytes;
    return NULL;
}

/* 0 or MB_ENOMEM. */
static int put(struct mb_tuning *t, const uint8_t *key, const uint8_t *value, int replaces)
{
    uint8_t *have = find(t, key);
    if (have != NULL) {
        if (replaces)
            memcpy(have, value, t->value_bytes);
        return 0;
    }
    int rc = mb_buf_reserve(&t->entries, entry_bytes(t));
    if (rc == 0)
        rc = mb_buf_add(&t->entries, key, t->key_bytes);
    return rc == 0 ? mb_buf_add(&t->entries, value, t->value_bytes) : rc;
}

static uint64_t crc_of(const uint8_t *p, size_t n)
{
    return mb_crc64nvme(0, p, n);
}

static uint64_t u64_at(const uint8_t *p)
{
    uint64_t v = 0;
    for (int i = 0; i < CRC_BYTES; i++)
        v |= (uint64_t)p[i] << 8 * i;
    return v;
}

/* The entries of a whole file that are not here yet; NULL, or what is wrong with it. */
static const char *take(struct mb_tuning *t, const struct mb_buf *file)
{
    const size_t head = strlen(t->line);
    if (file->len < head + CRC_BYTES ||
        u64_at(file->data + file->len - CRC_BYTES) != crc_of(file->data, file->len - CRC_BYTES))
        return "is damaged";
    if (memcmp(file->data, t->line, head) != 0)
        return "is of another layout or device";
    const size_t n = file->len - head - CRC_BYTES;
    if (n % entry_bytes(t) != 0)
        return "is damaged";
    for (size_t at = head; at < head + n; at += entry_bytes(t))
        if (put(t, file->data + at, file->data + at + t->key_bytes, 0) != 0)
            return "out of memory";
    return NULL;
}

static void read_file(struct mb_tuning *t)
{
    struct mb_buf file = {0};
    struct mb_err err = {0};
    if (!mb_fs_exists(t->path))
        return;
    if (mb_fs_read(t->path, FILE_MAX, &file, &err) != 0) {
        warn(t, err.text);
    } else {
        const char *wrong = take(t, &file);
        if (wrong != NULL)
            warn(t, wrong);
    }
    mb_buf_close(&file);
}

static void write_file(struct mb_tuning *t)
{
    struct mb_buf file = {0};
    struct mb_err err = {0};
    int rc = mb_buf_puts(&file, t->line);
    if (rc == 0)
        rc = mb_buf_add(&file, t->entries.data, t->entries.len);
    if (rc == 0)
        rc = mb_buf_u64le(&file, crc_of(file.data, file.len));
    if (rc != 0)
        rc = mb_err_set(&err, MB_ENOMEM, "out of memory");
    else
        rc = mb_fs_write_atomic(t->path, file.data, file.len, 0644, &err);
    if (rc != 0)
        warn(t, err.text);
    mb_buf_close(&file);
}

/* The directory, owned by the caller; NULL: there is none, or no memory. */
static char *directory(void)
{
    const char *own = getenv("MOBULA_TUNING_CACHE"), *xdg = getenv("XDG_CACHE_HOME"),
               *home = getenv("HOME");
    if (own != NULL)
        return own[0] != '\0' ? mb_strdup(own) : NULL;
    if (xdg != NULL && xdg[0] == '/')
        return mb_path_join(xdg, "mobula");
    return home != NULL && home[0] == '/' ? mb_path_join(home, ".cache/mobula") : NULL;
}

/* products-NVIDIA_H200-130101; made with its directory. Nothing is kept where that fails. */
static void place(struct mb_tuning *t, const char *device, uint64_t version)
{
    struct mb_err err = {0};
    char name[128];
    char *dir = directory();
    if (dir == NULL)
        return;
    int n =
        snprintf(name, sizeof(name), "products-%.80s-%llu", device, (unsigned long long)version);
    for (int i = 0; i < n; i++)
        if (strchr("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-.", name[i]) ==
            NULL)
            name[i] = '_';
    if (mb_fs_mkdir_p(dir, 0755, &err) != 0)
        mb_warn("tuning", "%s; what products are tuned to is not kept", err.text);
    else
        t->path = mb_path_join(dir, name);
    mb_free(dir);
}

int mb_tuning_open(const char *device, uint64_t version, size_t key_bytes, size_t value_bytes,
                   struct mb_tuning **out, struct mb_err *err)
{
    struct mb_tuning *t = mb_calloc(1, sizeof(*t));
    if (t == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory for what products are tuned to");
    t->key_bytes = key_bytes;
    t->value_bytes = value_bytes;
    snprintf(t->line, sizeof(t->line),
             "mobula products 1, %.80s, library %llu, %zu and %zu bytes\n", device,
             (unsigned long long)version, key_bytes, value_bytes);
    place(t, device, version);
    if (t->path != NULL)
        read_file(t);
    *out = t;
    return 0;
}

void mb_tuning_close(struct mb_tuning *t)
{
    if (t == NULL)
        return;
    mb_buf_close(&t->entries);
    mb_free(t->path);
    mb_free(t);
}

const void *mb_tuning_find(const struct mb_tuning *t, const void *key)
{
    return find(t, key);
}

void mb_tuning_add(struct mb_tuning *t, const void *key, const void *value)
{
    if (put(t, key, value, 1) != 0 || t->path == NULL)
        return;
    read_file(t); /* what others have added meanwhile */
    write_file(t);
}
