/* Mutual TLS: calls and streams through it, and what a probe says of those who do not fit. */
#include "cmocka_all.h"

#include <errno.h>
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <openssl/pem.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/grpc/internal.h"
#include "base/grpc/tls_internal.h"
#include "base/log.h"
#include "base/str.h"
#include "grpc_fixture.h"

/* Who waits for the end of it has not been called off. */
enum { FOR_EVER_MS = 3600 * 1000 };

static char dir[64];

static int set_up(void **state)
{
    char command[256];

    (void)state;
    strcpy(dir, "/tmp/mobula-tls-XXXXXX");
    if (mkdtemp(dir) == NULL)
        return -1;
    snprintf(command, sizeof(command), "%s %s 127.0.0.1", MAKE_CERTS, dir);
    return system(command);
}

static int tear_down(void **state)
{
    (void)state;
    return mb_fs_remove_tree(dir, NULL);
}

static int read_named(const char *name, const char *key, const char *ca, struct mb_grpc_tls **out,
                      struct mb_err *err)
{
    char cert_path[128], key_path[128], ca_path[128];

    snprintf(cert_path, sizeof(cert_path), "%s/%s.pem", dir, name);
    snprintf(key_path, sizeof(key_path), "%s/%s.key", dir, key);
    snprintf(ca_path, sizeof(ca_path), "%s/%s.pem", dir, ca);
    return mb_grpc_tls_read(&(struct mb_grpc_tls_files){cert_path, key_path, ca_path}, out, err);
}

static struct mb_grpc_tls *named(const char *name, const char *ca)
{
    struct mb_grpc_tls *t;
    struct mb_err err = {0};

    assert_int_equal(read_named(name, name, ca, &t, &err), MB_OK);
    return t;
}

static void answer_serving(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    check_response reply = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;

    (void)arg;
    (void)request;
    reply.status = 1;
    mb_grpc_reply(req, &reply.base);
}

static const struct mb_grpc_method check_method = {.name = "/t.T/Check", .unary = answer_serving};

/* A server with these certificates (NULL: plain), and a client's runtime; both are taken over. */
static void start_with(struct fixture *f, struct mb_grpc_tls *server, struct mb_grpc_tls *client)
{
    struct mb_grpc_method method = check_method;
    struct mb_err err = {0};

    method.request_desc = &grpc__health__v1__health_check_request__descriptor;
    fixture_init(f);
    assert_int_equal(mb_grpc_create(&f->loop, &f->server_g, &err), 0);
    assert_int_equal(mb_grpc_create(&f->loop, &f->client_g, &err), 0);
    mb_grpc_secure(f->server_g, server);
    mb_grpc_secure(f->client_g, client);
    assert_int_equal(mb_grpc_server_create(f->server_g, NULL, &f->srv, &err), 0);
    assert_int_equal(mb_grpc_server_add(f->srv, &method, 1, NULL, &err), 0);
    assert_int_equal(mb_grpc_server_listen(f->srv, "127.0.0.1:0", &f->port, &err), 0);
    snprintf(f->target, sizeof(f->target), "127.0.0.1:%d", f->port);
    fixture_dial(f, NULL);
}

static void start(struct fixture *f, const char *server, struct mb_grpc_tls *client)
{
    start_with(f, server != NULL ? named(server, "ca") : NULL, client);
}

static void test_a_call_goes_through(void **state)
{
    struct result r = {0};
    struct fixture f;

    (void)state;
    start(&f, "good", named("good", "ca"));
    call_check(&f, "/t.T/Check", "", 30000, &r, NULL);
    fixture_wait(&f, &r.n, 1);
    assert_int_equal(r.status, MB_GRPC_OK);
    assert_int_equal(r.serving, 1);
    assert_null(mb_grpc_channel_fault(f.ch));
    fixture_end(&f);
}

static void renew(const char *name, const char *by)
{
    char command[256];

    snprintf(command, sizeof(command), "cd %s && cp %s %s.next && mv %s.next %s", dir, by, name,
             name, name);
    assert_int_equal(system(command), 0);
}

