/* The pure parts of the supervisor: spec and state files, messages, and the plan of ending. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "agent/supervise/file.h"
#include "agent/supervise/plan.h"
#include "agent/supervise/protocol.h"
#include "agent/supervise/spec.h"
#include "agent/supervise/state.h"

struct dir {
    char path[64];
    char spec[80];
    int fd;
};

static int make_dir(void **state)
{
    static struct dir d;

    strcpy(d.path, "/tmp/mobula-supervise-XXXXXX");
    if (mkdtemp(d.path) == NULL)
        return -1;
    snprintf(d.spec, sizeof(d.spec), "%s/spec", d.path);
    d.fd = open(d.path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    *state = &d;
    return d.fd < 0;
}

static int remove_dir(void **state)
{
    struct dir *d = *state;

    unlink(d->spec);
    unlinkat(d->fd, MB_SUP_STATE_FILE, 0);
    close(d->fd);
    return rmdir(d->path);
}

static const char *const argv_two_lines[] = {"/bin/echo", "two\nlines", "", NULL};
static const char *const env_one[] = {"A=1 2", NULL};
static const char *const env_none[] = {NULL};

static void test_spec_round_trip(void **state)
{
    struct dir *d = *state;
    struct mb_sup_child children[] = {
        {.argv = argv_two_lines, .env = env_one, .cwd = "/tmp", .log_path = "/tmp/l0"},
        {.argv = argv_two_lines + 1, .env = env_none, .log_path = "/tmp/l1", .want_report = 1}};
    struct mb_sup_spec in = {.dir = d->path,
                             .stop_signal = SIGINT,
                             .stop_grace_ms = 30000,
                             .end_peers_after_ms = -1,
                             .end_peers_grace_ms = 7,
                             .leftover_grace_ms = 9,
                             .n_children = 2,
                             .children = children};
    struct mb_sup_spec out;
    char text[MB_SUP_TEXT_MAX];

    assert_int_equal(mb_sup_spec_write(&in, d->spec, text), 0);
    assert_int_equal(mb_sup_spec_read(d->spec, &out, text), 0);
    assert_string_equal(out.dir, d->path);
    assert_int_equal(out.stop_signal, SIGINT);
    assert_int_equal(out.stop_grace_ms, 30000);
    assert_int_equal(out.end_peers_after_ms, -1);
    assert_int_equal(out.end_peers_grace_ms, 7);
    assert_int_equal(out.leftover_grace_ms, 9);
    assert_int_equal(out.n_children, 2);
    assert_string_equal(out.children[0].argv[1], "two\nlines");
    assert_string_equal(out.children[0].argv[2], "");
    assert_null(out.children[0].argv[3]);
    assert_string_equal(out.children[0].env[0], "A=1 2");
    assert_null(out.children[0].env[1]);
    assert_string_equal(out.children[0].cwd, "/tmp");
    assert_null(out.children[1].cwd);
    assert_null(out.children[1].env[0]);
    assert_string_equal(out.children[1].argv[0], "two\nlines");
    assert_string_equal(out.children[1].log_path, "/tmp/l1");
    assert_true(out.children[1].want_report);
    mb_sup_spec_close(&out);
}

/* Every cut of a good file, and every byte of it changed, is either read or refused; never worse.
 */
static void test_spec_survives_damage(void **state)
{
    struct dir *d = *state;
    struct mb_sup_child child = {.argv = argv_two_lines, .env = env_one, .log_path = "/l"};
    struct mb_sup_spec in = {
        .dir = "/d", .stop_signal = SIGTERM, .n_children = 1, .children = &child};
    struct mb_sup_spec out;
    char text[MB_SUP_TEXT_MAX];
    char *good;
    size_t n;

    assert_int_equal(mb_sup_spec_write(&in, d->spec, text), 0);
    good = mb_file_read(d->fd, "spec", 1 << 20, &n);
    assert_non_null(good);
    for (size_t cut = 0; cut < n; cut++) {
        unlink(d->spec);
        assert_int_equal(mb_file_replace(d->fd, "spec", good, cut, 1), 0);
        if (mb_sup_spec_read(d->spec, &out, text) == 0)
            mb_sup_spec_close(&out);
    }
    for (size_t at = 0; at < n; at += 3) {
        char kept = good[at];

        good[at] = '9';
        assert_int_equal(mb_file_replace(d->fd, "spec", good, n, 1), 0);
        if (mb_sup_spec_read(d->spec, &out, text) == 0)
            mb_sup_spec_close(&out);
        good[at] = kept;
    }
    free(good);
}

