/* Saves of a run as Megatron-LM's files: every number of every rank, the checksums that are told,
 * and every way to fail. The real megatron-core is in
 * tests/integration/worker/test_megatron_save.py. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/checksum.h"
#include "base/fs.h"
#include "base/str.h"
#include "tests/unit/worker/comm_world.h"
#include "worker/checkpoint/watch.h"
#include "worker/checkpoint/weights.h"

enum { WAIT_MS = 60000, ALIGN = 16, GAP = 3, TENSORS_MAX = 64, FILE_MAX = 1 << 24 };

static char ARGS[] =
    "{\"num_layers\": 4, \"hidden_size\": 64, \"num_attention_heads\": 4, \"kv_channels\": 16,"
    "\"swiglu\": true, \"group_query_attention\": true, \"num_query_groups\": 2,"
    "\"max_position_embeddings\": 8, \"padded_vocab_size\": 8192, \"true_vocab_size\": 8001,"
    "\"make_vocab_size_divisible_by\": 8, \"ffn_hidden_size\": 32, \"add_bias_linear\": true,"
    "\"untie_embeddings_and_output_weights\": true, \"world_size\": 12, \"data_parallel_size\": 3,"
    "\"lr\": 0.001, \"min_lr\": 0.0001, \"start_weight_decay\": 0.1, \"end_weight_decay\": 0.1,"
    "\"weight_decay\": 0.1, \"adam_beta1\": 0.9, \"adam_beta2\": 0.95, \"adam_eps\": 1e-8,"
    "\"lr_decay_style\": \"cosine\", \"weight_decay_incr_style\": \"constant\"}";

static char root[] = "/tmp/mobula-torch-save-XXXXXX";
static char dir[64];

/* ---- the model ---- */

static struct mb_megatron_layout shape;
static struct mb_checkpoint_tensor tensors[TENSORS_MAX];
static size_t n_elements;

/* Parts are apart in the flat buffer, as parameters of a model are. */
static void list_tensors(void)
{
    struct mb_err err = {0};
    json_t *args = json_loads(ARGS, 0, NULL);
    assert_non_null(args);
    assert_int_equal(mb_megatron_sizes("here", args, &shape, &err), 0);
    assert_int_equal(mb_megatron_layout_create("here", args, &shape, &err), 0);
    json_decref(args);
    assert_true(shape.n <= TENSORS_MAX);
    for (size_t i = 0; i < shape.n; i++) {
        const struct mb_megatron_tensor *t = &shape.tensors[i];
        const size_t n = t->rows * (t->columns > 0 ? t->columns : 1);
        tensors[i] = (struct mb_checkpoint_tensor){
            t->name, t->columns > 0 ? 2 : 1, {t->rows, t->columns}, n_elements, n};
        n_elements += (n + GAP + ALIGN - 1) / ALIGN * ALIGN;
    }
}

/* Another number for each element, whole in fp32. */
static float value(enum mb_weights_kind what, size_t i)
{
    return (float)(i * 3 + (size_t)what);
}

/* ---- a device ---- */

static atomic_int is_broken;

static void copy(struct mb_context *c, struct mb_stream *s, void *dst, const void *src, size_t n)
{
    (void)c;
    (void)s;
    memcpy(dst, src, n);
}

static int synchronize(struct mb_context *c, struct mb_stream *s, struct mb_err *err)
{
    (void)s;
    return atomic_load(&is_broken) && c != NULL
               ? mb_err_set(err, MB_EIO, "the device fell off the bus")
               : 0;
}

static const struct mb_backend HOST = {
    .name = "host", .copy_in = copy, .copy_out = copy, .synchronize = synchronize};

/* ---- a disk ---- */

int __real_fsync(int fd);
int __wrap_fsync(int fd);
int __real_mkdir(const char *path, mode_t mode);
int __wrap_mkdir(const char *path, mode_t mode);

/* What waits while the disk hangs: a file on its way to it, the iteration's directory on its way,
 * the making of that. */
enum hang { NONE, FILES, DIRECTORY, MAKING };

static const char TEMPORARY[] = ".iter_0000007.tmp";
static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static enum hang hangs;
static int is_stuck;

