/* The journal: replay, a kill at every byte, damage at every byte, allocation sweep. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <cmocka.h>
#include "agent/upload/journal.h"
#include "base/alloc.h"
#include "base/errand.h"
#include "base/fs.h"

/* In place of libc's, to count: files, directories. */
static atomic_int n_file_syncs, n_dir_syncs; /* by the flusher's thread */

int fdatasync(int fd)
{
    n_file_syncs++;
    return (int)syscall(SYS_fdatasync, fd);
}

int fsync(int fd)
{
    struct stat st;

    if (fstat(fd, &st) == 0 && S_ISDIR(st.st_mode))
        n_dir_syncs++;
    return (int)syscall(SYS_fsync, fd);
}

static const uint32_t ranks[] = {0};
static const struct mb_upload_file files[] = {{"a", 10, 1, 1, 0},
                                              {"b/c", 20, 0, 0, 1764179000123456789}};

struct fixture {
    char dir[64];
    char path[96];
};

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof(*f));

    strcpy(f->dir, "/tmp/mobula-journal-XXXXXX");
    assert_non_null(mkdtemp(f->dir));
    snprintf(f->path, sizeof(f->path), "%s/j", f->dir);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;

    mb_fs_remove_tree(f->dir, NULL);
    free(f);
    return 0;
}

static struct mb_plan *plan(void)
{
    struct mb_plan *p = NULL;

    assert_int_equal(mb_plan_create(ranks, 1, &p, NULL), MB_OK);
    return p;
}

static int apply(void *arg, const void *payload, size_t n, struct mb_err *err)
{
    return mb_journal_apply(arg, payload, n, err);
}

/* Nine records: two iterations, one committed, one half done. */
static void write_story(const char *path)
{
    struct mb_plan *p = plan();
    struct mb_journal *j;
    struct mb_err err;

    assert_int_equal(mb_journal_open(path, p, &j, &err), MB_OK);
    assert_int_equal(mb_journal_saved(j, 10, 0, "/d10", files, 2, &err), MB_OK);
    assert_int_equal(mb_journal_begin(j, 10, "b/c", "upload-1", &err), MB_OK);
    assert_int_equal(mb_journal_done(j, 10, "a", 0xABCDEF0123456789u, &err), MB_OK);
    assert_int_equal(mb_journal_done(j, 10, "b/c", 2, &err), MB_OK);
    assert_int_equal(mb_journal_part(j, 10, &err), MB_OK);
    assert_int_equal(mb_journal_committed(j, 10, &err), MB_OK);
    assert_int_equal(mb_journal_saved(j, 20, 0, "/d20", files, 2, &err), MB_OK);
    assert_int_equal(mb_journal_begin(j, 20, "b/c", "upload-2", &err), MB_OK);
    assert_int_equal(mb_journal_done(j, 20, "a", 3, &err), MB_OK);
    mb_journal_close(j);
    mb_plan_destroy(p);
}

static void test_replay(void **state)
{
    const struct fixture *f = *state;
    struct mb_plan *p = plan();
    struct mb_plan_iteration *it;
    struct mb_plan_file *file;
    struct mb_journal *j;
    struct mb_err err;

    write_story(f->path);
    assert_int_equal(mb_journal_open(f->path, p, &j, &err), MB_OK);
    assert_int_equal(mb_plan_count(p), 2);
    assert_int_equal(mb_plan_find(p, 10)->state, MB_PLAN_COMMITTED);
    assert_true(mb_plan_find(p, 10)->files[0].crc64nvme == 0xABCDEF0123456789u);
    assert_true(mb_plan_next(p, &it, &file));
    assert_int_equal(it->iteration, 20);
    assert_string_equal(file->path, "b/c");
    assert_string_equal(file->upload_id, "upload-2");
    assert_true(file->mtime_ns == files[1].mtime_ns);
    assert_string_equal(it->dir, "/d20");
    assert_false(mb_plan_next(p, &it, &file));
    assert_int_equal(mb_journal_dropped(j, 20, "test", &err), MB_OK);
    mb_journal_close(j);
    mb_plan_destroy(p);
    p = plan();
    assert_int_equal(mb_journal_open(f->path, p, &j, &err), MB_OK);
    assert_int_equal(mb_plan_find(p, 20)->state, MB_PLAN_DROPPED);
    assert_string_equal(mb_plan_find(p, 20)->error, "test");
    mb_journal_close(j);
    mb_plan_destroy(p);
}

