/*
 * Writes a file as torch.save does, for torch.load(weights_only=True). The shapes are known before
 * the first byte and the numbers stream, as with mb_st_create. Blocking; one thread per object.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_MEGATRON_TORCH_WRITE_H
#define MOBULA_WORKER_CHECKPOINT_MEGATRON_TORCH_WRITE_H

#include <jansson.h>
#include "worker/checkpoint/safetensors.h"

struct mb_torch_writer;

/* What a file of Megatron-LM's has beside tensors. Everything is borrowed for the call. */
struct mb_torch_megatron {
    const json_t *args; /* an object; values that are objects are left out */
    int64_t iteration;
    size_t n_chunks; /* of the model: "model0", "model1", ... instead of "model"; 1 or 0: that */
    const char *const *nones; /* more names of its tensors, whose value is None */
    size_t n_nones;
    /* More entries of the file, NULL: none. Objects are dictionaries, a key of digits alone an
     * integer; an object {"$tensor": i} is tensor i of the list, which is then nowhere else. */
    const json_t *more;
};

/*
 * Creates path, which must not exist. tensors are borrowed until the end.
 * m NULL: the file is one dictionary of all tensors. Else it is what Megatron-LM's load_checkpoint
 * wants: "args", a Namespace, "checkpoint_version", "iteration", "model" with the tensors of names
 * that begin with "model." (of several chunks "model0." and so on), and the other tensors beside
 * it, or with more where that has them.
 */
int mb_torch_create(const char *path, const struct mb_st_tensor *tensors, size_t n,
                    const struct mb_torch_megatron *m, struct mb_torch_writer **out,
                    struct mb_err *err);
/* The next bytes of the tensors, in their order; n does not go beyond the last one. */
int mb_torch_write(struct mb_torch_writer *w, const void *p, size_t n, struct mb_err *err);
/* The directory; fsync and close. MB_ESTATE if bytes are missing. Frees the writer in any case. The
 * checksum is of the whole file. */
int mb_torch_finish(struct mb_torch_writer *w, uint64_t *size_bytes, uint64_t *crc64nvme,
                    struct mb_err *err);
/* Closes and removes the unfinished file. NULL is legal. */
void mb_torch_abandon(struct mb_torch_writer *w);

#endif
