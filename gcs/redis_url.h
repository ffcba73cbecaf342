/*
 * redis://[user:password@]host[:port][/db][?prefix=NAME], as `--store` takes it. Pure.
 */
#ifndef MOBULA_GCS_REDIS_URL_H
#define MOBULA_GCS_REDIS_URL_H

#include "base/err.h"

struct mb_redis_url {
    char host[256];
    int port;           /* 6379 */
    int db;             /* 0 */
    char user[128];     /* "" if none */
    char password[512]; /* "" if none; never print it */
    char prefix[64];    /* of every key; "mobula" */
};

/* MB_EINVAL with what was expected (never quoting user or password); MB_EUNSUPPORTED: rediss://. */
int mb_redis_url_parse(const char *text, struct mb_redis_url *out, struct mb_err *err);
/* "redis://host:port/db?prefix=NAME", user and password left out; out has room for 512. */
void mb_redis_url_public(const struct mb_redis_url *u, char out[512]);

#endif
