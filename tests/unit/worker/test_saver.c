/* Saves that go on beside training: same bytes, taken at the right moment, and every way to fail.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "tests/unit/worker/comm_world.h"
#include "worker/checkpoint/saver.h"

enum { N = 350003, WAIT_MS = 60000 }; /* files larger than the writer's buffer; odd */

static const struct mb_checkpoint_tensor TENSORS[] = {
    {"decoder.a.weight", 2, {300, 1000}, 0, 300000},
    {"decoder.a.bias", 1, {50000, 1}, 300003, 50000},
};

static char root[] = "/tmp/mobula-saver-XXXXXX";
static char dir[64];

/* Host memory as a device. A closed gate holds copies; a broken one fails them. */
static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t opened = PTHREAD_COND_INITIALIZER;
static int is_closed, is_broken, is_closed_for_copies = 1;
static atomic_int n_copies;

static void set_gate(int closed)
{
    pthread_mutex_lock(&gate);
    is_closed = closed;
    pthread_cond_broadcast(&opened);
    pthread_mutex_unlock(&gate);
}

static void copy(struct mb_context *c, struct mb_stream *s, void *dst, const void *src, size_t n)
{
    (void)c;
    (void)s;
    pthread_mutex_lock(&gate);
    while (is_closed && is_closed_for_copies) {
        pthread_cond_wait(&opened, &gate);
    }
    pthread_mutex_unlock(&gate);
    memcpy(dst, src, n);
    atomic_fetch_add(&n_copies, 1);
}

static int synchronize(struct mb_context *c, struct mb_stream *s, struct mb_err *err)
{
    (void)c;
    pthread_mutex_lock(&gate);
    int broken = s != NULL && is_broken;
    pthread_mutex_unlock(&gate);
    return broken ? mb_err_set(err, MB_EIO, "the device fell off the bus") : 0;
}

static int stream_create(struct mb_context *c, struct mb_stream **out, struct mb_err *err)
{
    (void)c;
    *out = mb_alloc(1);
    return *out != NULL ? 0 : mb_err_set(err, MB_ENOMEM, "out of memory creating a stream");
}

static void stream_destroy(struct mb_context *c, struct mb_stream *s)
{
    (void)c;
    mb_free(s);
}

static const struct mb_backend HOST = {.name = "host",
                                       .copy_in = copy,
                                       .copy_out = copy,
                                       .synchronize = synchronize,
                                       .stream_create = stream_create,
                                       .stream_destroy = stream_destroy};

/* ---- a disk ---- */

/* The linker puts these in place of the system's. */
ssize_t __real_write(int fd, const void *p, size_t n);
int __real_fsync(int fd);
ssize_t __wrap_write(int fd, const void *p, size_t n);
int __wrap_fsync(int fd);

static atomic_int write_takes_ms, hangs;

static int is_file(int fd)
{
    struct stat st;
    return fstat(fd, &st) == 0 && S_ISREG(st.st_mode);
}

ssize_t __wrap_write(int fd, const void *p, size_t n)
{
    int ms = atomic_load(&write_takes_ms);
    if (ms > 0 && is_file(fd)) {
        usleep((useconds_t)ms * 1000); /* what is simulated */
    }
    return __real_write(fd, p, n);
}

/* While it hangs, the one that comes first stays. */
int __wrap_fsync(int fd)
{
    int one = 1;
    if (is_file(fd) && atomic_compare_exchange_strong(&hangs, &one, 2)) {
        pthread_mutex_lock(&gate);
        while (is_closed) {
            pthread_cond_wait(&opened, &gate);
        }
        pthread_mutex_unlock(&gate);
        atomic_store(&hangs, 3);
    }
    return __real_fsync(fd);
}

/* ---- a rank's model ---- */

static uint64_t stall_ms = WAIT_MS;

struct rank {
    struct mb_device dev;
    struct mb_checkpoint_model m;
    float *memory;
    struct mb_saver *saver;
    int64_t told[8]; /* iterations that the callback heard of; read when nothing is in flight */
    size_t n_told;
    uint64_t bytes, stall_us;
};

static void fill(struct rank *r, float by)
{
    for (size_t i = 0; i < 3 * (size_t)N; i++) {
        r->memory[i] = (float)i * 0.5f + by;
    }
}

