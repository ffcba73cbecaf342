/* A rank whose process is stopped is found by the others, which find nobody before. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include "worker/parallel/comm.h"

enum { WORLD = 3, VICTIM = 1, PATIENCE_MS = 60000, ASK_MS = 500 };

/* Until it is the stopped one that is found: beside much else a rank may take longer to answer. */
static int finds_the_victim(struct mb_comm *c)
{
    uint32_t rank;
    for (;;) {
        const int found = mb_comm_find_silent(c, ASK_MS, &rank);
        if (!found || rank == VICTIM)
            return found;
    }
}

/* In a process of its own. The status: 0, or what went wrong. */
static int rank_main(struct mb_comm_listener *l, const char *const *endpoints, uint32_t rank,
                     int go_fd)
{
    struct mb_comm *c;
    struct mb_err err;
    uint32_t silent;
    char byte;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (mb_comm_connect(l, endpoints, WORLD, &c, &err) != 0)
        return 1;
    if (mb_comm_find_silent(c, PATIENCE_MS, &silent) != 0)
        return 2;
    mb_comm_barrier(c); /* all have asked */
    if (mb_comm_synchronize(c, &err) != 0)
        return 3;
    if (rank == VICTIM)
        raise(SIGSTOP);
    else if (read(go_fd, &byte, 1) != 1)
        return 4;
    else if (!finds_the_victim(c))
        return 5;
    mb_comm_destroy(c);
    return 0;
}

static void play(int tcp)
{
    struct mb_comm_listener *l[WORLD];
    const char *endpoints[WORLD];
    pid_t pids[WORLD];
    int go[2], status;
    struct mb_err err;
    assert_int_equal(pipe(go), 0);
    for (uint32_t r = 0; r < WORLD; r++) {
        const struct mb_comm_options o = {
            .rank = r, .world_size = WORLD, .timeout_ms = PATIENCE_MS, .no_shared_memory = tcp};
        assert_int_equal(mb_comm_listen(&o, &l[r], &err), 0);
        endpoints[r] = mb_comm_listener_endpoint(l[r]);
    }
    for (uint32_t r = 0; r < WORLD; r++) {
        pids[r] = fork();
        assert_true(pids[r] >= 0);
        if (pids[r] == 0)
            _exit(rank_main(l[r], endpoints, r, go[0]));
    }
    assert_int_equal(waitpid(pids[VICTIM], &status, WUNTRACED), pids[VICTIM]);
    assert_true(WIFSTOPPED(status));
    assert_int_equal(write(go[1], "gg", WORLD - 1), WORLD - 1);
    for (uint32_t r = 0; r < WORLD; r++) {
        if (r == VICTIM)
            continue;
        assert_int_equal(waitpid(pids[r], &status, 0), pids[r]);
        assert_int_equal(status, 0);
    }
    kill(pids[VICTIM], SIGCONT);
    assert_int_equal(waitpid(pids[VICTIM], &status, 0), pids[VICTIM]);
    assert_int_equal(status, 0);
    for (uint32_t r = 0; r < WORLD; r++)
        mb_comm_listener_destroy(l[r]);
    close(go[0]);
    close(go[1]);
}

static void a_stopped_process_is_found(void **state)
{
    (void)state;
    play(0);
    play(1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_stopped_process_is_found)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
