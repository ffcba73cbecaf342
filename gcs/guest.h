/*
 * The Jobs part of the head as a guest of a head that is Ray's: its dashboard hands jobs to this
 * node instead of its own agent, and reads what became of them from its KV
 * (docs/adr/0016-a-job-agent-is-a-guest.md). The inside of mb_head; loop thread only.
 */
#ifndef MOBULA_GCS_GUEST_H
#define MOBULA_GCS_GUEST_H

#include "gcs/services.h"

struct head_guest;

/* Opens the store and connects. The head's tables are there when this returns 0; jobs are taken
 * when the KV of Ray's head has what is here. */
int head_guest_open(struct mb_head *h, const struct mb_head_opts *o, struct mb_err *err);
/* After the store is closed; then cb. */
void head_guest_close(struct head_guest *g, void (*cb)(void *arg), void *arg);

/* NULL, or why no job is taken now. */
const char *head_guest_closed(const struct head_guest *g);
/* host:port of the GCS, for drivers. */
const char *head_guest_ray_address(const struct head_guest *g);
/* This node's address or id is another one: so say the records. */
void head_guest_moved(struct head_guest *g);
/* The drivers in Ray's job table whose submission has ended here are finished there, and so their
 * placement groups go. */
void head_guest_settle(struct head_guest *g);
/* Is a record of this id in the KV? then runs once: is_taken 1 or 0, or err. */
typedef void (*head_guest_id_cb)(void *arg, const struct mb_err *err, int is_taken);
int head_guest_ask_id(struct head_guest *g, const char *id, head_guest_id_cb cb, void *arg,
                      struct mb_err *err);

#endif
