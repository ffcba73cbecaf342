/* What was unpacked for jobs that have ended: who holds it, when it goes. Real processes. */
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
#include <sys/wait.h>
#include <unistd.h>
#include "agent/job_packages.h"
#include "agent/job_unpacked.h"
#include "agent/supervise/state.h"
#include "base/fs.h"
#include "base/str.h"
#include "base/alloc.h"

enum { DEADLINE_MS = 60000 };

static uv_loop_t loop;
static struct mb_job_forget forget;
static struct mb_job_unpacked unpacked;
static char node_dir[64], temp_dir[32];
static const char *live; /* an id whose driver runs again */

static const char *path_of(const char *format, const char *id)
{
    static char path[4][300];
    static unsigned turn;
    char *out = path[turn++ % 4];
    int n = snprintf(out, 300, "%s/", node_dir);

    snprintf(out + n, 300 - (size_t)n, format, id);
    return out;
}

static void write_text(const char *path, const char *text)
{
    struct mb_err err = {0};

    if (mb_fs_write_atomic(path, text, strlen(text), 0600, &err) != 0)
        fail_msg("%s", err.text);
}

/* As a job leaves them: a tree, modules, and what no removal may touch. */
static void make_job(const char *id)
{
    assert_int_equal(mb_fs_mkdir_p(path_of("jobs/%s/working_dir/a/b", id), 0755, NULL), 0);
    assert_int_equal(mb_fs_mkdir_p(path_of("jobs/%s/py_modules/1", id), 0755, NULL), 0);
    write_text(path_of("jobs/%s/working_dir/a/b/data", id), "1");
    write_text(path_of("jobs/%s/package-0", id), "fetched");
    write_text(path_of("jobs/%s/log_url", id), "s3://b");
}

static int is_there(const char *id)
{
    return mb_job_packages_are_in(path_of("jobs/%s", id));
}

static int is_live(void *arg, const char *id)
{
    (void)arg;
    return live != NULL && strcmp(live, id) == 0;
}

static void on_idle(void *arg)
{
    (void)arg;
}

static void on_deadline(uv_timer_t *timer)
{
    (void)timer;
    print_error("deadline\n");
    _exit(65);
}

static int nothing_is_forgotten(const char *id)
{
    char *command = mb_asprintf("[ -z \"$(ls -A %s/forgotten 2>/dev/null)\" ]", node_dir);
    int rc = system(command); /* NOLINT(cert-env33-c): a test */

    (void)id;
    mb_free(command);
    return rc == 0;
}

static int is_gone(const char *id)
{
    return !is_there(id);
}

static void run_until(int (*fact)(const char *id), const char *id)
{
    uv_timer_t deadline;

    uv_timer_init(&loop, &deadline);
    uv_timer_start(&deadline, on_deadline, DEADLINE_MS, 0);
    while (!fact(id)) {
        uv_run(&loop, UV_RUN_NOWAIT);
        usleep(2000);
    }
    uv_close((uv_handle_t *)&deadline, NULL);
    uv_run(&loop, UV_RUN_NOWAIT);
}

/* After this every job that had ended before it was looked at. */
static void run_a_whole_look(void)
{
    static unsigned n;
    char id[32];

    snprintf(id, sizeof(id), "marker-%u", n++);
    make_job(id);
    mb_job_unpacked_ended(&unpacked, id, 0, 0);
    run_until(is_gone, id);
}

static void open_all(void)
{
    struct mb_job_unpacked_opts opts = {.loop = &loop,
                                        .node_dir = node_dir,
                                        .forget = &forget,
                                        .is_live = is_live,
                                        .on_closed = on_idle};
    struct mb_err err;

    assert_int_equal(mb_job_forget_init(&forget, &loop, node_dir, on_idle, NULL, &err), 0);
    mb_job_unpacked_init(&unpacked, &opts);
}

static int is_closed(const char *id)
{
    (void)id;
    return unpacked.is_closed && !forget.busy;
}

static void close_all(void)
{
    forget.closing = 1;
    mb_job_unpacked_close(&unpacked);
    run_until(is_closed, NULL);
    mb_job_unpacked_free(&unpacked);
    mb_job_forget_close(&forget);
}

static int setup(void **state)
{
    (void)state;
    snprintf(temp_dir, sizeof(temp_dir), "/tmp/mb-unpacked-XXXXXX");
    if (mkdtemp(temp_dir) == NULL)
        return -1;
    snprintf(node_dir, sizeof(node_dir), "%s/node_0", temp_dir);
    live = NULL;
    uv_loop_init(&loop);
    if (mb_fs_mkdir_p(node_dir, 0700, NULL) != 0)
        return -1;
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    uv_run(&loop, UV_RUN_DEFAULT); /* what was left behind */
    if (uv_loop_close(&loop) != 0)
        return -1;
    return mb_fs_remove_tree(temp_dir, NULL);
}