static void test_spec_refusals_name_the_cause(void **state)
{
    struct dir *d = *state;
    struct mb_sup_spec out;
    char text[MB_SUP_TEXT_MAX];
    static const char bad_key[] = "mobula-supervise 1\ndir 2\n/d\nbogus 1\nx\nchild 0\n\narg 1\na\n"
                                  "log 2\n/l\n";

    assert_int_equal(mb_sup_spec_read(d->spec, &out, text), -1);
    assert_non_null(strstr(text, "No such file"));
    assert_int_equal(mb_file_replace(d->fd, "spec", bad_key, sizeof(bad_key) - 1, 1), 0);
    assert_int_equal(mb_sup_spec_read(d->spec, &out, text), -1);
    assert_non_null(strstr(text, "\"bogus\""));
}

static void test_state_round_trip(void **state)
{
    struct dir *d = *state;
    static struct mb_sup_state in, out;
    char text[MB_SUP_TEXT_MAX];

    in.supervisor_pid = 12;
    in.supervisor_ticks = 34;
    in.n_children = 3;
    in.children[0] = (struct mb_sup_child_state){MB_SUP_RUNNING, 5, 6, 0, 0};
    in.children[1] = (struct mb_sup_child_state){MB_SUP_EXITED, 7, 8, 0, 9};
    in.children[2] = (struct mb_sup_child_state){MB_SUP_FAILED, 0, 0, 127, 0};
    in.all_exited = 1;
    strcpy(in.reason, "child 1 failed");
    assert_int_equal(mb_sup_state_write(&in, d->fd, text), 0);
    assert_int_equal(mb_sup_state_read(d->fd, &out, text), 0);
    assert_memory_equal(&in, &out, sizeof(in));
    assert_int_equal(mb_file_replace(d->fd, MB_SUP_STATE_FILE, "junk\n", 5, 1), 0);
    assert_int_equal(mb_sup_state_read(d->fd, &out, text), -1);
}

static void test_start_ticks_name_a_process(void **state)
{
    (void)state;
    assert_true(mb_sup_start_ticks(getpid()) > 0);
    assert_int_equal(mb_sup_start_ticks(getpid()), mb_sup_start_ticks(getpid()));
    assert_true(mb_sup_is_running(getpid(), mb_sup_start_ticks(getpid())));
    assert_false(mb_sup_is_running(getpid(), mb_sup_start_ticks(getpid()) + 1));
    assert_int_equal(mb_sup_start_ticks(1 << 30), 0);
    assert_false(mb_sup_is_running(1 << 30, 0));
}

static void test_messages_round_trip(void **state)
{
    static const struct mb_sup_msg all[] = {
        {.type = MB_SUP_MSG_HELLO, .version = 1, .pid = 42, .ticks = 77, .child = 3},
        {.type = MB_SUP_MSG_STARTED, .child = 2, .pid = 1234567, .ticks = 8},
        {.type = MB_SUP_MSG_START_FAILED, .child = 1, .text = "cannot run x: No such file"},
        {.type = MB_SUP_MSG_EXIT, .child = 255, .code = 3},
        {.type = MB_SUP_MSG_EXIT, .child = 0, .signal = 9},
        {.type = MB_SUP_MSG_ENDING, .text = "stop requested"},
        {.type = MB_SUP_MSG_ALL_EXITED, .text = ""},
        {.type = MB_SUP_MSG_ALL_EXITED, .text = "child 3 failed"},
        {.type = MB_SUP_MSG_REPLAYED},
        {.type = MB_SUP_MSG_FD, .child = 7},
        {.type = MB_SUP_MSG_FDS},
        {.type = MB_SUP_MSG_STOP, .grace_ms = 30000, .signal = SIGTERM},
        {.type = MB_SUP_MSG_KILL},
        {.type = MB_SUP_MSG_RELEASE}};
    static const char *const bad[] = {"",       "hello",      "hello 1 2 3",   "exit 1 2",
                                      "exitx",  "fd",         "fd 1 more",     "stop 1 2 3",
                                      "killed", "release me", "started 1 2 x", "failed 1"};
    char packet[MB_SUP_PACKET_MAX];
    struct mb_sup_msg m;

    (void)state;
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        size_t n = mb_sup_msg_format(&all[i], packet);

        assert_int_equal(mb_sup_msg_parse(packet, n, &m), 0);
        assert_memory_equal(&m, &all[i], sizeof(m));
    }
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(mb_sup_msg_parse(bad[i], strlen(bad[i]), &m), -1);
    assert_int_equal(mb_sup_msg_parse("kill\0", 5, &m), -1);
}

