/* Drivers of submitted jobs, run through the real mobula-init. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <archive.h>
#include <archive_entry.h>
#include <signal.h>
#include <stdio.h>
#include <uv.h>
#include "agent/job_env.h"
#include "agent/job_log.h"
#include "agent/jobs.h"
#include "agent/supervisor.h"
#include "base/alloc.h"
#include "base/buf.h"
#include "tests/unit/agent/under_init.h"

enum { DEADLINE_MS = 100000 };

static uv_loop_t loop;
static struct mb_init *init;
static struct mb_jobs *jobs;
static struct mb_log_keeper *logs; /* of most tests: none */
static const struct mb_job_runner *runner;
static int closed;

static struct {
    int running, ending, exited, failed, exit_code;
    uint64_t start_no;
    char text[1200], tail[20001];
} seen;

static void on_event(void *arg, const struct mb_job_event *e)
{
    (void)arg;
    seen.running += e->kind == MB_JOB_EVENT_RUNNING;
    seen.ending += e->kind == MB_JOB_EVENT_ENDING;
    seen.exited += e->kind == MB_JOB_EVENT_EXITED;
    seen.failed += e->kind == MB_JOB_EVENT_START_FAILED;
    seen.exit_code = e->exit_code;
    seen.start_no = e->start_no;
    snprintf(seen.text, sizeof(seen.text), "%s", e->text);
    snprintf(seen.tail, sizeof(seen.tail), "%s", e->log_tail);
    uv_stop(&loop);
}

static void on_deadline(uv_timer_t *t)
{
    (void)t;
    print_error("deadline\n");
    _exit(65);
}

static void run_until(const int *fact)
{
    uv_timer_t deadline;

    uv_timer_init(&loop, &deadline);
    uv_timer_start(&deadline, on_deadline, DEADLINE_MS, 0);
    while (*fact == 0)
        uv_run(&loop, UV_RUN_DEFAULT);
    uv_close((uv_handle_t *)&deadline, NULL);
    uv_run(&loop, UV_RUN_NOWAIT);
}

static const char *path_of(const char *name)
{
    static char path[300];

    snprintf(path, sizeof(path), "%s/%s", getenv(MB_TEST_DIR_ENV), name);
    return path;
}

static void submit(const char *id, const char *entrypoint, const char *runtime_env)
{
    struct mb_job_spec spec = {.submission_id = id,
                               .entrypoint = entrypoint,
                               .runtime_env_json = runtime_env,
                               .metadata_json = "{\"team\":\"a\"}",
                               .ray_address = "127.0.0.1:6379",
                               .packages_dir = getenv(MB_TEST_DIR_ENV)};
    struct mb_err err = {0};

    memset(&seen, 0, sizeof(seen));
    if (runner->start(runner->self, &spec, &err) != 0)
        fail_msg("%s", err.text);
    assert_int_equal(seen.running + seen.failed + seen.exited, 0);
}

static const char *log_of(const char *id)
{
    static struct mb_buf b;
    struct mb_err err;
    char *path;

    mb_buf_reset(&b);
    assert_int_equal(runner->log_path(runner->self, id, &path, &err), 0);
    assert_int_equal(mb_fs_read(path, 1 << 20, &b, &err), 0);
    mb_free(path);
    return mb_buf_str(&b);
}

