/* Archives that mean harm, and the packages of a job on disk. */
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <archive.h>
#include <archive_entry.h>
#include <cmocka.h>
#include "agent/job_packages.h"
#include "agent/unpack/run.h"
#include "agent/unpack/unpack.h"
#include "base/alloc.h"
#include "base/buf.h"
#include "base/fs.h"

static char dir[64];
static struct mb_err err;

static int set_up(void **state)
{
    (void)state;
    snprintf(dir, sizeof(dir), "/tmp/mb-unpack-XXXXXX");
    return mkdtemp(dir) != NULL ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    return mb_fs_remove_tree(dir, &err);
}

static const char *at(const char *name)
{
    static char paths[4][200];
    static int turn;

    turn = (turn + 1) % 4;
    snprintf(paths[turn], sizeof(paths[turn]), "%s/%s", dir, name);
    return paths[turn];
}

enum format { ZIP, TAR_GZ, TAR_XZ, CPIO };

struct entry {
    const char *name, *text; /* text NULL: a link */
    const char *symlink, *hardlink;
    mode_t type, perm; /* 0: a regular file or link, 0644 */
};

static void write_archive(const char *path, enum format format, const struct entry *entries)
{
    struct archive *a = archive_write_new();

    if (format == ZIP)
        archive_write_set_format_zip(a);
    else if (format == CPIO)
        archive_write_set_format_cpio(a);
    else
        archive_write_set_format_pax_restricted(a);
    if (format == TAR_GZ)
        archive_write_add_filter_gzip(a);
    if (format == TAR_XZ)
        archive_write_add_filter_xz(a);
    assert_int_equal(archive_write_open_filename(a, path), ARCHIVE_OK);
    for (; entries->name != NULL; entries++) {
        struct archive_entry *e = archive_entry_new();

        archive_entry_set_pathname(e, entries->name);
        archive_entry_set_perm(e, entries->perm != 0 ? entries->perm : 0644);
        archive_entry_set_filetype(e, entries->symlink != NULL ? AE_IFLNK : AE_IFREG);
        if (entries->type != 0)
            archive_entry_set_filetype(e, entries->type);
        if (entries->symlink != NULL)
            archive_entry_set_symlink(e, entries->symlink);
        if (entries->hardlink != NULL)
            archive_entry_set_hardlink(e, entries->hardlink);
        archive_entry_set_uid(e, getuid());
        archive_entry_set_gid(e, getgid());
        archive_entry_set_size(e, entries->text != NULL ? (la_int64_t)strlen(entries->text) : 0);
        assert_int_equal(archive_write_header(a, e), ARCHIVE_OK);
        if (entries->text != NULL)
            archive_write_data(a, entries->text, strlen(entries->text));
        archive_entry_free(e);
    }
    assert_int_equal(archive_write_close(a), ARCHIVE_OK);
    archive_write_free(a);
}

static int unpack(enum format format, const struct entry *entries,
                  const struct mb_unpack_limits *limits)
{
    write_archive(at("package"), format, entries);
    assert_int_equal(mb_fs_mkdir_p(at("out"), 0755, &err), 0);
    return mb_unpack(at("package"), at("out"), limits, &err);
}

static void formats(void **state)
{
    static const struct entry good[] = {{.name = "a/b.txt", .text = "x"}, {.name = NULL}};

    (void)state;
    for (int f = ZIP; f <= TAR_XZ; f++) {
        assert_int_equal(unpack((enum format)f, good, &mb_unpack_limits), 0);
        assert_true(mb_fs_exists(at("out/a/b.txt")));
        assert_int_equal(mb_fs_remove_tree(at("out"), &err), 0);
    }
    assert_int_equal(unpack(CPIO, good, &mb_unpack_limits), MB_ECORRUPT);
}

static void names(void **state)
{
    static const char *const inside[] = {"a",     "a/b",     "..a", "a..",
                                         "a/..b", "a/b../c", "...", "./a"};
    static const char *const outside[] = {"", "/a", "..", "../a", "a/..", "a/../b", "a//.."};

    (void)state;
    for (size_t i = 0; i < sizeof(inside) / sizeof(inside[0]); i++)
        if (!mb_unpack_is_inside(inside[i]))
            fail_msg("%s is inside", inside[i]);
    for (size_t i = 0; i < sizeof(outside) / sizeof(outside[0]); i++)
        if (mb_unpack_is_inside(outside[i]))
            fail_msg("%s is outside", outside[i]);
    assert_false(mb_unpack_is_inside(NULL));
}

