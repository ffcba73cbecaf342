/* 1. It is said. 2. Every second: are half of the descriptors free? 3. If so, the end. */
#include "agent/deaf.h"

#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>
#include "base/log.h"

enum { LOOK_MS = 1000 };

/* Where not even the directory can be opened none is free. */
static int is_room(void)
{
    struct rlimit files;
    DIR *d = opendir("/proc/self/fd");
    rlim_t n = 0;

    if (d == NULL)
        return 0;
    while (readdir(d) != NULL)
        n++;
    closedir(d);
    return getrlimit(RLIMIT_NOFILE, &files) == 0 && n < files.rlim_cur / 2;
}

static void on_look(uv_timer_t *timer)
{
    (void)timer;
    if (!is_room())
        return;
    mb_error("agent", "descriptors are free again: starting anew, to take connections");
    /* As if it had crashed, after which its front process starts it again in each of its phases. */
    kill(getpid(), SIGKILL);
}

static void on_deaf(void *arg)
{
    mb_error("agent",
             "no descriptor or no memory was left for a new connection: the gRPC port takes "
             "none any more, and this agent starts anew when half of the descriptors are free");
    uv_timer_start(arg, on_look, LOOK_MS, LOOK_MS);
}

void mb_deaf_watch(struct mb_grpc *g, uv_timer_t *timer)
{
    mb_grpc_on_deaf(g, on_deaf, timer);
}