static void renew_all(const char *cert, const char *key, const char *ca)
{
    renew("now.pem", cert);
    renew("now.key", key);
    renew("now-ca.pem", ca);
}

/* The status of a call on a new connection. */
static int dial_and_call(struct fixture *f)
{
    struct result r = {0};

    mb_grpc_channel_destroy(f->ch);
    fixture_dial(f, NULL);
    call_check(f, "/t.T/Check", "", 30000, &r, NULL);
    fixture_wait(f, &r.n, 1);
    return r.status;
}

static void until_ok(struct fixture *f)
{
    for (int i = 0; i < 6000 && dial_and_call(f) != MB_GRPC_OK; i++)
        uv_sleep(20);
    assert_int_equal(dial_and_call(f), MB_GRPC_OK);
}

/* Certificate, key and CA of one side are replaced while it runs. */
static void test_files_that_are_renewed(void **state)
{
    struct fixture f;

    (void)state;
    for (int is_server = 0; is_server < 2; is_server++) {
        renew_all("good.pem", "good.key", "ca.pem");
        start_with(&f, is_server ? named("now", "now-ca") : named("other", "other-ca"),
                   is_server ? named("other", "other-ca") : named("now", "now-ca"));
        assert_int_equal(dial_and_call(&f), MB_GRPC_UNAVAILABLE);
        renew_all("other.pem", "other.key", "other-ca.pem");
        until_ok(&f);
        fixture_end(&f);
    }
}

/* Calls until the channel knows why none gets through. */
static void fails(const char *server, struct mb_grpc_tls *client, const char *says)
{
    struct fixture f;
    int n = 0;

    start(&f, server, client);
    while (mb_grpc_channel_fault(f.ch) == NULL && n++ < 6000) {
        struct result r = {0};

        call_check(&f, "/t.T/Check", "", 30000, &r, NULL);
        fixture_wait(&f, &r.n, 1);
        assert_int_equal(r.status, MB_GRPC_UNAVAILABLE);
        uv_run(&f.loop, UV_RUN_NOWAIT);
        uv_sleep(10);
    }
    assert_non_null(mb_grpc_channel_fault(f.ch));
    if (strstr(mb_grpc_channel_fault(f.ch), says) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", mb_grpc_channel_fault(f.ch), says);
    fixture_end(&f);
}

/* It was valid when it was read. */
static struct mb_grpc_tls *ended_since(void)
{
    struct mb_grpc_tls *t;

    renew("now.pem", "good.pem");
    renew("now.key", "good.key");
    t = named("now", "ca");
    renew("now.pem", "expired.pem");
    renew("now.key", "expired.key");
    return t;
}

static void test_who_does_not_fit(void **state)
{
    (void)state;
    fails("good", NULL, "speaks TLS: set RAY_USE_TLS=1");
    fails(NULL, named("good", "ca"), "speaks no TLS");
    fails("good", named("other", "other-ca"), "is not of the CA in");
    fails("good", named("other", "ca"), "refuses our certificate");
    fails("good", ended_since(), "the certificate expired on");
    fails("elsewhere", named("good", "ca"), "is not for 127.0.0.1");
}

/* ---- peers that are no server ---- */

static int listen_here(char *target, size_t n)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof(a);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    assert_int_equal(bind(fd, (struct sockaddr *)&a, len), 0);
    assert_int_equal(listen(fd, 64), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &len), 0);
    snprintf(target, n, "127.0.0.1:%d", ntohs(a.sin_port));
    return fd;
}

/* The next connection, after the first bytes of its hello. */
static int take_hello(int listener)
{
    struct pollfd p = {.fd = listener, .events = POLLIN};
    char byte;
    int fd;

    assert_int_equal(poll(&p, 1, 60000), 1);
    fd = accept(listener, NULL, NULL);
    assert_true(fd >= 0);
    assert_int_equal(recv(fd, &byte, 1, MSG_PEEK), 1);
    return fd;
}

struct looking {
    struct mb_grpc_tls *tls;
    char target[64];
    int cancelled, rc;
    struct mb_err err;
};

static void *look(void *arg)
{
    struct looking *l = arg;

    l->rc = mb_grpc_tls_probe(l->tls, l->target, FOR_EVER_MS, &l->cancelled, &l->err);
    return NULL;
}

