/*
 * Stopping goes through a pidfd, so that a pid that is reused meanwhile is never signalled: 1. open
 * it; 2. look that the start time is still the recorded one; 3. signal and poll the pidfd.
 */
#include "cli/local.h"

#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "agent/supervise/protocol.h"
#include "agent/supervise/state.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/str.h"

enum { PID_FILE_MAX_BYTES = 128 };

const char *mb_local_temp_dir(const char *flag)
{
    const char *from_env = getenv("MOBULA_TEMP_DIR");

    if (flag != NULL)
        return flag;
    return from_env != NULL && *from_env != '\0' ? from_env : "/tmp/mobula";
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
    long long pid = 0;
    unsigned long long ticks = 0;
    int rc;

    if (path == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
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

int mb_local_stop(const struct mb_local_node *node, uint64_t grace_ms, struct mb_err *err)
{
    static const int signals[] = {SIGTERM, SIGTERM, SIGKILL};
    const uint64_t waits_ms[] = {grace_ms, MB_LOCAL_KILL_MS, MB_LOCAL_KILL_MS};
    int pid_fd = (int)syscall(SYS_pidfd_open, (pid_t)node->init_pid, 0);

    if (pid_fd < 0 && errno == ESRCH)
        return 0;
    if (pid_fd < 0)
        return mb_err_sys(err, errno, "process %lld", (long long)node->init_pid);
    for (int i = 0; i < 3 && mb_local_is_running(node); i++) {
        if (syscall(SYS_pidfd_send_signal, pid_fd, signals[i], NULL, 0) != 0 && errno != ESRCH) {
            int saved = errno;

            close(pid_fd);
            return mb_err_sys(err, saved, "process %lld", (long long)node->init_pid);
        }
        if (!wait_end(pid_fd, waits_ms[i]))
            continue;
        close(pid_fd);
        return i == 0 ? 0
                      : mb_err_set(err, MB_ETIMEOUT, "%s did not end by itself and was killed",
                                   node->dir);
    }
    close(pid_fd);
    return mb_local_is_running(node)
               ? mb_err_set(err, MB_EIO, "process %lld does not end", (long long)node->init_pid)
               : 0;
}
