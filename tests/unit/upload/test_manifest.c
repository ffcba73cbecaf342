/* Parts and manifests: round trip, merge, everything that must be refused, memory running out. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <jansson.h>
#include "agent/upload/claim.h"
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
        "{\"version\":3," HEAD ",\"files\":[]}",
        "{\"version\":2," HEAD ",\"data\":\"elsewhere\",\"files\":[]}",
        "{\"version\":2," HEAD ",\"data\":\".mobula/../..\",\"files\":[]}",
        "{\"version\":2," HEAD ",\"data\":\"\",\"files\":[]}",
        "{\"version\":2," HEAD ",\"data\":1,\"files\":[]}",
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

/* A claim is no manifest for a reader; files may lie beside. */
static void test_claims_and_places(void **state)
{
    struct mb_manifest claim = {.iteration = 20, .node_rank = -1, .num_nodes = 2, .is_claim = 1};
    struct mb_manifest beside = part(0, "a", 1, 2), other = part(1, "b", 3, 4), back = {0};
    const struct mb_manifest_writer first = {"job1", "a1", 1}, retry = {"job1", "a1", 2},
                                    stranger = {"j", "b1", 1};
    char *json = NULL, *key, place[MB_CLAIM_PLACE_MAX];
    struct mb_err err = {0};

    (void)state;
    assert_int_equal(mb_manifest_set_writer(&claim, &first, NULL), 0);
    assert_int_equal(mb_manifest_encode(&claim, &json, NULL), 0);
    assert_int_equal(mb_manifest_decode(json, strlen(json), "m", &back, &err), MB_ENOENT);
    assert_non_null(strstr(err.text, "still uploading iteration 20"));
    assert_int_equal(mb_manifest_decode_any(json, strlen(json), "m", &back, NULL), 0);
    assert_true(back.is_claim && mb_manifest_is_of(&back, &first));
    mb_manifest_close(&back);
    mb_free(json);

    assert_int_equal(mb_claim_decide(NULL, &first, NULL, place), MB_CLAIM_PUT);
    assert_int_equal(mb_claim_decide(NULL, &first, "", place), MB_CLAIM_OVER);
    assert_int_equal(mb_claim_decide(&claim, &first, "", place), MB_CLAIM_HELD);
    assert_string_equal(place, "");
    assert_int_equal(mb_claim_decide(&claim, &retry, NULL, place), MB_CLAIM_PUT);
    assert_int_equal(mb_claim_decide(&claim, &retry, "", place), MB_CLAIM_OVER);
    assert_int_equal(mb_claim_decide(&claim, &stranger, NULL, place), MB_CLAIM_PUT);
    claim.attempt = 3;
    assert_int_equal(mb_claim_decide(&claim, &retry, NULL, place), MB_CLAIM_OVER);
    claim.attempt = 1;
    claim.is_claim = 0; /* it is whole: nobody touches it */
    assert_int_equal(mb_claim_decide(&claim, &retry, NULL, place), MB_CLAIM_BESIDE);
    assert_string_equal(place, ".mobula/data-a1-2");
    assert_int_equal(mb_claim_decide(&claim, &retry, place, place), MB_CLAIM_BESIDE);
    assert_int_equal(mb_claim_decide(&claim, &retry, "", place), MB_CLAIM_OVER);

    assert_int_equal(mb_manifest_set_data(&beside, "x", NULL), MB_EINVAL);
    assert_int_equal(mb_manifest_set_data(&beside, ".mobula/data-a1-2", NULL), 0);
    assert_int_equal(mb_manifest_encode(&beside, &json, NULL), 0);
    assert_int_equal(mb_manifest_decode(json, strlen(json), "m", &back, NULL), 0);
    key = mb_manifest_file_key(back.iteration, back.data, back.files[0].path);
    assert_string_equal(key, "iter_0000020/.mobula/data-a1-2/a");
    mb_free(key);
    key = mb_manifest_file_key(20, NULL, "a");
    assert_string_equal(key, "iter_0000020/a");
    mb_free(key);
    mb_free(json);
    mb_manifest_close(&back);
    { /* all parts have their files at one place */
        struct mb_manifest parts[2] = {beside, other};

        assert_int_equal(mb_manifest_merge(parts, 2, &back, &err), MB_ECORRUPT);
        assert_non_null(strstr(err.text, "another place"));
    }
    mb_manifest_close(&beside);
    mb_manifest_close(&other);
    mb_manifest_close(&claim);
}

