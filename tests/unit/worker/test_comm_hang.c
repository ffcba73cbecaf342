/*
 * A rank whose process is stopped is found by the others, which find nobody before. Nor do they
 * find one that has given up and said why: it lives, and its words are the reason. Where an
 * operation takes too long what they say names the stopped one, not a neighbour that waits, too.
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
#include <sys/wait.h>
#include <unistd.h>
#include "worker/parallel/comm.h"

enum { MOST = 4, QUITTER = 0, PATIENCE_MS = 60000, ASK_MS = 500 };
enum { TIMEOUT_MS = 10000 }; /* in which the ranks of all gangs meet */

struct gang {
    uint32_t n, victim;
    struct mb_comm_listener *l[MOST];
    const char *endpoints[MOST];
    pid_t pids[MOST];
    int go[2];
};

/* In a process of its own. The status: 0, or what went wrong. */
typedef int rank_fn(const struct gang *g, uint32_t rank);

/* Until it is the stopped one that is found: beside much else a rank may take longer to answer. */
static int finds(struct mb_comm *c, uint32_t victim)
{
    uint32_t rank;
    for (;;) {
        const int found = mb_comm_find_silent(c, ASK_MS, &rank);
        if (!found || rank == victim)
            return found;
    }
}

static int one_is_stopped(const struct gang *g, uint32_t rank)
{
    struct mb_comm *c;
    struct mb_err err;
    uint32_t silent;
    char byte;
    if (mb_comm_connect(g->l[rank], g->endpoints, g->n, &c, &err) != 0)
        return 1;
    if (mb_comm_find_silent(c, PATIENCE_MS, &silent) != 0)
        return 2;
    mb_comm_barrier(c); /* all have asked */
    if (mb_comm_synchronize(c, &err) != 0)
        return 3;
    if (rank == g->victim)
        raise(SIGSTOP);
    else if (read(g->go[0], &byte, 1) != 1)
        return 4;
    else if (!finds(c, g->victim))
        return 5;
    mb_comm_destroy(c);
    return 0;
}

/* The quitter lives until the others have asked. It gives up when all have met: one that still
 * looked for another could find that gone. Its words may overtake the end of that barrier. */
static int one_gives_up(const struct gang *g, uint32_t rank)
{
    struct mb_comm *c;
    struct mb_err err;
    uint32_t silent = g->n;
    char byte;
    if (mb_comm_connect(g->l[rank], g->endpoints, g->n, &c, &err) != 0)
        return 1;
    mb_comm_barrier(c);
    int rc = mb_comm_synchronize(c, &err);
    if (rank == QUITTER) {
        if (rc != 0)
            return 5;
        mb_comm_abort(c, "no space left on device");
        for (uint32_t i = 0; i + 1 < g->n; i++)
            if (read(g->go[0], &byte, 1) != 1)
                return 2;
        mb_comm_destroy(c);
        return 0;
    }
    if (rc == 0) {
        mb_comm_barrier(c); /* ends with the quitter's words */
        rc = mb_comm_synchronize(c, &err);
    }
    if (rc == 0 || strstr(err.text, "no space left on device") == NULL)
        return 3;
    const int found = mb_comm_find_silent(c, ASK_MS, &silent);
    if (write(g->go[1], "g", 1) != 1)
        return 4;
    mb_comm_destroy(c);
    return found ? 10 + (int)silent : 0;
}

/* Whether the text says that the victim does not answer, and no ill of any other rank. */
static int names(const char *text, uint32_t victim)
{
    static const char *const ILLS[] = {"rank %u does not answer", "rank %u has not come",
                                       "data of rank %u", "rank %u to read"};
    for (uint32_t r = 0; r < MOST; r++) {
        for (size_t i = 0; i < sizeof ILLS / sizeof ILLS[0]; i++) {
            char ill[64];
            snprintf(ill, sizeof ill, ILLS[i], r);
            if ((strstr(text, ill) != NULL) != (i == 0 && r == victim))
                return 0;
        }
    }
    return 1;
}

