/* The worker's end of the report socket, with this test as the agent. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "worker/report_client.h"

/* The next message on fd, waiting for it at most 10 s; 0 when the stream has ended. */
static int next_message(int fd, struct mb_buf *in, struct mb_report *out)
{
    for (;;) {
        struct mb_err err;
        int rc = mb_report_decode(in, out, &err);
        assert_true(rc >= 0);
        if (rc == 1) {
            return 1;
        }
        struct pollfd p = {.fd = fd, .events = POLLIN};
        assert_int_equal(poll(&p, 1, 10000), 1);
        uint8_t bytes[65536];
        ssize_t n = read(fd, bytes, sizeof bytes);
        if (n <= 0) {
            return 0;
        }
        assert_int_equal(mb_buf_add(in, bytes, (size_t)n), 0);
    }
}

static void tell(int fd, struct mb_report r)
{
    struct mb_buf b = {0};
    struct mb_err err;
    assert_int_equal(mb_report_encode(&r, &b, &err), 0);
    assert_int_equal(write(fd, b.data, b.len), (ssize_t)b.len);
    mb_buf_close(&b);
}

static void a_conversation(void **state)
{
    (void)state;
    int s[2];
    struct mb_report_client *c;
    struct mb_err err;
    struct mb_buf in = {0};
    struct mb_report r;
    char reason[MB_REPORT_REASON_MAX];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, s), 0);
    assert_int_equal(mb_report_client_start(s[0], 3, &c, &err), 0);
    assert_int_equal(next_message(s[1], &in, &r), 1);
    assert_int_equal(r.type, MB_REPORT_HELLO);
    assert_int_equal(r.rank, 3);
    assert_int_equal(r.pid, getpid());
    mb_report_close(&r);

    assert_int_equal(mb_report_client_wait_start(c, 1, &r, &err), MB_ETIMEOUT);
    char *endpoints[] = {(char *)"a", (char *)"b"};
    tell(s[1],
         (struct mb_report){.type = MB_REPORT_START, .endpoints = endpoints, .n_endpoints = 2});
    assert_int_equal(mb_report_client_wait_start(c, 10000, &r, &err), 0);
    assert_int_equal(r.n_endpoints, 2);
    mb_report_close(&r);

    assert_int_equal(mb_report_client_is_durable(c, 10), 0);
    assert_int_equal(mb_report_client_take_save_now(c, reason), 0);
    assert_int_equal(mb_report_client_stopping(c, reason), 0);
    for (int64_t i = 0; i < MB_REPORT_DURABLE_MAX + 3; i++) {
        tell(s[1], (struct mb_report){.type = MB_REPORT_DURABLE, .iteration = 10 * i});
    }
    tell(s[1], (struct mb_report){.type = MB_REPORT_SAVE_NOW, .text = (char *)"deadline"});
    tell(s[1], (struct mb_report){.type = MB_REPORT_STOP, .text = (char *)"the user"});
    while (!mb_report_client_stopping(c, reason)) {
        poll(NULL, 0, 1); /* nothing signals this to a caller: the training loop asks each step */
    }
    assert_string_equal(reason, "the user");
    assert_int_equal(mb_report_client_take_save_now(c, reason), 1);
    assert_string_equal(reason, "deadline");
    assert_int_equal(mb_report_client_take_save_now(c, reason), 0);
    assert_int_equal(mb_report_client_is_durable(c, 20), 0); /* forgotten */
    assert_int_equal(mb_report_client_is_durable(c, 30), 1);
    assert_int_equal(mb_report_client_is_durable(c, 31), 0);
    assert_int_equal(mb_report_client_is_durable(c, 10 * (MB_REPORT_DURABLE_MAX + 2)), 1);

    struct mb_report done = {.type = MB_REPORT_DONE, .iteration = 20};
    assert_int_equal(mb_report_client_send(c, &done, &err), 0);
    mb_report_client_close(c, 10000);
    assert_int_equal(next_message(s[1], &in, &r), 1);
    assert_int_equal(r.type, MB_REPORT_DONE);
    mb_report_close(&r);
    assert_int_equal(next_message(s[1], &in, &r), 0);
    mb_buf_close(&in);
    close(s[1]);
}