static void heard(void *arg, int64_t iteration, const struct mb_checkpoint_saved *saved,
                  const struct mb_checkpoint_times *times)
{
    struct rank *r = arg;
    char path[256];
    snprintf(path, sizeof path, "%s/%s", saved->dir, saved->files[0].path);
    CHECK(access(path, F_OK) == 0);
    r->told[r->n_told++ % 8] = iteration;
    r->bytes = times->total_bytes;
    r->stall_us = times->stall_us;
}

static void begin(struct rank *r, struct mb_comm *c, int sharded)
{
    memset(r, 0, sizeof *r);
    r->memory = mb_calloc(3 * (size_t)N, sizeof(float));
    r->dev.ops = &HOST;
    r->m = (struct mb_checkpoint_model){.dev = &r->dev,
                                        .comm = c,
                                        .tensors = TENSORS,
                                        .n_tensors = 2,
                                        .weights = {.whole = r->memory},
                                        .n_elements = N,
                                        .state_end = N};
    if (sharded) {
        mb_comm_range(N, mb_comm_world_size(c), mb_comm_rank(c), &r->m.state_begin,
                      &r->m.state_end);
    }
    r->m.exp_avg = r->memory + N + r->m.state_begin;
    r->m.exp_avg_sq = r->memory + 2 * (size_t)N + r->m.state_begin;
    fill(r, 0);
}

static int make_saver(struct rank *r, struct mb_err *err)
{
    struct mb_saver_options o = {
        .model = r->m, .comm = r->m.comm, .stall_ms = stall_ms, .cb = heard, .arg = r};
    return mb_saver_create(&o, &r->saver, err);
}

static void end(struct rank *r)
{
    mb_saver_destroy(r->saver);
    mb_free(r->memory);
}

static struct mb_checkpoint_state state_of(int64_t iteration)
{
    return (struct mb_checkpoint_state){
        .iteration = iteration, .consumed_train_samples = 8, .args_json = (char *)"{\"a\":1}"};
}

static int tracker(void)
{
    char path[128];
    struct mb_buf text = {0};
    struct mb_err err;
    snprintf(path, sizeof path, "%s/%s", dir, MB_CHECKPOINT_TRACKER);
    int found = mb_fs_read(path, 64, &text, &err) == 0 ? atoi(mb_buf_str(&text)) : -1;
    mb_buf_close(&text);
    return found;
}

static void run_shell(const char *format)
{
    char command[512];
    snprintf(command, sizeof command, format, dir, dir, dir);
    assert_int_equal(system(command), 0);
}

/* ---- any world ---- */

static int sharded;

static void save_both_ways(struct mb_comm *c, void *arg)
{
    struct rank r;
    struct mb_err err;
    struct mb_checkpoint_saved saved;
    struct mb_checkpoint_state s = state_of(5);
    char plain[96];
    (void)arg;
    begin(&r, c, sharded);
    snprintf(plain, sizeof plain, "%s-plain", dir);
    CHECK(mb_checkpoint_save(&r.m, plain, &s, &saved, &err) == 0);
    mb_checkpoint_saved_close(&saved);
    CHECK(make_saver(&r, &err) == 0);
    CHECK(mb_saver_start(r.saver, dir, &s, &err) == 0);
    mb_saver_wait_copied(r.saver);
    fill(&r, 1000); /* training goes on */
    CHECK(mb_saver_wait(r.saver, &err) == 0);
    CHECK(r.n_told == 1 && r.told[0] == 5 && r.bytes > 3 * sizeof(float) * (uint64_t)N);
    s = state_of(6);
    CHECK(mb_saver_start(r.saver, dir, &s, &err) == 0);
    s = state_of(7);
    CHECK(mb_saver_start(r.saver, dir, &s, &err) == 0); /* waits for the one before */
    CHECK(r.told[1] == 6);
    end(&r); /* waits as well */
    CHECK(tracker() == 7);
}

