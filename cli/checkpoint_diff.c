/* mobula checkpoint diff DIR URL: is this iteration that one? By names, sizes and checksums of the
 * manifest; nothing is fetched but the manifest. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include "base/printable.h"
#include "agent/upload/manifest.h"
#include "agent/upload/push_hash.h"
#include "agent/upload/push_source.h"
#include "base/alloc.h"
#include "base/fs.h"
#include "cli/checkpoint.h"

enum { TIMEOUT_MS = 60000 };

struct diff_args {
    int json;
    int64_t iteration;
    uint64_t retry_for_ms;
};

static const struct mb_option diff_options[] = {
    {"iteration", 0, "N", MB_OPTION_INT, offsetof(struct diff_args, iteration),
     "that one instead of the one the tracker file names", 0, INT64_MAX},
    {"retry-for", 0, "TIME", MB_OPTION_DURATION, offsetof(struct diff_args, retry_for_ms),
     "how long a store that does not answer is asked again; default 10s", 0, 0},
    {"json", 0, NULL, MB_OPTION_FLAG, offsetof(struct diff_args, json),
     "print JSON lines, errors too", 0, 0},
    {0},
};

struct run {
    struct mb_checkpoint_loop l;
    struct mb_store *store;
    struct mb_push_source source;
    struct mb_manifest there;
    struct mb_err err;
    size_t n_different;
    int json;
    int is_closing; /* the store, by a signal */
};

static void on_manifest(void *arg, const struct mb_store_result *r)
{
    struct run *run = arg;

    if (r->error == MB_ENOENT)
        mb_err_set(&run->err, MB_ENOENT, "iteration %" PRId64 " is not there, or is not whole",
                   run->source.iteration);
    else if (r->error == MB_ECANCELED)
        mb_err_set(&run->err, r->error, "interrupted");
    else if (r->error != 0)
        mb_err_set(&run->err, r->error, "%s", r->text);
    else
        mb_manifest_decode(r->data, r->data_len, "its manifest", &run->there, &run->err);
    mb_checkpoint_loop_stop(&run->l);
    if (!run->is_closing)
        mb_store_close(run->store, NULL, NULL);
}

static void on_cancel(void *arg)
{
    struct run *run = arg;

    run->is_closing = 1;
    mb_store_close(run->store, NULL, NULL);
}

static void no_facts(void *arg, struct mb_transfer_facts *out)
{
    (void)arg;
    out->verb = "diff";
    out->phase = "comparing";
}

static void get_manifest(struct run *r, const char *url, uint64_t retry_for_ms)
{
    char key[MB_CHECKPOINT_KEY_MAX];

    if (mb_checkpoint_loop_init(&r->l, 0, &r->err) != 0)
        return;
    r->l.view.is_terminal = 0;
    if (mb_store_open(&r->l.loop, url, &r->store, &r->err) == 0)
        mb_store_set_outage(r->store, retry_for_ms);
    if (r->store && mb_store_get(r->store, mb_manifest_key(r->source.iteration, key),
                                 MB_MANIFEST_MAX_BYTES, TIMEOUT_MS, on_manifest, r, &r->err) != 0)
        mb_store_close(r->store, NULL, NULL);
    mb_checkpoint_loop_run(&r->l, r->err.code == 0 ? no_facts : NULL, on_cancel, r);
}

static void tell(struct run *r, const char *what, const char *path)
{
    struct mb_buf name = {0};

    r->n_different++;
    mb_printable(path, &name);
    if (r->json) {
        struct mb_buf quoted = {0};

        for (const char *p = mb_buf_str(&name); *p; p++)
            mb_buf_printf(&quoted, *p == '"' || *p == '\\' ? "\\%c" : "%c", *p);
        printf("{\"event\": \"%s\", \"path\": \"%s\"}\n", what, mb_buf_str(&quoted));
        mb_buf_close(&quoted);
    } else {
        printf("%s: %s\n", what, mb_buf_str(&name));
    }
    mb_buf_close(&name);
}

/* Both lists are sorted by path. */
static void compare(struct run *r)
{
    size_t i = 0, k = 0;

    while (r->err.code == 0 && (i < r->source.n_files || k < r->there.n_files)) {
        const struct mb_push_file *here = &r->source.files[i];
        const struct mb_manifest_file *there = &r->there.files[k];
        int c = i == r->source.n_files  ? 1
                : k == r->there.n_files ? -1
                                        : strcmp(here->path, there->path);
        uint64_t crc = 0;

        if (c < 0) {
            tell(r, "only in the directory", here->path);
        } else if (c > 0) {
            tell(r, "only in the store", there->path);
        } else if (here->size_bytes != there->size_bytes) {
            tell(r, "size differs", here->path);
        } else {
            char *path = mb_path_join(r->source.root, here->path);

            if (!path)
                mb_err_set(&r->err, MB_ENOMEM, "out of memory");
            else if (mb_file_crc64nvme(path, here->size_bytes, NULL, &crc, &r->err) == 0 &&
                     crc != there->crc64nvme)
                tell(r, "contents differ", here->path);
            mb_free(path);
        }
        i += c <= 0;
        k += c >= 0;
    }
}

static int diff_run(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv)
{
    struct diff_args args = {.iteration = -1, .retry_for_ms = MB_CHECKPOINT_ASK_FOR_MS};
    struct run r = {0};
    int n_words = 0, rc = mb_options_parse(cli, verb, argc, argv, 0, &args, &n_words, &r.err);

    if (rc == 1)
        return 0;
    r.json = args.json;
    if (args.retry_for_ms == 0) /* as push has it */
        args.retry_for_ms = MB_CHECKPOINT_ASK_FOR_MS;
    if (!rc && n_words != 2)
        rc = mb_err_set(&r.err, MB_EINVAL, "what with what? mobula checkpoint diff DIR URL");
    if (!rc)
        rc = mb_push_source_read(argv[1], args.iteration, 0, &r.source, &r.err);
    if (!rc && r.source.iteration < 0)
        rc = mb_err_set(&r.err, MB_EINVAL, "%s has no " MB_LATEST_KEY ": which --iteration N?",
                        argv[1]);
    if (!rc)
        get_manifest(&r, argv[2], args.retry_for_ms);
    if (!r.err.code)
        compare(&r);
    if (!r.err.code && !args.json && r.n_different == 0)
        printf("iteration %" PRId64 " is the same in both, %zu files\n", r.source.iteration,
               r.there.n_files);
    if (!r.err.code && args.json)
        printf("{\"event\": \"done\", \"iteration\": %" PRId64 ", \"different\": %zu}\n",
               r.source.iteration, r.n_different);
    mb_push_source_close(&r.source);
    mb_manifest_close(&r.there);
    if (r.err.code)
        return mb_checkpoint_fail(cli, args.json, &r.err);
    return r.n_different > 0;
}

const struct mb_verb mb_verb_checkpoint_diff = {
    .name = "diff",
    .summary = "compare an iteration on disk with the one in a store; exit 1 if they differ",
    .synopsis = "[--iteration N] [--retry-for TIME] [--json] DIR URL",
    .examples = "  mobula checkpoint diff /ckpt/run1 s3://bucket/run1\n",
    .options = diff_options,
    .run = diff_run,
};
