/*
 * 1. Collect the flags that are URLs; none: done. 2. The directory: ours alone, if it is the
 * default one below /tmp. 3. agent/upload/inputs.h on a loop of this call. 4. The paths replace the
 * URLs.
 */
#include "cli/tokenizer_fetch.h"

#include <stdio.h>
#include <stdlib.h>
#include <uv.h>
#include "agent/upload/inputs.h"
#include "base/alloc.h"
#include "base/fs.h"
#include "base/str.h"
#include "cli/local.h"

struct fetch {
    struct mb_err err;
    char **paths;
    size_t n;
};

static void on_text(void *arg, const char *text)
{
    (void)arg;
    fprintf(stderr, "mobula: %s\n", text);
}

static void on_done(void *arg, const struct mb_err *err, const char *const *paths)
{
    struct fetch *f = arg;

    f->err = *err;
    for (size_t i = 0; i < f->n && f->err.code == MB_OK; i++) {
        f->paths[i] = mb_strdup(paths[i]);
        if (f->paths[i] == NULL)
            mb_err_set(&f->err, MB_ENOMEM, "out of memory");
    }
}

static char *inputs_dir(struct mb_err *err)
{
    const char *given = getenv("MOBULA_INPUT_DIR"), *temp = mb_local_temp_dir(NULL);
    char *out = NULL;
    int rc = MB_OK;

    if (given != NULL) {
        out = mb_strdup(given);
    } else {
        rc = mb_fs_mkdir_p(temp, 0755, err);
        if (rc == MB_OK && mb_local_temp_dir_is_default(NULL))
            rc = mb_local_check_owner(temp, err);
        if (rc == MB_OK)
            out = mb_path_join(temp, "inputs");
    }
    if (out == NULL && rc == MB_OK)
        mb_err_set(err, MB_ENOMEM, "out of memory");
    return out;
}

static int run(const char *dir, const struct mb_input *list, struct fetch *f, struct mb_err *err)
{
    static const struct mb_inputs_ops ops = {on_text, on_done};
    struct mb_inputs *in = NULL;
    uv_loop_t loop;
    int rc;

    if (uv_loop_init(&loop) != 0)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    rc = mb_inputs_start(&loop, dir, list, f->n, &ops, f, &in, err);
    uv_run(&loop, UV_RUN_DEFAULT);
    uv_loop_close(&loop);
    if (rc == MB_OK && f->err.code != MB_OK) {
        *err = f->err;
        rc = err->code;
    }
    return rc;
}

int mb_tokenizer_fetch(struct mb_tokenizer_flags *flags, struct mb_tokenizer_fetched *out,
                       struct mb_err *err)
{
    const char **const fields[3] = {&flags->vocab_file, &flags->merge_file,
                                    &flags->tokenizer_model};
    const enum mb_input_kind kinds[3] = {MB_INPUT_FILE, MB_INPUT_FILE, MB_INPUT_TOKENIZER};
    const char **remote[3];
    struct mb_input list[3];
    struct fetch f = {.paths = out->paths};
    char *dir;
    int rc;

    *out = (struct mb_tokenizer_fetched){0};
    for (size_t i = 0; i < 3; i++)
        if (*fields[i] != NULL && mb_starts_with(*fields[i], "s3://")) {
            list[f.n] = (struct mb_input){*fields[i], kinds[i]};
            remote[f.n++] = fields[i];
        }
    if (f.n == 0)
        return MB_OK;
    dir = inputs_dir(err);
    if (dir == NULL)
        return err->code;
    rc = run(dir, list, &f, err);
    mb_free(dir);
    if (rc != MB_OK) {
        mb_tokenizer_fetched_close(out);
        return rc;
    }
    for (size_t i = 0; i < f.n; i++)
        *remote[i] = out->paths[i];
    return MB_OK;
}

void mb_tokenizer_fetched_close(struct mb_tokenizer_fetched *f)
{
    for (size_t i = 0; i < 3; i++) {
        mb_free(f->paths[i]);
        f->paths[i] = NULL;
    }
}
