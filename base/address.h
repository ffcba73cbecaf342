/*
 * Addresses that a node dials, or tells others to dial. Any thread; blocking only as bind(2) is.
 */
#ifndef MOBULA_BASE_ADDRESS_H
#define MOBULA_BASE_ADDRESS_H

#include "base/err.h"

enum { MB_ADDRESS_MAX = 63 }; /* letters */

/* MB_EINVAL, with what (a flag) in front, for what nobody can dial: "", a wildcard, multicast or
 * broadcast, 999.1.1.1; and for what is too long. A name passes: what it leads to may change. */
int mb_address_check(const char *what, const char *address, struct mb_err *err);

/* MB_EINVAL, with what in front, unless it is HOST:PORT, or several of them with commas between.
 * The library that dials would take a port beyond 65535 for another one. */
int mb_address_check_heads(const char *what, const char *address, struct mb_err *err);

/* 1: a numeric address that no interface of this machine has. It may be right all the same: a host
 * that passes ports on to a container, NAT. */
int mb_address_is_elsewhere(const char *address);

/* The address by which other machines reach this one: that of the route to them, as Ray takes it,
 * without a route what the host's name leads to. MB_EUNAVAIL: neither is there but loopback. Asks
 * the resolver then, which may take its time. */
int mb_address_find_own(char ip[64], struct mb_err *err);

#endif
