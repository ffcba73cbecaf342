/* An IPv4 address inside of an IPv6 one (::ffff:0.0.0.0) counts as what it is inside. */
#include "base/address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "base/ports.h"

#define FAR_AWAY "8.8.8.8" /* any address of the world's; nothing is sent there */

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

/* No name does: the last part of 10.0.0 or of 999.1.1.1 is no top-level domain. */
static int ends_in_number(const char *address)
{
    const char *dot = strrchr(address, '.');
    const char *last = dot != NULL ? dot + 1 : address;

    return *last != '\0' && last[strspn(last, "0123456789")] == '\0';
}

/* NULL: it may be right. */
static const char *fault_of_text(const char *address)
{
    struct in6_addr a;

    if (address[0] == '\0')
        return "empty";
    if (strlen(address) > MB_ADDRESS_MAX)
        return "too long (63 letters are possible)";
    if (parse(address, &a))
        return fault_of(&a);
    return ends_in_number(address) ? "no address and no name" : NULL;
}

int mb_address_check(const char *what, const char *address, struct mb_err *err)
{
    const char *fault = fault_of_text(address);

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

static int is_loopback(const struct sockaddr_in *a)
{
    return ntohl(a->sin_addr.s_addr) >> 24 == 127;
}

static int find_by_route(struct sockaddr_in *own)
{
    struct sockaddr_in there = {.sin_family = AF_INET, .sin_port = htons(9)};
    socklen_t n = sizeof(*own);
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), found;

    inet_pton(AF_INET, FAR_AWAY, &there.sin_addr);
    found = fd >= 0 && connect(fd, (const struct sockaddr *)&there, sizeof(there)) == 0 &&
            getsockname(fd, (struct sockaddr *)own, &n) == 0 && !is_loopback(own);
    if (fd >= 0)
        close(fd);
    return found;
}

static int find_by_name(struct sockaddr_in *own)
{
    struct addrinfo hints = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM};
    struct addrinfo *list = NULL;
    char name[256] = "";
    int found = 0;

    if (gethostname(name, sizeof(name) - 1) != 0 || getaddrinfo(name, NULL, &hints, &list) != 0)
        return 0;
    for (const struct addrinfo *a = list; a != NULL && !found; a = a->ai_next) {
        memcpy(own, a->ai_addr, sizeof(*own));
        found = !is_loopback(own);
    }
    freeaddrinfo(list);
    return found;
}

int mb_address_find_own(char ip[64], struct mb_err *err)
{
    struct sockaddr_in own = {0};

    if (!find_by_route(&own) && !find_by_name(&own))
        return mb_err_set(err, MB_EUNAVAIL,
                          "this machine has no address but loopback; give --node-ip-address");
    inet_ntop(AF_INET, &own.sin_addr, ip, 64);
    return MB_OK;
}
