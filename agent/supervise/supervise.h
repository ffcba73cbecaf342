/* `mobula-init supervise SPEC`: owns the processes of one job attempt. Exit status 0 after it did
 * its work whatever the children did, 71 when it could not start. libc only; blocks until
 * nothing of the attempt is left. Changes the process's signals; once a process. */
#ifndef MOBULA_AGENT_SUPERVISE_SUPERVISE_H
#define MOBULA_AGENT_SUPERVISE_SUPERVISE_H

int mb_supervise_main(const char *spec_path);

#endif
