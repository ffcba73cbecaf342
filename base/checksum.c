/*
 * Checksums.
 *
 *  1. On first use the tables for the portable path are computed and the CPU is asked what it has.
 *  2. CRC32C: the SSE4.2 instruction, 8 bytes at a time; otherwise tables, 8 bytes at a time.
 *  3. CRC64NVME: carry-less multiplication folds 64 bytes at a time onto four 128-bit remainders,
 *     then 16 at a time onto one, which the tables finish; otherwise tables alone. Where vectors of
 *     512 bits can be multiplied, 256 bytes at a time go onto sixteen remainders first.
 *     Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ", Intel 2009.
 *  4. Both polynomials are bit-reflected: the lowest bit is the highest power of x.
 *  5. SHA-256 can fail only when OpenSSL has no memory.
 */
#include "base/checksum.h"

#include <endian.h>
#include <openssl/evp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include "base/err.h"
#include "base/str.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { WIDE_FROM_BYTES = 512 }; /* less is not worth folding twice */

static const uint32_t poly32c = 0x82f63b78u;
static const uint64_t poly64nvme = 0x9a6c9329ac4bc9b5ull;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static atomic_int portable_forced;
static int have_crc32; /* SSE4.2; written once */
static int have_clmul; /* PCLMULQDQ and SSE4.1; written once */
static int have_wide;  /* ... and VPCLMULQDQ with AVX-512; written once */
static uint32_t table32c[8][256];
static uint64_t table64nvme[8][256];
static uint64_t fold_2048[2]; /* the same for 256 bytes */
static uint64_t
    fold_512[2]; /* x^(512+63), x^(512-1) mod P: carries a 128-bit remainder 64 bytes on */
static uint64_t fold_128[2]; /* x^(128+63), x^(128-1) mod P: 16 bytes on */

/* a*b mod P, reflected. */
static uint64_t mul64nvme(uint64_t a, uint64_t b)
{
    uint64_t product = 0;

    for (int bit = 63; bit >= 0; bit--) {
        if (a >> bit & 1)
            product ^= b;
        b = b >> 1 ^ (b & 1 ? poly64nvme : 0);
    }
    return product;
}

/* x^n mod P, reflected: the power 0 is the highest bit. */
static uint64_t pow64nvme(uint64_t n)
{
    uint64_t square = 1ull << 62; /* x^1 */
    uint64_t result = 1ull << 63; /* x^0 */

    for (; n != 0; n >>= 1) {
        if (n & 1)
            result = mul64nvme(result, square);
        square = mul64nvme(square, square);
    }
    return result;
}

static void make_tables(void)
{
    for (unsigned i = 0; i < 256; i++) {
        uint32_t a = i;
        uint64_t b = i;

        for (int bit = 0; bit < 8; bit++) {
            a = a >> 1 ^ (a & 1 ? poly32c : 0);
            b = b >> 1 ^ (b & 1 ? poly64nvme : 0);
        }
        table32c[0][i] = a;
        table64nvme[0][i] = b;
    }
    for (unsigned t = 1; t < 8; t++) {
        for (unsigned i = 0; i < 256; i++) {
            uint32_t a = table32c[t - 1][i];
            uint64_t b = table64nvme[t - 1][i];

            table32c[t][i] = a >> 8 ^ table32c[0][a & 255];
            table64nvme[t][i] = b >> 8 ^ table64nvme[0][b & 255];
        }
    }
}

static void set_up(void)
{
    make_tables();
    /* The product of two reflected 64-bit values comes out one bit low, hence one power less. */
    fold_2048[0] = pow64nvme(2048 + 63);
    fold_2048[1] = pow64nvme(2048 - 1);
    fold_512[0] = pow64nvme(512 + 63);
    fold_512[1] = pow64nvme(512 - 1);
    fold_128[0] = pow64nvme(128 + 63);
    fold_128[1] = pow64nvme(128 - 1);
#if defined(__x86_64__)
    __builtin_cpu_init();
    have_crc32 = __builtin_cpu_supports("sse4.2") != 0;
    have_clmul = __builtin_cpu_supports("pclmul") != 0 && __builtin_cpu_supports("sse4.1") != 0;
    have_wide = have_clmul && __builtin_cpu_supports("avx512f") != 0 &&
                __builtin_cpu_supports("vpclmulqdq") != 0;
#endif
}

