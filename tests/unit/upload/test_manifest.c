/* Parts and manifests: round trip, merge, everything that must be refused, memory running out. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>
#include "agent/upload/manifest.h"
#include "base/alloc.h"

static struct mb_manifest part(int32_t node_rank, const char *path, uint64_t size, uint64_t crc)
{
    struct mb_manifest m = {.iteration = 20, .node_rank = node_rank, .num_nodes = 2, .attempt = 1};

    m.job_id = mb_strdup("job1");
    m.placement_group = mb_strdup("a1");
    assert_int_equal(mb_manifest_add(&m, path, size, crc, NULL), 0);
    return m;
}

static void test_round_trip(void **state)
{
    struct mb_manifest m = part(1, "optim_dp_001.safetensors", 1ull << 40, 0xfedcba9876543210ull);
    struct mb_manifest back = {0};
    char *json = NULL, *again = NULL;

    (void)state;
    assert_int_equal(mb_manifest_add(&m, "a/b.bin", 3, 5, NULL), 0);
    assert_int_equal(mb_manifest_encode(&m, &json, NULL), 0);
    assert_int_equal(mb_manifest_decode(json, strlen(json), "x", &back, NULL), 0);
    assert_int_equal(back.n_files, 2);
    assert_string_equal(back.files[0].path, "a/b.bin");
    assert_true(back.files[1].size_bytes == 1ull << 40);
    assert_true(back.files[1].crc64nvme == 0xfedcba9876543210ull);
    assert_int_equal(back.node_rank, 1);
    assert_int_equal(mb_manifest_encode(&back, &again, NULL), 0);
    assert_string_equal(json, again);
    mb_free(again);
    mb_free(json);
    mb_manifest_close(&m);
    mb_manifest_close(&back);
}

static void test_merge(void **state)
{
    struct mb_manifest parts[2] = {part(1, "b", 1, 1), part(0, "a", 2, 2)};
    struct mb_manifest all = {0};
    struct mb_err err = {0};

    (void)state;
    assert_int_equal(mb_manifest_merge(parts, 2, &all, &err), 0);
    assert_int_equal(all.node_rank, -1);
    assert_int_equal(all.n_files, 2);
    assert_string_equal(all.files[0].path, "a");
    mb_manifest_close(&all);

    assert_int_equal(mb_manifest_merge(parts, 1, &all, &err), MB_ENOENT);
    assert_non_null(strstr(err.text, "part 0 of 2"));
    assert_int_equal(mb_manifest_merge(parts, 0, &all, &err), MB_ENOENT);

    parts[1].attempt = 2; /* an older attempt's part lies beside a newer one's */
    assert_int_equal(mb_manifest_merge(parts, 2, &all, &err), MB_ECORRUPT);
    parts[1].attempt = 1;
    parts[1].placement_group[0] = 'b'; /* another run of a job of that name */
    assert_int_equal(mb_manifest_merge(parts, 2, &all, &err), MB_ECORRUPT);
    parts[1].placement_group[0] = 'a';
    assert_int_equal(mb_manifest_add(&parts[1], "b", 1, 99, NULL), 0); /* another "b" */
    assert_int_equal(mb_manifest_merge(parts, 2, &all, &err), MB_ECORRUPT);
    mb_manifest_close(&parts[0]);
    mb_manifest_close(&parts[1]);
}

static void test_paths(void **state)
{
    static const char *const bad[] = {"", "/a", "a//b", "../a", "a/..", "a/../b", ".", "a/."};
    struct mb_manifest m = part(0, "a/b", 1, 1);

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(mb_manifest_add(&m, bad[i], 1, 1, NULL), MB_EINVAL);
    assert_int_equal(mb_manifest_add(&m, "a/b", 1, 1, NULL), 0);
    assert_int_equal(mb_manifest_add(&m, "a/b", 2, 1, NULL), MB_EEXIST);
    assert_int_equal(mb_manifest_add(&m, "a/..b", 2, 1, NULL), 0);
    assert_int_equal(m.n_files, 2);
    mb_manifest_close(&m);
}

