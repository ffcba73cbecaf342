/* A file of torch.save or of safetensors: its tensors listed, or written as the other one. */
#include "cli/checkpoint_file.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <sys/stat.h>
#include "base/buf.h"
#include "base/printable.h"
#include "base/str.h"
#include "cli/checkpoint.h"
#include "worker/checkpoint/megatron/torch_convert.h"

/* One of the two. */
struct tensors {
    struct mb_torch_file *torch;
    struct mb_st_reader *safetensors;
    size_t n;
    uint64_t n_values, n_bytes;
};

struct view {
    const char *name, *dtype;
    int n_dims;
    const uint64_t *shape;
};

static int is_safetensors(const char *path)
{
    return mb_ends_with(path, ".safetensors");
}

int mb_is_file(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISREG(st.st_mode);
}

static struct view view_of(const struct tensors *f, size_t i)
{
    if (f->torch) {
        const struct mb_torch_tensor *t = mb_torch_tensor(f->torch, i);
        return (struct view){t->name, mb_st_dtype_name(t->dtype), t->n_dims, t->shape};
    }
    const struct mb_st_tensor *t = mb_st_tensor(f->safetensors, i);
    return (struct view){t->name, mb_st_dtype_name(t->dtype), t->n_dims, t->shape};
}

static int open_tensors(const char *path, struct tensors *f, struct mb_err *err)
{
    *f = (struct tensors){0};
    int rc = is_safetensors(path) ? mb_st_open(path, &f->safetensors, err)
                                  : mb_torch_open(path, &f->torch, err);
    if (rc != 0)
        return rc;
    if (f->torch) {
        f->n = mb_torch_n_tensors(f->torch);
        f->n_bytes = mb_torch_bytes(f->torch);
        for (size_t i = 0; i < f->n; i++)
            f->n_values += mb_torch_tensor(f->torch, i)->n;
    } else {
        f->n = mb_st_n_tensors(f->safetensors);
        for (size_t i = 0; i < f->n; i++) {
            const struct mb_st_tensor *t = mb_st_tensor(f->safetensors, i);
            f->n_bytes += t->end - t->begin;
            f->n_values += (t->end - t->begin) / mb_st_dtype_size(t->dtype);
        }
    }
    return 0;
}

static void close_tensors(struct tensors *f)
{
    mb_torch_close(f->torch);
    mb_st_close(f->safetensors);
}

static int64_t iteration_of(const struct tensors *f)
{
    return f->torch ? mb_torch_iteration(f->torch) : 0;
}

static json_t *json_tensor(const struct view *t)
{
    json_t *shape = json_array();
    for (int i = 0; i < t->n_dims; i++)
        json_array_append_new(shape, json_integer((json_int_t)t->shape[i]));
    return json_pack("{s:s, s:s, s:o}", "name", t->name, "dtype", t->dtype, "shape", shape);
}

/* What both verbs tell; inspect adds to it. */
static json_t *json_facts(const char *event, const char *path, const struct tensors *f)
{
    json_t *j = json_pack("{s:s, s:s, s:s, s:I, s:I, s:I}", "event", event, "file", path, "kind",
                          f->torch ? "torch" : "safetensors", "tensors", (json_int_t)f->n, "values",
                          (json_int_t)f->n_values, "bytes", (json_int_t)f->n_bytes);
    if (iteration_of(f) > 0)
        json_object_set_new(j, "iteration", json_integer(iteration_of(f)));
    return j;
}

static int print_json(const char *path, const struct tensors *f, struct mb_err *err)
{
    json_t *j = json_facts("tensors", path, f), *list = json_array();
    int bad = 0;
    for (size_t i = 0; i < f->n && !bad; i++) {
        const struct view t = view_of(f, i);
        bad = json_array_append_new(list, json_tensor(&t));
    }
    bad |= json_object_set_new(j, "list", list);
    if (f->torch && mb_torch_args(f->torch))
        bad |= json_object_set_new(j, "args", json_loads(mb_torch_args(f->torch), 0, NULL));
    if (bad) {
        json_decref(j);
        j = NULL;
    }
    return mb_checkpoint_print_json(j, JSON_COMPACT, err);
}

static void print_facts(const char *path, const struct tensors *f)
{
    char size[16];
    printf("%s: file of %s", path, f->torch ? "torch.save" : "safetensors");
    if (iteration_of(f) > 0)
        printf(", iteration %" PRId64, iteration_of(f));
    printf(", %zu tensor%s, %" PRIu64 " values, %s\n", f->n, f->n == 1 ? "" : "s", f->n_values,
           mb_human_bytes(f->n_bytes, size));
}

static int print_tensor(const struct view *t, struct mb_err *err)
{
    struct mb_buf name = {0};
    int rc = mb_printable(t->name, &name);
    if (rc == 0) {
        printf("%s %s [", mb_buf_str(&name), t->dtype);
        for (int i = 0; i < t->n_dims; i++)
            printf("%s%" PRIu64, i > 0 ? ", " : "", t->shape[i]);
        printf("]\n");
    } else {
        rc = mb_err_set(err, rc, "out of memory printing a name");
    }
    mb_buf_close(&name);
    return rc;
}

/* What has a checksum is what was written. */
static int check_bytes(const struct tensors *f, struct mb_err *err)
{
    return f->torch ? mb_torch_verify(f->torch, NULL, NULL, err)
                    : mb_st_verify(f->safetensors, err);
}

int mb_tensors_inspect(const char *path, int json, int checks_bytes, struct mb_err *err)
{
    struct tensors f;
    int rc = open_tensors(path, &f, err);
    if (rc != 0)
        return rc;
    if (checks_bytes)
        rc = check_bytes(&f, err);
    if (rc == 0 && json) {
        rc = print_json(path, &f, err);
    } else if (rc == 0) {
        print_facts(path, &f);
        for (size_t i = 0; i < f.n && rc == 0; i++) {
            const struct view t = view_of(&f, i);
            rc = print_tensor(&t, err);
        }
    }
    close_tensors(&f);
    return rc;
}

int mb_tensors_convert(const char *path, const char *target, int json, struct mb_err *err)
{
    struct tensors f;
    if (is_safetensors(path) == is_safetensors(target))
        return mb_err_set(err, MB_EINVAL,
                          "%s: one of the two files ends in .safetensors, the other is torch's",
                          target);
    int rc = open_tensors(path, &f, err);
    if (rc != 0)
        return rc;
    rc = f.torch ? mb_torch_to_safetensors(f.torch, target, err)
                 : mb_torch_from_safetensors(f.safetensors, target, err);
    if (rc == 0 && json)
        rc = mb_checkpoint_print_json(json_facts("converted", path, &f), JSON_COMPACT, err);
    if (rc == 0 && !json) {
        print_facts(path, &f);
        printf("%s has them as a file of %s now\n", target, f.torch ? "safetensors" : "torch.save");
    }
    close_tensors(&f);
    return rc;
}
