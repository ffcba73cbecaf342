/*
 * The append-only files of an index writer: tokens (raw), lengths (i32 of each sequence) and
 * documents (u64 for each document: sequences of the lane up to its end). A writer has one lane, or
 * several whose documents are put one lane after the other at the end. Used by index_writer.c only;
 * one thread, but lane_sync may run on another one beside appends.
 */
#ifndef MOBULA_WORKER_DATA_INDEX_LANE_H
#define MOBULA_WORKER_DATA_INDEX_LANE_H

#include <stdint.h>
#include "base/buf.h"
#include "base/err.h"
#include "worker/data/index.h"

/* A file that only grows; small pieces are collected, large ones go out as they are. */
struct mb_lane_file {
    int fd; /* -1: not open */
    char *path;
    struct mb_buf buffer;
    uint64_t size_bytes;    /* with what is in the buffer */
    uint64_t started_bytes; /* up to here the kernel was told to write back */
};

/* cut_bytes: 0 creates the file, which must not exist; else it is opened, must hold that much, and
 * is cut there. */
int mb_lane_file_open(struct mb_lane_file *f, char *path /* taken */, int continues,
                      uint64_t cut_bytes, struct mb_err *err);
int mb_lane_file_append(struct mb_lane_file *f, const void *p, size_t n, struct mb_err *err);
int mb_lane_file_flush(struct mb_lane_file *f, struct mb_err *err); /* to the kernel */
void mb_lane_file_close(struct mb_lane_file *f, int removes);
/* Appends the first size_bytes of another file, which is flushed. */
int mb_lane_file_copy(struct mb_lane_file *to, const struct mb_lane_file *from, uint64_t size_bytes,
                      struct mb_err *err);
/* Exactly n bytes from offset on. */
int mb_lane_file_read(const struct mb_lane_file *f, void *p, size_t n, uint64_t offset,
                      struct mb_err *err);

struct mb_lane {
    struct mb_lane_file bin, lengths, documents;
    uint64_t n_sequences, n_documents;
};

#endif
