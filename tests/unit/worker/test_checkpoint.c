/* Checkpoints between gangs of different size, and everything that can be wrong with them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "tests/unit/worker/comm_world.h"
#include "worker/checkpoint/checkpoint.h"
#include "worker/kernels/split.h"

enum { N = 1003 }; /* odd: no world divides it; two tensors and a gap */

static const struct mb_checkpoint_tensor TENSORS[] = {
    {"decoder.a.weight", 2, {20, 30}, 0, 600},
    {"decoder.a.bias", 1, {395, 1}, 608, 395},
};

static char root[] = "/tmp/mobula-ck-XXXXXX";
static char dir[64];

/* Host memory as a device: the operations that a checkpoint uses. */
static void copy(struct mb_context *c, struct mb_stream *s, void *dst, const void *src, size_t n)
{
    (void)c;
    (void)s;
    memcpy(dst, src, n);
}

static int synchronize(struct mb_context *c, struct mb_stream *s, struct mb_err *err)
{
    (void)c;
    (void)s;
    (void)err;
    return 0;
}

static void split(struct mb_context *c, struct mb_stream *s, uint16_t *upper, uint16_t *lower,
                  const float *x, size_t n)
{
    (void)c;
    (void)s;
    for (size_t i = 0; i < n; i++) {
        upper[i] = mb_split_upper(x[i]);
        lower[i] = mb_split_lower(x[i]);
    }
}

static void join(struct mb_context *c, struct mb_stream *s, float *x, const uint16_t *upper,
                 const uint16_t *lower, size_t n)
{
    (void)c;
    (void)s;
    for (size_t i = 0; i < n; i++) {
        x[i] = mb_split_join(upper[i], lower[i]);
    }
}

static const struct mb_backend HOST = {.name = "host",
                                       .copy_in = copy,
                                       .copy_out = copy,
                                       .synchronize = synchronize,
                                       .split = split,
                                       .join = join};

struct job {
    int sharded;        /* the rank holds its range of the optimizer only */
    int save;           /* else load and compare */
    int expected;       /* of save or load on the rank at fault */
    int fault_rank;     /* -1: all well */
    const char *expect; /* in the text of the rank at fault */
    char *per_rank_dir; /* NULL: all share dir */
    int is_stale;       /* save other values of the optimizer */
    uint32_t shared_by; /* so many neighbouring ranks share a model; 0: none */
    int by_columns;     /* they have columns of the first tensor, not rows of its two halves */
    int in_halves;      /* the device has the weights so */
    int by_stages;      /* of two the first has the first tensor, the second a copy and the other */
};

static void part_of_stage(uint32_t place, struct mb_checkpoint_part parts[2],
                          struct mb_checkpoint_layout *out)
{
    const size_t n = TENSORS[0].n, behind = (n + 15) / 16 * 16;
    parts[0] = (struct mb_checkpoint_part){0, n, 0, n, n, place > 0};
    parts[1] = (struct mb_checkpoint_part){0};
    if (place > 0) {
        parts[1] = (struct mb_checkpoint_part){behind, 395, 0, 395, 395, 0};
    }
    *out = (struct mb_checkpoint_layout){.parts = parts, .n_elements = place > 0 ? N : behind};
}

/* What a rank has of the model: place of j->shared_by. */
static void part_of(const struct job *j, uint32_t place, struct mb_checkpoint_part parts[2],
                    struct mb_checkpoint_layout *out)
{
    if (j->by_stages) {
        part_of_stage(place, parts, out);
        return;
    }
    const size_t n = TENSORS[0].n / j->shared_by, stride = j->by_columns ? 30 : 300,
                 run = stride / j->shared_by, behind = (n + 15) / 16 * 16;
    parts[0] = (struct mb_checkpoint_part){0, n, place * run, run, stride, 0};
    parts[1] = (struct mb_checkpoint_part){behind, 395, 0, 395, 395, place > 0};
    *out = (struct mb_checkpoint_layout){.parts = parts, .n_elements = behind + 400};
}

