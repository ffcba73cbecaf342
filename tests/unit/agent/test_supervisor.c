/* The agent's supervisor client against the real mobula-init. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/socket.h>
#include <uv.h>
#include "agent/init.h"
#include "agent/supervise/state.h"
#include "agent/supervisor.h"
#include "base/alloc.h"
#include "tests/unit/agent/under_init.h"

enum { DEADLINE_MS = 30000 };

struct seen {
    int n_started, n_start_failed, n_exit, n_report, all_exited, error, closed;
    int64_t pid[4];
    int code[4], signal[4], fd[4];
    char reason[256], text[1200];
    uv_loop_t *loop;
};

static uv_loop_t loop;
static struct mb_init *init;
static int init_closed;

static void on_error(void *arg, const struct mb_err *err)
{
    struct seen *s = arg;

    s->error = err->code;
    snprintf(s->text, sizeof(s->text), "%s", err->text);
    uv_stop(s->loop);
}

static void on_started(void *arg, unsigned child, int64_t pid, uint64_t ticks)
{
    struct seen *s = arg;

    assert_true(ticks > 0);
    s->n_started++;
    s->pid[child] = pid;
    uv_stop(s->loop);
}

static void on_start_failed(void *arg, unsigned child, const char *text)
{
    struct seen *s = arg;

    (void)child;
    s->n_start_failed++;
    snprintf(s->text, sizeof(s->text), "%s", text);
    uv_stop(s->loop);
}

static void on_report(void *arg, unsigned child, int fd)
{
    struct seen *s = arg;

    s->n_report++;
    s->fd[child] = fd;
    uv_stop(s->loop);
}

static void on_exit_cb(void *arg, unsigned child, int code, int sig)
{
    struct seen *s = arg;

    s->n_exit++;
    s->code[child] = code;
    s->signal[child] = sig;
    uv_stop(s->loop);
}

static void on_all_exited(void *arg, const char *reason)
{
    struct seen *s = arg;

    s->all_exited++;
    snprintf(s->reason, sizeof(s->reason), "%s", reason);
    uv_stop(s->loop);
}

static const struct mb_supervisor_ops ops = {.on_error = on_error,
                                             .on_started = on_started,
                                             .on_start_failed = on_start_failed,
                                             .on_report = on_report,
                                             .on_exit = on_exit_cb,
                                             .on_all_exited = on_all_exited};

static void on_closed(void *arg)
{
    ((struct seen *)arg)->closed = 1;
    uv_stop(&loop);
}

static void on_deadline(uv_timer_t *t)
{
    (void)t;
    print_error("deadline\n");
    _exit(65);
}

/* Runs the loop until *fact reaches n. */
static void run_until(const int *fact, int n)
{
    uv_timer_t deadline;

    uv_timer_init(&loop, &deadline);
    uv_timer_start(&deadline, on_deadline, DEADLINE_MS, 0);
    while (*fact < n)
        uv_run(&loop, UV_RUN_DEFAULT);
    uv_close((uv_handle_t *)&deadline, NULL);
    uv_run(&loop, UV_RUN_NOWAIT);
}

struct attempt {
    char dir[256], log[2][300];
    const char *argv[2][4];
    struct mb_sup_child children[2];
    struct mb_sup_spec spec;
};

static const char *const env[] = {"PATH=/usr/bin:/bin", NULL};

/* Two children that run shell lines; NULL: only one. */
static struct attempt *attempt(const char *name, const char *line0, const char *line1)
{
    static struct attempt a;
    const char *lines[] = {line0, line1};

    memset(&a, 0, sizeof(a));
    snprintf(a.dir, sizeof(a.dir), "%s/%s", getenv(MB_TEST_DIR_ENV), name);
    assert_int_equal(mb_fs_mkdir_p(a.dir, 0700, NULL), 0);
    for (int i = 0; i < 2 && lines[i] != NULL; i++) {
        snprintf(a.log[i], sizeof(a.log[i]), "%s/log%d", a.dir, i);
        a.argv[i][0] = "/bin/sh";
        a.argv[i][1] = "-c";
        a.argv[i][2] = lines[i];
        a.children[i] = (struct mb_sup_child){
            .argv = a.argv[i], .env = env, .log_path = a.log[i], .want_report = 1};
        a.spec.n_children++;
    }
    a.spec.dir = a.dir;
    a.spec.stop_signal = SIGTERM;
    a.spec.stop_grace_ms = 1000;
    a.spec.end_peers_after_ms = -1;
    a.spec.children = a.children;
    return &a;
}