/* ---- the plan ---- */

static struct mb_sup_plan plan_of(const struct mb_sup_spec *spec)
{
    struct mb_sup_plan plan;

    mb_sup_plan_init(&plan, spec);
    return plan;
}

static void test_plan_stop_signals_once_then_kills_until_nothing_is_left(void **state)
{
    struct mb_sup_spec spec = {.stop_signal = SIGTERM, .n_children = 1, .end_peers_after_ms = -1};
    struct mb_sup_plan plan = plan_of(&spec);

    (void)state;
    assert_int_equal(mb_sup_plan_tick(&plan, 50), MB_SUP_ACT_NONE);
    assert_true(mb_sup_plan_next_ms(&plan) == UINT64_MAX);
    mb_sup_plan_stop(&plan, "stop requested", SIGINT, 1000, 100);
    assert_int_equal(mb_sup_plan_tick(&plan, 100), MB_SUP_ACT_SIGNAL);
    assert_int_equal(plan.signal, SIGINT);
    assert_int_equal(mb_sup_plan_tick(&plan, 101), MB_SUP_ACT_NONE);
    assert_int_equal(mb_sup_plan_next_ms(&plan), 1100);
    assert_int_equal(mb_sup_plan_tick(&plan, 1100), MB_SUP_ACT_KILL);
    assert_int_equal(mb_sup_plan_tick(&plan, 1101), MB_SUP_ACT_NONE);
    assert_int_equal(mb_sup_plan_tick(&plan, 1100 + MB_SUP_KILL_AGAIN_MS), MB_SUP_ACT_KILL);
    mb_sup_plan_nothing_left(&plan);
    assert_int_equal(mb_sup_plan_tick(&plan, 9999), MB_SUP_ACT_NONE);
    assert_string_equal(plan.reason, "stop requested");
}

static void test_plan_second_stop_only_shortens(void **state)
{
    struct mb_sup_spec spec = {.stop_signal = SIGTERM, .n_children = 1, .end_peers_after_ms = -1};
    struct mb_sup_plan plan = plan_of(&spec);

    (void)state;
    mb_sup_plan_stop(&plan, "a", 0, 1000, 0);
    mb_sup_plan_stop(&plan, "b", 0, 5000, 0);
    mb_sup_plan_leftovers(&plan, 0); /* keeps the grace of the stop */
    assert_int_equal(plan.kill_at_ms, 1000);
    mb_sup_plan_stop(&plan, "c", 0, 10, 100);
    assert_int_equal(plan.kill_at_ms, 110);
    assert_string_equal(plan.reason, "a");
    mb_sup_plan_kill(&plan, "d", 105);
    assert_int_equal(mb_sup_plan_tick(&plan, 105), MB_SUP_ACT_KILL);
}

static void test_plan_failed_child_ends_peers_once(void **state)
{
    struct mb_sup_spec spec = {.stop_signal = SIGTERM,
                               .n_children = 4,
                               .end_peers_after_ms = 200,
                               .end_peers_grace_ms = 300};
    struct mb_sup_plan plan = plan_of(&spec);

    (void)state;
    mb_sup_plan_child_failed(&plan, 2, 1000);
    mb_sup_plan_child_failed(&plan, 3, 1100);
    assert_string_equal(plan.reason, "child 2 failed");
    assert_int_equal(mb_sup_plan_next_ms(&plan), 1200);
    assert_int_equal(mb_sup_plan_tick(&plan, 1199), MB_SUP_ACT_NONE);
    assert_int_equal(mb_sup_plan_tick(&plan, 1200), MB_SUP_ACT_SIGNAL);
    assert_int_equal(mb_sup_plan_next_ms(&plan), 1500);
    assert_int_equal(mb_sup_plan_tick(&plan, 1500), MB_SUP_ACT_KILL);
}

