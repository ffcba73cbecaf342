/* Closing the process itself, with nothing but libc: the static client has no more. */
#include <stdlib.h>
#include <sys/prctl.h>
#include "base/secret.h"

void mb_secret_shut_process(void)
{
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    (void)prctl(PR_SET_DUMPABLE, 0);
#endif
}

void mb_secret_shut_process_with_keys(void)
{
    static const char *const names[] = {"BUCKET_STORAGE_SECRET_KEY", "AWS_SECRET_ACCESS_KEY",
                                        "AWS_SESSION_TOKEN", "AWS_CONTAINER_AUTHORIZATION_TOKEN"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (getenv(names[i]))
            mb_secret_shut_process();
    }
}
