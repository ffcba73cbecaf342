/* Jobs that cannot start at this moment hold up nobody who can. */
#include "loop.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/clock.h"
#include "base/fs.h"
#include "gcs/services.h"

static const char *const other_node = "00112233445566778899aabbccddeeff00112233445566778899aabb";

struct fixture {
    uv_loop_t loop;
    struct mb_head head; /* as much of it as is needed */
    struct mb_job_runner runner;
    char dir[32];
    char started[64]; /* ids, in order */
};

/* ---- a runner that starts everything ---- */

static void no_listener(void *self, mb_job_event_cb cb, void *arg)
{
    (void)self;
    (void)cb;
    (void)arg;
}

static const char *unregistered(void *self)
{
    (void)self;
    return "";
}

static void no_drivers(void *self, int (*is_wanted)(void *arg, const char *id), void *arg)
{
    (void)self;
    (void)is_wanted;
    (void)arg;
}

static enum mb_job_adopt adopt_nothing(void *self, const char *id)
{
    (void)self;
    (void)id;
    return MB_JOB_ADOPT_UNKNOWN;
}

static int start(void *self, const struct mb_job_spec *spec, struct mb_err *err)
{
    struct fixture *f = self;

    (void)err;
    strcat(f->started, spec->submission_id);
    return 0;
}

/* ---- a head that takes over jobs a, b, c, in that order ---- */

static void put_job(struct fixture *f, const char *id, int start_time, const char *more)
{
    char key[64], info[256];
    struct mb_err err = {0};

    snprintf(key, sizeof key, "_ray_internal_job_info_%s", id);
    snprintf(info, sizeof info,
             "{\"status\": \"PENDING\", \"entrypoint\": \"true\", \"start_time\": %d%s}",
             start_time, more);
    assert_int_equal(mb_tables_put(f->head.store, MB_TABLES_KV, mb_blob_str("job"),
                                   mb_blob_str(key), mb_blob_str(info), NULL, NULL, &err),
                     0);
}

static void begin(struct fixture *f)
{
    struct mb_job_amount cpus = {.name = MB_JOB_CPU, .amount = 4};
    struct mb_head_job_limits limits = {.totals = &cpus, .n_totals = 1};
    struct mb_err err = {0};

    memset(f, 0, sizeof *f);
    strcpy(f->dir, "/tmp/mb-admission-XXXXXX");
    assert_non_null(mkdtemp(f->dir));
    uv_loop_init(&f->loop);
    f->runner = (struct mb_job_runner){.self = f,
                                       .set_listener = no_listener,
                                       .node_id_hex = unregistered,
                                       .adopt = adopt_nothing,
                                       .stop_unwanted = no_drivers,
                                       .start = start};
    f->head.loop = &f->loop;
    f->head.runner = &f->runner;
    f->head.packages_dir = f->dir;
    f->head.node_ip = f->dir;
    assert_int_equal(mb_tables_open_memory(&f->loop, &f->head.store, &err), 0);
    assert_int_equal(head_admission_create(&f->head, &limits, &err), 0);
}

static void take_over(struct fixture *f)
{
    struct mb_err err = {0};

    assert_int_equal(head_jobs_load(&f->head, &err), 0);
    assert_int_equal(f->head.n_jobs, 3);
    head_jobs_adopt(&f->head);
    assert_null(mb_job_queue_invariant(f->head.queue));
}

static void on_closed(void *arg)
{
    *(int *)arg = 1;
}

static void end(struct fixture *f)
{
    struct mb_err err = {0};
    int closed = 0;

    f->head.stopping = 1;
    mb_tables_close(f->head.store, on_closed, &closed);
    loop_until(&f->loop, &closed);
    head_jobs_free(&f->head);
    uv_run(&f->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&f->loop), 0);
    assert_int_equal(mb_fs_remove_tree(f->dir, &err), 0);
}

static void who_waits_for_a_package(void **state)
{
    static const char needs[] = ", \"runtime_env_json\": \"{\\\"working_dir\\\": "
                                "\\\"gcs://p.zip\\\"}\"";
    struct fixture f;
    char path[64];
    struct mb_err err = {0};

    (void)state;
    begin(&f);
    put_job(&f, "a", 1, needs);
    put_job(&f, "b", 2, needs);
    put_job(&f, "c", 3, "");
    f.head.restore = (struct head_restore *)(uintptr_t)1; /* it is only asked whether */
    take_over(&f);
    assert_string_equal(f.started, "c");
    head_admission_pump(&f.head);
    assert_string_equal(f.started, "c");
    snprintf(path, sizeof path, "%s/p.zip", f.dir);
    assert_int_equal(mb_fs_write_atomic(path, "zip", 3, 0600, &err), 0);
    f.head.restore = NULL;
    head_admission_restored(&f.head);
    assert_string_equal(f.started, "cab");
    end(&f);
}

