/*
 * What makes a checkpoint visible in a store. Pure: structs to JSON and back.
 *
 * Below the store's prefix:
 *   iter_0000020/<file>                          the shards, written first
 *   iter_0000020/.mobula/part-0-of-2.json        one per node, after that node's shards
 *   iter_0000020/.mobula/manifest.json           all parts together, written once (if absent)
 *   latest_checkpointed_iteration.txt            "20", moved last, never backwards
 * A reader trusts nothing that the manifest does not list. docs/formats.md has the fields.
 */
#ifndef MOBULA_AGENT_UPLOAD_MANIFEST_H
#define MOBULA_AGENT_UPLOAD_MANIFEST_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

enum { MB_MANIFEST_VERSION = 2, MB_MANIFEST_MAX_BYTES = 256 << 20 /* over a million files */ };

/* Version 2 has "data"; a manifest without it is written as version 1. */
#define MB_LATEST_KEY "latest_checkpointed_iteration.txt"

struct mb_manifest_file {
    char *path; /* relative to iter_NNNNNNN/, no "..", no leading slash */
    uint64_t size_bytes;
    uint64_t crc64nvme;
};

/* A part (node_rank of num_nodes) or a manifest (node_rank is -1: the files of all nodes). */
/* Who wrote: names of jobs come again, placement groups never do. */
struct mb_manifest_writer { /* borrowed */
    const char *job_id;
    const char *placement_group; /* hexadecimal */
    uint32_t attempt;
};

struct mb_manifest {
    int64_t iteration;
    int32_t node_rank;
    uint32_t num_nodes;
    char *job_id;
    char *placement_group; /* "" when it was not recorded */
    uint32_t attempt;
    int is_claim; /* who is about to write the manifest: no files yet */
    char *data;   /* directory of the files inside the iteration's own; NULL: that itself */
    struct mb_manifest_file *files; /* sorted by path, each path once */
    size_t n_files;
};

/* 1: it stays inside its directory: no empty, "." or ".." segment, no leading slash. */
int mb_manifest_path_is_safe(const char *path);

void mb_manifest_close(struct mb_manifest *m);
/* Takes copies. MB_ENOMEM: nothing changed. */
int mb_manifest_set_writer(struct mb_manifest *m, const struct mb_manifest_writer *w,
                           struct mb_err *err);
int mb_manifest_is_of(const struct mb_manifest *m, const struct mb_manifest_writer *w);

/* 1: a later attempt of the writer's own run wrote it. */
int mb_manifest_is_newer(const struct mb_manifest *m, const struct mb_manifest_writer *w);

/* Takes a copy of path. A path that leaves the directory is MB_EINVAL; one that is there already
 * with other contents is MB_EEXIST, with the same contents it is left as it is. */
int mb_manifest_add(struct mb_manifest *m, const char *path, uint64_t size_bytes,
                    uint64_t crc64nvme, struct mb_err *err);
/* The same for n files in any order, in n log n: one at a time, 100,000 in another order than their
 * paths' took seconds. After an error m is as it was. */
int mb_manifest_add_all(struct mb_manifest *m, const struct mb_manifest_file *files, size_t n,
                        struct mb_err *err);

/* Where the files are, in place of the iteration's own directory: .mobula/data-... MB_EINVAL: it is
 * not below .mobula/. NULL or "": there. */
int mb_manifest_set_data(struct mb_manifest *m, const char *data, struct mb_err *err);
/* Key of a file of iteration below data (NULL or ""); owned by the caller, NULL: no memory. */
char *mb_manifest_file_key(int64_t iteration, const char *data, const char *path);
/* Compact JSON, owned by the caller; the same bytes for the same contents. MB_EFULL: longer than a
 * reader takes. */
int mb_manifest_encode(const struct mb_manifest *m, char **out, struct mb_err *err);
/* what: name for texts. Anything missing, of a wrong type, negative or out of place is MB_ECORRUPT.
 * A claim is MB_ENOENT: for a reader there is no manifest yet. */
int mb_manifest_decode(const void *json, size_t n, const char *what, struct mb_manifest *out,
                       struct mb_err *err);

/* The same, and claims too. */
int mb_manifest_decode_any(const void *json, size_t n, const char *what, struct mb_manifest *out,
                           struct mb_err *err);

/* 1: a newer program wrote it, and it cannot be told what it says. */
int mb_manifest_is_of_newer_version(const void *json, size_t n);

/* All parts 0..num_nodes-1 of one iteration and writer into one manifest; MB_ECORRUPT when
 * they do not belong together, MB_ENOENT when one is missing. */
int mb_manifest_merge(const struct mb_manifest *parts, size_t n, struct mb_manifest *out,
                      struct mb_err *err);

/* Keys, into out. Returns out. */
enum { MB_CHECKPOINT_KEY_MAX = 128 };
char *mb_iteration_dir(int64_t iteration, char out[MB_CHECKPOINT_KEY_MAX]); /* iter_0000020 */
int64_t mb_iteration_of_dir(const char *name); /* the other way; -1: it is none of them */
char *mb_manifest_key(int64_t iteration, char out[MB_CHECKPOINT_KEY_MAX]);
char *mb_part_key(int64_t iteration, uint32_t node_rank, uint32_t num_nodes,
                  char out[MB_CHECKPOINT_KEY_MAX]);
/* Contents of the latest pointer: digits only (white space at the end is forgiven). MB_ECORRUPT. */
int mb_latest_parse(const void *p, size_t n, int64_t *out, struct mb_err *err);
/* 1: a pointer that says now_at (-1: there is none) has to move to iteration. Never backwards. */
int mb_latest_moves(int64_t now_at, int64_t iteration);
/* What the pointer is to hold, into out; its length is returned. there: what it holds now, NULL for
 * nothing. Digits alone, unless it is_touched or was: then white space of 40 random bits follows,
 * so that no two such contents, and no etags, are alike (docs/adr/0015). */
enum { MB_LATEST_MAX_BYTES = 64 };
size_t mb_latest_format(int64_t iteration, const void *there, size_t n, int is_touched,
                        uint64_t random, char out[MB_LATEST_MAX_BYTES]);

#endif