static void test_exit_code_log_and_environment(void **state)
{
    const char *log;

    (void)state;
    setenv("AWS_SECRET_ACCESS_KEY", "secret", 1);
    setenv("BUCKET_STORAGE_SECRET_KEY", "secret", 1);
    submit(
        "j1",
        "echo "
        "\"$A|$B|$PYTHONUNBUFFERED|$RAY_ADDRESS|$AWS_SECRET_ACCESS_KEY$BUCKET_STORAGE_SECRET_"
        "KEY|$MOBULA_INIT_FD|$RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES$RAY_worker_niceness|\"; "
        "echo $PATH; echo \"$RAY_JOB_CONFIG_JSON_ENV_VAR\"; exit 3",
        "{\"env_vars\":{\"A\":\"1\",\"B\":\"${A}2\"}}");
    run_until(&seen.exited);
    unsetenv("AWS_SECRET_ACCESS_KEY");
    unsetenv("BUCKET_STORAGE_SECRET_KEY");
    assert_int_equal(seen.running, 1);
    assert_int_equal(seen.exit_code, 3);
    log = log_of("j1");
    assert_ptr_equal(strstr(log, "Running entrypoint for job j1: echo "), log);
    assert_non_null(strstr(log, "\n1|12|1|127.0.0.1:6379|||10|\n/our/bin:"));
    assert_non_null(strstr(log, "\"job_submission_id\":\"j1\""));
    assert_non_null(strstr(log, "\"job_name\":\"j1\""));
    assert_non_null(strstr(log, "\"team\":\"a\""));
    assert_non_null(strstr(seen.tail, "\"team\":\"a\""));
    assert_int_equal(access(path_of("jobs/j1/state"), F_OK), 0);
    assert_int_not_equal(access(path_of("jobs/j1/spec"), F_OK), 0); /* it holds secrets */
}

static void test_killed_driver_is_a_negative_code(void **state)
{
    (void)state;
    submit("j2", "kill -9 $$", "{}");
    run_until(&seen.exited);
    assert_int_equal(seen.exit_code, -9);
}

static void test_stop_uses_the_signal_of_the_job(void **state)
{
    struct mb_err err;

    (void)state;
    submit("j3", "trap 'echo saved; exit 0' INT; echo up; while :; do sleep 0.05; done",
           "{\"env_vars\":{\"RAY_JOB_STOP_SIGNAL\":\"SIGINT\"}}");
    run_until(&seen.running);
    while (strstr(log_of("j3"), "\nup\n") == NULL)
        uv_run(&loop, UV_RUN_NOWAIT);
    assert_int_equal(runner->stop(runner->self, "j3", &err), 0);
    run_until(&seen.exited);
    assert_non_null(strstr(log_of("j3"), "saved"));
    assert_string_equal(seen.text, MB_JOB_TEXT_STOPPED);
    assert_int_equal(runner->stop(runner->self, "j3", &err), MB_ENOENT);
}

static void test_stop_before_it_started(void **state)
{
    struct mb_err err;

    (void)state;
    submit("j4", "sleep 1000", "{}");
    assert_int_equal(runner->stop(runner->self, "j4", &err), 0);
    run_until(&seen.exited);
    assert_int_equal(seen.running, 0);
    assert_int_equal(seen.exit_code, -SIGTERM);
    assert_ptr_equal(strstr(seen.text, MB_JOB_TEXT_STOPPED), seen.text);
}

/* Its supervisor may still be there for a moment. */
static void test_an_id_is_free_when_its_driver_has_ended(void **state)
{
    struct mb_err err;

    (void)state;
    for (int i = 0; i < 10; i++) {
        submit("j4b", "sleep 1000", "{}");
        if (i % 2)
            run_until(&seen.running);
        assert_int_equal(runner->stop(runner->self, "j4b", &err), 0);
        while (seen.exited == 0)
            uv_run(&loop, UV_RUN_ONCE);
        submit("j4b", "echo again", "{}");
        run_until(&seen.exited);
        assert_int_equal(seen.exit_code, 0);
        assert_non_null(strstr(log_of("j4b"), "\nagain\n"));
    }
}

static void on_closed(void *arg)
{
    *(int *)arg = 1;
    uv_stop(&loop);
}

static void create_jobs(void)
{
    struct mb_jobs_opts opts = {.loop = &loop,
                                .init = init,
                                .node_dir = getenv(MB_TEST_DIR_ENV),
                                .bin_dir = "/our/bin",
                                .unpacker = MOBULA_UNPACK,
                                .logs = logs};
    struct mb_err err;

    assert_int_equal(mb_jobs_create(&opts, &jobs, &err), 0);
    runner = mb_jobs_runner(jobs);
    runner->set_listener(runner->self, on_event, NULL);
}

