/*
 *  1. resolve dir, so that links above it are no matter; look for names of a zip that libarchive
 *  would change (zip_names.h), and give them back; 2. for each entry: check its name, what it
 *  is and the target of a hard link, take setuid and setgid off, put dir in front; 3. libarchive
 *  writes it, never through a link (SECURE_SYMLINKS); 4. directory times and modes at the end.
 */
#include "agent/unpack/unpack.h"

#include <limits.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <archive.h>
#include <archive_entry.h>
#include "agent/unpack/zip_names.h"
#include "base/alloc.h"

enum { BLOCK_BYTES = 64 * 1024 };
const struct mb_unpack_limits mb_unpack_limits = {1000 * 1000, (int64_t)64 << 30};

int mb_unpack_is_inside(const char *name)
{
    if (name == NULL || name[0] == '/' || name[0] == '\0')
        return 0;
    for (const char *p = name; p != NULL; p = strchr(p, '/')) {
        p += *p == '/';
        if (strncmp(p, "..", 2) == 0 && (p[2] == '/' || p[2] == '\0'))
            return 0;
    }
    return 1;
}

/* Directories, files and links, without the bits that lend a user's or a group's rights: libarchive
 * restores those where the owner fits, and makes any device or pipe. */
static int check_kind(struct archive_entry *entry, struct mb_err *err)
{
    mode_t type = archive_entry_filetype(entry);

    if (type != AE_IFREG && type != AE_IFDIR && type != AE_IFLNK &&
        archive_entry_hardlink(entry) == NULL)
        return mb_err_set(err, MB_EDENIED, "entry %s is neither a file nor a directory nor a link",
                          archive_entry_pathname(entry));
    archive_entry_set_perm(entry, archive_entry_perm(entry) & 0777);
    return 0;
}

