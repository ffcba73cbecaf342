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
uint64_t mb_index_idx_bytes(const struct mb_index *index);
uint64_t mb_index_bin_bytes(const struct mb_index *index);
/* CRC64-NVME of all of the .idx, which is read for it. */
uint64_t mb_index_checksum(const struct mb_index *index);
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
 * Writer. Everything is written under temporary names. prepare makes .bin and .idx whole and fsyncs
 * them; commit takes an old .idx away, renames .bin, then .idx: at every moment either there is no
 * .idx or it describes the .bin beside it. destroy without commit removes what was written, unless
 * mb_index_writer_keep() was called. Memory is constant: lengths and documents are spooled.
 *
 * Documents may be dealt over several lanes; the output has all of lane 0, then all of lane 1, ...
 * Nothing but mb_index_writer_sync may run beside another call.
 */
struct mb_index_writer;

/* How far a lane has come: what a later run cuts its files to, to go on from there. */
struct mb_index_mark {
    uint64_t bin_bytes;
    uint64_t n_sequences;
    uint64_t n_documents;
};

struct mb_index_writer_options {
    const char *prefix; /* PREFIX.bin and PREFIX.idx appear at commit */
    const char *work;   /* WORK.LANE.bin, .lengths, .documents and WORK.idx are written; on the same
                           file system; NULL: a random name beside PREFIX */
    enum mb_index_dtype dtype;
    unsigned n_lanes;                  /* 0: 1 */
    const struct mb_index_mark *marks; /* NULL: a new output; else one per lane, which must be there
                                          (MB_ENOENT, MB_ECORRUPT) */
};

int mb_index_writer_open(const struct mb_index_writer_options *o, struct mb_index_writer **out,
                         struct mb_err *err);
/* The same with one lane and the random name. */
int mb_index_writer_create(const char *prefix, enum mb_index_dtype dtype,
                           struct mb_index_writer **out, struct mb_err *err);
/* Append one sequence of n ids to the open document of lane 0. MB_EINVAL if an id does not fit the
 * dtype. */
int mb_index_writer_add(struct mb_index_writer *w, const int32_t *ids, size_t n,
                        struct mb_err *err);
/* The open document of lane 0 ends here; it may have no sequence. */
int mb_index_writer_end_document(struct mb_index_writer *w, struct mb_err *err);

/* Whole documents: tokens in the dtype's form, the length of each sequence, the number of sequences
 * of each document (native byte order, unaligned). The lengths sum up to tokens_bytes. */
struct mb_index_batch {
    const void *tokens;
    size_t tokens_bytes;
    const void *lengths; /* int32_t[n_sequences] */
    size_t n_sequences;
    const void *document_sequences; /* uint32_t[n_documents] */
    size_t n_documents;
};
int mb_index_writer_add_batch(struct mb_index_writer *w, unsigned lane,
                              const struct mb_index_batch *batch, struct mb_err *err);

/* Hands everything to the kernel and says how far each lane has come; marks[n_lanes]. */
int mb_index_writer_mark(struct mb_index_writer *w, struct mb_index_mark *marks,
                         struct mb_err *err);
/* What was marked before this call survives power loss after it. May run on a thread of its own
 * beside appends. */
int mb_index_writer_sync(struct mb_index_writer *w, struct mb_err *err);
void mb_index_writer_keep(struct mb_index_writer *w); /* destroy leaves the temporary files */

int mb_index_writer_prepare(struct mb_index_writer *w, struct mb_err *err);
int mb_index_writer_commit(struct mb_index_writer *w, struct mb_err *err); /* prepares if needed */
/* The renames of a commit that was prepared, whichever of them are done already. */
int mb_index_finish(const char *prefix, const char *work, struct mb_err *err);
void mb_index_writer_destroy(struct mb_index_writer *w);

uint64_t mb_index_writer_n_sequences(const struct mb_index_writer *w);
uint64_t mb_index_writer_n_documents(const struct mb_index_writer *w);
uint64_t mb_index_writer_n_tokens(const struct mb_index_writer *w);

#endif
