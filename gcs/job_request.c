/*
 * Python's JSON has numbers of any size, and characters that are none; ours end at 64 bits, and are
 * text. What is lost between the two is refused with its place: nothing is stored as something
 * else.
 *
 * One table: field, type, and the words of the error. Ray drops nulls, then complains about unknown
 * fields, the missing entrypoint, and types, in this order.
 */
#include "gcs/job_request.h"

#include <ctype.h>
#include <string.h>
#include "base/str.h"
#include "gcs/job_list.h"

enum type { STRING, NUMBER, INTEGER, DICT, DICT_OF_STRING, DICT_OF_NUMBER };

static const struct {
    const char *name;
    enum type type;
    const char *expected;
} fields[] = {
    {"entrypoint", STRING, "a string"},
    {"submission_id", STRING, "a string if provided"},
    {"job_id", STRING, "a string if provided"},
    {"runtime_env", DICT, "a dict"},
    {"metadata", DICT_OF_STRING, "strings"},
    {"entrypoint_num_cpus", NUMBER, "a number"},
    {"entrypoint_num_gpus", NUMBER, "a number"},
    {"entrypoint_memory", INTEGER, "an integer"},
    {"entrypoint_resources", DICT_OF_NUMBER, "numbers"},
    {"entrypoint_label_selector", DICT_OF_STRING, "strings"},
};
enum { N_FIELDS = sizeof fields / sizeof fields[0] };

static const char *python_type(const json_t *v)
{
    switch (json_typeof(v)) {
    case JSON_OBJECT:
        return "dict";
    case JSON_ARRAY:
        return "list";
    case JSON_STRING:
        return "str";
    case JSON_INTEGER:
        return "int";
    case JSON_REAL:
        return "float";
    case JSON_TRUE:
    case JSON_FALSE:
        return "bool";
    case JSON_NULL:
        break;
    }
    return "NoneType";
}

/* Why this is JSON to Python and none to us, or NULL: it is none to both. */
static const char *only_theirs(const json_error_t *why)
{
    enum json_error_code code = json_error_code(why);

    if (code == json_error_null_character || code == json_error_null_byte_in_key)
        return "\\u0000 can be in no command, no variable and no name";
    if (code == json_error_numeric_overflow)
        return "a number must be one of 64 bits";
    /* jansson has no code of its own for these. */
    if (mb_starts_with(why->text, "invalid Unicode '"))
        return "half a surrogate pair is no character";
    return NULL;
}

int mb_job_request_parse(const char *body, size_t n, json_t **out, struct mb_err *err)
{
    json_error_t why = {0};

    *out = json_loadb(body ? body : "", n, 0, &why);
    if (json_is_object(*out))
        return 0;
    const char *text = *out ? NULL : only_theirs(&why);
    json_decref(*out);
    *out = NULL;
    if (text)
        return mb_err_set(err, MB_EINVAL, "%s: line %d, column %d of the request", text, why.line,
                          why.column);
    return mb_err_set(err, MB_EPROTO, "the request is no JSON object");
}

static int field_of(const char *name)
{
    for (int i = 0; i < N_FIELDS; i++)
        if (strcmp(fields[i].name, name) == 0)
            return i;
    return -1;
}

static int check_type(int i, json_t *v, struct mb_err *err)
{
    const char *name = fields[i].name, *key;
    enum type type = fields[i].type;
    json_t *item;
    int ok = type == STRING    ? json_is_string(v)
             : type == NUMBER  ? json_is_number(v)
             : type == INTEGER ? json_is_integer(v)
                               : json_is_object(v);

    if (!ok)
        return mb_err_set(err, MB_EINVAL, "%s must be %s, got <class '%s'>", name,
                          type >= DICT ? "a dict" : fields[i].expected, python_type(v));
    if (type != DICT_OF_STRING && type != DICT_OF_NUMBER)
        return 0;
    json_object_foreach(
        v, key,
        item) if (type == DICT_OF_STRING
                      ? !json_is_string(item)
                      : !json_is_number(
                            item)) return mb_err_set(err, MB_EINVAL,
                                                     "%s values must be %s, got <class '%s'>", name,
                                                     fields[i].expected, python_type(item));
    return 0;
}

/* Out goes what Ray does not see: nulls, and an empty id, for which it makes one up. A truth value
 * is a number to Python. */
static void clean(json_t *request)
{
    const char *key;
    json_t *value;
    void *tmp;

    json_object_foreach_safe(request, tmp, key, value)
    {
        int i = field_of(key);
        int is_id = strcmp(key, "submission_id") == 0 || strcmp(key, "job_id") == 0;

        if (json_is_null(value) ||
            (is_id && json_string_length(value) == 0 && json_is_string(value)))
            json_object_del(request, key);
        else if (i >= 0 && json_is_boolean(value) &&
                 (fields[i].type == NUMBER || fields[i].type == INTEGER))
            json_object_set_new(request, key, json_integer(json_is_true(value)));
    }
}

/* It becomes part of file names (agent/jobs.c takes the same ones), and is printed on terminals. */
static int is_id(const char *id)
{
    for (const char *p = id; *p; p++) {
        if (*p == '/' || iscntrl((unsigned char)*p))
            return 0;
    }
    return *id != '.' && strlen(id) <= MB_JOB_LIST_ID_MAX;
}

/* What has a meaning here and cannot have it is refused, not passed over. */
static int check_metadata(const json_t *metadata, struct mb_err *err)
{
    const char *pipefail = json_string_value(json_object_get(metadata, MB_JOB_PIPEFAIL_KEY));

    if (!pipefail || strcmp(pipefail, "0") == 0 || strcmp(pipefail, "1") == 0)
        return 0;
    return mb_err_set(err, MB_EINVAL, "metadata %s must be '0' or '1', got '%.40s'",
                      MB_JOB_PIPEFAIL_KEY, pipefail);
}

int mb_job_request_check(json_t *request, struct mb_err *err)
{
    const char *key;
    json_t *value;

    clean(request);
    json_object_foreach(request, key, value) if (field_of(key) < 0) return mb_err_set(
        err, MB_EINVAL,
        "JobSubmitRequest.__init__() got an unexpected keyword argument "
        "'%s'",
        key);
    if (!json_object_get(request, "entrypoint"))
        return mb_err_set(err, MB_EINVAL,
                          "JobSubmitRequest.__init__() missing 1 required positional argument: "
                          "'entrypoint'");
    for (int i = 0; i < N_FIELDS; i++) {
        json_t *v = json_object_get(request, fields[i].name);
        int rc = v ? check_type(i, v, err) : 0;
        if (rc != 0)
            return rc;
    }
    const char *names[] = {"submission_id", "job_id"};
    for (int i = 0; i < 2; i++) {
        const char *id = json_string_value(json_object_get(request, names[i]));
        if (id && !is_id(id))
            return mb_err_set(err, MB_EINVAL,
                              "%s must be 1 to 200 bytes without '/' and control characters, and "
                              "not start with '.'",
                              names[i]);
    }
    return check_metadata(json_object_get(request, "metadata"), err);
}
