/*
 *  1. Every first task of a node makes a directory of its own and holds a lock in it as long as it
 *     lives; the other tasks of the node wait for that lock.
 *  2. The head task starts `mobula start --head --block`, waits until it is ALIVE and writes its
 *     address and a fresh token into a file (0600) below the user's home, where the other nodes
 *     look for it: what the tasks of a step share is the user, and with that a home.
 *  3. The other nodes start `mobula start --address ... --block` with it.
 *  4. The head task runs the driver in a child. Every 10 s it touches the file.
 *  5. The driver ended: the head task removes the file and ends its node; the others see the file
 *     gone, or untouched for 90 s (the head task was killed), and end theirs.
 *  6. SIGTERM (scancel, the time limit) reaches all tasks at once. The head's goes to the driver,
 *     which stops the gang in order: ranks save, nodes upload. The other tasks wait for that, at
 *     most 20 s (Slurm's KillWait is 30 s). A second signal skips the waiting.
 *  Slurm signals every process of a step, not its tasks alone: our children take signals from
 *  their parent only (agent/supervise/sender.h), or from the kernel when their task was killed.
 */
#include "cli/slurm_step.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/str.h"
#include "cli/local.h"
#include "gcs/token.h"

enum {
    ALIVE_TIMEOUT_MS = 60000,
    MEET_TIMEOUT_MS = 300000, /* Slurm starts tasks of a large step minutes apart */
    COMPANION_TIMEOUT_MS = 60000,
    BEAT_MS = 10000,
    SILENCE_MS = 90000, /* NFS may show a file's times 60 s late */
    STOP_WAIT_MS = 20000,
    END_GRACE_MS = 70000,
    POLL_MS = 200,
    MEET_FILE_MAX_BYTES = 160 << 10, /* a token of 64 KiB, each byte escaped */
    TOKEN_BYTES = 32,
};

struct task {
    struct mb_cli *cli;
    const struct mb_slurm *slurm;
    char *dir;        /* of this node, for the length of the step */
    char *meet;       /* the file that brings the nodes together */
    char *token_file; /* NULL: a step of one node, which listens on loopback only */
    int lock_fd;
    pid_t node;            /* front process of this node; 0: none */
    pid_t driver;          /* 0: none */
    int n_signals, signal; /* the last one */
};

/* ---- signals: blocked, and taken one by one ---- */

static void block_signals(sigset_t *set)
{
    sigemptyset(set);
    sigaddset(set, SIGTERM);
    sigaddset(set, SIGINT);
    sigaddset(set, SIGCHLD);
    sigprocmask(SIG_BLOCK, set, NULL);
}

/* Sleeps until a signal or POLL_MS; SIGTERM and SIGINT are counted. */
static void wait_a_moment(struct task *t)
{
    struct timespec moment = {.tv_nsec = POLL_MS * 1000000L};
    sigset_t set;
    int signum;

    block_signals(&set);
    signum = sigtimedwait(&set, NULL, &moment);
    if (signum == SIGTERM || signum == SIGINT) {
        t->n_signals++;
        t->signal = signum;
    }
}

/* ---- children ---- */

/* In the child: a group of its own, ended with its parent, signals as a program expects them. */
static void become_child(pid_t parent)
{
    sigset_t none;

    setpgid(0, 0);
    setenv("MOBULA_SIGNALS", "parent", 1);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent)
        _exit(mb_exit_status(MB_ESTATE));
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

static int start_node(struct task *t, const char *const *argv, struct mb_err *err)
{
    char *log = mb_path_join(t->dir, "node.log");
    char *self = mb_fs_self_dir(err);
    char *program = self != NULL ? mb_path_join(self, "mobula") : NULL;
    pid_t parent = getpid();
    int fd = -1, rc = 0;

    if (log == NULL || program == NULL)
        rc = mb_err_set(err, MB_ENOMEM, "out of memory");
    else if ((fd = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600)) < 0)
        rc = mb_err_sys(err, errno, "%s", log);
    else if ((t->node = fork()) < 0)
        rc = mb_err_sys(err, errno, "fork");
    if (rc == 0 && t->node == 0) {
        become_child(parent);
        dup2(fd, STDOUT_FILENO);
        dup2(fd, STDERR_FILENO);
        execv(program, (char *const *)(uintptr_t)argv);
        fprintf(stderr, "mobula: cannot run %s: %s\n", program, strerror(errno));
        _exit(127);
    }
    if (t->node < 0)
        t->node = 0;
    if (fd >= 0)
        close(fd);
    mb_free(log);
    mb_free(program);
    mb_free(self);
    return rc;
}

