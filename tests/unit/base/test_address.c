/* What a node may tell others to dial. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>
#include "base/address.h"

static void what_nobody_can_dial(void **state)
{
    static const struct {
        const char *address, *text;
    } cases[] = {
        {"", "--x '' is empty: expected the address of this machine that other nodes dial"},
        {"0.0.0.0",
         "--x 0.0.0.0 is a wildcard: expected the address of this machine that other nodes dial"},
        {"0.1.2.3",
         "--x 0.1.2.3 is a wildcard: expected the address of this machine that other nodes dial"},
        {"::", "--x :: is a wildcard: expected the address of this machine that other nodes dial"},
        {"::ffff:0.0.0.0", "--x ::ffff:0.0.0.0 is a wildcard: expected the address of this machine "
                           "that other nodes dial"},
        {"224.0.0.1", "--x 224.0.0.1 is a multicast address: expected the address of this machine "
                      "that other nodes dial"},
        {"ff02::1", "--x ff02::1 is a multicast address: expected the address of this machine that "
                    "other nodes dial"},
        {"999.1.1.1",
         "--x 999.1.1.1 is no address and no name: expected the address of this machine "
         "that other nodes dial"},
        {"10.0.0",
         "--x 10.0.0 is no address and no name: expected the address of this machine that "
         "other nodes dial"},
        {"1.2.3.4.5.6", "--x 1.2.3.4.5.6 is no address and no name: expected the address of this "
                        "machine that other nodes dial"},
        {"aaaaaaaaaabbbbbbbbbbccccccccccddddddddddeeeeeeeeeeffffffffff.com",
         "--x aaaaaaaaaabbbbbbbbbbccccccccccddddddddddeeeeeeeeeeffffffffff is too long (63 letters "
         "are possible): expected the address of this machine that other nodes dial"},
        {"255.255.255.255", "--x 255.255.255.255 is a reserved or broadcast address: expected the "
                            "address of this machine that other nodes dial"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct mb_err err = {0};

        assert_int_equal(mb_address_check("--x", cases[i].address, &err), MB_EINVAL);
        assert_string_equal(err.text, cases[i].text);
    }
}

static void what_may_be_right(void **state)
{
    static const char *const cases[] = {
        "127.0.0.1",     "127.9.9.9",
        "10.0.0.1",      "223.255.255.255",
        "::1",           "fe80::1",
        "2001:db8::7",   "head.example",
        "head.example.", "0x0",
        "localhost",     "a1.b2",
        "7.example",     "aaaaaaaaaabbbbbbbbbbccccccccccddddddddddeeeeeeeeeeffffffffff.co"};

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct mb_err err = {0};

        if (mb_address_check("--x", cases[i], &err) != 0)
            fail_msg("%s: %s", cases[i], err.text);
    }
}

static void heads(void **state)
{
    static const char *const right[] = {"h:1",        "10.0.0.1:6379", "a.b-c.example:65535",
                                        "[::1]:6379", "h:06379",       "a:1,b:2"},
                             *const wrong[] = {"",
                                               ":",
                                               "h",
                                               "h:",
                                               ":6379",
                                               "h:0",
                                               "h:65536",
                                               "h:99999",
                                               "h:4294973675",
                                               "h:-1",
                                               "h:+1",
                                               "h: 1",
                                               "h:1 ",
                                               "h:http",
                                               "http://h:1",
                                               "ray://h:10001",
                                               "h:1/",
                                               "a:1,",
                                               ",b:2",
                                               "a:1,b",
                                               "a:1,,b:2"};

    (void)state;
    for (size_t i = 0; i < sizeof(right) / sizeof(right[0]); i++) {
        struct mb_err err = {0};

        if (mb_address_check_heads("--x", right[i], &err) != 0)
            fail_msg("%s: %s", right[i], err.text);
    }
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        struct mb_err err = {0};
        char text[128];

        snprintf(text, sizeof(text),
                 "--x %s: expected HOST:PORT of the head's GCS, e.g. 10.0.0.1:6379", wrong[i]);
        assert_int_equal(mb_address_check_heads("--x", wrong[i], &err), MB_EINVAL);
        assert_string_equal(err.text, text);
    }
}

static void what_is_of_this_machine(void **state)
{
    (void)state;
    assert_false(mb_address_is_elsewhere("127.0.0.1"));
    assert_false(mb_address_is_elsewhere("127.9.9.9"));
    assert_false(mb_address_is_elsewhere("head.example"));
    assert_true(mb_address_is_elsewhere("203.0.113.7")); /* TEST-NET-3: nobody's (RFC 5737) */
}

/* The first one that the kernel would not give to loopback, or a sentence where there is none. */
static void what_others_reach(void **state)
{
    struct mb_err err = {0};
    char ip[64] = "";
    int rc = mb_address_find_own(ip, &err);

    (void)state;
    if (rc == MB_OK) {
        assert_int_not_equal(strncmp(ip, "127.", 4), 0);
        assert_false(mb_address_is_elsewhere(ip));
    } else {
        assert_int_equal(rc, MB_EUNAVAIL);
        assert_non_null(strstr(err.text, "--node-ip-address"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_nobody_can_dial),
        cmocka_unit_test(what_may_be_right),
        cmocka_unit_test(heads),
        cmocka_unit_test(what_is_of_this_machine),
        cmocka_unit_test(what_others_reach),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