/* What is known of the gang as a whole, and of one whose journal is from before that was noted. */
static void test_gang(void **state)
{
    static const char *const bad[] = {"{\"r\":\"launched\"}", "{\"r\":\"launched\",\"unix_ms\":-1}",
                                      "{\"r\":\"gone\"}"};
    const struct fixture *f = *state;
    struct mb_plan *p = plan();
    struct mb_journal *j;
    struct mb_err err;

    assert_int_equal(mb_journal_open(f->path, p, &j, &err), MB_OK);
    assert_true(mb_plan_gang(p)->launched_unix_ms == 0 && !mb_plan_gang(p)->has_entered);
    assert_int_equal(mb_journal_launched(j, 1234567890123, &err), MB_OK);
    assert_int_equal(mb_journal_entered(j, &err), MB_OK);
    mb_journal_close(j);
    mb_plan_destroy(p);
    p = plan();
    assert_int_equal(mb_journal_open(f->path, p, &j, &err), MB_OK);
    assert_true(mb_plan_gang(p)->launched_unix_ms == 1234567890123);
    assert_true(mb_plan_gang(p)->has_entered);
    mb_journal_close(j);
    mb_plan_destroy(p);
    p = plan();
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++)
        assert_int_equal(mb_journal_apply(p, bad[i], strlen(bad[i]), &err), MB_ECORRUPT);
    assert_int_equal(unlink(f->path), 0);
    assert_int_equal(mb_journal_open(f->path, p, &j, &err), MB_OK);
    assert_int_equal(mb_journal_saved(j, 10, 0, "/d10", files, 2, &err), MB_OK);
    assert_int_equal(mb_journal_place(j, 10, "", &err), MB_OK);
    mb_journal_close(j);
    assert_int_equal(mb_journal_open(f->path, p, &j, &err), MB_OK);
    assert_true(mb_plan_gang(p)->has_entered);
    mb_journal_close(j);
    mb_plan_destroy(p);
}

/* The file cut at every byte: what is whole counts, the rest is cut off, and writing goes on. */
static void test_torn_at_every_byte(void **state)
{
    const struct fixture *f = *state;
    struct mb_buf whole = {0};
    struct mb_err err;
    size_t last_valid = 0;

    write_story(f->path);
    assert_int_equal(mb_fs_read(f->path, 1 << 20, &whole, &err), MB_OK);
    for (size_t cut = 0; cut <= whole.len; cut++) {
        struct mb_plan *p = plan();
        size_t valid = 0, again = 0;
        struct mb_buf longer = {0};

        assert_int_equal(mb_journal_scan(whole.data, cut, apply, p, &valid, &err), MB_OK);
        assert_true(valid <= cut && valid >= last_valid);
        last_valid = valid;
        assert_int_equal(mb_buf_add(&longer, whole.data, valid), MB_OK);
        if (valid > 0) {
            struct mb_plan *q = plan();

            assert_int_equal(mb_journal_scan(longer.data, longer.len, apply, q, &again, &err),
                             MB_OK);
            assert_int_equal(again, valid);
            assert_int_equal(mb_plan_count(q), mb_plan_count(p));
            mb_plan_destroy(q);
        }
        mb_buf_close(&longer);
        mb_plan_destroy(p);
    }
    assert_int_equal(last_valid, whole.len);
    for (size_t cut = 0; cut <= whole.len; cut += 37) {
        struct mb_plan *p = plan();
        struct mb_journal *j;

        assert_int_equal(mb_fs_write_atomic(f->path, whole.data, cut, 0600, &err), MB_OK);
        assert_int_equal(mb_journal_open(f->path, p, &j, &err), MB_OK);
        assert_int_equal(mb_journal_saved(j, 99, 0, "/d99", files, 2, &err), MB_OK);
        mb_journal_close(j);
        mb_plan_destroy(p);
        p = plan();
        assert_int_equal(mb_journal_open(f->path, p, &j, &err), MB_OK);
        assert_non_null(mb_plan_find(p, 99));
        mb_journal_close(j);
        mb_plan_destroy(p);
    }
    mb_buf_close(&whole);
}

