/*
 *  1. A pipe, the program with its end as stdout and stdin from /dev/null; no signal blocked,
 *     as they are in a pool's thread; no keys of an object store in its environment.
 *  2. Read to the end: one line if something is wrong.
 *  3. Wait for the program. A status that does not fit the line, or a signal, is a failure too.
 *  4. Cancelled: the program is killed. Its number is its own until it has been reaped, and is
 *     forgotten, under the lock, before that.
 */
#include "agent/unpack/run.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "agent/supervise/secrets.h"

extern char **environ;

static int spawn(const char *program, char *const *argv, int out, pid_t *pid)
{
    char **env = mb_without_store_keys(environ);
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attr;
    sigset_t none;
    int e;

    if (env == NULL)
        return ENOMEM;
    sigemptyset(&none);
    e = posix_spawn_file_actions_init(&actions);
    if (e != 0) {
        free(env);
        return e;
    }
    e = posix_spawnattr_init(&attr);
    if (e == 0) {
        e = posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
        if (e == 0)
            e = posix_spawn_file_actions_adddup2(&actions, out, STDOUT_FILENO);
        if (e == 0)
            e = posix_spawnattr_setsigmask(&attr, &none);
        if (e == 0)
            e = posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGMASK);
        if (e == 0)
            e = posix_spawn(pid, program, &actions, &attr, argv, env);
        posix_spawnattr_destroy(&attr);
    }
    posix_spawn_file_actions_destroy(&actions);
    free(env);
    return e;
}

/* All that it says, cut at n, without the line's end. */
static void read_line(int fd, char *line, size_t n)
{
    size_t len = 0;
    char rest[256];

    for (;;) {
        int is_full = len + 1 == n;
        ssize_t got = read(fd, is_full ? rest : line + len, is_full ? sizeof(rest) : n - 1 - len);

        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            break;
        len += is_full ? 0 : (size_t)got;
    }
    line[len] = '\0';
    line[strcspn(line, "\n")] = '\0';
}

/* What the program's end means; line is what it said. */
static int judge(int status, const char *line, const char *package, struct mb_err *err)
{
    char *text;
    long code = strtol(line, &text, 10);

    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return MB_OK;
    if (WIFSIGNALED(status))
        return mb_err_set(err, MB_ECORRUPT,
                          "package %s: its unpacker was ended by signal %d (%s): the package is "
                          "damaged, means harm, or the memory is used up",
                          package, WTERMSIG(status), strsignal(WTERMSIG(status)));
    if (*text == ' ' && code < 0 && code >= MB_EUNSUPPORTED &&
        mb_exit_status((int)code) == WEXITSTATUS(status))
        return mb_err_set(err, (int)code, "%s", text + 1);
    return mb_err_set(err, MB_EIO, "package %s: its unpacker ended with status %d and no reason",
                      package, WEXITSTATUS(status));
}

void mb_unpack_child_init(struct mb_unpack_child *c)
{
    pthread_mutex_init(&c->lock, NULL);
    c->pid = 0;
    c->is_cancelled = 0;
}

void mb_unpack_child_close(struct mb_unpack_child *c)
{
    pthread_mutex_destroy(&c->lock);
}

void mb_unpack_cancel(struct mb_unpack_child *c)
{
    pthread_mutex_lock(&c->lock);
    c->is_cancelled = 1;
    if (c->pid > 0)
        kill(c->pid, SIGKILL);
    pthread_mutex_unlock(&c->lock);
}

static int is_cancelled(struct mb_unpack_child *c)
{
    int is;

    pthread_mutex_lock(&c->lock);
    is = c->is_cancelled;
    pthread_mutex_unlock(&c->lock);
    return is;
}

/* errno-like. */
static int begin(struct mb_unpack_child *c, const char *program, char *const *argv, int out,
                 pid_t *pid)
{
    int e;

    pthread_mutex_lock(&c->lock);
    e = c->is_cancelled ? ECANCELED : spawn(program, argv, out, pid);
    c->pid = e == 0 ? *pid : 0;
    pthread_mutex_unlock(&c->lock);
    return e;
}

/* errno-like. */
static int reap(struct mb_unpack_child *c, pid_t pid, int *status)
{
    siginfo_t info;
    int e = 0;

    while (e == 0 && waitid(P_PID, (id_t)pid, &info, WEXITED | WNOWAIT) != 0)
        e = errno != EINTR ? errno : 0;
    pthread_mutex_lock(&c->lock);
    c->pid = 0;
    pthread_mutex_unlock(&c->lock);
    while (waitpid(pid, status, 0) < 0)
        if (errno != EINTR)
            return errno;
    return 0;
}

static int say_cancelled(const char *package, struct mb_err *err)
{
    return mb_err_set(err, MB_ECANCELED, "package %s: its unpacking was ended", package);
}

int mb_unpack_run(const char *program, const char *package, const char *dir,
                  struct mb_unpack_child *child, struct mb_err *err)
{
    char *argv[] = {"mobula-unpack", (char *)package, (char *)dir, NULL};
    char line[MB_ERR_TEXT_MAX + 16];
    int fds[2], e, status;
    pid_t pid;

    if (pipe2(fds, O_CLOEXEC) != 0)
        return mb_err_sys(err, errno, "package %s: pipe", package);
    e = begin(child, program, argv, fds[1], &pid);
    close(fds[1]);
    if (e != 0) {
        close(fds[0]);
        return e == ECANCELED ? say_cancelled(package, err)
                              : mb_err_sys(err, e, "package %s: %s", package, program);
    }
    read_line(fds[0], line, sizeof(line));
    close(fds[0]);
    e = reap(child, pid, &status);
    if (e != 0)
        return mb_err_sys(err, e, "package %s: wait", package);
    if (is_cancelled(child))
        return say_cancelled(package, err);
    return judge(status, line, package, err);
}