static void nothing_leaves_the_directory(void **state)
{
    static const struct entry harm[][3] = {
        {{.name = "../up", .text = "x"}},
        {{.name = "a/../../up", .text = "x"}},
        {{.name = "/tmp/mb-unpack-absolute", .text = "x"}},
        {{.name = "link", .symlink = ".."}, {.name = "link/up", .text = "x"}},
        {{.name = "link", .hardlink = "../package"}},
        {{.name = "link", .hardlink = "/etc/passwd"}},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(harm) / sizeof(harm[0]); i++) {
        if (unpack(TAR_GZ, harm[i], &mb_unpack_limits) != MB_EDENIED)
            fail_msg("archive %zu: %s", i, err.text);
        /* Ours to find, but for the way through a link, which only libarchive sees. */
        if (harm[i][0].symlink == NULL)
            assert_non_null(strstr(err.text, "leaves the directory"));
        assert_false(mb_fs_exists(at("up")));
        assert_int_equal(mb_fs_remove_tree(at("out"), &err), 0);
    }
    assert_false(mb_fs_exists("/tmp/mb-unpack-absolute"));
}

static void only_files_directories_and_links(void **state)
{
    static const struct entry special[][2] = {{{.name = "null", .type = AE_IFCHR}},
                                              {{.name = "disk", .type = AE_IFBLK}},
                                              {{.name = "pipe", .type = AE_IFIFO}}};
    char name[32];

    (void)state;
    for (size_t i = 0; i < sizeof(special) / sizeof(special[0]); i++) {
        if (unpack(TAR_GZ, special[i], &mb_unpack_limits) != MB_EDENIED)
            fail_msg("archive %zu: %s", i, err.text);
        assert_non_null(strstr(err.text, "neither a file nor a directory nor a link"));
        snprintf(name, sizeof(name), "out/%s", special[i][0].name);
        assert_false(mb_fs_exists(at(name)));
        assert_int_equal(mb_fs_remove_tree(at("out"), &err), 0);
    }
}

static mode_t mode_of(const char *path)
{
    struct stat st;

    assert_int_equal(stat(path, &st), 0);
    return st.st_mode & 07777;
}

/* The archive's owner is the user of this test, the only one for whom libarchive sets the bits. */
static void never_setuid(void **state)
{
    static const struct entry bits[] = {{.name = "u", .text = "x", .perm = 04755},
                                        {.name = "g", .text = "x", .perm = 02711},
                                        {.name = "d", .type = AE_IFDIR, .perm = 07750},
                                        {.name = NULL}};

    (void)state;
    for (int f = ZIP; f <= TAR_XZ; f++) {
        assert_int_equal(unpack((enum format)f, bits, &mb_unpack_limits), 0);
        assert_int_equal(mode_of(at("out/u")), 0755);
        assert_int_equal(mode_of(at("out/g")), 0711);
        assert_int_equal(mode_of(at("out/d")), 0750);
        assert_int_equal(mb_fs_remove_tree(at("out"), &err), 0);
    }
}

/* Who made the archive, to its directory's records, which are the only ones that have it. */
static void set_system(const char *path, uint8_t system)
{
    struct mb_buf b = {0};

    assert_int_equal(mb_fs_read(path, 1 << 20, &b, &err), 0);
    for (size_t i = 0; i + 46 <= b.len; i++)
        if (memcmp(b.data + i, "PK\1\2", 4) == 0)
            b.data[i + 5] = system;
    assert_int_equal(mb_fs_write_atomic(path, b.data, b.len, 0644, &err), 0);
    mb_buf_close(&b);
}

