/* Uploads on a disk that is slow, hangs or is full: the loop answers others meanwhile, memory stays
 * bounded, nothing is left behind. */
#include "head_fixture.h"
#include <dirent.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/clock.h"
#include "base/fs.h"
#include "../base_http/raw_client.h"

enum { BODY_BYTES = 24 << 20, BOUND_BYTES = 8 << 20, PATIENCE_MS = 20000 };

/* ---- the disk ---- */

static struct {
    uv_mutex_t lock;
    uv_cond_t changed;
    int hangs, is_full;
    int n_hanging;
} disk;

int __real_mb_fs_write_all(int fd, const void *p, size_t n, struct mb_err *err);
int __wrap_mb_fs_write_all(int fd, const void *p, size_t n, struct mb_err *err);

int __wrap_mb_fs_write_all(int fd, const void *p, size_t n, struct mb_err *err)
{
    int is_full;

    uv_mutex_lock(&disk.lock);
    disk.n_hanging++;
    while (disk.hangs)
        uv_cond_wait(&disk.changed, &disk.lock);
    disk.n_hanging--;
    is_full = disk.is_full;
    uv_mutex_unlock(&disk.lock);
    return is_full ? mb_err_set(err, MB_EFULL, "No space left on device")
                   : __real_mb_fs_write_all(fd, p, n, err);
}

static void set_disk(int hangs, int is_full)
{
    uv_mutex_lock(&disk.lock);
    disk.hangs = hangs;
    disk.is_full = is_full;
    uv_cond_broadcast(&disk.changed);
    uv_mutex_unlock(&disk.lock);
}

static int is_hanging(void)
{
    int n;

    uv_mutex_lock(&disk.lock);
    n = disk.n_hanging;
    uv_mutex_unlock(&disk.lock);
    return n > 0;
}

/* ---- the client ---- */

static void start_upload(struct fixture *f, struct raw_client *c, const char *name)
{
    char *request = malloc(BODY_BYTES + 200);
    size_t n;

    assert_non_null(request);
    n = (size_t)sprintf(request,
                        "PUT /api/packages/gcs/%s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                        "Content-Length: %d\r\n\r\n",
                        name, BODY_BYTES);
    for (size_t i = 0; i < BODY_BYTES; i++)
        request[n + i] = (char)(i * 7 + i / 4093);
    raw_client_start(&f->loop, c, mb_head_http_port(f->head), request, n + BODY_BYTES);
    free(request);
}

/* The disk has hung for long enough that all was taken that will be. */
static void let_it_hang(struct fixture *f, struct raw_client *c)
{
    size_t left = 0, before = 1;

    for (uint64_t until = mb_mono_ms() + PATIENCE_MS; !is_hanging() && mb_mono_ms() < until;)
        uv_run(&f->loop, UV_RUN_NOWAIT);
    assert_true(is_hanging());
    for (int i = 0; left != before && i < 100; i++) {
        before = left;
        for (int k = 0; k < 200; k++)
            uv_run(&f->loop, UV_RUN_NOWAIT);
        left = uv_stream_get_write_queue_size((uv_stream_t *)&c->tcp);
    }
    assert_true(left > BODY_BYTES - BOUND_BYTES); /* the rest is the kernel's */
}

static void other_clients_are_answered(struct fixture *f)
{
    struct mb_buf out;

    raw_exchange(&f->loop, mb_head_http_port(f->head),
                 "GET /api/version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", &out);
    assert_non_null(strstr(mb_buf_str(&out), "ray_version"));
    mb_buf_close(&out);
}

static size_t count_files(const struct fixture *f, const char *piece)
{
    DIR *d = opendir(f->dir);
    size_t n = 0;

    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d));)
        n += strstr(e->d_name, piece) != NULL;
    closedir(d);
    return n;
}