static int status_of(int wait_status)
{
    return WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : 128 + WTERMSIG(wait_status);
}

/* 1 and the exit status when the child ended; *pid is 0 then. */
static int has_ended(pid_t *pid, int *status)
{
    int wait_status;

    if (*pid == 0 || waitpid(*pid, &wait_status, WNOHANG) != *pid)
        return 0;
    *pid = 0;
    *status = status_of(wait_status);
    return 1;
}

/* SIGTERM, the grace, once more, SIGKILL. */
static void end_node(struct task *t)
{
    uint64_t push_ms = mb_mono_ms() + END_GRACE_MS;
    int status, n_pushed = 0;

    if (t->node == 0)
        return;
    kill(t->node, SIGTERM);
    while (!has_ended(&t->node, &status)) {
        wait_a_moment(t);
        if (n_pushed == 0 && (t->n_signals > 1 || mb_mono_ms() >= push_ms)) {
            kill(t->node, SIGTERM);
            push_ms = mb_mono_ms() + MB_LOCAL_KILL_MS;
            n_pushed = 1;
        } else if (n_pushed == 1 && mb_mono_ms() >= push_ms) {
            kill(t->node, SIGKILL);
            n_pushed = 2;
        }
    }
}

/* ---- the node of this task ---- */

static int node_is_alive(struct task *t, char **gcs_address, struct mb_err *err)
{
    struct mb_local_node *nodes = NULL;
    json_t *node = NULL;
    size_t n = 0;
    int rc;

    if (mb_local_nodes(t->dir, &nodes, &n, err) != 0)
        return err->code;
    rc = n > 0 ? mb_local_read_node(nodes[0].dir, &node, err) : 0;
    if (rc == 1) {
        const char *address = json_string_value(json_object_get(node, "gcs_address"));

        *gcs_address = mb_strdup(address != NULL ? address : "");
        if (*gcs_address == NULL)
            rc = mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    json_decref(node);
    mb_local_nodes_free(nodes, n);
    return rc;
}

static int wait_alive(struct task *t, char **gcs_address, struct mb_err *err)
{
    uint64_t deadline_ms = mb_mono_ms() + ALIVE_TIMEOUT_MS;
    int status, rc;

    while ((rc = node_is_alive(t, gcs_address, err)) == 0) {
        if (has_ended(&t->node, &status))
            return mb_err_set(err, MB_ESTATE, "the node of this task ended with status %d", status);
        if (t->n_signals > 0)
            return mb_err_set(err, MB_ECANCELED, "interrupted while the node was starting");
        if (mb_mono_ms() >= deadline_ms)
            return mb_err_set(err, MB_ETIMEOUT, "the node of this task is not ALIVE after %d s",
                              ALIVE_TIMEOUT_MS / 1000);
        wait_a_moment(t);
    }
    return rc > 0 ? 0 : rc;
}

/* The address by which the machine that srun runs on is reached from here: others reach us there
 * too. Nothing is sent. */
static int own_ip(const char *peer, char ip[INET_ADDRSTRLEN], struct mb_err *err)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(9)};
    socklen_t n = sizeof(a);
    int fd, rc = 0;

    if (inet_pton(AF_INET, peer, &a.sin_addr) != 1)
        return mb_err_set(err, MB_EINVAL,
                          "SLURM_LAUNCH_NODE_IPADDR=%.60s is no IPv4 address; set "
                          "MOBULA_NODE_IP_ADDRESS to what the other nodes dial",
                          peer);
    fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&a, sizeof(a)) != 0 ||
        getsockname(fd, (struct sockaddr *)&a, &n) != 0)
        rc = mb_err_sys(err, errno, "no route to %s, where srun runs", peer);
    else
        inet_ntop(AF_INET, &a.sin_addr, ip, INET_ADDRSTRLEN);
    if (fd >= 0)
        close(fd);
    return rc;
}

