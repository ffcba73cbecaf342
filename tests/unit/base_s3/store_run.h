/* Runs store operations to their end, for tests that read as a story. */
#ifndef MOBULA_TESTS_BASE_S3_STORE_RUN_H
#define MOBULA_TESTS_BASE_S3_STORE_RUN_H

#include "base/loop.h"
#include "base/buf.h"
#include "base/http/server.h"
#include "base/s3/store.h"

struct store_run {
    uv_loop_t *loop;
    uv_timer_t ticker; /* UV_RUN_ONCE must return after progress that only a timer made */
    struct mb_store *store;
    int n_calls;
    int error; /* of the last operation, and its result */
    char text[1100];
    struct mb_buf data;
    uint64_t size_bytes;
    uint64_t crc64nvme;
    char etag[200];
    struct mb_buf keys; /* one a line */
    size_t n_keys;
    uint64_t progress_bytes;
    char upload_id[512];
};

/* A server of the test's own, which s3:// means from now on. */
struct mb_http_server *run_serve(uv_loop_t *loop, const struct mb_http_route *routes, size_t n,
                                 void *arg);
void run_open(struct store_run *r, uv_loop_t *loop, const char *url);
void run_close(struct store_run *r);
int run_put(struct store_run *r, const char *key, const char *text, enum mb_store_if cond,
            const char *etag);
int run_put_file(struct store_run *r, const char *key, const char *path, const char *resume_id);
int run_put_file_if(struct store_run *r, const char *key, const char *path, const char *resume_id,
                    enum mb_store_if cond, const char *etag);
int run_abort_uploads(struct store_run *r, const char *key, const char *upload_id);
int run_get(struct store_run *r, const char *key, size_t max_bytes);
int run_get_file(struct store_run *r, const char *key, const char *path);
int run_get_file_as(struct store_run *r, const struct mb_store_get_file *req);
int run_head(struct store_run *r, const char *key);
int run_list(struct store_run *r, const char *prefix);
int run_delete(struct store_run *r, const char *key);
/* The callback of all of them, for tests that start operations themselves. */
void run_on_result(void *arg, const struct mb_store_result *result);
void run_wait(struct store_run *r, int n_calls);

#endif