static void reopen_jobs(void)
{
    closed = 0;
    mb_jobs_close(jobs, on_closed, &closed);
    run_until(&closed);
    create_jobs();
}

static void test_adopted_after_a_restart(void **state)
{
    struct mb_err err;

    (void)state;
    submit("j5", "trap 'exit 6' TERM; echo up; while :; do sleep 0.05; done", "{}");
    run_until(&seen.running);
    while (strstr(log_of("j5"), "\nup\n") == NULL)
        uv_run(&loop, UV_RUN_NOWAIT);
    reopen_jobs();
    memset(&seen, 0, sizeof(seen));
    assert_int_equal(runner->adopt(runner->self, "j5"), MB_JOB_ADOPT_RUNNING);
    run_until(&seen.running);
    assert_int_equal(runner->stop(runner->self, "j5", &err), 0);
    run_until(&seen.exited);
    assert_int_equal(seen.exit_code, 6);
    reopen_jobs();
    memset(&seen, 0, sizeof(seen));
    assert_int_equal(runner->adopt(runner->self, "j5"), MB_JOB_ADOPT_EXITED);
    run_until(&seen.exited);
    assert_int_equal(seen.exit_code, 6);
    assert_int_equal(runner->adopt(runner->self, "never"), MB_JOB_ADOPT_UNKNOWN);
}

static int is_kept(void *arg, const char *id)
{
    return strcmp(arg, id) == 0;
}

static void test_a_driver_that_nobody_wants_is_stopped_and_nobody_told(void **state)
{
    struct mb_err err;

    (void)state;
    submit("kept", "exec sleep 1000", "{}");
    run_until(&seen.running);
    submit("lost", "trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.05; done", "{}");
    run_until(&seen.running);
    while (strstr(log_of("lost"), "\nup\n") == NULL)
        uv_run(&loop, UV_RUN_NOWAIT);
    reopen_jobs();
    memset(&seen, 0, sizeof(seen));
    runner->stop_unwanted(runner->self, is_kept, (void *)(uintptr_t) "kept");
    assert_int_equal(
        runner->start(runner->self, &(struct mb_job_spec){.submission_id = "lost"}, &err),
        MB_EFULL);
    while (mb_fs_exists(path_of("jobs/lost/spec")) || mb_fs_exists(path_of("jobs/lost/s")))
        uv_run(&loop, UV_RUN_NOWAIT);
    assert_non_null(strstr(log_of("lost"), "saved"));
    assert_int_equal(seen.running + seen.exited + seen.failed, 0);
    runner->stop_unwanted(runner->self, is_kept, (void *)(uintptr_t) "kept"); /* nothing to do */
    assert_int_equal(runner->adopt(runner->self, "kept"), MB_JOB_ADOPT_RUNNING);
    run_until(&seen.running);
    assert_int_equal(runner->stop(runner->self, "kept", &err), 0);
    run_until(&seen.exited);
}

/* ---- packages ---- */

static const char *make_zip(const char *name, const char *entry_name, const char *text)
{
    static char path[300];
    struct archive *a = archive_write_new();
    struct archive_entry *e = archive_entry_new();

    snprintf(path, sizeof(path), "%s", path_of(name));
    archive_write_set_format_zip(a);
    assert_int_equal(archive_write_open_filename(a, path), ARCHIVE_OK);
    archive_entry_set_pathname(e, entry_name);
    archive_entry_set_size(e, (la_int64_t)strlen(text));
    archive_entry_set_filetype(e, AE_IFREG);
    archive_entry_set_perm(e, 0644);
    assert_int_equal(archive_write_header(a, e), ARCHIVE_OK);
    archive_write_data(a, text, strlen(text));
    archive_entry_free(e);
    archive_write_close(a);
    archive_write_free(a);
    return path;
}

