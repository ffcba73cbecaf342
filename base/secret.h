/*
 * Text that must not leave the process: keys, tokens. It lies in pages of its own that core dumps
 * leave out (MADV_DONTDUMP), that are not swapped where the system lets us, that a forked child
 * finds empty, and that are overwritten before they are given back. Any thread.
 */
#ifndef MOBULA_BASE_SECRET_H
#define MOBULA_BASE_SECRET_H

#include <stddef.h>

struct mb_secret;

/* A copy of n bytes and a NUL. NULL: out of memory, or text is NULL. */
struct mb_secret *mb_secret_create(const char *text, size_t n);
void mb_secret_destroy(struct mb_secret *s);
const char *mb_secret_text(const struct mb_secret *s); /* of NULL: NULL */
/* Overwrites what a secret went through on its way. */
void mb_secret_wipe(void *p, size_t n);
/* From now on this process leaves no core dump and shows its memory to no other process of the same
 * user. Called before the first secret is taken in; an exec undoes it. Processes under a sanitizer
 * stay as they are, since theirs looks at them like a debugger. */
void mb_secret_shut_process(void);
/* The same where the environment has keys of an object store, which a dump would show; at the very
 * beginning of a program. */
void mb_secret_shut_process_with_keys(void);

#endif