/* One byte changed anywhere: either an error, or only the last record is lost; never another plan.
 */
static void test_damage_at_every_byte(void **state)
{
    const struct fixture *f = *state;
    struct mb_buf whole = {0};
    struct mb_err err;
    unsigned errors = 0;

    write_story(f->path);
    assert_int_equal(mb_fs_read(f->path, 1 << 20, &whole, &err), MB_OK);
    for (size_t at = 0; at < whole.len; at++) {
        struct mb_plan *p = plan();
        size_t valid = 0;
        int rc;

        whole.data[at] ^= 0x20;
        rc = mb_journal_scan(whole.data, whole.len, apply, p, &valid, &err);
        if (rc != MB_OK) {
            assert_int_equal(rc, MB_ECORRUPT);
            errors++;
        } else {
            assert_true(valid <= at);
        }
        whole.data[at] ^= 0x20;
        mb_plan_destroy(p);
    }
    assert_true(errors > whole.len / 2);
    mb_buf_close(&whole);
}

static void test_foreign_file(void **state)
{
    const struct fixture *f = *state;
    struct mb_plan *p = plan();
    struct mb_journal *j;
    struct mb_err err;

    assert_int_equal(
        mb_fs_write_atomic(f->path, "hello, world, this is no journal", 32, 0600, &err), MB_OK);
    assert_int_equal(mb_journal_open(f->path, p, &j, &err), MB_ECORRUPT);
    assert_non_null(strstr(err.text, "does not begin with"));
    mb_plan_destroy(p);
}

/* The disk was full for a report, but not for the short record that gives it up. */
static void test_dropped_without_a_report(void **state)
{
    const struct fixture *f = *state;
    struct mb_plan *p = plan();
    struct mb_upload_status status;
    struct mb_journal *j;
    struct mb_err err;

    assert_int_equal(mb_journal_open(f->path, p, &j, &err), MB_OK);
    assert_int_equal(mb_journal_dropped(j, 10, "the disk is full", &err), MB_OK);
    assert_int_equal(mb_journal_saved(j, 20, 0, "/d20", files, 2, &err), MB_OK);
    mb_journal_close(j);
    mb_plan_destroy(p);

    p = plan();
    assert_int_equal(mb_journal_open(f->path, p, &j, &err), MB_OK);
    assert_int_equal(mb_plan_find(p, 20)->state, MB_PLAN_UPLOADING);
    assert_int_equal(mb_plan_find(p, 10)->state, MB_PLAN_DROPPED);
    mb_plan_status(mb_plan_find(p, 10), 16u << 20, &status);
    assert_string_equal(status.error, "the disk is full");
    mb_journal_close(j);
    mb_plan_destroy(p);
}

/* All that was asked for so far. */
static int file_syncs(void)
{
    assert_true(mb_errands_ended(10000));
    return n_file_syncs;
}

/* A new journal gets its name onto the disk, an upload id and a report get there at once, each
 * beside the caller; a file that is done goes with what follows it. */