/* The place in the whole flat buffer of an element of the rank's; N: a gap. */
static size_t whole(const struct mb_checkpoint_model *m, size_t i)
{
    for (size_t k = 0; k < 2; k++) {
        const struct mb_checkpoint_part *p = &m->layout->parts[k];
        const size_t e = i - p->offset;
        if (i >= p->offset && e < p->n) {
            return TENSORS[k].offset + p->start + e / p->run * p->stride + e % p->run;
        }
    }
    return N;
}

static int is_gap(size_t i)
{
    return (i >= 600 && i < 608) || i >= N;
}

static float weight(size_t i)
{
    return is_gap(i) ? 0.0f : (float)i * 0.2511f; /* of many bits */
}

/* Of exp_avg, or of exp_avg_sq. */
static float moment(size_t i, int is_square)
{
    return is_gap(i) ? 0.0f : is_square ? (float)i * 3.0f : (float)i + 0.5f;
}

static size_t place_of(const struct mb_checkpoint_model *m, size_t i)
{
    return m->layout != NULL ? whole(m, i) : i;
}

static size_t n_own(const struct mb_checkpoint_model *m)
{
    return m->layout != NULL ? m->layout->n_elements : N;
}

static void fill(struct mb_checkpoint_model *m, int with_values)
{
    float w[N + 16];
    for (size_t i = 0; i < n_own(m); i++) {
        w[i] = with_values ? weight(place_of(m, i)) : -1;
    }
    mb_master_copy_in(m->dev, &m->weights, 0, n_own(m), w);
    for (size_t i = m->state_begin; i < m->state_end; i++) {
        m->exp_avg[i - m->state_begin] = with_values ? moment(place_of(m, i), 0) : -1;
        m->exp_avg_sq[i - m->state_begin] = with_values ? moment(place_of(m, i), 1) : -1;
    }
}

static void compare(const struct mb_checkpoint_model *m)
{
    size_t bad = 0;
    float w[N + 16];
    mb_master_copy_out(m->dev, &m->weights, 0, n_own(m), w);
    for (size_t i = 0; i < n_own(m); i++) {
        bad += !is_gap(place_of(m, i)) && w[i] != weight(place_of(m, i));
    }
    for (size_t i = m->state_begin; i < m->state_end; i++) {
        bad += m->exp_avg[i - m->state_begin] != moment(place_of(m, i), 0);
        bad += m->exp_avg_sq[i - m->state_begin] != moment(place_of(m, i), 1);
    }
    CHECK(bad == 0);
}

static struct mb_master new_weights(int in_halves)
{
    if (!in_halves) {
        return (struct mb_master){.whole = mb_calloc(N, sizeof(float))};
    }
    return (struct mb_master){.upper = mb_calloc(N, sizeof(uint16_t)),
                              .lower = mb_calloc(N, sizeof(uint16_t)),
                              .window = mb_calloc(MB_MASTER_WINDOW, sizeof(float))};
}