static void files_are_those_of_a_synchronous_save(void **state)
{
    (void)state;
    for (uint32_t n = 1; n <= 3; n++) {
        for (sharded = 0; sharded <= 1; sharded++) {
            struct comm_world w = {.n = n, .timeout_ms = WAIT_MS, .body = save_both_ways};
            assert_int_equal(comm_world_run(&w), 0);
            assert_int_equal(atomic_load(&comm_world_wrong), 0);
            run_shell("diff -r %s/iter_0000005 %s-plain/iter_0000005");
            run_shell("test \"$(ls -A %s | wc -l)\" = 4"); /* nothing hidden */
            run_shell("rm -r %s %s-plain");
        }
    }
}

static void one_copy_fails(struct mb_comm *c, void *arg)
{
    struct rank r;
    struct mb_err err;
    struct mb_checkpoint_state s = state_of(5);
    (void)arg;
    begin(&r, c, 1);
    CHECK(make_saver(&r, &err) == 0);
    CHECK(mb_saver_start(r.saver, dir, &s, &err) == 0);
    CHECK(mb_saver_wait(r.saver, &err) == 0 && !mb_saver_has_failed(r.saver));
    mb_comm_barrier(c); /* nothing is in flight: the communicator is free */
    CHECK(mb_comm_synchronize(c, &err) == 0);
    if (mb_comm_rank(c) == 1) {
        pthread_mutex_lock(&gate);
        is_broken = 1;
        pthread_mutex_unlock(&gate);
    }
    mb_comm_barrier(c);
    CHECK(mb_comm_synchronize(c, &err) == 0);
    s = state_of(6);
    CHECK(mb_saver_start(r.saver, dir, &s, &err) == 0);
    mb_saver_wait_copied(r.saver); /* comes back although the copy failed */
    CHECK(mb_saver_wait(r.saver, &err) == MB_EIO);
    CHECK(strstr(err.text, "checkpoint of iteration 6: the device fell off the bus") != NULL);
    CHECK(mb_saver_has_failed(r.saver) && r.n_told == 1);
    s = state_of(7); /* a failure stays */
    CHECK(mb_saver_start(r.saver, dir, &s, &err) == MB_EIO);
    end(&r);
}

static void a_copy_that_fails_is_told(void **state)
{
    (void)state;
    struct comm_world w = {.n = 2, .timeout_ms = WAIT_MS, .body = one_copy_fails};
    assert_int_equal(comm_world_run(&w), 0);
    is_broken = 0;
    assert_int_equal(atomic_load(&comm_world_wrong), 0);
    assert_int_equal(tracker(), 5);
}

/* ---- alone ---- */

static struct mb_comm *alone(void)
{
    struct mb_comm *c = NULL;
    struct mb_err err;
    assert_int_equal(mb_comm_create_single(&c, &err), 0);
    return c;
}

static struct rank *waiting_rank;
static atomic_int has_waited;

static void *wait_copied(void *arg)
{
    (void)arg;
    mb_saver_wait_copied(waiting_rank->saver);
    atomic_store(&has_waited, 1);
    CHECK(atomic_load(&n_copies) == 3); /* weights and two moments: all of it */
    return NULL;
}

static void nothing_changes_before_it_is_copied(void **state)
{
    (void)state;
    struct rank r;
    struct mb_err err;
    struct mb_comm *c = alone();
    struct mb_checkpoint_state s = state_of(5);
    pthread_t thread;
    begin(&r, c, 0);
    stall_ms = 600;
    assert_int_equal(make_saver(&r, &err), 0);
    stall_ms = WAIT_MS;
    mb_saver_wait_copied(r.saver); /* nothing in flight: nothing to wait for */
    atomic_store(&n_copies, 0);
    set_gate(1);
    assert_int_equal(mb_saver_start(r.saver, dir, &s, &err), 0); /* returns at once all the same */
    assert_int_equal(mb_saver_wait(r.saver, &err), MB_ETIMEOUT);
    assert_non_null(strstr(err.text, "iteration 5: nothing has moved for 1.2 s"));
    waiting_rank = &r;
    assert_int_equal(pthread_create(&thread, NULL, wait_copied, NULL), 0);
    assert_int_equal(atomic_load(&has_waited), 0);
    assert_int_equal(tracker(), -1);
    set_gate(0);
    pthread_join(thread, NULL);
    assert_int_equal(mb_saver_wait(r.saver, &err), 0);
    assert_int_equal(tracker(), 5);
    end(&r);
    mb_comm_destroy(c);
    assert_int_equal(atomic_load(&comm_world_wrong), 0);
}

