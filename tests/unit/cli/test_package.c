/* Packages of working directories: the hash that Ray computes, what is left out, the zip. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <archive.h>
#include <archive_entry.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "cli/ignore.h"
#include "cli/package.h"

static char dir[64];

static void put(const char *name, const char *text)
{
    char *path = mb_path_join(dir, name);
    char *slash = strrchr(path, '/');

    *slash = '\0';
    assert_int_equal(mb_fs_mkdir_p(path, 0755, NULL), 0);
    *slash = '/';
    if (text != NULL)
        assert_int_equal(mb_fs_write_atomic(path, text, strlen(text), 0644, NULL), 0);
    else
        assert_int_equal(mb_fs_mkdir_p(path, 0755, NULL), 0);
    mb_free(path);
}

static int make_dir(void **state)
{
    (void)state;
    strcpy(dir, "/tmp/mobula-package-XXXXXX");
    return mkdtemp(dir) == NULL;
}

static int remove_dir(void **state)
{
    (void)state;
    return mb_fs_remove_tree(dir, NULL);
}

static void put_vector(void)
{
    put("a.py", "print(1)\n");
    put("sub/b.txt", "x");
    put("empty", NULL);
}

/* The value that ray 2.60.0 computes for this directory. */
static void test_hash_is_rays(void **state)
{
    struct mb_package p;
    struct mb_err err;

    (void)state;
    put_vector();
    assert_int_equal(mb_package_scan(dir, NULL, MB_PACKAGE_MAX_BYTES, &p, &err), 0);
    assert_string_equal(p.name, "_ray_pkg_53b6ac63408c97d0.zip");
    assert_int_equal(p.n_files, 4);
    mb_package_close(&p);
}

static void link_to(const char *target, const char *name)
{
    char *path = mb_path_join(dir, name);

    assert_int_equal(symlink(target, path), 0);
    mb_free(path);
}

/* The values that ray 2.60.0 computes. A pipe is not asked of it: it waits for a writer. */
static void test_links_that_lead_nowhere_are_left_out(void **state)
{
    struct mb_package p;
    struct mb_err err;
    char path[128];

    (void)state;
    put_vector();
    link_to("nope", "dangling");
    link_to("self", "self");
    assert_int_equal(mb_package_scan(dir, NULL, MB_PACKAGE_MAX_BYTES, &p, &err), 0);
    assert_string_equal(p.name, "_ray_pkg_7cf2563a4c66a51e.zip");
    assert_int_equal(p.n_files, 4);
    assert_int_equal(p.n_left_out, 2);
    assert_string_equal(p.left_out, "dangling");
    mb_package_close(&p);
    put("d/f", "y");
    link_to(".", "d/loop");
    assert_int_equal(mb_package_scan(dir, NULL, MB_PACKAGE_MAX_BYTES, &p, &err), 0);
    assert_string_equal(p.name, "_ray_pkg_e62649ec57bd074a.zip");
    assert_int_equal(p.n_left_out, 3);
    mb_package_close(&p);
    snprintf(path, sizeof(path), "%s/sock", dir); /* Ray cannot open a socket */
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(mb_package_scan(dir, NULL, MB_PACKAGE_MAX_BYTES, &p, &err), 0);
    assert_string_equal(p.name, "_ray_pkg_feef2f907e24cdf5.zip");
    assert_int_equal(p.n_left_out, 4);
    mb_package_close(&p);
}

static void test_ignored_files_do_not_count(void **state)
{
    const char *const excludes[] = {"*.tmp", NULL};
    struct mb_package p;

    (void)state;
    put_vector();
    put("x.tmp", "1");
    put(".git/HEAD", "ref");
    put("logs/deep/a.log", "1");
    put("keep/.gitignore", "");
    assert_int_equal(mb_package_scan(dir, excludes, MB_PACKAGE_MAX_BYTES, &p, NULL), 0);
    assert_int_equal(p.n_files, 4 + 3 + 2); /* logs, deep, a.log, keep, .gitignore */
    mb_package_close(&p);
    put(".rayignore", "logs/\nkeep\n.rayignore\n");
    assert_int_equal(mb_package_scan(dir, excludes, MB_PACKAGE_MAX_BYTES, &p, NULL), 0);
    assert_string_equal(p.name, "_ray_pkg_53b6ac63408c97d0.zip");
    mb_package_close(&p);
}

