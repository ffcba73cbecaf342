/*
 * The head's agent and the RayJob that its pod belongs to: reads it at the API server again and
 * again, makes it the owner of what the chart made for it, and deletes it when its time is over,
 * where nobody else does. Loop-thread only. What its pod's Role must allow: get (and delete) of
 * this RayJob, patch (and delete, where OwnerReferencesPermissionEnforcement asks for it) of what
 * it owns.
 */
#ifndef MOBULA_AGENT_RAYJOB_WATCH_H
#define MOBULA_AGENT_RAYJOB_WATCH_H

#include <stdint.h>
#include <uv.h>
#include "base/err.h"

struct mb_rayjob_watch;
struct mb_rayjob_watch_opts { /* borrowed until the end */
    const char *name;         /* of the RayJob */
    const char *cluster;      /* the RayCluster of this pod; NULL: not known */
    const char *owns; /* "configmaps/A rbac.authorization.k8s.io/v1/roles/B"; NULL: nothing */
    const char *host, *port; /* of the API server */
    const char *dir;         /* of the service account */
    int64_t delete_after_ms; /* so long after its end it is deleted; -1: not by us */
    uint64_t margin_ms;      /* off its active deadline */
    uint64_t look_ms;        /* between two looks */
};
struct mb_rayjob_watch_ops {
    /* Its active deadline less the margin, MB_DEADLINE_NEVER: it has none. Again when it has become
     * another. */
    void (*on_deadline)(void *arg, uint64_t unix_ms);
    /* This pod will be taken away within seconds; why is static. Once. */
    void (*on_leaves)(void *arg, const char *why);
};

/* The environment of a pod: MOBULA_RAYJOB, KUBERNETES_SERVICE_HOST and so on (docs/operations.md).
 * get: like getenv. 0: this is no pod of a RayJob; 1: it is, out is filled. MB_EINVAL: nonsense. */
int mb_rayjob_watch_environment(const char *(*get)(const char *name),
                                struct mb_rayjob_watch_opts *out, struct mb_err *err);

/* An error: this pod cannot ask; the caller goes on without. */
int mb_rayjob_watch_start(uv_loop_t *loop, const struct mb_rayjob_watch_opts *opts,
                          const struct mb_rayjob_watch_ops *ops, void *arg,
                          struct mb_rayjob_watch **out, struct mb_err *err);
/* No event after this; w is freed before cb. A node that ends before its objects had an owner, as
 * one does that could not start, takes up to three seconds more for that. */
void mb_rayjob_watch_stop(struct mb_rayjob_watch *w, void (*cb)(void *arg), void *arg);

#endif