static void wait_for_the_disk(enum hang what)
{
    pthread_mutex_lock(&gate);
    while (hangs == what) {
        is_stuck = 1;
        pthread_cond_wait(&changed, &gate);
    }
    pthread_mutex_unlock(&gate);
}

int __wrap_fsync(int fd)
{
    char link[64], path[256] = "";
    struct stat st = {0};
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode)) {
        wait_for_the_disk(FILES);
    } else if (readlink(link, path, sizeof path - 1) > 0 && mb_ends_with(path, TEMPORARY)) {
        wait_for_the_disk(DIRECTORY);
    }
    return __real_fsync(fd);
}

int __wrap_mkdir(const char *path, mode_t mode)
{
    if (mb_ends_with(path, TEMPORARY)) {
        wait_for_the_disk(MAKING);
    }
    return __real_mkdir(path, mode);
}

static void set_hangs(enum hang what)
{
    pthread_mutex_lock(&gate);
    hangs = what;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&gate);
}

/* ---- a rank ---- */

struct job {
    int sharded, on_device, without_optimizer;
    struct mb_checkpoint_torch torch;
};

struct rank {
    struct mb_device dev;
    struct mb_checkpoint_model m;
    float *memory;
};

static void begin(struct rank *r, struct mb_comm *c, const struct job *j)
{
    *r = (struct rank){.memory = mb_calloc(3 * n_elements, sizeof(float))};
    r->dev.ops = &HOST;
    r->m = (struct mb_checkpoint_model){.dev = j->on_device ? &r->dev : NULL,
                                        .comm = c,
                                        .tensors = tensors,
                                        .n_tensors = shape.n,
                                        .weights = {.whole = r->memory},
                                        .n_elements = n_elements,
                                        .state_end = n_elements,
                                        .torch = &j->torch};
    for (size_t i = 0; i < n_elements; i++) {
        r->memory[i] = value(MB_WEIGHTS_WEIGHT, i);
    }
    if (j->without_optimizer) {
        return;
    }
    if (j->sharded) {
        mb_comm_range(n_elements, mb_comm_world_size(c), mb_comm_rank(c), &r->m.state_begin,
                      &r->m.state_end);
    }
    r->m.exp_avg = r->memory + n_elements;
    r->m.exp_avg_sq = r->memory + 2 * n_elements;
    for (size_t i = r->m.state_begin; i < r->m.state_end; i++) {
        r->m.exp_avg[i - r->m.state_begin] = value(MB_WEIGHTS_EXP_AVG, i);
        r->m.exp_avg_sq[i - r->m.state_begin] = value(MB_WEIGHTS_EXP_AVG_SQ, i);
    }
}

static struct mb_checkpoint_state state_of(int64_t iteration)
{
    return (struct mb_checkpoint_state){.iteration = iteration,
                                        .consumed_train_samples = 56,
                                        .consumed_valid_samples = 6,
                                        .optimizer_steps = 5,
                                        .skipped_iterations = 2,
                                        .schedule_samples = 40,
                                        .warmup_samples = 16,
                                        .decay_samples = 160,
                                        .has_grad_scaler = 1,
                                        .loss_scale = 4096,
                                        .growth_tracker = 3,
                                        .hysteresis_tracker = 1,
                                        .args_json = ARGS};
}

static int tracker(void)
{
    int64_t found = -1;
    struct mb_err err;
    return mb_checkpoint_read_tracker(dir, &found, &err) == 0 ? (int)found : -1;
}

/* ---- what is there ---- */

/* Size and checksum, as they are told. */
static void check_file(const char *iter_dir, const struct mb_checkpoint_file *f)
{
    struct mb_buf bytes = {0};
    struct mb_err err;
    char *path = mb_path_join(iter_dir, f->path);
    CHECK(mb_fs_read(path, FILE_MAX, &bytes, &err) == 0);
    CHECK(bytes.len == f->size_bytes);
    CHECK(mb_crc64nvme(0, bytes.data, bytes.len) == f->crc64nvme);
    mb_buf_close(&bytes);
    mb_free(path);
}