static void body(struct mb_comm *c, void *arg)
{
    const struct job *j = arg;
    struct mb_device dev = {.ops = &HOST};
    struct mb_checkpoint_model m = {.dev = &dev,
                                    .comm = c,
                                    .tensors = TENSORS,
                                    .n_tensors = 2,
                                    .n_elements = N,
                                    .state_begin = 0,
                                    .state_end = N};
    struct mb_checkpoint_part parts[2];
    struct mb_checkpoint_layout layout;
    if (j->shared_by > 0) {
        const uint32_t rank = mb_comm_rank(c), n_models = mb_comm_world_size(c) / j->shared_by;
        part_of(j, rank % j->shared_by, parts, &layout);
        mb_comm_range(layout.n_elements, n_models, rank / j->shared_by, &layout.begin, &layout.end);
        m.layout = &layout;
        m.state_begin = j->sharded ? layout.begin : 0;
        m.state_end = j->sharded ? layout.end : layout.n_elements;
    } else if (j->sharded) {
        mb_comm_range(N, mb_comm_world_size(c), mb_comm_rank(c), &m.state_begin, &m.state_end);
    }
    m.weights = new_weights(j->in_halves);
    m.exp_avg = mb_calloc(N, sizeof(float));
    m.exp_avg_sq = mb_calloc(N, sizeof(float));
    struct mb_err err = {0};
    char mine[96];
    snprintf(mine, sizeof mine, "%s", dir);
    if (j->per_rank_dir != NULL) {
        snprintf(mine, sizeof mine, "%s/%s%u", dir, j->per_rank_dir, mb_comm_rank(c));
    }
    struct mb_checkpoint_state s = {.iteration = 12,
                                    .consumed_train_samples = 192,
                                    .consumed_valid_samples = 7,
                                    .optimizer_steps = 11,
                                    .skipped_iterations = 1,
                                    .args_json = (char *)"{\"num_layers\":2}"};
    int rc;
    fill(&m, j->save);
    for (size_t i = 0; j->is_stale && i < m.state_end - m.state_begin; i++) {
        m.exp_avg[i] += 1000;
    }
    if (j->save) {
        struct mb_checkpoint_saved saved;
        rc = mb_checkpoint_save(&m, mine, &s, &saved, &err);
        if (rc == 0) {
            CHECK(saved.n_files == (mb_comm_rank(c) == 0 ? 3 : 1));
            CHECK(strstr(saved.dir, "/iter_0000012") != NULL);
            mb_checkpoint_saved_close(&saved);
        }
    } else {
        struct mb_checkpoint_state got;
        int64_t iteration = -1;
        rc = mb_checkpoint_find(c, mine, &iteration, &err);
        if (rc == 0) {
            CHECK(iteration == 12 || iteration == MB_CHECKPOINT_RELEASE);
            rc = mb_checkpoint_load_state(c, mine, iteration, &got, &err);
        }
        if (rc == 0) {
            CHECK(got.consumed_train_samples == 192 && got.consumed_valid_samples == 7);
            CHECK(got.optimizer_steps == 11 && got.skipped_iterations == 1 && got.has_optimizer);
            CHECK(strcmp(got.args_json, "{\"num_layers\":2}") == 0);
            rc = mb_checkpoint_load(&m, mine, &got, &err);
            mb_checkpoint_state_close(&got);
        }
        if (rc == 0) {
            compare(&m);
        }
    }
    if (j->fault_rank < 0) {
        CHECK(rc == 0);
    } else if (j->fault_rank == (int)mb_comm_rank(c)) {
        CHECK(rc == j->expected);
        CHECK(strstr(err.text, j->expect) != NULL);
    } else {
        CHECK(rc == MB_EUNAVAIL && strstr(err.text, "failed") != NULL);
    }
    if (rc != 0 && j->fault_rank != (int)mb_comm_rank(c) && j->fault_rank < 0) {
        fprintf(stderr, "%s\n", err.text);
    }
    mb_free(m.weights.whole);
    mb_free(m.weights.upper);
    mb_free(m.weights.lower);
    mb_free(m.weights.window);
    mb_free(m.exp_avg);
    mb_free(m.exp_avg_sq);
}

static void run(uint32_t world, struct job j)
{
    struct comm_world w = {.n = world, .timeout_ms = 20000, .body = body, .arg = &j};
    assert_int_equal(comm_world_run(&w), 0);
    assert_int_equal(atomic_load(&comm_world_wrong), 0);
}

static int make_dir(void **state)
{
    (void)state;
    assert_non_null(mkdtemp(root));
    snprintf(dir, sizeof dir, "%s/save", root);
    return 0;
}

static int clear_dir(void **state)
{
    (void)state;
    return mb_fs_remove_tree(dir, NULL);
}

static int remove_dir(void **state)
{
    (void)state;
    return mb_fs_remove_tree(root, NULL);
}

static void any_gang_reads_what_any_gang_saved(void **state)
{
    (void)state;
    for (uint32_t saved_by = 1; saved_by <= 3; saved_by++) {
        run(saved_by, (struct job){.save = 1, .sharded = saved_by % 2, .fault_rank = -1});
        for (uint32_t loaded_by = 1; loaded_by <= 3; loaded_by++) {
            run(loaded_by, (struct job){.sharded = loaded_by != 2, .fault_rank = -1});
        }
        mb_fs_remove_tree(dir, NULL);
    }
}

