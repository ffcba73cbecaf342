/*
 * mobula-unpack PACKAGE DIR: unpacks one package of a job and ends.
 *
 * A program of its own, because a package is bytes from outside: what goes wrong in its reader ends
 * this process and not the node, and the agent carries neither libarchive nor what that needs.
 * Whoever reads stdout (agent/unpack/run.c) gets one line when it fails: the code and the text.
 */
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include "agent/unpack/unpack.h"

int main(int argc, char **argv)
{
    struct mb_err err = {0};

    if (argc != 3) {
        fprintf(stderr, "usage: mobula-unpack PACKAGE DIR\n");
        return mb_exit_status(MB_EINVAL);
    }
    /* Nobody waits for what an agent that is gone has asked for. */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (mb_unpack(argv[1], argv[2], &mb_unpack_limits, &err) == MB_OK)
        return 0;
    printf("%d %s\n", err.code, err.text);
    return mb_exit_status(err.code);
}