static void check_state(const struct job *j, struct mb_shards *s, const char *iter_dir)
{
    struct mb_checkpoint_state got, want = state_of(7);
    struct mb_err err = {0};
    const int with_scaler = j->torch.dtype == MB_ST_F16;
    json_error_t je;
    CHECK(mb_weights_state(s, iter_dir, 7, &got, &err) == 0);
    CHECK(got.has_optimizer && got.iteration == 7 && got.optimizer_steps == want.optimizer_steps);
    CHECK(got.consumed_train_samples == 56 && got.consumed_valid_samples == 6);
    CHECK(got.skipped_iterations == want.skipped_iterations);
    CHECK(got.schedule_samples == want.schedule_samples);
    CHECK(got.warmup_samples == want.warmup_samples && got.decay_samples == want.decay_samples);
    CHECK(got.has_grad_scaler == with_scaler && (!with_scaler || got.loss_scale == 4096));
    CHECK(!with_scaler || (got.growth_tracker == 3 && got.hysteresis_tracker == 1));
    json_t *args = json_loads(got.args_json, 0, &je); /* of the run, not of the files */
    CHECK(json_integer_value(json_object_get(args, "world_size")) == 12);
    CHECK(json_integer_value(json_object_get(args, "data_parallel_size")) == 3);
    CHECK(json_integer_value(json_object_get(args, "padded_vocab_size")) == 8192);
    json_decref(args);
    mb_checkpoint_state_close(&got);
}

static void check_numbers(const struct job *j)
{
    static const enum mb_shards_state STATES[] = {MB_SHARDS_EXP_AVG, MB_SHARDS_EXP_AVG_SQ,
                                                  MB_SHARDS_MASTER};
    char *iter_dir = mb_weights_dir(dir, 7);
    struct mb_shards *s = NULL;
    struct mb_err err = {0};
    CHECK(mb_shards_open(iter_dir, &s, &err) == 0);
    CHECK(mb_shards_n_files(s) == j->torch.tp * j->torch.pp);
    CHECK(mb_shards_n_tensors(s) == shape.n);
    check_state(j, s, iter_dir);
    for (size_t i = 0; i < shape.n; i++) {
        const struct mb_checkpoint_tensor *t = &tensors[i];
        const struct mb_st_tensor *theirs = mb_shards_find(s, t->name);
        float *got = mb_calloc(t->n, sizeof *got);
        size_t n_bad = 0;
        for (int k = 0; k < 3; k++) {
            CHECK(mb_shards_read_state(s, STATES[k], theirs, 0, t->n, got, &err) == 0);
            for (size_t e = 0; e < t->n; e++) {
                n_bad += got[e] != value((enum mb_weights_kind)k, t->offset + e);
            }
        }
        CHECK(n_bad == 0);
        mb_free(got);
    }
    mb_shards_close(s);
    mb_free(iter_dir);
}

/* ---- any world ---- */

static void save_and_check(struct mb_comm *c, void *arg)
{
    const struct job *j = arg;
    struct rank r;
    struct mb_err err = {0};
    struct mb_checkpoint_saved saved;
    struct mb_checkpoint_state s = state_of(7);
    begin(&r, c, j);
    CHECK(mb_checkpoint_save(&r.m, dir, &s, &saved, &err) == 0);
    CHECK(saved.n_files == (mb_comm_rank(c) == 0 ? j->torch.tp * j->torch.pp : 0));
    for (size_t i = 0; i < saved.n_files; i++) {
        check_file(saved.dir, &saved.files[i]);
    }
    mb_checkpoint_saved_close(&saved);
    mb_free(r.memory);
}

static void every_number_of_every_rank(void **state)
{
    (void)state;
    static const enum mb_st_dtype DTYPES[] = {MB_ST_F32, MB_ST_BF16};
    for (uint32_t n = 1; n <= 3; n++) {
        for (int how = 0; how < 4; how++) {
            struct job j = {.sharded = how & 1,
                            .on_device = how >> 1,
                            .torch = {.tp = how & 1 ? 2 : 1,
                                      .pp = how >> 1 ? 2 : 1,
                                      .n_chunks = how >> 1 && n != 2 ? 2 : 1,
                                      .dtype = DTYPES[how & 1],
                                      .is_local = how & 1}};
            struct comm_world w = {
                .n = n, .timeout_ms = WAIT_MS, .body = save_and_check, .arg = &j};
            assert_int_equal(comm_world_run(&w), 0);
            check_numbers(&j);
            assert_int_equal(tracker(), 7);
            assert_int_equal(atomic_load(&comm_world_wrong), 0);
            assert_int_equal(mb_fs_remove_tree(dir, NULL), 0);
        }
    }
}

