/* Which packages go: those that nobody used for long and no live job needs, whatever is in between.
 */
#include "loop.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "gcs/services.h"

enum { KEEP_MS = 60 * 60 * 1000, MANY = 600, N_OLD = 40 };

struct fixture {
    uv_loop_t loop;
    struct mb_head head; /* as much of it as is needed */
    char dir[32];
    uint64_t now_ms;
};

static void begin(struct fixture *f)
{
    memset(f, 0, sizeof *f);
    strcpy(f->dir, "/tmp/mb-sweep-XXXXXX");
    assert_non_null(mkdtemp(f->dir));
    uv_loop_init(&f->loop);
    f->head.loop = &f->loop;
    f->head.packages_dir = f->dir;
    f->head.package_keep_ms = KEEP_MS;
}

static void end(struct fixture *f)
{
    struct mb_err err = {0};

    head_packages_close(&f->head);
    uv_run(&f->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&f->loop), 0);
    assert_int_equal(mb_fs_remove_tree(f->dir, &err), 0);
}

static void path_of(const struct fixture *f, const char *name, char out[64])
{
    snprintf(out, 64, "%s/%s", f->dir, name);
}

static int is_here(const struct fixture *f, const char *name)
{
    char path[64];

    path_of(f, name, path);
    return mb_fs_exists(path);
}

/* Nobody has used it for long. */
static void put_old(const struct fixture *f, const char *name)
{
    const struct timespec old[2] = {{.tv_sec = 1000}, {.tv_sec = 1000}};
    char path[64];
    int fd;

    path_of(f, name, path);
    fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    close(fd);
    assert_int_equal(utimensat(AT_FDCWD, path, old, 0), 0);
}

static void tick(struct fixture *f)
{
    f->now_ms += KEEP_MS;
    head_packages_tick(&f->head, f->now_ms);
    assert_non_null(f->head.sweep);
}

static void finish(struct fixture *f)
{
    for (int i = 0; f->head.sweep && i < 1000; i++)
        uv_run(&f->loop, UV_RUN_ONCE);
    assert_null(f->head.sweep);
}

/* ---- the race with a client's look-up ---- */

static void say_idle(uv_work_t *work)
{
    uv_sem_post(work->data);
}

static void nothing(uv_work_t *work, int status)
{
    (void)work;
    (void)status;
}

/* The pool has one thread here: what was asked of it before is done. The loop has not heard. */
static void wait_for_pool(struct fixture *f, uv_work_t *work)
{
    uv_sem_t idle;

    assert_int_equal(uv_sem_init(&idle, 0), 0);
    work->data = &idle;
    assert_int_equal(uv_queue_work(&f->loop, work, say_idle, nothing), 0);
    uv_sem_wait(&idle);
    uv_sem_destroy(&idle);
}

static void a_look_up_amid_a_sweep(void **state)
{
    struct fixture f;
    uv_work_t work;
    char path[64];

    (void)state;
    begin(&f);
    put_old(&f, "asked.zip");
    put_old(&f, "old.zip");
    tick(&f);
    wait_for_pool(&f, &work);
    path_of(&f, "asked.zip", path);
    assert_int_equal(utimensat(AT_FDCWD, path, NULL, 0), 0); /* as a GET does, answered 200 */
    finish(&f);
    assert_true(is_here(&f, "asked.zip"));
    assert_false(is_here(&f, "old.zip"));
    end(&f);
}

/* ---- packages that jobs need ---- */

static struct head_job *make_job(int i)
{
    struct head_job *job = calloc(1, sizeof *job);
    char env[64];

    assert_non_null(job);
    snprintf(env, sizeof env, "{\"working_dir\": \"gcs://needed-%d.zip\"}", i);
    job->info = json_pack("{s:s}", "runtime_env_json", env);
    job->state = MB_JOB_PENDING;
    return job;
}

static void put_many_old(const struct fixture *f, int from, int to)
{
    char name[32];

    for (int i = from; i < to; i++) {
        snprintf(name, sizeof name, "old-%d.zip", i);
        put_old(f, name);
    }
}

/* The directory is listed in any order: those that may go come first and last. */
static void more_are_needed_than_a_sweep_takes(void **state)
{
    static struct head_job *jobs[MANY];
    struct fixture f;
    char name[32];

    (void)state;
    begin(&f);
    put_many_old(&f, 0, N_OLD / 2);
    for (int i = 0; i < MANY; i++) {
        snprintf(name, sizeof name, "needed-%d.zip", i);
        put_old(&f, name);
        jobs[i] = make_job(i);
    }
    put_many_old(&f, N_OLD / 2, N_OLD);
    f.head.jobs = jobs;
    f.head.n_jobs = MANY;
    tick(&f);
    finish(&f);
    for (int i = 0; i < N_OLD; i++) {
        snprintf(name, sizeof name, "old-%d.zip", i);
        assert_false(is_here(&f, name));
    }
    jobs[7]->state = MB_JOB_SUCCEEDED;
    tick(&f);
    finish(&f);
    for (int i = 0; i < MANY; i++) {
        snprintf(name, sizeof name, "needed-%d.zip", i);
        assert_int_equal(is_here(&f, name), i != 7);
        json_decref(jobs[i]->info);
        free(jobs[i]);
    }
    end(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_look_up_amid_a_sweep),
        cmocka_unit_test(more_are_needed_than_a_sweep_takes),
    };

    setenv("UV_THREADPOOL_SIZE", "1", 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
