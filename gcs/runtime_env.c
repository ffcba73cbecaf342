/*
 * env_vars: strings only, under names that an environment can have; an error names the variable and
 * never its value, which may be a secret. working_dir and py_modules: each a URI whose scheme says
 * where it is and whose end says that it can be unpacked, or a directory of the node. What would
 * change the program's surroundings in ways that are not ours (pip, conda, a container, ...) is
 * refused: a job that starts without it would fail later, or worse, not fail. Anything else says
 * how Ray's own agent works (config, ...) and is let be.
 */
#include "gcs/runtime_env.h"

#include <string.h>
#include "base/str.h"

static const struct {
    const char *scheme;
    enum mb_runtime_env_place place;
} schemes[] = {
    {"gcs://", MB_RUNTIME_ENV_UPLOADED},   {"http://", MB_RUNTIME_ENV_REMOTE},
    {"https://", MB_RUNTIME_ENV_REMOTE},   {"s3://", MB_RUNTIME_ENV_REMOTE},
    {"gs://", MB_RUNTIME_ENV_REMOTE},      {"azure://", MB_RUNTIME_ENV_REMOTE},
    {"abfss://", MB_RUNTIME_ENV_REMOTE},   {"file://", MB_RUNTIME_ENV_REMOTE},
    {"local://", MB_RUNTIME_ENV_IN_PLACE}, {"", MB_RUNTIME_ENV_IN_PLACE},
};
enum { N_SCHEMES = sizeof schemes / sizeof schemes[0] };

static const char *python_type(const json_t *v)
{
    return json_is_object(v)    ? "dict"
           : json_is_array(v)   ? "list"
           : json_is_string(v)  ? "str"
           : json_is_integer(v) ? "int"
           : json_is_real(v)    ? "float"
           : json_is_boolean(v) ? "bool"
                                : "NoneType";
}

/* The query of a URL is no part of its name. */
static int ends_with(const char *uri, const char *end)
{
    size_t n = strcspn(uri, "?"), m = strlen(end);

    return n >= m && memcmp(uri + n - m, end, m) == 0;
}

static int is_archive(const char *uri, int is_module)
{
    return ends_with(uri, ".zip") || ends_with(uri, ".tar.gz") || ends_with(uri, ".tgz") ||
           ends_with(uri, ".tar.xz") || (is_module && ends_with(uri, ".whl"));
}

static int add_ref(struct mb_runtime_env *out, const char *uri, int is_module, struct mb_err *err)
{
    const char *field = is_module ? "py_modules" : "working_dir";
    int i = 0;

    while (!mb_starts_with(uri, schemes[i].scheme))
        i++; /* the last one is "" */
    const char *rest = uri + strlen(schemes[i].scheme);
    enum mb_runtime_env_place place = schemes[i].place;
    if (i == N_SCHEMES - 1 && *uri != '/')
        return mb_err_set(err, MB_EINVAL,
                          "%.300s is not a valid URI. Passing directories or modules to be "
                          "dynamically uploaded is only supported at the job level (i.e., passed "
                          "to `ray.init`).",
                          uri);
    if (place == MB_RUNTIME_ENV_IN_PLACE && (*rest != '/' || is_archive(rest, 1)))
        return mb_err_set(err, MB_EINVAL,
                          "Invalid \"local://\" runtime_env URI \"%.300s\": the path must be %s",
                          uri,
                          *rest != '/' ? "absolute."
                                       : "a directory, not an archive. A local:// "
                                         "directory is used in place and is never "
                                         "unpacked.");
    if (place != MB_RUNTIME_ENV_IN_PLACE && !is_archive(rest, is_module))
        return mb_err_set(err, MB_EINVAL,
                          "Only .zip, %s.tar.gz, .tgz, .tar.xz files are supported for %s URIs; "
                          "got %.*s.",
                          is_module ? ".whl, " : "", field, (int)strcspn(uri, "?"), uri);
    if (out->n_refs == MB_RUNTIME_ENV_REFS_MAX)
        return mb_err_set(err, MB_EINVAL, "more than %d packages in runtime_env",
                          MB_RUNTIME_ENV_REFS_MAX);
    out->refs[out->n_refs++] = (struct mb_runtime_env_ref){uri, rest, place, is_module};
    return 0;
}