static void test_zip_holds_files_and_empty_directories(void **state)
{
    struct mb_package p;
    struct mb_err err;
    char path[128];
    struct archive *a = archive_read_new();
    struct archive_entry *e;
    int fd, n = 0;

    (void)state;
    put_vector();
    assert_int_equal(mb_package_scan(dir, NULL, MB_PACKAGE_MAX_BYTES, &p, &err), 0);
    snprintf(path, sizeof(path), "%s/out.zip", dir);
    fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    assert_int_equal(mb_package_zip(&p, dir, fd, &err), 0);
    close(fd);
    archive_read_support_format_zip(a);
    assert_int_equal(archive_read_open_filename(a, path, 4096), ARCHIVE_OK);
    while (archive_read_next_header(a, &e) == ARCHIVE_OK) {
        if (strcmp(archive_entry_pathname(e), "a.py") == 0) {
            char text[16] = "";

            assert_int_equal(archive_read_data(a, text, sizeof(text)), 9);
            assert_string_equal(text, "print(1)\n");
        }
        n++;
    }
    assert_int_equal(n, 4);
    archive_read_free(a);
    mb_package_close(&p);
}

/* ---- modules and archives ---- */

/* The names in the zip of what was scanned, in order. */
static const char *zipped(const struct mb_package *p, const char *from)
{
    static char names[256];
    struct archive *a = archive_read_new();
    struct archive_entry *e;
    struct mb_err err = {0};
    char path[] = "/tmp/mobula-zip-XXXXXX";
    int fd = mkstemp(path);

    names[0] = '\0';
    if (mb_package_zip(p, from, fd, &err) != 0)
        fail_msg("%s", err.text);
    assert_int_equal(lseek(fd, 0, SEEK_SET), 0);
    archive_read_support_format_zip(a);
    assert_int_equal(archive_read_open_fd(a, fd, 4096), ARCHIVE_OK);
    while (archive_read_next_header(a, &e) == ARCHIVE_OK) {
        strcat(names, archive_entry_pathname(e));
        strcat(names, " ");
    }
    archive_read_free(a);
    close(fd);
    unlink(path);
    return names;
}

static void test_a_module_is_below_its_name(void **state)
{
    const char *const excludes[] = {"*.tmp", "sub/private", NULL};
    struct mb_package p, again;
    struct mb_err err;
    char path[128];

    (void)state;
    put("mod/__init__.py", "");
    put("mod/sub/b.txt", "x");
    put("mod/x.tmp", "x");
    put("mod/sub/private", "x");
    put("mod/.gitignore", "/old\n");
    put("mod/old/c", "x");
    snprintf(path, sizeof(path), "%s/mod/", dir);
    assert_int_equal(mb_package_scan_module(path, excludes, 100, &p, &err), 0);
    assert_string_equal(zipped(&p, path),
                        "mod/ mod/.gitignore mod/__init__.py mod/sub/ mod/sub/b.txt ");
    assert_int_equal(mb_package_scan(path, excludes, 100, &again, &err), 0);
    assert_string_not_equal(p.name, again.name);
    mb_package_close(&again);
    mb_package_close(&p);
    assert_int_equal(mb_package_scan_module(path, NULL, 1, &p, &err), MB_EFULL);
    assert_non_null(strstr(err.text, "py_modules: /tmp/"));
    assert_int_equal(mb_package_scan_module("/", NULL, 1, &p, &err), MB_EINVAL);
}

static void test_a_module_that_is_a_file(void **state)
{
    struct mb_package p;
    struct mb_err err;
    char path[128];

    (void)state;
    put("one.py", "NAME = 1\n");
    snprintf(path, sizeof(path), "%s/one.py", dir);
    assert_int_equal(mb_package_scan_module(path, NULL, 100, &p, &err), 0);
    assert_int_equal(p.total_bytes, 9);
    assert_string_equal(zipped(&p, path), "one.py ");
    mb_package_close(&p);
}

static void test_archives(void **state)
{
    struct mb_package p;
    struct mb_err err;
    char path[128];

    (void)state;
    put("a.tgz", "abc");
    put("m-1.0-py3-none-any.whl", "abc");
    snprintf(path, sizeof(path), "%s/a.tgz", dir);
    assert_int_equal(mb_package_scan_archive(path, 3, &p, &err), 0);
    assert_string_equal(p.name, "_ray_pkg_a9993e364706816aba3e25717850c26c9cd0d89d.tar.gz");
    assert_true(p.is_archive);
    mb_package_close(&p);
    assert_int_equal(mb_package_scan_archive(path, 2, &p, &err), MB_EFULL);
    snprintf(path, sizeof(path), "%s/m-1.0-py3-none-any.whl", dir);
    assert_int_equal(mb_package_scan_archive(path, 3, &p, &err), 0);
    assert_string_equal(p.name, "m-1.0-py3-none-any.whl");
    mb_package_close(&p);
    assert_int_equal(mb_package_scan_archive(dir, 3, &p, &err), MB_EINVAL);
    assert_true(mb_package_is_archive(path, 1));
    assert_false(mb_package_is_archive(path, 0));
    assert_true(mb_package_is_archive("x.zip", 0));
    assert_false(mb_package_is_archive(".zip", 0));
}

