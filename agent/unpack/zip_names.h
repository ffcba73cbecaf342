/*
 * The names of a zip as they stand in it. libarchive 3 makes every "\" of a name without "/" one,
 * whoever made the archive: meant for those of Windows, where "\" separates, it changes a file's
 * name in those of Unix, where it is a letter (PKWARE's APPNOTE 4.4.2.2: "version made by"), and
 * fails where such a name is not ASCII. Pure.
 */
#ifndef MOBULA_AGENT_UNPACK_ZIP_NAMES_H
#define MOBULA_AGENT_UNPACK_ZIP_NAMES_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

struct mb_zip_name {
    uint64_t offset; /* of its entry */
    const uint8_t *name;
    uint16_t len;
    uint8_t system; /* that made it */
};

struct mb_zip_names {
    struct mb_zip_name *list; /* owned; in the order of the entries, as libarchive has them */
    size_t n;
};

/* data is a whole file, borrowed for as long as out is used. Nothing in out: libarchive changes no
 * name, there are more than max entries, or this is no zip that ends as one should. 0 or MB_ENOMEM.
 */
int mb_zip_names_init(struct mb_zip_names *out, const uint8_t *data, size_t size, size_t max);
/* The name of entry i where libarchive's, `taken` (NULL: it has failed), is not what it should be,
 * owned by the caller; else NULL. *rc becomes MB_ENOMEM when there is no memory for it. */
char *mb_zip_names_get(const struct mb_zip_names *z, size_t i, const char *taken, int *rc);
void mb_zip_names_close(struct mb_zip_names *z);

#endif
