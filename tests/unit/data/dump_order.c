/*
 * Prints what the data path decides, as text, for the comparison with tests/integration/data:
 *
 *   dump_order order KEY=VALUE... PREFIX...   indices, samples and tokens of each split
 *   dump_order randperm SEED N
 *   dump_order read PREFIX                    documents of an index, one line of ids per sequence
 *   dump_order write PREFIX VOCAB             the reverse: "document" and "sequence ID..." lines on
 * stdin
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "worker/data/loader.h"
#include "worker/data/random.h"

static int fail(const struct mb_err *err)
{
    fprintf(stderr, "%s\n", err->text);
    return 1;
}

static uint64_t number_of(int argc, char **argv, const char *key, uint64_t otherwise)
{
    size_t n = strlen(key);

    for (int i = 0; i < argc; i++) {
        if (strncmp(argv[i], key, n) == 0 && argv[i][n] == '=')
            return strtoull(argv[i] + n + 1, NULL, 10);
    }
    return otherwise;
}

static const char *text_of(int argc, char **argv, const char *key)
{
    size_t n = strlen(key);

    for (int i = 0; i < argc; i++) {
        if (strncmp(argv[i], key, n) == 0 && argv[i][n] == '=')
            return argv[i] + n + 1;
    }
    return NULL;
}

static void print_indices(const struct mb_loader *l)
{
    struct mb_dataset_indices x;

    mb_dataset_get_indices(mb_loader_dataset(l), &x);
    printf("n_samples %llu\n", (unsigned long long)x.n_samples);
    if (x.blend_dataset != NULL) {
        printf("blend");
        for (uint64_t i = 0; i < x.n_samples; i++)
            printf(" %d %lld", (int)x.blend_dataset[i], (long long)x.blend_sample[i]);
        printf("\n");
        return;
    }
    printf("epochs %llu %d\ndocuments", (unsigned long long)x.n_epochs, x.separate_final_epoch);
    for (uint64_t i = 0; i < x.n_documents; i++)
        printf(" %d", (int)x.document_index[i]);
    printf("\nstarts");
    for (uint64_t i = 0; i <= x.n_samples; i++)
        printf(" %u %u", x.sample_index[i].position, x.sample_index[i].offset);
    printf("\nshuffle");
    for (uint64_t i = 0; i < x.n_samples; i++)
        printf(" %u", x.shuffle_index[i]);
    printf("\n");
}

static int print_batches(struct mb_loader *l, const struct mb_data_options *o, uint64_t n_batches)
{
    size_t n = (size_t)(o->micro_batch_size * o->seq_length);
    int32_t *tokens = mb_calloc(n, sizeof(*tokens));
    int32_t *labels = mb_calloc(n, sizeof(*labels));
    int32_t *positions = mb_calloc(n, sizeof(*positions));
    float *mask = mb_calloc(n, sizeof(*mask));
    struct mb_err err = {0};
    int rc = 0;

    for (uint64_t b = 0; rc == 0 && b < n_batches; b++) {
        rc = mb_loader_next(l, tokens, labels, mask, positions, &err);
        if (rc == MB_ESTATE) {
            printf("end\n");
            rc = 0;
            break;
        }
        if (rc != 0) {
            fail(&err);
            break;
        }
        printf("samples");
        for (uint32_t i = 0; i < o->micro_batch_size; i++)
            printf(" %llu", (unsigned long long)mb_loader_last_samples(l)[i]);
        printf("\nitems");
        for (size_t i = 0; i < n; i++)
            printf(" %d %d %d %d", tokens[i], labels[i], (int)mask[i], positions[i]);
        printf("\n");
    }
    mb_free(tokens);
    mb_free(labels);
    mb_free(positions);
    mb_free(mask);
    return rc;
}

static int order(int argc, char **argv)
{
    struct mb_data_options o = {
        .split = text_of(argc, argv, "split"),
        .mock = (int)number_of(argc, argv, "mock", 0),
        .seq_length = number_of(argc, argv, "seq", 8),
        .seed = (uint32_t)number_of(argc, argv, "seed", 1234),
        .n_samples = {number_of(argc, argv, "train", 0), number_of(argc, argv, "valid", 0),
                      number_of(argc, argv, "test", 0)},
        .consumed_samples = {number_of(argc, argv, "consumed", 0), 0, 0},
        .micro_batch_size = (uint32_t)number_of(argc, argv, "mbs", 1),
        .dp_rank = (uint32_t)number_of(argc, argv, "rank", 0),
        .dp_size = (uint32_t)number_of(argc, argv, "dp", 1),
        .no_data_sharding = (int)number_of(argc, argv, "nosharding", 0),
        .eod_mask_loss = (int)number_of(argc, argv, "eodmask", 0),
        .reset_position_ids = (int)number_of(argc, argv, "resetpos", 0),
        .vocab_size = number_of(argc, argv, "vocab", 0),
        .eod = (int32_t)number_of(argc, argv, "eod", 0),
    };
    const char *type = text_of(argc, argv, "type"), *blend = text_of(argc, argv, "blend");
    struct mb_data_sources *sources = NULL;
    struct mb_loader *loaders[MB_N_SPLITS];
    struct mb_err err = {0};
    int first = 0;
    int rc;

    if (mb_sampler_type_parse(type != NULL ? type : "single", &o.dataloader_type, &err) != 0)
        return fail(&err);
    o.blend_sizes = mb_blend_sizes_of(blend != NULL ? blend : "0.11");
    while (first < argc && strchr(argv[first], '=') != NULL)
        first++;
    o.data_path.items = (const char *const *)(argv + first);
    o.data_path.n_items = (size_t)(argc - first);
    rc = mb_data_open(&o, &sources, &err);
    if (rc == 0)
        rc = mb_loaders_build(&o, sources, loaders, &err);
    mb_data_close(sources);
    if (rc != 0)
        return fail(&err);
    for (int i = 0; i < MB_N_SPLITS; i++) {
        if (loaders[i] == NULL)
            continue;
        printf("split %s\n", mb_split_name((enum mb_split)i));
        print_indices(loaders[i]);
        if (rc == 0)
            rc = print_batches(loaders[i], &o, number_of(argc, argv, "batches", 0));
    }
    for (int i = 0; i < MB_N_SPLITS; i++)
        mb_loader_destroy(loaders[i]);
    return rc != 0;
}

static int randperm(const char *seed, const char *n_text)
{
    uint64_t n = strtoull(n_text, NULL, 10);
    uint32_t *a = mb_calloc((size_t)n, sizeof(*a));
    struct mb_err err = {0};
    int rc = mb_randperm((uint32_t)strtoul(seed, NULL, 10), n, a, &err);

    for (uint64_t i = 0; rc == 0 && i < n; i++)
        printf("%u\n", a[i]);
    mb_free(a);
    return rc == 0 ? 0 : fail(&err);
}

static int read_back(const char *prefix)
{
    struct mb_index *x;
    struct mb_err err = {0};

    if (mb_index_open(prefix, &x, &err) != 0)
        return fail(&err);
    for (uint64_t d = 0; d < mb_index_n_documents(x); d++) {
        printf("document\n");
        for (uint64_t s = mb_index_document_start(x, d); s < mb_index_document_start(x, d + 1);
             s++) {
            uint64_t n = (uint64_t)mb_index_length(x, s);
            int32_t *ids = mb_calloc((size_t)n + 1, sizeof(*ids));
            if (mb_index_read(x, s, 0, n, 0, ids, &err) != 0)
                return fail(&err);
            printf("sequence");
            for (uint64_t i = 0; i < n; i++)
                printf(" %d", ids[i]);
            printf("\n");
            mb_free(ids);
        }
    }
    mb_index_unref(x);
    return 0;
}

static int write_from_stdin(const char *prefix, const char *vocab)
{
    struct mb_index_writer *w;
    struct mb_err err = {0};
    char *line = NULL;
    size_t cap = 0;
    int is_open = 0;
    int rc = mb_index_writer_create(prefix, mb_index_dtype_for_vocab(strtoull(vocab, NULL, 10)), &w,
                                    &err);

    if (rc != 0)
        return fail(&err);
    while (rc == 0 && getline(&line, &cap, stdin) > 0) {
        int32_t ids[4096];
        size_t n = 0;
        char *rest = line;

        if (strncmp(line, "document", 8) == 0) {
            rc = is_open ? mb_index_writer_end_document(w, &err) : 0;
            is_open = 1;
            continue;
        }
        rest += strlen("sequence");
        for (char *end; n < 4096; rest = end, n++) {
            long id = strtol(rest, &end, 10);
            if (end == rest)
                break;
            ids[n] = (int32_t)id;
        }
        rc = mb_index_writer_add(w, ids, n, &err);
    }
    free(line);
    if (rc == 0 && is_open)
        rc = mb_index_writer_end_document(w, &err);
    if (rc == 0)
        rc = mb_index_writer_commit(w, &err);
    mb_index_writer_destroy(w);
    return rc == 0 ? 0 : fail(&err);
}

int main(int argc, char **argv)
{
    if (argc >= 3 && strcmp(argv[1], "order") == 0)
        return order(argc - 2, argv + 2);
    if (argc == 4 && strcmp(argv[1], "randperm") == 0)
        return randperm(argv[2], argv[3]);
    if (argc == 3 && strcmp(argv[1], "read") == 0)
        return read_back(argv[2]);
    if (argc == 4 && strcmp(argv[1], "write") == 0)
        return write_from_stdin(argv[2], argv[3]);
    fprintf(stderr, "usage: dump_order order|randperm|read|write ...\n");
    return 2;
}
