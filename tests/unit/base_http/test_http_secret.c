/* A header that is a secret is nowhere in this process when its request is over. The peer is
 * another process, since it has to keep what it reads. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/http/client.h"
#include "base/loop.h"
#include "base/secret.h"

enum { SECRET_BYTES = 600, SEEN_BYTES = 48 /* of it in a row, anywhere */ };

/* The text of the secret, made where it is needed. */
static char char_at(size_t i)
{
    uint32_t x = (uint32_t)(i + 1) * 2654435761u;
    x = (x ^ x >> 15) * 2246822519u;
    return "abcdefghijklmnopqrstuvwxyz0123456789+/"[(x ^ x >> 13) % 38];
}

/* How often a stretch from its middle is in the memory that this process has written. */
static int count_in_memory(void)
{
    const size_t from = SECRET_BYTES / 2;
    char line[512], perms[8];
    unsigned long begin, end;
    int found = 0;
    FILE *f = fopen("/proc/self/maps", "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f)) {
        if (sscanf(line, "%lx-%lx %7s", &begin, &end, perms) != 3 || strcmp(perms, "rw-p") != 0)
            continue;
        const char *p = (const char *)(uintptr_t)begin, *last = (const char *)(uintptr_t)end;
        for (; last - p >= SEEN_BYTES; p++) {
            size_t n = 0;
            while (n < SEEN_BYTES && p[n] == char_at(from + n))
                n++;
            found += n == SEEN_BYTES;
        }
    }
    fclose(f);
    return found;
}

static void serve(int listener)
{
    char block[4096];
    size_t n = 0;
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* a test that failed ends without it */
    int fd = accept(listener, NULL, NULL);
    while (n < 4 || !memmem(block, n, "\r\n\r\n", 4)) {
        ssize_t k = recv(fd, block + n, sizeof block - n, 0);
        if (k <= 0)
            _exit(1);
        n += (size_t)k;
    }
    const char answer[] = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
    send(fd, answer, sizeof answer - 1, MSG_NOSIGNAL);
    while (recv(fd, block, sizeof block, 0) > 0)
        ;
    _exit(0);
}

static void on_answer(void *arg, const struct mb_http_response *r)
{
    assert_int_equal(r->error, 0);
    assert_int_equal(r->status, 200);
    ++*(int *)arg;
}

static void on_stopped(void *arg)
{
    ++*(int *)arg;
}

static void test_header(void **state)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof a;
    char url[64], header[SECRET_BYTES + 64];
    const char *headers[] = {header, NULL};
    struct mb_http_request request = {
        .method = "PUT", .url = url, .headers = headers, .body = "x", .body_len = 1, .body_fd = -1};
    struct mb_http_client *client;
    struct mb_err err;
    uv_loop_t loop;
    int n_answers = 0, n_stopped = 0, status;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    (void)state;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    skip(); /* their shadow of the memory is terabytes of it */
#endif
    assert_int_equal(bind(listener, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(listen(listener, 1), 0);
    assert_int_equal(getsockname(listener, (struct sockaddr *)&a, &len), 0);
    pid_t pid = fork();
    if (pid == 0)
        serve(listener);
    assert_true(pid > 0);
    request.is_direct = 1;
    uv_loop_init(&loop);
    assert_int_equal(mb_http_client_create(&loop, 1, &client, &err), 0);
    snprintf(url, sizeof url, "http://127.0.0.1:%d/x", ntohs(a.sin_port));
    size_t n = (size_t)snprintf(header, sizeof header, "x-amz-security-token: ");
    for (size_t i = 0; i < SECRET_BYTES; i++)
        header[n + i] = char_at(i);
    header[n + SECRET_BYTES] = '\0';
    assert_int_equal(count_in_memory(), 1); /* it would be seen */
    assert_int_equal(mb_http_fetch(client, &request, on_answer, &n_answers, NULL, &err), 0);
    mb_secret_wipe(header, sizeof header);
    while (n_answers == 0)
        mb_loop_turn(&loop);
    assert_int_equal(count_in_memory(), 0);
    mb_http_client_stop(client, on_stopped, &n_stopped);
    uv_run(&loop, UV_RUN_DEFAULT);
    assert_int_equal(n_stopped, 1);
    mb_http_client_destroy(client);
    assert_int_equal(uv_loop_close(&loop), 0);
    close(listener);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_header)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