/* The head's own node is the first choice, but it cannot be named yet. */
static void a_head_whose_node_is_not_registered(void **state)
{
    struct mb_job_amount cpus = {.name = MB_JOB_CPU, .amount = 4};
    struct mb_err err = {0};
    struct fixture f;
    int is_new;

    (void)state;
    begin(&f);
    f.head.redis = (struct mb_redis *)(uintptr_t)1; /* shared: it is only asked whether */
    put_job(&f, "a", 1, "");
    put_job(&f, "b", 2, ", \"entrypoint_num_cpus\": 1");
    put_job(&f, "c", 3, ", \"entrypoint_num_cpus\": 9");
    assert_int_equal(mb_job_queue_node(f.head.queue, other_node, &cpus, 1, &is_new, &err), 0);
    take_over(&f);
    assert_string_equal(head_job_find(&f.head, "b")->node, other_node);
    assert_int_equal(head_job_find(&f.head, "b")->start_no, 1);
    assert_int_equal(head_job_find(&f.head, "a")->start_no, 0);
    assert_int_equal(head_job_find(&f.head, "a")->state, MB_JOB_PENDING);
    assert_string_equal(f.started, "");
    end(&f);
}

/* ---- the order of jobs, over a restart of the head ---- */

static void restart(struct fixture *f)
{
    struct mb_err err = {0};

    head_jobs_free(&f->head);
    f->head.jobs = NULL;
    f->head.n_jobs = 0;
    memset(&f->head.job_index, 0, sizeof f->head.job_index);
    assert_int_equal(head_admission_create(&f->head, &(struct mb_head_job_limits){0}, &err), 0);
    assert_int_equal(head_jobs_load(&f->head, &err), 0);
}

static json_int_t start_of(const struct fixture *f, size_t i)
{
    return json_integer_value(json_object_get(f->head.jobs[i]->info, "start_time"));
}

/* Far more than one in a millisecond, by ids that no order of keys brings back. */
static void submitted_within_a_millisecond(void **state)
{
    enum { N = 400 };
    struct fixture f;
    struct mb_err err = {0};
    struct head_job *job = NULL;
    char id[16];

    (void)state;
    begin(&f);
    for (int i = 0; i < N; i++) {
        snprintf(id, sizeof id, "j%03d", i * 173 % N);
        json_t *request = json_pack("{s:s, s:s, s:i}", "submission_id", id, "entrypoint", "true",
                                    "entrypoint_num_cpus", 9); /* they stay in line */
        assert_int_equal(head_job_submit(&f.head, request, &job, &err), 0);
        json_decref(request);
    }
    for (size_t i = 1; i < N; i++)
        assert_true(start_of(&f, i - 1) < start_of(&f, i));
    while (job->ticket.place != MB_JOB_PLACE_WAITING)
        uv_run(&f.loop, UV_RUN_ONCE);
    restart(&f);
    assert_int_equal(f.head.n_jobs, N);
    for (int i = 0; i < N; i++) {
        snprintf(id, sizeof id, "j%03d", i * 173 % N);
        assert_string_equal(f.head.jobs[i]->id, id);
    }
    end(&f);
}

/* Their order is unknown, but the same each time, and that of the pages of a list. */
static void records_with_the_same_start(void **state)
{
    static const char *const ids[] = {"d", "b", "e", "a", "c"};
    struct fixture f;

    (void)state;
    begin(&f);
    for (size_t i = 0; i < 5; i++)
        put_job(&f, ids[i], 7, "");
    put_job(&f, "z", 6, "");
    restart(&f);
    assert_int_equal(f.head.n_jobs, 6);
    for (size_t i = 0; i < 6; i++)
        assert_int_equal(f.head.jobs[i]->id[0], "zabcde"[i]);
    end(&f);
}

/* A clock that was set back is believed: jobs are not dated into a future that is far. */
static void a_clock_that_was_set_back(void **state)
{
    struct fixture f;
    struct mb_err err = {0};
    struct head_job *job = NULL;
    json_t *request = json_pack("{s:s, s:s}", "submission_id", "now", "entrypoint", "true");

    (void)state;
    begin(&f);
    put_job(&f, "later", 0, "");
    restart(&f);
    json_object_set_new(f.head.jobs[0]->info, "start_time",
                        json_integer((json_int_t)mb_unix_ms() + 3600000));
    assert_int_equal(head_job_submit(&f.head, request, &job, &err), 0);
    assert_true(start_of(&f, 1) <= (json_int_t)mb_unix_ms());
    json_decref(request);
    end(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(who_waits_for_a_package),
        cmocka_unit_test(a_head_whose_node_is_not_registered),
        cmocka_unit_test(submitted_within_a_millisecond),
        cmocka_unit_test(records_with_the_same_start),
        cmocka_unit_test(a_clock_that_was_set_back),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
