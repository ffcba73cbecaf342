/*
 * Finding our place: /proc/self/cgroup has our path in each hierarchy, /proc/self/mountinfo where a
 * hierarchy is mounted and which path of it that is; the rest of our path is below the mount.
 *
 *  1. create: mkdir there, or beside the leaf that we sit in. v2 first, the v1 freezer next.
 *  2. The memory controller has to be handed to children first. The kernel refuses that while a
 *     process sits in the parent (unless it is the root): init, if it is the only one, moves to a
 *     leaf. Where others sit there, too, there is no limit by the kernel and the caller measures.
 *  3. kill: v2 in one write. v1: freeze, which also stops forks that are under way, SIGKILL to each
 *     member, thaw so that they can die.
 *  4. remove: inner groups first; a supervisor that ran inside of us may have left its own.
 */
#include "agent/supervise/cgroup.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

enum { LINE_MAX_BYTES = 4096, FREEZE_POLLS = 200, FREEZE_POLL_NS = 1000000 };
/* A job may make groups inside of its own; more do not fit into a path. */
enum { DEPTH_MAX = MB_CGROUP_DIR_MAX / 2 };

#define NAME_PREFIX "mobula-"
#define LEAF        "/mobula-init"

static const char *const kind_names[] = {"none", "cgroup-v1", "cgroup-v2"};

const char *mb_cgroup_kind_name(enum mb_cgroup_kind kind)
{
    return kind_names[kind];
}

/* ---- where we are ---- */

/* Our path in the hierarchy of this v1 controller; "" is the v2 hierarchy. */
static int own_path(const char *controller, char *out, size_t cap)
{
    FILE *f = fopen("/proc/self/cgroup", "re");
    char line[LINE_MAX_BYTES];
    int found = 0;

    while (f != NULL && !found && fgets(line, sizeof(line), f) != NULL) {
        char *names = strchr(line, ':');
        char *path = names != NULL ? strchr(names + 1, ':') : NULL;

        if (path == NULL)
            continue;
        *path++ = '\0';
        path[strcspn(path, "\n")] = '\0';
        found = strcmp(names + 1, controller) == 0 && snprintf(out, cap, "%s", path) < (int)cap;
    }
    if (f != NULL)
        fclose(f);
    return found;
}

static int has_option(const char *options, const char *name)
{
    size_t n = strlen(name);

    for (const char *p = strstr(options, name); p != NULL; p = strstr(p + 1, name))
        if ((p == options || p[-1] == ',') && (p[n] == ',' || p[n] == '\n' || p[n] == '\0'))
            return 1;
    return 0;
}

/* The directory of our own control group. */
static int own_dir(const char *controller, char *out, size_t cap)
{
    FILE *f = fopen("/proc/self/mountinfo", "re");
    char line[LINE_MAX_BYTES], path[LINE_MAX_BYTES];
    int found = 0;

    if (f == NULL || !own_path(controller, path, sizeof(path))) {
        if (f != NULL)
            fclose(f);
        return 0;
    }
    while (!found && fgets(line, sizeof(line), f) != NULL) {
        char root[1024], mount[1024], type[32], options[1024];
        const char *dash = strstr(line, " - ");
        size_t n;

        if (dash == NULL || sscanf(line, "%*s %*s %*s %1023s %1023s", root, mount) != 2 ||
            sscanf(dash + 3, "%31s %*s %1023s", type, options) != 2)
            continue;
        if (controller[0] == '\0' ? strcmp(type, "cgroup2") != 0
                                  : strcmp(type, "cgroup") != 0 || !has_option(options, controller))
            continue;
        n = strcmp(root, "/") == 0 ? 0 : strlen(root);
        if (strncmp(path, root, n) != 0 || (path[n] != '/' && path[n] != '\0'))
            continue;
        found = snprintf(out, cap, "%s%s", mount, strcmp(path + n, "/") == 0 ? "" : path + n) <
                (int)cap;
    }
    fclose(f);
    return found;
}

/* ---- files of a group ---- */

static int write_file(const char *dir, const char *name, const char *text)
{
    char path[MB_CGROUP_DIR_MAX + 64];
    ssize_t n;
    int fd;

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    n = write(fd, text, strlen(text));
    close(fd);
    return n == (ssize_t)strlen(text) ? 0 : -1;
}

/* The number after "key " in a file of such lines; -1: not there. */
static long read_key(const char *dir, const char *name, const char *key)
{
    char path[MB_CGROUP_DIR_MAX + 64], line[128];
    size_t n = strlen(key);
    long value = -1;
    FILE *f;

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    f = fopen(path, "re");
    while (f != NULL && fgets(line, sizeof(line), f) != NULL)
        if (strncmp(line, key, n) == 0 && line[n] == ' ')
            value = strtol(line + n, NULL, 10);
    if (f != NULL)
        fclose(f);
    return value;
}