static void save_slowly(struct mb_comm *c, void *arg)
{
    struct rank r;
    struct mb_err err;
    struct mb_checkpoint_state s = state_of(5);
    (void)arg;
    begin(&r, c, 1);
    CHECK(make_saver(&r, &err) == 0);
    CHECK(mb_saver_start(r.saver, dir, &s, &err) == 0);
    CHECK(mb_saver_wait(r.saver, &err) == 0);
    end(&r);
}

/* Longer than stall_ms in all, and on rank 0 alone for most of it: while bytes go, it is waited
 * for. */
static void a_slow_disk_has_its_time(void **state)
{
    (void)state;
    struct comm_world w = {.n = 2, .timeout_ms = 5000, .body = save_slowly};
    uint64_t from_ms = mb_mono_ms();
    stall_ms = 5000;
    atomic_store(&write_takes_ms, 2000);
    assert_int_equal(comm_world_run(&w), 0);
    atomic_store(&write_takes_ms, 0);
    stall_ms = WAIT_MS;
    assert_int_equal(atomic_load(&comm_world_wrong), 0);
    assert_true(mb_mono_ms() - from_ms > 7500);
    assert_int_equal(tracker(), 5);
}

static atomic_int n_named;
static struct rank hung[2]; /* what the writer that hangs uses has to stay */

static void save_to_a_disk_that_hangs(struct mb_comm *c, void *arg)
{
    struct rank *r = &hung[mb_comm_rank(c)];
    struct mb_err err = {0};
    struct mb_checkpoint_state s = state_of(5);
    (void)arg;
    begin(r, c, 1);
    CHECK(make_saver(r, &err) == 0);
    CHECK(mb_saver_start(r->saver, dir, &s, &err) == 0);
    mb_saver_wait_copied(r->saver);
    int rc = mb_saver_wait(r->saver, &err);
    if (rc == MB_ETIMEOUT) {
        CHECK(strstr(err.text, ".safetensors: nothing was written for 2.0 s: the disk hangs"));
        atomic_fetch_add(&n_named, 1);
    } else {
        CHECK(rc == MB_EUNAVAIL && strstr(err.text, "the disk of rank"));
    }
    CHECK(mb_saver_start(r->saver, dir, &s, &err) == rc); /* at once: the failure stays */
    end(r);
}

static void a_disk_that_hangs_ends_the_save(void **state)
{
    (void)state;
    struct comm_world w = {.n = 2, .timeout_ms = WAIT_MS, .body = save_to_a_disk_that_hangs};
    uint64_t from_ms = mb_mono_ms();
    stall_ms = 2000; /* much longer than what the other rank takes */
    atomic_store(&hangs, 1);
    set_gate(1);
    is_closed_for_copies = 0;
    assert_int_equal(comm_world_run(&w), 0);
    assert_true(mb_mono_ms() - from_ms < WAIT_MS / 2);
    stall_ms = WAIT_MS;
    assert_int_equal(atomic_load(&comm_world_wrong), 0);
    assert_int_equal(atomic_load(&n_named), 1);
    assert_int_equal(tracker(), -1);
    set_gate(0);
    is_closed_for_copies = 1;
    /* The writer that was left alone goes on now: its allocations are not those of other tests. */
    while (atomic_load(&hangs) != 3 || !comm_world_is_alone()) {
        usleep(1000);
    }
}

static void memory_that_is_not_there_is_named(void **state)
{
    (void)state;
    struct rank r;
    struct mb_err err = {0};
    struct mb_comm *c = alone();
    begin(&r, c, 0);
    assert_int_equal(mb_saver_bytes(&r.m, c), 3 * sizeof(float) * (uint64_t)N);
    for (unsigned long nth = 1;; nth++) {
        mb_alloc_fail_nth(nth);
        int rc = make_saver(&r, &err);
        int failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        if (!failed) {
            assert_int_equal(rc, 0);
            assert_true(nth > 3);
            break;
        }
        assert_int_equal(rc, MB_ENOMEM);
        assert_null(r.saver);
    }
    mb_saver_destroy(r.saver);
    r.saver = NULL;
    r.m.n_elements = r.m.state_end = (size_t)1 << 50;
    assert_int_equal(make_saver(&r, &err), MB_ENOMEM);
    assert_non_null(strstr(err.text, "--async-save: the snapshot of a checkpoint needs 12"));
    end(&r);
    mb_comm_destroy(c);
}

