/* Blocking steps of the start that need nothing of the agent but its options. */
#include "agent/prepare.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/fs.h"

int mb_agent_make_dirs(const char *node_dir, struct mb_err *err)
{
    static const char *const names[] = {"logs", "jobs", "gangs", "packages"};
    int rc = mb_fs_mkdir_p(node_dir, 0755, err);

    for (size_t i = 0; rc == MB_OK && i < sizeof(names) / sizeof(names[0]); i++) {
        char *path = mb_path_join(node_dir, names[i]);

        rc = path != NULL ? mb_fs_mkdir_p(path, 0755, err)
                          : mb_err_set(err, MB_ENOMEM, "no memory for a path");
        mb_free(path);
    }
    return rc;
}

/* The host of "HOST:PORT", the first one of several; of "[::1]:6379" it is ::1. */
static void host_of(const char *address, char *host, size_t size)
{
    size_t n = strcspn(address, ",");

    snprintf(host, size, "%.*s", (int)n, address);
    char *colon = strrchr(host, ':');
    if (colon != NULL)
        *colon = '\0';
    n = strlen(host);
    if (host[0] == '[' && n > 2 && host[n - 1] == ']') {
        host[n - 1] = '\0';
        memmove(host, host + 1, n - 1);
    }
}

/* Of the socket, as text. */
static int own_address(int fd, char ip[64])
{
    struct sockaddr_storage self;
    socklen_t len = sizeof(self);

    return getsockname(fd, (struct sockaddr *)&self, &len) == 0 &&
           getnameinfo((struct sockaddr *)&self, len, ip, 64, NULL, 0, NI_NUMERICHOST) == 0;
}

int mb_agent_find_ip(const struct mb_agent_options *opts, char ip[64], struct mb_err *err)
{
    struct addrinfo hints = {.ai_family = AF_INET, .ai_socktype = SOCK_DGRAM};
    struct addrinfo *found = NULL;
    char host[256];
    int fd, rc;

    if (opts->node_ip != NULL || opts->is_head) {
        snprintf(ip, 64, "%s", opts->node_ip != NULL ? opts->node_ip : "127.0.0.1");
        return MB_OK;
    }
    host_of(opts->address, host, sizeof(host));
    rc = getaddrinfo(host, "9", &hints, &found);
    if (rc != 0) { /* [::1], or a name that has no IPv4 address: HTTP here has no other */
        hints.ai_family = AF_INET6;
        rc = getaddrinfo(host, "9", &hints, &found);
    }
    if (rc != 0)
        return mb_err_set(err, MB_ENOENT, "--address %s: host %s is not known (%s)", opts->address,
                          host, gai_strerror(rc));
    fd = socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    rc = MB_OK;
    if (fd < 0 || connect(fd, found->ai_addr, found->ai_addrlen) != 0 || !own_address(fd, ip))
        rc = mb_err_set(err, MB_EUNAVAIL, "no route to the head at %s; give --node-ip-address",
                        opts->address);
    if (fd >= 0)
        close(fd);
    freeaddrinfo(found);
    return rc;
}
