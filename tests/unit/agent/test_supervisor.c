/* The agent's supervisor client against the real mobula-init. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <uv.h>
#include "agent/init.h"
#include "agent/launch_watch.h"
#include "agent/supervise/state.h"
#include "agent/supervisor.h"
#include "base/alloc.h"
#include "tests/unit/agent/under_init.h"

enum { DEADLINE_MS = 100000 };

struct seen {
    int n_started, n_start_failed, n_exit, n_report, all_exited, error, error_given, closed;
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
    s->error_given = 1;
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
    kill(getppid(), SIGCONT); /* a test may have stopped it */
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
    char dir[256], spec_path[300], log[2][300];
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
    snprintf(a.spec_path, sizeof(a.spec_path), "%s/spec", a.dir);
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
    assert_int_equal(mb_supervisor_adopt(init, a->dir, &ops, &s, &sup, &err), MB_ENOENT);
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
    assert_int_equal(mb_supervisor_adopt(init, a->dir, &ops, &second, &sup, NULL), 0);
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
    assert_int_equal(mb_supervisor_adopt(init, a->dir, &ops, &second, &sup, NULL), 0);
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

/* ---- launches that take too long ---- */

/* Processes that were started for an attempt: supervisors, and children before their exec. */
static int count_processes_of(const struct attempt *a)
{
    DIR *d = opendir("/proc");
    const struct dirent *e;
    int n_found = 0;

    assert_non_null(d);
    while ((e = readdir(d)) != NULL) {
        char path[300], line[1024] = "";
        ssize_t n;
        int fd;

        if (e->d_name[0] < '1' || e->d_name[0] > '9')
            continue;
        snprintf(path, sizeof(path), "/proc/%s/cmdline", e->d_name);
        fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            continue;
        n = read(fd, line, sizeof(line) - 1);
        n_found += n > 0 && memmem(line, (size_t)n, a->spec_path, strlen(a->spec_path)) != NULL;
        close(fd);
    }
    closedir(d);
    return n_found;
}

static int wait_no_processes_of(const struct attempt *a)
{
    for (int i = 0; i < 3000 && count_processes_of(a) > 0; i++)
        poll(NULL, 0, 10);
    return count_processes_of(a) == 0;
}

static void signal_init(int sig)
{
    assert_int_equal(kill(getppid(), sig), 0);
}

static int let_init_go_on(void **state)
{
    (void)state;
    mb_init_set_launch_timeout(init, 0);
    return kill(getppid(), SIGCONT);
}

static void on_timer(uv_timer_t *t)
{
    *(int *)t->data = 1;
    uv_stop(&loop);
}

static void run_for(uint64_t ms)
{
    uv_timer_t timer;
    int is_over = 0;

    uv_timer_init(&loop, &timer);
    timer.data = &is_over;
    uv_timer_start(&timer, on_timer, ms, 0);
    run_until(&is_over, 1);
    uv_close((uv_handle_t *)&timer, NULL);
    uv_run(&loop, UV_RUN_NOWAIT);
}

/* What init still has to do with it when it goes on leaves nothing and starts nothing. */
static void test_init_hangs(void **state)
{
    struct attempt *a = attempt("hung-init", "echo ran > ran; exec sleep 1000", NULL);
    struct attempt hung = *a;
    struct seen s = {.loop = &loop}, next = {.loop = &loop};
    struct mb_supervisor *sup;
    char path[300], expected[64];

    (void)state;
    signal_init(SIGSTOP);
    mb_init_set_launch_timeout(init, 200);
    assert_int_equal(mb_supervisor_start(init, &a->spec, &ops, &s, &sup, NULL), 0);
    mb_supervisor_stop(sup, 0, 1000); /* changes nothing: there is nobody to tell */
    run_until(&s.error_given, 1);
    assert_int_equal(s.error, MB_ETIMEOUT);
    snprintf(expected, sizeof(expected), "mobula-init (pid %d) did not answer", (int)getppid());
    assert_non_null(strstr(s.text, expected));
    assert_int_not_equal(access(a->spec_path, F_OK), 0);
    assert_int_equal(s.n_started, 0);
    end(sup, &s);

    let_init_go_on(NULL);
    a = attempt("after-it", "exit 0", NULL); /* init answers in the order in which it was asked */
    assert_int_equal(mb_supervisor_start(init, &a->spec, &ops, &next, &sup, NULL), 0);
    run_until(&next.all_exited, 1);
    end(sup, &next);
    assert_true(wait_no_processes_of(&hung));
    snprintf(path, sizeof(path), "%s/ran", hung.dir);
    assert_int_not_equal(access(path, F_OK), 0);
}

/* Its log is a FIFO that nobody reads, as a file system that hangs would be: the child stands
 * before its exec, and the supervisor waits for that. */
