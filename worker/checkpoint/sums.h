/*
 * Checksums that a file carries in itself, CRC64NVME in 16 lower-case hex digits.
 *
 * A seal is a member "KEY": "16 digits" of a JSON text: the checksum of the whole text in which
 * these digits are zeros. The first such member counts, so it stands before anything from outside.
 * A safetensors file has one of its header, and among its metadata one checksum for each MiB of its
 * data, so that who reads a part can tell whether that part is what was written. Pure; any thread.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_SUMS_H
#define MOBULA_WORKER_CHECKPOINT_SUMS_H

#include <stddef.h>
#include <stdint.h>

#define MB_SUMS_HEADER "mobula.crc64nvme.header"
#define MB_SUMS_BLOCKS "mobula.crc64nvme.1MiB"
#define MB_SUMS_NONE   "0000000000000000"

enum { MB_SUMS_BLOCK_BYTES = 1 << 20, MB_SUMS_DIGITS = 16 };

enum mb_seal { MB_SEAL_ABSENT, MB_SEAL_FITS, MB_SEAL_BROKEN };

/* The value of the first member "key", just behind its quote; NULL: there is none. */
char *mb_sums_value(char *text, size_t n, const char *key);
/* The text has the member, with MB_SUMS_NONE as its value. */
void mb_seal_set(char *text, size_t n, const char *key);
enum mb_seal mb_seal_check(const char *text, size_t n, const char *key);

void mb_sums_put(char *digits, uint64_t crc);
/* -1: these are no 16 digits. */
int mb_sums_get(const char *digits, uint64_t *crc);

/* Blocks of so many bytes of data, and how many bytes one of them has. */
uint64_t mb_sums_n_blocks(uint64_t data_bytes);
size_t mb_sums_block_bytes(uint64_t data_bytes, uint64_t block);

#endif
