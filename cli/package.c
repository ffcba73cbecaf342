/*
 * Scan: 1. walk the tree in name order, leaving out what is ignored (an ignored directory is not
 * entered); 2. fold each entry into the hash: the first 8 bytes of SHA-1(relative path, then
 * content) are XORed onto "00000000", so that the order does not matter; the root counts as ".".
 * Zip: libarchive, stored, in the same order. A file that shrinks or grows meanwhile fails the zip:
 * its name would promise other bytes.
 */
#include "cli/package.h"

#include <archive.h>
#include <archive_entry.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <openssl/evp.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "base/fs.h"
#include "base/str.h"
#include "cli/ignore.h"

enum { BLOCK_BYTES = 64 * 1024, IGNORE_MAX_BYTES = 1 << 20, FILES_MAX = 1000 * 1000, NAMED = 3 };

static const char *const archive_ends[] = {".tar.gz", ".tgz", ".tar.xz", ".zip", ".whl"};
enum { N_ARCHIVE_ENDS = sizeof(archive_ends) / sizeof(archive_ends[0]) };

struct scan {
    const char *root;
    const char *field; /* of runtime_env */
    struct mb_package *out;
    struct mb_ignore ignore;
    uint8_t hash[8];
    struct mb_err *err;
};

/* ---- hashing ---- */

/* SHA-1 of a text and of what a file holds (NULL: of none). */
static int sha1(const char *text, const char *file, uint8_t digest[EVP_MAX_MD_SIZE],
                struct mb_err *err)
{
    uint8_t block[BLOCK_BYTES];
    EVP_MD_CTX *ctx = EVP_MD_CTX_new();
    int fd = -1, rc = 0;
    ssize_t n;

