/*
 * For test programs that are the agent: main() calls mb_under_init() first. Without an init above
 * it starts mobula-init with this same program as its agent, waits, cleans up and returns the exit
 * status to end with; below init it returns -1 and the tests run. They end with status 65 when they
 * fail: init takes 64..78 of an agent that never was ready as final.
 */
#ifndef MOBULA_TESTS_UNDER_INIT_H
#define MOBULA_TESTS_UNDER_INIT_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "agent/supervise/protocol.h"
#include "base/err.h"
#include "base/fs.h"

#define MB_TEST_DIR_ENV "MOBULA_TEST_DIR"

static inline int mb_under_init(const char *self)
{
    char dir[] = "/tmp/mobula-test-XXXXXX";
    int status = -1;
    struct mb_err err;
    pid_t pid;

    if (getenv(MB_INIT_FD_ENV) != NULL)
        return -1;
    if (mkdtemp(dir) == NULL)
        return 1;
    setenv(MB_TEST_DIR_ENV, dir, 1);
    pid = fork();
    if (pid == 0) {
        execl(MOBULA_INIT, "mobula-init", "agent", "--run-dir", dir, "--", self, (char *)NULL);
        _exit(127);
    }
    if (pid > 0)
        waitpid(pid, &status, 0);
    if (mb_fs_remove_tree(dir, &err) != 0)
        fprintf(stderr, "%s\n", err.text);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

#endif