static void nothing_is_left(struct fixture *f)
{
    for (uint64_t until = mb_mono_ms() + PATIENCE_MS;
         count_files(f, ".part") > 0 && mb_mono_ms() < until;)
        uv_run(&f->loop, UV_RUN_NOWAIT);
    assert_int_equal(count_files(f, ".part"), 0);
    assert_int_equal(count_files(f, ".zip"), 0);
}

/* ---- */

static void a_disk_that_hangs(void **state)
{
    struct fixture *f = *state;
    struct raw_client c;
    struct mb_buf there = {0};
    char path[128];

    set_disk(1, 0);
    start_upload(f, &c, "a.zip");
    let_it_hang(f, &c);
    other_clients_are_answered(f);
    set_disk(0, 0);
    raw_client_finish(&c);
    assert_non_null(strstr(mb_buf_str(&c.in), "HTTP/1.1 200 "));
    raw_client_free(&c);
    snprintf(path, sizeof path, "%s/a.zip", f->dir);
    assert_int_equal(mb_fs_read(path, BODY_BYTES + 1, &there, NULL), 0);
    assert_int_equal(there.len, BODY_BYTES);
    for (size_t i = 0; i < BODY_BYTES; i++)
        if (((char *)there.data)[i] != (char)(i * 7 + i / 4093))
            fail_msg("byte %zu is another", i);
    mb_buf_close(&there);
    assert_int_equal(count_files(f, ".part"), 0);
}

static void a_disk_that_is_full(void **state)
{
    struct fixture *f = *state;
    struct raw_client c;

    set_disk(1, 1);
    start_upload(f, &c, "b.zip");
    let_it_hang(f, &c);
    set_disk(0, 1);
    raw_client_finish(&c);
    assert_non_null(strstr(mb_buf_str(&c.in), "HTTP/1.1 500 "));
    assert_non_null(strstr(mb_buf_str(&c.in), "No space left on device"));
    raw_client_free(&c);
    nothing_is_left(f);
    set_disk(0, 0);
}

/* The thread that writes has the file and the buffer, until the disk answers it. */
static void a_client_that_goes_while_the_disk_hangs(void **state)
{
    struct fixture *f = *state;
    struct raw_client c;

    set_disk(1, 0);
    start_upload(f, &c, "c.zip");
    let_it_hang(f, &c);
    raw_client_free(&c);
    other_clients_are_answered(f);
    set_disk(0, 0);
    nothing_is_left(f);
}

static void a_head_that_stops_while_the_disk_hangs(void **state)
{
    struct fixture *f = *state;
    struct raw_client c;

    set_disk(1, 0);
    start_upload(f, &c, "d.zip");
    let_it_hang(f, &c);
    fixture_stop_head(f);
    set_disk(0, 0);
    nothing_is_left(f);
    raw_client_free(&c);
}

/* Nothing is written to the disk then. */
static void a_package_that_says_it_is_too_large(void **state)
{
    struct fixture *f = *state;
    struct mb_buf out;

    raw_exchange(&f->loop, mb_head_http_port(f->head),
                 "PUT /api/packages/gcs/e.zip HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                 "Expect: 100-continue\r\nContent-Length: 999999999999\r\n\r\n",
                 &out);
    assert_non_null(strstr(mb_buf_str(&out), "HTTP/1.1 413 "));
    mb_buf_close(&out);
    raw_exchange(&f->loop, mb_head_http_port(f->head),
                 "PUT /api/packages/gcs/empty.zip HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                 "Content-Length: 0\r\n\r\n",
                 &out);
    assert_non_null(strstr(mb_buf_str(&out), "HTTP/1.1 200 "));
    mb_buf_close(&out);
    assert_int_equal(count_files(f, ".zip"), 1);
    assert_int_equal(count_files(f, ".part"), 0);
}

#define EACH(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        EACH(a_disk_that_hangs),
        EACH(a_disk_that_is_full),
        EACH(a_client_that_goes_while_the_disk_hangs),
        EACH(a_head_that_stops_while_the_disk_hangs),
        EACH(a_package_that_says_it_is_too_large),
    };

    uv_mutex_init(&disk.lock);
    uv_cond_init(&disk.changed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
