/*
 * What the bytes of an output depend on, as three hashes: the input (what mb_input_identity says of
 * each source), the options that change bytes and mobula's version, the tokenizer (its flags, and
 * path, size, inode and modification time of its files). Workers, intervals and the way things are
 * shown do not count.
 */
#include <dirent.h>
#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include "base/alloc.h"
#include "base/checksum.h"
#include "base/fs.h"
#include "worker/data/preprocess_private.h"

enum { MAX_MODEL_FILES = 4096 };

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "preprocess: out of memory");
}

/* A text of any bytes, so that two lists never read the same. */
static int add_text(struct mb_buf *out, const char *s)
{
    return s == NULL ? mb_buf_puts(out, "-\n") : mb_buf_printf(out, "%zu %s\n", strlen(s), s);
}

static int hash(struct mb_buf *text, char out[65], struct mb_err *err)
{
    int rc = mb_sha256_hex(text->data, text->len, out) == 0 ? 0 : no_memory(err);

    mb_buf_reset(text);
    return rc;
}

/* The file as it is now; the tokenizer itself complains about one that is missing. */
static int add_stat(struct mb_buf *out, const char *path)
{
    struct stat st;

    if (stat(path, &st) != 0)
        return mb_buf_printf(out, "missing %d\n", errno);
    return mb_buf_printf(out, "%zu %s %lld %llu %lld %ld\n", strlen(path), path,
                         (long long)st.st_size, (unsigned long long)st.st_ino,
                         (long long)st.st_mtim.tv_sec, st.st_mtim.tv_nsec);
}

/* A model directory: what lies directly in it, by name. */
static int add_directory(struct mb_buf *out, const char *path)
{
    struct dirent **entries = NULL;
    int n = scandir(path, &entries, NULL, alphasort);
    int rc = n < 0 ? mb_buf_printf(out, "unreadable %d\n", errno) : 0;

    for (int i = 0; i < n; i++) {
        if (rc == 0 && entries[i]->d_name[0] != '.' && i < MAX_MODEL_FILES) {
            char *file = mb_path_join(path, entries[i]->d_name);
            rc = file != NULL ? add_stat(out, file) : MB_ENOMEM;
            mb_free(file);
        }
        mb_free(entries[i]);
    }
    mb_free(entries);
    return rc;
}

static int add_path(struct mb_buf *out, const char *path)
{
    struct stat st;

    if (path == NULL)
        return mb_buf_puts(out, "-\n");
    if (stat(path, &st) == 0 && S_ISDIR(st.st_mode))
        return add_directory(out, path);
    return add_stat(out, path);
}

/* A tokenizer.json is read together with these of its directory. */
static int add_beside(struct mb_buf *out, const char *path)
{
    static const char *const names[] = {"tokenizer_config.json", "special_tokens_map.json",
                                        "config.json"};
    const char *slash = path != NULL ? strrchr(path, '/') : NULL;
    char *directory = slash == NULL ? mb_strdup(".") : mb_strndup(path, (size_t)(slash - path) + 1);
    int rc = directory != NULL ? 0 : MB_ENOMEM;

    for (size_t i = 0; rc == 0 && i < sizeof(names) / sizeof(names[0]); i++) {
        char *file = mb_path_join(directory, names[i]);
        rc = file != NULL ? add_stat(out, file) : MB_ENOMEM;
        mb_free(file);
    }
    mb_free(directory);
    return rc;
}

static int add_tokenizer(struct mb_buf *out, const struct mb_tokenizer_options *t)
{
    int rc = add_text(out, t->type);

    if (rc == 0)
        rc = add_path(out, t->vocab_file);
    if (rc == 0)
        rc = add_path(out, t->merge_file);
    if (rc == 0)
        rc = add_path(out, t->tokenizer_model);
    if (rc == 0 && t->tokenizer_model != NULL)
        rc = add_beside(out, t->tokenizer_model);
    if (rc == 0)
        rc = add_text(out, t->tiktoken_pattern);
    if (rc == 0)
        rc = mb_buf_printf(out, "%d %lld %lld %zu\n", t->leaves_out_special_tokens != 0,
                           (long long)t->vocab_size, (long long)t->tiktoken_num_special_tokens,
                           t->n_tiktoken_special_tokens);
    for (size_t i = 0; rc == 0 && i < t->n_tiktoken_special_tokens; i++)
        rc = add_text(out, t->tiktoken_special_tokens[i]);
    return rc;
}

static int add_options(struct mb_buf *out, const struct mb_preprocess_options *o,
                       const char *const *keys, size_t n_keys)
{
    int rc = mb_buf_printf(out, "%s %d %d %d %u %llu %zu\n", MOBULA_VERSION, o->append_eod != 0,
                           o->skip_bad_lines != 0, o->repair_utf8 != 0,
                           o->partitions > 0 ? o->partitions : 1,
                           (unsigned long long)o->max_line_bytes, n_keys);

    for (size_t i = 0; rc == 0 && i < n_keys; i++)
        rc = add_text(out, keys[i]);
    return rc;
}

int mb_preprocess_identity(const struct mb_preprocess_options *o, const char *const *keys,
                           size_t n_keys, struct mb_input *input, struct mb_journal_identity *out,
                           struct mb_err *err)
{
    struct mb_buf text = {0};
    int rc = mb_input_identity(input, &text, err);
    int has = rc != MB_EUNSUPPORTED;

    if (rc == 0)
        rc = hash(&text, out->input, err);
    if (rc == 0)
        rc = add_options(&text, o, keys, n_keys) == 0 ? hash(&text, out->options, err)
                                                      : no_memory(err);
    if (rc == 0)
        rc = add_tokenizer(&text, &o->tokenizer) == 0 ? hash(&text, out->tokenizer, err)
                                                      : no_memory(err);
    mb_buf_close(&text);
    if (!has) {
        mb_err_clear(err);
        return 0;
    }
    return rc != 0 ? rc : 1;
}
