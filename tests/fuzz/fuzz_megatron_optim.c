/* Any bytes as the files of an iteration of Megatron-LM's, its optimizer among them: a byte that
 * says which file, three of its length, its bytes, and so on. Refused, or every weight and moment
 * can be read; and without its optimizer, if that is what is wrong. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "worker/checkpoint/weights.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerInitialize(int *argc, char ***argv);

enum { HEAD_BYTES = 4, FILES = 9, PATH_BYTES = 128, READ_MAX = 64 };

static const char *const NAMES[FILES] = {"mp_rank_00/model_optim_rng.pt",
                                         "mp_rank_00/distrib_optim.pt",
                                         "mp_rank_01/model_optim_rng.pt",
                                         "mp_rank_01/distrib_optim.pt",
                                         "metadata.json",
                                         ".metadata",
                                         "common.pt",
                                         "__0_0.distcp",
                                         "__0_1.distcp"};
static const char *const DIRECTORIES[] = {"mp_rank_00", "mp_rank_01"};
static char dir[] = "/dev/shm/mobula-fuzz-XXXXXX";

static void must(int ok)
{
    if (!ok) {
        abort();
    }
}

static void path_of(const char *name, char out[PATH_BYTES])
{
    snprintf(out, PATH_BYTES, "%s/%s", dir, name);
}

static void clear(void)
{
    char path[PATH_BYTES];
    for (size_t i = 0; i < FILES; i++) {
        path_of(NAMES[i], path);
        unlink(path);
    }
    for (size_t i = 0; i < sizeof DIRECTORIES / sizeof *DIRECTORIES; i++) {
        path_of(DIRECTORIES[i], path);
        rmdir(path);
    }
}

static void remove_all(void)
{
    clear();
    rmdir(dir);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc, (void)argv;
    must(mkdtemp(dir) != NULL);
    atexit(remove_all);
    return 0;
}

static void write_file(size_t which, const uint8_t *p, size_t n)
{
    char path[PATH_BYTES];
    if (strchr(NAMES[which], '/') != NULL) {
        path_of(DIRECTORIES[which / 2], path);
        mkdir(path, 0700);
    }
    path_of(NAMES[which], path);
    FILE *f = fopen(path, "wb");
    must(f != NULL && fwrite(p, 1, n, f) == n && fclose(f) == 0);
}

static void write_files(const uint8_t *data, size_t size)
{
    for (size_t at = 0; size - at >= HEAD_BYTES;) {
        const uint8_t *p = data + at;
        const size_t said = (size_t)p[1] | (size_t)p[2] << 8 | (size_t)p[3] << 16;
        const size_t left = size - at - HEAD_BYTES, n = said < left ? said : left;
        write_file(p[0] % FILES, p + HEAD_BYTES, n);
        at += HEAD_BYTES + n;
    }
}

/* Beginning and end of each tensor. kind -1: of the weights. */
static void read_all(struct mb_shards *s, int kind)
{
    struct mb_err err;
    float out[READ_MAX];
    for (size_t i = 0; i < mb_shards_n_tensors(s); i++) {
        const struct mb_st_tensor *t = mb_shards_tensor(s, i);
        const uint64_t n = (t->end - t->begin) / sizeof(float);
        const size_t k = n < READ_MAX ? (size_t)n : READ_MAX;
        for (int end = 0; end < 2; end++) {
            const uint64_t from = end ? n - k : 0;
            must((kind < 0 ? mb_shards_read(s, t, from, k, out, &err)
                           : mb_shards_read_state(s, (enum mb_shards_state)kind, t, from, k, out,
                                                  &err)) == 0);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mb_shards *s = NULL;
    struct mb_checkpoint_state state;
    struct mb_err err;
    clear();
    write_files(data, size);
    if (mb_shards_open(dir, &s, &err) != 0) {
        return 0;
    }
    if (mb_weights_state(s, dir, mb_shards_iteration(s) > 0 ? mb_shards_iteration(s) : 1, &state,
                         &err) == 0) {
        must(!state.has_optimizer || state.optimizer_refused.code == 0);
        must(state.has_optimizer == (mb_shards_optimizer(s) != NULL));
        for (int kind = 0; state.has_optimizer && kind < MB_SHARDS_STATES; kind++) {
            read_all(s, kind);
        }
    }
    mb_checkpoint_state_close(&state);
    read_all(s, -1);
    (void)mb_shards_verify(s, NULL, &err);
    mb_shards_close(s);
    return 0;
}
