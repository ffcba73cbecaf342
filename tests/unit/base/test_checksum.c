/* base/checksum.h: published check values, both code paths against a bit-by-bit reference. */
#include "cmocka_all.h"
#include <string.h>
#include "base/checksum.h"

/* Straight from the definition of a reflected CRC. */
static uint64_t slow_crc(uint64_t poly, uint64_t ones, uint64_t crc, const uint8_t *p, size_t n)
{
    crc ^= ones;
    for (size_t i = 0; i < n; i++) {
        crc ^= p[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? poly : 0);
    }
    return crc ^ ones;
}

static uint64_t slow64(uint64_t crc, const uint8_t *p, size_t n)
{
    return slow_crc(0x9a6c9329ac4bc9b5ull, UINT64_MAX, crc, p, n);
}

static uint32_t slow32(uint32_t crc, const uint8_t *p, size_t n)
{
    return (uint32_t)slow_crc(0x82f63b78u, UINT32_MAX, crc, p, n);
}

static void test_check_values(void **state)
{
    uint8_t block[32];

    (void)state;
    for (int portable = 0; portable < 2; portable++) {
        mb_checksum_force_portable(portable);
        assert_int_equal(mb_crc32c(0, "123456789", 9), 0xe3069283u);
        assert_true(mb_crc64nvme(0, "123456789", 9) == 0xae8b14860a799888ull);
        assert_int_equal(mb_crc32c(0, "", 0), 0);
        assert_true(mb_crc64nvme(0, "", 0) == 0);
        /* RFC 3720 B.4: 32 bytes of zeros, of ones, ascending. */
        memset(block, 0, sizeof(block));
        assert_int_equal(mb_crc32c(0, block, 32), 0x8a9136aau);
        memset(block, 0xff, sizeof(block));
        assert_int_equal(mb_crc32c(0, block, 32), 0x62a8ab43u);
        for (uint8_t i = 0; i < 32; i++)
            block[i] = i;
        assert_int_equal(mb_crc32c(0, block, 32), 0x46dd794eu);
    }
    mb_checksum_force_portable(0);
}

static void test_lengths(void **state)
{
    static uint8_t bytes[3100];
    uint32_t x = 12345;

    (void)state;
    for (size_t i = 0; i < sizeof(bytes); i++) {
        x = x * 1664525u + 1013904223u;
        bytes[i] = (uint8_t)(x >> 24);
    }
    for (int portable = 0; portable < 2; portable++) {
        mb_checksum_force_portable(portable);
        for (size_t n = 0; n < 3000; n += n < 200 ? 1 : 37) {
            const uint8_t *p = bytes + n % 16; /* every alignment */
            size_t cut = n / 3;

            assert_int_equal(mb_crc32c(0, p, n), slow32(0, p, n));
            assert_true(mb_crc64nvme(0, p, n) == slow64(0, p, n));
            assert_int_equal(mb_crc32c(mb_crc32c(0, p, cut), p + cut, n - cut), slow32(0, p, n));
            assert_true(mb_crc64nvme(mb_crc64nvme(0, p, cut), p + cut, n - cut) == slow64(0, p, n));
            assert_true(mb_crc64nvme_combine(mb_crc64nvme(0, p, cut),
                                             mb_crc64nvme(0, p + cut, n - cut),
                                             n - cut) == slow64(0, p, n));
        }
    }
    mb_checksum_force_portable(0);
}

static void test_combine_far(void **state)
{
    uint64_t a = mb_crc64nvme(0, "a", 1);
    uint64_t once = a;

    (void)state;
    /* Combining with n zeros' worth at once equals doing it in two halves, beyond 2^61 bytes too.
     */
    once = mb_crc64nvme_combine(a, 0, 1ull << 62);
    assert_true(once ==
                mb_crc64nvme_combine(mb_crc64nvme_combine(a, 0, 1ull << 61), 0, 1ull << 61));
    assert_true(mb_crc64nvme_combine(a, 0, 0) == a);
}

static void test_sha_and_base64(void **state)
{
    static const char *const pairs[][2] = {{"", ""},
                                           {"f", "Zg=="},
                                           {"fo", "Zm8="},
                                           {"foo", "Zm9v"},
                                           {"foob", "Zm9vYg=="},
                                           {"fooba", "Zm9vYmE="},
                                           {"foobar", "Zm9vYmFy"}};
    char hex[65], out[16];

    (void)state;
    assert_int_equal(mb_sha256_hex("abc", 3, hex), 0);
    assert_string_equal(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    for (size_t i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++) { /* RFC 4648 section 10 */
        mb_base64(pairs[i][0], strlen(pairs[i][0]), out);
        assert_string_equal(out, pairs[i][1]);
    }
    mb_base64("\xfb\xff", 2, out);
    assert_string_equal(out, "+/8=");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_check_values),
        cmocka_unit_test(test_lengths),
        cmocka_unit_test(test_combine_far),
        cmocka_unit_test(test_sha_and_base64),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
