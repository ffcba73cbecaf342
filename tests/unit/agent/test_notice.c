/* Notices of clouds and files; a pod's durations. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>
#include "agent/notice.h"

static const uint64_t now = 1000000000000u; /* 2001-09-09T01:46:40Z */

static int read_text(const char *text, uint64_t *ms)
{
    struct mb_err err = {0};

    return mb_notice_read(text, strlen(text), now, ms, &err);
}

static void test_notices(void **state)
{
    static const struct {
        const char *text;
        uint64_t ms;
    } notices[] = {
        {"", 0},
        {" \n", 0},
        {"{\"action\": \"terminate\", \"time\": \"2001-09-09T01:48:40Z\"}\n", 1000000120000},
        {"{\"action\": \"hibernate\", \"time\": \"2001-09-09T01:48:40Z\", \"x\": 1}",
         1000000120000},
        {"2001-09-09T01:48:40Z", 1000000120000},
        {"TRUE", 1000000030000},
        {"true\n", 1000000030000},
        {"TERMINATE_ON_HOST_MAINTENANCE", 1000000060000},
        {"120s\n", 1000000120000},
        {"@1000000120", 1000000120000},
    };
    uint64_t ms;

    (void)state;
    for (size_t i = 0; i < sizeof(notices) / sizeof(notices[0]); i++) {
        if (read_text(notices[i].text, &ms) != 1)
            fail_msg("\"%s\" is no notice", notices[i].text);
        assert_int_equal(ms, notices[i].ms);
    }
    assert_int_equal(read_text("FALSE", &ms), 0);
    assert_int_equal(read_text("NONE\n", &ms), 0);
    assert_int_equal(read_text("MIGRATE_ON_HOST_MAINTENANCE", &ms), 0);
}

static void test_nonsense(void **state)
{
    static const char *const bad[] = {
        "{",
        "{}",
        "{\"action\": \"terminate\"}",
        "{\"time\": \"2001-09-09T01:48:40Z\"}",
        "{\"action\": 3, \"time\": \"2001-09-09T01:48:40Z\"}",
        "{\"action\": \"terminate\", \"time\": \"soon\"}",
        "<html>not found</html>",
        "[]",
    };
    char long_text[1000];
    struct mb_err err = {0};
    uint64_t ms;

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        if (read_text(bad[i], &ms) != MB_EPROTO)
            fail_msg("\"%s\" was taken", bad[i]);
    memset(long_text, '1', sizeof(long_text));
    assert_int_equal(mb_notice_read(long_text, sizeof(long_text), now, &ms, &err), MB_EPROTO);
    assert_int_equal(mb_notice_read("TRUE\0x", 6, now, &ms, &err), MB_EPROTO);
}

static const char *active, *allowance, *margin;

static const char *get(const char *name)
{
    if (strcmp(name, "MOBULA_ACTIVE_DEADLINE_SECONDS") == 0)
        return active;
    if (strcmp(name, "MOBULA_DEADLINE_MARGIN_SECONDS") == 0)
        return margin;
    assert_string_equal(name, "MOBULA_START_ALLOWANCE_SECONDS");
    return allowance;
}

static uint64_t deadline(const char *a, const char *b)
{
    struct mb_err err = {0};
    uint64_t ms = 7;

    active = a;
    allowance = b;
    if (mb_notice_active_deadline(get, now, &ms, &err) != MB_OK) {
        assert_non_null(strstr(err.text, "MOBULA_"));
        return 1;
    }
    return ms;
}

static void test_active_deadline(void **state)
{
    (void)state;
    assert_int_equal(deadline(NULL, NULL), 0);
    assert_int_equal(deadline("", "60"), 0);
    assert_int_equal(deadline("0", NULL), 0);
    assert_int_equal(deadline("3600", NULL), now + 3480000);
    assert_int_equal(deadline("3600", "0"), now + 3600000);
    assert_int_equal(deadline("100", NULL), now + 50000); /* at most half of it is taken off */
    assert_int_equal(deadline("1h", NULL), 1);
    assert_int_equal(deadline("-1", NULL), 1);
    assert_int_equal(deadline("3600", "x"), 1);
}

static void test_margin(void **state)
{
    (void)state;
    margin = "";
    assert_int_equal(deadline("3600", NULL), now + 3480000);
    margin = "300";
    assert_int_equal(deadline("3600", NULL), now + 3180000);
    assert_int_equal(deadline("3600", "0"), now + 3300000);
    assert_int_equal(deadline("600", "0"), now + 300000); /* exactly half */
    assert_int_equal(deadline("600", "60"), now + 300000);
    assert_int_equal(deadline("601", "0"), now + 301000);
    assert_int_equal(deadline("0", NULL), 0);
    assert_int_equal(deadline(NULL, NULL), 0);
    margin = "2147483647";
    assert_int_equal(deadline("2147483647", "2147483647"), now + 1073741824000 - 500);
    margin = "2147483648";
    assert_int_equal(deadline("3600", NULL), 1);
    margin = "-1";
    assert_int_equal(deadline("3600", NULL), 1);
    margin = "5m";
    assert_int_equal(deadline("3600", NULL), 1);
    assert_int_equal(deadline(NULL, NULL), 1); /* said also where nothing is taken off */
    margin = NULL;
}

/* Of two sources the earlier counts, whichever comes first and however often they say it. */
static void test_two_sources(void **state)
{
    struct mb_notice_times t = {0};

    (void)state;
    assert_int_equal(mb_notice_take(&t, MB_NOTICE_URL, now + 900), 1);
    assert_int_equal(mb_notice_take(&t, MB_NOTICE_FILE, now + 100), 1);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(mb_notice_take(&t, MB_NOTICE_URL, now + 900), 0);
        assert_int_equal(mb_notice_take(&t, MB_NOTICE_FILE, now + 100), 0);
        assert_int_equal(t.told_ms, now + 100);
    }
    assert_int_equal(mb_notice_take(&t, MB_NOTICE_FILE, now + 2000), 1); /* now the other one is */
    assert_int_equal(t.told_ms, now + 900);
    assert_int_equal(mb_notice_take(&t, MB_NOTICE_FILE, 0), 1); /* soon */
    assert_int_equal(t.told_ms, 0);
    assert_int_equal(mb_notice_take(&t, MB_NOTICE_URL, now + 50), 0);
    assert_int_equal(t.told_ms, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_notices),     cmocka_unit_test(test_nonsense),
        cmocka_unit_test(test_two_sources), cmocka_unit_test(test_active_deadline),
        cmocka_unit_test(test_margin),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
