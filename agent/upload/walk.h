/*
 * All files of one iteration's directory, as a foreign trainer left them. Blocking, one stat a
 * file.
 */
#ifndef MOBULA_AGENT_UPLOAD_WALK_H
#define MOBULA_AGENT_UPLOAD_WALK_H

#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include "agent/upload/upload.h"

struct mb_walk {
    struct mb_upload_file *files; /* their paths are owned */
    /* By file: a fingerprint of path, size, mtime and inode. Equal on two nodes: one file of a
     * directory that they share. Different: two files, or a file system that numbers its files by
     * the node; then both are taken. */
    uint64_t *prints;
    /* By file: the same with the time at which its inode changed last, which no program can set.
     * For who asks whether one file is as it was; a shared directory's nodes may differ in it. */
    uint64_t *states;
    size_t n;
    size_t cap;
};

/* At most 1,000,000 files (150 MB), 8 directories deep (MB_EFULL). Hidden files belong to it
 * (torch's .metadata does), except our own: names that begin with .mobula. MB_ENOENT: there is no
 * such directory. MB_ESTATE: something in it vanished while it was looked at, or is a link to
 * nothing. MB_EIO: it cannot be read whole. On failure *w is empty. */
int mb_walk_dir(const char *dir, struct mb_walk *w);
/* The same, a few times while it is MB_ESTATE: temporary files come and go. */
int mb_walk_dir_again(const char *dir, struct mb_walk *w);
/* Forget the files whose fingerprint is among known[0..n), ascending. */
void mb_walk_drop_known(struct mb_walk *w, const uint64_t *known, size_t n);
/* The fingerprints ascending; the order of the files is left alone, so this ends their pairing. */
void mb_walk_sort_prints(struct mb_walk *w);
/* One number of all states, in any order: another one, and something was written, came or went. */
uint64_t mb_walk_state(const struct mb_walk *w);
/* Of one file, which has this path below the directory that was walked: as in states. */
uint64_t mb_walk_file_state(const char *path, const struct stat *st);
/* When it was written last, as in files. */
int64_t mb_walk_mtime_ns(const struct stat *st);
void mb_walk_close(struct mb_walk *w);

/* The iterations from..to that have a directory in dir, ascending, mb_free() by the caller. No such
 * dir: none. */
int mb_walk_iterations(const char *dir, int64_t from, int64_t to, int64_t **out, size_t *n,
                       struct mb_err *err);

#endif
