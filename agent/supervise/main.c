/*
 * mobula-init: two roles in one tiny program.
 *   mobula-init agent --run-dir DIR [--daemonize] [--grace-ms N] [--killed-after-ms N] [--secret-fd
 * N]
 *       -- PROGRAM ARGS...
 *   mobula-init supervise SPEC
 * Exit status: that of its role, 64 for a wrong command line.
 */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "agent/supervise/front.h"
#include "agent/supervise/supervise.h"

enum { STATUS_USAGE = 64, GRACE_MS = 30 * 1000, GRACE_MAX_MS = 24 * 3600 * 1000, FD_MAX = 1 << 20 };

static int usage(void)
{
    fputs("usage: mobula-init agent --run-dir DIR [--daemonize] [--grace-ms N]\n"
          "                         [--killed-after-ms N] [--secret-fd N]\n"
          "                         -- PROGRAM ARGS...\n"
          "       mobula-init supervise SPEC\n",
          stderr);
    return STATUS_USAGE;
}

static int read_number(const char *text, unsigned long max, unsigned long *out)
{
    char *end;

    *out = strtoul(text, &end, 10);
    return *text >= '0' && *text <= '9' && *end == '\0' && *out <= max;
}

/* What our starter had open is not ours: a lock would be held, a pipe never end, as long as the
 * node lives, and every job would have them too. A kernel before 5.9 cannot: its descriptors stay.
 */
static void close_inherited(int but)
{
    unsigned first = STDERR_FILENO + 1;

    if (but >= (int)first) {
        if (but > (int)first)
            close_range(first, (unsigned)but - 1, 0);
        first = (unsigned)but + 1;
    }
    if (close_range(first, UINT_MAX, 0) != 0)
        fprintf(stderr, "mobula-init: what its starter had open stays open: %s\n", strerror(errno));
}

static int agent(int argc, char **argv)
{
    struct mb_front_opts opts = {.secret_fd = -1, .grace_ms = GRACE_MS};
    unsigned long n;
    int i;

    for (i = 2; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (strcmp(argv[i], "--daemonize") == 0) {
            opts.daemonize = 1;
        } else if (strcmp(argv[i], "--run-dir") == 0 && i + 1 < argc) {
            opts.run_dir = argv[++i];
        } else if (strcmp(argv[i], "--grace-ms") == 0 && i + 1 < argc) {
            if (!read_number(argv[++i], GRACE_MAX_MS, &n))
                return usage();
            opts.grace_ms = (uint32_t)n;
        } else if (strcmp(argv[i], "--killed-after-ms") == 0 && i + 1 < argc) {
            if (!read_number(argv[++i], GRACE_MAX_MS, &n))
                return usage();
            opts.killed_after_ms = (uint32_t)n;
        } else if (strcmp(argv[i], "--secret-fd") == 0 && i + 1 < argc) {
            if (!read_number(argv[++i], FD_MAX, &n) || n <= STDERR_FILENO)
                return usage();
            opts.secret_fd = (int)n;
        } else {
            return usage();
        }
    }
    if (opts.run_dir == NULL || i + 1 >= argc)
        return usage();
    opts.agent_argv = argv + i + 1;
    close_inherited(opts.secret_fd);
    return mb_front_main(&opts);
}

int main(int argc, char **argv)
{
    if (argc >= 2 && strcmp(argv[1], "agent") == 0)
        return agent(argc, argv);
    if (argc == 3 && strcmp(argv[1], "supervise") == 0)
        return mb_supervise_main(argv[2]);
    return usage();
}