    if (ctx == NULL || EVP_DigestInit_ex(ctx, EVP_sha1(), NULL) != 1 ||
        EVP_DigestUpdate(ctx, text, strlen(text)) != 1)
        rc = mb_err_set(err, MB_EUNSUPPORTED, "SHA-1 is not available");
    if (rc == 0 && file != NULL) {
        fd = open(file, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            rc = mb_err_sys(err, errno, "%s", file);
    }
    while (rc == 0 && fd >= 0 && (n = read(fd, block, sizeof(block))) != 0) {
        if (n < 0)
            rc = mb_err_sys(err, errno, "%s", file);
        else if (EVP_DigestUpdate(ctx, block, (size_t)n) != 1)
            rc = mb_err_set(err, MB_ENOMEM, "SHA-1 failed");
    }
    if (fd >= 0)
        close(fd);
    if (rc == 0 && EVP_DigestFinal_ex(ctx, digest, NULL) != 1)
        rc = mb_err_set(err, MB_ENOMEM, "SHA-1 failed");
    EVP_MD_CTX_free(ctx);
    return rc;
}

static int hash_entry(struct scan *s, const char *path, const char *file)
{
    uint8_t digest[EVP_MAX_MD_SIZE];
    int rc = sha1(path, file, digest, s->err);

    for (int i = 0; rc == 0 && i < 8; i++)
        s->hash[i] ^= digest[i];
    return rc;
}

/* ---- walking ---- */

static int add_file(struct scan *s, const char *path, int is_dir, uint64_t size_bytes)
{
    struct mb_package *p = s->out;
    struct mb_package_file *grown;
    char *copy;

    if (p->n_files >= FILES_MAX)
        return mb_err_set(s->err, MB_EFULL, "%s: more than %d files", s->root, FILES_MAX);
    copy = mb_strdup(path);
    grown = mb_reallocarray(p->files, p->n_files + 1, sizeof(*grown));
    if (grown != NULL)
        p->files = grown;
    if (copy == NULL || grown == NULL) {
        mb_free(copy);
        return mb_err_set(s->err, MB_ENOMEM, "out of memory");
    }
    grown[p->n_files++] = (struct mb_package_file){copy, is_dir, size_bytes};
    p->total_bytes += size_bytes;
    return 0;
}

static int read_ignore_file(struct scan *s, const char *dir, const char *rel, const char *name)
{
    char *path = mb_path_join(dir, name), *save = NULL;
    struct mb_buf text = {0};
    int rc = 0;

    if (path == NULL)
        return mb_err_set(s->err, MB_ENOMEM, "out of memory");
    if (mb_fs_exists(path)) {
        rc = mb_fs_read(path, IGNORE_MAX_BYTES, &text, s->err);
        for (char *line = rc == 0 && text.len > 0 ? strtok_r((char *)text.data, "\n", &save) : NULL;
             line != NULL && rc == 0; line = strtok_r(NULL, "\n", &save)) {
            if (mb_ignore_add(&s->ignore, rel, line) != 0)
                rc = mb_err_set(s->err, MB_ENOMEM, "out of memory");
        }
    }
    mb_buf_close(&text);
    mb_free(path);
    return rc;
}

static int walk(struct scan *s, const char *dir, const char *rel);

/* A link to nothing, in a circle, or the fortieth in a row, as one to "." becomes. */
static int leads_nowhere(const char *full, int why)
{
    struct stat st;

    return (why == ENOENT || why == ENOTDIR || why == ELOOP) && lstat(full, &st) == 0 &&
           S_ISLNK(st.st_mode);
}

static int leave_out(struct scan *s, const char *rel)
{
    if (s->out->n_left_out++ == 0 && (s->out->left_out = mb_strdup(rel)) == NULL)
        return mb_err_set(s->err, MB_ENOMEM, "out of memory");
    return hash_entry(s, rel, NULL);
}

static int visit(struct scan *s, const char *full, const char *rel)
{
    struct stat st = {.st_mode = 0};
    int is_dir, rc;

    if (stat(full, &st) != 0 && !leads_nowhere(full, errno))
        return mb_err_sys(s->err, errno, "%s", full);
    is_dir = S_ISDIR(st.st_mode);
    if (mb_ignore_matches(&s->ignore, rel, is_dir))
        return 0;
    if (!is_dir && !S_ISREG(st.st_mode))
        return leave_out(s, rel);
    rc = add_file(s, rel, is_dir, is_dir ? 0 : (uint64_t)st.st_size);
    if (rc == 0)
        rc = hash_entry(s, rel, is_dir ? NULL : full);
    return rc == 0 && is_dir ? walk(s, full, rel) : rc;
}

static int walk(struct scan *s, const char *dir, const char *rel)
{
    struct dirent **entries = NULL;
    int n, rc = read_ignore_file(s, dir, rel, ".gitignore");

    if (rc == 0)
        rc = read_ignore_file(s, dir, rel, ".rayignore");
    if (rc != 0)
        return rc;
    n = scandir(dir, &entries, NULL, alphasort);
    if (n < 0)
        return mb_err_sys(s->err, errno, "%s", dir);
    for (int i = 0; i < n; i++) {
        const char *name = entries[i]->d_name;

        if (rc == 0 && strcmp(name, ".") != 0 && strcmp(name, "..") != 0 &&
            strcmp(name, ".git") != 0) {
            char *full = mb_path_join(dir, name);
            char *below = *rel != '\0' ? mb_path_join(rel, name) : mb_strdup(name);

            rc = full != NULL && below != NULL ? visit(s, full, below)
                                               : mb_err_set(s->err, MB_ENOMEM, "out of memory");
            mb_free(full);
            mb_free(below);
        }
        free(entries[i]);
    }
    free(entries);
    return rc;
}

static int too_large(const struct scan *s, uint64_t max_bytes)
{
    const struct mb_package *p = s->out;
    const struct mb_package_file *largest[NAMED] = {NULL};
    struct mb_buf names = {0};
    char size[16], limit[16];
    int rc;

    for (size_t i = 0; i < p->n_files; i++) {
        const struct mb_package_file *f = &p->files[i];

        for (int k = 0; k < NAMED; k++) {
            if (largest[k] == NULL || f->size_bytes > largest[k]->size_bytes) {
                memmove(&largest[k + 1], &largest[k], (size_t)(NAMED - 1 - k) * sizeof(f));
                largest[k] = f;
                break;
            }
        }
    }
    for (int k = 0; k < NAMED && largest[k] != NULL; k++)
        mb_buf_printf(&names, "%s%s (%s)", k > 0 ? ", " : "", largest[k]->path,
                      mb_human_bytes(largest[k]->size_bytes, size));
    rc = mb_err_set(s->err, MB_EFULL,
                    "%s %s holds %s, at most %s can be uploaded (mobula start --head "
                    "--max-package-size); the largest files are %s: name them in .rayignore or put "
                    "them where the nodes can read them",
                    s->field, s->root, mb_human_bytes(p->total_bytes, size),
                    mb_human_bytes(max_bytes, limit), mb_buf_str(&names));
    mb_buf_close(&names);
    return rc;
}

static void begin(struct scan *s, const char *const *excludes, const char *base, int *rc)
{
    memset(s->out, 0, sizeof(*s->out));
    memcpy(s->hash, "00000000", 8);
    for (; excludes != NULL && *excludes != NULL && *rc == 0; excludes++) {
        if (mb_ignore_add(&s->ignore, base, *excludes) != 0)
            *rc = mb_err_set(s->err, MB_ENOMEM, "out of memory");
    }
}

static int end(struct scan *s, uint64_t max_bytes, int rc)
{
    char hex[17];

    if (rc == 0 && s->out->total_bytes > max_bytes)
        rc = too_large(s, max_bytes);
    mb_ignore_close(&s->ignore);
    if (rc != 0)
        mb_package_close(s->out);
    else
        snprintf(s->out->name, sizeof(s->out->name), "_ray_pkg_%s.zip", mb_hex(s->hash, 8, hex));
    return rc;
}

int mb_package_scan(const char *dir, const char *const *excludes, uint64_t max_bytes,
                    struct mb_package *out, struct mb_err *err)
{
    struct scan s = {.root = dir, .field = "working_dir", .out = out, .err = err};
    int rc = 0;