static void write_file(const char *name, const char *text)
{
    FILE *f = fopen(path_of(name), "w");

    assert_non_null(f);
    fputs(text, f);
    assert_int_equal(fclose(f), 0);
}

static void no_driver(const char *id)
{
    char name[64];
    struct mb_err err;
    char *path = NULL;

    assert_int_equal(runner->log_path(runner->self, id, &path, &err), MB_ENOENT);
    snprintf(name, sizeof(name), "jobs/%s", id);
    assert_false(mb_fs_exists(path_of(name)));
}

/* Twice at once, and its id is free again before any file is removed; a living one stays. */
static void test_forgotten(void **state)
{
    (void)state;
    submit("f1", "echo one", "{}");
    run_until(&seen.exited);
    submit("f2", "echo two", "{}");
    run_until(&seen.exited);
    runner->forget(runner->self, "f1");
    runner->forget(runner->self, "f2");
    runner->forget(runner->self, "never-there");
    no_driver("f1");
    no_driver("f2");
    submit("f1", "echo again; exec sleep 1000", "{}");
    run_until(&seen.running);
    runner->forget(runner->self, "f1");
    assert_non_null(strstr(log_of("f1"), "Running entrypoint"));
    assert_null(strstr(log_of("f1"), "one"));
    struct mb_err err;
    assert_int_equal(runner->stop(runner->self, "f1", &err), 0);
    run_until(&seen.exited);
    runner->forget(runner->self, "f1");
    no_driver("f1");
}

static void test_working_dir_package(void **state)
{
    (void)state;
    make_zip("p.zip", "sub/data.txt", "from the package\n");
    submit("j6", "cat sub/data.txt; echo $PYTHONPATH", "{\"working_dir\":\"gcs://p.zip\"}");
    run_until(&seen.exited);
    assert_int_equal(seen.exit_code, 0);
    assert_non_null(strstr(log_of("j6"), "\nfrom the package\n"));
    assert_non_null(strstr(log_of("j6"), "/jobs/j6/working_dir"));
}

static void test_bad_packages_fail_the_runtime_env(void **state)
{
    (void)state;
    make_zip("q.zip", "../out", "x");
    submit("j7", "true", "{\"working_dir\":\"gcs://q.zip\"}");
    run_until(&seen.failed);
    assert_ptr_equal(
        strstr(seen.text, "runtime_env setup failed: Failed to set up runtime environment. "),
        seen.text);
    assert_non_null(strstr(seen.text, "../out"));
    assert_false(mb_fs_exists(path_of("jobs/j7/out")));
    write_file("no-archive.zip", "this is text");
    submit("j8", "true", "{\"working_dir\":\"gcs://no-archive.zip\"}");
    run_until(&seen.failed);
    submit("j9", "true", "{\"working_dir\":\"/nonexistent/dir\"}");
    run_until(&seen.failed);
    assert_non_null(strstr(seen.text, "/nonexistent/dir"));
}

static void test_refusals(void **state)
{
    static const struct {
        const char *id, *runtime_env, *text;
    } bad[] = {{"a/b", "{}", "submission id"},
               {"..", "{}", "submission id"},
               {"", "{}", "submission id"},
               {"x", "[]", "runtime_env must be an object"},
               {"x", "{\"env_vars\":{\"A\":1}}", "A must be a string"},
               {"x", "{\"env_vars\":{\"RAY_JOB_STOP_SIGNAL\":\"HUP\"}}", "SIGTERM or SIGINT"}};
    struct mb_err err;

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct mb_job_spec spec = {.submission_id = bad[i].id,
                                   .entrypoint = "true",
                                   .runtime_env_json = bad[i].runtime_env,
                                   .metadata_json = "{}",
                                   .ray_address = "h:1"};

        assert_int_equal(runner->start(runner->self, &spec, &err), MB_EINVAL);
        assert_non_null(strstr(err.text, bad[i].text));
    }
}

