/* One line of four numbers; no gap, no file. */
#include "agent/log_gaps.h"

#include <stdio.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/str.h"

enum { FILE_MAX_BYTES = 256 };

static char *path_of(const char *log_path, struct mb_err *err)
{
    char *path = mb_asprintf("%s.gaps", log_path);

    if (path == NULL)
        mb_err_set(err, MB_ENOMEM, "out of memory");
    return path;
}

static int load(const char *path, struct mb_log_plan *p, struct mb_err *err)
{
    struct mb_buf text = {0};
    unsigned long long begin, end, bytes;
    unsigned n;
    int rc = mb_fs_read(path, FILE_MAX_BYTES, &text, err);

    if (rc == MB_OK &&
        (sscanf(mb_buf_str(&text), "%u %llu %llu %llu", &n, &begin, &end, &bytes) != 4 || n == 0 ||
         begin >= end || bytes == 0 || bytes > end - begin)) {
        mb_warn("logs", "%s is damaged: what it said is forgotten", path);
    } else if (rc == MB_OK) {
        p->n_gaps = n;
        p->gap_begin = begin;
        p->gap_end = end;
        p->gap_bytes = bytes;
    }
    mb_buf_close(&text);
    return rc;
}

int mb_log_gaps_open(const char *log_path, int is_new, struct mb_log_plan *p, struct mb_err *err)
{
    char *path = path_of(log_path, err);
    int rc = MB_OK;

    if (path == NULL)
        return MB_ENOMEM;
    if (is_new)
        unlink(path);
    else if (mb_fs_exists(path))
        rc = load(path, p, err);
    mb_free(path);
    return rc;
}

int mb_log_gaps_save(const char *log_path, const struct mb_log_plan *p, struct mb_err *err)
{
    char text[FILE_MAX_BYTES], *path = path_of(log_path, err);
    int n = snprintf(text, sizeof(text), "%u %llu %llu %llu\n", p->n_gaps,
                     (unsigned long long)p->gap_begin, (unsigned long long)p->gap_end,
                     (unsigned long long)p->gap_bytes);
    int rc = MB_OK;

    if (path == NULL)
        return MB_ENOMEM;
    if (p->n_gaps == 0)
        unlink(path);
    else
        rc = mb_fs_replace(path, text, (size_t)n, 0600, err);
    mb_free(path);
    return rc;
}