/* The files of weights in halves are those of others, byte for byte; either reads them. */
static void halves_save_the_same_files(void **state)
{
    (void)state;
    char command[200];
    for (uint32_t world = 1; world <= 2; world++) {
        const uint32_t shared_by = world == 2 ? 2 : 0;
        run(world, (struct job){.save = 1, .fault_rank = -1});
        snprintf(command, sizeof command, "mv %s %s/plain", dir, root);
        assert_int_equal(system(command), 0);
        run(world,
            (struct job){.save = 1, .in_halves = 1, .shared_by = shared_by, .fault_rank = -1});
        snprintf(command, sizeof command, "diff -r %s %s/plain && rm -r %s/plain", dir, root, root);
        assert_int_equal(system(command), 0);
        run(2, (struct job){.fault_rank = -1});
        run(2, (struct job){.in_halves = 1, .sharded = 1, .fault_rank = -1});
        run(2, (struct job){.in_halves = 1, .shared_by = 2, .fault_rank = -1});
        mb_fs_remove_tree(dir, NULL);
    }
}

/* Models of 2 or 3 ranks, alone and side by side, split in either way: the files are those of as
 * many ranks without a shared model, byte for byte, and any layout reads them. */
static void ranks_that_share_a_model_save_the_same_files(void **state)
{
    (void)state;
    static const uint32_t layouts[][2] = {{2, 2}, {4, 2}, {3, 3}, {6, 3}};
    for (size_t i = 0; i < sizeof layouts / sizeof layouts[0]; i++) {
        const uint32_t world = layouts[i][0];
        char command[200];
        run(world, (struct job){.save = 1, .fault_rank = -1});
        snprintf(command, sizeof command, "mv %s %s/plain", dir, root);
        assert_int_equal(system(command), 0);
        for (int k = 0; k < (layouts[i][1] == 2 ? 6 : 4); k++) {
            struct job j = {.save = 1,
                            .sharded = k % 2,
                            .by_columns = k / 2 == 1,
                            .by_stages = k / 2 == 2,
                            .shared_by = layouts[i][1],
                            .fault_rank = -1};
            run(world, j);
            snprintf(command, sizeof command, "diff -r %s %s/plain", dir, root);
            assert_int_equal(system(command), 0);
            j.save = 0;
            run(world, j);
            if (k == 0) { /* the files are the same with every k */
                run(6,
                    (struct job){.shared_by = 3, .sharded = 1, .by_columns = 1, .fault_rank = -1});
                run(2, (struct job){.shared_by = 2, .fault_rank = -1});
                run(4,
                    (struct job){.shared_by = 2, .sharded = 1, .by_stages = 1, .fault_rank = -1});
                run(3, (struct job){.sharded = 1, .fault_rank = -1});
                run(1, (struct job){.fault_rank = -1});
            }
            mb_fs_remove_tree(dir, NULL);
        }
        snprintf(command, sizeof command, "rm -r %s/plain", root);
        assert_int_equal(system(command), 0);
    }
}

static void damage_is_named_by_ranks_that_share(void **state)
{
    (void)state;
    char path[160];
    struct job j = {.shared_by = 2,
                    .sharded = 1,
                    .fault_rank = 1, /* ranks read the range that their number has */
                    .expected = MB_ENOENT,
                    .expect = "element 250"};
    run(4, (struct job){.save = 1, .shared_by = 2, .fault_rank = -1});
    snprintf(path, sizeof path, "%s/iter_0000012/optim_dp_001_of_004.safetensors", dir);
    assert_int_equal(unlink(path), 0);
    run(4, j);
    snprintf(path, sizeof path, "%s/iter_0000012/model_tp00_pp00.safetensors", dir);
    assert_int_equal(truncate(path, 2000), 0);
    j.fault_rank = 0;
    j.expected = MB_ECORRUPT;
    j.expect = "model_tp00_pp00.safetensors";
    run(4, j);
}

