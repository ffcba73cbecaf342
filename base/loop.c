#include "base/loop.h"

#if UV_VERSION_HEX >= ((1 << 16) | (45 << 8))

void mb_loop_turn(uv_loop_t *loop)
{
    uv_run(loop, UV_RUN_ONCE);
}

#else

#include <poll.h>

/* Sockets that a callback began to watch are told to the kernel by the next uv_run() only. */
static int all_are_watched(const uv_loop_t *loop)
{
    return loop->watcher_queue[0] == (const void *)&loop->watcher_queue;
}

/* The wait is ours, between two runs that do not wait; as libuv's documentation of uv_backend_fd()
 * has it. */
void mb_loop_turn(uv_loop_t *loop)
{
    int timeout_ms;

    uv_update_time(loop);
    timeout_ms = uv_backend_timeout(loop);
    if (timeout_ms != 0 && all_are_watched(loop)) {
        struct pollfd waiting = {.fd = uv_backend_fd(loop), .events = POLLIN};

        (void)poll(&waiting, 1, timeout_ms); /* whatever it says, the run below looks for itself */
    }
    uv_run(loop, UV_RUN_NOWAIT);
}

#endif
