/* An IPv4 address inside of an IPv6 one (::ffff:0.0.0.0) counts as what it is inside. */
#include "base/address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "base/ports.h"

/* 1: out has it as IPv6, IPv4 mapped; 0: no numeric address. */
static int parse(const char *address, struct in6_addr *out)
{
    struct in_addr v4;

    if (inet_pton(AF_INET, address, &v4) != 1)
        return inet_pton(AF_INET6, address, out) == 1;
    *out = (struct in6_addr){.s6_addr = {[10] = 0xff, [11] = 0xff}};
    for (int i = 0; i < 4; i++)
        out->s6_addr[12 + i] = (uint8_t)(ntohl(v4.s_addr) >> (24 - 8 * i));
    return 1;
}

/* Why nobody can dial it; NULL: it can be dialled. */
static const char *fault_of(const struct in6_addr *a)
{
    const uint8_t *v4 = &a->s6_addr[12];

    if (IN6_IS_ADDR_V4MAPPED(a)) {
        if (v4[0] == 0)
            return "a wildcard";
        if (v4[0] >= 224)
            return v4[0] < 240 ? "a multicast address" : "a reserved or broadcast address";
    }
    if (IN6_IS_ADDR_UNSPECIFIED(a))
        return "a wildcard";
    return IN6_IS_ADDR_MULTICAST(a) ? "a multicast address" : NULL;
}

int mb_address_check(const char *what, const char *address, struct mb_err *err)
{
    struct in6_addr a;
    const char *fault = address[0] == '\0' ? "empty" : parse(address, &a) ? fault_of(&a) : NULL;

    if (fault == NULL)
        return MB_OK;
    return mb_err_set(err, MB_EINVAL,
                      "%s %.60s is %s: expected the address of this machine that other nodes dial",
                      what, address[0] == '\0' ? "''" : address, fault);
}

/* n bytes: a host, which may hold colons, and a port. */
static int is_host_and_port(const char *s, size_t n)
{
    const char *colon = memrchr(s, ':', n);
    size_t host_len = colon != NULL ? (size_t)(colon - s) : 0;
    size_t port_len = colon != NULL ? n - host_len - 1 : 0;

    /* "http://h:1" has a host, too, but nobody's. */
    return host_len > 0 && memchr(s, '/', n) == NULL && port_len > 0 && port_len <= 5 &&
           strspn(colon + 1, "0123456789") == port_len && atoi(colon + 1) > 0 &&
           atoi(colon + 1) <= UINT16_MAX;
}

int mb_address_check_heads(const char *what, const char *address, struct mb_err *err)
{
    const char *s = address;

    for (;;) {
        size_t n = strcspn(s, ",");

        if (!is_host_and_port(s, n))
            return mb_err_set(err, MB_EINVAL,
                              "%s %s: expected HOST:PORT of the head's GCS, e.g. 10.0.0.1:6379",
                              what, address);
        if (s[n] == '\0')
            return MB_OK;
        s += n + 1;
    }
}

int mb_address_is_elsewhere(const char *address)
{
    struct in6_addr a;

    return parse(address, &a) && !mb_port_is_free(address, 0);
}