static void test_a_file_that_changed_fails_the_zip(void **state)
{
    struct mb_package p;
    struct mb_err err;
    int fd = open("/dev/null", O_WRONLY | O_CLOEXEC);

    (void)state;
    put_vector();
    assert_int_equal(mb_package_scan(dir, NULL, MB_PACKAGE_MAX_BYTES, &p, &err), 0);
    put("a.py", "print(1234)\n");
    assert_int_equal(mb_package_zip(&p, dir, fd, &err), MB_EIO);
    assert_non_null(strstr(err.text, "a.py"));
    close(fd);
    mb_package_close(&p);
}

static void test_too_large_names_the_largest(void **state)
{
    struct mb_package p;
    struct mb_err err;
    char path[128];

    (void)state;
    put_vector();
    put("data/huge.bin", "");
    snprintf(path, sizeof(path), "%s/data/huge.bin", dir);
    assert_int_equal(truncate(path, (off_t)MB_PACKAGE_MAX_BYTES + 1), 0);
    assert_int_equal(mb_package_scan(dir, NULL, MB_PACKAGE_MAX_BYTES, &p, &err), MB_EFULL);
    assert_non_null(strstr(err.text, "data/huge.bin"));
    assert_int_equal(mb_package_scan(dir, NULL, 16, &p, &err), MB_EFULL);
    assert_non_null(strstr(err.text, "at most 16"));
}

static void test_ignore_rules(void **state)
{
    static const struct {
        const char *base, *pattern, *path;
        int is_dir, matches;
    } cases[] = {{"", "*.o", "a/b/c.o", 0, 1},
                 {"", "*.o", "c.c", 0, 0},
                 {"", "/build", "build", 1, 1},
                 {"", "/build", "a/build", 1, 0},
                 {"", "build", "a/build", 1, 1},
                 {"", "out/", "out", 0, 0},
                 {"", "out/", "out", 1, 1},
                 {"", "a/*.c", "a/x.c", 0, 1},
                 {"", "a/*.c", "a/b/x.c", 0, 0},
                 {"", "a/**/x", "a/b/c/x", 0, 1},
                 {"", "a/**/x", "a/x", 0, 1},
                 {"", "**/x", "a/b/x", 0, 1},
                 {"", "a/**", "a/b/c", 0, 1},
                 {"", "# note", "# note", 0, 0},
                 {"sub", "*.txt", "sub/a.txt", 0, 1},
                 {"sub", "*.txt", "a.txt", 0, 0},
                 {"sub", "/a.txt", "sub/a.txt", 0, 1},
                 {"sub", "*.txt", "subx/a.txt", 0, 0},
                 {"", "x  ", "x", 0, 1},
                 {"", "", "", 0, 0}};

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct mb_ignore ig = {0};

        assert_int_equal(mb_ignore_add(&ig, cases[i].base, cases[i].pattern), 0);
        if (mb_ignore_matches(&ig, cases[i].path, cases[i].is_dir) != cases[i].matches)
            fail_msg("%s in \"%s\" on %s", cases[i].pattern, cases[i].base, cases[i].path);
        mb_ignore_close(&ig);
    }
}

static void test_the_last_rule_decides(void **state)
{
    struct mb_ignore ig = {0};

    (void)state;
    assert_int_equal(mb_ignore_add(&ig, "", "*.log"), 0);
    assert_int_equal(mb_ignore_add(&ig, "", "!keep.log"), 0);
    assert_true(mb_ignore_matches(&ig, "a.log", 0));
    assert_false(mb_ignore_matches(&ig, "keep.log", 0));
    mb_ignore_close(&ig);
}

static void test_allocation_failures(void **state)
{
    (void)state;
    put_vector();
    put(".gitignore", "*.o\n");
    for (unsigned long nth = 1;; nth++) {
        struct mb_package p;
        int rc, failed;

        mb_alloc_fail_nth(nth);
        rc = mb_package_scan(dir, NULL, MB_PACKAGE_MAX_BYTES, &p, NULL);
        failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        assert_int_equal(rc, failed ? MB_ENOMEM : 0);
        if (rc == 0) {
            mb_package_close(&p);
            break;
        }
    }
}

int main(void)
{
#define WITH_DIR(test) cmocka_unit_test_setup_teardown(test, make_dir, remove_dir)
    const struct CMUnitTest tests[] = {
        WITH_DIR(test_hash_is_rays),
        WITH_DIR(test_links_that_lead_nowhere_are_left_out),
        WITH_DIR(test_ignored_files_do_not_count),
        WITH_DIR(test_zip_holds_files_and_empty_directories),
        WITH_DIR(test_a_module_is_below_its_name),
        WITH_DIR(test_a_module_that_is_a_file),
        WITH_DIR(test_archives),
        WITH_DIR(test_a_file_that_changed_fails_the_zip),
        WITH_DIR(test_too_large_names_the_largest),
        WITH_DIR(test_allocation_failures),
        cmocka_unit_test(test_ignore_rules),
        cmocka_unit_test(test_the_last_rule_decides),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
