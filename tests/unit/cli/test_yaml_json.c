/* YAML as PyYAML reads it, and what is refused. The values are those of yaml.safe_load and
 * json.dumps of PyYAML 6.0. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "base/alloc.h"
#include "cli/yaml_json.h"

static void is(const char *yaml, const char *json)
{
    struct mb_err err = {0};
    json_t *made;
    char *text;

    if (mb_yaml_json(yaml, strlen(yaml), &made, &err) != 0)
        fail_msg("%s: %s", yaml, err.text);
    text = json_dumps(made, JSON_ENCODE_ANY | JSON_COMPACT);
    assert_string_equal(text, json);
    free(text);
    json_decref(made);
}

static void refused(const char *yaml, const char *why)
{
    struct mb_err err = {0};
    json_t *made;

    assert_int_equal(mb_yaml_json(yaml, strlen(yaml), &made, &err), MB_EINVAL);
    assert_null(made);
    if (strstr(err.text, why) == NULL)
        fail_msg("%s\nis refused with: %s\nexpected:        %s", yaml, err.text, why);
}

static void test_a_runtime_env(void **state)
{
    (void)state;
    is("# of a job\n"
       "working_dir: ./code\n"
       "py_modules:\n"
       "  - mod\n"
       "  - s3://b/x.zip   # remote\n"
       "env_vars:\n"
       "  A: \"1\"\n"
       "  'B': yes it is\n"
       "  C: |\n"
       "    two\n"
       "    lines\n"
       "excludes: [\"*.txt\", data/]\n"
       "config: {eager_install: true, setup_timeout_seconds: 600}\n",
       "{\"working_dir\":\"./code\",\"py_modules\":[\"mod\",\"s3://b/x.zip\"],\"env_vars\":{\"A\":"
       "\"1\",\"B\":\"yes it is\",\"C\":\"two\\nlines\\n\"},\"excludes\":[\"*.txt\",\"data/\"],"
       "\"config\":{\"eager_install\":true,\"setup_timeout_seconds\":600}}");
    is("", "null");
    is("---\na: b\n...\n", "{\"a\":\"b\"}");
    is("{\"a\": [1, 2.5, null, \"\\u00e9\"]}", "{\"a\":[1,2.5,null,\"é\"]}");
}

static void test_words(void **state)
{
    (void)state;
    is("[yes, Yes, YES, yEs, y, on, Off, 'no', true, False]",
       "[true,true,true,\"yEs\",\"y\",true,false,\"no\",true,false]");
    is("[~, null, NULL, nUll, ]", "[null,null,null,\"nUll\"]");
    is("[0, 12, -3, +4, 1_000, 0x1F, 0b101, 017, 08, 0o17, -]",
       "[0,12,-3,4,1000,31,5,15,\"08\",\"0o17\",\"-\"]");
    is("[1.5, .5, 1., -0.25, 1.5e+3, 1e3, 1.5e3, 1_0.5, ., 1.2.3]",
       "[1.5,0.5,1.0,-0.25,1500.0,\"1e3\",\"1.5e3\",10.5,\".\",\"1.2.3\"]");
    is("[2026-11-22, 1:30, 10.0.0.1]", "[\"2026-11-22\",\"1:30\",\"10.0.0.1\"]");
    is("[!!str 12, ! 12, \"12\", !!int 12]", "[\"12\",12,\"12\",12]");
    is("{1: a, yes: b, ? c : d}", "{\"1\":\"a\",\"yes\":\"b\",\"c\":\"d\"}");
    is("a: &unused 1", "{\"a\":1}");
    is("'<<': 1", "{\"<<\":1}");
}

static void test_refused(void **state)
{
    static char deep[2 * MB_YAML_DEPTH_MAX + 3], wide[MB_YAML_MAX_BYTES + 2];

    (void)state;
    refused("a: &x [1]\nb: *x\n", "line 2: aliases (*name) are not taken");
    refused("a: &x b\n*x : 1\n", "line 2: aliases");
    refused("a: {b: 1}\nc:\n  <<: {d: 1}\n", "line 3: merge keys (<<) are not taken");
    refused("a: 1\nb: 2\na: 3\n", "line 3: the key a comes twice");
    refused("? [a]\n: 1\n", "line 1: a key has to be a word");
    refused("a: !!python/object/apply:os.system [ls]\n", "line 1: a tag");
    refused("a: !mine 1\n", "line 1: a tag");
    refused("a: 99999999999999999999\n", "does not fit into 64 bits");
    refused("a: .inf\n", "a number that JSON does not have");
    refused("a: \"x\\0y\"\n", "line 1: a text with a NUL");
    refused("\"x\\0y\": 1\n", "line 1: a key with a NUL");
    refused("a: 1\n--- \nb: 2\n", "line 2: a second document begins");
    refused("a: 1\n\tb: 2\n", "line 2: ");
    refused("a: [1, 2\nb: 3\n", "line 2: ");
    refused("a: b: c\n", "line 1: ");
    refused("a: \xff\n", "line 1: ");
    memset(deep, '[', MB_YAML_DEPTH_MAX);
    memset(deep + MB_YAML_DEPTH_MAX, ']', MB_YAML_DEPTH_MAX);
    json_t *made;
    assert_int_equal(mb_yaml_json(deep, strlen(deep), &made, NULL), 0);
    json_decref(made);
    memset(deep, '[', MB_YAML_DEPTH_MAX + 1);
    refused(deep, "more than 64 levels");
    memset(wide, 'a', sizeof(wide) - 1);
    refused(wide, "more than 1 MiB of YAML");
}

static void test_allocation_failures(void **state)
{
    static const char yaml[] = "a: {b: [c, 1], d: e}\n";
    int failed = 1;

    (void)state;
    for (unsigned long nth = 1; failed; nth++) {
        struct mb_err err = {0};
        json_t *made;
        mb_alloc_fail_nth(nth);
        int rc = mb_yaml_json(yaml, sizeof(yaml) - 1, &made, &err);
        failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        assert_int_equal(rc, failed ? MB_ENOMEM : 0);
        json_decref(made);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_runtime_env),
        cmocka_unit_test(test_words),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_allocation_failures),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
