/* What `mobula status` prints: the words, a screen of them, and what counts as a change. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "base/alloc.h"
#include "base/err.h"
#include "cli/status_view.h"

static json_t *parse(const char *text)
{
    json_error_t why;
    json_t *j = json_loads(text, 0, &why);

    if (!j)
        fail_msg("%s at %d", why.text, why.position);
    return j;
}

static void assert_view(const char *status, int live_first, const char *expected)
{
    json_t *j = parse(status);
    struct mb_buf b = {0};

    assert_int_equal(mb_status_view(j, live_first, &b), 0);
    assert_string_equal(mb_buf_str(&b), expected);
    mb_buf_close(&b);
    json_decref(j);
}

static void nothing_at_all(void **state)
{
    (void)state;
    assert_view("{}", 0, "nodes: 0\njobs: 0\n");
    assert_view("{\"nodes\": 3, \"queue\": null, \"jobs\": [7, null, {}]}", 0,
                "nodes: 0\njobs: 3\n              \n              \n              \n");
}

static void a_standby_and_no_token(void **state)
{
    (void)state;
    assert_view("{\"cluster\": {\"is_open\": true}, \"nodes\": ["
                "{\"node_id\": \"a1\", \"state\": \"ALIVE\", \"ip\": \"10.0.0.1\","
                " \"node_name\": \"a\", \"is_head\": true, \"is_standby\": false},"
                "{\"node_id\": \"b2\", \"state\": \"ALIVE\", \"ip\": \"10.0.0.2\","
                " \"node_name\": \"b\", \"is_head\": true, \"is_standby\": true},"
                "{\"node_id\": \"c3\", \"state\": \"DEAD\", \"ip\": \"10.0.0.3\","
                " \"node_name\": \"c\", \"is_head\": true, \"is_standby\": false}]}",
                0,
                "WARNING: no token is needed here: whoever reaches the head may run programs on "
                "this cluster\n"
                "nodes: 3\n"
                "  ALIVE  a1  10.0.0.1        a                head\n"
                "  ALIVE  b2  10.0.0.2        b                standby\n"
                "  DEAD   c3  10.0.0.3        c               \n"
                "jobs: 0\n");
}

static const char full[] =
    "{\"cluster\": {\"now_unix_ms\": 5, \"gang_order\": \"strict\"},"
    " \"nodes\": [{\"node_id\": \"0123456789abcdef\", \"state\": \"ALIVE\", \"ip\": \"10.0.0.1\","
    "   \"node_name\": \"a\", \"is_head\": true,"
    "   \"resources_total\": {\"mobula_gpu\": 4, \"CPU\": 3},"
    "   \"resources_available\": {\"mobula_gpu\": 1},"
    "   \"for_drivers\": {\"CPU\": {\"used\": 1.5, \"total\": 8},"
    "     \"GPU\": {\"used\": 3, \"total\": 4}, \"memory\": {\"used\": 0, \"total\": 1e9},"
    "     \"wh\\u001bale\": {\"used\": 0, \"total\": 2}}}],"
    " \"queue\": [{\"position\": 1, \"name\": \"mobula-big\", \"num_bundles\": 2, \"priority\": 5,"
    "   \"bundle\": {\"mobula_gpu\": 4, \"mobula_slot\": 4}, \"waited_ms\": 12999,"
    "   \"reason\": \"waiting for 3 more mobula_gpu\"}],"
    " \"jobs\": [{\"submission_id\": \"old\", \"status\": \"SUCCEEDED\", \"start_time\": 1,"
    "   \"entrypoint\": \"true\"},"
    "  {\"submission_id\": \"new\", \"status\": \"FAILED\", \"start_time\": 2,"
    "   \"entrypoint\": \"false\", \"message\": \"first\\nsecond\"},"
    "  {\"submission_id\": \"run\", \"status\": \"RUNNING\", \"start_time\": 0,"
    "   \"entrypoint\": \"x\", \"gang\": {\"state\": \"RUNNING\", \"world_size\": 8, "
    "\"num_nodes\": 2,"
    "   \"attempt\": 1, \"iteration\": 3, \"train_iters\": 9, \"loss\": 1.5, \"tokens_per_s\": 70,"
    "   \"error\": \"\", \"checkpoint\": {\"url\": \"s3://b\", \"saved_iteration\": 2,"
    "   \"durable_iteration\": 1, \"uploading_bytes\": 1024, \"total_bytes\": 4096}}}]}";

static void everything(void **state)
{
    (void)state;
    assert_view(
        full, 1,
        "nodes: 1\n"
        "  ALIVE  0123456789ab  10.0.0.1        a                head  CPU 1.5/8 used  wh?ale 0/2 "
        "used  gpu 3/4 used\n"
        "queue: 1 gang waits, strict order\n"
        "  1. big                   2 nodes x 4 mobula_gpu, priority 5, for 12 s\n"
        "      waiting for 3 more mobula_gpu\n"
        "jobs: 3\n"
        "  RUNNING   run  x\n"
        "      gang: RUNNING, 8 ranks on 2 nodes, attempt 1, iteration 3/9, loss 1.5000, 70 "
        "tokens/s\n"
        "      checkpoint: saved iteration 2, durable iteration 1 in s3://b, uploading 1.0 "
        "KiB of 4.0 KiB\n"
        "  FAILED    new  false\n"
        "      first\n"
        "  SUCCEEDED old  true\n");
}

/* What is on its way, and how long there is. */
static void deadlines(void **state)
{
    static const char job[] =
        "{\"cluster\": {\"now_unix_ms\": 1000000}, \"jobs\": [{\"submission_id\": \"run\","
        " \"status\": \"RUNNING\", \"entrypoint\": \"x\", \"gang\": {\"state\": \"RUNNING\","
        " \"world_size\": 1, \"num_nodes\": 1, \"attempt\": 1, \"error\": \"\","
        " \"checkpoint\": {\"url\": \"s3://b\", \"saved_iteration\": 40, \"durable_iteration\": 20,"
        "  \"uploading_bytes\": 1, \"total_bytes\": 2,"
        "  \"progress\": \"uploading iteration 40: 41 of 64 parts, done in 12 s\"},"
        " \"deadline\": {\"unix_ms\": %d, \"source\": \"--deadline\", \"save_at_unix_ms\": %d,"
        "  \"reached\": %s}}}]}";
    static const char head[] =
        "nodes: 0\njobs: 1\n  RUNNING   run  x\n      gang: RUNNING, 1 ranks on 1 nodes, attempt "
        "1\n"
        "      checkpoint: saved iteration 40, durable iteration 20 in s3://b\n"
        "      uploading iteration 40: 41 of 64 parts, done in 12 s\n      deadline (--deadline) ";
    static const struct {
        int at, save_at;
        const char *reached, *tail;
    } rows[] = {
        {1310999, 1280000, "false", "in 310 s, the last save in 280 s\n"},
        {1310999, 990000, "false", "in 310 s\n"},
        {1310999, 1280000, "true", "in 310 s: the ranks save and end\n"},
        {997000, 1, "true", "3 s ago: the ranks save and end\n"},
    };
    char text[1000], view[600];

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        snprintf(text, sizeof(text), job, rows[i].at, rows[i].save_at, rows[i].reached);
        snprintf(view, sizeof(view), "%s%s", head, rows[i].tail);
        assert_view(text, 0, view);
    }
}