/* ray#60159: one job must not take the memory of all; what it may take is said, and so is why it
 * ended. */
static void test_limits_of_a_job(void **state)
{
    (void)state;
    submit("limits", "ulimit -n; ulimit -c; ulimit -c 1 2>/dev/null || echo refused",
           "{\"env_vars\":{\"MOBULA_JOB_NOFILE\":\"99\"}}");
    run_until(&seen.exited);
    assert_int_equal(seen.exit_code, 0);
    assert_non_null(strstr(log_of("limits"), "\n99\n0\n"));
    submit("greedy", "exec tail /dev/zero",
           "{\"env_vars\":{\"MOBULA_JOB_MEMORY_LIMIT\":\"32MiB\"}}");
    run_until(&seen.exited);
    assert_int_equal(seen.exit_code, -9);
    assert_string_equal(seen.text, "killed: memory limit of 32 MiB");
    submit("beyond", "true", "{\"env_vars\":{\"MOBULA_JOB_NOFILE\":\"1G\"}}");
    run_until(&seen.failed);
    assert_non_null(
        strstr(seen.text, "limit of open files 1073741824 (this node's hard limit is "));
}

static void test_limits_are_read_or_refused_by_name(void **state)
{
    static const struct {
        const char *var, *text;
    } bad[] = {{"MOBULA_JOB_MEMORY_LIMIT=lots", "MOBULA_JOB_MEMORY_LIMIT"},
               {"MOBULA_JOB_MEMORY_LIMIT=1000", "at least 1MiB"},
               {"MOBULA_JOB_NOFILE=3", "16 to"},
               {"MOBULA_JOB_NOFILE=-1", "MOBULA_JOB_NOFILE"},
               {"MOBULA_JOB_CORE=yes", "0 or 1"}};
    char *good[] = {(char[]){"MOBULA_JOB_MEMORY_LIMIT=2GiB"}, (char[]){"MOBULA_JOB_NOFILE="},
                    (char[]){"MOBULA_JOB_CORE=1"}, NULL};
    struct mb_job_limits limits;
    struct mb_err err;

    (void)state;
    mb_alloc_fail_nth(1); /* needs no memory, so none can fail it */
    assert_int_equal(mb_job_limits_read(good, &limits, &err), 0);
    assert_int_equal(mb_alloc_did_fail(), 0);
    mb_alloc_fail_nth(0);
    assert_int_equal(limits.memory_bytes, 2LL << 30);
    assert_int_equal(limits.nofile, 0);
    assert_int_equal(limits.core_files, 1);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        char *vars[] = {(char *)(uintptr_t)bad[i].var, NULL};

        assert_int_equal(mb_job_limits_read(vars, &limits, &err), MB_EINVAL);
        assert_non_null(strstr(err.text, bad[i].text));
    }
    assert_int_equal(limits.memory_bytes, 2LL << 30); /* a failure changes nothing */
}

static void test_environment_survives_failed_allocations(void **state)
{
    char *inherited[] = {(char[]){"PATH=/bin"}, (char[]){"HOME=/root"}, NULL};
    struct mb_job_spec spec = {.submission_id = "x",
                               .entrypoint = "true",
                               .runtime_env_json = "{\"env_vars\":{\"A\":\"${HOME}\"}}",
                               .metadata_json = "{}",
                               .ray_address = "h:1"};

    (void)state;
    for (unsigned long nth = 1;; nth++) {
        struct mb_job_env env;
        int rc, failed;

        mb_alloc_fail_nth(nth);
        rc = mb_job_env_build(&spec, inherited, "/b", &env, NULL);
        failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        assert_int_equal(rc, failed ? MB_ENOMEM : 0);
        if (rc != 0)
            continue;
        assert_string_equal(mb_job_env_get(&env, "A"), "/root");
        assert_string_equal(mb_job_env_get(&env, "PATH"), "/b:/bin");
        mb_job_env_close(&env);
        break;
    }
}

