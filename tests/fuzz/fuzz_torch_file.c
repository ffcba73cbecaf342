/* Any bytes as a file of torch.save: the first byte says whether they are the zip, or the pickle in
 * one with a storage of 64 bytes. Refused, or every element of every tensor can be read. */
#include <stdint.h>
#include <stdlib.h>
#include "../unit/worker/stored_zip.h"
#include "worker/checkpoint/megatron/torch_file.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { STORAGE_BYTES = 64, READ_MAX = 1 << 16, TENSORS_READ_MAX = 16 };

static void must(int ok)
{
    if (!ok) {
        abort();
    }
}

/* All of it, or as much of its beginning and end as is quick. */
static void read_tensor(struct mb_torch_file *f, const struct mb_torch_tensor *t)
{
    struct mb_err err;
    const size_t most = READ_MAX / mb_st_dtype_size(t->dtype);
    const size_t k = t->n < most ? (size_t)t->n : most;
    uint8_t *out = malloc(READ_MAX);
    must(out != NULL && mb_torch_read(f, t, 0, k, out, &err) == 0);
    must(mb_torch_read(f, t, t->n - k, k, out, &err) == 0);
    free(out);
}

static void read_file(const void *p, size_t n)
{
    struct mb_torch_file *f;
    struct mb_err err;
    if (mb_torch_open_fd("fuzz", stored_zip_fd(p, n), &f, &err) != 0) {
        return;
    }
    for (size_t i = 0; i < mb_torch_n_tensors(f) && i < TENSORS_READ_MAX; i++) {
        read_tensor(f, mb_torch_tensor(f, i));
    }
    (void)mb_torch_verify(f, NULL, NULL, &err);
    mb_torch_close(f);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint8_t storage[STORAGE_BYTES];
    struct stored_zip z = {0};
    if (size == 0) {
        return 0;
    }
    if (data[0] == 'p') {
        stored_zip_put(&z, "a/data.pkl", data + 1, size - 1, 0);
        stored_zip_put(&z, "a/data/0", storage, sizeof storage, 0);
        stored_zip_end(&z, 0);
        read_file(z.bytes.data, z.bytes.len);
        stored_zip_close(&z);
    } else {
        read_file(data + 1, size - 1);
    }
    return 0;
}
