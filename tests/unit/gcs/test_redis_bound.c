/* What an answer of Redis announces is bounded before anything is allocated for it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include "gcs/redis_bound.h"

static int feed(redisReader *reader, const char *text, void **reply)
{
    *reply = NULL;
    assert_int_equal(redisReaderFeed(reader, text, strlen(text)), REDIS_OK);
    return redisReaderGetReply(reader, reply);
}

static void check(const char *text, size_t max, int rc)
{
    redisReader *reader = redisReaderCreate();
    struct redis_bound bound;
    void *reply;

    assert_non_null(reader);
    redis_bound_reader(&bound, reader, max);
    assert_int_equal(feed(reader, text, &reply), rc);
    if (rc == REDIS_OK) {
        assert_non_null(reply);
        freeReplyObject(reply);
    } else {
        assert_null(reply);
        assert_int_not_equal(reader->err, 0);
    }
    redisReaderFree(reader);
}

static void too_many_elements_are_refused(void **state)
{
    (void)state;
    check("*2147483647\r\n", REDIS_ELEMENTS_MAX, REDIS_ERR);
    check("*16777217\r\n", REDIS_ELEMENTS_MAX, REDIS_ERR);
    check("*3\r\n:1\r\n:2\r\n:3\r\n", 2, REDIS_ERR);
    check("*1\r\n*2147483647\r\n", REDIS_ELEMENTS_MAX, REDIS_ERR);
}

static void as_many_as_allowed_are_read(void **state)
{
    (void)state;
    check("*2\r\n:1\r\n*2\r\n$1\r\na\r\n$-1\r\n", 2, REDIS_OK);
    check("*0\r\n", 0, REDIS_OK);
    check("*-1\r\n", 0, REDIS_OK);
    check("$3\r\nabc\r\n", 0, REDIS_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(too_many_elements_are_refused),
        cmocka_unit_test(as_many_as_allowed_are_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
