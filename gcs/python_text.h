/* A JSON value as Python's str() has it, for errors in Ray's words. Pure. */
#ifndef MOBULA_GCS_PYTHON_TEXT_H
#define MOBULA_GCS_PYTHON_TEXT_H

#include <jansson.h>
#include "base/buf.h"

/* Appends it: a string as it is, but quoted where it is inside of a list or a dict; 1.0, True,
 * None. 0 or MB_ENOMEM. */
int mb_python_str(const json_t *v, struct mb_buf *out);

#endif