static void test_log_tail_is_ten_lines_of_utf8(void **state)
{
    const char *path = path_of("tail.log");
    struct mb_buf b = {0}, out = {0};
    struct mb_err err;

    (void)state;
    for (int i = 0; i < 3000; i++)
        mb_buf_printf(&b, "line %d \xc3\xa4\n", i);
    assert_int_equal(mb_fs_write_atomic(path, b.data, b.len, 0600, &err), 0);
    assert_int_equal(mb_job_log_tail(path, &out, &err), 0);
    assert_ptr_equal(strstr(mb_buf_str(&out), "line 2990 \xc3\xa4\n"), mb_buf_str(&out));
    mb_buf_reset(&b);
    for (int i = 0; i < 30001; i++)
        mb_buf_puts(&b, i == 0 ? "x" : "\xc3\xa4");
    assert_int_equal(mb_fs_write_atomic(path, b.data, b.len, 0600, &err), 0);
    assert_int_equal(mb_job_log_tail(path, &out, &err), 0);
    assert_int_equal(out.len, 20000);
    assert_int_equal(out.data[0], 0xc3);
    mb_buf_puts(&b, "\xff");
    assert_int_equal(mb_fs_write_atomic(path, b.data, b.len, 0600, &err), 0);
    assert_int_equal(mb_job_log_tail(path, &out, &err), 0);
    assert_string_equal(mb_buf_str(&out) + out.len - 5, "\xc3\xa4\xef\xbf\xbd");
    /* What stands behind a byte that is no text is what a reader looks for. */
    assert_int_equal(mb_fs_write_atomic(path, "\0\xff\xc3\xa4 why\0\n", 10, 0600, &err), 0);
    assert_int_equal(mb_job_log_tail(path, &out, &err), 0);
    assert_string_equal(mb_buf_str(&out), "\xef\xbf\xbd\xef\xbf\xbd\xc3\xa4 why\xef\xbf\xbd\n");
    mb_buf_close(&b);
    mb_buf_close(&out);
}

static int open_all(void **state)
{
    struct mb_err err;

    (void)state;
    uv_loop_init(&loop);
    if (mb_init_open(&loop, NULL, NULL, &init, &err) != 0)
        return -1;
    create_jobs();
    return 0;
}

static int close_all(void **state)
{
    int init_closed = 0;

    (void)state;
    closed = 0;
    mb_jobs_close(jobs, on_closed, &closed);
    run_until(&closed);
    mb_init_close(init, on_closed, &init_closed);
    uv_run(&loop, UV_RUN_DEFAULT);
    uv_run(&loop, UV_RUN_DEFAULT);
    return uv_loop_close(&loop);
}

/* ---- starts that a head numbered ---- */

static int start_with(const char *id, uint64_t no, const char *runtime_env, struct mb_err *err)
{
    struct mb_job_spec spec = {.submission_id = id,
                               .entrypoint = "echo started",
                               .runtime_env_json = runtime_env,
                               .metadata_json = "{}",
                               .ray_address = "127.0.0.1:6379",
                               .start_no = no};

    memset(&seen, 0, sizeof(seen));
    return runner->start(runner->self, &spec, err);
}

static int start_no(const char *id, uint64_t no, struct mb_err *err)
{
    return start_with(id, no, "{}", err);
}

static int count_starts(const char *id)
{
    const char *at = log_of(id);
    int n = 0;

    while ((at = strstr(at, "\nstarted\n")) != NULL) {
        at++;
        n++;
    }
    return n;
}

