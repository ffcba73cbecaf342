/*
 * A port that takes no connections any more, which the library tells its log only.
 *
 *  1. accept4() fails: no descriptor is left, or memory. The library (1.51) gives the listening
 * socket up for good, and goes on with the connections that it has: who has one sees nothing.
 *  2. The line comes on a thread of the library: a lock, and the loop is woken.
 * One runtime of a process is told: the newest that has asked.
 */
#include <pthread.h>
#include <string.h>
#include "base/grpc/internal.h"

static const char file_name[] = "tcp_server_posix.cc", begin[] = "Failed accept4:";

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct mb_grpc *told; /* guarded by lock, as its is_deaf */

int mb_grpc_deaf_says(const char *file, const char *message)
{
    const char *name = strrchr(file, '/');

    return strcmp(name != NULL ? name + 1 : file, file_name) == 0 &&
           strncmp(message, begin, sizeof(begin) - 1) == 0;
}

void mb_grpc_deaf_heard(const char *file, const char *message)
{
    if (!mb_grpc_deaf_says(file, message))
        return;
    pthread_mutex_lock(&lock);
    if (told != NULL) {
        told->is_deaf = 1;
        uv_async_send(&told->async);
    }
    pthread_mutex_unlock(&lock);
}

void mb_grpc_on_deaf(struct mb_grpc *g, void (*cb)(void *arg), void *arg)
{
    g->deaf_cb = cb;
    g->deaf_arg = arg;
    pthread_mutex_lock(&lock);
    told = g;
    pthread_mutex_unlock(&lock);
}

void mb_grpc_deaf_tell(struct mb_grpc *g)
{
    int is_deaf;

    if (g->deaf_cb == NULL)
        return;
    pthread_mutex_lock(&lock);
    is_deaf = g->is_deaf;
    g->is_deaf = 0;
    pthread_mutex_unlock(&lock);
    if (is_deaf && !g->stopping)
        g->deaf_cb(g->deaf_arg);
}

void mb_grpc_deaf_forget(struct mb_grpc *g)
{
    pthread_mutex_lock(&lock);
    if (told == g)
        told = NULL;
    pthread_mutex_unlock(&lock);
}
