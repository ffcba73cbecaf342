/* What inputs.c decides without I/O. Nobody else includes this, but its test. */
#ifndef MOBULA_AGENT_UPLOAD_INPUTS_PLAN_H
#define MOBULA_AGENT_UPLOAD_INPUTS_PLAN_H

#include "agent/upload/inputs.h"

struct mb_input_file {
    char *key;  /* relative to the store, which is the URL's directory */
    char *name; /* below the local directory */
    uint64_t size_bytes;
    char etag[192];
};

/* "s3://b/dir", "name" of "s3://b/dir/name/"; MB_EINVAL without a name. Both owned, NULL on
 * failure. */
int mb_input_split(const char *url, char **store, char **name, struct mb_err *err);
/* A file of a tokenizer's directory, by its name and size. */
int mb_input_is_of_tokenizer(const char *name, uint64_t size_bytes);
/* The directory's name: 32 hex digits of URL and files. MB_ENOMEM. */
int mb_input_version(const char *url, const struct mb_input_file *files, size_t n, char out[33]);

#endif
