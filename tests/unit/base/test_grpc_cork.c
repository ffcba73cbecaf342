/* What is sent in one turn of the loop leaves together, and nothing stays behind. */
#include <netinet/tcp.h>
#include <sys/socket.h>
#include "base/clock.h"
#include "grpc_fixture.h"

enum { CALLS = 200, DESCRIPTORS = 1024, AT_ONCE_MS = 150 /* a corked segment waits for 200 ms */ };

static void handle_check(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    check_response r = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;

    (void)arg;
    (void)request;
    r.status = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING;
    mb_grpc_reply(req, &r.base);
}

static const struct mb_grpc_method methods[] = {{CHECK, check_request_desc, handle_check, NULL, 0}};

/* The kernel's struct goes on after what the C library knows of it (linux/tcp.h, which cannot be
 * included together with the library's header). */
struct long_tcp_info {
    struct tcp_info known;
    uint64_t rates_and_bytes[4];
    uint32_t segments[4]; /* out, in; not sent, round trip */
    uint32_t data_segments_in;
    uint32_t data_segments_out;
};

struct sockets {
    int n;         /* connected */
    int n_corked;  /* of them */
    unsigned sent; /* segments with data, by all of them */
};

static struct sockets look_at_sockets(void)
{
    struct sockets out = {0};

    for (int fd = 0; fd < DESCRIPTORS; fd++) {
        struct long_tcp_info info = {0};
        socklen_t len = sizeof(info), cork_len = sizeof(int);
        int corked = 0;

        if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &len) != 0 ||
            info.known.tcpi_state != TCP_ESTABLISHED)
            continue;
        assert_int_equal(len, sizeof(info));
        assert_int_equal(getsockopt(fd, IPPROTO_TCP, TCP_CORK, &corked, &cork_len), 0);
        out.n++;
        out.n_corked += corked != 0;
        out.sent += info.data_segments_out;
    }
    return out;
}

static void call_one(struct fixture *f)
{
    struct result r = {0};

    assert_int_equal(call_check(f, CHECK, "abc", 10000, &r, NULL), 0);
    fixture_wait(f, &r.n, 1);
    assert_int_equal(r.status, MB_GRPC_OK);
}

static void test_a_turn_leaves_together(void **state)
{
    struct result many[CALLS] = {{0}};
    struct sockets before, after;
    struct fixture f;

    (void)state;
    fixture_start(&f, NULL, methods, 1, NULL);
    fixture_dial(&f, NULL);
    call_one(&f); /* who answers is known now */
    before = look_at_sockets();
    assert_int_equal(before.n, 2);
    for (int i = 0; i < CALLS; i++)
        assert_int_equal(call_check(&f, CHECK, "abc", 10000, &many[i], NULL), 0);
    for (int i = 0; i < CALLS; i++) {
        fixture_wait(&f, &many[i].n, 1);
        assert_int_equal(many[i].status, MB_GRPC_OK);
    }
    after = look_at_sockets();
    assert_int_equal(after.n, 2);
    assert_int_equal(after.n_corked, 0);
    print_message("%d calls: %u segments\n", CALLS, after.sent - before.sent);
    assert_true(after.sent - before.sent < CALLS / 2); /* more than CALLS without this */
    fixture_end(&f);
}

static void test_one_call_does_not_wait(void **state)
{
    struct result many[CALLS] = {{0}};
    uint64_t best_ms = UINT64_MAX;
    struct fixture f;

    (void)state;
    fixture_start(&f, NULL, methods, 1, NULL);
    fixture_dial(&f, NULL);
    call_one(&f);
    for (int i = 0; i < CALLS; i++) /* a busy turn: both ends expect another */
        assert_int_equal(call_check(&f, CHECK, "abc", 10000, &many[i], NULL), 0);
    for (int i = 0; i < CALLS; i++)
        fixture_wait(&f, &many[i].n, 1);
    for (int i = 0; i < 5; i++) {
        uint64_t began_ms = mb_mono_ms();

        call_one(&f);
        if (mb_mono_ms() - began_ms < best_ms)
            best_ms = mb_mono_ms() - began_ms;
    }
    assert_true(best_ms < AT_ONCE_MS);
    assert_int_equal(look_at_sockets().n_corked, 0);
    fixture_end(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_turn_leaves_together),
        cmocka_unit_test(test_one_call_does_not_wait),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
