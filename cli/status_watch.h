/* mobula status --watch: the same facts again every second. Blocking; the verb's main thread. */
#ifndef MOBULA_CLI_STATUS_WATCH_H
#define MOBULA_CLI_STATUS_WATCH_H

#include <jansson.h>
#include "cli/rest.h"

/* One look at the head; *out is the caller's. */
typedef int (*mb_status_fetch_fn)(struct mb_rest *rest, json_t **out, struct mb_err *err);

/* Returns only with an error: that of the first look, MB_EUNAVAIL when the head was away for five
 * minutes, or that of a pipe that closed. Ctrl-C ends the process with 130. */
int mb_status_watch(struct mb_rest *rest, mb_status_fetch_fn fetch, int json, struct mb_err *err);

#endif
