/*
 * Words of the command line into sources.
 *
 * 1. "-" is standard input, a word with :// a URL, anything else a path.
 * 2. A path with * ? [ that does not exist under this very name is a glob: what it finds is sorted
 * by bytes, and nothing found is an error. (Megatron-LM takes the order of the directory, which
 *    differs between machines.)
 * 3. A URL is taken as it is, and named without what may be secret in it; a glob of s3:// asks the
 *    bucket.
 * 4. A local file is looked at: missing, a directory, not readable are errors here, before hours of
 *    work on the files in front of it.
 */
#include <errno.h>
#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/str.h"
#include "worker/data/input/source.h"

void mb_sources_close(struct mb_sources *s)
{
    for (size_t i = 0; i < s->n; i++) {
        mb_free(s->items[i].place);
        mb_free(s->items[i].name);
    }
    mb_free(s->items);
    *s = (struct mb_sources){0};
}

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "--input: out of memory");
}

static int add(struct mb_sources *s, enum mb_source_kind kind, const char *place, const char *name,
               struct mb_err *err)
{
    struct mb_source item = {.kind = kind};

    if (s->n == MB_INPUT_MAX_SOURCES)
        return mb_err_set(err, MB_EINVAL, "--input: more than %d files", MB_INPUT_MAX_SOURCES);
    if (s->n == s->cap) {
        size_t cap = s->cap > 0 ? 2 * s->cap : 16;
        struct mb_source *grown = mb_reallocarray(s->items, cap, sizeof(*grown));

        if (grown == NULL)
            return no_memory(err);
        s->items = grown;
        s->cap = cap;
    }
    item.place = mb_strdup(place);
    item.name = mb_strdup(name);
    if (item.place == NULL || item.name == NULL) {
        mb_free(item.place);
        mb_free(item.name);
        return no_memory(err);
    }
    s->items[s->n++] = item;
    return 0;
}

static int add_file(struct mb_sources *s, const char *path, struct mb_err *err)
{
    struct stat st;
    int rc;

    if (stat(path, &st) != 0)
        return mb_err_sys(err, errno, "--input %s", path);
    if (S_ISDIR(st.st_mode))
        return mb_err_set(err, MB_EINVAL,
                          "--input %s: is a directory; give its files, as in \"%s/*.jsonl\"", path,
                          path);
    if (S_ISSOCK(st.st_mode))
        return mb_err_set(err, MB_EINVAL, "--input %s: is a socket; give a file", path);
    if (access(path, R_OK) != 0)
        return mb_err_sys(err, errno, "--input %s", path);
    rc = add(s, MB_SOURCE_FILE, path, path, err);
    if (rc == 0 && S_ISREG(st.st_mode)) {
        s->items[s->n - 1].is_regular = 1;
        s->items[s->n - 1].size_bytes = (uint64_t)st.st_size;
    }
    return rc;
}

