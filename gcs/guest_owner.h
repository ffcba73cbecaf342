/*
 * Whose job is a record that another job agent of ours published? Pure; any thread.
 */
#ifndef MOBULA_GCS_GUEST_OWNER_H
#define MOBULA_GCS_GUEST_OWNER_H

#include <jansson.h>
#include <stddef.h>

/* record: n bytes of a JobInfo, whose driver_node_id is the node of the agent that has the job.
 * alive: an object with a key, in lower-case hex, for each node that is ALIVE. Returns that key
 * (borrowed from alive) if such a node other than our_hex has the job; else NULL: it may be
 * adopted. */
const char *head_guest_other_owner(const void *record, size_t n, const char *our_hex,
                                   json_t *alive);

#endif
