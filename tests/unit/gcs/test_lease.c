/* The lease, by itself and in a crowd: whatever is lost, delayed or paused, two heads never serve
 * at the same time, and after the last fault one of them serves. Redis's address, too. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "gcs/lease.h"
#include "gcs/redis_url.h"

enum { TTL_MS = 3000, HEADS = 3, ROUNDS = 2000, SEEDS = 300 };

static void a_renewed_lease_stays_valid(void **state)
{
    struct mb_lease l;

    (void)state;
    mb_lease_init(&l, TTL_MS, 1000);
    assert_int_equal(mb_lease_tick(&l, 1000), 1);
    assert_int_equal(mb_lease_tick(&l, 1000), 0); /* one question at a time */
    mb_lease_granted(&l, 7);
    assert_true(mb_lease_valid(&l, 1000 + 2699));
    assert_false(mb_lease_valid(&l, 1000 + 2700));
    assert_int_equal(mb_lease_tick(&l, 1999), 0);
    assert_int_equal(mb_lease_tick(&l, 2000), 1);
    mb_lease_renewed(&l);
    assert_true(mb_lease_valid(&l, 2000 + 2699));
    assert_int_equal(l.epoch, 7);
}

static void an_unanswered_question_is_asked_again(void **state)
{
    struct mb_lease l;

    (void)state;
    mb_lease_init(&l, TTL_MS, 0);
    assert_int_equal(mb_lease_tick(&l, 0), 1);
    mb_lease_unanswered(&l, 50);
    assert_int_equal(mb_lease_tick(&l, 149), 0);
    assert_int_equal(mb_lease_tick(&l, 150), 1);
}

static void a_deposed_head_stays_deposed(void **state)
{
    struct mb_lease l;

    (void)state;
    mb_lease_init(&l, TTL_MS, 0);
    mb_lease_tick(&l, 0);
    mb_lease_granted(&l, 1);
    mb_lease_deposed(&l);
    assert_false(mb_lease_valid(&l, 1));
    mb_lease_granted(&l, 2);
    mb_lease_renewed(&l);
    assert_false(mb_lease_valid(&l, 1));
    assert_int_equal(mb_lease_tick(&l, 100000), 0);
}

/* ---- a crowd ---- */

static uint64_t rng;

static uint64_t random_below(uint64_t n)
{
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return rng % n;
}

/* The store: what the scripts do. */
struct keeper {
    int holder; /* -1: none */
    uint64_t until_ms;
    int64_t epoch;
};

struct head {
    struct mb_lease l;
    uint64_t paused_until_ms; /* hung, as by SIGSTOP */
    /* the question on its way there and its answer on its way back */
    int asked, answered, was_renewal, granted;
    uint64_t arrives_ms, returns_ms;
    int64_t epoch;
    uint64_t left_ms;
};

static void keeper_takes(struct keeper *k, int i, struct head *h, uint64_t now)
{
    h->answered = 1;
    h->returns_ms = now + random_below(400);
    if (h->was_renewal) {
        h->granted = h->l.epoch == k->epoch;
        if (h->granted) {
            k->holder = i;
            k->until_ms = now + TTL_MS;
        }
        return;
    }
    h->granted = k->holder < 0 || k->holder == i || now >= k->until_ms;
    h->left_ms = h->granted ? 0 : k->until_ms - now;
    if (h->granted) {
        k->holder = i;
        k->until_ms = now + TTL_MS;
        h->epoch = ++k->epoch;
    }
}

static void head_hears(struct head *h, uint64_t now)
{
    h->asked = h->answered = 0;
    if (random_below(20) == 0) /* the connection broke with the answer in it */
        mb_lease_unanswered(&h->l, now);
    else if (h->was_renewal && h->granted)
        mb_lease_renewed(&h->l);
    else if (h->was_renewal)
        mb_lease_deposed(&h->l);
    else if (h->granted)
        mb_lease_granted(&h->l, h->epoch);
    else
        mb_lease_refused(&h->l, h->left_ms, now);
}

static void step_head(struct keeper *k, struct head *heads, int i, uint64_t now, int calm)
{
    struct head *h = &heads[i];

    if (h->asked && !h->answered && now >= h->arrives_ms)
        keeper_takes(k, i, h, now);
    if (now < h->paused_until_ms)
        return;
    if (h->answered && now >= h->returns_ms)
        head_hears(h, now);
    if (h->l.state == MB_LEASE_LOST)
        mb_lease_init(&h->l, TTL_MS, now); /* its front process starts it again */
    if (!h->asked && mb_lease_tick(&h->l, now)) {
        h->was_renewal = h->l.state == MB_LEASE_HELD;
        if (!calm && random_below(10) == 0) { /* never arrives */
            mb_lease_unanswered(&h->l, now);
            return;
        }
        h->asked = 1;
        h->arrives_ms = now + random_below(400);
    }
    if (!calm && random_below(400) == 0)
        h->paused_until_ms = now + random_below(3 * TTL_MS);
}