    begin(&s, excludes, "", &rc);
    if (rc == 0)
        rc = hash_entry(&s, ".", NULL);
    if (rc == 0)
        rc = walk(&s, dir, "");
    return end(&s, max_bytes, rc);
}

static int scan_module(struct scan *s, const char *full, const char *name)
{
    struct stat st;
    int is_dir, rc;

    if (stat(full, &st) != 0)
        return mb_err_sys(s->err, errno, "%s", full);
    is_dir = S_ISDIR(st.st_mode);
    rc = add_file(s, name, is_dir, is_dir ? 0 : (uint64_t)st.st_size);
    if (rc == 0)
        rc = hash_entry(s, name, is_dir ? NULL : full);
    return rc == 0 && is_dir ? walk(s, full, name) : rc;
}

int mb_package_scan_module(const char *path, const char *const *excludes, uint64_t max_bytes,
                           struct mb_package *out, struct mb_err *err)
{
    struct scan s = {.root = path, .field = "py_modules:", .out = out, .err = err};
    char *full = realpath(path, NULL); /* the name of "." */
    const char *name = full != NULL ? strrchr(full, '/') + 1 : "";
    int rc = 0;

    begin(&s, excludes, name, &rc);
    out->skip = strlen(name) + 1;
    if (full == NULL)
        rc = mb_err_sys(err, errno, "%s", path);
    else if (rc == 0 && *name == '\0')
        rc = mb_err_set(err, MB_EINVAL, "py_modules: / has no name that could be imported");
    if (rc == 0)
        rc = hash_entry(&s, ".", NULL);
    if (rc == 0)
        rc = scan_module(&s, full, name);
    rc = end(&s, max_bytes, rc);
    free(full);
    return rc;
}

/* ---- files that are packages ---- */

/* The end of its name that says so, or NULL. */
static const char *archive_end(const char *path, int is_module)
{
    size_t n = strlen(path);

    for (int i = 0; i < N_ARCHIVE_ENDS - !is_module; i++) {
        size_t m = strlen(archive_ends[i]);

        if (n > m && strcmp(path + n - m, archive_ends[i]) == 0)
            return archive_ends[i];
    }
    return NULL;
}

int mb_package_is_archive(const char *path, int is_module)
{
    return archive_end(path, is_module) != NULL;
}

int mb_package_scan_archive(const char *path, uint64_t max_bytes, struct mb_package *out,
                            struct mb_err *err)
{
    const char *ends = archive_end(path, 1), *slash = strrchr(path, '/');
    const char *name = slash != NULL ? slash + 1 : path;
    uint8_t digest[EVP_MAX_MD_SIZE];
    char hex[41], size[16], limit[16];
    struct stat st;
    int rc;

