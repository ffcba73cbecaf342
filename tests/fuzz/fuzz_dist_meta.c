/* Any bytes as .metadata of torch.distributed.checkpoint: refused, or each element of each tensor
 * lies in one chunk, which has a file; of the optimizer's there may be some that say why not. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "worker/checkpoint/megatron/dist_meta.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { STEPS_MAX = 256 };

static void must(int ok)
{
    if (!ok) {
        abort();
    }
}

static void check_tensor(const struct mb_dist_meta *m, const struct mb_dist_tensor *t)
{
    uint64_t at_element = 0;
    if (t->is_wrong != NULL) {
        must(t->is_of_optimizer);
        return;
    }
    must(mb_dist_meta_find(m, t->name) == t || t->is_of_optimizer);
    if (t->is_object) {
        must(t->is_of_optimizer && t->n_chunks == 1 && t->chunks->is_there);
        must(t->chunks->file < m->n_files);
        return;
    }
    for (int i = 0; i < STEPS_MAX && at_element < t->n; i++) {
        size_t k;
        uint64_t at;
        const uint64_t run = mb_dist_place(t, at_element, &k, &at);
        must(k < t->n_chunks && run > 0 && at < t->chunks[k].n && run <= t->chunks[k].n - at);
        must(run <= t->n - at_element);
        must(t->chunks[k].is_there && t->chunks[k].file < m->n_files);
        at_element += run;
    }
    size_t k;
    uint64_t at;
    must(mb_dist_place(t, t->n - 1, &k, &at) == 1 && at == t->chunks[k].n - 1);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mb_dist_meta m;
    struct mb_err err;
    if (mb_dist_meta_parse("fuzz", data, size, &m, &err) != 0) {
        return 0;
    }
    for (size_t i = 0; i < m.n_files; i++) {
        must(strchr(m.files[i], '/') == NULL && m.files[i][0] != '\0');
    }
    for (size_t i = 0; i < m.n_tensors; i++) {
        check_tensor(&m, &m.tensors[i]);
    }
    mb_dist_meta_close(&m);
    return 0;
}
