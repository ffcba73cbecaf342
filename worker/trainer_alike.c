/*
 * Whether the ranks have the same data, and tokenizers of the same size.
 *
 *  1. Each rank describes what --data-path names: per prefix counts, sizes and a checksum of the
 *     .idx. One number of all that is compared: that is all where they are alike.
 *  2. Else all descriptions are gathered, prefix by prefix, and the first difference is named: what
 *     most ranks have is taken for right, of as many the lower rank's.
 * The .bin is compared by its size alone: to read it would take as long as to train on it.
 * Failures: data that differ, found by all ranks alike; memory; the communicator.
 */
#include <inttypes.h>
#include <string.h>
#include "base/alloc.h"
#include "base/checksum.h"
#include "worker/trainer.h"
#include "worker/trainer_alike.h"

/* In the order in which a difference is looked for. */
enum fact { DOCUMENTS, SEQUENCES, TOKENS, DTYPE, IDX_BYTES, BIN_BYTES, CHECKSUM, N_FACTS };

static const struct {
    const char *file, *what;
} FACTS[N_FACTS] = {
    [DOCUMENTS] = {".idx", "documents"},
    [SEQUENCES] = {".idx", "sequences"},
    [TOKENS] = {".idx", "tokens"},
    [DTYPE] = {".idx", "as the code of its numbers' type"},
    [IDX_BYTES] = {".idx", "bytes"},
    [BIN_BYTES] = {".bin", "bytes"},
    [CHECKSUM] = {".idx", "as its checksum (CRC64-NVME)"},
};

static void describe(const struct mb_index *x, int64_t out[N_FACTS])
{
    out[DOCUMENTS] = (int64_t)mb_index_n_documents(x);
    out[SEQUENCES] = (int64_t)mb_index_n_sequences(x);
    out[TOKENS] = (int64_t)mb_index_n_tokens(x);
    out[DTYPE] = (int64_t)mb_index_dtype(x);
    out[IDX_BYTES] = (int64_t)mb_index_idx_bytes(x);
    out[BIN_BYTES] = (int64_t)mb_index_bin_bytes(x);
    out[CHECKSUM] = (int64_t)mb_index_checksum(x);
}

int mb_data_facts_make(const struct mb_data_sources *s, struct mb_data_facts *out,
                       struct mb_err *err)
{
    out->n = mb_data_n_indices(s);
    out->facts = mb_calloc(out->n * N_FACTS + 1, sizeof *out->facts);
    if (out->facts == NULL) {
        return mb_err_set(err, MB_ENOMEM, "comparing the ranks' data: out of memory");
    }
    for (size_t i = 0; i < out->n; i++) {
        describe(mb_data_index(s, i), out->facts + i * N_FACTS);
    }
    return 0;
}

void mb_data_facts_close(struct mb_data_facts *f)
{
    mb_free(f->facts);
    *f = (struct mb_data_facts){0};
}

int mb_trainer_is_everybodys(struct mb_trainer *t, uint64_t number, int *out, struct mb_err *err)
{
    int64_t most[2]; /* of the numbers, and of their complements: the smallest's */
    most[0] = (int64_t)number;
    most[1] = (int64_t)~number;
    mb_comm_allreduce(t->comm, NULL, most, 2, MB_COMM_I64, MB_COMM_MAX);
    int rc = mb_comm_synchronize(t->comm, err);
    *out = most[0] == ~most[1];
    return rc;
}

/* all: room for n of each rank. */
static int gather(struct mb_trainer *t, const int64_t *own, size_t n, int64_t *all,
                  struct mb_err *err)
{
    memcpy(all + t->rank * n, own, n * sizeof *own);
    mb_comm_allgather(t->comm, NULL, all, t->world_size * n, MB_COMM_I64);
    return mb_comm_synchronize(t->comm, err);
}

/* The rank whose number most ranks have, and the first that has another; n: of a rank. 0: all have
 * the same. */
static uint32_t find_odd(const int64_t *all, size_t n, size_t fact, uint32_t world, uint32_t *most,
                         uint32_t *odd)
{
    uint32_t best = 0, n_odd = 0;
    for (uint32_t r = 0; r < world; r++) {
        uint32_t n_alike = 0;
        for (uint32_t k = 0; k < world; k++) {
            n_alike += all[k * n + fact] == all[r * n + fact];
        }
        if (n_alike > best) {
            best = n_alike;
            *most = r;
        }
    }
    for (uint32_t r = world; r-- > 0;) {
        if (all[r * n + fact] != all[*most * n + fact]) {
            *odd = r;
            n_odd++;
        }
    }
    return n_odd;
}

static int refuse(struct mb_trainer *t, const char *what, struct mb_err *err)
{
    t->everybody_knows = 1;
    return mb_err_set(err, MB_EINVAL, "ranks have different data: %s", what);
}

