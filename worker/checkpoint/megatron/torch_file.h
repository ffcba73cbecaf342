/*
 * A file of torch.save, as Megatron-LM's model_optim_rng.pt is one: its tensors, wherever in
 * dictionaries and lists they lie, the arguments of the run, and the settings of its optimizer.
 * Everything else (generators) is passed over; nothing in it is run. Blocking; one thread per
 * object.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_MEGATRON_TORCH_FILE_H
#define MOBULA_WORKER_CHECKPOINT_MEGATRON_TORCH_FILE_H

#include <jansson.h>
#include <stddef.h>
#include <stdint.h>
#include "base/err.h"
#include "worker/checkpoint/safetensors.h"

struct mb_torch_tensor {
    const char *name; /* keys and places on the way to it: "model.decoder.final_layernorm.weight" */
    enum mb_st_dtype dtype;
    int n_dims;
    uint64_t shape[MB_ST_DIMS_MAX];
    uint64_t n;                       /* elements */
    uint64_t strides[MB_ST_DIMS_MAX]; /* in elements; 0: one row stands for all */
    uint64_t from;                    /* the first one, in its storage */
    uint64_t run;                     /* so many at its end follow each other there */
    size_t entry;                     /* the storage: an entry of the zip */
    size_t place;                     /* its number, in the order of the pickle */
};

struct mb_torch_file;

/* "torch\nFloatStorage", as a pickle names the storage of such numbers. */
const char *mb_torch_storage(enum mb_st_dtype dtype);

/* MB_ENOENT, or MB_ECORRUPT and MB_EUNSUPPORTED naming the file and what is wrong. */
int mb_torch_open(const char *path, struct mb_torch_file **out, struct mb_err *err);
/* fd is taken, whatever is returned; name is for texts. */
int mb_torch_open_fd(const char *name, int fd, struct mb_torch_file **out, struct mb_err *err);
/* Of a file that is several, bytes [at, at + n). */
int mb_torch_open_part(const char *name, int fd, uint64_t at, uint64_t n,
                       struct mb_torch_file **out, struct mb_err *err);
/* It keeps no descriptor from now on, if its name is a path: mb_zip_rest(). */
int mb_torch_rest(struct mb_torch_file *f, struct mb_err *err);
void mb_torch_close(struct mb_torch_file *f); /* NULL is legal */

/* One JSON object, those of "args" that JSON can say (a torch.dtype is its name); NULL: there is no
 * Namespace of this name. */
const char *mb_torch_args(const struct mb_torch_file *f);
/* What JSON can say of "optimizer" and "opt_param_scheduler", under these keys: dictionaries (a key
 * that is a number as its digits), lists, numbers and texts; tensors and whatever else is left out.
 * Of a file that is a list, all of it under "list"; but one of a single dictionary with "args" is
 * as that. NULL: there is none of these, or it is beyond a bound. Borrowed. */
const json_t *mb_torch_settings(const struct mb_torch_file *f);
int64_t mb_torch_iteration(const struct mb_torch_file *f); /* "iteration"; 0: it says none */
size_t mb_torch_n_tensors(const struct mb_torch_file *f);
/* Sorted by name, each name once. */
const struct mb_torch_tensor *mb_torch_tensor(const struct mb_torch_file *f, size_t i);
uint64_t mb_torch_bytes(const struct mb_torch_file *f); /* of all tensors */
/* Elements [from, from + n) in the order of the shape, as they lie in the file; the range is the
 * caller's promise. MB_ECORRUPT if the file has become shorter. */
int mb_torch_read(struct mb_torch_file *f, const struct mb_torch_tensor *t, uint64_t from, size_t n,
                  void *out, struct mb_err *err);
/* Where the storage of a tensor lies: bytes of the zip. *crc32 0: torch did not compute it. */
void mb_torch_place(const struct mb_torch_file *f, const struct mb_torch_tensor *t, uint64_t *at,
                    uint64_t *n, uint32_t *crc32);
/* Who wants to hear that a long reading goes on: cb is called after each storage; what it returns
 * ends the reading unless it is 0. */
struct mb_torch_watch {
    int (*cb)(void *arg, struct mb_err *err);
    void *arg;
};
/* Reads the storages of all tensors, or, with only [n_tensors], of those that have a 1 there:
 * MB_ECORRUPT if a checksum is another. watch may be NULL. */
int mb_torch_verify(const struct mb_torch_file *f, const uint8_t *only,
                    const struct mb_torch_watch *watch, struct mb_err *err);

#endif
