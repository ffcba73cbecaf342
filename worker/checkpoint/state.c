/*
 * state.json, the names of files, and the agreement of ranks.
 *
 *  1. encode: a seal (sums.h), version, counters, the layout of the flat buffer (for people and
 *     tools), arguments.
 *  2. decode: the seal, if there is one, then version; every counter must be there and sane.
 *  3. agree: the highest rank that failed is all-reduced, so that all leave together.
 * Failures: a state.json that is not what was written, of another version or with a missing field
 * is MB_ECORRUPT naming the file.
 */
#include "worker/checkpoint/common.h"

#include <float.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "worker/checkpoint/sums.h"

#define REFUSED      "optimizer_refused"
#define REFUSED_CODE "optimizer_refused_code"

void mb_checkpoint_iter_name(int64_t iteration, char out[32])
{
    if (iteration == MB_CHECKPOINT_RELEASE) {
        snprintf(out, 32, "release");
        return;
    }
    snprintf(out, 32, "iter_%07" PRId64, iteration);
}

void mb_checkpoint_optim_name(uint32_t rank, uint32_t world_size, char out[48])
{
    snprintf(out, 48, "optim_dp_%03u_of_%03u.safetensors", rank, world_size);
}

void mb_checkpoint_state_close(struct mb_checkpoint_state *s)
{
    mb_free(s->args_json);
    memset(s, 0, sizeof *s);
}

void mb_checkpoint_saved_close(struct mb_checkpoint_saved *s)
{
    mb_free(s->dir);
    for (size_t i = 0; i < s->n_files; i++) {
        mb_free(s->files[i].path);
    }
    mb_free(s->files);
    memset(s, 0, sizeof *s);
}

int mb_checkpoint_note_file(struct mb_checkpoint_saved *saved, const char *path,
                            uint64_t size_bytes, uint64_t crc64nvme, struct mb_err *err)
{
    const size_t n = saved->n_files;
    struct mb_checkpoint_file *files = mb_realloc(saved->files, (n + 1) * sizeof *files);
    char *copy = mb_strdup(path);
    saved->files = files != NULL ? files : saved->files;
    if (files == NULL || copy == NULL) {
        mb_free(copy);
        return mb_err_set(err, MB_ENOMEM, "checkpoint: out of memory");
    }
    files[n] = (struct mb_checkpoint_file){copy, size_bytes, crc64nvme};
    saved->n_files = n + 1;
    return 0;
}

int mb_checkpoint_agree(struct mb_comm *comm, int rc, const char *what, struct mb_err *err)
{
    int64_t failed = rc == 0 ? 0 : (int64_t)mb_comm_rank(comm) + 1;
    struct mb_err comm_err;
    mb_comm_allreduce(comm, NULL, &failed, 1, MB_COMM_I64, MB_COMM_MAX);
    int comm_rc = mb_comm_synchronize(comm, &comm_err);
    if (rc != 0) {
        return rc; /* our own text says more than what the others see */
    }
    if (comm_rc != 0) {
        mb_err_set(err, comm_rc, "%s", comm_err.text);
        return mb_err_wrap(err, "%s", what);
    }
    if (failed != 0) {
        return mb_err_set(err, MB_EUNAVAIL, "%s: rank %d failed", what, (int)(failed - 1));
    }
    return 0;
}

int mb_checkpoint_share_times(struct mb_comm *comm, const struct mb_checkpoint_saved *saved,
                              struct mb_checkpoint_times *t, struct mb_err *err)
{
    int64_t bytes = 0, longest[2] = {(int64_t)t->own_stall_us, (int64_t)t->write_us};
    for (size_t i = 0; i < saved->n_files; i++) {
        bytes += (int64_t)saved->files[i].size_bytes;
    }
    mb_comm_allreduce(comm, NULL, &bytes, 1, MB_COMM_I64, MB_COMM_SUM);
    mb_comm_allreduce(comm, NULL, longest, 2, MB_COMM_I64, MB_COMM_MAX);
    int rc = mb_comm_synchronize(comm, err);
    t->total_bytes = (uint64_t)bytes;
    t->stall_us = (uint64_t)longest[0];
    t->write_us = (uint64_t)longest[1];
    return rc;
}

#define SEAL "crc64nvme"

