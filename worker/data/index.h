/*
 * Megatron-LM's indexed dataset: PREFIX.idx describes, PREFIX.bin holds raw tokens.
 *
 * .idx, little endian: "MMIDIDX\0\0", u64 version 1, u8 dtype, u64 S sequences, u64 D document
 * index entries, then i32 lengths[S], i64 byte offsets[S], i64 document index[D] (first 0, last S),
 * and for multimodal data i8 modes[S], which are read past. The arrays start at byte 34, so they
 * are unaligned: they are only ever copied, never cast. Source of the rule: Megatron-LM
 * megatron/core/datasets/indexed_dataset.py.
 *
 * Reader: opening checks every length and offset once, so that later reads cannot leave the
 * mapping. A file that another process shortens after that kills the reader with SIGBUS, as with
 * any mmap. Threads: an opened index is immutable; any number of threads may read. The reference
 * count is not atomic: ref and unref from one thread.
 */
#ifndef MOBULA_WORKER_DATA_INDEX_H
#define MOBULA_WORKER_DATA_INDEX_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

enum mb_index_dtype {
    MB_INDEX_U8 = 1,
    MB_INDEX_I8 = 2,
    MB_INDEX_I16 = 3,
    MB_INDEX_I32 = 4,
    MB_INDEX_I64 = 5,
    MB_INDEX_F64 = 6, /* the header knows it; tokens cannot be read from it */
    MB_INDEX_F32 = 7, /* likewise */
    MB_INDEX_U16 = 8
};

size_t mb_index_dtype_size(enum mb_index_dtype dtype); /* bytes per token; 0 for no dtype */
/* What Megatron-LM chooses for an (unpadded) vocabulary: u16 below 65500, else i32. */
enum mb_index_dtype mb_index_dtype_for_vocab(uint64_t vocab_size);

struct mb_index;

/* Map PREFIX.idx and PREFIX.bin and check them whole. MB_ENOENT if one is missing, MB_ECORRUPT if
 * they contradict the format or each other; the text names the file and what to do. */
int mb_index_open(const char *prefix, struct mb_index **out, struct mb_err *err);
/* Check an .idx that lies in memory (borrowed; it must outlive the index) against a .bin of
 * bin_size_bytes that lies in `bin` (may be NULL: then only lengths can be read). For fuzzing and
 * tests; `name` stands for the prefix in messages. */
int mb_index_open_memory(const char *name, const void *idx, size_t idx_size_bytes, const void *bin,
                         size_t bin_size_bytes, struct mb_index **out, struct mb_err *err);
struct mb_index *mb_index_ref(struct mb_index *index);
void mb_index_unref(struct mb_index *index); /* the last one unmaps; NULL is legal */

const char *mb_index_prefix(const struct mb_index *index);
enum mb_index_dtype mb_index_dtype(const struct mb_index *index);
uint64_t mb_index_n_sequences(const struct mb_index *index);
uint64_t mb_index_n_documents(const struct mb_index *index);
uint64_t mb_index_n_tokens(const struct mb_index *index);
/* Tokens in one sequence, seq < n_sequences. */
int32_t mb_index_length(const struct mb_index *index, uint64_t seq);
/* First sequence of a document; document == n_documents gives n_sequences. */
uint64_t mb_index_document_start(const struct mb_index *index, uint64_t document);

/* Copy n tokens of sequence seq from token `offset` on; offset + n <= length is the caller's
 * promise. A token outside [0, vocab_size) is MB_ECORRUPT naming file, sequence, position and id;
 * vocab_size 0 checks only that the id fits int32 and is not negative. */
int mb_index_read(const struct mb_index *index, uint64_t seq, uint64_t offset, uint64_t n,
                  uint64_t vocab_size, int32_t *out, struct mb_err *err);

/*
 * Writer. Both files are written under temporary names beside their final ones. prepare makes them
 * whole and fsyncs them; commit takes an old .idx away, renames .bin, then .idx: at every moment
 * either there is no .idx or it describes the .bin beside it. destroy without commit removes what
 * was written. Memory is constant: lengths and documents are spooled to unlinked temporary files.
 */
struct mb_index_writer;

int mb_index_writer_create(const char *prefix, enum mb_index_dtype dtype,
                           struct mb_index_writer **out, struct mb_err *err);
/* Append one sequence of n ids to the open document. MB_EINVAL if an id does not fit the dtype. */
int mb_index_writer_add(struct mb_index_writer *w, const int32_t *ids, size_t n,
                        struct mb_err *err);
/* Append n_sequences sequences whose tokens already have the dtype's form: `tokens` of size_bytes,
 * lengths that sum to it. */
int mb_index_writer_add_raw(struct mb_index_writer *w, const void *tokens, size_t size_bytes,
                            const int32_t *lengths, size_t n_sequences, struct mb_err *err);
/* The open document ends here; it may have no sequence. */
int mb_index_writer_end_document(struct mb_index_writer *w, struct mb_err *err);
int mb_index_writer_prepare(struct mb_index_writer *w, struct mb_err *err);
int mb_index_writer_commit(struct mb_index_writer *w, struct mb_err *err); /* prepares if needed */
void mb_index_writer_destroy(struct mb_index_writer *w);

uint64_t mb_index_writer_n_sequences(const struct mb_index_writer *w);
uint64_t mb_index_writer_n_documents(const struct mb_index_writer *w);
uint64_t mb_index_writer_n_tokens(const struct mb_index_writer *w);

#endif
