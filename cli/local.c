/*
 * Stopping goes through a pidfd, so that a pid that is reused meanwhile is never signalled: 1. open
 * it; 2. look that the start time is still the recorded one; 3. signal and poll the pidfd.
 */
#include "cli/local.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "agent/supervise/protocol.h"
#include "agent/supervise/state.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/str.h"

enum { NODE_JSON_MAX_BYTES = 64 * 1024, PID_FILE_MAX_BYTES = 128 };

static const char default_temp_dir[] = "/tmp/mobula";

const char *mb_local_temp_dir(const char *flag)
{
    const char *from_env = getenv("MOBULA_TEMP_DIR");

    if (flag != NULL)
        return flag;
    return from_env != NULL && *from_env != '\0' ? from_env : default_temp_dir;
}

int mb_local_temp_dir_is_default(const char *flag)
{
    return mb_local_temp_dir(flag) == default_temp_dir;
}

int mb_local_check_owner(const char *dir, struct mb_err *err)
{
    struct stat st;

    if (lstat(dir, &st) != 0)
        return mb_err_sys(err, errno, "%s", dir);
    if (!S_ISDIR(st.st_mode))
        return mb_err_set(err, MB_EDENIED,
                          "%s is a link: name the directory itself with --temp-dir or "
                          "MOBULA_TEMP_DIR",
                          dir);
    if (st.st_uid != geteuid() && st.st_uid != 0)
        return mb_err_set(err, MB_EDENIED,
                          "%s belongs to another user (uid %u): choose a directory of your own "
                          "with --temp-dir or MOBULA_TEMP_DIR",
                          dir, (unsigned)st.st_uid);
    if ((st.st_mode & (S_IWGRP | S_IWOTH)) != 0 && (st.st_mode & S_ISVTX) == 0)
        return mb_err_set(err, MB_EDENIED,
                          "%s may be changed by others (mode %o): chmod 755 it, or choose another "
                          "directory with --temp-dir or MOBULA_TEMP_DIR",
                          dir, (unsigned)st.st_mode & 07777);
    return 0;
}

int mb_local_is_running(const struct mb_local_node *node)
{
    return mb_sup_is_running(node->init_pid, node->init_ticks);
}

