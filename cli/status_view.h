/* The answer of /api/mobula/status as text for people. Pure; any thread. */
#ifndef MOBULA_CLI_STATUS_VIEW_H
#define MOBULA_CLI_STATUS_VIEW_H

#include <jansson.h>
#include "base/buf.h"

enum { MB_ENTRYPOINT_SHOWN_MAX = 2000 }; /* bytes in a list; --json has all of it */

/* Appends the nodes, the queue of gangs and the jobs. live_first: jobs that have not ended come
 * first, then the newest. What came from others (names, commands) cannot move the cursor: control
 * bytes are shown as '?'. 0 or MB_ENOMEM. */
int mb_status_view(const json_t *status, int live_first, struct mb_buf *out);

/* The first lines of text that a screen holds, each cut at its width, as bytes that redraw it in
 * place; what does not fit is counted in the last line. 0 or MB_ENOMEM. */
int mb_status_screen(const char *text, unsigned rows, unsigned columns, struct mb_buf *out);

/* What tells one answer from the next: everything but clocks. Owned by the caller (free()), NULL
 * when memory is out. */
char *mb_status_essence(const json_t *status);

#endif
