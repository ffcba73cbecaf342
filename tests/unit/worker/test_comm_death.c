/* A rank killed at any moment: every survivor names it, and the operation, within two seconds;
 * where other programs keep the processors for longer than that, which a few kills may meet, still
 * long before the time-out. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/clock.h"
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
        if (rank == VICTIM && round == 20) {
            (void)!write(ready_fd, "r", 1);
            while (absent) {
                pause();
            }
        }
        call(c, op, rank);
        if (mb_comm_synchronize(c, &err) != 0) {
            dprintf(report_fd, "%s", err.text);
            _exit(0);
        }
    }
}

/* Of 24 kills. */
enum { SOON_MS = 2000, LATE_MS = 15000, LATE_MAX = 3, TIMEOUT_MS = 30000 };

static int n_late;

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
    uint64_t slowest_ms = 0;
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
    assert_int_equal(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    uint64_t killed_ms = mb_mono_ms();
    kill(pids[VICTIM], SIGKILL);
    for (uint32_t r = 0; r < WORLD; r++) {
        char text[1024] = "";
        size_t n = 0;
        ssize_t k;
        while ((k = read(reports[r][0], text + n, sizeof text - 1 - n)) > 0) {
            n += (size_t)k;
        }
        close(reports[r][0]);
        assert_int_equal(waitpid(pids[r], NULL, 0), pids[r]);
        mb_comm_listener_destroy(l[r]);
        if (r == VICTIM) {
            continue;
        }
        slowest_ms = mb_mono_ms() - killed_ms;
        if (strstr(text, "rank 1 ") == NULL || strstr(text, "went away") == NULL ||
            (strstr(text, NAMES[op]) == NULL && strstr(text, "between operations") == NULL)) {
            fail_msg("%s: rank %u says: %s", NAMES[op], r, text);
        }
    }
    assert_true(slowest_ms < LATE_MS);
    n_late += slowest_ms >= SOON_MS;
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
    assert_true(n_late <= LATE_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(survivors_name_the_dead)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
