/* Preloaded into a program of the tests: its wall clock is $SKEW_SECONDS off, or as many as the
 * 64-bit number in $SKEW_FILE says now: a clock that jumps. */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static volatile const int64_t *shared_skew(const char *path)
{
    static volatile const int64_t *shared;
    void *p;
    int fd;

    if (shared != NULL || path == NULL)
        return shared;
    fd = open(path, O_RDONLY | O_CLOEXEC);
    p = fd >= 0 ? mmap(NULL, sizeof(*shared), PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;
    if (fd >= 0)
        close(fd);
    if (p != MAP_FAILED)
        shared = p;
    return shared;
}

int clock_gettime(clockid_t id, struct timespec *ts)
{
    static int (*real)(clockid_t, struct timespec *);
    const char *skew = getenv("SKEW_SECONDS");
    volatile const int64_t *shared;
    if (!real)
        *(void **)&real = dlsym(RTLD_NEXT, "clock_gettime");
    int rc = real(id, ts);
    if (rc != 0 || id != CLOCK_REALTIME)
        return rc;
    shared = shared_skew(getenv("SKEW_FILE"));
    ts->tv_sec += (skew != NULL ? atol(skew) : 0) + (shared != NULL ? *shared : 0);
    return rc;
}