static int check_vars(const json_t *vars, struct mb_err *err)
{
    const char *name;
    json_t *value;

    if (!vars || json_is_null(vars))
        return 0;
    if (!json_is_object(vars))
        return mb_err_set(
            err, MB_EINVAL,
            "runtime_env['env_vars'] must be of type Dict[str, str], got <class '%s'>",
            python_type(vars));
    json_object_foreach((json_t *)vars, name, value)
    {
        if (*name == '\0' || strchr(name, '='))
            return mb_err_set(
                err, MB_EINVAL,
                "runtime_env['env_vars'] has the name '%.100s', which no variable can "
                "have",
                name);
        if (!json_is_string(value))
            return mb_err_set(err, MB_EINVAL,
                              "runtime_env['env_vars'] must be of type Dict[str, str], but the "
                              "value of %.100s is of type <class '%s'>",
                              name, python_type(value));
    }
    return 0;
}

static int add_modules(struct mb_runtime_env *out, const json_t *list, struct mb_err *err)
{
    size_t i;
    json_t *uri;
    int rc = 0;

    if (!list || json_is_null(list))
        return 0;
    if (!json_is_array(list))
        return mb_err_set(err, MB_EINVAL,
                          "`py_modules` must be a list of strings, got <class '%s'>.",
                          python_type(list));
    json_array_foreach(list, i, uri)
    {
        if (rc == 0 && !json_is_string(uri))
            rc = mb_err_set(err, MB_EINVAL,
                            "`py_modules` must be a list of strings, got <class '%s'>.",
                            python_type(uri));
        else if (rc == 0)
            rc = add_ref(out, json_string_value(uri), 1, err);
    }
    return rc;
}

/* What asks for nothing: null, "", [], {}. */
static int is_empty(const json_t *v)
{
    return v == NULL || json_is_null(v) || json_is_false(v) ||
           (json_is_string(v) && json_string_length(v) == 0) ||
           (json_is_array(v) && json_array_size(v) == 0) ||
           (json_is_object(v) && json_object_size(v) == 0);
}

static int check_unsupported(const json_t *env, struct mb_err *err)
{
    static const char *const fields[] = {
        "pip",
        "uv",
        "conda",
        "container",
        "image_uri",
        "nsight",
        "mpi",
        "rocprof_sys",
        "java_jars",
        "py_executable",
        "_nsight",
        "_rocprof_sys",
        "worker_process_setup_hook",
    };

    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++)
        if (!is_empty(json_object_get(env, fields[i])))
            return mb_err_set(
                err, MB_EINVAL,
                "runtime_env['%s'] is not supported by mobula's job agent: have it in "
                "the node's image, or bring it along in working_dir or py_modules",
                fields[i]);
    return 0;
}

int mb_runtime_env_parse(const json_t *env, struct mb_runtime_env *out, struct mb_err *err)
{
    const json_t *dir = json_object_get(env, "working_dir");
    int rc = check_unsupported(env, err);

    out->n_refs = 0;
    if (rc == 0)
        rc = check_vars(json_object_get(env, "env_vars"), err);
    if (rc == 0 && dir && !json_is_null(dir)) {
        if (json_is_string(dir))
            rc = add_ref(out, json_string_value(dir), 0, err);
        else
            rc = mb_err_set(err, MB_EINVAL, "`working_dir` must be a string, got <class '%s'>.",
                            python_type(dir));
    }
    return rc == 0 ? add_modules(out, json_object_get(env, "py_modules"), err) : rc;
}