static const struct {
    const char *name;
    size_t offset;
} COUNTERS[] = {
    {"iteration", offsetof(struct mb_checkpoint_state, iteration)},
    {"consumed_train_samples", offsetof(struct mb_checkpoint_state, consumed_train_samples)},
    {"consumed_valid_samples", offsetof(struct mb_checkpoint_state, consumed_valid_samples)},
    {"optimizer_steps", offsetof(struct mb_checkpoint_state, optimizer_steps)},
    {"skipped_iterations", offsetof(struct mb_checkpoint_state, skipped_iterations)},
    {"schedule_samples", offsetof(struct mb_checkpoint_state, schedule_samples)},
    {"warmup_samples", offsetof(struct mb_checkpoint_state, warmup_samples)},
    {"decay_samples", offsetof(struct mb_checkpoint_state, decay_samples)},
};

enum { N_COUNTERS = sizeof COUNTERS / sizeof COUNTERS[0] };

static json_t *layout_json(const struct mb_checkpoint_model *m)
{
    json_t *list = json_array();
    for (size_t i = 0; i < m->n_tensors; i++) {
        const struct mb_checkpoint_tensor *t = &m->tensors[i];
        json_array_append_new(list, json_pack("{s:s, s:I, s:I}", "name", t->name, "offset",
                                              (json_int_t)t->offset, "elements", (json_int_t)t->n));
    }
    return list;
}

/* Megatron-LM's names. */
static json_t *scaler_json(const struct mb_checkpoint_state *s)
{
    return json_pack("{s:f, s:I, s:I}", "scale", s->loss_scale, "growth_tracker",
                     (json_int_t)s->growth_tracker, "hysteresis_tracker",
                     (json_int_t)s->hysteresis_tracker);
}

/* It names files, and names may be any bytes. */
static json_t *json_of_text(const char *text)
{
    struct mb_buf valid = {0};
    json_t *j =
        mb_buf_utf8(&valid, text, strlen(text)) == 0 ? json_string(mb_buf_str(&valid)) : NULL;
    mb_buf_close(&valid);
    return j;
}

int mb_checkpoint_state_encode(const struct mb_checkpoint_model *m,
                               const struct mb_checkpoint_state *s, struct mb_buf *out,
                               struct mb_err *err)
{
    json_error_t je;
    json_t *root = json_object();
    json_t *args = json_loads(s->args_json != NULL ? s->args_json : "{}", 0, &je);
    int bad = root == NULL || args == NULL;
    bad |= json_object_set_new(root, SEAL, json_string(MB_SUMS_NONE));
    bad |= json_object_set_new(root, "version", json_integer(MB_CHECKPOINT_VERSION));
    for (size_t i = 0; i < N_COUNTERS; i++) {
        int64_t v;
        memcpy(&v, (const char *)s + COUNTERS[i].offset, sizeof v);
        bad |= json_object_set_new(root, COUNTERS[i].name, json_integer(v));
    }
    if (s->has_grad_scaler) {
        bad |= json_object_set_new(root, "grad_scaler", scaler_json(s));
    }
    bad |= json_object_set_new(root, "has_optimizer",
                               json_boolean(m->exp_avg != NULL || s->has_optimizer));
    if (s->is_megatrons) { /* on its way from rank 0, never on disk */
        bad |= json_object_set_new(root, "of_megatron", json_true());
    }
    if (s->optimizer_refused.code != 0) {
        bad |= json_object_set_new(root, REFUSED, json_of_text(s->optimizer_refused.text));
        bad |= json_object_set_new(root, REFUSED_CODE, json_integer(s->optimizer_refused.code));
    }
    bad |= json_object_set_new(root, "tensor_parallel_size", json_integer(1));
    bad |= json_object_set_new(root, "pipeline_parallel_size", json_integer(1));
    bad |= json_object_set_new(root, "data_parallel_size",
                               json_integer(m->comm != NULL ? mb_comm_world_size(m->comm) : 1));
    bad |= json_object_set_new(root, "flat_elements", json_integer((json_int_t)m->n_elements));
    bad |= json_object_set_new(root, "layout", layout_json(m));
    bad |= json_object_set_new(root, "args", args);
    char *text = bad ? NULL : json_dumps(root, JSON_INDENT(1));
    json_decref(root);
    const size_t before = out->len;
    int rc = 0;
    if (text == NULL || mb_buf_puts(out, text) != 0 || mb_buf_puts(out, "\n") != 0) {
        rc = mb_err_set(err, MB_ENOMEM, "out of memory for %s", MB_CHECKPOINT_STATE_FILE);
    } else {
        mb_seal_set((char *)out->data + before, out->len - before, SEAL);
    }
    mb_free(text);
    return rc;
}

