/*
 *  1. The ephemeral range is read each time: it may be changed while we run.
 *  2. A random port of the range that can be bound now is the choice. Who listens there next finds
 *     it taken only if another one chose the same at the same moment, and chooses again.
 *  3. /proc cannot be read: the kernel's default range is assumed.
 */
#include "base/ports.h"

#include <netdb.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>
#include "base/clock.h"

enum { RANGE_MIN = 256, TRIES = 64, EPHEMERAL_FIRST = 32768, EPHEMERAL_LAST = 60999 };

static int size_of(struct mb_port_range r)
{
    return r.last < r.first ? 0 : r.last - r.first + 1;
}

/* The larger of the two parts that are left of r. */
static struct mb_port_range without(struct mb_port_range r, int first, int last)
{
    struct mb_port_range below = {r.first, r.last < first - 1 ? r.last : first - 1};
    struct mb_port_range above = {r.first > last + 1 ? r.first : last + 1, r.last};

    return size_of(below) >= size_of(above) ? below : above;
}

struct mb_port_range mb_ports_outside(int ephemeral_first, int ephemeral_last)
{
    static const struct mb_port_range places[] = {{20000, 26999}, {61000, 65535}};

    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
        struct mb_port_range left = without(places[i], ephemeral_first, ephemeral_last);

        if (size_of(left) >= RANGE_MIN)
            return left;
    }
    return (struct mb_port_range){1, 0};
}

int mb_port_is_free(const char *bind_addr, int port)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST | AI_PASSIVE};
    struct addrinfo *addr = NULL;
    char text[16];
    int one = 1, fd, is_free;

    snprintf(text, sizeof(text), "%d", port);
    if (getaddrinfo(bind_addr, text, &hints, &addr) != 0)
        return 0;
    fd = socket(addr->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    is_free = fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)) == 0 &&
              bind(fd, addr->ai_addr, addr->ai_addrlen) == 0;
    if (fd >= 0)
        close(fd);
    freeaddrinfo(addr);
    return is_free;
}

static struct mb_port_range range_now(void)
{
    FILE *f = fopen("/proc/sys/net/ipv4/ip_local_port_range", "re");
    int first, last;

    if (f == NULL || fscanf(f, "%d %d", &first, &last) != 2) {
        first = EPHEMERAL_FIRST;
        last = EPHEMERAL_LAST;
    }
    if (f != NULL)
        fclose(f);
    return mb_ports_outside(first, last);
}

int mb_port_pick(const char *bind_addr)
{
    struct mb_port_range range = range_now();

    for (int i = 0; size_of(range) > 0 && i < TRIES; i++) {
        int port = range.first + (int)(mb_random_u64() % (uint64_t)size_of(range));

        if (mb_port_is_free(bind_addr, port))
            return port;
    }
    return 0;
}
