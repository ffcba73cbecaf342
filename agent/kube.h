/*
 * The API server of the Kubernetes cluster that this process is a pod of, as a pod is given it: the
 * address by KUBERNETES_SERVICE_HOST and _PORT; token, CA and namespace as files of the service
 * account. The kubelet writes a new token long before the old one ends, so each request reads it
 * anew. Loop-thread only; one request at a time.
 */
#ifndef MOBULA_AGENT_KUBE_H
#define MOBULA_AGENT_KUBE_H

#include <stddef.h>
#include <stdint.h>
#include <uv.h>
#include "base/err.h"

#define MB_KUBE_DIR "/var/run/secrets/kubernetes.io/serviceaccount"

struct mb_kube;
struct mb_kube_opts { /* borrowed until the end */
    const char *host, *port;
    const char *dir;
};
/* Reads the namespace. MB_EINVAL, MB_ENOENT, ...: this is no pod, or one without a service account.
 */
int mb_kube_create(uv_loop_t *loop, const struct mb_kube_opts *opts, struct mb_kube **out,
                   struct mb_err *err);
const char *mb_kube_namespace(const struct mb_kube *k);

/* err: MB_OK with the object; else what the server said. MB_EDENIED 401, 403; MB_ENOENT 404, 410;
 * MB_ESTATE 409; MB_EUNAVAIL: it may be tried again (429, 5xx, no answer); MB_EPROTO all else. */
typedef void (*mb_kube_cb)(void *arg, const struct mb_err *err, const char *body, size_t n);
/* path: below the server's root. content_type and body: NULL for none. cb comes once, later, also
 * with MB_ECANCELED; never when this fails (the token cannot be read, no memory). */
int mb_kube_ask(struct mb_kube *k, const char *method, const char *path, const char *content_type,
                const char *body, mb_kube_cb cb, void *arg, struct mb_err *err);

void mb_kube_stop(struct mb_kube *k, void (*cb)(void *arg), void *arg); /* k is freed */

#endif