/* The peer says nothing, and the one who looks would wait for an hour. */
static void test_a_look_is_called_off(void **state)
{
    struct looking l = {.tls = named("good", "ca")};
    int listener = listen_here(l.target, sizeof(l.target)), fd;
    pthread_t thread;

    (void)state;
    assert_int_equal(pthread_create(&thread, NULL, look, &l), 0);
    fd = take_hello(listener);
    __atomic_store_n(&l.cancelled, 1, __ATOMIC_RELAXED);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(l.rc, MB_OK);
    close(fd);
    close(listener);
    mb_grpc_tls_free(l.tls);
}

/* A channel, or the runtime with it, ends while somebody looks at a peer that says nothing. */
static void test_a_channel_calls_off(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        struct result r = {0};
        struct fixture f;
        int listener, first;

        start(&f, NULL, named("good", "ca"));
        mb_grpc_channel_destroy(f.ch);
        f.client_g->probe_patience_ms = FOR_EVER_MS;
        listener = listen_here(f.target, sizeof(f.target));
        fixture_dial(&f, NULL);
        call_check(&f, "/t.T/Check", "", 60000, &r, NULL);
        first = take_hello(listener);
        close(first); /* nobody takes the following ones from the kernel */
        fixture_wait(&f, &r.n, 1);
        assert_int_equal(r.status, MB_GRPC_UNAVAILABLE);
        assert_non_null(f.ch->probe);
        if (i == 0)
            mb_grpc_channel_destroy(f.ch);
        fixture_end(&f);
        close(listener);
    }
}

/* A peer that ends while somebody looks: the hello is written to a connection that was closed and
 * reset, which ends a program that knows no better (SIGPIPE). The reset comes before the hello in
 * some of the rounds. */
static void test_a_peer_ends(void **state)
{
    static const struct linger reset = {.l_onoff = 1};

    (void)state;
    for (int i = 0; i < 200; i++) {
        struct looking l = {0};
        int listener = listen_here(l.target, sizeof(l.target)), fd;
        pthread_t thread;

        assert_int_equal(pthread_create(&thread, NULL, look, &l), 0);
        fd = accept(listener, NULL, NULL);
        assert_true(fd >= 0);
        assert_int_equal(shutdown(fd, SHUT_WR), 0);
        assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset)), 0);
        close(fd);
        close(listener); /* it would be dialled again */
        assert_int_equal(pthread_join(thread, NULL), 0);
        assert_int_equal(l.rc, MB_OK);
    }
}

static int take_plain(int listener, const char *answer)
{
    int fd = accept(listener, NULL, NULL);
    char hello[4096];

    assert_true(fd >= 0);
    assert_true(recv(fd, hello, sizeof(hello), 0) > 0);
    assert_int_equal(send(fd, answer, strlen(answer), MSG_NOSIGNAL), (ssize_t)strlen(answer));
    return fd;
}

/* A dashboard's port: it understands neither of our hellos, and says so in its own words. */
static void test_a_server_of_http1(void **state)
{
    static const struct {
        const char *answer;
        int code;
    } servers[] = {{"HTTP/1.1 400 Bad Request\r\n\r\n", MB_EUNSUPPORTED},
                   {"HTTP/2", MB_OK},
                   {"220 mail.example\r\n", MB_OK}};

    (void)state;
    for (size_t i = 0; i < sizeof(servers) / sizeof(servers[0]); i++) {
        struct looking l = {.tls = NULL};
        int listener = listen_here(l.target, sizeof(l.target)), first, second;
        pthread_t thread;

        assert_int_equal(pthread_create(&thread, NULL, look, &l), 0);
        first = take_plain(listener, servers[i].answer);
        close(first);
        second = take_plain(listener, servers[i].answer);
        if (shutdown(second, SHUT_WR) != 0) /* who has heard enough has hung up */
            assert_int_equal(errno, ENOTCONN);
        assert_int_equal(pthread_join(thread, NULL), 0);
        close(second);
        close(listener);
        assert_int_equal(l.rc, servers[i].code);
        if (l.rc != MB_OK)
            assert_non_null(strstr(l.err.text, "answers in HTTP/1, not in gRPC"));
    }
}