static int compare_counts(struct mb_trainer *t, size_t n, int64_t *all, struct mb_err *err)
{
    char text[160];
    const int64_t own = (int64_t)n;
    uint32_t most = 0, odd = 0;
    int rc = gather(t, &own, 1, all, err);
    if (rc != 0 || find_odd(all, 1, 0, t->world_size, &most, &odd) == 0) {
        return rc;
    }
    snprintf(text, sizeof text,
             "rank %" PRIu32 " was given %" PRId64 " prefixes, rank %" PRIu32 " %" PRId64, odd,
             all[odd], most, all[most]);
    return refuse(t, text, err);
}

/* Of one prefix. */
static int compare_prefix(struct mb_trainer *t, const char *prefix, const int64_t *own,
                          int64_t *all, struct mb_err *err)
{
    char *text = NULL;
    uint32_t most = 0, odd = 0;
    int rc = gather(t, own, N_FACTS, all, err);
    for (size_t k = 0; k < N_FACTS && rc == 0; k++) {
        const uint32_t n_odd = find_odd(all, N_FACTS, k, t->world_size, &most, &odd);
        if (n_odd == 0) {
            continue;
        }
        text =
            mb_asprintf("%s%s of rank %" PRIu32 " has %" PRIu64 " %s, that of rank %" PRIu32
                        " %" PRIu64 " (%" PRIu32 " of %" PRIu32 " ranks differ)",
                        prefix, FACTS[k].file, odd, (uint64_t)all[odd * N_FACTS + k], FACTS[k].what,
                        most, (uint64_t)all[most * N_FACTS + k], n_odd, t->world_size);
        rc = text != NULL ? refuse(t, text, err)
                          : mb_err_set(err, MB_ENOMEM, "comparing the ranks' data: out of memory");
    }
    mb_free(text);
    return rc;
}

int mb_trainer_compare_tokenizers(struct mb_trainer *t, struct mb_err *err)
{
    enum { N = 2 };
    static const char *const WHAT[N] = {"as its number of tokens", "as its end of a document"};
    const int64_t own[N] = {(int64_t)t->vocab_size, t->eod};
    uint32_t most = 0, odd = 0;
    int64_t *all = mb_calloc((size_t)t->world_size * N, sizeof *all);
    int rc = all != NULL ? gather(t, own, N, all, err)
                         : mb_err_set(err, MB_ENOMEM, "comparing the tokenizers: out of memory");
    for (size_t k = 0; k < N && rc == 0; k++) {
        const uint32_t n_odd = find_odd(all, N, k, t->world_size, &most, &odd);
        if (n_odd > 0) {
            t->everybody_knows = 1;
            rc = mb_err_set(err, MB_EINVAL,
                            "ranks have different tokenizers: that of rank %" PRIu32 " has %" PRId64
                            " %s, that of rank %" PRIu32 " %" PRId64 " (%" PRIu32 " of %" PRIu32
                            " ranks differ)",
                            odd, all[odd * N + k], WHAT[k], most, all[most * N + k], n_odd,
                            t->world_size);
        }
    }
    mb_free(all);
    return rc;
}

int mb_trainer_name_odd(struct mb_trainer *t, uint64_t digest, struct mb_err *err)
{
    char text[160];
    const int64_t own = (int64_t)digest;
    uint32_t most = 0, odd = 0;
    int64_t *all = mb_calloc(t->world_size, sizeof *all);
    int rc = all != NULL ? gather(t, &own, 1, all, err)
                         : mb_err_set(err, MB_ENOMEM, "comparing the ranks' data: out of memory");
    if (rc == 0) {
        const uint32_t n_odd = find_odd(all, 1, 0, t->world_size, &most, &odd);
        snprintf(text, sizeof text,
                 "rank %" PRIu32 " draws samples in another order than rank %" PRIu32 " (%" PRIu32
                 " of %" PRIu32 " ranks differ): other weights or splits",
                 odd, most, n_odd, t->world_size);
        rc = refuse(t, text, err);
    }
    mb_free(all);
    return rc;
}

int mb_trainer_compare_data(struct mb_trainer *t, const struct mb_data_sources *s,
                            const struct mb_data_facts *f, struct mb_err *err)
{
    const uint64_t n = f->n;
    int is_alike = 0;
    uint64_t sum = mb_crc64nvme(0, &n, sizeof n);
    sum = mb_crc64nvme(sum, f->facts, f->n * N_FACTS * sizeof *f->facts);
    int rc = mb_trainer_is_everybodys(t, sum, &is_alike, err);
    if (rc != 0 || is_alike) {
        return rc;
    }
    int64_t *all = mb_calloc((size_t)t->world_size * N_FACTS, sizeof *all);
    rc = all != NULL ? compare_counts(t, f->n, all, err)
                     : mb_err_set(err, MB_ENOMEM, "comparing the ranks' data: out of memory");
    for (size_t i = 0; i < f->n && rc == 0; i++) {
        rc = compare_prefix(t, mb_index_prefix(mb_data_index(s, i)), f->facts + i * N_FACTS, all,
                            err);
    }
    mb_free(all);
    return rc;
}