static void a_slow_reader_costs_progress_only(void **state)
{
    (void)state;
    int s[2];
    struct mb_report_client *c;
    struct mb_err err;
    struct mb_buf in = {0};
    struct mb_report r;
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, s), 0);
    assert_int_equal(mb_report_client_start(s[0], 0, &c, &err), 0);
    /* Texts large enough to fill the socket; nobody reads. */
    static char text[20000];
    memset(text, 'x', sizeof text - 1);
    int n_kept = 0, rc = 0;
    for (int i = 1; i <= 3000; i++) {
        struct mb_report p = {.type = MB_REPORT_PROGRESS, .iteration = i};
        assert_int_equal(mb_report_client_send(c, &p, &err), 0);
        struct mb_report f = {.type = MB_REPORT_FAILED, .text = text};
        if (rc == 0) {
            rc = mb_report_client_send(c, &f, &err);
            n_kept += rc == 0;
        }
    }
    assert_int_equal(rc, MB_EFULL);
    assert_true(n_kept >= MB_REPORT_CLIENT_QUEUE_MAX - 1); /* hello may still have its place */
    int n_failed = 0, n_progress = 0;
    int64_t last = 0;
    while (last < 3000 || n_failed < n_kept) {
        assert_int_equal(next_message(s[1], &in, &r), 1);
        n_failed += r.type == MB_REPORT_FAILED;
        if (r.type == MB_REPORT_PROGRESS) {
            assert_true(r.iteration > last);
            last = r.iteration;
            n_progress++;
        }
        mb_report_close(&r);
    }
    assert_int_equal(n_failed, n_kept);
    assert_true(n_progress < 3000);
    mb_report_client_close(c, 1000);
    mb_buf_close(&in);
    close(s[1]);
}

static void an_agent_that_never_reads_does_not_hold_the_end(void **state)
{
    (void)state;
    int s[2];
    struct mb_report_client *c;
    struct mb_err err;
    static char text[500000];
    memset(text, 'x', sizeof text - 1);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, s), 0);
    assert_int_equal(mb_report_client_start(s[0], 0, &c, &err), 0);
    for (int i = 0; i < 4; i++) {
        struct mb_report f = {.type = MB_REPORT_FAILED, .text = text};
        assert_int_equal(mb_report_client_send(c, &f, &err), 0);
    }
    mb_report_client_close(c, 50);
    close(s[1]);
}

static void an_ended_socket_is_a_stop(void **state)
{
    (void)state;
    for (int garbage = 0; garbage < 2; garbage++) {
        int s[2];
        struct mb_report_client *c;
        struct mb_report r;
        struct mb_err err;
        char reason[MB_REPORT_REASON_MAX];
        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, s), 0);
        assert_int_equal(mb_report_client_start(s[0], 0, &c, &err), 0);
        if (garbage) {
            assert_int_equal(write(s[1], "\x02\0\0\0[]", 6), 6);
        } else {
            close(s[1]);
        }
        assert_int_equal(mb_report_client_wait_start(c, 10000, &r, &err), MB_ECANCELED);
        assert_int_equal(mb_report_client_stopping(c, reason), 1);
        assert_non_null(strstr(reason, garbage ? "no JSON object" : "closed"));
        struct mb_report done = {.type = MB_REPORT_DONE, .iteration = 20};
        assert_int_equal(mb_report_client_send(c, &done, &err), MB_EUNAVAIL);
        mb_report_client_close(c, 10000);
        if (garbage) {
            close(s[1]);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_conversation),
        cmocka_unit_test(a_slow_reader_costs_progress_only),
        cmocka_unit_test(an_agent_that_never_reads_does_not_hold_the_end),
        cmocka_unit_test(an_ended_socket_is_a_stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
