/*
 * A rank killed at any moment: every survivor names it, and the operation, within half a second of
 * a processor's time.
 *
 * That is what a process beside the ranks gets which does nothing but use it. Nothing in the
 * communicator waits for a clock here: a death is the end of a socket that every survivor polls. By
 * the wall clock it lasts as long as the scheduler keeps the dying rank and the survivors waiting:
 * beside four busy loops on two processors (load 22) the slowest of 286 survivors was heard after
 * 112 ms, with the thread sanitizer at nice 10 (load 32) after 3337 ms. The process beside them got
 * 8 ms at most, with the thread sanitizer 68 ms.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include "worker/parallel/comm.h"

enum { WORLD = 3, VICTIM = 1, N = 300000 };

static float big[N];
static int64_t one[1];

static void call(struct mb_comm *c, int op, uint32_t rank)
{
    switch (op) {
    case 0:
        mb_comm_allreduce(c, NULL, big, N, MB_COMM_F32, MB_COMM_MAX);
        break;
    case 1:
        mb_comm_reduce_scatter(c, NULL, big, N, MB_COMM_F32, MB_COMM_MAX);
        break;
    case 2:
        mb_comm_allgather(c, NULL, big, N, MB_COMM_F32);
        break;
    case 3:
        mb_comm_broadcast(c, NULL, big, N, MB_COMM_F32, VICTIM);
        break;
    case 4:
        mb_comm_barrier(c);
        break;
    default: /* survivors hear from the victim, the victim speaks to both */
        if (rank == VICTIM) {
            usleep(1000); /* what it has sent is taken first, so it keeps the pace of the others */
            mb_comm_send(c, NULL, one, 1, MB_COMM_I64, 0);
            mb_comm_send(c, NULL, one, 1, MB_COMM_I64, 2);
        } else {
            mb_comm_recv(c, NULL, one, 1, MB_COMM_I64, VICTIM);
        }
    }
}

static const char *const NAMES[] = {"all-reduce", "reduce-scatter", "all-gather",
                                    "broadcast",  "barrier",        "receive"};

/* A rank in a process of its own: operates until it fails and writes why. */
static void rank_main(struct mb_comm_listener *l, const char *const *endpoints, int op, int absent,
                      uint32_t rank, int report_fd, int ready_fd)
{
    struct mb_comm *c;
    struct mb_err err;
    if (mb_comm_connect(l, endpoints, WORLD, &c, &err) != 0) {
        dprintf(report_fd, "connect: %s", err.text);
        _exit(1);
    }
    for (int round = 0;; round++) {
        if (rank == VICTIM ? round == 20 : round == 0) { /* all have met, the victim is at work */
            (void)!write(ready_fd, "r", 1);
        }
        while (rank == VICTIM && round == 20 && absent) {
            pause();
        }
        call(c, op, rank);
        if (mb_comm_synchronize(c, &err) != 0) {
            dprintf(report_fd, "%s", err.text);
            close(report_fd); /* said; the thread sanitizer takes a second to end a process */
            _exit(0);
        }
    }
}

enum { SOON_MS = 500, TIMEOUT_MS = 30000 };

/* A process that uses all it gets of the processors, as any other may. */
static pid_t start_yardstick(void)
{
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (;;) {
            (void)getppid();
        }
    }
    return pid;
}

/* Ends it. What it got. */
static uint64_t end_yardstick_ms(pid_t pid)
{
    struct rusage used;
    kill(pid, SIGKILL);
    assert_int_equal(wait4(pid, NULL, 0, &used), pid);
    return (uint64_t)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1000 +
           (uint64_t)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1000;
}

static void kill_in(int op, int absent, int tcp)
{
    struct mb_comm_listener *l[WORLD];
    const char *endpoints[WORLD];
    struct mb_err err;
    for (uint32_t r = 0; r < WORLD; r++) {
        struct mb_comm_options o = {
            .rank = r, .world_size = WORLD, .timeout_ms = TIMEOUT_MS, .no_shared_memory = tcp};
        assert_int_equal(mb_comm_listen(&o, &l[r], &err), 0);
        endpoints[r] = mb_comm_listener_endpoint(l[r]);
    }
    pid_t pids[WORLD];
    int reports[WORLD][2], ready[2];
    assert_int_equal(pipe(ready), 0);
    for (uint32_t r = 0; r < WORLD; r++) {
        assert_int_equal(pipe(reports[r]), 0);
        pids[r] = fork();
        assert_true(pids[r] >= 0);
        if (pids[r] == 0) {
            rank_main(l[r], endpoints, op, absent, r, reports[r][1], ready[1]);
        }
        close(reports[r][1]);
    }
    close(ready[1]);
    char byte;
    for (int r = 0; r < WORLD; r++) {
        assert_int_equal(read(ready[0], &byte, 1), 1);
    }
    close(ready[0]);
    pid_t yardstick = start_yardstick();
    kill(pids[VICTIM], SIGKILL);
    for (uint32_t r = 0; r < WORLD; r++) {
        char text[1024] = "";
        size_t n = 0;
        ssize_t k;
        while ((k = read(reports[r][0], text + n, sizeof text - 1 - n)) > 0) {
            n += (size_t)k;
        }
        close(reports[r][0]);
        if (r == VICTIM) {
            continue;
        }
        if (strstr(text, "rank 1 ") == NULL || strstr(text, "went away") == NULL ||
            (strstr(text, NAMES[op]) == NULL && strstr(text, "between operations") == NULL)) {
            fail_msg("%s: rank %u says: %s", NAMES[op], r, text);
        }
    }
    uint64_t took_ms = end_yardstick_ms(yardstick);
    for (uint32_t r = 0; r < WORLD; r++) {
        assert_int_equal(waitpid(pids[r], NULL, 0), pids[r]);
        mb_comm_listener_destroy(l[r]);
    }
    if (took_ms >= SOON_MS) {
        fail_msg("%s: the survivors were heard after %llu ms of a processor", NAMES[op],
                 (unsigned long long)took_ms);
    }
}

static void survivors_name_the_dead(void **state)
{
    (void)state;
    for (int op = 0; op < 6; op++) {
        for (int absent = 0; absent < 2; absent++) {
            kill_in(op, absent, 0);
            kill_in(op, absent, 1);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(survivors_name_the_dead)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