/* protocol_version: nothing is wrong with our certificate. */
static void test_an_alert_about_something_else(void **state)
{
    static const unsigned char alert[] = {21, 3, 3, 0, 2, 2, 70};
    struct looking l = {.tls = named("good", "ca")};
    int listener = listen_here(l.target, sizeof(l.target)), fd;
    char hello[4096];
    pthread_t thread;

    (void)state;
    assert_int_equal(pthread_create(&thread, NULL, look, &l), 0);
    fd = take_hello(listener);
    assert_true(recv(fd, hello, sizeof(hello), 0) > 0); /* unread bytes would reset it */
    assert_int_equal(send(fd, alert, sizeof(alert), MSG_NOSIGNAL), sizeof(alert));
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(l.rc, MB_EDENIED);
    assert_non_null(strstr(l.err.text, "ends the TLS handshake"));
    close(fd);
    close(listener);
    mb_grpc_tls_free(l.tls);
}

/* What is logged when the key has this mode. */
static void said_of_key(mode_t mode, char *out, size_t n)
{
    char path[128];
    int ends[2];
    ssize_t k;

    snprintf(path, sizeof(path), "%s/good.key", dir);
    assert_int_equal(chmod(path, mode), 0);
    assert_int_equal(pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
    mb_log_init(ends[1], MB_LOG_INFO);
    mb_grpc_tls_free(named("good", "ca"));
    mb_log_init(2, MB_LOG_INFO);
    k = read(ends[0], out, n - 1);
    out[k > 0 ? k : 0] = '\0';
    close(ends[0]);
    close(ends[1]);
}

static void test_a_key_for_everybody(void **state)
{
    char text[512];

    (void)state;
    said_of_key(0644, text, sizeof(text));
    assert_non_null(
        strstr(text, "good.key: everybody on this machine may read this key (mode 0644)"));
    said_of_key(0640, text, sizeof(text));
    assert_string_equal(text, "");
    said_of_key(0600, text, sizeof(text));
    assert_string_equal(text, "");
}

static void test_files_that_are_wrong(void **state)
{
    struct mb_grpc_tls *t;
    struct mb_err err = {0};

    (void)state;
    assert_int_equal(read_named("expired", "expired", "ca", &t, &err), MB_EDENIED);
    assert_non_null(strstr(err.text, "expired on"));
    assert_int_equal(read_named("good", "other", "ca", &t, &err), MB_EINVAL);
    assert_non_null(strstr(err.text, "is not the key of"));
    assert_int_equal(read_named("nobody", "good", "ca", &t, &err), MB_ENOENT);
    assert_int_equal(read_named("good", "good", "../../proc/self/status", &t, &err), MB_ENOENT);
    assert_null(t);
    for (unsigned long n = 1;; n++) {
        mb_alloc_fail_nth(n);
        int rc = read_named("good", "good", "ca", &t, &err);
        mb_alloc_fail_nth(0);
        if (rc == MB_OK)
            break;
        assert_int_equal(rc, MB_ENOMEM);
        assert_null(t);
    }
    assert_int_equal(mb_grpc_tls_names(t, "127.0.0.1", &err), MB_OK);
    assert_int_equal(mb_grpc_tls_names(t, "localhost", &err), MB_OK);
    assert_int_equal(mb_grpc_tls_names(t, "10.1.2.3", &err), MB_EDENIED);
    assert_non_null(strstr(err.text, "subjectAltName IP:10.1.2.3"));
    mb_grpc_tls_free(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_call_goes_through),
        cmocka_unit_test(test_who_does_not_fit),
        cmocka_unit_test(test_a_look_is_called_off),
        cmocka_unit_test(test_a_channel_calls_off),
        cmocka_unit_test(test_a_peer_ends),
        cmocka_unit_test(test_a_server_of_http1),
        cmocka_unit_test(test_an_alert_about_something_else),
        cmocka_unit_test(test_a_key_for_everybody),
        cmocka_unit_test(test_files_that_are_wrong),
        cmocka_unit_test(test_files_that_are_renewed),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
