/* Mutual TLS: calls and streams through it, and what a probe says of those who do not fit. */
#include "cmocka_all.h"

#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "grpc_fixture.h"

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

static void start(struct fixture *f, const char *server, const char *client, const char *client_ca)
{
    start_with(f, server != NULL ? named(server, "ca") : NULL,
               client != NULL ? named(client, client_ca) : NULL);
}

static void test_a_call_goes_through(void **state)
{
    struct result r = {0};
    struct fixture f;

    (void)state;
    start(&f, "good", "good", "ca");
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
static void fails(const char *server, const char *client, const char *ca, const char *says)
{
    struct fixture f;
    int n = 0;

    start(&f, server, client, ca);
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

static void test_who_does_not_fit(void **state)
{
    (void)state;
    fails("good", NULL, NULL, "speaks TLS: set RAY_USE_TLS=1");
    fails(NULL, "good", "ca", "speaks no TLS");
    fails("good", "other", "other-ca", "is not of the CA in");
    fails("good", "other", "ca", "refuses our certificate");
    fails("elsewhere", "good", "ca", "is not for 127.0.0.1");
}

/* A channel, then the runtime, end while somebody looks at the peer: nothing is used after it,
 * which the sanitizers see. */
static void test_a_look_is_called_off(void **state)
{
    struct result r = {0};
    struct fixture f;

    (void)state;
    for (int i = 0; i < 2; i++) {
        r = (struct result){0};
        start(&f, NULL, "good", "ca");
        call_check(&f, "/t.T/Check", "", 30000, &r, NULL);
        fixture_wait(&f, &r.n, 1);
        assert_int_equal(r.status, MB_GRPC_UNAVAILABLE);
        if (i == 0)
            mb_grpc_channel_destroy(f.ch);
        fixture_end(&f);
    }
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
        cmocka_unit_test(test_a_call_goes_through),    cmocka_unit_test(test_who_does_not_fit),
        cmocka_unit_test(test_a_look_is_called_off),   cmocka_unit_test(test_files_that_are_wrong),
        cmocka_unit_test(test_files_that_are_renewed),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