/* Puts dir in front of the entry's name and of its hard link's target. */
static int place(struct archive_entry *entry, const char *dir, struct mb_err *err)
{
    const char *name = archive_entry_pathname(entry);
    const char *link = archive_entry_hardlink(entry);
    char *path;

    if (!mb_unpack_is_inside(name) || (link != NULL && !mb_unpack_is_inside(link)))
        return mb_err_set(err, MB_EDENIED, "entry %s leaves the directory",
                          name != NULL ? name : "without a name");
    if (check_kind(entry, err) != 0)
        return MB_EDENIED;
    path = mb_asprintf("%s/%s", dir, name);
    if (path == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    archive_entry_set_pathname(entry, path);
    mb_free(path);
    if (link == NULL)
        return 0;
    path = mb_asprintf("%s/%s", dir, link);
    if (path == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    archive_entry_set_hardlink(entry, path);
    mb_free(path);
    return 0;
}

static int archive_err(struct mb_err *err, struct archive *a, int code)
{
    const char *text = archive_error_string(a);

    if (archive_errno(a) == ENOSPC)
        code = MB_EFULL;
    return mb_err_set(err, code, "%s", text != NULL ? text : "it is damaged or not whole");
}

/* What libarchive says of a disk, "Write failed", does not say why. Its number does: errno; in what
 * it says of an archive the number is one of its own. */
static int disk_err(struct mb_err *err, struct archive *out, int code)
{
    const char *text = archive_error_string(out);
    int why = archive_errno(out);

    if (text == NULL || why <= 0 || why == EINVAL || strstr(text, strerror(why)) != NULL)
        return archive_err(err, out, code);
    return mb_err_set(err, why == ENOSPC || why == EDQUOT ? MB_EFULL : code, "%s: %s", text,
                      strerror(why));
}

static int copy_data(struct archive *in, struct archive *out, int64_t *left, struct mb_err *err)
{
    const void *block;
    size_t n;
    int64_t offset;
    int rc;

    while ((rc = archive_read_data_block(in, &block, &n, &offset)) == ARCHIVE_OK) {
        *left -= (int64_t)n;
        if (*left < 0)
            return mb_err_set(err, MB_EFULL, "it holds more than may be unpacked");
        if (archive_write_data_block(out, block, n, offset) < ARCHIVE_OK)
            return disk_err(err, out, MB_EIO);
    }
    return rc == ARCHIVE_EOF ? 0 : archive_err(err, in, MB_ECORRUPT);
}

/* Entry i gets its name back. rc: of its header; libarchive only warns of a name that it lost. */
static int name_entry(struct archive *in, struct archive_entry *entry, size_t i,
                      const struct mb_zip_names *names, int rc, struct mb_err *err)
{
    const char *taken = archive_entry_pathname(entry);
    int is_zip = (archive_format(in) & ARCHIVE_FORMAT_BASE_MASK) == ARCHIVE_FORMAT_ZIP, trouble = 0;
    char *name = is_zip ? mb_zip_names_get(names, i, taken, &trouble) : NULL;

    if (rc != ARCHIVE_OK && (rc != ARCHIVE_WARN || taken != NULL || name == NULL))
        trouble = trouble != 0 ? trouble : archive_err(err, in, MB_ECORRUPT);
    else if (name != NULL)
        archive_entry_set_pathname(entry, name);
    mb_free(name);
    return trouble == MB_ENOMEM ? mb_err_set(err, trouble, "out of memory") : trouble;
}

static int unpack_all(struct archive *in, struct archive *out, const char *dir,
                      const struct mb_zip_names *names, const struct mb_unpack_limits *limits,
                      struct mb_err *err)
{
    struct archive_entry *entry;
    int64_t left = limits->bytes;
    int rc;

    for (int n = 0; (rc = archive_read_next_header(in, &entry)) >= ARCHIVE_WARN; n++) {
        if (rc == ARCHIVE_EOF)
            return 0;
        if (n >= limits->entries)
            return mb_err_set(err, MB_EFULL, "more than %d entries", limits->entries);
        rc = name_entry(in, entry, (size_t)n, names, rc, err);
        if (rc == 0)
            rc = place(entry, dir, err);
        if (rc != 0)
            return rc;
        if (archive_write_header(out, entry) != ARCHIVE_OK)
            return disk_err(err, out, MB_EDENIED);
        rc = copy_data(in, out, &left, err);
        if (rc != 0)
            return rc;
        if (archive_write_finish_entry(out) != ARCHIVE_OK)
            return disk_err(err, out, MB_EIO);
    }
    return archive_err(err, in, MB_ECORRUPT);
}

/* The whole file, to look into; nothing of one that is empty. */
static int map(const char *package, uint8_t **data, size_t *size, struct mb_err *err)
{
    int fd = open(package, O_RDONLY | O_CLOEXEC), rc = 0;
    struct stat st = {.st_size = 0};
    void *p = NULL;

    if (fd < 0 || fstat(fd, &st) != 0)
        rc = mb_err_sys(err, errno, "open");
    else if (st.st_size > 0 &&
             (p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0)) == MAP_FAILED)
        rc = mb_err_sys(err, errno, "mmap");
    if (fd >= 0)
        close(fd);
    *data = rc == 0 ? p : NULL;
    *size = *data != NULL ? (size_t)st.st_size : 0;
    return rc;
}

/* The formats of runtime_env packages and no others: each reader is code that outside bytes reach.
 */
static void support(struct archive *in)
{
    archive_read_support_filter_gzip(in);
    archive_read_support_filter_xz(in);
    archive_read_support_format_tar(in);
    archive_read_support_format_zip(in);
}

int mb_unpack(const char *package, const char *dir, const struct mb_unpack_limits *limits,
              struct mb_err *err)
{
    struct archive *in = archive_read_new(), *out = archive_write_disk_new();
    char *real_dir = realpath(dir, NULL);
    struct mb_zip_names names = {NULL, 0};
    uint8_t *data = NULL;
    size_t size = 0;
    int rc;

    if (real_dir == NULL) {
        rc = mb_err_sys(err, errno, "%s", dir);
    } else if (in == NULL || out == NULL) {
        rc = mb_err_set(err, MB_ENOMEM, "out of memory");
    } else {
        support(in);
        archive_write_disk_set_options(out, ARCHIVE_EXTRACT_PERM | ARCHIVE_EXTRACT_TIME |
                                                ARCHIVE_EXTRACT_SECURE_SYMLINKS |
                                                ARCHIVE_EXTRACT_SECURE_NODOTDOT);
        rc = map(package, &data, &size, err);
        if (rc == 0 && mb_zip_names_init(&names, data, size, (size_t)limits->entries) != 0)
            rc = mb_err_set(err, MB_ENOMEM, "out of memory");
        if (rc == 0 && archive_read_open_filename(in, package, BLOCK_BYTES) != ARCHIVE_OK)
            rc = archive_err(err, in, MB_ECORRUPT);
        if (rc == 0)
            rc = unpack_all(in, out, real_dir, &names, limits, err);
        if (rc == 0 && archive_write_close(out) != ARCHIVE_OK)
            rc = disk_err(err, out, MB_EIO);
    }
    archive_read_free(in);
    archive_write_free(out);
    mb_zip_names_close(&names);
    if (data != NULL)
        munmap(data, size);
    free(real_dir);
    return rc == 0 ? 0 : mb_err_wrap(err, "package %s", package);
}