/* ---- processes ---- */

enum hold { BY_DIRECTORY, BY_FILE, BY_ENVIRONMENT };

/* One that execs, for its environment to be what /proc shows; it is there when this returns. */
static pid_t start_holder(const char *id, enum hold how)
{
    int ready[2];
    char byte, *path = NULL;
    pid_t pid;

    assert_int_equal(pipe(ready), 0);
    if (how == BY_ENVIRONMENT)
        path = mb_asprintf("PYTHONPATH=/elsewhere:%s:/more", path_of("jobs/%s/py_modules/1", id));
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        char *env[] = {path, NULL};
        char *argv[] = {"sh", "-c", "echo; exec sleep 1000", NULL};

        if ((how == BY_DIRECTORY && chdir(path_of("jobs/%s/working_dir/a", id)) != 0) ||
            (how == BY_FILE && open(path_of("jobs/%s/working_dir/a/b/data", id), O_RDONLY) < 0) ||
            dup2(ready[1], 1) < 0)
            _exit(1);
        execve("/bin/sh", argv, env);
        _exit(1);
    }
    close(ready[1]);
    assert_int_equal(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    mb_free(path);
    return pid;
}

static void end_holder(pid_t pid)
{
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
}

static void goes_at_once_and_no_more_than_that(void **state)
{
    (void)state;
    open_all();
    make_job("j1");
    mb_job_unpacked_ended(&unpacked, "j1", 1, 30000);
    run_until(is_gone, "j1");
    assert_true(mb_fs_exists(path_of("jobs/%s/log_url", "j1")));
    run_until(nothing_is_forgotten, NULL);
    mb_job_unpacked_ended(&unpacked, "j1", 0, 0); /* nothing is left: nothing to do */
    mb_job_unpacked_ended(&unpacked, "never", 0, 0);
    assert_null(unpacked.list);
    close_all();
}

static void stays_while_a_process_uses_it(void **state)
{
    (void)state;
    for (int how = BY_DIRECTORY; how <= BY_ENVIRONMENT; how++) {
        pid_t pid;

        open_all();
        make_job("held");
        make_job("held-not"); /* its id begins as the other's does */
        pid = start_holder("held", (enum hold)how);
        mb_job_unpacked_ended(&unpacked, "held", 0, 0);
        mb_job_unpacked_ended(&unpacked, "held-not", 0, 0);
        run_until(is_gone, "held-not");
        run_a_whole_look();
        assert_true(is_there("held"));
        end_holder(pid);
        run_until(is_gone, "held");
        close_all();
    }
}

/* ---- gangs ---- */

static void write_gang(const char *node, const char *state, const char *job_id, const char *dir,
                       const char *url)
{
    char *gang = mb_asprintf("%s/%s/gangs/g-1", temp_dir, node);
    char *file = mb_path_join(gang, "gang.json");
    char *text = mb_asprintf("{\"state\": \"%s\", \"job_id\": \"%s\", \"checkpoint\": "
                             "{\"local_dir\": \"%s\", \"url\": \"%s\"}}",
                             state, job_id, dir, url);

    assert_int_equal(mb_fs_mkdir_p(gang, 0700, NULL), 0);
    write_text(file, text);
    mb_free(text);
    mb_free(file);
    mb_free(gang);
}

static void write_state(const char *id, int64_t supervisor, int all_exited, int sig)
{
    static struct mb_sup_state state;
    char text[MB_SUP_TEXT_MAX];
    int fd = open(path_of("jobs/%s", id), O_RDONLY | O_DIRECTORY);

    state = (struct mb_sup_state){.supervisor_pid = supervisor,
                                  .supervisor_ticks = mb_sup_start_ticks(supervisor),
                                  .n_children = 1,
                                  .all_exited = all_exited};
    state.children[0] = (struct mb_sup_child_state){
        .phase = all_exited ? MB_SUP_EXITED : MB_SUP_RUNNING, .pid = 1, .signal = sig};
    assert_int_equal(mb_sup_state_write(&state, fd, text), 0);
    close(fd);
}

/* Also on another node of the machine. */
static void stays_while_a_gang_has_not_ended(void **state)
{
    (void)state;
    open_all();
    for (int other = 0; other < 2; other++) {
        const char *node = other ? "node_1" : "node_0";

        make_job("gang");
        write_gang(node, "DRAINING", "gang", "/elsewhere", "s3://b");
        mb_job_unpacked_ended(&unpacked, "gang", 1, 0);
        run_a_whole_look();
        assert_true(is_there("gang"));
        write_gang(node, "ENDED", "gang", "/elsewhere", "s3://b");
        run_until(is_gone, "gang");
    }
    close_all();
}