static void an_older_save_of_the_iteration_is_replaced(void **state)
{
    (void)state;
    char stale[160];
    struct mb_err err;
    snprintf(stale, sizeof stale, "%s/.iter_0000012.tmp/optim_dp_000_of_002.safetensors", dir);
    run(2, (struct job){.save = 1, .fault_rank = -1});
    assert_int_equal(mb_fs_mkdir_p(stale, 0755, &err), 0); /* left by killed attempts */
    snprintf(stale, sizeof stale, "%s/.iter_0000007.tmp/part", dir);
    assert_int_equal(mb_fs_mkdir_p(stale, 0755, &err), 0);
    snprintf(stale, sizeof stale, "%s/.iter_0000003.of-5/part", dir);
    assert_int_equal(mb_fs_mkdir_p(stale, 0755, &err), 0);
    run(2, (struct job){.save = 1, .fault_rank = -1});
    run(2, (struct job){.fault_rank = -1});
    char command[128];
    snprintf(command, sizeof command, "test \"$(ls -A %s | wc -l)\" = 2", dir);
    assert_int_equal(system(command), 0); /* the directory and the tracker, nothing hidden */
}

/* A node that missed an attempt has its own shard of that iteration still, beside what was pulled.
 */
static void shards_of_another_size_do_not_count(void **state)
{
    (void)state;
    char command[300];
    run(3, (struct job){.save = 1, .sharded = 1, .is_stale = 1, .fault_rank = -1});
    snprintf(command, sizeof command, "mv %s/iter_0000012 %s/old", dir, dir);
    assert_int_equal(system(command), 0);
    run(2, (struct job){.save = 1, .sharded = 1, .fault_rank = -1});
    snprintf(command, sizeof command, "cp %s/old/optim_dp_*_of_003.safetensors %s/iter_0000012/",
             dir, dir);
    assert_int_equal(system(command), 0);
    for (uint32_t loaded_by = 1; loaded_by <= 3; loaded_by++) {
        run(loaded_by, (struct job){.sharded = 1, .fault_rank = -1});
    }
    snprintf(command, sizeof command, "rm %s/iter_0000012/optim_dp_001_of_002.safetensors", dir);
    assert_int_equal(system(command), 0); /* ... nor do they fill a gap */
    run(1, (struct job){.expected = MB_ENOENT,
                        .expect = "optim_dp_001_of_002.safetensors is not there, which holds the "
                                  "optimizer state from element 501"});
}

static atomic_int watching, unseen;

/* Whoever is killed leaves what is visible at that moment: the checkpoint has to be, always. */
static void *watch(void *path)
{
    while (atomic_load(&watching)) {
        if (access(path, F_OK) != 0) {
            atomic_fetch_add(&unseen, 1);
        }
    }
    return NULL;
}

static void a_replaced_save_is_never_missing(void **state)
{
    (void)state;
    pthread_t thread;
    char path[128];
    run(2, (struct job){.save = 1, .fault_rank = -1});
    snprintf(path, sizeof path, "%s/iter_0000012/state.json", dir);
    atomic_store(&watching, 1);
    assert_int_equal(pthread_create(&thread, NULL, watch, path), 0);
    for (int i = 0; i < 10; i++) {
        run(2, (struct job){.save = 1, .fault_rank = -1});
    }
    atomic_store(&watching, 0);
    pthread_join(thread, NULL);
    assert_int_equal(atomic_load(&unseen), 0);
    run(2, (struct job){.fault_rank = -1});
}

/* A file system that cannot exchange two names, and a kill before one of the renames that do it
 * there. */
static atomic_int cannot_exchange; /* 1; 2 once it was asked */
static atomic_int renames_left;    /* until the kill */

int __real_rename(const char *from, const char *to);
int __wrap_rename(const char *from, const char *to);
int __real_renameat2(int from_dir, const char *from, int to_dir, const char *to, unsigned flags);
int __wrap_renameat2(int from_dir, const char *from, int to_dir, const char *to, unsigned flags);

