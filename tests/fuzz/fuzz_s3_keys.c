/* Any bytes as an answer with credentials: what is taken can be sent in a header, what is refused
 * leaves nothing behind. The first byte says which kind of answer. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "base/s3/keys.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(const char *s)
{
    if (!s || !*s)
        abort();
    for (; *s; s++) {
        if ((unsigned char)*s <= 0x20 || (unsigned char)*s >= 0x7f)
            abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mb_s3_keys k;
    struct mb_err err;
    if (size == 0)
        return 0;
    int rc = data[0] == '{' ? mb_s3_keys_from_json(data, size, &k, &err)
                            : mb_s3_keys_from_sts(data, size, &k, &err);
    if (rc == 0) {
        check(k.access_key);
        check(mb_secret_text(k.secret_key));
        if (k.session_token)
            check(mb_secret_text(k.session_token));
    } else if (k.access_key || k.secret_key || k.session_token) {
        abort();
    }
    mb_s3_keys_close(&k);
    return 0;
}