    memset(out, 0, sizeof(*out));
    if (stat(path, &st) != 0)
        return mb_err_sys(err, errno, "%s", path);
    if (!S_ISREG(st.st_mode) || ends == NULL)
        return mb_err_set(err, MB_EINVAL, "%s is not a file that is a package", path);
    out->is_archive = 1;
    out->total_bytes = (uint64_t)st.st_size;
    if (out->total_bytes > max_bytes)
        return mb_err_set(err, MB_EFULL,
                          "%s has %s, at most %s can be uploaded (mobula start --head "
                          "--max-package-size)",
                          path, mb_human_bytes(out->total_bytes, size),
                          mb_human_bytes(max_bytes, limit));
    if (strcmp(ends, ".whl") == 0) {
        if (strlen(name) >= sizeof(out->name))
            return mb_err_set(err, MB_EINVAL, "%s: its name is too long", path);
        snprintf(out->name, sizeof(out->name), "%s", name);
        return 0;
    }
    rc = sha1("", path, digest, err);
    if (rc == 0)
        snprintf(out->name, sizeof(out->name), "_ray_pkg_%s%s", mb_hex(digest, 20, hex),
                 strcmp(ends, ".tgz") == 0 ? ".tar.gz" : ends);
    return rc;
}

void mb_package_close(struct mb_package *p)
{
    for (size_t i = 0; i < p->n_files; i++)
        mb_free(p->files[i].path);
    mb_free(p->files);
    mb_free(p->left_out);
    memset(p, 0, sizeof(*p));
}

/* ---- the zip ---- */

static int copy_file(struct archive *a, const char *path, uint64_t size_bytes, struct mb_err *err)
{
    uint8_t block[BLOCK_BYTES];
    uint64_t done = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC), rc = 0;
    ssize_t n = 0;

    if (fd < 0)
        return mb_err_sys(err, errno, "%s", path);
    while (rc == 0 && (n = read(fd, block, sizeof(block))) > 0) {
        done += (uint64_t)n;
        if (done > size_bytes || archive_write_data(a, block, (size_t)n) != n)
            rc = mb_err_set(err, MB_EIO, "%s: changed while it was packed, or the disk is full",
                            path);
    }
    if (rc == 0 && n < 0)
        rc = mb_err_sys(err, errno, "%s", path);
    if (rc == 0 && done != size_bytes)
        rc = mb_err_set(err, MB_EIO, "%s: changed while it was packed", path);
    close(fd);
    return rc;
}

static int zip_entry(struct archive *a, const struct mb_package_file *f, const char *dir,
                     size_t skip, struct mb_err *err)
{
    char *full = strlen(f->path) < skip ? mb_strdup(dir) : mb_path_join(dir, f->path + skip);
    struct archive_entry *e = archive_entry_new();
    struct stat st;
    int rc = 0;

    if (full == NULL || e == NULL)
        rc = mb_err_set(err, MB_ENOMEM, "out of memory");
    else if (stat(full, &st) != 0)
        rc = mb_err_sys(err, errno, "%s", full);
    if (rc == 0) {
        archive_entry_set_pathname(e, f->path);
        archive_entry_set_filetype(e, f->is_dir ? AE_IFDIR : AE_IFREG);
        archive_entry_set_perm(e, st.st_mode & 0777);
        archive_entry_set_mtime(e, st.st_mtime, 0);
        archive_entry_set_size(e, (la_int64_t)f->size_bytes);
        if (archive_write_header(a, e) != ARCHIVE_OK)
            rc = mb_err_set(err, MB_EIO, "%s: %s", full, archive_error_string(a));
        else if (!f->is_dir)
            rc = copy_file(a, full, f->size_bytes, err);
    }
    archive_entry_free(e);
    mb_free(full);
    return rc;
}

int mb_package_zip(const struct mb_package *p, const char *dir, int fd, struct mb_err *err)
{
    struct archive *a = archive_write_new();
    int rc = 0;

    if (a == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    archive_write_set_format_zip(a);
    archive_write_zip_set_compression_store(a);
    archive_write_set_bytes_in_last_block(a, 1);
    if (archive_write_open_fd(a, fd) != ARCHIVE_OK)
        rc = mb_err_set(err, MB_EIO, "%s", archive_error_string(a));
    for (size_t i = 0; i < p->n_files && rc == 0; i++)
        rc = zip_entry(a, &p->files[i], dir, p->skip, err);
    if (rc == 0 && archive_write_close(a) != ARCHIVE_OK)
        rc = mb_err_set(err, MB_EIO, "writing the package: %s", archive_error_string(a));
    archive_write_free(a);
    return rc;
}