static int serving(const struct head *heads, uint64_t now)
{
    int n = 0;

    for (int i = 0; i < HEADS; i++)
        n += mb_lease_valid(&heads[i].l, now);
    return n;
}

static void two_heads_never_serve(void **state)
{
    const char *from_env = getenv("MB_SEED");
    uint64_t first = from_env ? strtoull(from_env, NULL, 10) : 1, served = 0, epochs = 0;

    (void)state;
    for (uint64_t seed = first; seed < first + (from_env ? 1 : SEEDS); seed++) {
        struct keeper k = {.holder = -1};
        struct head heads[HEADS];
        uint64_t now = 1000;

        rng = seed * 0x9e3779b97f4a7c15u + 1;
        memset(heads, 0, sizeof heads);
        for (int i = 0; i < HEADS; i++)
            mb_lease_init(&heads[i].l, TTL_MS, now);
        for (int round = 0; round < ROUNDS; round++) {
            now += random_below(60);
            for (int i = 0; i < HEADS; i++)
                step_head(&k, heads, i, now, 0);
            int n = serving(heads, now);
            if (n > 1)
                fail_msg("MB_SEED=%llu: %d heads serve at %llu", (unsigned long long)seed, n,
                         (unsigned long long)now);
            served += (uint64_t)n;
        }
        for (int i = 0; i < HEADS; i++) /* what hangs goes on */
            heads[i].paused_until_ms = 0;
        uint64_t calm = now;
        int found = 0;
        for (; now < calm + 5000; now += 20) {
            for (int i = 0; i < HEADS; i++)
                step_head(&k, heads, i, now, 1);
            found = serving(heads, now);
            if (found > 1)
                fail_msg("MB_SEED=%llu: %d heads serve", (unsigned long long)seed, found);
        }
        int any = 0;
        for (int round = 0; round < 100 && !any; round++, now += 20) {
            for (int i = 0; i < HEADS; i++)
                step_head(&k, heads, i, now, 1);
            any = serving(heads, now);
        }
        if (!any)
            fail_msg("MB_SEED=%llu: nobody serves 5 s after the last fault",
                     (unsigned long long)seed);
        epochs += (uint64_t)k.epoch;
    }
    assert_true(served > 0);
    assert_true(from_env || epochs > 3 * SEEDS); /* the head did change */
}

/* ---- the address ---- */

static void addresses_are_taken_apart(void **state)
{
    struct mb_redis_url u;
    char text[512];

    (void)state;
    assert_int_equal(mb_redis_url_parse("redis://h", &u, NULL), 0);
    assert_string_equal(u.host, "h");
    assert_int_equal(u.port, 6379);
    assert_string_equal(u.prefix, "mobula");
    assert_int_equal(
        mb_redis_url_parse("redis://me:p%40ss@r.example:7000/3?prefix=team-a", &u, NULL), 0);
    assert_string_equal(u.user, "me");
    assert_string_equal(u.password, "p@ss");
    assert_int_equal(u.db, 3);
    mb_redis_url_public(&u, text);
    assert_string_equal(text, "redis://r.example:7000/3?prefix=team-a");
    assert_int_equal(mb_redis_url_parse("redis://:x@[::1]:7", &u, NULL), 0);
    assert_string_equal(u.host, "::1");
    assert_int_equal(u.port, 7);
    mb_redis_url_public(&u, text);
    assert_string_equal(text, "redis://[::1]:7/0?prefix=mobula");
}

static void bad_addresses_are_refused_without_their_secret(void **state)
{
    static const char *const bad[] = {"redis://",
                                      "redis://:secret@",
                                      "redis://secret@h",
                                      "redis://a:secret%4@h",
                                      "redis://h:port",
                                      "redis://h:65536",
                                      "redis://h/x",
                                      "redis://h?pre=x",
                                      "redis://h?prefix=",
                                      "redis://h?prefix=a%20b",
                                      "redis://[::1",
                                      "redis://h:",
                                      "redis://[::1]7",
                                      "redis://u:secret%00@h",
                                      "http://secret@h",
                                      "redis://h/1/2",
                                      "redis://:secret@h:-1"};
    struct mb_redis_url u;

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct mb_err err = {0};
        if (mb_redis_url_parse(bad[i], &u, &err) != MB_EINVAL)
            fail_msg("%s is taken", bad[i]);
        assert_null(strstr(err.text, "secret"));
        assert_non_null(strstr(err.text, "expected redis://"));
    }
    assert_int_equal(mb_redis_url_parse("rediss://h", &u, NULL), MB_EUNSUPPORTED);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_renewed_lease_stays_valid),
        cmocka_unit_test(an_unanswered_question_is_asked_again),
        cmocka_unit_test(a_deposed_head_stays_deposed),
        cmocka_unit_test(two_heads_never_serve),
        cmocka_unit_test(addresses_are_taken_apart),
        cmocka_unit_test(bad_addresses_are_refused_without_their_secret),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
