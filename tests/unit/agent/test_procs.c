/* Signals to a tree of real processes: who gets them, who does not, who notices. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "agent/supervise/clock.h"
#include "agent/supervise/procs.h"
#include "agent/supervise/state.h"

enum { ROUNDS = 10, SLOW_ROUNDS = 3, COMMANDS = 100, DEADLINE_S = 60, ALL_S = 400 };
enum { SHORT_MS = 150 }; /* less than it waits for a disk */

#define SLOW_BYTES ((size_t)1 << 30)

static volatile sig_atomic_t told;

static void on_term(int signum)
{
    (void)signum;
    told = 1;
}

static void catch_term(void)
{
    struct sigaction action = {.sa_handler = on_term}; /* without SA_RESTART: waitpid() ends */

    sigaction(SIGTERM, &action, NULL);
}

static void wait_for_term(int ready)
{
    sigset_t term, before;

    sigemptyset(&term);
    sigaddset(&term, SIGTERM);
    sigprocmask(SIG_BLOCK, &term, &before); /* it comes while we wait, not before */
    catch_term();
    (void)!write(ready, "r", 1);
    while (!told)
        sigsuspend(&before);
    sigprocmask(SIG_SETMASK, &before, NULL);
}

/* The exit code of a child; one that was killed, or that has not ended in time: a failure. */
static int exit_code_of(pid_t pid)
{
    int status = 0;

    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_false(WIFSIGNALED(status));
    return WEXITSTATUS(status);
}

/* A program of the tree: says through the pipe that it is ready. It ends with this test at the
 * latest. */
static pid_t start(void (*program)(int ready), int *ready)
{
    int pipe_fds[2];
    pid_t pid;

    assert_int_equal(pipe(pipe_fds), 0);
    pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        alarm(DEADLINE_S);
        close(pipe_fds[0]);
        program(pipe_fds[1]);
        _exit(99);
    }
    assert_true(pid > 0);
    close(pipe_fds[1]);
    *ready = pipe_fds[0];
    return pid;
}

static void wait_ready(int ready)
{
    char byte;

    assert_int_equal(read(ready, &byte, 1), 1);
}

