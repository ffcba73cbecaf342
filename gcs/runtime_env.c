/*
 * env_vars: strings only, under names that an environment can have; an error names the variable and
 * never its value, which may be a secret. working_dir and py_modules: each a URI whose scheme says
 * where it is and whose end says that it can be unpacked, or a directory of the node. What would
 * change the program's surroundings in ways that are not ours (pip, conda, a container, ...) is
 * refused: a job that starts without it would fail later, or worse, not fail. excludes and config
 * have said what they had to say when a job is here (the client packs, and nothing is installed):
 * they are only looked at as Ray's RuntimeEnv does. Anything else is let be.
 */
#include "gcs/runtime_env.h"

#include <string.h>
#include "base/buf.h"
#include "base/str.h"
#include "gcs/python_text.h"

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

static int is_list_of_strings(const json_t *v)
{
    size_t i;
    json_t *item;

    if (!json_is_array(v))
        return 0;
    json_array_foreach(v, i, item) if (!json_is_string(item)) return 0;
    return 1;
}

static int check_timeout(const json_t *v, struct mb_err *err)
{
    json_int_t seconds = json_is_boolean(v) ? json_is_true(v) : json_integer_value(v);

    if (!json_is_integer(v) && !json_is_boolean(v))
        return mb_err_set(err, MB_EINVAL,
                          "setup_timeout_seconds must be of type int, got: <class '%s'>",
                          python_type(v));
    if (seconds <= 0 && seconds != -1)
        return mb_err_set(err, MB_EINVAL,
                          "setup_timeout_seconds must be greater than zero or equals to -1, got: "
                          "%" JSON_INTEGER_FORMAT,
                          seconds);
    return 0;
}

static int check_log_files(const json_t *files, struct mb_err *err)
{
    struct mb_buf text = {0};
    int rc;

    if (is_list_of_strings(files))
        return 0;
    if (json_is_array(files))
        return mb_err_set(err, MB_EINVAL, "Each item in log_files must be a string.");
    if (mb_python_str(files, &text) != 0)
        rc = mb_err_set(err, MB_ENOMEM, "out of memory");
    else
        rc = mb_err_set(err, MB_EINVAL,
                        "log_files must be a list of strings or None, got %.400s with type <class "
                        "'%s'>.",
                        mb_buf_str(&text), python_type(files));
    mb_buf_close(&text);
    return rc;
}

static int check_config(const json_t *config, struct mb_err *err)
{
    const json_t *timeout = json_object_get(config, "setup_timeout_seconds");
    const json_t *eager = json_object_get(config, "eager_install");
    const json_t *files = json_object_get(config, "log_files");
    int rc = 0;

    if (!config || json_is_null(config))
        return 0;
    if (!json_is_object(config))
        return mb_err_set(
            err, MB_EINVAL,
            "runtime_env['config'] must be of type dict or RuntimeEnvConfig, got: <class '%s'>",
            python_type(config));
    if (timeout && (rc = check_timeout(timeout, err)) != 0)
        return rc;
    if (eager && !json_is_boolean(eager))
        return mb_err_set(err, MB_EINVAL, "eager_install must be a boolean. got <class '%s'>",
                          python_type(eager));
    return files && !json_is_null(files) ? check_log_files(files, err) : 0;
}

static int check_excludes(const json_t *excludes, struct mb_err *err)
{
    if (!excludes || json_is_null(excludes) || is_list_of_strings(excludes))
        return 0;
    return mb_err_set(err, MB_EINVAL,
                      "runtime_env['excludes'] must be of type List[str], got <class '%s'>",
                      python_type(excludes));
}

int mb_runtime_env_parse(const json_t *env, struct mb_runtime_env *out, struct mb_err *err)
{
    const json_t *dir = json_object_get(env, "working_dir");
    int rc = check_unsupported(env, err);

    out->n_refs = 0;
    if (rc == 0)
        rc = check_vars(json_object_get(env, "env_vars"), err);
    if (rc == 0)
        rc = check_excludes(json_object_get(env, "excludes"), err);
    if (rc == 0)
        rc = check_config(json_object_get(env, "config"), err);
    if (rc == 0 && dir && !json_is_null(dir)) {
        if (json_is_string(dir))
            rc = add_ref(out, json_string_value(dir), 0, err);
        else
            rc = mb_err_set(err, MB_EINVAL, "`working_dir` must be a string, got <class '%s'>.",
                            python_type(dir));
    }
    return rc == 0 ? add_modules(out, json_object_get(env, "py_modules"), err) : rc;
}
