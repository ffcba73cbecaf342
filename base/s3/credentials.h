/*
 * The credentials of one s3:// store: fetched when first needed, fetched anew before they expire or
 * when the server says that they have. Loop-thread only; see source.h for where they come from.
 */
#ifndef MOBULA_BASE_S3_CREDENTIALS_H
#define MOBULA_BASE_S3_CREDENTIALS_H

#include "base/s3/keys.h"

struct s3;
struct s3_credentials;

/* Keys in the environment are there at once; what else the environment names is looked at when keys
 * are asked for. MB_EDENIED, MB_EINVAL: half a pair, no source at all, an address that is not
 * allowed. s->region and
 * s->loop are set, s->http is before the first get. */
int s3_credentials_create(struct s3 *s, struct s3_credentials **out, struct mb_err *err);
/* After s->http was stopped and with no wait left. */
void s3_credentials_destroy(struct s3_credentials *c);

/* One request that waits; in its owner's memory. */
struct s3_wait {
    struct s3_wait *prev;
    struct s3_wait *next;
    int is_waiting;
    void (*ready)(void *arg, const struct mb_err *err); /* err->code 0: get again */
    void *arg;
};

/* Keys to sign with, borrowed until the next turn of the loop, or NULL: they are being fetched, and
 * w->ready follows from the loop, once. *generation tells these keys from later ones. */
const struct mb_s3_keys *s3_credentials_get(struct s3_credentials *c, struct s3_wait *w,
                                            unsigned *generation);
void s3_credentials_forget(struct s3_credentials *c, struct s3_wait *w);
/* The server took keys of this generation for expired. 1: others will be fetched; 0: there are no
 * others, they stand in the environment. */
int s3_credentials_reject(struct s3_credentials *c, unsigned generation);

#endif
