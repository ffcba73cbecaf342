/*
 * Flushes a file beside the loop: a busy disk takes seconds for it, and an agent that waits answers
 * nobody. What was written is safe from kills at once, from a loss of power once the flush is
 * through.
 */
#ifndef MOBULA_AGENT_UPLOAD_FLUSHER_H
#define MOBULA_AGENT_UPLOAD_FLUSHER_H

struct mb_flusher;

struct mb_flusher *mb_flusher_create(void); /* NULL: out of memory */
/* Soon; what is asked for while one is under way is another one, and one only. fd is borrowed. */
void mb_flusher_file(struct mb_flusher *f, int fd);
void mb_flusher_dir(struct mb_flusher *f, int fd);
/* errno of the first flush that failed since this was asked last, 0: none. */
int mb_flusher_failed(struct mb_flusher *f);
/* What was asked for is still done. NULL is legal. */
void mb_flusher_leave(struct mb_flusher *f);

#endif