static void test_refusals(void **state)
{
#define HEAD "\"iteration\":1,\"node_rank\":0,\"num_nodes\":1,\"job_id\":\"j\",\"attempt\":1"
    static const char *const bad[] = {
        "",
        "[]",
        "{",
        "{\"version\":1}",
        "{\"version\":2," HEAD ",\"files\":[]}",
        "{\"version\":1," HEAD "}",
        "{\"version\":1," HEAD ",\"files\":[{}]}",
        "{\"version\":1," HEAD
        ",\"files\":[{\"path\":\"a\",\"size\":-1,\"crc64nvme\":\"0000000000000000\"}]}",
        "{\"version\":1," HEAD
        ",\"files\":[{\"path\":\"a\",\"size\":1,\"crc64nvme\":\"000000000000000\"}]}",
        "{\"version\":1," HEAD
        ",\"files\":[{\"path\":\"a\",\"size\":1,\"crc64nvme\":\"000000000000000G\"}]}",
        "{\"version\":1," HEAD
        ",\"files\":[{\"path\":\"../a\",\"size\":1,\"crc64nvme\":\"0000000000000000\"}]}",
        "{\"version\":1,\"iteration\":-1,\"node_rank\":0,\"num_nodes\":1,\"job_id\":\"j\","
        "\"attempt\":1,\"files\":[]}",
        "{\"version\":1,\"iteration\":1,\"node_rank\":1,\"num_nodes\":1,\"job_id\":\"j\","
        "\"attempt\":1,\"files\":[]}",
        "{\"version\":1,\"iteration\":1,\"node_rank\":0,\"num_nodes\":0,\"job_id\":\"j\","
        "\"attempt\":1,\"files\":[]}",
    };
    struct mb_manifest m = {0};
    struct mb_err err = {0};

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(mb_manifest_decode(bad[i], strlen(bad[i]), "part-x", &m, &err),
                         MB_ECORRUPT);
        assert_non_null(strstr(err.text, "part-x"));
    }
}

static void test_newer_attempts(void **state)
{
    struct mb_manifest m = {0};
    struct mb_manifest_writer first = {"j", "aa", 1}, second = {"j", "aa", 2},
                              other = {"j", "bb", 1};
    struct mb_err err;

    (void)state;
    assert_int_equal(mb_manifest_set_writer(&m, &second, &err), MB_OK);
    assert_true(mb_manifest_is_newer(&m, &first));
    assert_false(mb_manifest_is_newer(&m, &second));
    assert_false(mb_manifest_is_newer(&m, &other)); /* another run: its number says nothing */
    mb_manifest_close(&m);
}

static void test_keys_and_latest(void **state)
{
    char key[MB_CHECKPOINT_KEY_MAX];
    int64_t n = -1;

    (void)state;
    assert_true(mb_latest_moves(-1, 0));
    assert_true(mb_latest_moves(10, 20));
    assert_false(mb_latest_moves(20, 20));
    assert_false(mb_latest_moves(30, 20));
    assert_string_equal(mb_iteration_dir(20, key), "iter_0000020");
    assert_string_equal(mb_manifest_key(20, key), "iter_0000020/.mobula/manifest.json");
    assert_string_equal(mb_part_key(12345678, 0, 2, key), "iter_12345678/.mobula/part-0-of-2.json");
    assert_int_equal(mb_latest_parse("20", 2, &n, NULL), 0);
    assert_int_equal(n, 20);
    assert_int_equal(mb_latest_parse("7\n", 2, &n, NULL), 0);
    assert_int_equal(n, 7);
    assert_int_equal(mb_latest_parse("", 0, &n, NULL), MB_ECORRUPT);
    assert_int_equal(mb_latest_parse("release", 7, &n, NULL), MB_ECORRUPT);
    assert_int_equal(mb_latest_parse("-1", 2, &n, NULL), MB_ECORRUPT);
    assert_int_equal(mb_latest_parse("1234567890123456789", 19, &n, NULL), MB_ECORRUPT);
    assert_int_equal(n, 7);
}

static void test_memory_out(void **state)
{
    struct mb_manifest parts[2] = {part(0, "a", 1, 1), part(1, "b", 2, 2)};

    (void)state;
    for (unsigned long nth = 1;; nth++) {
        struct mb_manifest all = {0};
        int rc;

        mb_alloc_fail_nth(nth);
        rc = mb_manifest_merge(parts, 2, &all, NULL);
        if (!mb_alloc_did_fail()) {
            mb_alloc_fail_nth(0);
            assert_int_equal(rc, 0);
            mb_manifest_close(&all);
            break;
        }
        assert_int_equal(rc, MB_ENOMEM);
        assert_int_equal(all.n_files, 0);
    }
    mb_manifest_close(&parts[0]);
    mb_manifest_close(&parts[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),      cmocka_unit_test(test_merge),
        cmocka_unit_test(test_paths),           cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_keys_and_latest), cmocka_unit_test(test_memory_out),
        cmocka_unit_test(test_newer_attempts),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
