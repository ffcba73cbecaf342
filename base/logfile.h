/*
 * A log file that its writer only appends to, whose front may be released, and the side file that
 * says so. Offsets are absolute: byte 1000 stays byte 1000 after bytes 0..499 were released.
 *
 * PATH.idx (docs/formats.md) holds the first byte kept, how much is durable in an object store, the
 * cap of the file, and when the file had which size. One process writes it, any may read it.
 * Blocking, a few system calls each; any thread, one at a time per struct.
 */
#ifndef MOBULA_BASE_LOGFILE_H
#define MOBULA_BASE_LOGFILE_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

enum {
    MB_LOGFILE_TIMES_MAX = 65536, /* then every other one is dropped */
    MB_LOGFILE_TAIL_MAX_BYTES = 8 << 20
};

struct mb_logfile_head {
    uint64_t first;     /* bytes before it are gone */
    uint64_t shipped;   /* bytes before it are durable in the job's store */
    uint64_t cap_bytes; /* 0: none */
};

struct mb_logfile_time {
    uint64_t offset; /* bytes before it were written before unix_ms */
    uint64_t unix_ms;
};

/* open(path, flags) of a log, whose name its job could give to anything meanwhile: MB_EINVAL for
 * what is no regular file, a symbolic link included, and no wait for the other end of a pipe. */
int mb_logfile_fd(const char *path, int flags, int *fd, struct mb_err *err);

/* ---- the side file, for its writer ---- */

/* Opens PATH.idx for writing; makes it, with `fresh` empties it. What a crash left half written is
 * cut off. */
int mb_logfile_index_open(const char *log_path, int fresh, int *fd, struct mb_err *err);
int mb_logfile_head_read(int index_fd, struct mb_logfile_head *out);
int mb_logfile_head_write(int index_fd, const struct mb_logfile_head *head, struct mb_err *err);
/* Offsets and times must not go backwards: such an entry is passed over. */
int mb_logfile_index_add(int index_fd, uint64_t offset, uint64_t unix_ms, struct mb_err *err);

/* ---- for readers ---- */

struct mb_logfile {
    int fd;
    int index_fd; /* -1: there is none, nothing was released */
};

/* MB_ENOENT while there is no log. */
int mb_logfile_open(const char *path, struct mb_logfile *out, struct mb_err *err);
void mb_logfile_close(struct mb_logfile *f); /* a second close is legal */
uint64_t mb_logfile_first(const struct mb_logfile *f);
uint64_t mb_logfile_size(const struct mb_logfile *f);
/* Up to max bytes from *offset on; 0 at the end. *offset is moved to the first byte kept when it
 * lies before it, and to 0 when the file became shorter than it (a new job of the same name). */
long mb_logfile_read(const struct mb_logfile *f, uint64_t *offset, void *buf, size_t max);
/* Where the last n lines begin, looked for in the last MB_LOGFILE_TAIL_MAX_BYTES. */
uint64_t mb_logfile_last_lines(const struct mb_logfile *f, uint64_t n);
/* A start that misses nothing written since then; a second's worth of older lines may come too. */
uint64_t mb_logfile_since(const struct mb_logfile *f, uint64_t unix_ms);
/* The times from an offset on, at most max; how many. */
size_t mb_logfile_times(const struct mb_logfile *f, uint64_t from, struct mb_logfile_time *out,
                        size_t max);

#endif