/* The list of files is cut out of the text before anything is parsed: that must change no verdict.
 */
static void test_other_spellings(void **state)
{
#define FILE_A "{\"path\":\"a,]}\\\"[\",\"size\":1,\"crc64nvme\":\"0000000000000001\"}"
#define FILE_B                                                                                     \
    "{ \"size\" : 2 , \"crc64nvme\":\"0000000000000002\", \"path\":\"b\", \"x\":[[{}],[]] }"
    static const struct {
        const char *text;
        int n_files; /* -1: MB_ECORRUPT */
    } cases[] = {
        {" { \"version\":1, \"files\" : [ " FILE_A " ,\n" FILE_B "\t] , " HEAD "} ", 2},
        {"{\"version\":1," HEAD ",\"files\":[ \r\n ]}", 0},
        {"{\"version\":1," HEAD ",\"x\":{\"files\":[1]},\"files\":[" FILE_B "]}", 1},
        {"{\"version\":1," HEAD ",\"x\":\"\\\"files\\\":[1]\",\"files\":[" FILE_B "]}", 1},
        {"{\"version\":1," HEAD ",\"fil\\u0065s\":[" FILE_B "]}", 1},
        {"{\"version\":1," HEAD ",\"files\":[" FILE_B "],\"files\":[" FILE_B "]}", -1},
        {"{\"version\":1," HEAD ",\"files\":[" FILE_B "],\"fil\\u0065s\":[]}", -1},
        {"{\"version\":1," HEAD ",\"files\":[" FILE_B ",]}", -1},
        {"{\"version\":1," HEAD ",\"files\":[," FILE_B "]}", -1},
        {"{\"version\":1," HEAD ",\"files\":[" FILE_B " " FILE_B "]}", -1},
        {"{\"version\":1," HEAD ",\"files\":[" FILE_B "}}", -1},
        {"{\"version\":1," HEAD ",\"files\":[" FILE_B, -1},
        {"{\"version\":1," HEAD ",\"files\":[" FILE_B "]", -1},
        {"{\"version\":1," HEAD ",\"files\":[" FILE_B "]}x", -1},
        {"{\"version\":1," HEAD ",\"files\":[" FILE_B "]]", -1},
        {"{\"version\":1," HEAD ",\"files\":[1]}", -1},
        {"{\"version\":1," HEAD ",\"files\":[[]]}", -1},
        {"{\"version\":1," HEAD ",\"files\":{}}", -1},
        {"{\"version\":1," HEAD ",\"files\":[\"", -1},
        {"{\"version\":1," HEAD ",\"files", -1},
        {"{\"version\":1," HEAD ",\"files\":", -1},
        {"[{\"files\":[]}]", -1},
    };
    struct mb_manifest m = {0};
    struct mb_err err = {0};

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        int rc = mb_manifest_decode(cases[i].text, strlen(cases[i].text), "m", &m, &err);

        if (rc != (cases[i].n_files < 0 ? MB_ECORRUPT : 0))
            fail_msg("%d for %s", rc, cases[i].text);
        if (rc == 0)
            assert_int_equal(m.n_files, cases[i].n_files);
        mb_manifest_close(&m);
    }
}

static size_t live_bytes, most_bytes;

static void *count_alloc(size_t n)
{
    size_t *p = malloc(n + 16);

    if (!p)
        return NULL;
    p[0] = n;
    live_bytes += n;
    if (live_bytes > most_bytes)
        most_bytes = live_bytes;
    return (char *)p + 16;
}

static void count_free(void *p)
{
    if (!p)
        return;
    p = (char *)p - 16;
    live_bytes -= *(size_t *)p;
    free(p);
}