/* The others hear it before they leave; the victim does when it goes on. */
static int one_is_waited_for(const struct gang *g, uint32_t rank)
{
    enum { N = 1 << 20 };
    static float x[N];
    struct mb_comm *c;
    struct mb_err err;
    char byte;
    if (mb_comm_connect(g->l[rank], g->endpoints, g->n, &c, &err) != 0)
        return 1;
    mb_comm_barrier(c);
    if (mb_comm_synchronize(c, &err) != 0)
        return 2;
    if (rank == g->victim)
        raise(SIGSTOP);
    else if (read(g->go[0], &byte, 1) != 1)
        return 3;
    mb_comm_allreduce(c, NULL, x, N, MB_COMM_F32, MB_COMM_SUM);
    if (mb_comm_synchronize(c, &err) == 0)
        return 4;
    mb_comm_destroy(c);
    if (names(err.text, g->victim))
        return 0;
    fprintf(stderr, "rank %u was stopped, and rank %u says: %s\n", g->victim, rank, err.text);
    return 5;
}

static void start(struct gang *g, uint32_t n, int tcp, uint64_t timeout_ms, rank_fn *body)
{
    struct mb_err err;
    g->n = n;
    assert_int_equal(pipe(g->go), 0);
    for (uint32_t r = 0; r < n; r++) {
        const struct mb_comm_options o = {
            .rank = r, .world_size = n, .timeout_ms = timeout_ms, .no_shared_memory = tcp};
        assert_int_equal(mb_comm_listen(&o, &g->l[r], &err), 0);
        g->endpoints[r] = mb_comm_listener_endpoint(g->l[r]);
    }
    for (uint32_t r = 0; r < n; r++) {
        g->pids[r] = fork();
        assert_true(g->pids[r] >= 0);
        if (g->pids[r] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            _exit(body(g, r));
        }
    }
}

/* The victim has stopped; then the others go on. */
static void let_go(const struct gang *g)
{
    int status;
    assert_int_equal(waitpid(g->pids[g->victim], &status, WUNTRACED), g->pids[g->victim]);
    assert_true(WIFSTOPPED(status));
    for (uint32_t r = 0; r + 1 < g->n; r++)
        assert_int_equal(write(g->go[1], "g", 1), 1);
}

static void assert_ends(const struct gang *g, uint32_t rank)
{
    int status;
    assert_int_equal(waitpid(g->pids[rank], &status, 0), g->pids[rank]);
    assert_int_equal(status, 0);
}

static void assert_others_end_then_the_victim(const struct gang *g)
{
    for (uint32_t r = 0; r < g->n; r++)
        if (r != g->victim)
            assert_ends(g, r);
    kill(g->pids[g->victim], SIGCONT);
    assert_ends(g, g->victim);
}

static void end(struct gang *g)
{
    for (uint32_t r = 0; r < g->n; r++)
        mb_comm_listener_destroy(g->l[r]);
    close(g->go[0]);
    close(g->go[1]);
}

static void a_stopped_process_is_found(void **state)
{
    (void)state;
    for (int tcp = 0; tcp < 2; tcp++) {
        struct gang g = {.victim = 1};
        start(&g, 3, tcp, PATIENCE_MS, one_is_stopped);
        let_go(&g);
        assert_others_end_then_the_victim(&g);
        end(&g);
    }
}

static void who_has_given_up_is_not_silent(void **state)
{
    (void)state;
    for (int tcp = 0; tcp < 2; tcp++) {
        struct gang g = {0};
        start(&g, 3, tcp, PATIENCE_MS, one_gives_up);
        for (uint32_t r = 0; r < g.n; r++)
            assert_ends(&g, r);
        end(&g);
    }
}

/* Each rank of a gang, on both carriers: all gangs at once, as each waits for its timeout. */
static void who_is_waited_for_is_named(void **state)
{
    struct gang gangs[2 * MOST] = {0};
    (void)state;
    for (uint32_t i = 0; i < 2 * MOST; i++) {
        gangs[i].victim = i / 2;
        start(&gangs[i], MOST, i % 2, TIMEOUT_MS, one_is_waited_for);
    }
    for (uint32_t i = 0; i < 2 * MOST; i++)
        let_go(&gangs[i]);
    for (uint32_t i = 0; i < 2 * MOST; i++) {
        assert_others_end_then_the_victim(&gangs[i]);
        end(&gangs[i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_stopped_process_is_found),
                                       cmocka_unit_test(who_has_given_up_is_not_silent),
                                       cmocka_unit_test(who_is_waited_for_is_named)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
