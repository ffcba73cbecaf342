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
    mb_gcs_done_cb value_cb;
    int fd;
    void *arg;
    uint64_t timeout_ms;
    struct mb_fetch *fetch;
    int cancels, n_canceled, code, done;
    char dir[64], path[96];
} t;

int __wrap_mb_gcs_read_package(struct mb_gcs *c, const char *name, uint64_t offset,
                               uint32_t max_bytes, uint64_t timeout_ms, mb_gcs_piece_cb cb,
                               void *arg, struct mb_gcs_op **op, struct mb_err *err);
int __wrap_mb_gcs_kv_fetch(struct mb_gcs *c, const char *ns, const char *key, int fd,
                           uint64_t timeout_ms, mb_gcs_done_cb cb, void *arg, struct mb_gcs_op **op,
                           struct mb_err *err);
void __wrap_mb_gcs_op_cancel(struct mb_gcs_op *op);

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

static void answer_value(uv_timer_t *timer)
{
    struct mb_err err = {0};

    (void)timer;
    assert_int_equal(write(t.fd, "package", 7), 7);
    if (t.cancels)
        mb_fetch_cancel(t.fetch);
    if (t.cancels)
        mb_err_set(&err, t.n_canceled ? MB_ECANCELED : MB_ESTATE, "given up");
    t.value_cb(t.arg, &err);
}

int __wrap_mb_gcs_kv_fetch(struct mb_gcs *c, const char *ns, const char *key, int fd,
                           uint64_t timeout_ms, mb_gcs_done_cb cb, void *arg, struct mb_gcs_op **op,
                           struct mb_err *err)
{
    (void)c, (void)ns, (void)key, (void)err;
    t.timeout_ms = timeout_ms;
    t.fd = fd;
    t.value_cb = cb;
    t.arg = arg;
    *op = (struct mb_gcs_op *)&t;
    return uv_timer_start(&t.timer, answer_value, 0, 0);
}

void __wrap_mb_gcs_op_cancel(struct mb_gcs_op *op)
{
    assert_ptr_equal(op, &t);
    t.n_canceled++;
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

/* Half a gigabyte comes in one answer: more than a short deadline. */
static void a_value_is_the_package(void **state)
{
    char text[16] = "";

    (void)state;
    fetch(0);
    assert_int_equal(t.code, 0);
    assert_true(t.timeout_ms >= 60000);
    FILE *file = fopen(t.path, "r");
    assert_non_null(file);
    assert_int_equal(fread(text, 1, sizeof text, file), 7);
    fclose(file);
    assert_string_equal(text, "package");
    assert_int_equal(unlink(t.path) | rmdir(t.dir), 0);
}

static void given_up_while_it_comes(void **state)
{
    (void)state;
    fetch(1);
    assert_int_equal(t.n_canceled, 1);
    assert_int_equal(t.code, MB_ECANCELED);
    assert_int_equal(access(t.path, F_OK), -1);
    assert_int_equal(rmdir(t.dir), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_value_is_the_package),
        cmocka_unit_test(given_up_while_it_comes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
