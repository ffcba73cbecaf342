/* Who still uses what was unpacked for a job that has ended. Blocking: for a thread. */
#ifndef MOBULA_AGENT_JOB_USERS_H
#define MOBULA_AGENT_JOB_USERS_H

#include <stddef.h>
#include <stdint.h>

struct mb_job_use {
    char *id;
    int code;         /* of its driver; not read here, nor is grace_ms */
    int64_t grace_ms; /* of its processes */
    int is_used;      /* out: somebody may need it yet */
    int is_kept;      /* out: a gang saves into it, or has its store there */
};

/* Looks at the directories NODE_DIR/jobs/ID, as far as /proc may be read, and at the gangs of all
 * nodes beside NODE_DIR. 1: the record of a gang was there and could not be read, as after a loss
 * of power: any of the directories may be its. */
int mb_job_users_look(const char *node_dir, struct mb_job_use *uses, size_t n);

/* Where a gang saves, or has its store: the absolute path of such a text or of its file:// URL,
 * inside it; NULL: none, or somewhere else. */
const char *mb_job_users_path_of(const char *place);

#endif
