/*
 * Any bytes as what a head finds of a job in its store: its record, its label selector, the number
 * of its start. It is left alone, or is a job whose details can be shown. The first byte chooses
 * which of the three the bytes are.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "base/log.h"
#include "gcs/jobs_internal.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int quiet_fd = -1; /* a broken record is said, once a run would be enough */

static void on_closed(void *arg)
{
    (void)arg;
}

static const char record[] =
    "{\"status\":\"RUNNING\",\"entrypoint\":\"true\",\"metadata\":null,\"start_time\":1,"
    "\"runtime_env_json\":\"{}\",\"driver_node_id\":null}";

static void put(struct mb_head *h, const char *key, const void *p, size_t n)
{
    struct mb_err err = {0};

    if (mb_tables_put(h->store, MB_TABLES_KV, mb_blob_str("mobula"), mb_blob_str(key),
                      head_blob(p, n), NULL, NULL, &err) != 0)
        abort();
}

static void show(struct mb_head *h)
{
    struct head_job *job = head_job_find(h, "j");
    json_t *details;

    if (job == NULL)
        return;
    if (job->state != MB_JOB_PENDING) { /* which has a place in line by then */
        details = head_job_details(job, NULL, 1);
        json_decref(details);
    }
    (void)strlen(head_job_runtime_env(job));
    (void)strlen(head_job_metadata(job, "k"));
    (void)strlen(job->node);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mb_blob key = mb_blob_str(JOBS_KEY_PREFIX "j"), value = mb_blob_str(record);
    struct mb_head h = {0};
    struct mb_err err = {0};
    uv_loop_t loop;

    if (quiet_fd < 0 && (quiet_fd = open("/dev/null", O_WRONLY | O_CLOEXEC)) >= 0)
        mb_log_init(quiet_fd, MB_LOG_ERROR);
    if (size == 0 || uv_loop_init(&loop) != 0)
        return 0;
    h.loop = &loop;
    if (mb_tables_open_memory(&loop, &h.store, &err) != 0)
        abort();
    if (data[0] % 3 == 0)
        value = head_blob(data + 1, size - 1);
    else
        put(&h, data[0] % 3 == 1 ? "job_labels:j" : "job_start:j", data + 1, size - 1);
    if (jobs_load_one(&h, key, value) != 0)
        abort(); /* memory is not out */
    show(&h);
    head_jobs_free(&h);
    mb_tables_close(h.store, on_closed, NULL);
    uv_run(&loop, UV_RUN_DEFAULT);
    if (uv_loop_close(&loop) != 0)
        abort();
    return 0;
}
