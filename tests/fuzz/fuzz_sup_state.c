/* Any bytes as a supervisor's state file or spec: refused, or something whose every field is in
 * range; a state that is written again reads as the same. */
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "agent/supervise/protocol.h"
#include "agent/supervise/spec.h"
#include "agent/supervise/state.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static char dir[] =
    "/dev/shm/mobula-fuzz-state-XXXXXX"; /* writing a state flushes: not to a disk */
static char path[64];
static int dir_fd = -1;

static void remove_files(void)
{
    unlink(path);
    rmdir(dir);
}

static void set_up(void)
{
    if (mkdtemp(dir) == NULL || (dir_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0)
        abort();
    snprintf(path, sizeof(path), "%s/" MB_SUP_STATE_FILE, dir);
    atexit(remove_files);
}

static void write_file(const void *p, size_t n)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

    if (fd < 0 || write(fd, p, n) != (ssize_t)n)
        abort();
    close(fd);
}

static void check_spec(void)
{
    struct mb_sup_spec spec;
    char text[MB_SUP_TEXT_MAX];
    size_t sum = 0;

    if (mb_sup_spec_read(path, &spec, text) != 0)
        return;
    if (spec.n_children < 1 || spec.n_children > MB_SUP_CHILDREN_MAX || spec.dir[0] != '/' ||
        spec.stop_signal < 1 || spec.stop_signal >= NSIG)
        abort();
    for (size_t i = 0; i < spec.n_children; i++) {
        const struct mb_sup_child *c = &spec.children[i];

        for (size_t k = 0; c->argv[k] != NULL; k++)
            sum += strlen(c->argv[k]);
        for (size_t k = 0; c->env[k] != NULL; k++)
            sum += strlen(c->env[k]);
        sum += c->cwd != NULL ? strlen(c->cwd) : 0;
        if (c->argv[0] == NULL || c->log_path[0] != '/' || sum > MB_SUP_SPEC_MAX_BYTES)
            abort();
    }
    mb_sup_spec_close(&spec);
}

static void check_state(void)
{
    static struct mb_sup_state first, again; /* large */
    char text[MB_SUP_TEXT_MAX];

    if (mb_sup_state_read(dir_fd, &first, text) != 0)
        return;
    if (first.n_children < 1 || first.n_children > MB_SUP_CHILDREN_MAX)
        abort();
    for (size_t i = 0; i < first.n_children; i++)
        if ((unsigned)first.children[i].phase > MB_SUP_FAILED)
            abort();
    if (first.group.kind == MB_CGROUP_NONE && first.group.dir[0] != '\0')
        abort();
    if (mb_sup_state_write(&first, dir_fd, text) != 0 ||
        mb_sup_state_read(dir_fd, &again, text) != 0)
        abort();
    if (again.supervisor_pid != first.supervisor_pid || again.n_children != first.n_children ||
        memcmp(again.children, first.children, first.n_children * sizeof(first.children[0])) != 0 ||
        again.group.kind != first.group.kind || strcmp(again.group.dir, first.group.dir) != 0 ||
        again.all_exited != first.all_exited || strcmp(again.reason, first.reason) != 0)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (dir_fd < 0)
        set_up();
    write_file(data, size);
    check_spec();
    check_state();
    return 0;
}