static void test_plan_without_policy_lets_peers_go_on(void **state)
{
    struct mb_sup_spec spec = {.stop_signal = SIGTERM, .n_children = 4, .end_peers_after_ms = -1};
    struct mb_sup_plan plan = plan_of(&spec);

    (void)state;
    mb_sup_plan_child_failed(&plan, 2, 1000);
    assert_int_equal(mb_sup_plan_tick(&plan, UINT64_MAX - 1), MB_SUP_ACT_NONE);
    assert_string_equal(plan.reason, "");
}

/* However long it took: what got the signal has its grace. */
static void test_plan_grace_counts_from_the_signal(void **state)
{
    struct mb_sup_spec spec = {.stop_signal = SIGTERM, .n_children = 1, .end_peers_after_ms = -1};
    struct mb_sup_plan plan = plan_of(&spec);

    (void)state;
    mb_sup_plan_stop(&plan, "a", 0, 200, 100);
    assert_int_equal(mb_sup_plan_tick(&plan, 100), MB_SUP_ACT_SIGNAL);
    mb_sup_plan_signalled(&plan, 500);
    assert_int_equal(mb_sup_plan_tick(&plan, 500), MB_SUP_ACT_NONE);
    assert_int_equal(mb_sup_plan_next_ms(&plan), 700);
    mb_sup_plan_stop(&plan, "b", 0, 100, 550); /* a second one shortens as before */
    assert_int_equal(mb_sup_plan_tick(&plan, 650), MB_SUP_ACT_KILL);
    mb_sup_plan_signalled(&plan, 9999);
    assert_int_equal(mb_sup_plan_next_ms(&plan), 650 + MB_SUP_KILL_AGAIN_MS);
}

static void test_plan_a_signal_that_failed_is_sent_again(void **state)
{
    struct mb_sup_spec spec = {.stop_signal = SIGTERM, .n_children = 1, .end_peers_after_ms = -1};
    struct mb_sup_plan plan = plan_of(&spec);
    uint64_t again_ms = 100 + MB_SUP_KILL_AGAIN_MS;

    (void)state;
    mb_sup_plan_stop(&plan, "a", 0, 1000, 100);
    assert_int_equal(mb_sup_plan_tick(&plan, 100), MB_SUP_ACT_SIGNAL);
    mb_sup_plan_signal_failed(&plan, 100);
    assert_int_equal(mb_sup_plan_next_ms(&plan), again_ms);
    assert_int_equal(mb_sup_plan_tick(&plan, again_ms - 1), MB_SUP_ACT_NONE);
    assert_int_equal(mb_sup_plan_tick(&plan, again_ms), MB_SUP_ACT_SIGNAL);
    assert_int_equal(mb_sup_plan_next_ms(&plan), 1100);
    mb_sup_plan_signal_failed(&plan, 1095);
    assert_int_equal(mb_sup_plan_next_ms(&plan), 1100);
    assert_int_equal(mb_sup_plan_tick(&plan, 1100), MB_SUP_ACT_KILL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_spec_round_trip, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_spec_survives_damage, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_spec_refusals_name_the_cause, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_state_round_trip, make_dir, remove_dir),
        cmocka_unit_test(test_start_ticks_name_a_process),
        cmocka_unit_test(test_messages_round_trip),
        cmocka_unit_test(test_plan_stop_signals_once_then_kills_until_nothing_is_left),
        cmocka_unit_test(test_plan_second_stop_only_shortens),
        cmocka_unit_test(test_plan_failed_child_ends_peers_once),
        cmocka_unit_test(test_plan_without_policy_lets_peers_go_on),
        cmocka_unit_test(test_plan_grace_counts_from_the_signal),
        cmocka_unit_test(test_plan_a_signal_that_failed_is_sent_again),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
