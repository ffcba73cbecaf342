/*
 * A package of a runtime_env brought from where its URI says to a file: http, https (redirects are
 * followed, HTTPS is verified), s3 and gs with the agent's credentials; gcs from the head,
 * whichever node that is meanwhile. Loop-thread only.
 */
#ifndef MOBULA_AGENT_FETCH_H
#define MOBULA_AGENT_FETCH_H

#include <uv.h>
#include "base/err.h"

struct mb_fetch;
struct mb_gcs;

/* Exactly once, never from inside the call that began it; err->code 0: the file is whole. Else no
 * file is left. The handle dies with it. */
typedef void (*mb_fetch_cb)(void *arg, const struct mb_err *err);

/* gcs: NULL: gcs:// is a scheme like any other. MB_EUNSUPPORTED for another scheme, MB_EINVAL for a
 * URI without a name at its end; cb does not run then. Who does not answer has failed within 10 s;
 * who sends less than 1 kB/s for 8 s, too; Ray's own head, which sends a package in one answer, has
 * 5 min for it. */
int mb_fetch_start(uv_loop_t *loop, struct mb_gcs *gcs, const char *uri, const char *path,
                   mb_fetch_cb cb, void *arg, struct mb_fetch **out, struct mb_err *err);
void mb_fetch_cancel(struct mb_fetch *f); /* cb follows, with MB_ECANCELED if it is not over */

#endif
