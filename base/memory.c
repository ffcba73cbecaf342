/*
 *  1. MemAvailable of /proc/meminfo, and SwapFree.
 *  2. /proc/self/cgroup names the group: "0::/path" of version 2, "4:memory:/path" of version 1.
 *     Every folder from the group's up to the mount's root may have a limit. In a container the
 *     path may be one of the host's, of which only the root is to be seen: folders that are not
 *     there say nothing.
 *  3. Of a limit there is left what is not in use, and the least of all counts. Version 2 limits
 *     swap by itself, version 1 memory and swap together; without such a limit a group may have all
 *     swap that is free.
 * A file that cannot be read limits nothing.
 */
#include "base/memory.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { KIB = 1024, LINE_MAX_BYTES = 4096, PATH_MAX_BYTES = 2 * LINE_MAX_BYTES };

struct version {
    const char *mount, *limit; /* folder below /sys/fs/cgroup, and its file */
    const char *in_use[2];     /* names of memory.stat whose sum is in use */
    /* Given the folder and what of memory is in use: what is left, swap included. */
    uint64_t (*with_swap)(const char *dir, uint64_t limit, uint64_t used, uint64_t swap_free);
};

/* The number behind `name` in a file of lines "name number"; fallback if there is none. */
static uint64_t number_in(const char *dir, const char *file, const char *name, uint64_t fallback)
{
    char line[LINE_MAX_BYTES], path[PATH_MAX_BYTES];
    unsigned long long value;
    const size_t len = strlen(name);
    const int n = snprintf(path, sizeof path, "%s/%s", dir, file);
    FILE *f = n >= 0 && (size_t)n < sizeof path ? fopen(path, "re") : NULL;
    while (f != NULL && fgets(line, sizeof line, f) != NULL) {
        if (strncmp(line, name, len) == 0 && (len == 0 || line[len] == ' ' || line[len] == ':') &&
            sscanf(line + len + (len > 0), " %llu", &value) == 1) {
            fallback = value;
            break;
        }
    }
    if (f != NULL) {
        fclose(f);
    }
    return fallback;
}

static uint64_t less(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t minus(uint64_t a, uint64_t b)
{
    return a > b ? a - b : 0;
}

static uint64_t plus(uint64_t a, uint64_t b)
{
    return a < UINT64_MAX - b ? a + b : UINT64_MAX;
}

static uint64_t with_swap_v2(const char *dir, uint64_t limit, uint64_t used, uint64_t swap_free)
{
    const uint64_t swap = number_in(dir, "memory.swap.max", "", UINT64_MAX);
    const uint64_t taken = number_in(dir, "memory.swap.current", "", 0);
    return plus(minus(limit, used), less(minus(swap, taken), swap_free));
}

static uint64_t with_swap_v1(const char *dir, uint64_t limit, uint64_t used, uint64_t swap_free)
{
    const uint64_t both = number_in(dir, "memory.memsw.limit_in_bytes", "", UINT64_MAX);
    const uint64_t swapped = number_in(dir, "memory.stat", "total_swap", 0);
    return less(plus(minus(limit, used), swap_free), minus(both, plus(used, swapped)));
}

static const struct version V2 = {"", "memory.max", {"anon", "shmem"}, with_swap_v2};
static const struct version V1 = {
    "/memory", "memory.limit_in_bytes", {"total_rss", "total_shmem"}, with_swap_v1};

/* Of one folder. */
static uint64_t left_in(const char *dir, const struct version *v, uint64_t swap_free)
{
    const uint64_t limit = number_in(dir, v->limit, "", UINT64_MAX); /* "max" is no number */
    uint64_t used = 0;
    if (limit == UINT64_MAX) {
        return limit;
    }
    for (size_t i = 0; i < sizeof v->in_use / sizeof v->in_use[0]; i++) {
        used += number_in(dir, "memory.stat", v->in_use[i], 0);
    }
    return v->with_swap(dir, limit, used, swap_free);
}

/* Of the group and all above it; path begins with a slash. */
static uint64_t left_above(const char *root, const char *path, const struct version *v,
                           uint64_t swap_free)
{
    char dir[PATH_MAX_BYTES];
    uint64_t least = UINT64_MAX;
    const int n_mount = snprintf(dir, sizeof dir, "%s/sys/fs/cgroup%s", root, v->mount);
    if (n_mount < 0 || (size_t)n_mount + strlen(path) >= sizeof dir) {
        return UINT64_MAX;
    }
    strcpy(dir + n_mount, path);
    for (;;) {
        least = less(least, left_in(dir, v, swap_free));
        char *slash = strrchr(dir + n_mount, '/');
        if (slash == NULL) {
            return least;
        }
        *slash = '\0';
    }
}

/* The line's group, if it is one that limits memory. */
static uint64_t left_of_line(const char *root, char *line, uint64_t swap_free)
{
    line[strcspn(line, "\n")] = '\0';
    char *names = strchr(line, ':'), *path = names != NULL ? strchr(names + 1, ':') : NULL;
    if (path == NULL || path[1] != '/') {
        return UINT64_MAX;
    }
    *path++ = '\0';
    names++;
    if (names[0] == '\0') {
        return left_above(root, path, &V2, swap_free);
    }
    for (char *save = NULL, *name = strtok_r(names, ",", &save); name != NULL;
         name = strtok_r(NULL, ",", &save)) {
        if (strcmp(name, "memory") == 0) {
            return left_above(root, path, &V1, swap_free);
        }
    }
    return UINT64_MAX;
}

uint64_t mb_memory_available(const char *root)
{
    char line[LINE_MAX_BYTES], groups[PATH_MAX_BYTES];
    const int n = snprintf(groups, sizeof groups, "%s/proc/self/cgroup", root);
    FILE *f = n >= 0 && (size_t)n < sizeof groups ? fopen(groups, "re") : NULL;
    const uint64_t kib = number_in(root, "proc/meminfo", "MemAvailable", UINT64_MAX);
    const uint64_t swap_kib = number_in(root, "proc/meminfo", "SwapFree", 0);
    const uint64_t swap = swap_kib < UINT64_MAX / KIB ? swap_kib * KIB : 0;
    uint64_t least = plus(kib < UINT64_MAX / KIB ? kib * KIB : UINT64_MAX, swap);
    while (f != NULL && fgets(line, sizeof line, f) != NULL) {
        least = less(least, left_of_line(root, line, swap));
    }
    if (f != NULL) {
        fclose(f);
    }
    return least;
}

uint64_t mb_memory_resident(void)
{
    unsigned long long pages = 0;
    FILE *f = fopen("/proc/self/statm", "re");
    if (f != NULL) {
        if (fscanf(f, "%*u %llu", &pages) != 1) {
            pages = 0;
        }
        fclose(f);
    }
    return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}