/* ---- the file that brings the nodes together ---- */

/* A token of this step, for this node and for what the driver asks of the others. */
static int keep_token(struct task *t, const char *token, struct mb_err *err)
{
    t->token_file = mb_path_join(t->dir, "token");
    if (t->token_file == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    if (setenv("RAY_AUTH_MODE", "token", 1) != 0 ||
        setenv("RAY_AUTH_TOKEN_PATH", t->token_file, 1) != 0)
        return mb_err_sys(err, errno, "setenv");
    unsetenv("RAY_AUTH_TOKEN");
    return mb_fs_write_atomic(t->token_file, token, strlen(token), 0600, err);
}

static int make_token(struct task *t, struct mb_err *err)
{
    uint8_t bytes[TOKEN_BYTES];
    char token[2 * TOKEN_BYTES + 1], *given = NULL;
    int rc = mb_token_load(NULL, &given, err);

    if (rc != 0)
        return rc;
    mb_random_bytes(bytes, sizeof(bytes));
    for (size_t i = 0; i < sizeof(bytes); i++)
        snprintf(token + 2 * i, 3, "%02x", bytes[i]);
    rc = keep_token(t, given != NULL ? given : token, err);
    mb_free(given);
    return rc;
}

static int publish(struct task *t, const char *gcs_address, struct mb_err *err)
{
    char *token = NULL, *text = NULL;
    int rc = mb_token_load(t->token_file, &token, err);

    if (rc == 0)
        rc = mb_slurm_meet_format(gcs_address, token, &text, err);
    if (rc == 0)
        rc = mb_fs_write_atomic(t->meet, text, strlen(text), 0600, err);
    mb_free(text);
    mb_free(token);
    return rc;
}

/* 1: *address is owned; 0: the head is not up yet. */
static int look_for_head(struct task *t, char **address, struct mb_err *err)
{
    struct mb_buf b = {0};
    struct mb_err why;
    char *token = NULL;
    int rc = 0;

    if (!mb_fs_exists(t->meet) || mb_fs_read(t->meet, MEET_FILE_MAX_BYTES, &b, NULL) != 0)
        goto out;
    rc = mb_slurm_meet_parse(mb_buf_str(&b), address, &token, &why);
    if (rc != 0)
        mb_err_set(err, rc, "%s: %s", t->meet, why.text);
    else if ((rc = keep_token(t, token, err)) == 0)
        rc = 1;
    if (rc < 0) {
        mb_free(*address);
        *address = NULL;
    }
out:
    mb_free(token);
    mb_buf_close(&b);
    return rc;
}

static int find_head(struct task *t, char **address, struct mb_err *err)
{
    uint64_t deadline_ms = mb_mono_ms() + MEET_TIMEOUT_MS;
    int rc;

    while ((rc = look_for_head(t, address, err)) == 0) {
        if (t->n_signals > 0)
            return mb_err_set(err, MB_ECANCELED, "interrupted while waiting for the head task");
        if (mb_mono_ms() >= deadline_ms)
            return mb_err_set(err, MB_ETIMEOUT,
                              "the step's head task did not appear in %s within %d s; is that "
                              "directory shared by the nodes? MOBULA_SLURM_DIR names another",
                              t->meet, MEET_TIMEOUT_MS / 1000);
        wait_a_moment(t);
    }
    return rc > 0 ? 0 : rc;
}

/* ---- directories ---- */

static int make_dirs(struct task *t, struct mb_err *err)
{
    const char *base = getenv("TMPDIR"), *shared = getenv("MOBULA_SLURM_DIR");
    const char *home = getenv("HOME");
    char *meet_dir = NULL;
    int rc = 0;

    if (base == NULL || *base == '\0')
        base = "/tmp";
    t->dir = mb_asprintf("%s/mobula-%u-%s-n%lld", base, (unsigned)getuid(), t->slurm->key,
                         (long long)t->slurm->node_id);
    if (shared == NULL && (home == NULL || *home == '\0'))
        return mb_err_set(err, MB_EINVAL,
                          "HOME is not set; MOBULA_SLURM_DIR names a directory that the nodes of "
                          "the step share");
    meet_dir = shared != NULL ? mb_strdup(shared) : mb_asprintf("%s/.mobula/slurm", home);
    t->meet = meet_dir != NULL ? mb_path_join(meet_dir, t->slurm->key) : NULL;
    if (t->dir == NULL || t->meet == NULL)
        rc = mb_err_set(err, MB_ENOMEM, "out of memory");
    else if (t->slurm->role != MB_SLURM_COMPANION)
        rc = mb_fs_mkdir_p(meet_dir, 0700, err);
    mb_free(meet_dir);
    return rc;
}

/* A directory that nobody else made before us, and the lock that companions wait for. */
static int own_dir(struct task *t, struct mb_err *err)
{
    char *lock, *fresh;
    int rc = 0;

    if (mkdir(t->dir, 0700) != 0)
        return mb_err_sys(err, errno, "%s", t->dir);
    lock = mb_path_join(t->dir, "lock");
    fresh = mb_path_join(t->dir, "lock.new"); /* held before it can be seen */
    if (lock == NULL || fresh == NULL) {
        rc = mb_err_set(err, MB_ENOMEM, "out of memory");
        goto out;
    }
    t->lock_fd = open(fresh, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (t->lock_fd < 0 || flock(t->lock_fd, LOCK_EX) != 0 || rename(fresh, lock) != 0)
        rc = mb_err_sys(err, errno, "%s", lock);
out:
    mb_free(fresh);
    mb_free(lock);
    return rc;
}

/* ---- the three lives ---- */

static void touch(const char *path)
{
    utimensat(AT_FDCWD, path, NULL, 0);
}

static int drive_gang(struct task *t, mb_slurm_drive drive, void *arg, const char *gcs_address,
                      struct mb_err *err)
{
    uint64_t beat_ms = mb_mono_ms() + BEAT_MS;
    int n_passed = 0, status = 0;
    pid_t parent = getpid();

    fflush(NULL);
    t->driver = fork();
    if (t->driver < 0) {
        t->driver = 0;
        return mb_err_sys(err, errno, "fork");
    }
    if (t->driver == 0) {
        become_child(parent);
        status = drive(arg, gcs_address);
        fflush(NULL);
        _exit(status);
    }
    while (!has_ended(&t->driver, &status)) {
        wait_a_moment(t);
        /* The other one of the two: ours would be lost in Slurm's own, pending there meanwhile. */
        for (; n_passed < t->n_signals && t->driver != 0; n_passed++)
            kill(t->driver, t->signal == SIGTERM ? SIGINT : SIGTERM);
        if (mb_mono_ms() >= beat_ms) {
            touch(t->meet);
            beat_ms = mb_mono_ms() + BEAT_MS;
        }
    }
    return n_passed > 0 && status > 128 ? 128 + t->signal : status;
}

static int be_head(struct task *t, mb_slurm_drive drive, void *arg, struct mb_err *err)
{
    int is_alone = t->slurm->n_nodes == 1, status;
    const char *given = getenv("MOBULA_NODE_IP_ADDRESS");
    char ip[INET_ADDRSTRLEN] = "127.0.0.1", *gcs_address = NULL;
    int rc = 0;

    if (!is_alone && given != NULL)
        snprintf(ip, sizeof(ip), "%s", given);
    else if (!is_alone)
        rc = own_ip(t->slurm->launch_ip, ip, err);
    if (rc == 0 && !is_alone)
        rc = make_token(t, err);
    if (rc != 0)
        return rc;
    const char *argv[] = {"mobula",
                          "start",
                          "--head",
                          "--block",
                          "--port",
                          "0",
                          "--dashboard-port",
                          "0",
                          "--dashboard-agent-listen-port",
                          "0",
                          "--temp-dir",
                          t->dir,
                          "--node-ip-address",
                          ip,
                          t->token_file != NULL ? "--token-file" : NULL,
                          t->token_file,
                          NULL};
    rc = start_node(t, argv, err);
    if (rc == 0)
        rc = wait_alive(t, &gcs_address, err);
    if (rc == 0 && !is_alone)
        rc = publish(t, gcs_address, err);
    status = rc != 0 ? rc : drive_gang(t, drive, arg, gcs_address, err);
    unlink(t->meet);
    end_node(t);
    mb_free(gcs_address);
    return status;
}

/* Milliseconds of the monotonic clock when the file was seen to change last; 0: it is gone. */
struct pulse {
    struct timespec mtime;
    uint64_t seen_ms;
};

static int head_is_gone(struct task *t, struct pulse *p)
{
    struct stat st;

    if (stat(t->meet, &st) != 0)
        return errno == ENOENT;
    if (st.st_mtim.tv_sec != p->mtime.tv_sec || st.st_mtim.tv_nsec != p->mtime.tv_nsec) {
        p->mtime = st.st_mtim;
        p->seen_ms = mb_mono_ms();
    }
    return mb_mono_ms() - p->seen_ms >= SILENCE_MS;
}

static int be_node(struct task *t, struct mb_err *err)
{
    struct pulse pulse = {.seen_ms = mb_mono_ms()};
    uint64_t stop_ms = 0;
    char *address = NULL, *gcs_address = NULL;
    int rc = find_head(t, &address, err), status = 0;

    if (rc != 0)
        return rc;
    const char *argv[] = {"mobula",      "start",
                          "--address",   address,
                          "--block",     "--dashboard-agent-listen-port",
                          "0",           "--temp-dir",
                          t->dir,        "--token-file",
                          t->token_file, NULL};
    rc = start_node(t, argv, err);
    if (rc == 0)
        rc = wait_alive(t, &gcs_address, err);
    while (rc == 0 && !head_is_gone(t, &pulse)) {
        if (has_ended(&t->node, &status)) {
            rc = mb_err_set(err, MB_ESTATE, "the node of this task ended with status %d", status);
            break;
        }
        if (t->n_signals > 0 && stop_ms == 0)
            stop_ms = mb_mono_ms() + STOP_WAIT_MS;
        if (t->n_signals > 1 || (stop_ms != 0 && mb_mono_ms() >= stop_ms))
            break;
        wait_a_moment(t);
    }
    end_node(t);
    mb_free(address);
    mb_free(gcs_address);
    return rc;
}

/* Lives as long as the first task of its node: Slurm may end a step soon after its first task. */
static int be_companion(struct task *t, struct mb_err *err)
{
    uint64_t deadline_ms = mb_mono_ms() + COMPANION_TIMEOUT_MS;
    char *lock = mb_path_join(t->dir, "lock");

    if (lock == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    while ((t->lock_fd = open(lock, O_RDONLY | O_CLOEXEC)) < 0 && mb_mono_ms() < deadline_ms &&
           t->n_signals == 0)
        wait_a_moment(t);
    mb_free(lock);
    /* Not there: the first task ended already, and said why. */
    while (t->lock_fd >= 0 && flock(t->lock_fd, LOCK_SH | LOCK_NB) != 0 && t->n_signals < 2)
        wait_a_moment(t);
    return 0;
}

int mb_slurm_step(struct mb_cli *cli, const struct mb_slurm *s, mb_slurm_drive drive, void *arg)
{
    struct task t = {.cli = cli, .slurm = s, .lock_fd = -1};
    struct mb_err err = {0};
    sigset_t set;
    int owns, status;

    block_signals(&set);
    status = make_dirs(&t, &err);
    if (status == 0 && s->role == MB_SLURM_COMPANION) {
        status = be_companion(&t, &err);
        goto out;
    }
    if (status == 0)
        status = own_dir(&t, &err);
    owns = status == 0;
    if (status == 0)
        status = s->role == MB_SLURM_HEAD ? be_head(&t, drive, arg, &err) : be_node(&t, &err);
    if (t.token_file != NULL)
        unlink(t.token_file);
    if (owns && status == 0 && mb_fs_remove_tree(t.dir, &err) != 0)
        status = err.code;
    else if (owns && status != 0)
        fprintf(stderr, "mobula: logs of this node: %s\n", t.dir);
out:
    if (status < 0)
        status = mb_cli_fail(cli, &err);
    if (t.lock_fd >= 0)
        close(t.lock_fd);
    mb_free(t.token_file);
    mb_free(t.meet);
    mb_free(t.dir);
    return status;
}