static struct job SHARDED = {.sharded = 1, .on_device = 1, .torch = {2, 2, 1, MB_ST_F32, 0}};

/* Rank 1's device, whose moments rank 0 asks for: all hear of it, and nobody waits. */
static void one_copy_fails(struct mb_comm *c, void *arg)
{
    struct rank r;
    struct mb_err err = {0};
    struct mb_checkpoint_saved saved;
    struct mb_checkpoint_state s = state_of(7);
    begin(&r, c, arg);
    CHECK(mb_checkpoint_save(&r.m, dir, &s, &saved, &err) == 0);
    mb_checkpoint_saved_close(&saved);
    const int is_the_one = mb_comm_rank(c) == 1;
    if (is_the_one) {
        r.dev.ctx = (struct mb_context *)&r; /* which it is by */
        atomic_store(&is_broken, 1);
    }
    s = state_of(8);
    CHECK(mb_checkpoint_save(&r.m, dir, &s, &saved, &err) == (is_the_one ? MB_EIO : MB_EUNAVAIL));
    CHECK(strstr(err.text, is_the_one ? "fell off the bus" : "rank 1 failed") != NULL);
    mb_free(r.memory);
}

static void a_copy_that_fails_is_told(void **state)
{
    (void)state;
    struct comm_world w = {.n = 2, .timeout_ms = WAIT_MS, .body = one_copy_fails, .arg = &SHARDED};
    assert_int_equal(comm_world_run(&w), 0);
    atomic_store(&is_broken, 0);
    assert_int_equal(atomic_load(&comm_world_wrong), 0);
    assert_int_equal(tracker(), 7);
    char command[128];
    snprintf(command, sizeof command, "test \"$(ls -A %s | wc -l)\" = 2", dir); /* nothing hidden */
    assert_int_equal(system(command), 0);
    check_numbers(&SHARDED);
    assert_int_equal(mb_fs_remove_tree(dir, NULL), 0);
}

static struct rank stuck[2];
static struct mb_checkpoint_progress progress[2];
static struct mb_checkpoint_state states[2]; /* each rank's own */

/* The writer is left alone, and ends when the disk comes back: what it uses stays until then. */
static void the_disk_hangs(struct mb_comm *c, void *arg)
{
    const uint32_t rank = mb_comm_rank(c);
    struct rank *r = &stuck[rank];
    struct mb_err err = {0};
    struct mb_checkpoint_saved saved;
    begin(r, c, arg);
    r->m.dev = NULL;
    r->m.stall_ms = 200;
    r->m.progress = &progress[rank];
    mb_checkpoint_progress_init(&progress[rank]);
    states[rank] = state_of(7);
    mb_comm_barrier(c);
    CHECK(mb_comm_synchronize(c, &err) == 0);
    int rc = mb_checkpoint_save(&r->m, dir, &states[rank], &saved, &err);
    CHECK(rc == (rank == 0 ? MB_ETIMEOUT : MB_EUNAVAIL));
    CHECK(strstr(err.text, rank == 0 ? "nothing was written for 0.2 s: the disk hangs"
                                     : "rank 0 failed") != NULL);
    CHECK(saved.hangs == (rank == 0));
}

static void it_hangs(enum hang what)
{
    struct comm_world w = {.n = 2, .timeout_ms = WAIT_MS, .body = the_disk_hangs, .arg = &SHARDED};
    set_hangs(what);
    assert_int_equal(comm_world_run(&w), 0);
    assert_int_equal(atomic_load(&comm_world_wrong), 0);
    pthread_mutex_lock(&gate);
    assert_true(is_stuck);
    is_stuck = 0;
    pthread_mutex_unlock(&gate);
    set_hangs(NONE);
    while (!comm_world_is_alone()) { /* until the writer has ended */
        usleep(1000);
    }
    assert_int_equal(tracker(), 0);
    for (int i = 0; i < 2; i++) {
        mb_free(stuck[i].memory);
        mb_checkpoint_progress_close(&progress[i]);
    }
}