/* A gang that goes on with fewer nodes says of how many. */
static void fewer_nodes(void **state)
{
    static const char line[] =
        "{\"jobs\": [{\"submission_id\": \"run\", \"status\": \"RUNNING\", \"entrypoint\": \"x\","
        "  \"gang\": {\"state\": \"RUNNING\", \"world_size\": 4, \"num_nodes\": 2,"
        "   \"max_nodes\": %d, \"attempt\": 2}}]}";
    static const char expected[] = "nodes: 0\njobs: 1\n  RUNNING   run  x\n"
                                   "      gang: RUNNING, 4 ranks on 2 nodes%s, attempt 2\n";
    char text[400], view[200];

    (void)state;
    for (int max = 2; max <= 3; max++) {
        snprintf(text, sizeof(text), line, max);
        snprintf(view, sizeof(view), expected, max == 3 ? " (of 3)" : "");
        assert_view(text, 0, view);
    }
}

/* What others wrote moves neither cursor nor colours. */
static void control_bytes(void **state)
{
    (void)state;
    assert_view("{\"jobs\": [{\"status\": \"PENDING\", \"submission_id\": \"a\\u001b[2Jb\","
                " \"entrypoint\": \"echo\\nx\\u007f\\u009bH\\u00e9\"}]}",
                0, "nodes: 0\njobs: 1\n  PENDING   a?[2Jb  echo?x???H\xc3\xa9\n");
}