/* "\\" is a letter of a name on Unix; what Windows made has it between directories. */
static void backslashes_in_names(void **state)
{
    static const struct entry odd[] = {{.name = "plain", .text = "1"},
                                       {.name = "back\\slash", .text = "22"},
                                       {.name = "back/slash", .text = "333"},
                                       {.name = "d/b\\s", .text = "4444"},
                                       {.name = "\xc3\xbc\\x", .text = "55555"},
                                       {.name = "..\\..\\up", .text = "666666"},
                                       {.name = NULL}};
    static const struct {
        const char *name;
        off_t size;
    } unix_made[] = {{"out/plain", 1},  {"out/back\\slash", 2}, {"out/back/slash", 3},
                     {"out/d/b\\s", 4}, {"out/\xc3\xbc\\x", 5}, {"out/..\\..\\up", 6}};
    static const uint8_t unix_systems[] = {3, 19}, windows_systems[] = {0, 10};
    struct stat st;

    (void)state;
    for (size_t i = 0; i < sizeof(unix_systems); i++) {
        write_archive(at("package"), ZIP, odd);
        set_system(at("package"), unix_systems[i]);
        assert_int_equal(mb_fs_mkdir_p(at("out"), 0755, &err), 0);
        if (mb_unpack(at("package"), at("out"), &mb_unpack_limits, &err) != 0)
            fail_msg("made by %d: %s", unix_systems[i], err.text);
        for (size_t k = 0; k < sizeof(unix_made) / sizeof(unix_made[0]); k++)
            if (stat(at(unix_made[k].name), &st) != 0 || st.st_size != unix_made[k].size)
                fail_msg("made by %d: %s", unix_systems[i], unix_made[k].name);
        assert_int_equal(mb_fs_remove_tree(at("out"), &err), 0);
    }
    for (size_t i = 0; i < sizeof(windows_systems); i++) {
        static const struct entry windows[] = {
            {.name = "dir\\a", .text = "1"}, {.name = "\xc3\xbc\\x", .text = "22"}, {.name = NULL}};

        write_archive(at("package"), ZIP, windows);
        set_system(at("package"), windows_systems[i]);
        assert_int_equal(mb_fs_mkdir_p(at("out"), 0755, &err), 0);
        assert_int_equal(mb_unpack(at("package"), at("out"), &mb_unpack_limits, &err), 0);
        assert_true(mb_fs_exists(at("out/dir/a")));
        assert_true(mb_fs_exists(at("out/\xc3\xbc/x")));
        assert_int_equal(mb_fs_remove_tree(at("out"), &err), 0);
        write_archive(at("package"), ZIP, odd);
        set_system(at("package"), windows_systems[i]);
        assert_int_equal(mb_fs_mkdir_p(at("out"), 0755, &err), 0);
        assert_int_equal(mb_unpack(at("package"), at("out"), &mb_unpack_limits, &err), MB_EDENIED);
        assert_false(mb_fs_exists(at("up")));
        assert_int_equal(mb_fs_remove_tree(at("out"), &err), 0);
    }
}

/* Why a disk took no more, beside libarchive's "Write failed": here a bound on files' sizes. */
static void why_nothing_can_be_written(void **state)
{
    static char text[3 * 4096];
    const struct entry big[] = {{.name = "big", .text = text}, {.name = NULL}};
    struct rlimit whole, small;
    int rc;

    (void)state;
    memset(text, 'x', sizeof(text) - 1);
    write_archive(at("package"), ZIP, big);
    assert_int_equal(mb_fs_mkdir_p(at("out"), 0755, &err), 0);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &whole), 0);
    small = (struct rlimit){4096, whole.rlim_max};
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    rc = mb_unpack(at("package"), at("out"), &mb_unpack_limits, &err);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &whole), 0);
    assert_int_equal(rc, MB_EIO);
    assert_non_null(strstr(err.text, ": Write failed: File too large"));
}

static void bombs(void **state)
{
    static const struct entry many[] = {
        {.name = "a", .text = "0123456789"}, {.name = "b", .text = "0123456789"}, {.name = NULL}};
    const struct mb_unpack_limits few = {1, 1000}, small = {10, 19}, enough = {2, 20};

    (void)state;
    assert_int_equal(unpack(ZIP, many, &few), MB_EFULL);
    assert_int_equal(unpack(ZIP, many, &small), MB_EFULL);
    assert_int_equal(unpack(ZIP, many, &enough), 0);
}

/* ---- in a process of its own ---- */

