/* runtime_env as Ray checks it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>
#include "gcs/runtime_env.h"

static struct mb_runtime_env env;
static struct mb_err err;
static json_t *json; /* env borrows from it */

static int parse(const char *text)
{
    json_decref(json);
    json = json_loads(text, 0, NULL);
    assert_non_null(json);
    err = (struct mb_err){0};
    return mb_runtime_env_parse(json, &env, &err);
}

static void references(void **state)
{
    static const struct {
        const char *uri, *rest;
        enum mb_runtime_env_place place;
    } t[] = {
        {"gcs://_ray_pkg_1.zip", "_ray_pkg_1.zip", MB_RUNTIME_ENV_UPLOADED},
        {"https://h/a/b.tar.gz?token=x", "h/a/b.tar.gz?token=x", MB_RUNTIME_ENV_REMOTE},
        {"s3://bucket/a.tgz", "bucket/a.tgz", MB_RUNTIME_ENV_REMOTE},
        {"file:///a/b.tar.xz", "/a/b.tar.xz", MB_RUNTIME_ENV_REMOTE},
        {"local:///in/the/image", "/in/the/image", MB_RUNTIME_ENV_IN_PLACE},
        {"/shared/code", "/shared/code", MB_RUNTIME_ENV_IN_PLACE},
    };

    (void)state;
    for (size_t i = 0; i < sizeof t / sizeof t[0]; i++) {
        json_decref(json);
        json = json_pack("{s:s, s:[s]}", "working_dir", t[i].uri, "py_modules", t[i].uri);
        assert_int_equal(mb_runtime_env_parse(json, &env, &err), 0);
        assert_int_equal(env.n_refs, 2);
        for (int k = 0; k < 2; k++) {
            assert_string_equal(env.refs[k].uri, t[i].uri);
            assert_string_equal(env.refs[k].rest, t[i].rest);
            assert_int_equal(env.refs[k].place, t[i].place);
            assert_int_equal(env.refs[k].is_module, k);
        }
    }
    assert_int_equal(parse("{\"py_modules\": [\"gcs://a-1.0-py3-none-any.whl\"]}"), 0);
    assert_int_equal(parse("{}"), 0);
    assert_int_equal(env.n_refs, 0);
    assert_int_equal(parse("{\"working_dir\": null, \"py_modules\": null, \"env_vars\": null}"), 0);
    assert_int_equal(mb_runtime_env_parse(NULL, &env, &err), 0);
    assert_int_equal(parse("{\"excludes\": [\"x\"]}"), 0);
}

static void refusals(void **state)
{
    static const struct {
        const char *text, *error;
    } t[] = {
        {"{\"working_dir\": 3}", "`working_dir` must be a string, got <class 'int'>."},
        {"{\"py_modules\": \"x\"}", "`py_modules` must be a list of strings, got <class 'str'>."},
        {"{\"py_modules\": [1.5]}", "`py_modules` must be a list of strings, got <class 'float'>."},
        {"{\"working_dir\": \"s3://b/a\"}",
         "Only .zip, .tar.gz, .tgz, .tar.xz files are supported for working_dir URIs; got "
         "s3://b/a."},
        {"{\"working_dir\": \"gcs://a.whl\"}", "Only .zip, .tar.gz"},
        {"{\"py_modules\": [\"http://h/x.egg?secret=1\"]}", "got http://h/x.egg."},
        {"{\"working_dir\": \"bogus://x/a.zip\"}", "bogus://x/a.zip is not a valid URI. Passing"},
        {"{\"working_dir\": \"relative\"}", "relative is not a valid URI."},
        {"{\"working_dir\": \"local://relative\"}", "the path must be absolute."},
        {"{\"working_dir\": \"local:///a.zip\"}", "the path must be a directory"},
        {"{\"env_vars\": {\"A\": 1}}",
         "runtime_env['env_vars'] must be of type Dict[str, str], but the value of A is of type "
         "<class 'int'>"},
        {"{\"pip\": [\"x\"]}", "runtime_env['pip'] is not supported"},
        {"{\"uv\": {\"packages\": [\"x\"]}}", "runtime_env['uv'] is not supported"},
        {"{\"conda\": \"env\"}", "runtime_env['conda'] is not supported"},
        {"{\"image_uri\": \"a/b\"}", "runtime_env['image_uri'] is not supported"},
        {"{\"env_vars\": {\"A\": null}}", "the value of A is of type <class 'NoneType'>"},
        {"{\"env_vars\": \"A=B\"}",
         "runtime_env['env_vars'] must be of type Dict[str, str], got <class 'str'>"},
        {"{\"env_vars\": [\"A=B\"]}", "Dict[str, str], got <class 'list'>"},
        {"{\"env_vars\": {\"A=B\": \"C\"}}",
         "runtime_env['env_vars'] has the name 'A=B', which no variable can have"},
        {"{\"env_vars\": {\"\": \"C\"}}", "has the name '', which no variable can have"},
        {"{\"config\": {\"log_files\": [\"x\", 5]}}", "Each item in log_files must be a string."},
        {"{\"config\": {\"log_files\": 5}}",
         "log_files must be a list of strings or None, got 5 with type <class 'int'>."},
        {"{\"config\": {\"log_files\": \"it's\"}}", "None, got it's with type <class 'str'>."},
        {"{\"config\": {\"log_files\": false}}", "None, got False with type <class 'bool'>."},
        {"{\"config\": {\"log_files\": 1.5e-7}}", "None, got 1.5e-07 with type <class 'float'>."},
        {"{\"config\": {\"log_files\": {\"a\": [null, 100000.0, 0.1, -1e16, 123456789012345.0]}}}",
         "None, got {'a': [None, 100000.0, 0.1, -1e+16, 123456789012345.0]} with type <class "
         "'dict'>."},
        {"{\"config\": {\"log_files\": {\"it's\": {\"x\\\\\\n\\u0001\": \"\\\"'\"}, \"b\": {}}}}",
         "None, got {\"it's\": {'x\\\\\\n\\x01': '\"\\''}, 'b': {}} with type <class 'dict'>."},
    };

    (void)state;
    for (size_t i = 0; i < sizeof t / sizeof t[0]; i++) {
        assert_int_equal(parse(t[i].text), MB_EINVAL);
        if (!strstr(err.text, t[i].error))
            fail_msg("%s: %s", t[i].text, err.text);
        assert_int_not_equal(mb_runtime_env_parse(json, &env, NULL), 0); /* who wants no reason */
    }
}

/* What asks for nothing, and what says how Ray's own agent works. */
static void let_be(void **state)
{
    (void)state;
    assert_int_equal(
        parse("{\"pip\": [], \"conda\": null, \"container\": {}, \"image_uri\": \"\"}"), 0);
    assert_int_equal(parse("{\"config\": {\"setup_timeout_seconds\": 9}, \"_ray_commit\": \"x\"}"),
                     0);
    assert_int_equal(env.n_refs, 0);
}

static void bound(void **state)
{
    json_t *list = json_array();

    (void)state;
    for (int i = 0; i <= MB_RUNTIME_ENV_REFS_MAX; i++)
        json_array_append_new(list, json_string("gcs://a.zip"));
    json_decref(json);
    json = json_pack("{s:o}", "py_modules", list);
    assert_int_equal(mb_runtime_env_parse(json, &env, &err), MB_EINVAL);
    json_decref(json);
    json = NULL;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(references),
        cmocka_unit_test(refusals),
        cmocka_unit_test(let_be),
        cmocka_unit_test(bound),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