static void assert_screen(const char *text, unsigned rows, unsigned columns, const char *expected)
{
    struct mb_buf b = {0};

    assert_int_equal(mb_status_screen(text, rows, columns, &b), 0);
    assert_string_equal(mb_buf_str(&b), expected);
    mb_buf_close(&b);
}

static void screens(void **state)
{
    (void)state;
    assert_screen("ab\ncd\n", 2, 80, "\x1b[Hab\x1b[K\r\ncd\x1b[K\x1b[J");
    assert_screen("abc\n\nd", 3, 2, "\x1b[Hab\x1b[K\r\n\x1b[K\r\nd\x1b[K\x1b[J");
    assert_screen("1\n2\n3\n4\n", 3, 80,
                  "\x1b[H1\x1b[K\r\n2\x1b[K\r\n... 2 more lines\x1b[K\x1b[J");
    assert_screen("1\n2\n", 1, 5, "\x1b[H... 2\x1b[K\x1b[J");
    assert_screen("1\n", 0, 5, "\x1b[H\x1b[J");
    /* A character is not cut in half; broken ones count as one. */
    assert_screen("\xc3\xa9\xc3\xa9\xc3\xa9", 1, 2, "\x1b[H\xc3\xa9\xc3\xa9\x1b[K\x1b[J");
    assert_screen("\xff\xfe\xc3", 1, 2, "\x1b[H\xff\xfe\x1b[K\x1b[J");
    assert_screen("x\xc3", 1, 9, "\x1b[Hx\xc3\x1b[K\x1b[J");
}

static void clocks_are_no_change(void **state)
{
    json_t *a = parse(full), *b = parse(full);
    char *x, *y;

    (void)state;
    json_object_set_new(json_object_get(b, "cluster"), "now_unix_ms", json_integer(6));
    json_object_set_new(json_array_get(json_object_get(b, "queue"), 0), "waited_ms",
                        json_integer(13000));
    x = mb_status_essence(a);
    y = mb_status_essence(b);
    assert_string_equal(x, y);
    free(y);
    json_object_set_new(json_array_get(json_object_get(b, "jobs"), 0), "status",
                        json_string("STOPPED"));
    y = mb_status_essence(b);
    assert_string_not_equal(x, y);
    free(x);
    free(y);
    assert_int_equal(
        json_integer_value(json_object_get(json_object_get(b, "cluster"), "now_unix_ms")),
        6); /* what is printed keeps them */
    json_decref(a);
    json_decref(b);
}

static void memory_runs_out(void **state)
{
    json_t *j = parse(full);
    int rc = MB_ENOMEM;

    (void)state;
    for (unsigned nth = 1; rc == MB_ENOMEM && nth < 100; nth++) {
        struct mb_buf b = {0}, screen = {0};
        mb_alloc_fail_nth(nth);
        rc = mb_status_view(j, 1, &b);
        if (rc == 0)
            rc = mb_status_screen(mb_buf_str(&b), 24, 80, &screen);
        mb_alloc_fail_nth(0);
        mb_buf_close(&b);
        mb_buf_close(&screen);
    }
    assert_int_equal(rc, 0);
    json_decref(j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_at_all),  cmocka_unit_test(a_standby_and_no_token),
        cmocka_unit_test(everything),      cmocka_unit_test(fewer_nodes),
        cmocka_unit_test(deadlines),       cmocka_unit_test(control_bytes),
        cmocka_unit_test(screens),         cmocka_unit_test(clocks_are_no_change),
        cmocka_unit_test(memory_runs_out),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