static void end(struct mb_supervisor *sup, struct seen *s)
{
    for (int i = 0; i < s->n_report; i++)
        close(s->fd[i]);
    mb_supervisor_release(sup);
    mb_supervisor_close(sup, on_closed, s);
    run_until(&s->closed, 1);
}

struct answer {
    int n;
    struct mb_err err;
};

static void on_answer(void *arg, const struct mb_err *err)
{
    struct answer *a = arg;

    a->n++;
    a->err = err != NULL ? *err : (struct mb_err){0};
    uv_stop(&loop);
}

/* An agent died right after it asked for a supervisor; its successor is faster than that one. */
static void test_given_up_before_it_was_there(void **state)
{
    struct attempt *a = attempt("late", "echo ran > ran; sleep 1000", NULL);
    struct seen s = {.loop = &loop};
    struct mb_supervisor *sup = NULL;
    struct answer answer = {0};
    char path[300], text[MB_SUP_TEXT_MAX];
    struct mb_init_spawn spawn = {.path = path, .cb = on_answer, .arg = &answer};
    struct mb_err err;

    (void)state;
    snprintf(path, sizeof(path), "%s/spec", a->dir);
    assert_int_equal(mb_sup_spec_write(&a->spec, path, text), 0);
    assert_int_equal(mb_supervisor_adopt(&loop, a->dir, &ops, &s, &sup, &err), MB_ENOENT);
    assert_int_equal(mb_init_spawn(init, &spawn, &err), 0);
    run_until(&answer.n, 1);
    assert_int_not_equal(answer.err.code, 0);
    assert_non_null(strstr(answer.err.text, "No such file"));
}

static void test_two_children_exit(void **state)
{
    struct attempt *a = attempt("two", "printf hello >&$MOBULA_REPORT_FD; exit 3", "kill -9 $$");
    struct seen s = {.loop = &loop};
    struct mb_supervisor *sup;
    struct mb_err err;
    char got[16] = "";

    (void)state;
    assert_int_equal(mb_supervisor_start(init, &a->spec, &ops, &s, &sup, &err), 0);
    assert_int_equal(s.n_started, 0);
    run_until(&s.all_exited, 1);
    assert_int_equal(s.n_started, 2);
    assert_int_equal(s.n_exit, 2);
    assert_int_equal(s.n_report, 2);
    assert_int_equal(s.code[0], 3);
    assert_int_equal(s.signal[1], 9);
    assert_string_equal(s.reason, "");
    assert_int_equal(read(s.fd[0], got, sizeof(got)), 5);
    assert_string_equal(got, "hello");
    end(sup, &s);
}

static void test_stop_asked_before_the_connection(void **state)
{
    struct attempt *a = attempt("stop", "exec sleep 1000", NULL);
    struct seen s = {.loop = &loop};
    struct mb_supervisor *sup;

    (void)state;
    assert_int_equal(mb_supervisor_start(init, &a->spec, &ops, &s, &sup, NULL), 0);
    mb_supervisor_stop(sup, 0, 5000);
    run_until(&s.all_exited, 1);
    assert_int_equal(s.signal[0], SIGTERM);
    assert_string_equal(s.reason, "stop requested");
    end(sup, &s);
}

static void test_program_that_cannot_run(void **state)
{
    struct attempt *a = attempt("norun", "", NULL);
    struct seen s = {.loop = &loop};
    struct mb_supervisor *sup;

    (void)state;
    a->argv[0][0] = "/nonexistent/x";
    assert_int_equal(mb_supervisor_start(init, &a->spec, &ops, &s, &sup, NULL), 0);
    run_until(&s.all_exited, 1);
    assert_int_equal(s.n_start_failed, 1);
    assert_int_equal(s.code[0], 127);
    assert_non_null(strstr(s.text, "/nonexistent/x"));
    end(sup, &s);
}