static void test_what_is_flushed(void **state)
{
    const struct fixture *f = *state;
    struct mb_plan *p = plan();
    struct mb_journal *j;
    struct mb_err err;

    file_syncs();
    n_file_syncs = n_dir_syncs = 0;
    assert_int_equal(mb_journal_open(f->path, p, &j, &err), MB_OK);
    assert_true(file_syncs() == 1 && n_dir_syncs == 1);
    n_file_syncs = 0;
    assert_int_equal(mb_journal_saved(j, 10, 0, "/d10", files, 2, &err), MB_OK);
    assert_int_equal(file_syncs(), 1);
    assert_int_equal(mb_journal_begin(j, 10, "b/c", "upload-1", &err), MB_OK);
    assert_int_equal(file_syncs(), 2);
    for (int i = 0; i < 1000; i++)
        assert_int_equal(mb_journal_done(j, 10, "a", 1, &err), MB_OK);
    assert_int_equal(file_syncs(), 2);
    for (int i = 0; i < 20000; i++) /* 1.6 MB: not for ever */
        assert_int_equal(mb_journal_done(j, 10, "a", 1, &err), MB_OK);
    assert_true(file_syncs() > 2 && n_file_syncs < 10);
    n_file_syncs = 0;
    assert_int_equal(mb_journal_part(j, 10, &err), MB_OK);
    assert_int_equal(file_syncs(), 1);
    mb_journal_close(j);
    mb_plan_destroy(p);
}

enum { MANY = 100000 };

static struct mb_upload_file *many_files(void)
{
    static char names[MANY][200];
    static struct mb_upload_file many[MANY];

    for (int i = 0; i < MANY; i++) {
        memset(names[i], 'x', 190);
        snprintf(names[i] + 180, 20, "/%d", i);
        many[i] = (struct mb_upload_file){names[i], (uint64_t)i, 7, 1, 0};
    }
    return many;
}

/* 100,000 files with long paths in one report, whole or not there at all. */
static void test_a_long_report(void **state)
{
    const struct fixture *f = *state;
    struct mb_plan *p = plan();
    struct mb_journal *j;
    struct mb_err err;
    struct stat st;

    assert_int_equal(mb_journal_open(f->path, p, &j, &err), MB_OK);
    assert_int_equal(mb_journal_saved(j, 10, 0, "/d10", many_files(), MANY, &err), MB_OK);
    mb_journal_close(j);
    mb_plan_destroy(p);
    p = plan();
    assert_int_equal(mb_journal_open(f->path, p, &j, &err), MB_OK);
    assert_int_equal(mb_plan_find(p, 10)->n_files, MANY);
    assert_int_equal(mb_plan_find(p, 10)->state, MB_PLAN_UPLOADING);
    mb_journal_close(j);
    mb_plan_destroy(p);
    assert_int_equal(stat(f->path, &st), 0);
    for (int i = 0; i < 2; i++) { /* torn at its end: reported again */
        assert_int_equal(truncate(f->path, st.st_size - 1), 0);
        p = plan();
        assert_int_equal(mb_journal_open(f->path, p, &j, &err), MB_OK);
        assert_null(mb_plan_find(p, 10));
        assert_int_equal(mb_journal_saved(j, 10, 0, "/d10", many_files(), MANY, &err), MB_OK);
        mb_journal_close(j);
        mb_plan_destroy(p);
        p = plan();
        assert_int_equal(mb_journal_open(f->path, p, &j, &err), MB_OK);
        assert_int_equal(mb_plan_find(p, 10)->n_files, MANY);
        mb_journal_close(j);
        mb_plan_destroy(p);
        assert_int_equal(stat(f->path, &st), 0);
    }
}

static uint64_t size_of(const char *path)
{
    struct stat st;

    return stat(path, &st) == 0 ? (uint64_t)st.st_size : 0;
}

static void note_and_apply(struct mb_journal *j, struct mb_plan *p, int64_t iteration, int last)
{
    struct mb_plan_iteration *it;
    struct mb_err err;

    assert_int_equal(mb_plan_saved(p, iteration, 0, "/d", many_files(), 3000, &err), MB_OK);
    assert_int_equal(mb_journal_saved(j, iteration, 0, "/d", many_files(), 3000, &err), MB_OK);
    it = mb_plan_find(p, iteration);
    assert_int_equal(mb_journal_place(j, iteration, "", &err), MB_OK);
    assert_int_equal(mb_plan_place(it, "", &err), MB_OK);
    for (size_t i = 0; i < it->n_files - (size_t)!last; i++) {
        assert_int_equal(mb_journal_done(j, iteration, it->files[i].path, 7, &err), MB_OK);
        mb_plan_file_done(&it->files[i], 7);
    }
    if (!last) {
        it->files[2999].upload_id = mb_strdup("upload-1");
        assert_int_equal(mb_journal_begin(j, iteration, it->files[2999].path, "upload-1", &err), 0);
        return;
    }
    assert_int_equal(mb_journal_part(j, iteration, &err), MB_OK);
    assert_int_equal(mb_plan_event(it, MB_PLAN_EV_PART_SENT, NULL, &err), MB_OK);
    assert_int_equal(mb_journal_committed(j, iteration, &err), MB_OK);
    assert_int_equal(mb_plan_event(it, MB_PLAN_EV_COMMITTED, NULL, &err), MB_OK);
    mb_plan_shed(it);
}

