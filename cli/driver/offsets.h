/*
 * What is new in a chunk of a log that may repeat what was read before: a re-dialled agent goes on
 * from an offset it was told, or from 0. Pure.
 */
#ifndef MOBULA_CLI_DRIVER_OFFSETS_H
#define MOBULA_CLI_DRIVER_OFFSETS_H

#include <stddef.h>
#include <stdint.h>

/* *next is the first byte not read yet, and moves behind the chunk. Returns how many bytes in front
 * of the chunk are known (n: all of them). *missing: bytes that were never received. */
size_t mb_drv_known_bytes(uint64_t *next, uint64_t offset, size_t n, uint64_t *missing);

#endif