static void test_a_numbered_start_begins_once(void **state)
{
    struct mb_err err = {0};

    (void)state;
    assert_int_equal(start_no("once", 7, &err), 0);
    assert_int_equal(start_no("once", 7, &err), 0); /* the answer was lost: asked again */
    run_until(&seen.exited);
    assert_int_equal(seen.exit_code, 0);
    assert_int_equal(mb_jobs_start_no(jobs, "once"), 7);
    assert_int_equal(start_no("once", 7, &err), 0); /* by a head that took over: the end again */
    run_until(&seen.exited);
    assert_int_equal(count_starts("once"), 1);
    assert_int_equal(start_no("once", 6, &err), MB_ESTATE);
    assert_int_equal(start_no("once", 8, &err), 0); /* another job of this name */
    run_until(&seen.exited);
    assert_int_equal(start_no("once", 7, &err), MB_ESTATE);
}

/* The head passes over what is said of a former start of this id, so every event has its number. */
static void test_every_end_has_the_number_of_its_start(void **state)
{
    char *store = mb_asprintf("{\"env_vars\":{\"MOBULA_LOG_URL\":\"file://%s/x\","
                              "\"MOBULA_LOG_WAIT\":\"3s\"}}",
                              path_of("no-archive.zip"));
    struct mb_err err = {0};

    (void)state;
    assert_non_null(store);
    assert_int_equal(mb_log_keeper_create(&loop, getenv(MB_TEST_DIR_ENV), 0, &logs, &err), 0);
    reopen_jobs();
    assert_int_equal(start_with("fails", 5, "{\"working_dir\":\"/nonexistent/dir\"}", &err), 0);
    run_until(&seen.failed);
    assert_int_equal(seen.start_no, 5);
    assert_int_equal(start_with("late", 6, store, &err), 0); /* a log that cannot be sent */
    run_until(&seen.ending);
    assert_int_equal(seen.start_no, 6);
    run_until(&seen.exited);
    assert_int_equal(seen.start_no, 6);
    mb_free(store);
    closed = 0;
    mb_log_keeper_close(logs, on_closed, &closed);
    run_until(&closed);
    logs = NULL;
    reopen_jobs();
}

static void test_what_was_given_up_never_begins(void **state)
{
    struct mb_err err = {0};

    (void)state;
    assert_int_equal(mb_jobs_give_up(jobs, "never", 3, &err), MB_ENOENT);
    assert_int_equal(start_no("never", 3, &err), MB_ECANCELED); /* it came late */
    assert_int_equal(start_no("never", 2, &err), MB_ESTATE);
    assert_int_equal(mb_jobs_give_up(jobs, "never", 2, &err), MB_ENOENT);
    assert_int_equal(start_no("never", 4, &err), 0);
    assert_int_equal(mb_jobs_give_up(jobs, "never", 4, &err), 0);
    run_until(&seen.exited);
    assert_int_equal(mb_jobs_give_up(jobs, "../x", 1, &err), MB_EINVAL);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exit_code_log_and_environment),
        cmocka_unit_test(test_killed_driver_is_a_negative_code),
        cmocka_unit_test(test_stop_uses_the_signal_of_the_job),
        cmocka_unit_test(test_stop_before_it_started),
        cmocka_unit_test(test_an_id_is_free_when_its_driver_has_ended),
        cmocka_unit_test(test_adopted_after_a_restart),
        cmocka_unit_test(test_a_driver_that_nobody_wants_is_stopped_and_nobody_told),
        cmocka_unit_test(test_forgotten),
        cmocka_unit_test(test_working_dir_package),
        cmocka_unit_test(test_bad_packages_fail_the_runtime_env),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_limits_of_a_job),
        cmocka_unit_test(test_limits_are_read_or_refused_by_name),
        cmocka_unit_test(test_environment_survives_failed_allocations),
        cmocka_unit_test(test_log_tail_is_ten_lines_of_utf8),
        cmocka_unit_test(test_a_numbered_start_begins_once),
        cmocka_unit_test(test_every_end_has_the_number_of_its_start),
        cmocka_unit_test(test_what_was_given_up_never_begins),
    };
    int status = mb_under_init(argv[0]);

    (void)argc;
    if (status >= 0)
        return status;
    return cmocka_run_group_tests(tests, open_all, close_all) == 0 ? 0 : 65;
}
