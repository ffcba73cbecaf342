/* Text that came from outside and may hold anything, for a terminal. Pure. */
#ifndef MOBULA_CLI_PRINTABLE_H
#define MOBULA_CLI_PRINTABLE_H

#include "base/buf.h"
#include "base/err.h"

enum { MB_ENTRYPOINT_SHOWN_MAX = 2000 }; /* bytes in a list; --json has all of it */

/* Appends text, control characters and what is no UTF-8 as \xNN. 0 or MB_ENOMEM. */
int mb_printable(const char *text, struct mb_buf *out);
/* err->text made printable; cut if it does not fit any more. */
void mb_err_printable(struct mb_err *err);

#endif
