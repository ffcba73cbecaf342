/*
 * Processes that lost supervisor and front process at the same moment (a kill of both): their state
 * files still name them. 1. every TEMP_DIR/node_X/jobs/Y/state and gangs/Y/state; 2. its supervisor
 * must be gone; 3. each child recorded as running, if pid and start time still are that process,
 * gets SIGKILL together with its process group; 4. so does whatever is in its control group.
 */
#include "cli/local.h"

#include <fcntl.h>
#include <glob.h>
#include <signal.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include "agent/supervise/procs.h"
#include "agent/supervise/state.h"
#include "base/alloc.h"

enum { GROUP_POLLS = 200, GROUP_POLL_NS = 5000000 };

/* A shared temporary directory may hold what others wrote there to have us kill. */
static int is_ours(int dir_fd)
{
    struct stat st;

    return fstat(dir_fd, &st) == 0 && st.st_uid == geteuid();
}

static size_t end_children(struct mb_sup_state *state)
{
    size_t n = 0;

    if (mb_sup_is_running(state->supervisor_pid, state->supervisor_ticks))
        return 0;
    for (size_t i = 0; i < state->n_children; i++) {
        const struct mb_sup_child_state *c = &state->children[i];

        if (c->phase != MB_SUP_RUNNING || !mb_sup_is_running(c->pid, c->start_ticks))
            continue;
        n += kill((pid_t)-c->pid, SIGKILL) == 0 ||
             mb_procs_signal(c->pid, c->start_ticks, SIGKILL) == 0;
    }
    if (!mb_cgroup_is_empty(&state->group) && mb_cgroup_kill(&state->group) == 0 && n == 0)
        n++; /* at least one that forked away from those */
    for (int i = 0; i < GROUP_POLLS && mb_cgroup_remove(&state->group) != 0; i++)
        nanosleep(&(struct timespec){.tv_nsec = GROUP_POLL_NS}, NULL); /* they are dying */
    return n;
}

int mb_local_end_orphans(const char *temp_dir, size_t *n_killed, struct mb_err *err)
{
    struct mb_sup_state *state = mb_calloc(1, sizeof(*state));
    char *pattern = mb_asprintf("%s/node_*/*/*/", temp_dir);
    char text[MB_SUP_TEXT_MAX];
    glob_t found = {0};

    *n_killed = 0;
    if (state == NULL || pattern == NULL) {
        mb_free(state);
        mb_free(pattern);
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    if (glob(pattern, GLOB_NOSORT, NULL, &found) == 0) {
        for (size_t i = 0; i < found.gl_pathc; i++) {
            int dir_fd = open(found.gl_pathv[i], O_RDONLY | O_DIRECTORY | O_CLOEXEC);

            if (dir_fd < 0)
                continue;
            if (is_ours(dir_fd) && mb_sup_state_read(dir_fd, state, text) == 0)
                *n_killed += end_children(state);
            close(dir_fd);
        }
        globfree(&found);
    }
    mb_free(state);
    mb_free(pattern);
    return 0;
}
