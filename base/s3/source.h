/*
 * Where credentials come from: pure. The environment is a function, files are text that was read.
 * Names and order as AWS's SDKs and Tools reference guide has them, with BUCKET_STORAGE_ACCESS_KEY
 * and BUCKET_STORAGE_SECRET_KEY in front:
 *   keys in the environment; AWS_ROLE_ARN with AWS_WEB_IDENTITY_TOKEN_FILE; the profile in
 *   AWS_SHARED_CREDENTIALS_FILE and AWS_CONFIG_FILE; AWS_CONTAINER_CREDENTIALS_*; instance
 * metadata.
 */
#ifndef MOBULA_BASE_S3_SOURCE_H
#define MOBULA_BASE_S3_SOURCE_H

#include "base/s3/keys.h"

typedef const char *(*mb_s3_env_fn)(void *arg, const char *name); /* NULL: not set */

enum mb_s3_source_kind {
    MB_S3_FROM_KEYS,      /* they are in keys */
    MB_S3_FROM_ROLE,      /* STS, with the token in token_file */
    MB_S3_FROM_FILES,     /* the two files, then what follows */
    MB_S3_FROM_CONTAINER, /* GET url, with the token in token_file or token */
    MB_S3_FROM_METADATA,  /* IMDSv2 at url */
    MB_S3_FROM_NOWHERE
};

/* All strings are owned and may be NULL. */
struct mb_s3_source {
    enum mb_s3_source_kind kind;
    struct mb_s3_keys keys;
    char *role_arn;
    char *session_name;
    char *token_file;
    struct mb_secret *token;
    char *url; /* of STS, the container's endpoint, the metadata service */
    /* FILES */
    char *profile;
    int is_named; /* asked for by AWS_PROFILE: it must be there */
    char *credentials_file;
    char *config_file;
    char *region; /* from the profile */
};

/* The first source that the environment names. MB_EINVAL: a variable is set without its other half,
 * or an address that is not allowed. */
int mb_s3_source_choose(mb_s3_env_fn env, void *arg, const char *region, struct mb_s3_source *out,
                        struct mb_err *err);
/* After FILES had nothing: container or metadata, by the environment. */
int mb_s3_source_after_files(mb_s3_env_fn env, void *arg, struct mb_s3_source *out,
                             struct mb_err *err);
/* Of a FILES source: what its profile says. credentials and config are the files' text, wiped by
 * the caller; NULL: no such file. *io becomes KEYS, ROLE, or stays FILES when the profile has no
 * credentials. MB_EDENIED: the named profile does not exist. MB_EUNSUPPORTED: it wants
 * source_profile, credential_source, credential_process or sso_*, by name. */
int mb_s3_source_read_files(struct mb_s3_source *io, mb_s3_env_fn env, void *arg,
                            const char *region, const char *credentials, size_t n_credentials,
                            const char *config, size_t n_config, struct mb_err *err);
void mb_s3_source_close(struct mb_s3_source *s); /* zeroes it */
/* "amazonaws.com", or that of the region's own partition. */
const char *mb_s3_aws_domain(const char *region);
const char *mb_s3_source_name(enum mb_s3_source_kind kind); /* for people */

/* An INI file as AWS's tools read it: each "name = value" of a section; lines that are indented
 * belong to the name above and are left out. Returns what cb returned when negative, else 0. */
struct mb_s3_ini_pair {
    const char *section;
    size_t n_section;
    const char *name;
    size_t n_name;
    const char *value;
    size_t n_value;
};
typedef int (*mb_s3_ini_cb)(void *arg, const struct mb_s3_ini_pair *pair);
int mb_s3_ini_parse(const char *text, size_t n, mb_s3_ini_cb cb, void *arg);

#endif