static uint64_t load_le64(const uint8_t *p)
{
    uint64_t v;

    memcpy(&v, p, sizeof(v));
    return le64toh(v);
}

/* The functions below take and give the raw register, without the inversions at both ends. */

static uint32_t crc32c_portable(uint32_t crc, const uint8_t *p, size_t n)
{
    for (; n >= 8; p += 8, n -= 8) {
        uint64_t v = load_le64(p) ^ crc;

        crc = 0;
        for (unsigned i = 0; i < 8; i++)
            crc ^= table32c[7 - i][v >> (8 * i) & 255];
    }
    for (; n > 0; p++, n--)
        crc = crc >> 8 ^ table32c[0][(crc ^ *p) & 255];
    return crc;
}

static uint64_t crc64nvme_portable(uint64_t crc, const uint8_t *p, size_t n)
{
    for (; n >= 8; p += 8, n -= 8) {
        uint64_t v = load_le64(p) ^ crc;

        crc = 0;
        for (unsigned i = 0; i < 8; i++)
            crc ^= table64nvme[7 - i][v >> (8 * i) & 255];
    }
    for (; n > 0; p++, n--)
        crc = crc >> 8 ^ table64nvme[0][(crc ^ *p) & 255];
    return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) static uint32_t crc32c_sse42(uint32_t crc, const uint8_t *p,
                                                               size_t n)
{
    uint64_t wide = crc;

    for (; n >= 8; p += 8, n -= 8)
        wide = _mm_crc32_u64(wide, load_le64(p));
    crc = (uint32_t)wide;
    for (; n > 0; p++, n--)
        crc = _mm_crc32_u8(crc, *p);
    return crc;
}

