/* Finding and ending the nodes of this machine, and what lost its owner. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include "agent/supervise/state.h"
#include "base/fs.h"
#include "cli/local.h"

static char dir[64], node_dir[96];

static int make_dir(void **state)
{
    (void)state;
    strcpy(dir, "/tmp/mobula-local-XXXXXX");
    if (mkdtemp(dir) == NULL)
        return -1;
    snprintf(node_dir, sizeof(node_dir), "%s/node_00000001", dir);
    return mb_fs_mkdir_p(node_dir, 0700, NULL);
}

static int remove_dir(void **state)
{
    (void)state;
    return mb_fs_remove_tree(dir, NULL);
}

/* A process that waits in its own session; deaf: it ignores SIGTERM. */
static pid_t start_process(int deaf)
{
    int ready[2];
    char c;
    pid_t pid;

    assert_int_equal(pipe(ready), 0);
    pid = fork();
    if (pid == 0) {
        setsid();
        if (deaf)
            signal(SIGTERM, SIG_IGN);
        close(ready[0]);
        if (write(ready[1], "x", 1) != 1)
            _exit(1);
        for (;;)
            pause();
    }
    close(ready[1]);
    assert_int_equal(read(ready[0], &c, 1), 1);
    close(ready[0]);
    return pid;
}

static void write_pid_file(int64_t pid, uint64_t ticks)
{
    char path[128], text[64];
    int n = snprintf(text, sizeof(text), "%lld %llu\n", (long long)pid, (unsigned long long)ticks);

    snprintf(path, sizeof(path), "%s/init.pid", node_dir);
    assert_int_equal(mb_fs_write_atomic(path, text, (size_t)n, 0600, NULL), 0);
}

static int end_signal(pid_t pid)
{
    int status = 0;

    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

static void test_a_running_node_is_found_and_ended(void **state)
{
    pid_t pid = start_process(0);
    struct mb_local_node *nodes;
    struct mb_err err;
    size_t n;

    (void)state;
    write_pid_file(pid, mb_sup_start_ticks(pid));
    assert_int_equal(mb_local_nodes(dir, &nodes, &n, &err), 0);
    assert_int_equal(n, 1);
    assert_string_equal(nodes[0].dir, node_dir);
    assert_int_equal(mb_local_ask_to_end(&nodes[0], 0, &err), 0);
    assert_int_equal(mb_local_wait_end(&nodes[0], 30000, &err), 0);
    assert_int_equal(end_signal(pid), SIGTERM);
    assert_int_equal(mb_local_ask_to_end(&nodes[0], 0, &err), 0);
    assert_int_equal(mb_local_wait_end(&nodes[0], 30000, &err), 0);
    mb_local_nodes_free(nodes, n);
}

static void test_a_reused_pid_is_no_node(void **state)
{
    struct mb_local_node *nodes, node = {.dir = node_dir, .init_pid = getpid(), .init_ticks = 1};
    struct mb_err err;
    size_t n;

    (void)state;
    write_pid_file(getpid(), mb_sup_start_ticks(getpid()) + 1);
    assert_int_equal(mb_local_nodes(dir, &nodes, &n, &err), 0);
    assert_int_equal(n, 0);
    assert_int_equal(mb_local_ask_to_end(&node, 5000, &err), 0); /* and we are not signalled */
    assert_int_equal(mb_local_nodes("/nonexistent/dir", &nodes, &n, &err), 0);
    assert_int_equal(n, 0);
}

static void test_a_temp_dir_that_others_rule_is_refused(void **state)
{
    char link[128];
    struct mb_err err;

    (void)state;
    assert_int_equal(mb_local_check_owner(node_dir, &err), 0);
    assert_int_equal(chmod(node_dir, 0777), 0);
    assert_int_equal(mb_local_check_owner(node_dir, &err), MB_EDENIED);
    assert_int_equal(chmod(node_dir, 01777), 0);
    assert_int_equal(mb_local_check_owner(node_dir, &err), 0);
    assert_int_equal(chmod(node_dir, 0755), 0);
    snprintf(link, sizeof(link), "%s/link", dir);
    assert_int_equal(symlink(node_dir, link), 0);
    assert_int_equal(mb_local_check_owner(link, &err), MB_EDENIED);
    if (geteuid() == 0) { /* only root can give a directory away */
        assert_int_equal(chown(node_dir, 65534, 65534), 0);
        assert_int_equal(mb_local_check_owner(node_dir, &err), MB_EDENIED);
        assert_non_null(strstr(err.text, "--temp-dir"));
    }
}

static void write_state(const char *attempt, pid_t supervisor, uint64_t ticks, pid_t child)
{
    static struct mb_sup_state s;
    char path[160], text[MB_SUP_TEXT_MAX];
    int fd;

    memset(&s, 0, sizeof(s));
    s.supervisor_pid = supervisor;
    s.supervisor_ticks = ticks;
    s.n_children = 1;
    s.children[0] =
        (struct mb_sup_child_state){MB_SUP_RUNNING, child, mb_sup_start_ticks(child), 0, 0};
    snprintf(path, sizeof(path), "%s/%s", node_dir, attempt);
    assert_int_equal(mb_fs_mkdir_p(path, 0700, NULL), 0);
    fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    assert_int_equal(mb_sup_state_write(&s, fd, text), 0);
    close(fd);
}

static void test_only_what_nobody_owns_is_killed(void **state)
{
    pid_t orphan = start_process(1), owned = start_process(0);
    struct mb_err err;
    size_t n;

    (void)state;
    write_state("gangs/a-1", getpid(), 1, orphan);
    write_state("jobs/b", getpid(), mb_sup_start_ticks(getpid()), owned);
    assert_int_equal(mb_local_end_orphans(dir, &n, &err), 0);
    assert_int_equal(n, 1);
    assert_int_equal(end_signal(orphan), SIGKILL);
    assert_int_equal(kill(owned, SIGTERM), 0);
    assert_int_equal(end_signal(owned), SIGTERM);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_running_node_is_found_and_ended, make_dir,
                                        remove_dir),
        cmocka_unit_test_setup_teardown(test_a_temp_dir_that_others_rule_is_refused, make_dir,
                                        remove_dir),
        cmocka_unit_test_setup_teardown(test_a_reused_pid_is_no_node, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_only_what_nobody_owns_is_killed, make_dir, remove_dir),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
