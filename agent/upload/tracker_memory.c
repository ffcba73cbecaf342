/*
 * The file is text (docs/formats.md): the known iteration or "none", "dirs N", and a line for each
 * of the N directories. It is replaced as a whole, so anything else than that is damage.
 */
#include "agent/upload/tracker_memory.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "base/fs.h"

enum { FILE_MAX_BYTES = 16 << 20 };

static size_t index_of(const struct mb_tracker_memory *m, int64_t iteration)
{
    size_t at = 0;

    while (at < m->n && m->dirs[at].iteration < iteration)
        at++;
    return at;
}

const struct mb_tracker_dir *mb_tracker_memory_find(const struct mb_tracker_memory *m,
                                                    int64_t iteration)
{
    size_t at = index_of(m, iteration);

    return at < m->n && m->dirs[at].iteration == iteration ? &m->dirs[at] : NULL;
}

int mb_tracker_memory_put(struct mb_tracker_memory *m, struct mb_tracker_dir dir)
{
    size_t at = index_of(m, dir.iteration);

    if (at == m->n || m->dirs[at].iteration != dir.iteration) {
        if (m->n == m->cap) {
            size_t cap = m->cap * 2 + 16;
            struct mb_tracker_dir *grown = mb_reallocarray(m->dirs, cap, sizeof(*grown));

            if (grown == NULL)
                return MB_ENOMEM;
            m->dirs = grown;
            m->cap = cap;
        }
        memmove(m->dirs + at + 1, m->dirs + at, (m->n++ - at) * sizeof(*m->dirs));
    }
    m->dirs[at] = dir;
    return MB_OK;
}

void mb_tracker_memory_drop(struct mb_tracker_memory *m, int64_t iteration)
{
    size_t at = index_of(m, iteration);

    if (at < m->n && m->dirs[at].iteration == iteration)
        memmove(m->dirs + at, m->dirs + at + 1, (--m->n - at) * sizeof(*m->dirs));
}

void mb_tracker_memory_advance(struct mb_tracker_memory *m, int64_t known)
{
    size_t at = index_of(m, known + 1);

    m->known = known;
    m->known_state = 0;
    if (at == 0)
        return;
    m->n -= at;
    memmove(m->dirs, m->dirs + at, m->n * sizeof(*m->dirs));
}

void mb_tracker_memory_close(struct mb_tracker_memory *m)
{
    mb_free(m->dirs);
    *m = (struct mb_tracker_memory){.known = -1};
}

/* ---- the file ---- */

/* The bytes behind the first line's; NULL: it is none. */
static const char *read_known(const char *s, struct mb_tracker_memory *m)
{
    int end = 0, more = 0;

    m->known = -1;
    if (strncmp(s, "none\n", 5) == 0)
        return s + 5;
    if (sscanf(s, "%19" SCNd64 "%n", &m->known, &end) != 1 || m->known < 0)
        return NULL;
    s += end;
    if (s[0] == ' ' && sscanf(s, " %16" SCNx64 "%n", &m->known_state, &more) == 1)
        s += more;
    return s[0] == '\n' ? s + 1 : NULL;
}

static const char *read_dir(const char *s, struct mb_tracker_dir *dir)
{
    int end = 0;

    *dir = (struct mb_tracker_dir){0};
    if (sscanf(s, "old %19" SCNd64 " %16" SCNx64 "%n", &dir->iteration, &dir->state, &end) == 2)
        dir->is_old = 1;
    else if (sscanf(s, "new %19" SCNd64 "%n", &dir->iteration, &end) != 1)
        return NULL;
    return s[end] == '\n' ? s + end + 1 : NULL;
}

static int parse(struct mb_tracker_memory *m, const char *s, int *is_whole)
{
    size_t n = 0;
    int end = 0;

    s = read_known(s, m);
    if (s == NULL)
        return MB_ECORRUPT;
    *is_whole = s[0] != '\0';
    if (!*is_whole)
        return MB_OK;
    if (sscanf(s, "dirs %9zu%n", &n, &end) != 1 || s[end] != '\n')
        return MB_ECORRUPT;
    s += end + 1;
    for (size_t i = 0; i < n; i++) {
        struct mb_tracker_dir dir;

        s = read_dir(s, &dir);
        if (s == NULL)
            return MB_ECORRUPT;
        if (mb_tracker_memory_put(m, dir) != MB_OK)
            return MB_ENOMEM;
    }
    return s[0] == '\0' ? MB_OK : MB_ECORRUPT;
}

int mb_tracker_memory_read(struct mb_tracker_memory *m, const char *path, int *is_whole,
                           struct mb_err *err)
{
    struct mb_buf text = {0};
    int rc;

    *m = (struct mb_tracker_memory){.known = -1};
    rc = mb_fs_read(path, FILE_MAX_BYTES, &text, err);
    if (rc == MB_OK) {
        rc = parse(m, mb_buf_str(&text), is_whole);
        if (rc != MB_OK)
            mb_err_set(err, rc, "%s: %s", path,
                       rc == MB_ENOMEM ? "no memory"
                                       : "it is damaged: which checkpoints are the "
                                         "attempt's is not known");
    }
    mb_buf_close(&text);
    if (rc != MB_OK)
        mb_tracker_memory_close(m);
    return rc;
}

int mb_tracker_memory_write(const struct mb_tracker_memory *m, const char *path, struct mb_err *err)
{
    struct mb_buf text = {0};
    int rc = m->known < 0 ? mb_buf_printf(&text, "none\n")
             : m->known_state == 0
                 ? mb_buf_printf(&text, "%" PRId64 "\n", m->known)
                 : mb_buf_printf(&text, "%" PRId64 " %" PRIx64 "\n", m->known, m->known_state);

    if (rc == MB_OK)
        rc = mb_buf_printf(&text, "dirs %zu\n", m->n);
    for (size_t i = 0; rc == MB_OK && i < m->n; i++) {
        const struct mb_tracker_dir *dir = &m->dirs[i];

        rc = dir->is_old
                 ? mb_buf_printf(&text, "old %" PRId64 " %" PRIx64 "\n", dir->iteration, dir->state)
                 : mb_buf_printf(&text, "new %" PRId64 "\n", dir->iteration);
    }
    rc = rc == MB_OK ? mb_fs_replace(path, mb_buf_str(&text), text.len, 0644, err)
                     : mb_err_set(err, rc, "no memory to write %s", path);
    mb_buf_close(&text);
    return rc;
}
