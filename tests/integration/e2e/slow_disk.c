/* Preloaded into programs of the tests: a disk that takes $SLOW_DISK_MS for every flush while the
 * file $SLOW_DISK_WHILE is there. */
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static void wait_for_the_disk(void)
{
    const char *file = getenv("SLOW_DISK_WHILE"), *ms = getenv("SLOW_DISK_MS");
    long long n = ms != NULL ? atoll(ms) : 0;
    struct timespec left = {n / 1000, n % 1000 * 1000000};

    if (file != NULL && access(file, F_OK) == 0)
        nanosleep(&left, NULL);
}

int fsync(int fd)
{
    static int (*real)(int);

    if (!real)
        *(void **)&real = dlsym(RTLD_NEXT, "fsync");
    wait_for_the_disk();
    return real(fd);
}

int fdatasync(int fd)
{
    static int (*real)(int);

    if (!real)
        *(void **)&real = dlsym(RTLD_NEXT, "fdatasync");
    wait_for_the_disk();
    return real(fd);
}
