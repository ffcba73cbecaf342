/* Any text as --store: refused with a fixed text, nothing left of it; or every field is within its
 * bounds, and what is printed of it is the same place again, without user and password. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "gcs/redis_url.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int is_zero(const struct mb_redis_url *u)
{
    static const struct mb_redis_url zero;

    return memcmp(u, &zero, sizeof(zero)) == 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mb_redis_url url, again;
    struct mb_err err = {0};
    char *text = malloc(size + 1), printed[512];

    if (text == NULL)
        return 0;
    memcpy(text, data, size);
    text[size] = '\0';
    if (mb_redis_url_parse(text, &url, &err) != 0) {
        /* Nothing of the text is quoted: it may hold a password. */
        if (err.code == MB_EINVAL
                ? !is_zero(&url) || strcmp(err.text, "the store's address: expected redis://"
                                                     "[user:password@]host[:port][/db]"
                                                     "[?prefix=NAME]") != 0
                : err.code != MB_EUNSUPPORTED || strncmp(text, "rediss://", 9) != 0)
            abort();
        free(text);
        return 0;
    }
    if (url.host[0] == '\0' || url.prefix[0] == '\0' || url.port < 0 || url.port > 65535 ||
        url.db < 0 || url.db > 9999 || memchr(url.host, 0, sizeof(url.host)) == NULL ||
        memchr(url.user, 0, sizeof(url.user)) == NULL ||
        memchr(url.password, 0, sizeof(url.password)) == NULL)
        abort();
    mb_redis_url_public(&url, printed);
    if (mb_redis_url_parse(printed, &again, &err) != 0 || strcmp(again.host, url.host) != 0 ||
        again.port != url.port || again.db != url.db || strcmp(again.prefix, url.prefix) != 0 ||
        again.user[0] != '\0' || again.password[0] != '\0')
        abort();
    free(text);
    return 0;
}
