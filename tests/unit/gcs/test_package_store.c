/* Parts of a package are in the shared store with its record, or not at all; a head that takes over
 * writes it to its disk in slices. */
#include "loop.h"
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>
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

static int n_restored; /* how often the end of it was told */

static void on_restored(struct mb_head *h)
{
    assert_null(h->restore);
    n_restored++;
}

/* Turns of the loop that it took. */
static int restore(struct fixture *f)
{
    int turns = 0, told = n_restored;

    head_packages_restore(&f->head, on_restored);
    for (; f->head.restore && turns < 100000; turns++)
        uv_run(&f->loop, UV_RUN_ONCE);
    assert_null(f->head.restore);
    assert_int_equal(n_restored, told + 1);
    return turns;
}

static void assert_on_disk(const struct fixture *f, const char *name, const char *bytes, size_t n)
{
    char path[96];
    struct mb_buf there = {0};
    struct mb_err err = {0};

    snprintf(path, sizeof path, "%s/%s", f->dir, name);
    assert_int_equal(mb_fs_read(path, n + 1, &there, &err), 0);
    assert_int_equal(there.len, n);
    assert_memory_equal(mb_buf_str(&there), bytes, n);
    mb_buf_close(&there);
}

static size_t count_files(const struct fixture *f, const char *end)
{
    DIR *d = opendir(f->dir);
    size_t n = 0;

    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d));) {
        size_t len = strlen(e->d_name);
        n += len > strlen(end) && strcmp(e->d_name + len - strlen(end), end) == 0;
    }
    closedir(d);
    return n;
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
    restore(&f);
    assert_int_equal(mb_tables_count(f.head.store, MB_TABLES_KV), 4);
    assert_on_disk(&f, "p.zip", f.bytes, SIZE_BYTES);
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
    restore(&f);
    assert_int_equal(mb_tables_count(f.head.store, MB_TABLES_KV), 4);
    end(&f);
}

/* ---- a head that takes over ---- */

enum { N_PACKAGES = 5 };

static void keep_many(struct fixture *f)
{
    struct answer a = {0};
    struct mb_err err = {0};

    for (size_t i = 0; i < SIZE_BYTES; i++)
        f->bytes[i] = (char)(i * 7 + i / 4093);
    for (int i = 0; i < N_PACKAGES; i++) {
        char name[16];
        snprintf(name, sizeof name, "p%d.zip", i);
        a.n = 0;
        assert_int_equal(head_package_keep(&f->head, name,
                                           head_blob(f->bytes, SIZE_BYTES - (size_t)i), on_kept, &a,
                                           &err),
                         0);
        loop_until(&f->loop, &a.n);
        assert_int_equal(a.code, 0);
    }
}

/* A job whose package comes yet waits, it does not fail. */
static int start_code(struct fixture *f)
{
    struct mb_err err = {0};
    struct head_job job = {
        .id = (char[]){"j"},
        .info = json_pack("{s:s}", "runtime_env_json", "{\"working_dir\": \"gcs://p4.zip\"}")};
    int rc = head_job_start_driver(&f->head, &job, &err);

    json_decref(job.info);
    return rc;
}

static void what_is_kept_comes_in_slices(void **state)
{
    struct fixture f;
    struct mb_blob part;

    (void)state;
    begin(&f);
    keep_many(&f);
    assert_int_equal(start_code(&f), MB_ENOENT);
    head_packages_restore(&f.head, on_restored);
    assert_non_null(f.head.restore); /* nothing of it was done inside of the call */
    assert_int_equal(start_code(&f), MB_EUNAVAIL);
    head_packages_restore_close(&f.head); /* this head ends, another one begins */
    int turns = restore(&f);
    assert_true(turns >= N_PACKAGES * 3); /* one part at most in each */
    for (int i = 0; i < N_PACKAGES; i++) {
        char name[16];
        snprintf(name, sizeof name, "p%d.zip", i);
        assert_on_disk(&f, name, f.bytes, SIZE_BYTES - (size_t)i);
    }
    assert_true(head_package_part(&f.head, "p0.zip", 2, &part));
    assert_int_equal(part.n, 5);
    assert_int_equal(restore(&f), 0); /* all are here */
    settle(&f);
    assert_int_equal(count_files(&f, ".part"), 0);
    end(&f);
}

/* Parts that are missing, a name that is none, a disk that takes nothing: the others come. */
static void what_cannot_be_restored_is_passed_over(void **state)
{
    struct fixture f;
    struct mb_err err = {0};
    struct rlimit old, tight = {0};

    (void)state;
    begin(&f);
    keep_many(&f);
    assert_int_equal(mb_tables_del(f.head.store, MB_TABLES_KV, mb_blob_str("mobula"),
                                   mb_blob_str("package_part:p1.zip/1"), NULL, NULL, &err),
                     0);
    assert_int_equal(mb_tables_put(f.head.store, MB_TABLES_KV, mb_blob_str("mobula"),
                                   mb_blob_str("package_part:p2.zip/2"), mb_blob_str("x"), NULL,
                                   NULL, &err),
                     0);
    assert_int_equal(mb_tables_put(f.head.store, MB_TABLES_KV, mb_blob_str("mobula"),
                                   mb_blob_str("package:../../up"), mb_blob_str("5"), NULL, NULL,
                                   &err),
                     0);
    settle(&f);
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    tight.rlim_max = old.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &tight), 0);
    restore(&f);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_int_equal(count_files(&f, "zip") + count_files(&f, ".part"), 0);
    restore(&f);
    assert_int_equal(count_files(&f, ".zip"), N_PACKAGES - 2);
    assert_int_equal(count_files(&f, ".part"), 0);
    assert_on_disk(&f, "p4.zip", f.bytes, SIZE_BYTES - 4);
    end(&f);
}

static void a_restore_without_memory(void **state)
{
    struct fixture f;
    int failed = 1;

    (void)state;
    begin(&f);
    keep_many(&f);
    for (unsigned long nth = 1; failed; nth++) {
        mb_alloc_fail_nth(nth);
        head_packages_restore(&f.head, on_restored);
        for (int i = 0; f.head.restore && i < 100000; i++)
            uv_run(&f.loop, UV_RUN_ONCE);
        failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        assert_null(f.head.restore);
        assert_int_equal(count_files(&f, ".part"), 0);
        for (int i = 0; i < N_PACKAGES && failed; i++) {
            char path[96];
            snprintf(path, sizeof path, "%s/p%d.zip", f.dir, i);
            unlink(path);
        }
    }
    assert_int_equal(count_files(&f, ".zip"), N_PACKAGES);
    end(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_package_is_whole),
        cmocka_unit_test(without_memory_nothing_stays),
        cmocka_unit_test(a_record_that_is_not_committed),
        cmocka_unit_test(a_head_that_died_amid_an_upload),
        cmocka_unit_test(what_is_kept_comes_in_slices),
        cmocka_unit_test(what_cannot_be_restored_is_passed_over),
        cmocka_unit_test(a_restore_without_memory),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
