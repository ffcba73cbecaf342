/*
 * Credentials of an object store, and the answers they come in: pure, time comes in. Sources: AWS,
 * "AssumeRoleWithWebIdentity" of the STS API reference; "IAM roles for Amazon EC2, retrieve
 * security credentials from instance metadata"; "Container credential provider" of the SDKs and
 * Tools reference guide.
 */
#ifndef MOBULA_BASE_S3_KEYS_H
#define MOBULA_BASE_S3_KEYS_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"
#include "base/secret.h"

struct mb_s3_keys {
    char *access_key;
    struct mb_secret *secret_key;
    struct mb_secret *session_token; /* NULL: none */
    uint64_t expires_unix_ms;        /* 0: never */
};

/* Zeroes k; of zeroes: nothing to do. */
void mb_s3_keys_close(struct mb_s3_keys *k);
/* Copies; token may be NULL or "". 0, MB_ENOMEM (k is zero). */
int mb_s3_keys_set(struct mb_s3_keys *k, const char *access_key, const char *secret_key,
                   const char *token);

/* 1 if text can be a key or a token: printable ASCII without blanks, at least one character. */
int mb_s3_keys_is_plain(const char *text);

/* A JSON object with AccessKeyId, SecretAccessKey, Token, Expiration: what instance metadata and
 * container endpoints answer. MB_EPROTO with a text that quotes nothing of it but its error code.
 * The bytes themselves are the caller's to wipe. */
int mb_s3_keys_from_json(const void *p, size_t n, struct mb_s3_keys *out, struct mb_err *err);
/* AssumeRoleWithWebIdentityResponse, or AssumeRoleResponse. */
int mb_s3_keys_from_sts(const void *p, size_t n, struct mb_s3_keys *out, struct mb_err *err);
/* "2026-11-22T09:50:00Z", fractions ignored: Unix ms. MB_EPROTO. */
int mb_s3_keys_time(const char *text, uint64_t *unix_ms);

enum mb_s3_keys_age {
    MB_S3_KEYS_FRESH,
    MB_S3_KEYS_AGING, /* still good, new ones should be fetched */
    MB_S3_KEYS_EXPIRED
};
/* Aging begins five minutes before the end, up to one minute (random: any bits) earlier, so that
 * the nodes of a cluster do not all ask at once; of keys that live shorter, at the middle of
 * lifetime_ms. */
enum mb_s3_keys_age mb_s3_keys_age(uint64_t expires_unix_ms, uint64_t lifetime_ms, uint64_t random,
                                   uint64_t now_unix_ms);

#endif
