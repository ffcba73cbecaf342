/*
 * A rank whose process is stopped is found by the others, which find nobody before. Nor do they
 * find one that has given up and said why: it lives, and its words are the reason.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include "worker/parallel/comm.h"

enum { WORLD = 3, VICTIM = 1, QUITTER = 0, PATIENCE_MS = 60000, ASK_MS = 500 };

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
typedef int rank_fn(struct mb_comm_listener *l, const char *const *endpoints, uint32_t rank,
                    const int go[2]);

static int one_is_stopped(struct mb_comm_listener *l, const char *const *endpoints, uint32_t rank,
                          const int go[2])
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
    else if (read(go[0], &byte, 1) != 1)
        return 4;
    else if (!finds_the_victim(c))
        return 5;
    mb_comm_destroy(c);
    return 0;
}

/* The quitter lives until the others have asked. */
static int one_gives_up(struct mb_comm_listener *l, const char *const *endpoints, uint32_t rank,
                        const int go[2])
{
    struct mb_comm *c;
    struct mb_err err;
    uint32_t silent = WORLD;
    char byte;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (mb_comm_connect(l, endpoints, WORLD, &c, &err) != 0)
        return 1;
    if (rank == QUITTER) {
        mb_comm_abort(c, "no space left on device");
        for (int i = 0; i < WORLD - 1; i++)
            if (read(go[0], &byte, 1) != 1)
                return 2;
        mb_comm_destroy(c);
        return 0;
    }
    mb_comm_barrier(c); /* ends with the quitter's words */
    if (mb_comm_synchronize(c, &err) == 0 || strstr(err.text, "no space left on device") == NULL)
        return 3;
    const int found = mb_comm_find_silent(c, ASK_MS, &silent);
    if (write(go[1], "g", 1) != 1)
        return 4;
    mb_comm_destroy(c);
    return found ? 10 + (int)silent : 0;
}

struct gang {
    struct mb_comm_listener *l[WORLD];
    pid_t pids[WORLD];
    int go[2];
};

static void start(struct gang *g, int tcp, rank_fn *body)
{
    const char *endpoints[WORLD];
    struct mb_err err;
    assert_int_equal(pipe(g->go), 0);
    for (uint32_t r = 0; r < WORLD; r++) {
        const struct mb_comm_options o = {
            .rank = r, .world_size = WORLD, .timeout_ms = PATIENCE_MS, .no_shared_memory = tcp};
        assert_int_equal(mb_comm_listen(&o, &g->l[r], &err), 0);
        endpoints[r] = mb_comm_listener_endpoint(g->l[r]);
    }
    for (uint32_t r = 0; r < WORLD; r++) {
        g->pids[r] = fork();
        assert_true(g->pids[r] >= 0);
        if (g->pids[r] == 0)
            _exit(body(g->l[r], endpoints, r, g->go));
    }
}

static void assert_ends(struct gang *g, uint32_t rank)
{
    int status;
    assert_int_equal(waitpid(g->pids[rank], &status, 0), g->pids[rank]);
    assert_int_equal(status, 0);
}

static void end(struct gang *g)
{
    for (uint32_t r = 0; r < WORLD; r++)
        mb_comm_listener_destroy(g->l[r]);
    close(g->go[0]);
    close(g->go[1]);
}

static void a_stopped_process_is_found(void **state)
{
    (void)state;
    for (int tcp = 0; tcp < 2; tcp++) {
        struct gang g;
        int status;
        start(&g, tcp, one_is_stopped);
        assert_int_equal(waitpid(g.pids[VICTIM], &status, WUNTRACED), g.pids[VICTIM]);
        assert_true(WIFSTOPPED(status));
        assert_int_equal(write(g.go[1], "gg", WORLD - 1), WORLD - 1);
        for (uint32_t r = 0; r < WORLD; r++)
            if (r != VICTIM)
                assert_ends(&g, r);
        kill(g.pids[VICTIM], SIGCONT);
        assert_ends(&g, VICTIM);
        end(&g);
    }
}

static void who_has_given_up_is_not_silent(void **state)
{
    (void)state;
    for (int tcp = 0; tcp < 2; tcp++) {
        struct gang g;
        start(&g, tcp, one_gives_up);
        for (uint32_t r = 0; r < WORLD; r++)
            assert_ends(&g, r);
        end(&g);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_stopped_process_is_found),
                                       cmocka_unit_test(who_has_given_up_is_not_silent)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
