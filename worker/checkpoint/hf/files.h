/*
 * Tensors in one or several safetensors files, in fp32 whatever the files hold.
 *
 * A source is a Hugging Face directory (model.safetensors, or what model.safetensors.index.json
 * lists) or one file. Nothing is read before its shape was compared. Blocking; one thread.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_HF_FILES_H
#define MOBULA_WORKER_CHECKPOINT_HF_FILES_H

#include "worker/checkpoint/hf/map.h"
#include "worker/checkpoint/safetensors.h"

struct mb_hf_source;

/* MB_ENOENT when the directory has neither; MB_ECORRUPT naming the file. */
int mb_hf_source_open_dir(const char *dir, struct mb_hf_source **out, struct mb_err *err);
int mb_hf_source_open_file(const char *path, struct mb_hf_source **out, struct mb_err *err);
void mb_hf_source_close(struct mb_hf_source *s); /* NULL is legal */

size_t mb_hf_source_n_files(const struct mb_hf_source *s);
size_t mb_hf_source_n_tensors(const struct mb_hf_source *s);
uint64_t mb_hf_source_bytes(const struct mb_hf_source *s); /* of the tensors */

/* Every tensor of list is there with its shape and a dtype of numbers, and, unless is_known says
 * yes to its name, there is no other. */
int mb_hf_source_check(const struct mb_hf_source *s, const struct mb_hf_tensor *list, size_t n,
                       int (*is_known)(const char *name), struct mb_err *err);
/* Rows [row, row + n) of a checked tensor. A turned one is read as a whole, once, and kept until
 * the next one. */
int mb_hf_source_rows(struct mb_hf_source *s, const struct mb_hf_tensor *t, uint64_t row,
                      uint64_t n, float *out, struct mb_err *err);

/* Reads every file that has checksums: MB_ECORRUPT names it. *n_without: those that have none. */
int mb_hf_source_verify(struct mb_hf_source *s, size_t *n_without, struct mb_err *err);

/* A list of files from an index, for fuzzing: the names are checked, nothing is opened. */
int mb_hf_index_parse(const char *name, const void *text, size_t n, char ***files, size_t *n_files,
                      struct mb_err *err);
void mb_hf_index_close(char **files, size_t n_files);

#endif
