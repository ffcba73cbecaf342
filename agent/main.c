/*
 * mobula-agent: the node daemon. Started by mobula-init, which gives it its socket and its log.
 *
 *  1. Bad flags: one line on stderr, status 64. --help: the table of flags, status 0.
 *  2. A node that cannot come up: one line, the status of its code (docs/operations.md).
 *  3. A call that hangs, in a driver or a disk, is left behind at the end: then without
 * destructors.
 */
#include <errno.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>
#include "agent/agent.h"
#include "agent/options.h"
#include "agent/supervise/protocol.h"
#include "base/errand.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/secret.h"

enum { LAST_MS = 500 };

/* glibc gives a thread that finds the others' heaps in use one of its own, which stays when the
 * thread has gone: gRPC's pool, which grows with bursts, made the head 1 MiB larger with every
 * second thread.
 */
static void keep_to_few_heaps(void)
{
    mallopt(M_ARENA_MAX, 2);
}

/* We hold the store's password, and an exec makes a process dumpable again: jobs are the same user
 * and run while an agent is restarted. What is not dumpable opens /proc/PID/fd to none of them. */
static int shut_out_others(struct mb_err *err)
{
    if (getenv(MB_SECRET_FD_ENV) != NULL && prctl(PR_SET_DUMPABLE, 0) != 0)
        return mb_err_sys(err, errno, "cannot keep the store's password from others");
    return MB_OK;
}

int main(int argc, char **argv)
{
    struct mb_agent_options opts = {0};
    enum mb_log_level level = MB_LOG_INFO;
    struct mb_err err = {0};
    int rc = shut_out_others(&err);

    keep_to_few_heaps();
    mb_secret_shut_process_with_keys();
    if (rc == MB_OK)
        rc = mb_agent_options_parse(argc, argv, &opts, &err);
    if (rc == 1)
        return 0;
    if (rc == MB_OK && mb_log_level_parse(opts.log_level, &level) != MB_OK)
        rc = mb_err_set(&err, MB_EINVAL, "--log-level %s: expected debug, info, warn or error",
                        opts.log_level);
    if (rc == MB_OK) {
        (void)mb_fs_open_files_max(); /* a head serves thousands of connections */
        signal(SIGPIPE, SIG_IGN);
        signal(SIGXFSZ, SIG_IGN); /* a file that may not grow is an error code */
        /* Drivers inherit it: checkpoints they choose a place for lie beside this node's files. */
        if (opts.temp_dir && setenv("MOBULA_TEMP_DIR", opts.temp_dir, 1) < 0)
            rc = mb_err_set(&err, MB_ENOMEM, "out of memory");
    }
    if (rc == MB_OK) {
        mb_log_init(2, level);
        rc = mb_agent_run(&opts, &err);
    }
    if (rc != MB_OK)
        fprintf(stderr, "mobula-agent: %s\n", err.text);
    mb_agent_options_close(&opts);
    if (!mb_errands_ended(LAST_MS)) {
        fflush(NULL);
        _exit(mb_exit_status(rc));
    }
    return mb_exit_status(rc);
}
