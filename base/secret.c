/*
 * 1. create: whole pages are mapped, marked, filled.
 * 2. destroy: overwritten, unmapped.
 * Failures: memory. A system that knows a mark not, or allows no locked memory, is no failure: the
 * process itself is closed to others already.
 */
#include "base/secret.h"

#include <openssl/crypto.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "base/alloc.h"

struct mb_secret {
    char *text;
    size_t map_bytes;
};

struct mb_secret *mb_secret_create(const char *text, size_t n)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    struct mb_secret *s = text ? mb_alloc(sizeof *s) : NULL;
    if (!s)
        return NULL;
    s->map_bytes = (n + page) / page * page;
    s->text = mmap(NULL, s->map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (s->text == MAP_FAILED) {
        mb_free(s);
        return NULL;
    }
    (void)madvise(s->text, s->map_bytes, MADV_DONTDUMP);
    (void)madvise(s->text, s->map_bytes, MADV_WIPEONFORK);
    (void)mlock(s->text, s->map_bytes);
    memcpy(s->text, text, n);
    return s;
}

void mb_secret_destroy(struct mb_secret *s)
{
    if (!s)
        return;
    OPENSSL_cleanse(s->text, s->map_bytes);
    munmap(s->text, s->map_bytes);
    mb_free(s);
}

const char *mb_secret_text(const struct mb_secret *s)
{
    return s ? s->text : NULL;
}

void mb_secret_wipe(void *p, size_t n)
{
    if (p)
        OPENSSL_cleanse(p, n);
}
