/* The directory of a head that ended, by whatever it ended, for another head to go on in. */
#ifndef MOBULA_CLI_START_RESUME_H
#define MOBULA_CLI_START_RESUME_H

#include "base/err.h"

/* Of the directories in temp_dir that hold the store of a head which does not run, the one that was
 * written last: *dir is the caller's, NULL if there is none. */
int mb_start_resume_find(const char *temp_dir, char **dir, struct mb_err *err);
/* What the head that ended said of itself goes, so that nobody takes it for the new one's word. */
int mb_start_resume_take(const char *dir, struct mb_err *err);

#endif