static int by_bytes(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static int add_glob(struct mb_sources *s, const char *pattern, struct mb_err *err)
{
    glob_t found = {0};
    int rc = glob(pattern, GLOB_NOSORT, NULL, &found);

    if (rc == GLOB_NOMATCH)
        rc = mb_err_set(err, MB_ENOENT, "--input %s: no such file, and the pattern matches none",
                        pattern);
    else if (rc == GLOB_NOSPACE)
        rc = no_memory(err);
    else if (rc != 0)
        rc = mb_err_set(err, MB_EIO, "--input %s: a directory cannot be read", pattern);
    if (rc == 0)
        qsort(found.gl_pathv, found.gl_pathc, sizeof(char *), by_bytes);
    for (size_t i = 0; rc == 0 && i < found.gl_pathc; i++)
        rc = add_file(s, found.gl_pathv[i], err);
    globfree(&found);
    return rc;
}

static int add_path(struct mb_sources *s, const char *path, struct mb_err *err)
{
    struct stat st;

    if (strpbrk(path, "*?[") != NULL && stat(path, &st) != 0 && errno == ENOENT)
        return add_glob(s, path, err);
    return add_file(s, path, err);
}

static int add_stdin(struct mb_sources *s, struct mb_err *err)
{
    for (size_t i = 0; i < s->n; i++) {
        if (s->items[i].kind == MB_SOURCE_STDIN)
            return mb_err_set(err, MB_EINVAL, "--input -: standard input can be read only once");
    }
    return add(s, MB_SOURCE_STDIN, "-", "stdin", err);
}

char *mb_source_public_name(const char *url)
{
    const char *host = strstr(url, "://") + 3;
    size_t n = strcspn(host, "/?#"); /* of the authority */
    const char *at = memrchr(host, '@', n);
    size_t rest = strcspn(host, "?#");

    if (at == NULL)
        return mb_strndup(url, (size_t)(host - url) + rest);
    return mb_asprintf("%.*s%.*s", (int)(host - url), url, (int)(host + rest - at - 1), at + 1);
}

static int add_s3(void *arg, const char *url, struct mb_err *err)
{
    struct mb_sources *s = arg;

    return add(s, MB_SOURCE_S3, url, url, err);
}

static int add_url(struct mb_sources *s, const char *url, struct mb_err *err)
{
    char *name = mb_source_public_name(url);
    int rc;

    if (name == NULL)
        return no_memory(err);
    if (mb_starts_with(url, "s3://") && strpbrk(url + 5, "*?[") != NULL) {
        rc = mb_stream_s3_glob(url, add_s3, s, err);
        if (rc != 0)
            mb_err_wrap(err, "--input %s", url);
    } else if (mb_starts_with(url, "s3://")) {
        rc = add_s3(s, url, err);
    } else if (mb_starts_with(url, "http://") || mb_starts_with(url, "https://")) {
        rc = add(s, MB_SOURCE_HTTP, url, name, err);
    } else if (mb_starts_with(url, "file:///")) {
        rc = add_path(s, url + 7, err);
    } else {
        rc = mb_err_set(err, MB_EUNSUPPORTED,
                        "--input %.200s: http://, https://, s3:// or a path is expected", name);
    }
    mb_free(name);
    return rc;
}

int mb_sources_add(struct mb_sources *s, const char *word, struct mb_err *err)
{
    if (strcmp(word, "-") == 0)
        return add_stdin(s, err);
    if (strstr(word, "://") != NULL)
        return add_url(s, word, err);
    return add_path(s, word, err);
}

static int file_identity(const struct mb_source *source, struct mb_buf *out, struct mb_err *err)
{
    struct stat st;

    if (!source->is_regular)
        return mb_err_set(err, MB_EUNSUPPORTED, "cannot be read a second time");
    if (stat(source->place, &st) != 0)
        return mb_err_sys(err, errno, "stat");
    if (mb_buf_printf(out, "size=%llu mtime=%lld.%09ld inode=%llx:%llx",
                      (unsigned long long)st.st_size, (long long)st.st_mtim.tv_sec,
                      st.st_mtim.tv_nsec, (unsigned long long)st.st_dev,
                      (unsigned long long)st.st_ino) != 0)
        return no_memory(err);
    return 0;
}

int mb_source_identity(const struct mb_source *source, struct mb_buf *out, struct mb_err *err)
{
    int rc = mb_buf_printf(out, "%s ", source->name) == 0 ? 0 : no_memory(err);

    if (rc == 0 && source->kind == MB_SOURCE_HTTP)
        rc = mb_stream_http_identity(source->place, out, err);
    else if (rc == 0 && source->kind == MB_SOURCE_S3)
        rc = mb_stream_s3_identity(source->place, out, err);
    else if (rc == 0)
        rc = file_identity(source, out, err);
    if (rc != 0) {
        mb_err_wrap(err, "--input %s", source->name);
        return rc;
    }
    return mb_buf_puts(out, "\n") == 0 ? 0 : no_memory(err);
}