/* Trees of JSON stay small however many files there are. */
static void test_many_files(void **state)
{
    enum { N = 100000, MOST = 64 << 10 };
    struct mb_manifest m = part(0, "first", 1, 2), back = {0};
    char *json = NULL;
    char path[64];

    (void)state;
    for (int i = 0; i < N; i++) {
        snprintf(path, sizeof(path), "shards/rank_%06d/optimizer.distcp", i);
        assert_int_equal(mb_manifest_add(&m, path, (uint64_t)i, (uint64_t)i * 7, NULL), 0);
    }
    assert_int_equal(mb_manifest_encode(&m, &json, NULL), 0);
    json_set_alloc_funcs(count_alloc, count_free);
    assert_int_equal(mb_manifest_decode(json, strlen(json), "m", &back, NULL), 0);
    assert_false(mb_manifest_is_of_newer_version(json, strlen(json)));
    json_set_alloc_funcs(malloc, free);
    assert_int_equal(live_bytes, 0);
    assert_in_range(most_bytes, 1, MOST);
    assert_int_equal(back.n_files, N + 1);
    assert_string_equal(back.files[N].path, "shards/rank_099999/optimizer.distcp");
    mb_free(json);
    mb_manifest_close(&m);
    mb_manifest_close(&back);
}

/* In the worst order there is for one at a time: the last path first. */
static void test_many_files_in_any_order(void **state)
{
    enum { N = 100000 };
    struct mb_manifest parts[2] = {part(0, "b", 1, 2), part(1, "c", 1, 2)}, all = {0};
    struct mb_manifest_file *files = malloc(N * sizeof(*files));
    struct mb_manifest_file unsafe = {(char *)"../x", 1, 2}, other = {(char *)"b", 1, 3};
    struct mb_err err;

    (void)state;
    for (int i = 0; i < N; i++) {
        files[i] = (struct mb_manifest_file){malloc(32), (uint64_t)i, (uint64_t)i * 3};
        snprintf(files[i].path, 32, "rank/%06d", N - 1 - i);
    }
    assert_int_equal(mb_manifest_add_all(&parts[0], files, N, NULL), 0);
    assert_int_equal(mb_manifest_add_all(&parts[1], files, N, NULL), 0); /* the same on both */
    assert_int_equal(mb_manifest_add_all(&parts[0], &unsafe, 1, &err), MB_EINVAL);
    assert_int_equal(mb_manifest_add_all(&parts[0], &other, 1, &err), MB_EEXIST);
    assert_int_equal(parts[0].n_files, N + 1);
    assert_int_equal(mb_manifest_add(&parts[0], "rank/050000x", 9, 9, NULL), 0);
    assert_int_equal(mb_manifest_merge(parts, 2, &all, NULL), 0);
    assert_int_equal(all.n_files, N + 3);
    for (size_t i = 1; i < all.n_files; i++)
        assert_true(strcmp(all.files[i - 1].path, all.files[i].path) < 0);
    assert_string_equal(all.files[2].path, "rank/000000");
    assert_int_equal(all.files[2].size_bytes, N - 1);
    for (int i = 0; i < N; i++)
        free(files[i].path);
    free(files);
    mb_manifest_close(&parts[0]);
    mb_manifest_close(&parts[1]);
    mb_manifest_close(&all);
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

/* Digits, until somebody touches it: from then on no two contents are alike. */
static void test_what_the_pointer_holds(void **state)
{
    char first[MB_LATEST_MAX_BYTES], second[MB_LATEST_MAX_BYTES];
    size_t n, n_second;
    int64_t iteration = -1;

    (void)state;
    n = mb_latest_format(20, NULL, 0, 0, 5, first);
    assert_true(n == 2 && memcmp(first, "20", 2) == 0);
    n = mb_latest_format(20, "7\n", 2, 0, 5, first);
    assert_int_equal(n, 2);
    n = mb_latest_format(INT64_C(999999999999999999), "7", 1, 1, 5, first);
    assert_true(n < sizeof(first));
    assert_int_equal(mb_latest_parse(first, n, &iteration, NULL), 0);
    assert_true(iteration == INT64_C(999999999999999999));
    n_second = mb_latest_format(INT64_C(999999999999999999), first, n, 0, 6, second);
    assert_true(n_second == n && memcmp(first, second, n) != 0);
    assert_int_equal(mb_latest_parse(second, n, &iteration, NULL), 0);
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
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_merge),
        cmocka_unit_test(test_paths),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_what_the_pointer_holds),
        cmocka_unit_test(test_keys_and_latest),
        cmocka_unit_test(test_memory_out),
        cmocka_unit_test(test_other_spellings),
        cmocka_unit_test(test_many_files),
        cmocka_unit_test(test_many_files_in_any_order),
        cmocka_unit_test(test_newer_attempts),
        cmocka_unit_test(test_claims_and_places),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