static struct mb_unpack_child child = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void write_script(const char *path, const char *text)
{
    assert_int_equal(mb_fs_write_atomic(path, text, strlen(text), 0600, &err), 0);
}

static void by_a_program(void **state)
{
    static const struct entry good[] = {{.name = "a.txt", .text = "a"}, {.name = NULL}};
    static const struct entry bad[] = {{.name = "../out", .text = "x"}, {.name = NULL}};

    (void)state;
    write_archive(at("good.zip"), ZIP, good);
    write_archive(at("bad.zip"), ZIP, bad);
    assert_int_equal(mb_fs_mkdir_p(at("to"), 0700, &err), 0);
    assert_int_equal(mb_unpack_run(MOBULA_UNPACK, at("good.zip"), at("to"), &child, &err), 0);
    assert_true(mb_fs_exists(at("to/a.txt")));
    assert_int_equal(mb_unpack_run(MOBULA_UNPACK, at("bad.zip"), at("to"), &child, &err),
                     MB_EDENIED);
    assert_non_null(strstr(err.text, "bad.zip: entry ../out leaves the directory"));
    assert_int_equal(mb_unpack_run(at("none"), at("good.zip"), at("to"), &child, &err), MB_ENOENT);
    assert_non_null(strstr(err.text, "good.zip"));
}

/* What archives from outside are read by knows no keys of the object store. */
static void a_program_without_keys(void **state)
{
    (void)state;
    setenv("AWS_SECRET_ACCESS_KEY", "hush", 1);
    setenv("MOBULA_TEST_OTHER", "other", 1);
    write_script(at("package"), "test \"$MOBULA_TEST_OTHER\" = other || exit 3\n"
                                "test -z \"$AWS_SECRET_ACCESS_KEY\" || exit 4\n");
    assert_int_equal(mb_unpack_run("/bin/sh", at("package"), dir, &child, &err), 0);
    unsetenv("AWS_SECRET_ACCESS_KEY");
    unsetenv("MOBULA_TEST_OTHER");
}

/* A shell in its place takes the package for its script. */
static void a_program_that_dies(void **state)
{
    (void)state;
    write_script(at("package"), "kill -SEGV $$\n");
    assert_int_equal(mb_unpack_run("/bin/sh", at("package"), dir, &child, &err), MB_ECORRUPT);
    assert_non_null(strstr(err.text, "ended by signal 11"));
    write_script(at("package"), "exit 65\n");
    assert_int_equal(mb_unpack_run("/bin/sh", at("package"), dir, &child, &err), MB_EIO);
    assert_non_null(strstr(err.text, "status 65 and no reason"));
    write_script(at("package"), "echo '-4 no such thing'; exit 65\n"); /* they differ */
    assert_int_equal(mb_unpack_run("/bin/sh", at("package"), dir, &child, &err), MB_EIO);
    write_script(at("package"),
                 "yes | head -c 100000; exit 1\n"); /* it is not waited for in vain */
    assert_int_equal(mb_unpack_run("/bin/sh", at("package"), dir, &child, &err), MB_EIO);
}

struct running {
    struct mb_unpack_child child;
    char path[200];
};

static void *cancel_when_it_runs(void *arg)
{
    struct running *r = arg;
    const struct timespec t = {.tv_nsec = 1000000};

    while (!mb_fs_exists(r->path))
        nanosleep(&t, NULL);
    mb_unpack_cancel(&r->child);
    return NULL;
}

/* However deaf the program is, and also before it began. */
static void a_program_that_is_ended(void **state)
{
    struct running r;
    pthread_t thread;
    char text[600], package[200];

    (void)state;
    mb_unpack_child_init(&r.child);
    snprintf(r.path, sizeof(r.path), "%s", at("runs"));
    snprintf(package, sizeof(package), "%s", at("package"));
    snprintf(text, sizeof(text), "trap '' TERM INT HUP; : > %s; kill -STOP $$; sleep 1000\n",
             r.path);
    write_script(package, text);
    assert_int_equal(pthread_create(&thread, NULL, cancel_when_it_runs, &r), 0);
    assert_int_equal(mb_unpack_run("/bin/sh", package, dir, &r.child, &err), MB_ECANCELED);
    assert_non_null(strstr(err.text, "was ended"));
    pthread_join(thread, NULL);
    assert_int_equal(unlink(r.path), 0);
    assert_int_equal(mb_unpack_run("/bin/sh", package, dir, &r.child, &err), MB_ECANCELED);
    assert_false(mb_fs_exists(r.path));
    mb_unpack_child_close(&r.child);
}

