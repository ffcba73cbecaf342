/* Which codec the first bytes of a source ask for; names of what cannot be read as JSON Lines. */
#include "worker/data/input/codec.h"

#include <string.h>
#include "base/str.h"

struct magic {
    const char *bytes;
    size_t n;
    const struct mb_codec_ops *codec; /* NULL: refused */
    const char *refusal;
};

static const struct magic magics[] = {
    {"\x1f\x8b", 2, &mb_codec_gzip, NULL},
    {"\xfd"
     "7zXZ\0",
     6, &mb_codec_xz, NULL},
    {"\x28\xb5\x2f\xfd", 4, &mb_codec_zstd, NULL},
    {"BZh", 3, NULL, "it is bzip2; pipe it through bunzip2 with --input -"},
    {"\x04\x22\x4d\x18", 4, NULL, "it is lz4; pipe it through lz4 -d with --input -"},
    {"PK\3\4", 4, NULL, "it is a zip archive; unpack it first, or pipe it through unzip -p"},
    {"PAR1", 4, NULL, "it is a Parquet file; write its rows as JSON Lines first"},
    {"ARROW1", 6, NULL, "it is an Arrow file; write its rows as JSON Lines first"},
    {"7z\xbc\xaf\x27\x1c", 6, NULL, "it is a 7z archive; unpack it first"},
};

static const struct mb_codec_ops *const codecs[] = {&mb_codec_gzip, &mb_codec_xz, &mb_codec_zstd};

/* A zstd frame that holds no data may come first: its magic has 16 forms. */
static int is_skippable_frame(const uint8_t *p, size_t n)
{
    return n >= 4 && (p[0] & 0xf0) == 0x50 && memcmp(p + 1, "\x2a\x4d\x18", 3) == 0;
}

int mb_codec_find(const uint8_t *first, size_t n, const struct mb_codec_ops **out,
                  struct mb_err *err)
{
    *out = NULL;
    for (size_t i = 0; i < sizeof(magics) / sizeof(magics[0]); i++) {
        const struct magic *m = &magics[i];

        if (n < m->n || memcmp(first, m->bytes, m->n) != 0)
            continue;
        if (m->codec == NULL)
            return mb_err_set(err, MB_EINVAL, "%s", m->refusal);
        *out = m->codec;
        return 0;
    }
    if (is_skippable_frame(first, n))
        *out = &mb_codec_zstd;
    return 0;
}

int mb_codec_check_name(const char *name, size_t n, const struct mb_codec_ops *found,
                        struct mb_err *err)
{
    for (size_t i = 0; i < sizeof(codecs) / sizeof(codecs[0]); i++) {
        if (n > 0 && codecs[i] != found && mb_ends_with(name, codecs[i]->end))
            return mb_err_set(err, MB_EINVAL, "not %s, although its name ends in %s; rename it",
                              codecs[i]->name, codecs[i]->end);
    }
    return 0;
}