static void every_allocation_of_a_save_may_fail(void **state)
{
    (void)state;
    struct rank r;
    struct mb_err err = {0};
    struct mb_comm *c = alone();
    int failed = 1;
    for (unsigned long nth = 1; failed; nth++) {
        struct mb_checkpoint_state s = state_of(5);
        begin(&r, c, 0);
        assert_int_equal(make_saver(&r, &err), 0);
        assert_int_equal(mb_saver_start(r.saver, dir, &s, &err), 0);
        assert_int_equal(mb_saver_wait(r.saver, &err), 0);
        s = state_of(6);
        mb_alloc_fail_nth(nth);
        int rc = mb_saver_start(r.saver, dir, &s, &err);
        if (rc == 0) {
            rc = mb_saver_wait(r.saver, &err);
        }
        failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        if (rc != 0) {
            assert_int_equal(rc, MB_ENOMEM);
            assert_int_equal(tracker(), 5);
        } else {
            assert_int_equal(tracker(), 6); /* also if only a clean-up failed */
        }
        assert_true(failed || nth > 10);
        end(&r);
        run_shell("test \"$(ls -A %s | grep -c '^[.]')\" = 0 && rm -r %s");
    }
    mb_comm_destroy(c);
}

static void a_disk_that_is_full_is_named(void **state)
{
    (void)state;
    struct rank r;
    struct mb_err err = {0};
    struct mb_comm *c = alone();
    struct rlimit before, small;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    signal(SIGXFSZ, SIG_IGN);
    for (rlim_t bytes = 0; bytes < 4 << 20; bytes += 400109) {
        struct mb_checkpoint_state s = state_of(5);
        begin(&r, c, 0);
        assert_int_equal(make_saver(&r, &err), 0);
        assert_int_equal(mb_saver_start(r.saver, dir, &s, &err), 0);
        assert_int_equal(mb_saver_wait(r.saver, &err), 0);
        small = (struct rlimit){bytes, before.rlim_max};
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
        s = state_of(6);
        int rc = mb_saver_start(r.saver, dir, &s, &err);
        assert_int_equal(rc, 0);
        rc = mb_saver_wait(r.saver, &err);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
        assert_int_equal(rc, bytes < 2 * sizeof(float) * (rlim_t)N ? MB_EFULL : 0);
        assert_int_equal(tracker(), rc == 0 ? 6 : 5);
        if (rc != 0) {
            assert_non_null(strstr(err.text, "File too large"));
            assert_non_null(strstr(err.text, "checkpoint of iteration 6"));
            assert_int_equal(r.n_told, 1);
        }
        end(&r);
        run_shell("test \"$(ls -A %s | grep -c '^[.]')\" = 0 && rm -r %s");
    }
    mb_comm_destroy(c);
}

static int make_root(void **state)
{
    (void)state;
    assert_non_null(mkdtemp(root));
    snprintf(dir, sizeof dir, "%s/save", root);
    return 0;
}

static int clear_root(void **state)
{
    (void)state;
    atomic_store(&comm_world_wrong, 0);
    return mb_fs_remove_tree(dir, NULL);
}

static int remove_root(void **state)
{
    (void)state;
    return mb_fs_remove_tree(root, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(files_are_those_of_a_synchronous_save, clear_root),
        cmocka_unit_test_teardown(a_copy_that_fails_is_told, clear_root),
        cmocka_unit_test_teardown(nothing_changes_before_it_is_copied, clear_root),
        cmocka_unit_test_teardown(a_slow_disk_has_its_time, clear_root),
        cmocka_unit_test_teardown(a_disk_that_hangs_ends_the_save, clear_root),
        cmocka_unit_test_teardown(memory_that_is_not_there_is_named, clear_root),
        cmocka_unit_test_teardown(every_allocation_of_a_save_may_fail, clear_root),
        cmocka_unit_test_teardown(a_disk_that_is_full_is_named, clear_root),
    };
    return cmocka_run_group_tests(tests, make_root, remove_root);
}