static void a_disk_that_hangs_fails_the_save(void **state)
{
    (void)state;
    char partial[128];
    snprintf(partial, sizeof partial, "%s/%s/mp_rank_00_001", dir, TEMPORARY);
    it_hangs(FILES);
    assert_false(mb_fs_exists(partial)); /* it ended there */
    it_hangs(MAKING);
    it_hangs(DIRECTORY);
    assert_true(mb_fs_exists(partial));
    assert_int_equal(mb_fs_remove_tree(dir, NULL), 0);
}

/* A directory of its own has each rank. */
static void save_apart(struct mb_comm *c, void *arg)
{
    struct rank r;
    struct mb_err err = {0};
    struct mb_checkpoint_saved saved;
    struct mb_checkpoint_state s = state_of(7);
    char own[96];
    snprintf(own, sizeof own, "%s%s", dir, mb_comm_rank(c) == 0 ? "" : "-1");
    begin(&r, c, arg);
    CHECK(mb_checkpoint_save(&r.m, own, &s, &saved, &err) == 0);
    CHECK(saved.is_owner == (mb_comm_rank(c) == 0));
    mb_checkpoint_saved_close(&saved);
    mb_free(r.memory);
}

static void only_rank_0_touches_its_disk(void **state)
{
    (void)state;
    struct comm_world w = {.n = 2, .timeout_ms = WAIT_MS, .body = save_apart, .arg = &SHARDED};
    char other[96];
    snprintf(other, sizeof other, "%s-1", dir);
    assert_int_equal(comm_world_run(&w), 0);
    assert_int_equal(atomic_load(&comm_world_wrong), 0);
    check_numbers(&SHARDED);
    assert_false(mb_fs_exists(other));
    assert_int_equal(mb_fs_remove_tree(dir, NULL), 0);
}

/* ---- alone ---- */

static void every_allocation_may_fail(void **state)
{
    (void)state;
    static const struct job J = {.torch = {2, 2, 2, MB_ST_F16, 1}};
    struct mb_comm *c = NULL;
    struct rank r;
    struct mb_err err = {0};
    struct mb_checkpoint_saved saved;
    int failed = 1;
    assert_int_equal(mb_comm_create_single(&c, &err), 0);
    begin(&r, c, &J);
    for (size_t i = 0; i < n_elements; i++) {
        r.memory[i] = (float)(i % 512); /* that has room in halves */
    }
    for (unsigned long nth = 1; failed; nth += 1 + nth / 16) {
        struct mb_checkpoint_state s = state_of(6);
        assert_int_equal(mb_checkpoint_save(&r.m, dir, &s, &saved, &err), 0);
        mb_checkpoint_saved_close(&saved);
        s = state_of(7);
        mb_alloc_fail_nth(nth);
        int rc = mb_checkpoint_save(&r.m, dir, &s, &saved, &err);
        failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        if (rc != 0) {
            assert_int_equal(rc, MB_ENOMEM);
            assert_int_equal(tracker(), 6);
            assert_int_equal(saved.n_files, 0);
        } else {
            assert_int_equal(tracker(), 7); /* also if only a clean-up failed */
            assert_int_equal(saved.n_files, 4);
        }
        mb_checkpoint_saved_close(&saved);
    }
    mb_free(r.memory);
    mb_comm_destroy(c);
    assert_int_equal(mb_fs_remove_tree(dir, NULL), 0);
}

static int set_up(void **state)
{
    (void)state;
    list_tensors();
    if (mkdtemp(root) == NULL) {
        return -1;
    }
    snprintf(dir, sizeof dir, "%s/run", root);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    mb_megatron_layout_close(&shape);
    return mb_fs_remove_tree(root, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_number_of_every_rank),
        cmocka_unit_test(a_copy_that_fails_is_told),
        cmocka_unit_test(every_allocation_may_fail),
        cmocka_unit_test(a_disk_that_hangs_fails_the_save),
        cmocka_unit_test(only_rank_0_touches_its_disk),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