static void forget_gangs(void)
{
    for (int i = 0; i < 2; i++) {
        char *gangs = mb_asprintf("%s/node_%d/gangs", temp_dir, i);

        assert_int_equal(mb_fs_remove_tree(gangs, NULL), 0);
        mb_free(gangs);
    }
}

static void link_to(const char *target, const char *name)
{
    unlink(name);
    assert_int_equal(symlink(target, name), 0);
}

/* Whatever the driver's code says, also when the gang's record went long before the next agent. */
static void stays_with_checkpoints_or_their_store(void **state)
{
    static const struct {
        const char *node, *gang_state, *dir, *url; /* % is the job's directory */
        int code, stays;
    } cases[] = {
        {"node_0", "ENDED", "%/working_dir/a", "", 0, 1},
        {"node_0", "ENDED", "%/working_dir/a", "s3://b", 1, 1},
        {"node_0", "ENDED", "%/working_dir/a", "s3://b", 0, 1},
        {"node_1", "RUNNING", "%/working_dir/a", "s3://b", 0, 1},
        {"node_0", "ENDED", "/elsewhere", "file://%/working_dir/store", 0, 1},
        {"node_0", "ENDED", "/elsewhere", "%/working_dir/store", 0, 1},
        {"node_0", "ENDED", "/elsewhere", "file:///LINK/a", 0, 1},
        {"node_0", "ENDED", "/LINK/a", "s3://b", 0, 1},
        {"node_0", "ENDED", "%-not/working_dir/a", "file://%-not/a", 0, 0},
        {"node_0", "ENDED", "/elsewhere", "s3://%/working_dir/a", 0, 0},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const char *texts[2] = {cases[i].dir, cases[i].url};
        char filled[2][400], job[300];

        snprintf(job, sizeof(job), "%s", path_of("jobs/%s", "saved"));
        open_all();
        make_job("saved");
        link_to(path_of("jobs/%s/working_dir", "saved"), path_of("%s", "link"));
        for (int k = 0; k < 2; k++) {
            const char *mark = strchr(texts[k], '%'), *at = strstr(texts[k], "/LINK");

            if (mark != NULL)
                snprintf(filled[k], sizeof(filled[k]), "%.*s%s%s", (int)(mark - texts[k]), texts[k],
                         job, mark + 1);
            else if (at != NULL)
                snprintf(filled[k], sizeof(filled[k]), "%.*s%s/link%s", (int)(at - texts[k]),
                         texts[k], node_dir, at + 5);
            else
                snprintf(filled[k], sizeof(filled[k]), "%s", texts[k]);
        }
        write_gang(cases[i].node, cases[i].gang_state, "another", filled[0], filled[1]);
        mb_job_unpacked_ended(&unpacked, "saved", cases[i].code, 0);
        run_a_whole_look();
        assert_int_equal(is_there("saved"), cases[i].stays);
        assert_int_equal(mb_fs_exists(path_of("jobs/%s/kept", "saved")), cases[i].stays);
        assert_null(unpacked.list);
        close_all();
        forget_gangs();
        write_state("saved", 0, 1, 0);
        open_all(); /* searches */
        mb_job_unpacked_ended(&unpacked, "saved", 0, 0);
        run_a_whole_look();
        run_a_whole_look();
        assert_int_equal(is_there("saved"), cases[i].stays);
        close_all();
        assert_int_equal(mb_fs_remove_tree(job, NULL), 0);
    }
}

/* The next agent does not wait for the ranks of a killed driver to note it. */
static void is_noted_at_once_by_the_next_agent(void **state)
{
    (void)state;
    make_job("killed");
    write_state("killed", 0, 1, SIGKILL);
    write_gang("node_0", "ENDED", "killed", path_of("jobs/%s/working_dir/a", "killed"), "s3://b");
    open_all();
    run_a_whole_look();
    assert_true(mb_fs_exists(path_of("jobs/%s/kept", "killed")));
    assert_true(is_there("killed"));
    assert_null(unpacked.list);
    close_all();
}

/* A directory of that name is in the way of the file; root may write wherever it wants. */
static void stays_and_is_tried_again_while_it_cannot_be_noted(void **state)
{
    (void)state;
    open_all();
    make_job("full");
    write_gang("node_0", "ENDED", "full", path_of("jobs/%s/working_dir/a", "full"), "");
    mb_job_unpacked_ended(&unpacked, "full", 0, 0);
    assert_int_equal(mb_fs_mkdir_p(path_of("jobs/%s/kept", "full"), 0700, NULL), 0);
    run_a_whole_look();
    assert_non_null(unpacked.list);
    assert_true(is_there("full"));
    assert_int_equal(mb_fs_remove_tree(path_of("jobs/%s/kept", "full"), NULL), 0);
    while (unpacked.list != NULL)
        run_a_whole_look();
    assert_true(mb_fs_exists(path_of("jobs/%s/kept", "full")));
    assert_true(is_there("full"));
    close_all();
}

