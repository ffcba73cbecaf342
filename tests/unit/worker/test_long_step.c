/* A step that takes long on some rank: the others wait beyond the time-out of an operation,
 * somebody says for whom, and one that stands still ends on all ranks. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "tests/unit/worker/comm_world.h"
#include "worker/parallel/long_step.h"

enum { TIMEOUT_MS = 3000, WORK_MS = 4000, SAY_MS = 20, STALL_MS = 400, RANKS = 3 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int n_said, is_open, has_left;
static char said[MB_LONG_STEP_DOING_MAX + 128];

struct rank {
    struct mb_long_step step;
    uint32_t rank;
    int works, hangs; /* rank 1 does */
    int waits;        /* it hangs, and may for ever */
    int fails;        /* what it returns then */
};

static void note(void *arg, const char *text)
{
    (void)arg;
    pthread_mutex_lock(&lock);
    snprintf(said, sizeof said, "%s", text);
    n_said++;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static int n_times(void)
{
    pthread_mutex_lock(&lock);
    const int n = n_said;
    pthread_mutex_unlock(&lock);
    return n;
}

static int step(void *arg, struct mb_err *err)
{
    struct rank *r = arg;
    volatile unsigned work = 0;
    if (r->rank != 1) {
        return 0;
    }
    mb_long_step_begins(&r->step, "writing", "/cache/x.npy");
    const uint64_t until_ms = mb_mono_ms() + WORK_MS; /* longer than an operation may take */
    while (r->works && (mb_mono_ms() < until_ms || n_times() < 2)) {
        work++;
    }
    pthread_mutex_lock(&lock);
    while ((r->hangs || r->waits) && !is_open) {
        pthread_cond_wait(&changed, &lock);
    }
    const int fails = r->fails; /* the rank is another test's once it is known to have left */
    has_left |= r->hangs || r->waits;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return fails != 0 ? mb_err_set(err, fails, "the disk is full") : 0;
}

static struct rank ranks[RANKS];

static int go(struct mb_comm *c, const struct rank *how, int *hangs, struct mb_err *err)
{
    struct rank *r = &ranks[mb_comm_rank(c)];
    *r = *how;
    r->rank = mb_comm_rank(c);
    r->step = (struct mb_long_step){
        .run = step,
        .arg = r,
        .stall_ms = how->hangs ? STALL_MS : 0,
        .say_ms = SAY_MS,
        .say = how->hangs || how->waits ? NULL : note /* which would wake it */};
    mb_long_step_init(&r->step);
    return mb_long_step_run(c, &r->step, "building", hangs, err);
}

static void run(void (*body)(struct mb_comm *c, void *arg), uint32_t n)
{
    struct comm_world w = {.n = n, .timeout_ms = TIMEOUT_MS, .body = body};
    n_said = is_open = has_left = 0;
    said[0] = '\0';
    assert_int_equal(comm_world_run(&w), 0);
    assert_int_equal(atomic_load(&comm_world_wrong), 0);
}

static void works_long(struct mb_comm *c, void *arg)
{
    struct mb_err err = {0};
    int hangs = 1;
    (void)arg;
    CHECK(go(c, &(struct rank){.works = 1}, &hangs, &err) == 0);
    CHECK(!hangs);
    CHECK(go(c, &(struct rank){.works = 0}, &hangs, &err) == 0); /* and another */
    mb_long_step_close(&ranks[mb_comm_rank(c)].step);
}

static void the_others_wait_and_say_for_whom(void **state)
{
    (void)state;
    run(works_long, RANKS);
    assert_true(n_said >= 2);
    assert_non_null(strstr(said, "waiting for rank 1, "));
    assert_non_null(strstr(said, "s so far: writing /cache/x.npy"));
    run(works_long, 1);
}

/* Of rank 1, whose step was left alone: it goes by itself, and frees what it shares. */
static void let_go(void)
{
    pthread_mutex_lock(&lock);
    is_open = 1;
    pthread_cond_broadcast(&changed);
    while (!has_left) {
        pthread_cond_wait(&changed, &lock);
    }
    pthread_mutex_unlock(&lock);
    while (!comm_world_is_alone()) {
    }
}

static void hangs_for_good(struct mb_comm *c, void *arg)
{
    struct mb_err err = {0};
    int hangs = -1;
    (void)arg;
    CHECK(go(c, &(struct rank){.hangs = 1}, &hangs, &err) == MB_ETIMEOUT);
    CHECK(hangs == (mb_comm_rank(c) == 1));
    CHECK(strstr(err.text, "building: rank 1 stands still for ") != NULL);
    CHECK(strstr(err.text, ": writing /cache/x.npy") != NULL);
}

static void one_that_stands_still_ends(void **state)
{
    (void)state;
    run(hangs_for_good, RANKS);
    let_go();
}

static void fails(struct mb_comm *c, void *arg)
{
    struct mb_err err = {0};
    int hangs = -1;
    (void)arg;
    const int rc = go(c, &(struct rank){.fails = MB_EINVAL}, &hangs, &err);
    CHECK(!hangs);
    if (mb_comm_rank(c) == 1) {
        CHECK(rc == MB_EINVAL && strcmp(err.text, "the disk is full") == 0);
        mb_comm_abort(c, err.text);
    } else {
        CHECK(rc == MB_EUNAVAIL && strstr(err.text, "rank 1 gave up") != NULL);
    }
}

static void a_failure_is_everybodys(void **state)
{
    (void)state;
    run(fails, RANKS);
}

/* Rank 2 gives up while rank 1 has work for as long as nobody stops it. */
static void dies_while_another_works(struct mb_comm *c, void *arg)
{
    struct mb_err err = {0};
    int hangs = -1;
    (void)arg;
    if (mb_comm_rank(c) == 2) {
        mb_comm_abort(c, "the node is lost");
        return;
    }
    CHECK(go(c, &(struct rank){.waits = 1}, &hangs, &err) == MB_EUNAVAIL);
    CHECK(hangs == (mb_comm_rank(c) == 1));
    CHECK(strstr(err.text, "the node is lost") != NULL);
}

static void the_end_of_one_ends_who_works(void **state)
{
    (void)state;
    run(dies_while_another_works, RANKS);
    let_go();
}

static void no_memory(struct mb_comm *c, void *arg)
{
    struct mb_err err = {0};
    int hangs = -1;
    (void)arg;
    mb_alloc_fail_nth(1);
    CHECK(go(c, &(struct rank){.fails = 0}, &hangs, &err) == MB_ENOMEM);
    mb_alloc_fail_nth(0);
    CHECK(!hangs);
}

static void memory_may_run_out(void **state)
{
    (void)state;
    run(no_memory, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_others_wait_and_say_for_whom),
        cmocka_unit_test(one_that_stands_still_ends),
        cmocka_unit_test(a_failure_is_everybodys),
        cmocka_unit_test(the_end_of_one_ends_who_works),
        cmocka_unit_test(memory_may_run_out),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