__attribute__((target("pclmul,sse4.1"))) static __m128i fold(__m128i acc, __m128i k, __m128i next)
{
    __m128i low = _mm_clmulepi64_si128(acc, k, 0x00);
    __m128i high = _mm_clmulepi64_si128(acc, k, 0x11);

    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

/* n >= 64 */
__attribute__((target("pclmul,sse4.1"))) static uint64_t crc64nvme_clmul(uint64_t crc,
                                                                         const uint8_t *p, size_t n)
{
    const __m128i k512 = _mm_set_epi64x((long long)fold_512[1], (long long)fold_512[0]);
    const __m128i k128 = _mm_set_epi64x((long long)fold_128[1], (long long)fold_128[0]);
    __m128i lane[4];
    uint8_t rest[16];

    for (int i = 0; i < 4; i++)
        lane[i] = _mm_loadu_si128((const __m128i *)(const void *)(p + 16 * i));
    lane[0] = _mm_xor_si128(lane[0], _mm_set_epi64x(0, (long long)crc));
    for (p += 64, n -= 64; n >= 64; p += 64, n -= 64) {
        for (int i = 0; i < 4; i++)
            lane[i] =
                fold(lane[i], k512, _mm_loadu_si128((const __m128i *)(const void *)(p + 16 * i)));
    }
    for (int i = 1; i < 4; i++)
        lane[0] = fold(lane[0], k128, lane[i]);
    for (; n >= 16; p += 16, n -= 16)
        lane[0] = fold(lane[0], k128, _mm_loadu_si128((const __m128i *)(const void *)p));
    _mm_storeu_si128((__m128i *)(void *)rest, lane[0]);
    return crc64nvme_portable(crc64nvme_portable(0, rest, sizeof(rest)), p, n);
}

__attribute__((target("avx512f,vpclmulqdq"))) static __m512i fold_wide(__m512i acc, __m512i k,
                                                                       const uint8_t *next)
{
    __m512i low = _mm512_clmulepi64_epi128(acc, k, 0x00);
    __m512i high = _mm512_clmulepi64_epi128(acc, k, 0x11);

    return _mm512_xor_si512(_mm512_xor_si512(low, high), _mm512_loadu_si512(next));
}

/* n >= 256. The sixteen remainders are 256 bytes that leave the same remainder as all before. */
__attribute__((target("avx512f,vpclmulqdq"))) static uint64_t
crc64nvme_wide(uint64_t crc, const uint8_t *p, size_t n)
{
    const __m512i k =
        _mm512_broadcast_i32x4(_mm_set_epi64x((long long)fold_2048[1], (long long)fold_2048[0]));
    __m512i lane[4];
    uint8_t rest[256];

    for (int i = 0; i < 4; i++)
        lane[i] = _mm512_loadu_si512(p + 64 * i);
    lane[0] = _mm512_xor_si512(lane[0], _mm512_zextsi128_si512(_mm_set_epi64x(0, (long long)crc)));
    for (p += 256, n -= 256; n >= 256; p += 256, n -= 256) {
        for (int i = 0; i < 4; i++)
            lane[i] = fold_wide(lane[i], k, p + 64 * i);
    }
    for (int i = 0; i < 4; i++)
        _mm512_storeu_si512(rest + 64 * i, lane[i]);
    crc = crc64nvme_clmul(0, rest, sizeof(rest));
    return n >= 64 ? crc64nvme_clmul(crc, p, n) : crc64nvme_portable(crc, p, n);
}
#endif

uint32_t mb_crc32c(uint32_t crc, const void *p, size_t n)
{
    pthread_once(&once, set_up);
#if defined(__x86_64__)
    if (have_crc32 && !atomic_load_explicit(&portable_forced, memory_order_relaxed))
        return ~crc32c_sse42(~crc, p, n);
#endif
    return ~crc32c_portable(~crc, p, n);
}

uint64_t mb_crc64nvme(uint64_t crc, const void *p, size_t n)
{
    pthread_once(&once, set_up);
#if defined(__x86_64__)
    if (have_clmul && n >= 64 && !atomic_load_explicit(&portable_forced, memory_order_relaxed))
        return have_wide && n >= WIDE_FROM_BYTES ? ~crc64nvme_wide(~crc, p, n)
                                                 : ~crc64nvme_clmul(~crc, p, n);
#endif
    return ~crc64nvme_portable(~crc, p, n);
}

uint64_t mb_crc64nvme_combine(uint64_t crc_a, uint64_t crc_b, uint64_t len_b)
{
    uint64_t shift = pow64nvme(len_b);

    /* x^(8 n) as ((x^n)^2)^2)^2, because 8 n may not fit 64 bits. */
    for (int i = 0; i < 3; i++)
        shift = mul64nvme(shift, shift);
    return mul64nvme(shift, crc_a) ^ crc_b;
}

void mb_checksum_force_portable(int on)
{
    atomic_store(&portable_forced, on);
}

int mb_sha256_hex(const void *p, size_t n, char out[65])
{
    unsigned char digest[32];

    if (EVP_Digest(p, n, digest, NULL, EVP_sha256(), NULL) != 1)
        return MB_ENOMEM;
    mb_hex(digest, sizeof(digest), out);
    return 0;
}

void mb_base64(const void *p, size_t n, char *out)
{
    static const char alphabet[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const uint8_t *in = p;

    for (; n > 0; in += 3) {
        uint32_t v = (uint32_t)in[0] << 16;

        if (n > 1)
            v |= (uint32_t)in[1] << 8;
        if (n > 2)
            v |= in[2];
        *out++ = alphabet[v >> 18];
        *out++ = alphabet[v >> 12 & 63];
        *out++ = n > 1 ? alphabet[v >> 6 & 63] : '=';
        *out++ = n > 2 ? alphabet[v & 63] : '=';
        n -= n < 3 ? n : 3;
    }
    *out = '\0';
}