int __wrap_rename(const char *from, const char *to)
{
    if (atomic_load(&cannot_exchange) == 2 && atomic_fetch_sub(&renames_left, 1) == 0) {
        _exit(7);
    }
    return __real_rename(from, to);
}

int __wrap_renameat2(int from_dir, const char *from, int to_dir, const char *to, unsigned flags)
{
    if (atomic_load(&cannot_exchange) == 0) {
        return __real_renameat2(from_dir, from, to_dir, to, flags);
    }
    atomic_store(&cannot_exchange, 2);
    errno = EINVAL;
    return -1;
}

/* asked: from when on renames count. */
static int save_and_be_killed(int asked, int before_rename)
{
    int status = -1;
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        atomic_store(&cannot_exchange, asked);
        atomic_store(&renames_left, before_rename);
        run(2, (struct job){.save = 1, .fault_rank = -1});
        _exit(0);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

/* What the tracker names is loaded after it, and also after a further save that is killed early. */
static void a_kill_where_names_cannot_be_exchanged(void **state)
{
    (void)state;
    int n = 0;
    for (int status = 7; status == 7; n++) {
        for (int saves_again = 0; saves_again < 2; saves_again++) {
            run(2, (struct job){.save = 1, .fault_rank = -1});
            status = save_and_be_killed(1, n);
            if (saves_again) {
                assert_int_equal(save_and_be_killed(2, 1), 7);
            }
            run(2, (struct job){.fault_rank = -1});
        }
    }
    assert_true(n > 3);
}

static void ranks_may_keep_their_parts_apart(void **state)
{
    (void)state;
    char part[] = "node";
    run(2, (struct job){.save = 1, .per_rank_dir = part, .fault_rank = -1});
    run(2, (struct job){.sharded = 1, .per_rank_dir = part, .fault_rank = -1});
    run(2, (struct job){.per_rank_dir = part, .fault_rank = -1}); /* each needs all of the parts */
}

static void write_text(const char *name, const char *text)
{
    char path[160];
    struct mb_err err;
    snprintf(path, sizeof path, "%s/%s", dir, name);
    assert_int_equal(mb_fs_write_atomic(path, text, strlen(text), 0644, &err), 0);
}

static void damage_is_named(void **state)
{
    (void)state;
    char path[160];
    run(2, (struct job){.save = 1, .fault_rank = -1});

    write_text("latest_checkpointed_iteration.txt", "soon");
    run(2, (struct job){.expected = MB_ECORRUPT, .expect = "latest_checkpointed_iteration.txt"});
    write_text("latest_checkpointed_iteration.txt", "release");
    run(2, (struct job){.expected = MB_ENOENT, .expect = "release/state.json"});
    write_text("latest_checkpointed_iteration.txt", "12\n");

    snprintf(path, sizeof path, "%s/iter_0000012/optim_dp_001_of_002.safetensors", dir);
    assert_int_equal(truncate(path, 1000), 0);
    run(1, (struct job){.expected = MB_ECORRUPT, .expect = "optim_dp_001_of_002.safetensors"});
    assert_int_equal(unlink(path), 0);
    run(2, (struct job){.sharded = 1,
                        .fault_rank = 1,
                        .expected = MB_ENOENT,
                        .expect = "optim_dp_001_of_002.safetensors is not there"});

    snprintf(path, sizeof path, "%s/iter_0000012/model_tp00_pp00.safetensors", dir);
    assert_int_equal(truncate(path, 2000), 0);
    run(2, (struct job){.expected = MB_ECORRUPT, .expect = "model_tp00_pp00.safetensors"});
    assert_int_equal(unlink(path), 0);
    run(2, (struct job){.expected = MB_ENOENT, .expect = "model_tp00_pp00.safetensors"});

    write_text("iter_0000012/state.json", "{\"version\": 99}");
    run(1, (struct job){.expected = MB_EUNSUPPORTED, .expect = "version 99"});
    write_text("iter_0000012/state.json", "{\"version\": 1}");
    run(1, (struct job){.expected = MB_ECORRUPT, .expect = "state.json"});
    write_text("iter_0000012/state.json", "{");
    run(1, (struct job){.expected = MB_ECORRUPT, .expect = "state.json"});
}

static void flip(const char *path, long at)
{
    FILE *f = fopen(path, "r+");
    assert_non_null(f);
    assert_int_equal(fseek(f, at, SEEK_SET), 0);
    const int c = fgetc(f);
    assert_int_equal(fseek(f, at, SEEK_SET), 0);
    assert_int_equal(fputc(c ^ 4, f), c ^ 4);
    assert_int_equal(fclose(f), 0);
}

/* Wherever it is, no rank trains from it. */
static void a_flipped_bit_is_named(void **state)
{
    (void)state;
    static const char *const FILES[] = {"state.json", "model_tp00_pp00.safetensors",
                                        "optim_dp_000_of_002.safetensors",
                                        "optim_dp_001_of_002.safetensors"};
    run(2, (struct job){.save = 1, .fault_rank = -1});
    for (size_t i = 0; i < sizeof FILES / sizeof FILES[0]; i++) {
        char path[160];
        struct stat st;
        snprintf(path, sizeof path, "%s/iter_0000012/%s", dir, FILES[i]);
        assert_int_equal(stat(path, &st), 0);
        for (long at = 40; at < st.st_size; at += 173) { /* behind the name of the first field */
            flip(path, at);
            run(1, (struct job){.expected = MB_ECORRUPT, .expect = FILES[i]});
            flip(path, at);
        }
    }
    run(2, (struct job){.sharded = 1, .fault_rank = -1});
    char path[160];
    snprintf(path, sizeof path, "%s/iter_0000012/%s", dir, FILES[3]);
    flip(path, 1000);
    run(2,
        (struct job){.sharded = 1, .fault_rank = 1, .expected = MB_ECORRUPT, .expect = FILES[3]});
}

static void a_save_that_fails_leaves_the_last_one(void **state)
{
    (void)state;
    char part[] = "node";
    struct mb_err err;
    run(2, (struct job){.save = 1, .per_rank_dir = part, .fault_rank = -1});
    /* Rank 1 cannot make its directory: a file is in the way. */
    char path[128];
    snprintf(path, sizeof path, "%s/node1", dir);
    assert_int_equal(mb_fs_remove_tree(path, &err), 0);
    write_text("node1", "a file");
    run(2, (struct job){.save = 1,
                        .per_rank_dir = part,
                        .fault_rank = 1,
                        .expected = MB_EEXIST,
                        .expect = "node1"});
    snprintf(path, sizeof path, "%s/node0/iter_0000012/model_tp00_pp00.safetensors", dir);
    assert_int_equal(access(path, F_OK), 0);
    snprintf(path, sizeof path, "%s/node0/.iter_0000012.tmp", dir);
    assert_int_equal(access(path, F_OK), -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(any_gang_reads_what_any_gang_saved, clear_dir),
        cmocka_unit_test_teardown(halves_save_the_same_files, clear_dir),
        cmocka_unit_test_teardown(ranks_that_share_a_model_save_the_same_files, clear_dir),
        cmocka_unit_test_teardown(damage_is_named_by_ranks_that_share, clear_dir),
        cmocka_unit_test_teardown(an_older_save_of_the_iteration_is_replaced, clear_dir),
        cmocka_unit_test_teardown(shards_of_another_size_do_not_count, clear_dir),
        cmocka_unit_test_teardown(a_replaced_save_is_never_missing, clear_dir),
        cmocka_unit_test_teardown(a_kill_where_names_cannot_be_exchanged, clear_dir),
        cmocka_unit_test_teardown(ranks_may_keep_their_parts_apart, clear_dir),
        cmocka_unit_test_teardown(damage_is_named, clear_dir),
        cmocka_unit_test_teardown(a_flipped_bit_is_named, clear_dir),
        cmocka_unit_test_teardown(a_save_that_fails_leaves_the_last_one, clear_dir),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
