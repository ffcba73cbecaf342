/* Loopback in any family, a Unix socket, or the node's own address. */
#include "agent/callers.h"

#include <string.h>
#include "base/str.h"

int mb_caller_is_local(const char *peer, const char *node_ip)
{
    size_t n = strlen(node_ip);

    if (mb_starts_with(peer, "ipv4:127.") || mb_starts_with(peer, "ipv6:[::1]") ||
        mb_starts_with(peer, "ipv6:%5B::1%5D") || mb_starts_with(peer, "unix:"))
        return 1;
    return mb_starts_with(peer, "ipv4:") && strncmp(peer + 5, node_ip, n) == 0 &&
           peer[5 + n] == ':';
}