static void test_adopted_by_another_client(void **state)
{
    struct attempt *a = attempt("adopt", "read line <&$MOBULA_REPORT_FD; echo $line; exit 7", NULL);
    struct seen first = {.loop = &loop}, second = {.loop = &loop};
    struct mb_supervisor *sup;
    char log[32] = "";
    FILE *f;

    (void)state;
    assert_int_equal(mb_supervisor_start(init, &a->spec, &ops, &first, &sup, NULL), 0);
    run_until(&first.n_report, 1);
    close(first.fd[0]);
    mb_supervisor_close(sup, on_closed, &first);
    run_until(&first.closed, 1);
    assert_int_equal(mb_supervisor_adopt(&loop, a->dir, &ops, &second, &sup, NULL), 0);
    run_until(&second.n_report, 1);
    assert_int_equal(second.pid[0], first.pid[0]);
    assert_int_equal(write(second.fd[0], "go on\n", 6), 6);
    run_until(&second.all_exited, 1);
    assert_int_equal(second.code[0], 7);
    end(sup, &second);
    f = fopen(a->log[0], "re");
    assert_non_null(f);
    assert_non_null(fgets(log, sizeof(log), f));
    fclose(f);
    assert_string_equal(log, "go on\n");
}

static int wait_socket_gone(const char *dir)
{
    char path[300];

    snprintf(path, sizeof(path), "%s/s", dir);
    for (int i = 0; i < 3000 && access(path, F_OK) == 0; i++)
        poll(NULL, 0, 10);
    return access(path, F_OK) != 0;
}

static void test_adopt_after_the_supervisor_ended(void **state)
{
    struct attempt *a = attempt("ended", "exit 4", NULL);
    struct seen first = {.loop = &loop}, second = {.loop = &loop};
    struct mb_supervisor *sup;

    (void)state;
    assert_int_equal(mb_supervisor_start(init, &a->spec, &ops, &first, &sup, NULL), 0);
    run_until(&first.all_exited, 1);
    end(sup, &first);
    assert_true(wait_socket_gone(a->dir));
    assert_int_equal(mb_supervisor_adopt(&loop, a->dir, &ops, &second, &sup, NULL), 0);
    run_until(&second.all_exited, 1);
    assert_int_equal(second.n_started, 1);
    assert_int_equal(second.code[0], 4);
    end(sup, &second);
}

/* What is closed late must not take the next one's socket, which has the same number by then, out
 * of the loop. */
static void test_closed_after_the_next_has_begun(void **state)
{
    struct seen first = {.loop = &loop}, second = {.loop = &loop};
    struct mb_supervisor *early, *late;
    struct attempt *a;
    char path[300];
    int fd;

    (void)state;
    a = attempt("early", "exit 0", NULL);
    assert_int_equal(mb_supervisor_start(init, &a->spec, &ops, &first, &early, NULL), 0);
    run_until(&first.all_exited, 1);
    for (int i = 0; i < first.n_report; i++)
        close(first.fd[i]);
    mb_supervisor_release(early);
    assert_true(wait_socket_gone(a->dir));
    for (int i = 0; i < 100; i++) { /* its end is seen, its socket closed */
        uv_run(&loop, UV_RUN_NOWAIT);
        poll(NULL, 0, 1);
    }
    a = attempt("late", "until test -e go; do sleep 0.02; done", NULL);
    assert_int_equal(mb_supervisor_start(init, &a->spec, &ops, &second, &late, NULL), 0);
    run_until(&second.n_started, 1);
    mb_supervisor_close(early, on_closed, &first);
    run_until(&first.closed, 1);
    snprintf(path, sizeof(path), "%s/go", a->dir);
    fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    close(fd);
    run_until(&second.all_exited, 1);
    end(late, &second);
}

static int wait_buried(pid_t pid)
{
    for (int i = 0; i < 3000 && kill(pid, 0) == 0; i++)
        poll(NULL, 0, 10);
    return kill(pid, 0) != 0 && errno == ESRCH;
}