/* Calls kill(pid, signal) for each member, signal 0 only counts. The number of members. */
static int each_member(const char *dir, int signal)
{
    char path[MB_CGROUP_DIR_MAX + 64];
    int pid, n = 0;
    FILE *f;

    snprintf(path, sizeof(path), "%s/cgroup.procs", dir);
    f = fopen(path, "re");
    while (f != NULL && fscanf(f, "%d", &pid) == 1) {
        n++;
        if (signal != 0 && pid > 1)
            kill(pid, signal);
    }
    if (f != NULL)
        fclose(f);
    return n;
}

/* ---- groups inside of one ---- */

static int each_group(const char *dir, int (*visit)(const char *dir, int arg), int arg, int depth)
{
    DIR *d = depth < DEPTH_MAX ? opendir(dir) : NULL;
    struct dirent *e;
    int n = 0;

    while (d != NULL && (e = readdir(d)) != NULL) {
        char inner[MB_CGROUP_DIR_MAX];

        if (e->d_type != DT_DIR || e->d_name[0] == '.' ||
            snprintf(inner, sizeof(inner), "%s/%s", dir, e->d_name) >= (int)sizeof(inner))
            continue;
        n += each_group(inner, visit, arg, depth + 1);
    }
    if (d != NULL)
        closedir(d);
    return n + visit(dir, arg);
}

static int remove_one(const char *dir, int unused)
{
    (void)unused;
    return rmdir(dir) != 0 && errno != ENOENT;
}

/* ---- init's own place ---- */

/* Where groups are made: our own group, or the one above if we sit in init's leaf. */
static int base_dir(const char *controller, char *out, size_t cap)
{
    size_t n, leaf = strlen(LEAF);

    if (!own_dir(controller, out, cap))
        return 0;
    n = strlen(out);
    if (n > leaf && strcmp(out + n - leaf, LEAF) == 0)
        out[n - leaf] = '\0';
    return 1;
}

static int may_use_v2(void)
{
    const char *which = getenv("MOBULA_CGROUP");

    return which == NULL || (strcmp(which, "v1") != 0 && strcmp(which, "off") != 0);
}

static int has_word(const char *dir, const char *name, const char *word)
{
    char path[MB_CGROUP_DIR_MAX + 64], found[64];
    int has = 0;
    FILE *f;

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    f = fopen(path, "re");
    while (f != NULL && !has && fscanf(f, "%63s", found) == 1)
        has = strcmp(found, word) == 0;
    if (f != NULL)
        fclose(f);
    return has;
}

void mb_cgroup_take_seat(void)
{
    char dir[MB_CGROUP_DIR_MAX], base[MB_CGROUP_DIR_MAX], leaf[MB_CGROUP_DIR_MAX + sizeof(LEAF)];

    if (!may_use_v2() || !own_dir("", dir, sizeof(dir)) || !base_dir("", base, sizeof(base)) ||
        strcmp(dir, base) != 0 || !has_word(dir, "cgroup.controllers", "memory") ||
        has_word(dir, "cgroup.subtree_control", "memory") || each_member(dir, 0) != 1)
        return;
    snprintf(leaf, sizeof(leaf), "%s" LEAF, dir);
    if (mkdir(leaf, 0755) != 0 && errno != EEXIST)
        return;
    if (write_file(leaf, "cgroup.procs", "0") == 0 &&
        write_file(dir, "cgroup.subtree_control", "+memory") == 0)
        return;
    write_file(dir, "cgroup.procs", "0"); /* somebody came, or it is not ours to divide */
    rmdir(leaf);
}

void mb_cgroup_leave_seat(void)
{
    char leaf[MB_CGROUP_DIR_MAX], dir[MB_CGROUP_DIR_MAX];

    if (!may_use_v2() || !own_dir("", leaf, sizeof(leaf)) || !base_dir("", dir, sizeof(dir)) ||
        strcmp(leaf, dir) == 0 || each_member(leaf, 0) != 1)
        return;
    if (write_file(dir, "cgroup.subtree_control", "-memory") == 0 &&
        write_file(dir, "cgroup.procs", "0") == 0)
        rmdir(leaf);
}

/* ---- life ---- */

static int make(struct mb_cgroup *g, enum mb_cgroup_kind kind, const char *controller, int64_t pid,
                uint64_t ticks, int must_exist)
{
    char own[LINE_MAX_BYTES];
    struct stat st;

    if (!base_dir(controller, own, sizeof(own)) ||
        snprintf(g->dir, sizeof(g->dir), "%s/" NAME_PREFIX "%lld-%llu", own, (long long)pid,
                 (unsigned long long)ticks) >= (int)sizeof(g->dir))
        return 0;
    if (must_exist ? stat(g->dir, &st) != 0 : mkdir(g->dir, 0755) != 0)
        return 0;
    g->kind = kind;
    return 1;
}

