/* Parts of a package are in the shared store with its record, or not at all. */
#include "loop.h"
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "gcs/services.h"

enum { SIZE_BYTES = (2 << 20) + 5 }; /* three parts */

struct fixture {
    uv_loop_t loop;
    struct mb_head head; /* as much of it as is needed */
    char dir[32], path[64];
    char *bytes;
};

struct answer {
    int n, code;
};

static void on_kept(void *arg, const struct mb_err *err)
{
    struct answer *a = arg;

    a->n++;
    a->code = err->code;
}

static void on_closed(void *arg)
{
    *(int *)arg = 1;
}

static void on_barrier(void *arg, const struct mb_err *err)
{
    (void)err;
    *(int *)arg = 1;
}

static void begin(struct fixture *f)
{
    struct mb_err err = {0};

    memset(f, 0, sizeof *f);
    strcpy(f->dir, "/tmp/mb-packages-XXXXXX");
    assert_non_null(mkdtemp(f->dir));
    snprintf(f->path, sizeof f->path, "%s/store", f->dir);
    f->bytes = calloc(1, SIZE_BYTES);
    assert_non_null(f->bytes);
    uv_loop_init(&f->loop);
    assert_int_equal(mb_tables_open_sqlite(&f->loop, f->path, 0, &f->head.store, &err), 0);
    f->head.loop = &f->loop;
    f->head.packages_dir = f->dir;
    f->head.redis = (struct mb_redis *)(uintptr_t)1; /* shared: it is only asked whether */
}

static void settle(struct fixture *f)
{
    struct mb_err err = {0};
    int done = 0;

    assert_int_equal(mb_tables_barrier(f->head.store, on_barrier, &done, &err), 0);
    loop_until(&f->loop, &done);
}

static void end(struct fixture *f)
{
    struct mb_err err = {0};
    int closed = 0;

    mb_tables_close(f->head.store, on_closed, &closed);
    loop_until(&f->loop, &closed);
    uv_run(&f->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&f->loop), 0);
    free(f->bytes);
    assert_int_equal(mb_fs_remove_tree(f->dir, &err), 0);
}

static int keep(struct fixture *f, struct answer *a, struct mb_err *err)
{
    return head_package_keep(&f->head, "p.zip", head_blob(f->bytes, SIZE_BYTES), on_kept, a, err);
}

static void a_package_is_whole(void **state)
{
    struct fixture f;
    struct answer a = {0};
    struct mb_err err = {0};

    (void)state;
    begin(&f);
    assert_int_equal(keep(&f, &a, &err), 0);
    loop_until(&f.loop, &a.n);
    assert_int_equal(a.code, 0);
    assert_int_equal(mb_tables_count(f.head.store, MB_TABLES_KV), 4);
    head_packages_restore(&f.head);
    assert_int_equal(mb_tables_count(f.head.store, MB_TABLES_KV), 4);
    head_package_drop(&f.head, "p.zip");
    assert_int_equal(mb_tables_count(f.head.store, MB_TABLES_KV), 0);
    end(&f);
}

static void without_memory_nothing_stays(void **state)
{
    struct fixture f;
    struct mb_err err = {0};
    int failed = 1;

    (void)state;
    begin(&f);
    for (unsigned long nth = 1; failed; nth++) {
        struct answer a = {0};
        mb_alloc_fail_nth(nth);
        int rc = keep(&f, &a, &err);
        failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        assert_int_equal(rc, failed ? MB_ENOMEM : 0);
        assert_int_equal(mb_tables_count(f.head.store, MB_TABLES_KV), failed ? 0 : 4);
        if (!failed)
            loop_until(&f.loop, &a.n);
    }
    end(&f);
}

/* The record is the first that the disk does not take. */
static void a_record_that_is_not_committed(void **state)
{
    struct fixture f;
    struct answer a = {0};
    struct rlimit old, tight = {0};
    struct mb_err err = {0};

    (void)state;
    begin(&f);
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    tight.rlim_max = old.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &tight), 0);
    assert_int_equal(keep(&f, &a, &err), 0);
    loop_until(&f.loop, &a.n);
    assert_int_not_equal(a.code, 0);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    settle(&f);
    assert_int_equal(mb_tables_count(f.head.store, MB_TABLES_KV), 0);
    end(&f);
}

static void a_head_that_died_amid_an_upload(void **state)
{
    struct fixture f;
    struct answer a = {0};
    struct mb_err err = {0};

    (void)state;
    begin(&f);
    assert_int_equal(keep(&f, &a, &err), 0);
    loop_until(&f.loop, &a.n);
    for (int i = 0; i < 3; i++) {
        char key[40];
        snprintf(key, sizeof key, "package_part:half.zip/%d", i);
        assert_int_equal(mb_tables_put(f.head.store, MB_TABLES_KV, mb_blob_str("mobula"),
                                       mb_blob_str(key), mb_blob_str("x"), NULL, NULL, &err),
                         0);
    }
    head_packages_restore(&f.head);
    assert_int_equal(mb_tables_count(f.head.store, MB_TABLES_KV), 4);
    end(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_package_is_whole),
        cmocka_unit_test(without_memory_nothing_stays),
        cmocka_unit_test(a_record_that_is_not_committed),
        cmocka_unit_test(a_head_that_died_amid_an_upload),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