/* ---- the packages of a job ---- */

static void packages_of_a_job(void **state)
{
    static const struct entry wheel[] = {{.name = "mod/__init__.py", .text = ""}, {.name = NULL}};
    static const struct entry folder[] = {{.name = "project-1/main.py", .text = ""},
                                          {.name = NULL}};
    struct mb_job_packages p;
    char json[500], want[500], *path;

    (void)state;
    write_archive(at("m-1-py3-none-any.whl"), ZIP, wheel);
    write_archive(at("project.tgz"), TAR_GZ, folder);
    snprintf(json, sizeof(json),
             "{\"working_dir\": \"file://%s/project.tgz\", \"py_modules\": "
             "[\"gcs://m-1-py3-none-any.whl\", \"local://%s\"]}",
             dir, dir);
    assert_int_equal(mb_job_packages_init(&p, json, dir, at("job"), &err), 0);
    assert_null(mb_job_packages_missing(&p));
    assert_int_equal(mb_job_packages_unpack(&p, MOBULA_UNPACK, &child, &err), 0);
    assert_string_equal(p.working_dir, at("job/working_dir/project-1"));
    assert_true(mb_fs_exists(at("job/py_modules/1/mod/__init__.py")));
    assert_true(mb_fs_exists(at("project.tgz")));
    path = mb_job_packages_python_path(&p, "/old");
    snprintf(want, sizeof(want), "%s/job/py_modules/1:%s:%s/job/working_dir/project-1:/old", dir,
             dir, dir);
    assert_string_equal(path, want);
    mb_free(path);
    mb_job_packages_close(&p);
}

static void packages_that_fail(void **state)
{
    struct mb_job_packages p;

    (void)state;
    assert_int_equal(
        mb_job_packages_init(&p, "{\"working_dir\": \"gcs://none.zip\"}", dir, at("job"), &err), 0);
    assert_int_equal(mb_job_packages_unpack(&p, MOBULA_UNPACK, &child, &err), MB_ENOENT);
    assert_non_null(strstr(err.text, "gcs://none.zip"));
    mb_job_packages_close(&p);
    assert_int_equal(mb_job_packages_init(&p, "{\"working_dir\": 1}", dir, at("job"), &err),
                     MB_EINVAL);
    for (unsigned long fail_at = 1; fail_at < 20; fail_at++) {
        int rc;

        mb_alloc_fail_nth(fail_at);
        rc = mb_job_packages_init(&p, "{\"py_modules\": [\"gcs://a.zip\", \"s3://b/a.zip\"]}", dir,
                                  "/job", &err);
        mb_alloc_fail_nth(0);
        if (rc == 0) {
            assert_string_equal(mb_job_packages_missing(&p)->file, "/job/package-1");
            mb_job_packages_close(&p);
            return;
        }
        assert_int_equal(rc, MB_ENOMEM);
    }
    fail_msg("it never succeeded");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(formats, set_up, tear_down),
        cmocka_unit_test_setup_teardown(names, set_up, tear_down),
        cmocka_unit_test_setup_teardown(nothing_leaves_the_directory, set_up, tear_down),
        cmocka_unit_test_setup_teardown(only_files_directories_and_links, set_up, tear_down),
        cmocka_unit_test_setup_teardown(never_setuid, set_up, tear_down),
        cmocka_unit_test_setup_teardown(backslashes_in_names, set_up, tear_down),
        cmocka_unit_test_setup_teardown(why_nothing_can_be_written, set_up, tear_down),
        cmocka_unit_test_setup_teardown(bombs, set_up, tear_down),
        cmocka_unit_test_setup_teardown(by_a_program, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_program_without_keys, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_program_that_dies, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_program_that_is_ended, set_up, tear_down),
        cmocka_unit_test_setup_teardown(packages_of_a_job, set_up, tear_down),
        cmocka_unit_test_setup_teardown(packages_that_fail, set_up, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
