/* What a task of a Slurm step does, from the variables that srun of Slurm 22.05 sets. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>
#include "base/alloc.h"
#include "cli/slurm.h"

struct env {
    const char *rows[24][2];
};

static const char *get(void *arg, const char *name)
{
    const struct env *env = arg;

    for (int i = 0; env->rows[i][0] != NULL; i++)
        if (strcmp(env->rows[i][0], name) == 0)
            return env->rows[i][1];
    return NULL;
}

static struct env step(const char *node_id, const char *local_id)
{
    struct env env = {{{"SLURM_JOB_ID", "41"},
                       {"SLURM_STEP_ID", "0"},
                       {"SLURM_NODEID", node_id},
                       {"SLURM_LOCALID", local_id},
                       {"SLURM_STEP_NUM_NODES", "2"},
                       {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"},
                       {"SLURM_LAUNCH_NODE_IPADDR", "10.0.0.7"},
                       {"SLURM_CLUSTER_NAME", "big one/a"}}};
    return env;
}

static void add(struct env *env, const char *name, const char *value)
{
    int n = 0;

    while (env->rows[n][0] != NULL && strcmp(env->rows[n][0], name) != 0)
        n++;
    env->rows[n][0] = name;
    env->rows[n][1] = value;
}

static enum mb_slurm_role role(struct env env)
{
    struct mb_slurm s;
    struct mb_err err;

    assert_int_equal(mb_slurm_read(get, &env, &s, &err), 0);
    return s.role;
}

static void test_roles(void **state)
{
    struct env none = {{{NULL, NULL}}}, batch = step("0", "0"), job = step("0", "0");

    (void)state;
    batch.rows[1][0] = "SLURM_BATCH"; /* a batch script has no step id */
    add(&job, "RAY_JOB_CONFIG_JSON_ENV_VAR", "{}");
    assert_int_equal(role(none), MB_SLURM_NONE);
    assert_int_equal(role(batch), MB_SLURM_NONE);
    assert_int_equal(role(job), MB_SLURM_NONE);
    assert_int_equal(role(step("0", "0")), MB_SLURM_HEAD);
    assert_int_equal(role(step("1", "0")), MB_SLURM_NODE);
    assert_int_equal(role(step("0", "1")), MB_SLURM_COMPANION);
    assert_int_equal(role(step("1", "1")), MB_SLURM_COMPANION);
}

static void test_facts(void **state)
{
    struct env env = step("1", "0");
    struct mb_slurm s;
    struct mb_err err;

    (void)state;
    add(&env, "SLURM_RESTART_COUNT", "3");
    add(&env, "SLURM_GPUS_ON_NODE", "8");
    assert_int_equal(mb_slurm_read(get, &env, &s, &err), 0);
    assert_string_equal(s.key, "big_one_a-41.0.3");
    assert_int_equal(s.node_id, 1);
    assert_int_equal(s.n_nodes, 2);
    assert_int_equal(s.tasks_per_node, 2);
    assert_int_equal(s.gpus_per_node, 8);
    assert_string_equal(s.launch_ip, "10.0.0.7");
}

static void test_tasks_per_node(void **state)
{
    static const struct {
        const char *text;
        int64_t n;
    } rows[] = {{"1", 1},    {"8(x16)", 8}, {"2,1", 0}, {"2(x2),1", 0}, {"", 0},
                {"2(x2", 0}, {"x", 0},      {"0", 0},   {"3(y2)", 0}};

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct env env = step("0", "0");
        struct mb_slurm s;
        struct mb_err err;

        add(&env, "SLURM_STEP_TASKS_PER_NODE", rows[i].text);
        assert_int_equal(mb_slurm_read(get, &env, &s, &err), 0);
        assert_int_equal(s.tasks_per_node, rows[i].n);
    }
}

static void test_what_slurm_does_not_write(void **state)
{
    static const char *const rows[][2] = {
        {"SLURM_NODEID", "x"},          {"SLURM_NODEID", "-1"},  {"SLURM_NODEID", "2"},
        {"SLURM_LOCALID", ""},          {"SLURM_JOB_ID", "1e3"}, {"SLURM_STEP_NUM_NODES", "0"},
        {"SLURM_RESTART_COUNT", "two"}, {"SLURM_LOCALID", NULL}};

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct env env = step("0", "0");
        struct mb_slurm s;
        struct mb_err err = {0};

        add(&env, rows[i][0], rows[i][1]);
        assert_int_equal(mb_slurm_read(get, &env, &s, &err), MB_EINVAL);
        assert_non_null(strstr(err.text, rows[i][0]));
        assert_int_equal(s.role, MB_SLURM_NONE);
    }
}

static void test_meeting_round_trip(void **state)
{
    char *text, *address, *token;
    struct mb_err err;

    (void)state;
    assert_int_equal(mb_slurm_meet_format("10.0.0.7:6379", "0a1b", &text, &err), 0);
    assert_int_equal(mb_slurm_meet_parse(text, &address, &token, &err), 0);
    assert_string_equal(address, "10.0.0.7:6379");
    assert_string_equal(token, "0a1b");
    mb_free(address);
    mb_free(token);
    for (unsigned long nth = 1; nth <= 2; nth++) {
        mb_alloc_fail_nth(nth);
        assert_int_equal(mb_slurm_meet_parse(text, &address, &token, &err), MB_ENOMEM);
        assert_true(mb_alloc_did_fail());
        mb_alloc_fail_nth(0);
        assert_null(address);
        assert_null(token);
    }
    mb_free(text);
}

static void test_meeting_damaged(void **state)
{
    static const char *const rows[] = {"",
                                       "{\"address\": \"a:1\", \"tok",
                                       "[]",
                                       "{}",
                                       "{\"address\": 5, \"token\": \"t\"}",
                                       "{\"address\": \"a:1\"}",
                                       "{\"address\": \"\", \"token\": \"t\"}",
                                       "{\"address\": \"a:1\", \"token\": \"\"}",
                                       "{\"address\": \"a:1\", \"token\": \"t\\r\\nx: y\"}"};

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        char *address, *token;
        struct mb_err err = {0};

        assert_int_equal(mb_slurm_meet_parse(rows[i], &address, &token, &err), MB_EPROTO);
        assert_null(address);
        assert_null(token);
        assert_true(err.text[0] != '\0');
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_roles),
        cmocka_unit_test(test_facts),
        cmocka_unit_test(test_tasks_per_node),
        cmocka_unit_test(test_what_slurm_does_not_write),
        cmocka_unit_test(test_meeting_round_trip),
        cmocka_unit_test(test_meeting_damaged),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
