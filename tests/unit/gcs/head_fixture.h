/*
 * Head and client over loopback, with nodes that answer the bundle protocol. The head has a gRPC
 * runtime of its own, so that it can be stopped and started on the same port.
 */
#ifndef MOBULA_TESTS_UNIT_GCS_HEAD_FIXTURE_H
#define MOBULA_TESTS_UNIT_GCS_HEAD_FIXTURE_H

#include "loop.h"
#include <string.h>
#include "gcs/client.h"
#include "gcs/head.h"
#include "gcs/runner.h"

enum { N_AGENTS = 3 };

struct agent {
    struct mb_grpc_server *server;
    int port;
    uint8_t id[MB_NODE_ID_BYTES];
    int prepared, committed, returned, released, in_use, refuse;
    int prepared_before; /* the last release */
};

struct fixture {
    uv_loop_t loop;
    char dir[64];
    char address[64];
    struct mb_grpc *grpc, *head_grpc;
    struct mb_head *head;
    int port;
    struct mb_gcs *gcs;
    enum mb_gcs_event event;
    int n_events;
    struct agent agents[N_AGENTS];
};

struct result {
    int done;
    int code;
    char text[MB_ERR_TEXT_MAX];
    int64_t count;
    size_t n;
    char value[256];
    uint8_t job_id[MB_JOB_ID_BYTES];
    enum mb_pg_state state;
    int has_node[4];
    uint8_t nodes[4][MB_NODE_ID_BYTES];
    int dead[8];
    int ports[8], http_ports[8];
};

/* ---- answers: arg is a struct result ---- */
void fixture_on_done(void *arg, const struct mb_err *err);
void fixture_on_count(void *arg, const struct mb_err *err, int64_t count);
void fixture_on_value(void *arg, const struct mb_err *err, const void *value, size_t n);
void fixture_on_keys(void *arg, const struct mb_err *err, const char *const *keys, size_t n);
void fixture_on_job_id(void *arg, const struct mb_err *err, const uint8_t *id);
void fixture_on_nodes(void *arg, const struct mb_err *err, const struct mb_gcs_node *nodes,
                      size_t n);
void fixture_on_groups(void *arg, const struct mb_err *err, const struct mb_gcs_pg *pg, size_t n);
void fixture_on_jobs(void *arg, const struct mb_err *err, const struct mb_gcs_job *jobs, size_t n);
void fixture_on_actor(void *arg, const struct mb_err *err, const uint8_t *id);

/* Runs one request to its end: CALL uses r, &e. */
#define DO(f, r, call)                                                                             \
    do {                                                                                           \
        struct mb_err e = {0};                                                                     \
        memset(&(r), 0, sizeof(r));                                                                \
        int rc_ = call;                                                                            \
        if (rc_ != 0)                                                                              \
            fail_msg("%s", e.text);                                                                \
        assert_int_equal((r).done, 0); /* never from inside the call */                            \
        loop_until(&(f)->loop, &(r).done);                                                         \
    } while (0)

/* ---- life: arg of the events is the fixture ---- */
void fixture_set_flag(void *arg);
void fixture_on_event(void *arg, struct mb_gcs *c, enum mb_gcs_event event,
                      const struct mb_err *err);
void fixture_register_agent(struct fixture *f, int i);
void fixture_start_head(struct fixture *f, const char *store);
void fixture_stop_head(struct fixture *f);
void fixture_connect_client(struct fixture *f);
int fixture_setup(void **state);
int fixture_teardown(void **state);
extern const struct mb_job_runner fixture_no_runner; /* it has no jobs */

#endif