static int bad_state(struct mb_err *err, const char *name, const char *what)
{
    return mb_err_set(err, MB_ECORRUPT, "%s: %s", name, what);
}

static int take_scaler(const char *name, const json_t *root, struct mb_checkpoint_state *out,
                       struct mb_err *err)
{
    const json_t *scaler = json_object_get(root, "grad_scaler");
    if (scaler == NULL) {
        return 0;
    }
    const json_t *growth = json_object_get(scaler, "growth_tracker");
    const json_t *hysteresis = json_object_get(scaler, "hysteresis_tracker");
    const double scale = json_number_value(json_object_get(scaler, "scale"));
    if (!(scale > 0 && scale <= (double)FLT_MAX) || !json_is_integer(growth) ||
        json_integer_value(growth) < 0 || !json_is_integer(hysteresis)) {
        return bad_state(err, name,
                         "field \"grad_scaler\": expected a positive \"scale\" and the numbers "
                         "\"growth_tracker\" and \"hysteresis_tracker\"");
    }
    out->has_grad_scaler = 1;
    out->loss_scale = scale;
    out->growth_tracker = json_integer_value(growth);
    out->hysteresis_tracker = json_integer_value(hysteresis);
    return 0;
}

static int take_state(const char *name, const json_t *root, struct mb_checkpoint_state *out,
                      struct mb_err *err)
{
    const json_t *version = json_object_get(root, "version");
    if (!json_is_integer(version)) {
        return bad_state(err, name, "is no state of a checkpoint (no \"version\")");
    }
    if (json_integer_value(version) != MB_CHECKPOINT_VERSION) {
        return mb_err_set(err, MB_EUNSUPPORTED, "%s: version %lld, this program reads %d", name,
                          (long long)json_integer_value(version), (int)MB_CHECKPOINT_VERSION);
    }
    for (size_t i = 0; i < N_COUNTERS; i++) {
        const json_t *j = json_object_get(root, COUNTERS[i].name);
        int64_t v = json_integer_value(j);
        if (!json_is_integer(j) || v < 0) {
            return mb_err_set(err, MB_ECORRUPT, "%s: field \"%s\": expected a number from 0 on",
                              name, COUNTERS[i].name);
        }
        memcpy((char *)out + COUNTERS[i].offset, &v, sizeof v);
    }
    int rc = take_scaler(name, root, out, err);
    if (rc != 0) {
        return rc;
    }
    const json_t *optimizer = json_object_get(root, "has_optimizer");
    const json_t *args = json_object_get(root, "args");
    if (!json_is_boolean(optimizer) || !json_is_object(args)) {
        return bad_state(err, name, "field \"has_optimizer\" or \"args\" is missing");
    }
    out->has_optimizer = json_is_true(optimizer);
    out->has_sum = json_object_get(root, SEAL) != NULL;
    out->is_megatrons = json_is_true(json_object_get(root, "of_megatron"));
    const char *refused = json_string_value(json_object_get(root, REFUSED));
    if (refused != NULL) {
        const json_int_t code = json_integer_value(json_object_get(root, REFUSED_CODE));
        if (code > MB_EINVAL || code < MB_EUNSUPPORTED) {
            return bad_state(err, name, "field \"" REFUSED_CODE "\" is the number of no error");
        }
        mb_err_set(&out->optimizer_refused, (int)code, "%s", refused);
    }
    out->data_parallel_size = json_integer_value(json_object_get(root, "data_parallel_size"));
    out->args_json = json_dumps(args, JSON_COMPACT);
    return out->args_json != NULL ? 0 : mb_err_set(err, MB_ENOMEM, "%s: out of memory", name);
}

int mb_checkpoint_state_decode(const char *name, const void *text, size_t n,
                               struct mb_checkpoint_state *out, struct mb_err *err)
{
    json_error_t je;
    json_t *root = json_loadb(text, n, JSON_REJECT_DUPLICATES, &je);
    memset(out, 0, sizeof *out);
    int rc;
    if (!json_is_object(root)) {
        rc = mb_err_set(err, MB_ECORRUPT, "%s:%d: not valid JSON: %s", name, je.line, je.text);
    } else if (mb_seal_check(text, n, SEAL) == MB_SEAL_BROKEN) {
        rc = bad_state(err, name,
                       "field \"" SEAL "\" is not the checksum of its text: damaged (whoever "
                       "edited it on purpose takes that field out)");
    } else {
        rc = take_state(name, root, out, err);
    }
    json_decref(root);
    if (rc != 0) {
        mb_checkpoint_state_close(out);
    }
    return rc;
}