int mb_local_find(const char *dir, struct mb_local_node *out, struct mb_err *err)
{
    struct mb_local_node node = {0};
    char *path = mb_path_join(dir, MB_INIT_PID_FILE);
    struct mb_buf text = {0};
    struct stat st;
    long long pid = 0;
    unsigned long long ticks = 0;
    int rc;

    if (path == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    if (stat(dir, &st) != 0 || st.st_uid != geteuid()) {
        mb_free(path);
        return mb_err_set(err, MB_EDENIED, "%s belongs to somebody else", dir);
    }
    rc = mb_fs_read(path, PID_FILE_MAX_BYTES, &text, err);
    if (rc == 0 && sscanf(mb_buf_str(&text), "%lld %llu", &pid, &ticks) != 2)
        rc = mb_err_set(err, MB_ECORRUPT, "%s: not a pid file", path);
    node.init_pid = pid;
    node.init_ticks = ticks;
    if (rc == 0 && !mb_local_is_running(&node))
        rc = mb_err_set(err, MB_ENOENT, "%s: process %lld ended", path, pid);
    if (rc == 0) {
        node.dir = mb_strdup(dir);
        if (node.dir == NULL)
            rc = mb_err_set(err, MB_ENOMEM, "out of memory");
        else
            *out = node;
    }
    mb_buf_close(&text);
    mb_free(path);
    return rc;
}

void mb_local_nodes_free(struct mb_local_node *nodes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        mb_free(nodes[i].dir);
    mb_free(nodes);
}

int mb_local_nodes(const char *temp_dir, struct mb_local_node **out, size_t *n_out,
                   struct mb_err *err)
{
    struct mb_local_node *nodes = NULL;
    size_t n = 0;
    struct dirent *entry;
    DIR *dir = opendir(temp_dir);
    int rc = 0;

    *out = NULL;
    *n_out = 0;
    if (dir == NULL)
        return errno == ENOENT ? 0 : mb_err_sys(err, errno, "%s", temp_dir);
    while (rc == 0 && (entry = readdir(dir)) != NULL) {
        struct mb_local_node node, *grown;
        char *path;

        if (!mb_starts_with(entry->d_name, "node_"))
            continue;
        path = mb_path_join(temp_dir, entry->d_name);
        if (path == NULL) {
            rc = mb_err_set(err, MB_ENOMEM, "out of memory");
            break;
        }
        if (mb_local_find(path, &node, NULL) == 0) {
            grown = mb_reallocarray(nodes, n + 1, sizeof(*nodes));
            if (grown == NULL) {
                mb_free(node.dir);
                rc = mb_err_set(err, MB_ENOMEM, "out of memory");
            } else {
                nodes = grown;
                nodes[n++] = node;
            }
        }
        mb_free(path);
    }
    closedir(dir);
    if (rc != 0) {
        mb_local_nodes_free(nodes, n);
        return rc;
    }
    *out = nodes;
    *n_out = n;
    return 0;
}

/* 1: it ended within the time. */
static int wait_end(int pid_fd, uint64_t timeout_ms)
{
    uint64_t deadline_ms = mb_mono_ms() + timeout_ms;

    for (;;) {
        struct pollfd p = {.fd = pid_fd, .events = POLLIN};
        uint64_t now_ms = mb_mono_ms();
        uint64_t left_ms = now_ms < deadline_ms ? deadline_ms - now_ms : 0;
        int rc = poll(&p, 1, left_ms > 60000 ? 60000 : (int)left_ms);

        if (rc > 0)
            return 1;
        if (rc == 0 && left_ms <= 60000)
            return 0;
    }
}

/* A pidfd of the very process; -1 when it is gone (*rc 0) or cannot be had. */
static int open_process(const struct mb_local_node *node, int *rc, struct mb_err *err)
{
    int pid_fd = (int)syscall(SYS_pidfd_open, (pid_t)node->init_pid, 0);

    *rc = 0;
    if (pid_fd >= 0 && mb_local_is_running(node))
        return pid_fd;
    if (pid_fd >= 0)
        close(pid_fd);
    else if (errno != ESRCH)
        *rc = mb_err_sys(err, errno, "process %lld", (long long)node->init_pid);
    return -1;
}

/* value_ms goes with the signal, as sigqueue() would send it; 0: a plain kill(). */
static int send_signal(const struct mb_local_node *node, int pid_fd, int signal, uint64_t value_ms,
                       struct mb_err *err)
{
    siginfo_t info = {.si_signo = signal, .si_code = SI_QUEUE};

    info.si_pid = getpid();
    info.si_uid = getuid();
    info.si_value.sival_int = value_ms < INT_MAX ? (int)value_ms : INT_MAX;
    if (syscall(SYS_pidfd_send_signal, pid_fd, signal, value_ms > 0 ? &info : NULL, 0) == 0 ||
        errno == ESRCH)
        return 0;
    return mb_err_sys(err, errno, "process %lld", (long long)node->init_pid);
}

int mb_local_ask_to_end(const struct mb_local_node *node, uint64_t grace_ms, struct mb_err *err)
{
    int rc, pid_fd = open_process(node, &rc, err);

    if (pid_fd < 0)
        return rc;
    rc = send_signal(node, pid_fd, SIGTERM, grace_ms, err);
    close(pid_fd);
    return rc;
}

int mb_local_wait_end(const struct mb_local_node *node, uint64_t grace_ms, struct mb_err *err)
{
    static const int signals[] = {0, SIGTERM, SIGKILL};
    const uint64_t waits_ms[] = {grace_ms, MB_LOCAL_KILL_MS, MB_LOCAL_KILL_MS};
    int rc, pid_fd = open_process(node, &rc, err);

    if (pid_fd < 0)
        return rc;
    for (int i = 0; i < 3 && rc == 0; i++) {
        if (signals[i] != 0)
            rc = send_signal(node, pid_fd, signals[i], 0, err);
        if (rc == 0 && wait_end(pid_fd, waits_ms[i])) {
            close(pid_fd);
            return i == 0 ? 0
                          : mb_err_set(err, MB_ETIMEOUT, "%s did not end by itself and was killed",
                                       node->dir);
        }
    }
    close(pid_fd);
    return rc != 0
               ? rc
               : mb_err_set(err, MB_EIO, "process %lld does not end", (long long)node->init_pid);
}

int mb_local_read_node(const char *dir, json_t **node, struct mb_err *err)
{
    char *path = mb_path_join(dir, "node.json");
    struct mb_buf b = {0};
    const char *state, *failure;
    int code, rc = 0;

    if (path == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    if (mb_fs_read(path, NODE_JSON_MAX_BYTES, &b, NULL) == 0)
        *node = json_loads(mb_buf_str(&b), 0, NULL);
    mb_free(path);
    mb_buf_close(&b);
    if (*node == NULL)
        return 0;
    state = json_string_value(json_object_get(*node, "state"));
    failure = json_string_value(json_object_get(*node, "error"));
    code = (int)json_integer_value(json_object_get(*node, "code"));
    if (failure != NULL && *failure != '\0')
        rc = mb_err_set(err, code < 0 ? code : MB_ESTATE, "%s", failure);
    else if (state != NULL && strcmp(state, "ALIVE") == 0)
        return 1;
    json_decref(*node);
    *node = NULL;
    return rc;
}
