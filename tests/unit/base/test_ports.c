/* Automatic ports stay out of the ephemeral range, whatever it is, and are free. */
#include <netinet/in.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>
#include <cmocka.h>
#include "base/ports.h"

static void test_outside(void **state)
{
    static const struct {
        int first, last;
        struct mb_port_range want;
    } cases[] = {
        {32768, 60999, {20000, 26999}}, /* Linux */
        {1024, 65535, {1, 0}},          /* everything: nothing is left */
        {15000, 61000, {61001, 65535}}, /* covers the first place */
        {24000, 60999, {20000, 23999}}, /* cuts it */
        {20000, 21999, {22000, 26999}}, /* from below */
        {22000, 23000, {23001, 26999}}, /* in the middle: the larger part */
        {20100, 60999, {61000, 65535}}, /* leaves too little of it */
        {26900, 65400, {20000, 26899}}, /* cuts both */
        {10000, 65300, {1, 0}},         {100, 200, {20000, 26999}},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct mb_port_range got = mb_ports_outside(cases[i].first, cases[i].last);

        if (got.first != cases[i].want.first || got.last != cases[i].want.last)
            fail_msg("%d to %d: %d to %d", cases[i].first, cases[i].last, got.first, got.last);
    }
}

static int listen_at(int port, int reuse)
{
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_port = htons((uint16_t)port),
                            .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof(reuse)), 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof(a)), 0);
    assert_int_equal(listen(fd, 1), 0);
    return fd;
}

static void test_pick(void **state)
{
    int first = 0, last = 0, different = 0, before = 0;
    FILE *f = fopen("/proc/sys/net/ipv4/ip_local_port_range", "re");
    int fds[32];

    (void)state;
    assert_non_null(f);
    assert_int_equal(fscanf(f, "%d %d", &first, &last), 2);
    fclose(f);
    if (mb_ports_outside(first, last).last < mb_ports_outside(first, last).first) {
        print_message("not tried: the ephemeral range leaves no port, the kernel chooses\n");
        skip();
    }
    for (size_t i = 0; i < sizeof(fds) / sizeof(fds[0]); i++) {
        int port = mb_port_pick("127.0.0.1");

        assert_true(port > 1023 && (port < first || port > last));
        fds[i] = listen_at(port, 1);
        assert_false(mb_port_is_free("127.0.0.1", port));
        assert_false(mb_port_is_free("0.0.0.0", port));
        different += port != before;
        before = port;
    }
    assert_int_equal(different, sizeof(fds) / sizeof(fds[0]));
    for (size_t i = 0; i < sizeof(fds) / sizeof(fds[0]); i++)
        close(fds[i]);
    assert_true(mb_port_is_free("127.0.0.1", before));
    assert_false(mb_port_is_free("not an address", before));
}

/* The local end of a connection takes the port as a server does. */
static void test_outgoing_connection(void **state)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    struct sockaddr_in from = to;
    socklen_t len = sizeof(to);
    int server = listen_at(0, 1), fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    (void)state;
    assert_int_equal(getsockname(server, (struct sockaddr *)&to, &len), 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&to, sizeof(to)), 0);
    len = sizeof(from);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&from, &len), 0);
    assert_false(mb_port_is_free("127.0.0.1", ntohs(from.sin_port)));
    assert_false(mb_port_is_free("0.0.0.0", ntohs(from.sin_port)));
    close(fd);
    close(server);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_outside),
        cmocka_unit_test(test_pick),
        cmocka_unit_test(test_outgoing_connection),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
