/* The report codec: every type round-trips, every truncation waits, everything foreign is refused.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <string.h>
#include "base/alloc.h"
#include "worker/report.h"

static struct mb_report_file FILES[] = {
    {(char *)"model_tp00_pp00.safetensors", 1234567890123ULL, 0xAE8B14860A799888ULL},
    {(char *)"sub/state.json", 0, 1},
};
static char *ENDPOINTS[] = {(char *)"tcp1;127.0.0.1:1;a;b", (char *)"tcp1;[::1]:2;a;c"};

static struct mb_report sample(enum mb_report_type type)
{
    struct mb_report r = {.type = type};
    switch (type) {
    case MB_REPORT_HELLO:
        r.abi = MB_REPORT_ABI, r.rank = 7, r.pid = 4242;
        break;
    case MB_REPORT_PROGRESS:
        r.rank = 1, r.iteration = 9, r.train_iters = 20, r.consumed_samples = 1LL << 60;
        r.loss = 10.8125, r.learning_rate = 3e-3, r.grad_norm = 1.5, r.tokens_per_s = 1e5;
        r.validation_loss = NAN;
        break;
    case MB_REPORT_SAVED:
        r.iteration = 10, r.text = (char *)"/data/iter_0000010", r.files = FILES, r.n_files = 2;
        r.has_times = 1, r.stall_ms = 0, r.write_ms = 1LL << 40;
        break;
    case MB_REPORT_DONE:
    case MB_REPORT_DURABLE:
        r.iteration = 20;
        break;
    case MB_REPORT_START:
        r.endpoints = ENDPOINTS, r.n_endpoints = 2;
        break;
    default:
        r.text = (char *)"reason \"quoted\" \xc3\xa9\n";
        break;
    }
    return r;
}

static void assert_same(const struct mb_report *a, const struct mb_report *b)
{
    assert_int_equal(a->type, b->type);
    assert_int_equal(a->abi, b->abi);
    assert_int_equal(a->rank, b->rank);
    assert_int_equal(a->pid, b->pid);
    assert_int_equal(a->iteration, b->iteration);
    assert_int_equal(a->train_iters, b->train_iters);
    assert_int_equal(a->has_times, b->has_times);
    assert_int_equal(a->stall_ms, b->stall_ms);
    assert_int_equal(a->write_ms, b->write_ms);
    assert_int_equal(a->consumed_samples, b->consumed_samples);
    assert_true(a->loss == b->loss && a->learning_rate == b->learning_rate);
    assert_true(a->grad_norm == b->grad_norm && a->tokens_per_s == b->tokens_per_s);
    assert_true(a->validation_loss == b->validation_loss ||
                (isnan(a->validation_loss) && isnan(b->validation_loss)));
    assert_string_equal(a->text ? a->text : "", b->text ? b->text : "");
    assert_int_equal(a->n_files, b->n_files);
    for (size_t i = 0; i < a->n_files; i++) {
        assert_string_equal(a->files[i].path, b->files[i].path);
        assert_true(a->files[i].size_bytes == b->files[i].size_bytes);
        assert_true(a->files[i].crc64nvme == b->files[i].crc64nvme);
    }
    assert_int_equal(a->n_endpoints, b->n_endpoints);
    for (size_t i = 0; i < a->n_endpoints; i++) {
        assert_string_equal(a->endpoints[i], b->endpoints[i]);
    }
}

static void every_type_round_trips_and_waits_for_its_last_byte(void **state)
{
    (void)state;
    for (int t = MB_REPORT_HELLO; t <= MB_REPORT_DURABLE; t++) {
        struct mb_report r = sample((enum mb_report_type)t), got;
        struct mb_buf b = {0}, part = {0};
        struct mb_err err;
        assert_int_equal(mb_report_encode(&r, &b, &err), 0);
        for (size_t n = 0; n < b.len; n++) {
            mb_buf_reset(&part);
            assert_int_equal(mb_buf_add(&part, b.data, n), 0);
            assert_int_equal(mb_report_decode(&part, &got, &err), 0);
            assert_int_equal(part.len, n);
        }
        assert_int_equal(mb_buf_puts(&b, "next"), 0);
        assert_int_equal(mb_report_decode(&b, &got, &err), 1);
        assert_same(&r, &got);
        assert_string_equal(mb_buf_str(&b), "next");
        mb_report_close(&got);
        mb_buf_close(&b);
        mb_buf_close(&part);
    }
}

static int decode_json(const char *json)
{
    struct mb_buf b = {0};
    struct mb_report r;
    struct mb_err err = {0};
    assert_int_equal(mb_buf_u32le(&b, (uint32_t)strlen(json)), 0);
    assert_int_equal(mb_buf_puts(&b, json), 0);
    int rc = mb_report_decode(&b, &r, &err);
    if (rc == 1) {
        mb_report_close(&r);
    } else {
        assert_true(err.text[0] != '\0');
    }
    mb_buf_close(&b);
    return rc;
}

static void what_is_not_the_protocol_is_refused(void **state)
{
    (void)state;
    static const char *const BAD[] = {
        "x",
        "[]",
        "\"t\"",
        "{}",
        "{\"t\":1}",
        "{\"t\":\"nosuch\"}",
        "{\"t\":\"done\",\"t\":\"done\",\"rank\":0,\"iteration\":1}",
        "{\"t\":\"hello\",\"rank\":0,\"pid\":1}",
        "{\"t\":\"hello\",\"abi\":1,\"rank\":-1,\"pid\":1}",
        "{\"t\":\"hello\",\"abi\":1,\"rank\":4294967296,\"pid\":1}",
        "{\"t\":\"hello\",\"abi\":1.0,\"rank\":0,\"pid\":1}",
        "{\"t\":\"hello\",\"abi\":\"1\",\"rank\":0,\"pid\":1}",
        "{\"t\":\"stop\"}",
        "{\"t\":\"stop\",\"text\":5}",
        "{\"t\":\"stop\",\"text\":\"a\\u0000b\"}",
        "{\"t\":\"durable\",\"iteration\":-1}",
        "{\"t\":\"durable\",\"iteration\":99999999999999999999}",
        "{\"t\":\"start\",\"endpoints\":[]}",
        "{\"t\":\"start\",\"endpoints\":[1]}",
        "{\"t\":\"start\",\"endpoints\":\"a\"}",
        "{\"t\":\"saved\",\"rank\":0,\"iteration\":1,\"text\":\"d\",\"files\":{}}",
        "{\"t\":\"saved\",\"rank\":0,\"iteration\":1,\"text\":\"d\",\"files\":[7]}",
        "{\"t\":\"saved\",\"rank\":0,\"iteration\":1,\"text\":\"d\",\"files\":[{\"path\":\"/etc/"
        "x\","
        "\"size\":1,\"crc64nvme\":\"0000000000000000\"}]}",
        "{\"t\":\"saved\",\"rank\":0,\"iteration\":1,\"text\":\"d\",\"files\":[{\"path\":\"a/../"
        "b\","
        "\"size\":1,\"crc64nvme\":\"0000000000000000\"}]}",
        "{\"t\":\"saved\",\"rank\":0,\"iteration\":1,\"text\":\"d\",\"files\":[{\"path\":\"a\","
        "\"size\":-1,\"crc64nvme\":\"0000000000000000\"}]}",
        "{\"t\":\"saved\",\"rank\":0,\"iteration\":1,\"text\":\"d\",\"files\":[{\"path\":\"a\","
        "\"size\":1,\"crc64nvme\":\"00\"}]}",
        "{\"t\":\"progress\",\"rank\":0,\"iteration\":1}",
        "{\"t\":\"progress\",\"rank\":0,\"iteration\":1,\"train_iters\":1,\"consumed_samples\":1,"
        "\"loss\":\"1\",\"learning_rate\":1,\"grad_norm\":1,\"tokens_per_s\":1,"
        "\"validation_loss\":1}",
    };
    for (size_t i = 0; i < sizeof BAD / sizeof BAD[0]; i++) {
        assert_int_equal(decode_json(BAD[i]), MB_EPROTO);
    }
    assert_int_equal(decode_json("{\"t\":\"stop\",\"text\":\"\",\"added_later\":[1]}"), 1);
}

static void oversize_is_refused_on_both_sides(void **state)
{
    (void)state;
    struct mb_err err;
    struct mb_report got;
    struct mb_buf b = {0};
    assert_int_equal(mb_buf_u32le(&b, MB_REPORT_FRAME_MAX + 1), 0);
    assert_int_equal(mb_report_decode(&b, &got, &err), MB_EPROTO);
    mb_buf_reset(&b);
    assert_int_equal(mb_buf_u32le(&b, 0), 0);
    assert_int_equal(mb_report_decode(&b, &got, &err), MB_EPROTO);
    mb_buf_reset(&b);

    char *big = mb_calloc(1, MB_REPORT_FRAME_MAX + 1);
    assert_non_null(big);
    memset(big, 'x', MB_REPORT_FRAME_MAX);
    struct mb_report r = {.type = MB_REPORT_STOP, .text = big};
    assert_int_equal(mb_report_encode(&r, &b, &err), MB_EFULL);
    assert_int_equal(b.len, 0);
    mb_free(big);
    mb_buf_close(&b);
}

static void text_that_is_not_utf8_is_made_printable(void **state)
{
    (void)state;
    struct mb_err err;
    struct mb_buf b = {0};
    struct mb_report r = {.type = MB_REPORT_FAILED, .text = (char *)"bad \xff name"}, got;
    assert_int_equal(mb_report_encode(&r, &b, &err), 0);
    assert_int_equal(mb_report_decode(&b, &got, &err), 1);
    assert_string_equal(got.text, "bad ? name");
    mb_report_close(&got);
    mb_buf_close(&b);
}

static void every_failing_allocation_is_reported_and_leaves_nothing(void **state)
{
    (void)state;
    for (int t = MB_REPORT_HELLO; t <= MB_REPORT_DURABLE; t++) {
        struct mb_report r = sample((enum mb_report_type)t), got;
        for (unsigned long nth = 1;; nth++) {
            struct mb_buf b = {0};
            struct mb_err err;
            mb_alloc_fail_nth(nth);
            int rc = mb_report_encode(&r, &b, &err);
            int decoded = rc == 0 ? mb_report_decode(&b, &got, &err) : rc;
            int failed = mb_alloc_did_fail();
            mb_alloc_fail_nth(0);
            if (decoded == 1) {
                mb_report_close(&got);
            }
            mb_buf_close(&b);
            if (!failed) {
                assert_int_equal(decoded, 1);
                break;
            }
            assert_int_equal(decoded, MB_ENOMEM);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_type_round_trips_and_waits_for_its_last_byte),
        cmocka_unit_test(what_is_not_the_protocol_is_refused),
        cmocka_unit_test(oversize_is_refused_on_both_sides),
        cmocka_unit_test(text_that_is_not_utf8_is_made_printable),
        cmocka_unit_test(every_failing_allocation_is_reported_and_leaves_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
