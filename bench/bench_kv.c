/*
 * KV puts or gets per second through one client process: bench_kv HOST:PORT SECONDS WINDOW KEYS
 * put|get. WINDOW of them, of values of 100 bytes, are under way at a time, over KEYS keys, which
 * gets want there. Every answer is checked. Prints one line of JSON.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include "base/clock.h"
#include "base/log.h"
#include "gcs/client.h"

enum { VALUE_BYTES = 100 };

struct bench {
    uv_loop_t loop;
    struct mb_grpc *grpc;
    struct mb_gcs *gcs;
    uint64_t began_us, end_us, warm_us;
    int window, n_keys;
    long sent, answered, counted;
    int failed, flying, is_get;
};

static void on_stopped(void *arg)
{
    (void)arg;
}

static void on_closed(void *arg)
{
    struct bench *b = arg;

    mb_grpc_stop(b->grpc, on_stopped, b);
}

static void ask(struct bench *b);

static uint64_t now_us(void)
{
    return uv_hrtime() / 1000;
}

static void on_answer(struct bench *b, const struct mb_err *err, int is_right)
{
    uint64_t now = now_us();

    b->flying--;
    if (err->code != 0 || !is_right) {
        fprintf(stderr, "bench_kv: %s\n", err->code != 0 ? err->text : "a wrong answer");
        b->failed = 1;
    }
    b->answered++;
    if (now >= b->warm_us && now < b->end_us)
        b->counted++;
    if (now < b->end_us && !b->failed)
        ask(b);
    else if (b->flying == 0)
        mb_gcs_close(b->gcs, on_closed, b);
}

static const char value[VALUE_BYTES] = "v";

static void on_put(void *arg, const struct mb_err *err, int64_t count)
{
    (void)count;
    on_answer(arg, err, 1);
}

static void on_get(void *arg, const struct mb_err *err, const void *got, size_t n)
{
    on_answer(arg, err, got != NULL && n == sizeof value && memcmp(got, value, n) == 0);
}

static void ask(struct bench *b)
{
    char key[32];
    struct mb_err err = {0};
    int rc;

    snprintf(key, sizeof key, "bench-%ld", b->sent++ % b->n_keys);
    b->flying++;
    rc = b->is_get ? mb_gcs_kv_get(b->gcs, "bench", key, 20000, on_get, b, NULL, &err)
                   : mb_gcs_kv_put(b->gcs, "bench", key, value, sizeof value, 1, 20000, on_put, b,
                                   NULL, &err);
    if (rc != 0) {
        fprintf(stderr, "bench_kv: %s\n", err.text);
        exit(1);
    }
}

static void on_event(void *arg, struct mb_gcs *c, enum mb_gcs_event event, const struct mb_err *err)
{
    struct bench *b = arg;

    (void)c;
    if (event == MB_GCS_CONNECTED) {
        b->began_us = now_us();
        b->warm_us += b->began_us;
        b->end_us += b->began_us;
        for (int i = 0; i < b->window; i++)
            ask(b);
    } else if (event == MB_GCS_CONNECT_FAILED) {
        fprintf(stderr, "bench_kv: %s\n", err->text);
        exit(1);
    }
}

int main(int argc, char **argv)
{
    struct bench b = {.window = argc > 3 ? atoi(argv[3]) : 256,
                      .n_keys = argc > 4 ? atoi(argv[4]) : 10000,
                      .is_get = argc > 5 && strcmp(argv[5], "get") == 0};
    struct mb_gcs_opts opts = {.address = argc > 1 ? argv[1] : "127.0.0.1:6379"};
    double seconds = argc > 2 ? atof(argv[2]) : 5;
    struct mb_err err = {0};
    struct rusage usage;

    mb_log_init(2, MB_LOG_WARN);
    b.warm_us = 500000;
    b.end_us = b.warm_us + (uint64_t)(seconds * 1e6);
    uv_loop_init(&b.loop);
    if (mb_grpc_create(&b.loop, &b.grpc, &err) != 0 ||
        mb_gcs_create(&b.loop, b.grpc, &opts, on_event, &b, &b.gcs, &err) != 0 ||
        mb_gcs_connect(b.gcs, &err) != 0) {
        fprintf(stderr, "bench_kv: %s\n", err.text);
        return 1;
    }
    uv_run(&b.loop, UV_RUN_DEFAULT);
    mb_grpc_destroy(b.grpc);
    getrusage(RUSAGE_SELF, &usage);
    printf("{\"per_s\": %.0f, \"answers\": %ld, \"client_cpu_s\": %.2f}\n",
           (double)b.counted / seconds, b.answered,
           (double)usage.ru_utime.tv_sec + (double)usage.ru_stime.tv_sec +
               (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6);
    return b.failed;
}
