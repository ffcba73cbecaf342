/* A package that Ray's own head has as one value of its KV. What asks that head is the test's. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>
#include "agent/fetch.h"
#include "base/fs.h"
#include "gcs/client.h"

static struct {
    uv_loop_t loop;
    uv_timer_t timer; /* the head's answer */
    mb_gcs_piece_cb piece_cb;
    mb_gcs_value_cb value_cb;
    void *arg;
    uint64_t timeout_ms;
    uv_thread_t loop_thread;
    int is_on_loop, n_writes; /* of the value */
    struct mb_fetch *fetch;
    int cancels, code, done;
    char dir[64], path[96];
} t;

int __real_mb_fs_write_all(int fd, const void *p, size_t n, struct mb_err *err);
int __wrap_mb_fs_write_all(int fd, const void *p, size_t n, struct mb_err *err);
int __wrap_mb_gcs_read_package(struct mb_gcs *c, const char *name, uint64_t offset,
                               uint32_t max_bytes, uint64_t timeout_ms, mb_gcs_piece_cb cb,
                               void *arg, struct mb_gcs_op **op, struct mb_err *err);
int __wrap_mb_gcs_kv_get(struct mb_gcs *c, const char *ns, const char *key, uint64_t timeout_ms,
                         mb_gcs_value_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err);

int __wrap_mb_fs_write_all(int fd, const void *p, size_t n, struct mb_err *err)
{
    uv_thread_t self = uv_thread_self();

    t.is_on_loop = uv_thread_equal(&self, &t.loop_thread);
    t.n_writes++;
    return __real_mb_fs_write_all(fd, p, n, err);
}

static void answer_piece(uv_timer_t *timer)
{
    struct mb_err err = {0};

    (void)timer;
    mb_err_set(&err, MB_EUNSUPPORTED, "Ray's head has no packages");
    t.piece_cb(t.arg, &err, 0, NULL, 0);
}

int __wrap_mb_gcs_read_package(struct mb_gcs *c, const char *name, uint64_t offset,
                               uint32_t max_bytes, uint64_t timeout_ms, mb_gcs_piece_cb cb,
                               void *arg, struct mb_gcs_op **op, struct mb_err *err)
{
    (void)c, (void)name, (void)offset, (void)max_bytes, (void)timeout_ms, (void)op, (void)err;
    t.piece_cb = cb;
    t.arg = arg;
    return uv_timer_start(&t.timer, answer_piece, 0, 0);
}

/* Its bytes are gone when the callback returns. */
static void answer_value(uv_timer_t *timer)
{
    struct mb_err ok = {0};
    char value[] = "package";

    (void)timer;
    t.value_cb(t.arg, &ok, value, 7);
    memset(value, 'x', 7);
    if (t.cancels)
        mb_fetch_cancel(t.fetch);
}

int __wrap_mb_gcs_kv_get(struct mb_gcs *c, const char *ns, const char *key, uint64_t timeout_ms,
                         mb_gcs_value_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err)
{
    (void)c, (void)ns, (void)key, (void)op, (void)err;
    t.timeout_ms = timeout_ms;
    t.value_cb = cb;
    t.arg = arg;
    return uv_timer_start(&t.timer, answer_value, 0, 0);
}

static void on_fetched(void *arg, const struct mb_err *err)
{
    (void)arg;
    t.code = err->code;
    t.done = 1;
}

static void fetch(int cancels)
{
    struct mb_err err = {0};

    memset(&t, 0, sizeof t);
    snprintf(t.dir, sizeof t.dir, "/tmp/mb-fetch-XXXXXX");
    assert_non_null(mkdtemp(t.dir));
    snprintf(t.path, sizeof t.path, "%s/package", t.dir);
    uv_loop_init(&t.loop);
    uv_timer_init(&t.loop, &t.timer);
    t.loop_thread = uv_thread_self();
    t.cancels = cancels;
    assert_int_equal(mb_fetch_start(&t.loop, (struct mb_gcs *)&t, "gcs://_ray_pkg_1.zip", t.path,
                                    on_fetched, NULL, &t.fetch, &err),
                     0);
    while (!t.done)
        uv_run(&t.loop, UV_RUN_ONCE);
    uv_close((uv_handle_t *)&t.timer, NULL);
    uv_run(&t.loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&t.loop), 0);
}

/* Half a gigabyte comes in one answer: more than a short deadline, and no work for the loop. */
static void a_value_is_written_beside_the_loop(void **state)
{
    char text[16] = "";

    (void)state;
    fetch(0);
    assert_int_equal(t.code, 0);
    assert_true(t.timeout_ms >= 60000);
    assert_int_equal(t.n_writes, 1);
    assert_false(t.is_on_loop);
    FILE *file = fopen(t.path, "r");
    assert_non_null(file);
    assert_int_equal(fread(text, 1, sizeof text, file), 7);
    fclose(file);
    assert_string_equal(text, "package");
    assert_int_equal(unlink(t.path) | rmdir(t.dir), 0);
}

static void given_up_while_it_is_written(void **state)
{
    (void)state;
    fetch(1);
    assert_int_equal(t.code, MB_ECANCELED);
    assert_int_equal(access(t.path, F_OK), -1);
    assert_int_equal(rmdir(t.dir), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_value_is_written_beside_the_loop),
        cmocka_unit_test(given_up_while_it_is_written),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
