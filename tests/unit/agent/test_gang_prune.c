/* Which ended attempts stay on disk. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "agent/gang_prune.h"
#include "base/fs.h"

static void test_decide(void **state)
{
    struct mb_gang_ended list[30];
    char names[30][8];
    const int64_t now_s = 100000000;

    (void)state;
    for (int i = 0; i < 30; i++) { /* the higher, the older */
        snprintf(names[i], sizeof(names[i]), "g%02d", i);
        list[29 - i] = (struct mb_gang_ended){.name = names[i], .ended_s = now_s - i};
    }
    mb_gang_prune_decide(list, 30, now_s);
    for (int i = 0; i < 30; i++) {
        assert_string_equal(list[i].name, names[i]);
        assert_int_equal(list[i].is_surplus, i >= MB_GANG_KEPT_MAX);
    }
    mb_gang_prune_decide(list, 10, now_s - 5 + MB_GANG_KEPT_S); /* a week after the sixth */
    for (int i = 0; i < 10; i++)
        assert_int_equal(list[i].is_surplus, i > 5);
    mb_gang_prune_decide(list, 0, now_s);
}

static void write_file(const char *dir, const char *name, const char *text)
{
    char path[300];
    struct mb_err err;

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    assert_int_equal(mb_fs_write_atomic(path, text, strlen(text), 0600, &err), MB_OK);
}

static int there(const char *root, const char *name)
{
    char path[300];

    snprintf(path, sizeof(path), "%s/%s", root, name);
    return mb_fs_exists(path);
}

static void test_on_disk(void **state)
{
    char root[] = "/tmp/mb-prune-XXXXXX";
    struct mb_err err;

    (void)state;
    assert_non_null(mkdtemp(root));
    for (int i = 0; i < 4; i++) {
        static const char *const jsons[] = {"{\"state\":\"ENDED\"}", "{\"state\":\"RUNNING\"}",
                                            "{dam", "{\"state\":\"ENDED\"}"};
        char dir[200];

        snprintf(dir, sizeof(dir), "%s/%d", root, i);
        assert_int_equal(mb_fs_mkdir_p(dir, 0755, &err), MB_OK);
        write_file(dir, "gang.json", jsons[i]);
        write_file(dir, "spec", "SECRET=1");
        write_file(dir, "rank-0.log", "hello");
    }
    mb_gang_prune(root, 1000); /* long ago: nothing is too old */
    assert_true(there(root, "0/rank-0.log") && !there(root, "0/spec"));
    assert_true(there(root, "1/spec") && there(root, "2/spec"));
    mb_gang_prune(root, INT64_C(1) << 40);
    assert_false(there(root, "0") || there(root, "3"));
    assert_true(there(root, "1/spec") && there(root, "2/spec"));
    assert_int_equal(mb_fs_remove_tree(root, &err), MB_OK);
    mb_gang_prune(root, 0); /* a missing root is nothing */
}

/* It is the only one that tells of checkpoints in what was unpacked for a job. */
static void test_saved_into_a_job(void **state)
{
    char root[] = "/tmp/mb-prune-XXXXXX", job[100], dir[200], json[400];
    static const char *const schemes[] = {"local_dir\":\"", "url\":\"file://"};
    const int64_t late_s = INT64_C(1) << 40;
    struct mb_err err;

    (void)state;
    assert_non_null(mkdtemp(root));
    snprintf(job, sizeof(job), "%s/jobs/a", root);
    snprintf(dir, sizeof(dir), "%s/working_dir", job);
    assert_int_equal(mb_fs_mkdir_p(dir, 0755, &err), MB_OK);
    for (int i = 0; i < 2; i++) {
        snprintf(dir, sizeof(dir), "%s/gangs/%d", root, i);
        assert_int_equal(mb_fs_mkdir_p(dir, 0755, &err), MB_OK);
        snprintf(json, sizeof(json),
                 "{\"state\":\"ENDED\",\"checkpoint\":{\"%s%s/working_dir/save\"}}", schemes[i],
                 job);
        write_file(dir, "gang.json", json);
        write_file(dir, "spec", "SECRET=1");
    }
    snprintf(dir, sizeof(dir), "%s/gangs", root);
    mb_gang_prune(dir, late_s);
    assert_true(there(root, "gangs/0/gang.json") && there(root, "gangs/1/gang.json"));
    assert_false(there(root, "gangs/0/spec") || there(root, "gangs/1/spec"));
    write_file(job, "kept", "");
    mb_gang_prune(dir, late_s);
    assert_false(there(root, "gangs/0") || there(root, "gangs/1"));
    assert_int_equal(mb_fs_remove_tree(root, &err), MB_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_decide),
                                       cmocka_unit_test(test_on_disk),
                                       cmocka_unit_test(test_saved_into_a_job)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
