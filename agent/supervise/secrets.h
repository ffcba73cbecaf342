/*
 * What of an environment are keys of an object store: the agent has them, and what it starts gets
 * them only where somebody asks for that. libc only.
 */
#ifndef MOBULA_AGENT_SUPERVISE_SECRETS_H
#define MOBULA_AGENT_SUPERVISE_SECRETS_H

/* "NAME=value" or just "NAME". */
int mb_is_store_key(const char *var);

int mb_has_store_keys(char *const *env);

/* The variables that are none, in their order: one block for free(), which points into env. NULL:
 * no memory. */
char **mb_without_store_keys(char *const *env);

#endif