/* Ranks of other machines have not heard of the end of a driver that was killed. */
static void stays_until_the_lease_of_a_killed_driver_is_over(void **state)
{
    static const struct {
        int code;
        int64_t grace_ms;
        int stays;
    } cases[] = {{-SIGKILL, 1000, 1}, {-SIGSEGV, 0, 1}, {128 + SIGKILL, 0, 1},
                 {-SIGTERM, 1000, 0}, {3, 1000, 0},     {-SIGKILL, -1, 0}};

    (void)state;
    open_all();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        make_job("killed");
        mb_job_unpacked_ended(&unpacked, "killed", cases[i].code, cases[i].grace_ms);
        run_a_whole_look();
        assert_int_equal(is_there("killed"), cases[i].stays);
    }
    close_all();
}

/* ---- what an earlier agent left ---- */

/* Some ended without a word to any agent, one of them killed; others start, or run; the removal of
 * one was cut off. */
static void is_found_by_the_next_agent(void **state)
{
    char *forgotten = mb_asprintf("%s/forgotten/7/3/deep", node_dir);

    (void)state;
    assert_int_equal(mb_fs_mkdir_p(forgotten, 0755, NULL), 0);
    make_job("unpacked-only");
    make_job("starts");
    write_text(path_of("jobs/%s/spec", "starts"), "x");
    make_job("ended");
    write_state("ended", 0, 1, 0);
    make_job("killed");
    write_state("killed", 0, 1, SIGKILL);
    make_job("supervisor-killed");
    write_state("supervisor-killed", 0, 0, 0);
    make_job("runs");
    write_state("runs", getpid(), 0, 0);
    make_job("runs-again");
    live = "runs-again";
    open_all();
    run_until(is_gone, "unpacked-only");
    run_until(nothing_is_forgotten, NULL);
    run_until(is_gone, "ended");
    run_a_whole_look();
    assert_true(is_there("killed")); /* ranks elsewhere may not know it yet */
    assert_true(is_there("supervisor-killed"));
    assert_true(is_there("runs"));
    assert_true(is_there("starts"));
    assert_true(is_there("runs-again"));
    assert_true(mb_fs_exists(path_of("jobs/%s/log_url", "unpacked-only")));
    live = NULL;
    close_all();
    mb_free(forgotten);
}

/* As a loss of power may leave it: what is below may be that gang's checkpoints. */
static void an_empty_record_of_a_gang_lets_nothing_go(void **state)
{
    char *gang = mb_asprintf("%s/gangs/powerless-1", node_dir);

    (void)state;
    assert_int_equal(mb_fs_mkdir_p(gang, 0755, NULL), 0);
    write_text(path_of("gangs/%s/gang.json", "powerless-1"), "");
    make_job("saved-into");
    open_all();
    run_a_whole_look();
    run_a_whole_look();
    assert_true(is_there("saved-into"));
    assert_true(mb_fs_exists(path_of("jobs/%s/kept", "saved-into")));
    make_job("later"); /* one that ends now is not kept by it */
    mb_job_unpacked_ended(&unpacked, "later", 0, 0);
    run_until(is_gone, "later");
    close_all();
    mb_free(gang);
}

static void another_driver_of_the_id_is_let_be(void **state)
{
    pid_t pid;

    (void)state;
    open_all();
    make_job("again");
    pid = start_holder("again", BY_DIRECTORY);
    mb_job_unpacked_ended(&unpacked, "again", 0, 0);
    run_a_whole_look();
    live = "again";
    end_holder(pid);
    while (unpacked.list != NULL)
        run_a_whole_look();
    assert_true(is_there("again"));
    live = NULL;
    mb_job_unpacked_ended(&unpacked, "again", 0, 0);
    run_until(is_gone, "again");
    close_all();
}

static void closes_amid_a_look(void **state)
{
    (void)state;
    open_all();
    make_job("j");
    mb_job_unpacked_ended(&unpacked, "j", 0, 0);
    close_all();
    open_all();
    run_until(is_gone, "j");
    close_all();
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(goes_at_once_and_no_more_than_that),
        TEST(stays_while_a_process_uses_it),
        TEST(stays_while_a_gang_has_not_ended),
        TEST(stays_with_checkpoints_or_their_store),
        TEST(is_noted_at_once_by_the_next_agent),
        TEST(stays_and_is_tried_again_while_it_cannot_be_noted),
        TEST(stays_until_the_lease_of_a_killed_driver_is_over),
        TEST(is_found_by_the_next_agent),
        TEST(an_empty_record_of_a_gang_lets_nothing_go),
        TEST(another_driver_of_the_id_is_let_be),
        TEST(closes_amid_a_look),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
