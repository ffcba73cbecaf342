/*
 * What a submission's runtime_env asks for, checked as Ray's RuntimeEnv does, with its words. Pure.
 * Source: Ray 2.60, _private/runtime_env/validation.py and _common/runtime_env_uri.py.
 */
#ifndef MOBULA_GCS_RUNTIME_ENV_H
#define MOBULA_GCS_RUNTIME_ENV_H

#include <jansson.h>
#include <stddef.h>
#include "base/err.h"

enum { MB_RUNTIME_ENV_REFS_MAX = 64 };

enum mb_runtime_env_place {
    MB_RUNTIME_ENV_UPLOADED, /* gcs://NAME */
    MB_RUNTIME_ENV_REMOTE,   /* http, https, s3, gs, azure, abfss, file */
    MB_RUNTIME_ENV_IN_PLACE  /* local:///DIR, and an absolute path: there already */
};

struct mb_runtime_env_ref {
    const char *uri;  /* borrowed from the JSON */
    const char *rest; /* of the uri, behind its scheme: a package's name or a path */
    enum mb_runtime_env_place place;
    int is_module; /* of py_modules; else the working_dir */
};

struct mb_runtime_env {
    struct mb_runtime_env_ref refs[MB_RUNTIME_ENV_REFS_MAX];
    size_t n_refs;
};

/* env: an object or NULL. MB_EINVAL with Ray's text, or for more than MB_RUNTIME_ENV_REFS_MAX. */
int mb_runtime_env_parse(const json_t *env, struct mb_runtime_env *out, struct mb_err *err);

#endif