static void limit_memory(struct mb_cgroup *g, uint64_t bytes)
{
    char number[32], parent[MB_CGROUP_DIR_MAX];

    snprintf(parent, sizeof(parent), "%s", g->dir);
    *strrchr(parent, '/') = '\0';
    snprintf(number, sizeof(number), "%llu", (unsigned long long)bytes);
    if (write_file(g->dir, "memory.max", number) != 0 &&
        (write_file(parent, "cgroup.subtree_control", "+memory") != 0 ||
         write_file(g->dir, "memory.max", number) != 0))
        return;
    write_file(g->dir, "memory.swap.max", "0");
    write_file(g->dir, "memory.oom.group", "1");
    g->has_memory_limit = 1;
}

static int pick(struct mb_cgroup *out, int64_t pid, uint64_t ticks, int must_exist)
{
    const char *which = getenv("MOBULA_CGROUP");

    *out = (struct mb_cgroup){.kind = MB_CGROUP_NONE};
    if (which != NULL && strcmp(which, "off") == 0)
        return 0;
    if ((may_use_v2() && make(out, MB_CGROUP_V2, "", pid, ticks, must_exist)) ||
        make(out, MB_CGROUP_V1, "freezer", pid, ticks, must_exist))
        return 1;
    *out = (struct mb_cgroup){.kind = MB_CGROUP_NONE};
    return 0;
}

void mb_cgroup_create(struct mb_cgroup *out, int64_t pid, uint64_t ticks,
                      uint64_t memory_limit_bytes)
{
    if (pick(out, pid, ticks, 0) && out->kind == MB_CGROUP_V2 && memory_limit_bytes > 0)
        limit_memory(out, memory_limit_bytes);
}

void mb_cgroup_find(struct mb_cgroup *out, int64_t pid, uint64_t ticks)
{
    pick(out, pid, ticks, 1);
}

void mb_cgroup_open(struct mb_cgroup *out, const char *kind, const char *dir)
{
    const char *name = strrchr(dir, '/');
    enum mb_cgroup_kind named = strcmp(kind, kind_names[MB_CGROUP_V2]) == 0   ? MB_CGROUP_V2
                                : strcmp(kind, kind_names[MB_CGROUP_V1]) == 0 ? MB_CGROUP_V1
                                                                              : MB_CGROUP_NONE;

    *out = (struct mb_cgroup){.kind = MB_CGROUP_NONE};
    if (named == MB_CGROUP_NONE || dir[0] != '/' || strlen(dir) >= sizeof(out->dir) ||
        strncmp(name, "/" NAME_PREFIX, sizeof(NAME_PREFIX)) != 0)
        return;
    out->kind = named;
    memcpy(out->dir, dir, strlen(dir) + 1);
}

int mb_cgroup_join_fd(const struct mb_cgroup *g)
{
    char path[MB_CGROUP_DIR_MAX + 64];

    if (g->kind == MB_CGROUP_NONE)
        return -1;
    snprintf(path, sizeof(path), "%s/cgroup.procs", g->dir);
    return open(path, O_WRONLY | O_CLOEXEC);
}

static int kill_frozen(const struct mb_cgroup *g)
{
    const struct timespec pause = {.tv_nsec = FREEZE_POLL_NS};
    char path[MB_CGROUP_DIR_MAX + 64], state[16] = "";

    if (write_file(g->dir, "freezer.state", "FROZEN") != 0)
        return errno == ENOENT || errno == ENODEV ? 0 : -1;
    snprintf(path, sizeof(path), "%s/freezer.state", g->dir);
    for (int i = 0; i < FREEZE_POLLS && strncmp(state, "FROZEN", 6) != 0; i++) {
        FILE *f = fopen(path, "re");

        if (i > 0)
            nanosleep(&pause, NULL);
        if (f == NULL || fgets(state, sizeof(state), f) == NULL)
            state[0] = '\0';
        if (f != NULL)
            fclose(f);
    }
    each_group(g->dir, each_member, SIGKILL, 0);
    return write_file(g->dir, "freezer.state", "THAWED");
}

int mb_cgroup_kill(const struct mb_cgroup *g)
{
    if (g->kind == MB_CGROUP_V2)
        return write_file(g->dir, "cgroup.kill", "1") == 0 || errno == ENOENT ? 0 : -1;
    return g->kind == MB_CGROUP_V1 ? kill_frozen(g) : 0;
}

int mb_cgroup_is_empty(const struct mb_cgroup *g)
{
    if (g->kind == MB_CGROUP_V2)
        return read_key(g->dir, "cgroup.events", "populated") <= 0;
    return g->kind == MB_CGROUP_NONE || each_group(g->dir, each_member, 0, 0) == 0;
}

unsigned mb_cgroup_oom_kills(const struct mb_cgroup *g)
{
    long n = g->has_memory_limit ? read_key(g->dir, "memory.events", "oom_kill") : 0;

    return n > 0 ? (unsigned)n : 0;
}

int mb_cgroup_remove(struct mb_cgroup *g)
{
    if (g->kind != MB_CGROUP_NONE && each_group(g->dir, remove_one, 0, 0) != 0)
        return -1;
    *g = (struct mb_cgroup){.kind = MB_CGROUP_NONE};
    return 0;
}
