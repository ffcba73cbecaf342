/*
 * A head without an agent, for tests: serves until SIGTERM, with drivers as shell children.
 * usage: test_head_main DIR [TOKEN]; prints one JSON line with its ports when it serves.
 * The agent's part of a head node is played here: it registers a node, keeps it in sync through our
 * own client, and answers as a node would (Health, bundles).
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/client.h"
#include "gcs/head.h"
#include "shell_runner.h"

struct app {
    uv_loop_t loop;
    struct mb_grpc *grpc;
    struct mb_head *head;
    struct mb_gcs *gcs;
    struct shell_runner *runner;
    uv_signal_t sigterm;
    uint8_t node_id[MB_NODE_ID_BYTES];
    int failed;
};

static const struct mb_gcs_resource total[] = {{"mobula_gpu", 2}, {"mobula_slot", 2}};

static void on_registered(void *arg, const struct mb_err *err)
{
    struct app *app = arg;
    struct mb_gcs_view view = {
        .available = total, .n_available = 2, .total = total, .n_total = 2, .idle_ms = 1};
    struct mb_err e = {0};
    char hex[2 * MB_NODE_ID_BYTES + 1], http[64];

    if (err->code != 0 || mb_gcs_sync_start(app->gcs, app->node_id, &view, &e) != 0) {
        fprintf(stderr, "register: %s %s\n", err->text, e.text);
        app->failed = 1;
        raise(SIGTERM);
        return;
    }
    mb_hex(app->node_id, MB_NODE_ID_BYTES, hex);
    mb_head_set_node(app->head, hex);
    snprintf(http, sizeof http, "http://127.0.0.1:%d", mb_head_http_port(app->head));
    shell_runner_set_node(app->runner, hex, http);
    printf("{\"gcs_port\": %d, \"http_port\": %d, \"node_id\": \"%s\"}\n",
           mb_head_gcs_port(app->head), mb_head_http_port(app->head), hex);
    fflush(stdout);
}

static void on_gcs(void *arg, struct mb_gcs *c, enum mb_gcs_event event, const struct mb_err *err)
{
    struct app *app = arg;
    struct mb_gcs_node node = {.ip = "127.0.0.1",
                               .port = 1,
                               .hostname = "localhost",
                               .node_name = "head",
                               .is_head = 1,
                               .start_unix_ms = mb_unix_ms(),
                               .resources = total,
                               .n_resources = 2};
    struct mb_err e = {0};

    if (event != MB_GCS_CONNECTED) {
        fprintf(stderr, "event %d: %s\n", (int)event, err->text);
        return;
    }
    memcpy(node.node_id, app->node_id, MB_NODE_ID_BYTES);
    if (mb_gcs_register_node(c, &node, 5000, on_registered, app, NULL, &e) != 0) {
        fprintf(stderr, "register: %s\n", e.text);
        raise(SIGTERM);
    }
}

static void on_head_stopped(void *arg)
{
    (void)arg;
}

static void on_gcs_closed(void *arg)
{
    struct app *app = arg;

    mb_head_stop(app->head, on_head_stopped, app);
    mb_grpc_stop(app->grpc, on_head_stopped, app);
}

static void on_sigterm(uv_signal_t *s, int number)
{
    struct app *app = s->data;

    (void)number;
    uv_close((uv_handle_t *)s, NULL);
    shell_runner_stop(app->runner);
    mb_gcs_close(app->gcs, on_gcs_closed, app);
}

int main(int argc, char **argv)
{
    static struct app app;
    struct mb_err err = {0};
    char address[64];

    if (argc < 2)
        return 64;
    mb_log_init(2, MB_LOG_INFO);
    uv_loop_init(&app.loop);
    char *store = mb_path_join(argv[1], "head.db"), *packages = mb_path_join(argv[1], "packages");
    struct mb_head_opts opts = {.bind_addr = "0.0.0.0",
                                .node_ip = "127.0.0.1",
                                .store_path = store,
                                .session_name = "session_test",
                                .session_dir = argv[1],
                                .temp_dir = argv[1],
                                .packages_dir = packages,
                                .token = argc > 2 ? argv[2] : NULL};
    app.runner = shell_runner_create(&app.loop, argv[1]);
    if (mb_grpc_create(&app.loop, &app.grpc, &err) != 0 ||
        mb_head_start(&app.loop, app.grpc, &opts, shell_runner_get(app.runner), NULL, NULL,
                      &app.head, &err) != 0) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    mb_random_bytes(app.node_id, sizeof app.node_id);
    snprintf(address, sizeof address, "127.0.0.1:%d", mb_head_gcs_port(app.head));
    struct mb_gcs_opts gopts = {.address = address, .token = opts.token};
    if (mb_gcs_create(&app.loop, app.grpc, &gopts, on_gcs, &app, &app.gcs, &err) != 0 ||
        mb_gcs_connect(app.gcs, &err) != 0) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    uv_signal_init(&app.loop, &app.sigterm);
    app.sigterm.data = &app;
    uv_signal_start(&app.sigterm, on_sigterm, SIGTERM);
    uv_run(&app.loop, UV_RUN_DEFAULT);
    mb_head_destroy(app.head);
    mb_grpc_destroy(app.grpc);
    shell_runner_destroy(app.runner);
    mb_free(store);
    mb_free(packages);
    int rc = uv_loop_close(&app.loop);
    return rc != 0 ? 1 : app.failed;
}