static void test_supervisor_killed(void **state)
{
    struct attempt *a = attempt("killed",
                                "echo $PPID > parent.tmp; mv parent.tmp parent; "
                                "exec sleep 1000",
                                NULL);
    struct seen s = {.loop = &loop};
    struct mb_supervisor *sup;
    uint64_t start_ticks;
    char path[300];
    int pid = 0;

    (void)state;
    assert_int_equal(mb_supervisor_start(init, &a->spec, &ops, &s, &sup, NULL), 0);
    run_until(&s.n_report, 1);
    snprintf(path, sizeof(path), "%s/parent", a->dir);
    while (access(path, F_OK) != 0)
        poll(NULL, 0, 5);
    {
        FILE *f = fopen(path, "re");

        assert_non_null(f);
        assert_int_equal(fscanf(f, "%d", &pid), 1);
        fclose(f);
    }
    start_ticks = mb_sup_start_ticks(s.pid[0]);
    assert_true(start_ticks > 0);
    assert_int_equal(kill(pid, SIGKILL), 0);
    run_until(&s.all_exited, 1);
    assert_string_equal(s.reason, "supervisor died");
    assert_int_equal(s.signal[0], SIGKILL);
    /* It is dead by now; init, another process, buries it. */
    assert_false(mb_sup_is_running(s.pid[0], start_ticks));
    assert_true(wait_buried((pid_t)s.pid[0]));
    end(sup, &s);
}

static void test_refusals(void **state)
{
    struct attempt *a = attempt("refused", "", NULL);
    struct seen s = {.loop = &loop};
    struct mb_supervisor *sup = NULL;
    struct mb_err err;

    (void)state;
    assert_int_equal(mb_supervisor_adopt(&loop, a->dir, &ops, &s, &sup, &err), MB_ENOENT);
    a->spec.dir = "/nonexistent/dir";
    assert_int_equal(mb_supervisor_start(init, &a->spec, &ops, &s, &sup, &err), MB_EIO);
    assert_non_null(strstr(err.text, "/nonexistent/dir"));
    a->spec.dir = a->dir;
    a->spec.n_children = 0; /* written, but no supervisor takes it */
    assert_int_equal(mb_supervisor_start(init, &a->spec, &ops, &s, &sup, &err), 0);
    while (s.error == 0)
        uv_run(&loop, UV_RUN_ONCE);
    assert_int_equal(s.error, MB_ESTATE);
    assert_non_null(strstr(s.text, "spec"));
    end(sup, &s);
}

static void test_allocation_failures(void **state)
{
    (void)state;
    for (unsigned long nth = 1;; nth++) {
        struct attempt *a = attempt("alloc", "exit 0", NULL);
        struct seen s = {.loop = &loop};
        struct mb_supervisor *sup;
        int rc, failed;

        mb_alloc_fail_nth(nth);
        rc = mb_supervisor_start(init, &a->spec, &ops, &s, &sup, NULL);
        failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        assert_int_equal(rc, failed ? MB_ENOMEM : 0);
        if (rc == 0) {
            run_until(&s.all_exited, 1);
            end(sup, &s);
            break;
        }
    }
}

static int open_init(void **state)
{
    struct mb_err err;

    (void)state;
    uv_loop_init(&loop);
    return mb_init_open(&loop, NULL, NULL, &init, &err);
}

static void on_init_closed(void *arg)
{
    *(int *)arg = 1;
}

static int close_init(void **state)
{
    (void)state;
    mb_init_close(init, on_init_closed, &init_closed);
    uv_run(&loop, UV_RUN_DEFAULT);
    return !init_closed || uv_loop_close(&loop) != 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_given_up_before_it_was_there),
        cmocka_unit_test(test_two_children_exit),
        cmocka_unit_test(test_stop_asked_before_the_connection),
        cmocka_unit_test(test_program_that_cannot_run),
        cmocka_unit_test(test_adopted_by_another_client),
        cmocka_unit_test(test_adopt_after_the_supervisor_ended),
        cmocka_unit_test(test_closed_after_the_next_has_begun),
        cmocka_unit_test(test_supervisor_killed),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_allocation_failures),
    };
    int status = mb_under_init(argv[0]);

    (void)argc;
    if (status >= 0)
        return status;
    return cmocka_run_group_tests(tests, open_init, close_init) == 0 ? 0 : 65;
}
