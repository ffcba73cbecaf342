/*
 * Checksums. CRC32C (Castagnoli; tfevents, S3 x-amz-checksum-crc32c) and CRC64NVME (S3's default
 * full-object checksum), both start from 0, are continued by passing the last value, and are the
 * values as S3 reports them (before big-endian base64). SHA-256 is OpenSSL's.
 * Sources: RFC 3720 appendix B.4 (CRC32C check value E3069283 for "123456789"); the NVM Express
 * base specification's 64-bit CRC (check value AE8B14860A799888). Pure; any thread.
 */
#ifndef MOBULA_BASE_CHECKSUM_H
#define MOBULA_BASE_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

uint32_t mb_crc32c(uint32_t crc, const void *p, size_t n);
uint64_t mb_crc64nvme(uint64_t crc, const void *p, size_t n);
/* CRC of A||B from crc(A), crc(B) and the length of B. */
uint64_t mb_crc64nvme_combine(uint64_t crc_a, uint64_t crc_b, uint64_t len_b);
/* Lower-case hex of SHA-256 into out[65]. Returns 0, or MB_ENOMEM if OpenSSL cannot. */
int mb_sha256_hex(const void *p, size_t n, char out[65]);
/* Standard base64 with padding of n bytes into out[4*((n+2)/3)+1]. */
void mb_base64(const void *p, size_t n, char *out);

/* Tests: 1 makes the CRCs take the portable path, 0 the best one this CPU has. */
void mb_checksum_force_portable(int on);

#endif
