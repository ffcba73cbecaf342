/* The trainer's words in an attempt that goes on from what its run has saved. Pure. */
#ifndef MOBULA_CLI_DRIVER_WORDS_H
#define MOBULA_CLI_DRIVER_WORDS_H

#include <stddef.h>

/* --finetune and --no-load-optim speak of what a run begins with; where it goes on they would cost
 * it its place and its moments, and are left out. A run with --no-save-optim has no moments to go
 * on with: it gets --no-load-optim. argv ends with NULL; out has room for one word more than argv
 * has. Returns how many it got; they are argv's and constants. */
size_t drv_words_going_on(const char *const *argv, const char **out);
/* Whether they go on without moments. */
int drv_words_lack_optimizer(const char *const *argv);

#endif
