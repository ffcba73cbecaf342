/*
 * Text, one line per fact, so that a person can read how an attempt ended:
 *   mobula-supervise-state 1
 *   supervisor PID TICKS N
 *   child I PHASE PID TICKS CODE SIGNAL
 *   group KIND DIRECTORY          of the control group; without one the line is missing
 *   left 0 PROOF                  how it was made sure that no process is left
 *   all-exited REASON
 */
#include "agent/supervise/state.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "agent/supervise/file.h"
#include "agent/supervise/protocol.h"

enum { LINE_MAX_BYTES = 128, STATE_MAX_BYTES = 64 * 1024 };

static const char MAGIC[] = "mobula-supervise-state 1\n";
static const char *const phase_names[] = {"waiting", "running", "exited", "failed"};

int mb_sup_state_write(const struct mb_sup_state *state, int dir_fd, char *text)
{
    size_t cap = sizeof(MAGIC) + (state->n_children + 4) * LINE_MAX_BYTES + MB_SUP_TEXT_MAX +
                 MB_CGROUP_DIR_MAX;
    char *data = malloc(cap);
    size_t n;
    int rc;

    if (data == NULL) {
        snprintf(text, MB_SUP_TEXT_MAX, "state: out of memory");
        return -1;
    }
    n = (size_t)snprintf(data, cap, "%ssupervisor %lld %llu %zu\n", MAGIC,
                         (long long)state->supervisor_pid,
                         (unsigned long long)state->supervisor_ticks, state->n_children);
    for (size_t i = 0; i < state->n_children; i++) {
        const struct mb_sup_child_state *c = &state->children[i];

        n += (size_t)snprintf(data + n, cap - n, "child %zu %s %lld %llu %d %d\n", i,
                              phase_names[c->phase], (long long)c->pid,
                              (unsigned long long)c->start_ticks, c->code, c->signal);
    }
    if (state->group.kind != MB_CGROUP_NONE)
        n += (size_t)snprintf(data + n, cap - n, "group %s %s\n",
                              mb_cgroup_kind_name(state->group.kind), state->group.dir);
    if (state->all_exited && state->proof[0] != '\0')
        n += (size_t)snprintf(data + n, cap - n, "left 0 %s\n", state->proof);
    if (state->all_exited)
        n += (size_t)snprintf(data + n, cap - n, "all-exited %s\n", state->reason);
    rc = mb_file_replace(dir_fd, MB_SUP_STATE_FILE, data, n, 1);
    if (rc != 0)
        snprintf(text, MB_SUP_TEXT_MAX, "state: %s", strerror(errno));
    free(data);
    return rc;
}

static int parse_child(const char *line, struct mb_sup_state *state)
{
    struct mb_sup_child_state *c;
    unsigned long long ticks;
    unsigned index;
    char phase[16];
    long long pid;
    int code, signal;

    if (sscanf(line, "child %u %15s %lld %llu %d %d", &index, phase, &pid, &ticks, &code,
               &signal) != 6 ||
        index >= state->n_children)
        return -1;
    c = &state->children[index];
    for (unsigned i = 0; i < sizeof(phase_names) / sizeof(phase_names[0]); i++) {
        if (strcmp(phase, phase_names[i]) == 0) {
            *c = (struct mb_sup_child_state){(enum mb_sup_phase)i, pid, ticks, code, signal};
            return 0;
        }
    }
    return -1;
}

static int parse_line(const char *line, struct mb_sup_state *state)
{
    long long pid;
    unsigned long long ticks;
    size_t n;

    if (sscanf(line, "supervisor %lld %llu %zu", &pid, &ticks, &n) == 3) {
        if (n == 0 || n > MB_SUP_CHILDREN_MAX)
            return -1;
        state->supervisor_pid = pid;
        state->supervisor_ticks = ticks;
        state->n_children = n;
        return 0;
    }
    if (strncmp(line, "group ", 6) == 0) {
        char kind[16] = "";
        int at = 0;

        if (sscanf(line, "group %15s %n", kind, &at) != 1 || at == 0)
            return -1;
        mb_cgroup_open(&state->group, kind, line + at);
        return 0;
    }
    if (strncmp(line, "left 0 ", 7) == 0) {
        snprintf(state->proof, sizeof(state->proof), "%s", line + 7);
        return 0;
    }
    if (strncmp(line, "all-exited ", 11) == 0) {
        state->all_exited = 1;
        snprintf(state->reason, sizeof(state->reason), "%s", line + 11);
        return 0;
    }
    return parse_child(line, state);
}

int mb_sup_state_read(int dir_fd, struct mb_sup_state *out, char *text)
{
    char *data, *line, *save = NULL;
    size_t n;
    int rc = -1;

    memset(out, 0, sizeof(*out));
    data = mb_file_read(dir_fd, MB_SUP_STATE_FILE, STATE_MAX_BYTES, &n);
    if (data == NULL) {
        snprintf(text, MB_SUP_TEXT_MAX, "state: %s", strerror(errno));
        return -1;
    }
    if (strncmp(data, MAGIC, sizeof(MAGIC) - 1) == 0) {
        rc = 0;
        for (line = strtok_r(data + sizeof(MAGIC) - 1, "\n", &save); line != NULL && rc == 0;
             line = strtok_r(NULL, "\n", &save))
            rc = parse_line(line, out);
        if (out->n_children == 0)
            rc = -1;
    }
    if (rc != 0)
        snprintf(text, MB_SUP_TEXT_MAX, "state: not a supervisor's state file");
    free(data);
    return rc;
}
