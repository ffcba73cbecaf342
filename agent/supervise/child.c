/*
 * 1. a pipe that closes at exec; 2. fork; 3. child: session, signals, descriptors, directory, exec;
 * 4. parent reads the pipe: empty means that exec happened, else it holds what failed and the child
 * is reaped. Everything this program opens is O_CLOEXEC, so a child gets only what is passed.
 */
#include "agent/supervise/child.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

static void report_and_exit(int fd, const char *what, const char *name)
{
    char text[MB_SUP_TEXT_MAX];
    int n = snprintf(text, sizeof(text), "%s %s: %s", what, name, strerror(errno));
    ssize_t ignored;

    if (n >= (int)sizeof(text))
        n = (int)sizeof(text) - 1;
    ignored = write(fd, text, (size_t)n);
    (void)ignored; /* nobody is left to tell */
    _exit(127);
}

static void default_signals(int holds_term)
{
    sigset_t mask;

    for (int s = 1; s < NSIG; s++)
        signal(s,
               SIG_DFL); /* refused for SIGKILL, SIGSTOP and libc's own: they are as they must be */
    sigemptyset(&mask);
    if (holds_term)
        sigaddset(&mask, SIGTERM);
    sigprocmask(SIG_SETMASK, &mask, NULL);
}

static void open_stdio(const char *log_path, int fail_fd)
{
    int null_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    int log_fd;

    if (null_fd < 0 || dup2(null_fd, STDIN_FILENO) < 0)
        report_and_exit(fail_fd, "open", "/dev/null");
    log_fd = open(log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (log_fd < 0 || dup2(log_fd, STDOUT_FILENO) < 0 || dup2(log_fd, STDERR_FILENO) < 0)
        report_and_exit(fail_fd, "log file", log_path);
}

/* Soft and hard: what a job was given is not its own to raise. */
static void set_limits(const struct mb_exec *x, int fail_fd)
{
    struct rlimit files = {.rlim_cur = x->nofile, .rlim_max = x->nofile}, none = {0}, here = {0};

    if (x->nofile != 0 && setrlimit(RLIMIT_NOFILE, &files) != 0) {
        char text[96];
        int why = errno;

        getrlimit(RLIMIT_NOFILE, &here);
        snprintf(text, sizeof(text), "%u (this node's hard limit is %llu)", x->nofile,
                 (unsigned long long)here.rlim_max);
        errno = why;
        report_and_exit(fail_fd, "limit of open files", text);
    }
    if (x->no_core)
        setrlimit(RLIMIT_CORE, &none);
}

static void run_child(const struct mb_exec *x, pid_t parent, int fail_fd)
{
    const char *program = x->program != NULL ? x->program : x->argv[0];

    setsid();
    default_signals(x->holds_term);
    if (x->death_signal != 0) {
        prctl(PR_SET_PDEATHSIG, x->death_signal);
        if (getppid() != parent)
            _exit(127); /* it died before the line above: nobody would tell us */
    }
    if (x->cgroup_fd > 0 && write(x->cgroup_fd, "0", 1) != 1)
        report_and_exit(fail_fd, "control group of", x->argv[0]);
    set_limits(x, fail_fd);
    if (x->log_path != NULL)
        open_stdio(x->log_path, fail_fd);
    if (x->cwd != NULL && chdir(x->cwd) != 0)
        report_and_exit(fail_fd, "directory", x->cwd);
    if (x->env != NULL)
        environ = (char **)(uintptr_t)x->env; /* execvp takes PATH from here */
    for (int i = 0; i < 2; i++) {
        char number[16];

        if (x->pass_fd[i] < 0)
            continue;
        snprintf(number, sizeof(number), "%d", x->pass_fd[i]);
        if (fcntl(x->pass_fd[i], F_SETFD, 0) != 0 || setenv(x->fd_env[i], number, 1) != 0)
            report_and_exit(fail_fd, "pass", x->fd_env[i]);
    }
    execvp(program, (char *const *)(uintptr_t)x->argv);
    report_and_exit(fail_fd, "cannot run", program);
}

pid_t mb_child_exec(const struct mb_exec *x, char *text)
{
    pid_t parent = getpid(), pid;
    int fds[2];
    ssize_t n;

    if (pipe2(fds, O_CLOEXEC) != 0) {
        snprintf(text, MB_SUP_TEXT_MAX, "pipe: %s", strerror(errno));
        return -1;
    }
    pid = fork();
    if (pid < 0) {
        snprintf(text, MB_SUP_TEXT_MAX, "fork: %s", strerror(errno));
        close(fds[0]);
        close(fds[1]);
        return -1;
    }
    if (pid == 0)
        run_child(x, parent, fds[1]);
    close(fds[1]);
    do {
        n = read(fds[0], text, MB_SUP_TEXT_MAX - 1);
    } while (n < 0 && errno == EINTR);
    close(fds[0]);
    if (n <= 0)
        return pid;
    text[n] = '\0';
    waitpid(pid, NULL, 0);
    return -1;
}
