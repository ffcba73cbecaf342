/*
 * What an attempt of a gang has saved, and what became of it: pure. What was heard of an iteration
 * never goes back: the word of a save may come late, from another node, after that of its commit.
 * Only what was saved again, with other files than the store has and keeps, is durable no more.
 */
#ifndef MOBULA_CLI_DRIVER_SAVES_H
#define MOBULA_CLI_DRIVER_SAVES_H

#include <stdint.h>
#include "base/err.h"

enum mb_drv_save {
    MB_DRV_SAVE_OPEN,
    MB_DRV_SAVE_GIVEN_UP,
    MB_DRV_SAVE_DURABLE,
    MB_DRV_SAVE_OUTDATED /* the store has what it was before */
};

struct mb_drv_saves; /* opaque */

struct mb_drv_saves *mb_drv_saves_create(void); /* NULL: memory is out */
void mb_drv_saves_destroy(struct mb_drv_saves *s);

int mb_drv_saves_note(struct mb_drv_saves *s, int64_t iteration,
                      enum mb_drv_save save); /* MB_ENOMEM */

/* 1: not known to be durable, nor older than what was forgotten of those that are. */
int mb_drv_saves_is_open(const struct mb_drv_saves *s, int64_t iteration);
/* The oldest that was given up, and did not become durable by another's doing, or is outdated; -1:
 * none. */
int64_t mb_drv_saves_given_up(const struct mb_drv_saves *s);
/* The oldest iteration above `after` that may yet turn out to be durable and has to; -1: none. What
 * was given up is among them only as the newest of all. One that has keep_last (0: no limit)
 * durable iterations above it would be gone from the store by now: nobody lacks it. */
int64_t mb_drv_saves_open(const struct mb_drv_saves *s, int64_t after, uint32_t keep_last);

#endif
