/* A large value into a file, over a connection of its own, beside a client that takes small answers
 * only. */
#include "head_fixture.h"
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include "base/fs.h"

enum { LARGE_BYTES = 3 << 20, SMALL_BYTES = 1 << 20 };

static struct {
    uv_thread_t loop_thread;
    atomic_int is_on_loop, fails, n_writes;
} t;

int __real_mb_fs_write_all(int fd, const void *p, size_t n, struct mb_err *err);
int __wrap_mb_fs_write_all(int fd, const void *p, size_t n, struct mb_err *err);

int __wrap_mb_fs_write_all(int fd, const void *p, size_t n, struct mb_err *err)
{
    const uv_thread_t self = uv_thread_self();

    t.is_on_loop |= uv_thread_equal(&self, &t.loop_thread);
    t.n_writes++;
    return t.fails ? mb_err_sys(err, ENOSPC, "write") : __real_mb_fs_write_all(fd, p, n, err);
}

/* A client whose answers are small, and a value that is not. */
static struct mb_gcs *small_client(struct fixture *f, char *large)
{
    struct mb_gcs_opts opts = {.address = f->address, .max_message_bytes = SMALL_BYTES};
    struct mb_err err = {0};
    struct mb_gcs *c;
    struct result r;

    memset(&t, 0, sizeof(t));
    t.loop_thread = uv_thread_self();
    for (size_t i = 0; i < LARGE_BYTES; i++)
        large[i] = (char)(i * 7 + i / 4096);
    DO(f, r,
       mb_gcs_kv_put(f->gcs, "", "large", large, LARGE_BYTES, 1, 0, fixture_on_count, &r, NULL,
                     &e));
    assert_int_equal(r.code, 0);
    f->n_events = 0;
    assert_int_equal(mb_gcs_create(&f->loop, f->grpc, &opts, fixture_on_event, f, &c, &err), 0);
    assert_int_equal(mb_gcs_connect(c, &err), 0);
    while (f->n_events == 0)
        uv_run(&f->loop, UV_RUN_ONCE);
    assert_int_equal(f->event, MB_GCS_CONNECTED);
    return c;
}

static int new_file(const struct fixture *f)
{
    char path[96];
    int fd;

    snprintf(path, sizeof(path), "%s/value", f->dir);
    fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    return fd;
}

static void end(struct fixture *f, struct mb_gcs *c, int fd)
{
    int closed = 0;

    close(fd);
    mb_gcs_close(c, fixture_set_flag, &closed);
    loop_until(&f->loop, &closed);
}

static void it_is_written_beside_the_loop(void **state)
{
    struct fixture *f = *state;
    char *large = malloc(LARGE_BYTES), *back = malloc(LARGE_BYTES + 1);
    struct mb_gcs *c = small_client(f, large);
    int fd = new_file(f);
    struct result r;

    DO(f, r, mb_gcs_kv_get(c, "", "large", 0, fixture_on_value, &r, NULL, &e));
    assert_int_equal(r.code, MB_EFULL); /* nothing else may be so large */
    DO(f, r, mb_gcs_kv_fetch(c, "", "large", fd, 0, fixture_on_done, &r, NULL, &e));
    assert_int_equal(r.code, 0);
    assert_true(t.n_writes > 1 && !t.is_on_loop);
    assert_int_equal(pread(fd, back, LARGE_BYTES + 1, 0), LARGE_BYTES);
    assert_memory_equal(back, large, LARGE_BYTES);
    DO(f, r, mb_gcs_kv_fetch(c, "", "missing", fd, 0, fixture_on_done, &r, NULL, &e));
    assert_int_equal(r.code, MB_ENOENT);
    end(f, c, fd);
    free(large);
    free(back);
}

static void a_full_disk(void **state)
{
    struct fixture *f = *state;
    char *large = malloc(LARGE_BYTES);
    struct mb_gcs *c = small_client(f, large);
    int fd = new_file(f);
    struct result r;

    t.fails = 1;
    DO(f, r, mb_gcs_kv_fetch(c, "", "large", fd, 0, fixture_on_done, &r, NULL, &e));
    assert_int_equal(r.code, MB_EFULL);
    assert_int_equal(t.n_writes, 1);
    end(f, c, fd);
    free(large);
}

/* At once; while the answer is on its way or is written, whichever it is after so many turns. */
static void given_up(void **state)
{
    struct fixture *f = *state;
    char *large = malloc(LARGE_BYTES);
    struct mb_gcs *c = small_client(f, large);
    int fd = new_file(f);

    for (int turns = 0; turns < 12; turns++) {
        struct result r = {0};
        struct mb_err err = {0};
        struct mb_gcs_op *op;

        assert_int_equal(mb_gcs_kv_fetch(c, "", "large", fd, 0, fixture_on_done, &r, &op, &err), 0);
        for (int i = 0; i < turns && !r.done; i++)
            uv_run(&f->loop, UV_RUN_NOWAIT);
        if (r.done)
            continue;
        mb_gcs_op_cancel(op);
        mb_gcs_op_cancel(op);
        assert_int_equal(r.done, 0);
        loop_until(&f->loop, &r.done);
        assert_int_equal(r.code, MB_ECANCELED);
    }
    end(f, c, fd);
    free(large);
}

/* The client goes in the middle, as with an agent that stops. */
static void closed_meanwhile(void **state)
{
    struct fixture *f = *state;
    char *large = malloc(LARGE_BYTES);

    for (int turns = 0; turns < 12; turns++) {
        struct mb_gcs *c = small_client(f, large);
        struct result r = {0};
        struct mb_err err = {0};
        int fd = new_file(f);

        assert_int_equal(mb_gcs_kv_fetch(c, "", "large", fd, 0, fixture_on_done, &r, NULL, &err),
                         0);
        for (int i = 0; i < turns; i++)
            uv_run(&f->loop, UV_RUN_NOWAIT);
        end(f, c, fd);
        assert_true(r.done && (r.code == MB_ECANCELED || r.code == 0));
    }
    free(large);
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)
    const struct CMUnitTest tests[] = {
        T(it_is_written_beside_the_loop),
        T(a_full_disk),
        T(given_up),
        T(closed_meanwhile),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