/* A pid that another process has by now gets no signal. */
static void test_a_signal_reaches_the_process_that_was_meant(void **state)
{
    pid_t child = fork();
    int status;

    (void)state;
    if (child == 0) {
        pause();
        _exit(0);
    }
    uint64_t ticks = mb_sup_start_ticks(child);
    assert_int_equal(mb_procs_signal(child, ticks + 1, SIGKILL), -1);
    assert_int_equal(errno, ESRCH);
    assert_int_equal(waitpid(child, &status, WNOHANG), 0);
    assert_int_equal(mb_procs_signal(child, ticks, SIGTERM), 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
    assert_int_equal(mb_procs_signal(child, ticks, SIGTERM), -1);
}

/* As a shell whose trap runs mkdir, cp and an upload. Its exit code: how many of them were killed.
 */
static void saves_when_told(int ready)
{
    int killed = 0;

    wait_for_term(ready);
    for (int i = 0; i < COMMANDS; i++) {
        pid_t command = fork();
        int status;

        if (command == 0) {
            signal(SIGTERM, SIG_DFL);
            usleep(500);
            _exit(0);
        }
        while (waitpid(command, &status, 0) < 0 && errno == EINTR)
            continue;
        killed += WIFSIGNALED(status) != 0;
    }
    _exit(killed > 0);
}

static void test_what_a_handler_starts_gets_no_signal(void **state)
{
    (void)state;
    for (int i = 0; i < ROUNDS; i++) {
        int ready;
        pid_t pid = start(saves_when_told, &ready);

        wait_ready(ready);
        assert_int_equal(mb_procs_signal_tree(SIGTERM), 1);
        assert_int_equal(exit_code_of(pid), 0);
        close(ready);
    }
}

/* Forks as fast as it can; every child only waits for the signal. */
static void grows(int ready)
{
    (void)!write(ready, "r", 1);
    for (int i = 0; i < COMMANDS; i++) {
        if (fork() == 0) {
            alarm(DEADLINE_S);
            for (;;)
                pause();
        }
        usleep(100);
    }
    for (;;)
        pause();
}

static void test_a_tree_that_grows_is_reached_whole(void **state)
{
    (void)state;
    for (int i = 0; i < ROUNDS; i++) {
        int ready, status, ended = 0;

        start(grows, &ready);
        wait_ready(ready);
        usleep((useconds_t)i * 1000);
        assert_true(mb_procs_signal_tree(SIGTERM) >= 1);
        while (waitpid(-1, &status, 0) > 0) { /* the orphans are ours: the test is a subreaper */
            assert_true(WIFSIGNALED(status));
            assert_int_equal(WTERMSIG(status), SIGTERM); /* an alarm: it was missed */
            ended++;
        }
        assert_int_equal(errno, ECHILD);
        assert_true(ended >= 1);
        close(ready);
    }
}

/* Its address space takes long to copy, and no memory: page tables of the page of zeros. */
static void grow_slow_to_fork(void)
{
    char *p = mmap(NULL, SLOW_BYTES, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (p == MAP_FAILED || madvise(p, SLOW_BYTES, MADV_NOHUGEPAGE) != 0)
        _exit(98);
    *p = 1; /* fork() copies what could have been written to */
    for (size_t at = 0; at < SLOW_BYTES; at += 4096)
        (void)*(volatile const char *)(p + at);
}

static void *forks(void *ready)
{
    (void)!write(*(int *)ready, "r", 1);
    if (fork() == 0) {
        alarm(DEADLINE_S);
        for (;;)
            pause();
    }
    pause(); /* until the signal ends all */
    return NULL;
}

/* The first thread stands at once, the second when its fork() is done. */
static void grows_in_a_thread(int ready)
{
    pthread_t thread;

    grow_slow_to_fork();
    if (pthread_create(&thread, NULL, forks, &ready) == 0)
        pthread_join(thread, NULL);
}

/* The same when the first thread has left: the process looks like a zombie. */
static void grows_in_a_thread_alone(int ready)
{
    static int its_own;
    pthread_t thread;

    its_own = ready;
    grow_slow_to_fork();
    if (pthread_create(&thread, NULL, forks, &its_own) == 0)
        pthread_exit(NULL);
}

static void reach_what_a_thread_forks(void (*program)(int ready))
{
    for (int i = 0; i < SLOW_ROUNDS; i++) {
        int ready, status;

        start(program, &ready);
        wait_ready(ready);
        assert_true(mb_procs_signal_tree(SIGTERM) >= 1);
        while (waitpid(-1, &status, 0) > 0) {
            assert_true(WIFSIGNALED(status));
            assert_int_equal(WTERMSIG(status), SIGTERM);
        }
        assert_int_equal(errno, ECHILD);
        close(ready);
    }
}

static void test_what_another_thread_forks_is_reached(void **state)
{
    (void)state;
    reach_what_a_thread_forks(grows_in_a_thread);
    reach_what_a_thread_forks(grows_in_a_thread_alone);
}

/* As a shell with job control: its exit code says whether it ever saw its child stopped. */
static void watches_for_stopped_children(int ready)
{
    pid_t child = fork();
    int status;

    if (child == 0) {
        for (;;)
            pause();
    }
    catch_term();
    (void)!write(ready, "r", 1);
    for (;;) {
        pid_t pid = waitpid(child, &status, WUNTRACED);

        if (pid == child)
            _exit(WIFSTOPPED(status) ? 1 : 0);
    }
}

static void test_no_parent_sees_that_its_children_stood(void **state)
{
    (void)state;
    for (int i = 0; i < ROUNDS; i++) {
        int ready;
        pid_t pid = start(watches_for_stopped_children, &ready);

        wait_ready(ready);
        assert_int_equal(mb_procs_signal_tree(SIGTERM), 2);
        assert_int_equal(exit_code_of(pid), 0);
        close(ready);
    }
}

/* The same, whose children come and go all the time. */
static void runs_one_after_another(int ready)
{
    catch_term();
    (void)!write(ready, "r", 1);
    while (!told) {
        pid_t child = fork();
        int status;

        if (child == 0)
            _exit(0);
        while (waitpid(child, &status, WUNTRACED) < 0 && errno == EINTR)
            continue;
        if (WIFSTOPPED(status))
            _exit(1);
    }
    _exit(0);
}

static void test_no_parent_sees_that_new_children_stood(void **state)
{
    (void)state;
    for (int i = 0; i < 10 * ROUNDS; i++) {
        int ready;
        pid_t pid = start(runs_one_after_another, &ready);

        wait_ready(ready);
        usleep((useconds_t)(i % 10) * 100);
        assert_true(mb_procs_signal_tree(SIGTERM) >= 1);
        assert_int_equal(exit_code_of(pid), 0);
        close(ready);
    }
}

/* It waits for its child in the kernel, and takes no signal meanwhile. */
static void waits_in_vfork(int ready)
{
    pid_t child = vfork(); /* NOLINT: what it does to its parent is what is tried */

    if (child == 0) {
        (void)!write(ready, "r", 1);
        for (;;)
            pause();
    }
    _exit(0);
}

static void test_a_parent_in_vfork_is_not_waited_for(void **state)
{
    uint64_t shortest_ms = UINT64_MAX; /* on a busy machine most take longer */

    (void)state;
    for (int i = 0; i < 5 * ROUNDS && shortest_ms >= SHORT_MS; i++) {
        int ready, status;
        pid_t pid = start(waits_in_vfork, &ready);
        uint64_t begin_ms, took_ms;

        wait_ready(ready);
        begin_ms = mb_sup_now_ms();
        assert_int_equal(mb_procs_signal_tree(SIGTERM), 2);
        took_ms = mb_sup_now_ms() - begin_ms;
        shortest_ms = took_ms < shortest_ms ? took_ms : shortest_ms;
        assert_int_equal(waitpid(pid, &status, 0), pid);
        while (waitpid(-1, &status, 0) > 0)
            continue;
        close(ready);
    }
    assert_true(shortest_ms < SHORT_MS);
}

static void ends_when_told(int ready)
{
    wait_for_term(ready);
    _exit(0);
}

static void test_what_stood_already_goes_on_and_ends(void **state)
{
    int ready, status;
    pid_t pid = start(ends_when_told, &ready);

    (void)state;
    wait_ready(ready);
    kill(pid, SIGSTOP);
    assert_int_equal(waitpid(pid, &status, WUNTRACED), pid);
    assert_true(WIFSTOPPED(status));
    assert_int_equal(mb_procs_signal_tree(SIGTERM), 1);
    assert_int_equal(exit_code_of(pid), 0);
    close(ready);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_signal_reaches_the_process_that_was_meant),
        cmocka_unit_test(test_what_a_handler_starts_gets_no_signal),
        cmocka_unit_test(test_a_tree_that_grows_is_reached_whole),
        cmocka_unit_test(test_what_another_thread_forks_is_reached),
        cmocka_unit_test(test_no_parent_sees_that_its_children_stood),
        cmocka_unit_test(test_no_parent_sees_that_new_children_stood),
        cmocka_unit_test(test_a_parent_in_vfork_is_not_waited_for),
        cmocka_unit_test(test_what_stood_already_goes_on_and_ends),
    };

    if (prctl(PR_SET_CHILD_SUBREAPER, 1) != 0) {
        perror("prctl");
        return 1;
    }
    alarm(ALL_S); /* one that never ends fails; the programs end with it */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
