/*
 * The RayJob that this pod belongs to, as the API server gives it: what follows from it for the
 * node. Pure: text, facts and the time come in. The shell is rayjob_watch.c.
 *
 * Which fields the operator sets and when: KubeRay's rayjob_controller.go. startTime is when the
 * job entered Initializing, so activeDeadlineSeconds count from before the pods; endTime is when
 * the deployment status became Complete or Failed.
 */
#ifndef MOBULA_AGENT_RAYJOB_H
#define MOBULA_AGENT_RAYJOB_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

enum { MB_RAYJOB_NAME_MAX = 256 };

struct mb_rayjob {
    char uid[MB_RAYJOB_NAME_MAX];
    char cluster[MB_RAYJOB_NAME_MAX]; /* its RayCluster of now; "": none */
    uint64_t start_unix_ms;           /* 0: not yet */
    uint64_t end_unix_ms;             /* 0: it has not ended */
    uint64_t active_deadline_ms;      /* 0: none */
    int is_suspended, is_deleted;
};
/* MB_EPROTO: it is no RayJob, or a field is none of its kind; names the field. */
int mb_rayjob_read(const char *text, size_t n, struct mb_rayjob *out, struct mb_err *err);

struct mb_rayjob_self {
    const char *cluster;     /* the RayCluster of this pod; NULL: not known */
    const char *uid;         /* of the RayJob when it was seen first; "": never */
    int64_t delete_after_ms; /* so long after its end it is ours to delete; -1: never */
    uint64_t margin_ms;      /* so long before its active deadline is ours; half of it at most */
};
struct mb_rayjob_verdict {
    uint64_t deadline_unix_ms;  /* 0: not known; MB_DEADLINE_NEVER: none */
    const char *leaves;         /* why this pod will be taken away soon, static; NULL: it is not */
    uint64_t delete_at_unix_ms; /* 0: not */
    int is_ours;                /* its objects are this cluster's to care for */
};
void mb_rayjob_judge(const struct mb_rayjob *job, const struct mb_rayjob_self *self,
                     struct mb_rayjob_verdict *out);

#endif