static struct attempt *attempt_that_hangs(const char *name)
{
    struct attempt *a = attempt(name, "exec sleep 1000", NULL);

    assert_int_equal(mkfifo(a->log[0], 0600), 0);
    return a;
}

static void assert_lost(const struct attempt *a, const struct seen *s)
{
    assert_int_equal(s->error, MB_ETIMEOUT);
    assert_non_null(strstr(s->text, "did not start every process within"));
    assert_int_equal(s->n_started, 0);
    assert_int_equal(s->all_exited, 0);
    assert_int_not_equal(access(a->spec_path, F_OK), 0);
    assert_true(wait_no_processes_of(a));
}

static void test_supervisor_hangs(void **state)
{
    struct attempt *a = attempt_that_hangs("hung-child");
    struct seen s = {.loop = &loop};
    struct mb_supervisor *sup;

    (void)state;
    mb_init_set_launch_timeout(init, 3000); /* many times what it takes to get there */
    assert_int_equal(mb_supervisor_start(init, &a->spec, &ops, &s, &sup, NULL), 0);
    run_until(&s.error_given, 1);
    assert_lost(a, &s);
    end(sup, &s);
}

static void test_adopted_supervisor_hangs(void **state)
{
    struct attempt *a = attempt_that_hangs("hung-adopted");
    struct seen first = {.loop = &loop}, second = {.loop = &loop};
    struct mb_supervisor *sup;

    (void)state;
    assert_int_equal(mb_supervisor_start(init, &a->spec, &ops, &first, &sup, NULL), 0);
    while (count_processes_of(a) < 2) /* the supervisor has forked */
        run_for(10);
    mb_supervisor_close(sup, on_closed, &first);
    run_until(&first.closed, 1);
    mb_init_set_launch_timeout(init, 200);
    assert_int_equal(mb_supervisor_adopt(init, a->dir, &ops, &second, &sup, NULL), 0);
    run_until(&second.error_given, 1);
    assert_lost(a, &second);
    end(sup, &second);
}

/* It hangs, but what it was to launch runs. */
static void test_supervisor_hangs_later(void **state)
{
    struct attempt *a = attempt("hung-later", "read line <&$MOBULA_REPORT_FD; exit 6", NULL);
    struct seen first = {.loop = &loop}, second = {.loop = &loop};
    struct mb_sup_state seen;
    struct mb_supervisor *sup;
    char text[MB_SUP_TEXT_MAX];
    int dir_fd;

    (void)state;
    assert_int_equal(mb_supervisor_start(init, &a->spec, &ops, &first, &sup, NULL), 0);
    run_until(&first.n_report, 1);
    mb_supervisor_close(sup, on_closed, &first);
    run_until(&first.closed, 1);
    dir_fd = open(a->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    assert_true(dir_fd >= 0);
    assert_int_equal(mb_sup_state_read(dir_fd, &seen, text), 0);
    close(dir_fd);
    assert_int_equal(kill((pid_t)seen.supervisor_pid, SIGSTOP), 0);
    mb_init_set_launch_timeout(init, 100);
    assert_int_equal(mb_supervisor_adopt(init, a->dir, &ops, &second, &sup, NULL), 0);
    run_for(100 + MB_LAUNCH_LAST_LOOK_MS + 1000);
    assert_int_equal(second.error_given, 0);
    assert_int_equal(access(a->spec_path, F_OK), 0);
    assert_int_equal(kill((pid_t)seen.supervisor_pid, SIGCONT), 0);
    assert_int_equal(write(first.fd[0], "go on\n", 6), 6);
    close(first.fd[0]);
    run_until(&second.all_exited, 1);
    assert_int_equal(second.code[0], 6);
    end(sup, &second);
}

static void test_refusals(void **state)
{
    struct attempt *a = attempt("refused", "", NULL);
    struct seen s = {.loop = &loop};
    struct mb_supervisor *sup = NULL;
    struct mb_err err;

    (void)state;
    assert_int_equal(mb_supervisor_adopt(init, a->dir, &ops, &s, &sup, &err), MB_ENOENT);
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
        cmocka_unit_test_teardown(test_init_hangs, let_init_go_on),
        cmocka_unit_test_teardown(test_supervisor_hangs, let_init_go_on),
        cmocka_unit_test_teardown(test_adopted_supervisor_hangs, let_init_go_on),
        cmocka_unit_test_teardown(test_supervisor_hangs_later, let_init_go_on),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_allocation_failures),
    };
    int status = mb_under_init(argv[0]);

    (void)argc;
    if (status >= 0)
        return status;
    return cmocka_run_group_tests(tests, open_init, close_init) == 0 ? 0 : 65;
}