/* What is durable takes no room for ever, and nothing that still counts is lost. */
static void test_it_is_shortened(void **state)
{
    const struct fixture *f = *state;
    struct mb_plan *p = plan();
    struct mb_plan_iteration *it;
    struct mb_journal *j;
    struct mb_err err;
    uint64_t most = 0;

    assert_int_equal(mb_journal_open(f->path, p, &j, &err), MB_OK);
    assert_int_equal(mb_journal_launched(j, 1234567890123, &err), MB_OK);
    mb_plan_gang(p)->launched_unix_ms = 1234567890123;
    note_and_apply(j, p, 5, 0); /* stays on its way */
    for (int64_t iteration = 10; iteration < 40; iteration++) {
        note_and_apply(j, p, iteration, 1);
        assert_int_equal(mb_journal_shorten(j, p, &err), MB_OK);
        most = size_of(f->path) > most ? size_of(f->path) : most;
    }
    print_message("at most %llu bytes\n", (unsigned long long)most);
    assert_true(most < 20 << 20); /* of 30 x 2 MB */
    assert_int_equal(mb_journal_dropped(j, 50, "why", &err), MB_OK);
    mb_journal_close(j);
    mb_plan_destroy(p);
    p = plan();
    assert_int_equal(mb_journal_open(f->path, p, &j, &err), MB_OK);
    assert_true(mb_plan_gang(p)->launched_unix_ms == 1234567890123);
    for (int64_t iteration = 10; iteration < 40; iteration++)
        assert_int_equal(mb_plan_find(p, iteration)->state, MB_PLAN_COMMITTED);
    assert_int_equal(mb_plan_find(p, 50)->state, MB_PLAN_DROPPED);
    it = mb_plan_find(p, 5);
    assert_true(it->state == MB_PLAN_UPLOADING && it->n_files == 3000 && it->n_done == 2999);
    assert_string_equal(it->files[2999].upload_id, "upload-1");
    assert_string_equal(it->place, "");
    mb_journal_close(j);
    mb_plan_destroy(p);
}

static void test_allocation_sweep(void **state)
{
    const struct fixture *f = *state;
    unsigned long n = 0;

    write_story(f->path);
    do {
        struct mb_plan *p = plan();
        struct mb_journal *j = NULL;

        mb_alloc_fail_nth(++n);
        if (mb_journal_open(f->path, p, &j, NULL) == MB_OK)
            assert_int_equal(mb_plan_count(p), 2);
        else
            assert_true(mb_alloc_did_fail());
        mb_journal_close(j);
        mb_plan_destroy(p);
    } while (mb_alloc_did_fail());
    mb_alloc_fail_nth(0);
    assert_true(n > 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_gang, setup, teardown),
        cmocka_unit_test_setup_teardown(test_replay, setup, teardown),
        cmocka_unit_test_setup_teardown(test_torn_at_every_byte, setup, teardown),
        cmocka_unit_test_setup_teardown(test_damage_at_every_byte, setup, teardown),
        cmocka_unit_test_setup_teardown(test_foreign_file, setup, teardown),
        cmocka_unit_test_setup_teardown(test_dropped_without_a_report, setup, teardown),
        cmocka_unit_test_setup_teardown(test_what_is_flushed, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_long_report, setup, teardown),
        cmocka_unit_test_setup_teardown(test_it_is_shortened, setup, teardown),
        cmocka_unit_test_setup_teardown(test_allocation_sweep, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
