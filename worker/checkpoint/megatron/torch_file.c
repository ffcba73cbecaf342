/*
 *  1. The zip's first entry says under which name all others are; data.pkl is parsed as data.
 *  2. "args" is a Namespace: what JSON can say becomes JSON. So do the optimizer's settings, of
 *     which what is not said here is missed, and named, by who needs it.
 *  3. From the root down, every tensor is taken under the keys that lead to it. It says its
 * storage, an entry of the zip, and by strides which part of it; that must lie inside.
 *  4. Reading: stretches that follow each other in the storage as they are; of short ones a window
 *     of the storage is kept, so that a column costs no read per number.
 * Failures: an entry that is missing, a byte order that is not ours, values nested too deeply or
 * within themselves, two tensors of one name, a tensor of unknown numbers or outside its storage:
 * named.
 */
#include "worker/checkpoint/megatron/torch_file.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/str.h"
#include "worker/checkpoint/megatron/pickle.h"
#include "worker/checkpoint/megatron/zip.h"

enum {
    WINDOW_BYTES = 4096,
    ARG_TEXT_MAX = 4096,
    ARG_DEPTH_MAX = 4,
    SETTING_DEPTH_MAX = 8,
    ARG_VALUES_MAX = 1 << 16, /* of all arguments: in a pickle one list may be many */
    ARG_BYTES_MAX = 4 << 20,
    EXPANDED_MAX = 64, /* times what the file has: a stride of 0 says a number again and again */
    EXPANDED_FREE_BYTES = 64 << 20,
    NAME_BYTES_MAX = 1024,
    STEM_MAX = 512,
    DEPTH_MAX = 32,
    VISITS_MAX = MB_PICKLE_VALUES_MAX,
    TENSORS_MAX = 1 << 20
};

struct mb_torch_file {
    char *name;
    struct mb_zip *zip;
    char *stem; /* "model_optim_rng" */
    char *args;
    json_t *settings;
    int64_t iteration;
    struct mb_torch_tensor *tensors;
    size_t n, cap;
    uint64_t bytes;
    /* Of window_entry's bytes those from window_at on. */
    size_t window_entry, n_window;
    uint64_t window_at;
    uint8_t window[WINDOW_BYTES];
};

static const char *const STORAGES[] = {
    [MB_ST_F32] = "torch\nFloatStorage",     [MB_ST_F16] = "torch\nHalfStorage",
    [MB_ST_BF16] = "torch\nBFloat16Storage", [MB_ST_F64] = "torch\nDoubleStorage",
    [MB_ST_I64] = "torch\nLongStorage",      [MB_ST_I32] = "torch\nIntStorage",
    [MB_ST_I16] = "torch\nShortStorage",     [MB_ST_I8] = "torch\nCharStorage",
    [MB_ST_U8] = "torch\nByteStorage",       [MB_ST_BOOL] = "torch\nBoolStorage",
};

const char *mb_torch_storage(enum mb_st_dtype dtype)
{
    return STORAGES[dtype];
}

static int no_memory(const char *name, struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "%s: out of memory", name);
}

static const struct mb_zip_entry *entry_of(const struct mb_torch_file *f, const char *what)
{
    char name[STEM_MAX + 64];
    snprintf(name, sizeof name, "%s/%s", f->stem, what);
    return mb_zip_find(f->zip, name);
}

/* ---- arguments ---- */

/* torch.bfloat16, and nothing else that is a name. */
static json_t *json_of_global(const struct mb_pickle_value *v)
{
    static const char TORCH[] = "torch\n";
    const size_t n = sizeof TORCH - 1;
    if (v->n_text <= n || memcmp(v->text, TORCH, n) != 0) {
        return NULL;
    }
    return json_sprintf("torch.%.*s", (int)(v->n_text - n), v->text + n);
}

struct spent {
    size_t n_values, n_bytes;
};

static int is_beyond(const struct spent *s)
{
    return s->n_values > ARG_VALUES_MAX || s->n_bytes > ARG_BYTES_MAX;
}

/* NULL: JSON does not say it, or it is beyond the bound. */
static json_t *json_of(const struct mb_pickle_value *v, int depth, struct spent *s)
{
    json_t *list = NULL;
    s->n_values++;
    s->n_bytes += v->kind == MB_PICKLE_TEXT || v->kind == MB_PICKLE_GLOBAL ? v->n_text : 0;
    if (is_beyond(s)) {
        return NULL;
    }
    switch (v->kind) {
    case MB_PICKLE_NONE:
        return json_null();
    case MB_PICKLE_BOOL:
        return json_boolean(v->number);
    case MB_PICKLE_INT:
        return json_integer(v->number);
    case MB_PICKLE_FLOAT:
        return isfinite(v->real) ? json_real(v->real) : NULL;
    case MB_PICKLE_TEXT:
        return v->n_text <= ARG_TEXT_MAX ? json_stringn(v->text, v->n_text) : NULL;
    case MB_PICKLE_GLOBAL:
        return json_of_global(v);
    case MB_PICKLE_LIST:
    case MB_PICKLE_TUPLE:
        list = depth < ARG_DEPTH_MAX && v->n_items <= ARG_TEXT_MAX ? json_array() : NULL;
        for (size_t i = 0; list != NULL && i < v->n_items; i++) {
            if (json_array_append_new(list, json_of(v->items[i], depth + 1, s)) != 0) {
                json_decref(list);
                list = NULL;
            }
        }
        return list;
    default:
        return NULL;
    }
}

/* A key or name that is text as we want it. */
static int is_word(const struct mb_pickle_value *v)
{
    return v->kind == MB_PICKLE_TEXT && v->n_text < NAME_BYTES_MAX &&
           memchr(v->text, 0, v->n_text) == NULL && mb_utf8_valid(v->text, v->n_text);
}

static int take_args(struct mb_torch_file *f, const struct mb_pickle_value *root,
                     struct mb_err *err)
{
    const struct mb_pickle_value *args = mb_pickle_get(root, "args");
    if (args == NULL || args->kind != MB_PICKLE_OBJECT || args->state == NULL ||
        args->state->kind != MB_PICKLE_DICT ||
        !mb_pickle_is(args->callable, MB_PICKLE_GLOBAL, "argparse\nNamespace")) {
        return 0;
    }
    const struct mb_pickle_value *dict = args->state;
    json_t *o = json_object();
    struct spent s = {0};
    for (size_t i = 0; o != NULL && i + 1 < dict->n_items && !is_beyond(&s); i += 2) {
        const struct mb_pickle_value *key = dict->items[i];
        json_t *value = is_word(key) ? json_of(dict->items[i + 1], 0, &s) : NULL;
        if (value != NULL) {
            char name[NAME_BYTES_MAX];
            memcpy(name, key->text, key->n_text);
            name[key->n_text] = '\0';
            if (json_object_set_new(o, name, value) != 0) {
                json_decref(o);
                o = NULL;
            }
        }
    }
    if (is_beyond(&s)) {
        json_decref(o);
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "%s: its arguments are more than %d values or %d bytes", f->name,
                          (int)ARG_VALUES_MAX, (int)ARG_BYTES_MAX);
    }
    f->args = o != NULL ? json_dumps(o, JSON_COMPACT) : NULL;
    json_decref(o);
    return f->args != NULL ? 0 : no_memory(f->name, err);
}

/* ---- settings ---- */

static json_t *setting_of(const struct mb_pickle_value *v, int depth, struct spent *s);

/* What cannot be said is left out of a dictionary; in a list it is null, which keeps places. */
static int add_setting(json_t *to, const struct mb_pickle_value *key,
                       const struct mb_pickle_value *v, int depth, struct spent *s)
{
    char name[NAME_BYTES_MAX];
    json_t *value = setting_of(v, depth, s);
    if (key == NULL) {
        return json_array_append_new(to, value != NULL ? value : json_null());
    }
    if (value == NULL || !(key->kind == MB_PICKLE_INT || is_word(key))) {
        json_decref(value);
        return 0;
    }
    if (key->kind == MB_PICKLE_INT) {
        snprintf(name, sizeof name, "%" PRId64, key->number);
    } else {
        memcpy(name, key->text, key->n_text);
        name[key->n_text] = '\0';
    }
    return json_object_set_new(to, name, value);
}

static json_t *setting_of(const struct mb_pickle_value *v, int depth, struct spent *s)
{
    const int is_list = v->kind == MB_PICKLE_LIST || v->kind == MB_PICKLE_TUPLE;
    const size_t step = is_list ? 1 : 2;
    if (!is_list && v->kind != MB_PICKLE_DICT) {
        return json_of(v, ARG_DEPTH_MAX, s);
    }
    s->n_values++;
    json_t *o = depth > SETTING_DEPTH_MAX ? NULL : is_list ? json_array() : json_object();
    for (size_t i = 0; o != NULL && i + step <= v->n_items && !is_beyond(s); i += step) {
        if (add_setting(o, is_list ? NULL : v->items[i], v->items[i + step - 1], depth + 1, s) !=
            0) {
            json_decref(o);
            o = NULL;
        }
    }
    return o;
}

static void take_settings(struct mb_torch_file *f, const struct mb_pickle_value *root)
{
    static const char *const WHICH[] = {"optimizer", "opt_param_scheduler"};
    struct spent s = {0};
    json_t *all = json_object();
    int bad = all == NULL;
    for (size_t i = 0; i < sizeof WHICH / sizeof WHICH[0] && !bad; i++) {
        const struct mb_pickle_value *v = mb_pickle_get(root, WHICH[i]);
        bad = v != NULL && json_object_set_new(all, WHICH[i], setting_of(v, 0, &s)) != 0;
    }
    if (!bad && root->kind == MB_PICKLE_LIST) {
        bad = json_object_set_new(all, "list", setting_of(root, 0, &s)) != 0;
    }
    if (!bad && !is_beyond(&s) && json_object_size(all) > 0) {
        f->settings = json_incref(all);
    }
    json_decref(all);
}

/* ---- one tensor ---- */

static int bad_tensor(const struct mb_torch_file *f, const struct mb_torch_tensor *t,
                      const char *what, struct mb_err *err)
{
    return mb_err_set(err, MB_EUNSUPPORTED, "%s: tensor %s %s", f->name, t->name, what);
}

static int take_sizes(const struct mb_pickle_value *v, uint64_t out[MB_ST_DIMS_MAX], int *n)
{
    if (v->kind != MB_PICKLE_TUPLE || v->n_items > MB_ST_DIMS_MAX) {
        return -1;
    }
    for (size_t i = 0; i < v->n_items; i++) {
        if (v->items[i]->kind != MB_PICKLE_INT || v->items[i]->number < 0) {
            return -1;
        }
        out[i] = (uint64_t)v->items[i]->number;
    }
    *n = (int)v->n_items;
    return 0;
}

/* What PERSISTENT says: ('storage', torch.FloatStorage, '0', 'cpu', numel). */
static int take_storage(const struct mb_torch_file *f, const struct mb_pickle_value *v,
                        struct mb_torch_tensor *t, struct mb_err *err)
{
    const struct mb_pickle_value *id = v->kind == MB_PICKLE_PERSISTENT ? v->items[0] : NULL;
    if (id == NULL || id->kind != MB_PICKLE_TUPLE || id->n_items != 5 ||
        !mb_pickle_is(id->items[0], MB_PICKLE_TEXT, "storage") ||
        id->items[2]->kind != MB_PICKLE_TEXT || id->items[2]->n_text > 32) {
        return bad_tensor(f, t, "has no storage", err);
    }
    size_t i = 0;
    while (i < sizeof STORAGES / sizeof STORAGES[0] &&
           !mb_pickle_is(id->items[1], MB_PICKLE_GLOBAL, STORAGES[i])) {
        i++;
    }
    if (i == sizeof STORAGES / sizeof STORAGES[0]) {
        return bad_tensor(f, t, "has numbers of a kind that is not read", err);
    }
    t->dtype = (enum mb_st_dtype)i;
    char what[48];
    snprintf(what, sizeof what, "data/%.*s", (int)id->items[2]->n_text, id->items[2]->text);
    const struct mb_zip_entry *e = entry_of(f, what);
    if (e == NULL) {
        return mb_err_set(err, MB_ECORRUPT, "%s: tensor %s: its bytes, %s, are missing", f->name,
                          t->name, what);
    }
    t->entry = (size_t)(e - mb_zip_entry(f->zip, 0));
    return 0;
}

/* Fills in n and run. -1: more elements than can be counted, or beyond the storage's. */
static int measure(struct mb_torch_tensor *t, uint64_t there)
{
    uint64_t last = t->from, bytes = 0;
    int is_empty = 0, is_run = 1;
    t->n = t->run = 1;
    for (int i = t->n_dims; i-- > 0;) {
        is_empty |= t->shape[i] == 0;
    }
    for (int i = t->n_dims; i-- > 0 && !is_empty;) {
        uint64_t way = 0;
        if (t->shape[i] == 1) {
            continue;
        }
        if (__builtin_mul_overflow(t->shape[i] - 1, t->strides[i], &way) ||
            __builtin_add_overflow(last, way, &last) ||
            __builtin_mul_overflow(t->n, t->shape[i], &t->n)) {
            return -1;
        }
        is_run &= t->strides[i] == t->run;
        t->run = is_run ? t->n : t->run;
    }
    if (is_empty) {
        t->n = 0;
        return 0;
    }
    return last < there && !__builtin_mul_overflow(t->n, mb_st_dtype_size(t->dtype), &bytes) ? 0
                                                                                             : -1;
}

/* args: of _rebuild_tensor_v2. */
static int take_tensor(struct mb_torch_file *f, const struct mb_pickle_value *args,
                       struct mb_torch_tensor *t, struct mb_err *err)
{
    int n_strides = 0;
    if (args->n_items < 4 || args->items[1]->kind != MB_PICKLE_INT || args->items[1]->number < 0 ||
        take_sizes(args->items[2], t->shape, &t->n_dims) != 0 ||
        take_sizes(args->items[3], t->strides, &n_strides) != 0 || n_strides != t->n_dims) {
        return bad_tensor(f, t, "is none that torch.save writes", err);
    }
    int rc = take_storage(f, args->items[0], t, err);
    if (rc != 0) {
        return rc;
    }
    t->from = (uint64_t)args->items[1]->number;
    if (measure(t, mb_zip_entry(f->zip, t->entry)->n / mb_st_dtype_size(t->dtype)) != 0 ||
        __builtin_add_overflow(f->bytes, t->n * mb_st_dtype_size(t->dtype), &f->bytes) ||
        f->bytes > INT64_MAX) {
        return mb_err_set(err, MB_ECORRUPT, "%s: tensor %s lies outside its storage", f->name,
                          t->name);
    }
    return 0;
}

/* ---- all of them ---- */

struct walk {
    struct mb_torch_file *f;
    size_t n_visits;
    char path[NAME_BYTES_MAX];
    struct mb_err *err;
};

static int walk(struct walk *w, const struct mb_pickle_value *v, size_t n_path, int depth);

static int too_much(const struct walk *w, const char *what)
{
    return mb_err_set(w->err, MB_EUNSUPPORTED, "%s: at %s: %s", w->f->name, w->path, what);
}

static int add_tensor(struct walk *w, const struct mb_pickle_value *args)
{
    struct mb_torch_file *f = w->f;
    if (f->n == TENSORS_MAX) {
        return too_much(w, "too many tensors");
    }
    if (f->n == f->cap) {
        const size_t cap = f->cap > 0 ? 2 * f->cap : 64;
        struct mb_torch_tensor *more = mb_reallocarray(f->tensors, cap, sizeof *more);
        if (more == NULL) {
            return no_memory(f->name, w->err);
        }
        f->tensors = more;
        f->cap = cap;
    }
    struct mb_torch_tensor *t = &f->tensors[f->n];
    *t = (struct mb_torch_tensor){.name = mb_strdup(w->path[0] != '\0' ? w->path : "tensor"),
                                  .place = f->n};
    if (t->name == NULL) {
        return no_memory(f->name, w->err);
    }
    f->n++;
    return take_tensor(f, args, t, w->err);
}

/* What lies under a key, which is a word, or else the place of its entry. */
static int walk_item(struct walk *w, const struct mb_pickle_value *key, size_t place,
                     const struct mb_pickle_value *v, size_t n_path, int depth)
{
    char number[24];
    const char *word = number;
    int n = 0;
    if (v->kind < MB_PICKLE_TUPLE || v->kind == MB_PICKLE_GLOBAL) {
        return 0; /* there is nothing below */
    }
    if (key != NULL && key->kind == MB_PICKLE_TEXT) {
        if (!is_word(key)) {
            return too_much(w, "a key is too long or no text");
        }
        word = key->text;
        n = (int)key->n_text;
    } else if (key != NULL && key->kind == MB_PICKLE_INT) {
        n = snprintf(number, sizeof number, "%" PRId64, key->number);
    } else {
        n = snprintf(number, sizeof number, "%zu", place);
    }
    const int k = snprintf(w->path + n_path, sizeof w->path - n_path, "%s%.*s",
                           n_path > 0 ? "." : "", n, word);
    if ((size_t)k >= sizeof w->path - n_path) {
        return too_much(w, "its name is too long");
    }
    int rc = walk(w, v, n_path + (size_t)k, depth + 1);
    w->path[n_path] = '\0';
    return rc;
}

static int walk(struct walk *w, const struct mb_pickle_value *v, size_t n_path, int depth)
{
    int rc = 0;
    if (depth > DEPTH_MAX || ++w->n_visits > VISITS_MAX) {
        return too_much(w, "values are nested too deeply, or within themselves");
    }
    const int is_object = v->kind == MB_PICKLE_OBJECT;
    if (is_object && v->args->n_items > 0 && v->args->items[0]->kind == MB_PICKLE_OBJECT &&
        mb_pickle_is(v->callable, MB_PICKLE_GLOBAL, "torch._utils\n_rebuild_parameter")) {
        return walk(w, v->args->items[0], n_path, depth + 1);
    }
    if (is_object &&
        mb_pickle_is(v->callable, MB_PICKLE_GLOBAL, "torch._utils\n_rebuild_tensor_v2")) {
        return add_tensor(w, v->args);
    }
    /* (_rebuild_tensor_v2, torch.Tensor, its arguments, attributes), which fp32 weights have. */
    if (is_object && v->args->n_items == 4 && v->args->items[2]->kind == MB_PICKLE_TUPLE &&
        mb_pickle_is(v->callable, MB_PICKLE_GLOBAL, "torch._tensor\n_rebuild_from_type_v2") &&
        mb_pickle_is(v->args->items[0], MB_PICKLE_GLOBAL, "torch._utils\n_rebuild_tensor_v2") &&
        mb_pickle_is(v->args->items[1], MB_PICKLE_GLOBAL, "torch\nTensor")) {
        return add_tensor(w, v->args->items[2]);
    }
    if (v->kind == MB_PICKLE_LIST || v->kind == MB_PICKLE_TUPLE) {
        for (size_t i = 0; i < v->n_items && rc == 0; i++) {
            rc = walk_item(w, NULL, i, v->items[i], n_path, depth);
        }
    } else if (v->kind == MB_PICKLE_DICT || is_object) {
        for (size_t i = 0; i + 1 < v->n_items && rc == 0; i += 2) {
            rc = walk_item(w, v->items[i], i / 2, v->items[i + 1], n_path, depth);
        }
        if (rc == 0 && is_object && v->state != NULL) { /* attributes */
            rc = walk(w, v->state, n_path, depth + 1);
        }
    }
    return rc;
}

static int by_name(const void *x, const void *y)
{
    const struct mb_torch_tensor *a = x, *b = y;
    return strcmp(a->name, b->name);
}

static int take_tensors(struct mb_torch_file *f, const struct mb_pickle_value *root,
                        struct mb_err *err)
{
    struct walk w = {.f = f, .err = err};
    int rc = walk(&w, root, 0, 0);
    if (rc != 0) {
        return rc;
    }
    if (f->n > 0) {
        qsort(f->tensors, f->n, sizeof *f->tensors, by_name);
    }
    for (size_t i = 1; i < f->n; i++) {
        if (strcmp(f->tensors[i - 1].name, f->tensors[i].name) == 0) {
            return bad_tensor(f, &f->tensors[i], "is there twice", err);
        }
    }
    return 0;
}

/* ---- opening ---- */

static int no_torch(const struct mb_torch_file *f, struct mb_err *err)
{
    return mb_err_set(err, MB_ECORRUPT, "%s: a zip, but none of torch.save", f->name);
}

static int take_stem(struct mb_torch_file *f, struct mb_err *err)
{
    const char *first = mb_zip_entry(f->zip, 0)->name;
    const char *slash = strchr(first, '/');
    if (slash == NULL || slash - first > STEM_MAX) {
        return no_torch(f, err);
    }
    f->stem = mb_strndup(first, (size_t)(slash - first));
    return f->stem != NULL ? 0 : no_memory(f->name, err);
}

static int check_order(const struct mb_torch_file *f, struct mb_err *err)
{
    const struct mb_zip_entry *e = entry_of(f, "byteorder");
    char order[6];
    if (e == NULL) {
        return 0; /* releases before 2.1 */
    }
    int rc = e->n == sizeof order ? mb_zip_read(f->zip, e, 0, order, sizeof order, err) : 0;
    if (rc == 0 && (e->n != sizeof order || memcmp(order, "little", sizeof order) != 0)) {
        rc = mb_err_set(err, MB_EUNSUPPORTED, "%s: its byte order is not little", f->name);
    }
    return rc;
}

/* What is to be written out is bounded by what the file has. */
static int check_expansion(const struct mb_torch_file *f, struct mb_err *err)
{
    uint64_t there = 0, most = 0;
    for (size_t i = 0; i < mb_zip_n_entries(f->zip); i++) {
        there += mb_zip_entry(f->zip, i)->n;
    }
    if (__builtin_mul_overflow(there, EXPANDED_MAX, &most) ||
        __builtin_add_overflow(most, EXPANDED_FREE_BYTES, &most) || f->bytes <= most) {
        return 0;
    }
    return mb_err_set(err, MB_EUNSUPPORTED,
                      "%s: its tensors are %" PRIu64 " bytes, its file has %" PRIu64
                      ": numbers that stand for so many others are refused",
                      f->name, f->bytes, there);
}

/* What a checkpoint says beside its tensors may be the one element of a list, as objects are that
 * torch_dist has in its chunks. */
static const struct mb_pickle_value *unwrap(const struct mb_pickle_value *root)
{
    const int is_one = root->kind == MB_PICKLE_LIST && root->n_items == 1;
    return is_one && mb_pickle_get(root->items[0], "args") != NULL ? root->items[0] : root;
}

static int take_root(struct mb_torch_file *f, const struct mb_pickle_value *root,
                     struct mb_err *err)
{
    const struct mb_pickle_value *iteration = mb_pickle_get(root, "iteration");
    if (iteration != NULL && iteration->kind == MB_PICKLE_INT && iteration->number > 0) {
        f->iteration = iteration->number;
    }
    int rc = take_args(f, root, err);
    take_settings(f, root);
    rc = rc == 0 ? take_tensors(f, root, err) : rc;
    return rc == 0 ? check_expansion(f, err) : rc;
}

static int take_pickle(struct mb_torch_file *f, struct mb_err *err)
{
    const struct mb_zip_entry *e = entry_of(f, "data.pkl");
    struct mb_pickle *pickle = NULL;
    if (e == NULL) {
        return no_torch(f, err);
    }
    if (e->n > MB_PICKLE_MAX) {
        return mb_err_set(err, MB_EUNSUPPORTED, "%s: its pickle is larger than %d bytes", f->name,
                          (int)MB_PICKLE_MAX);
    }
    int rc = mb_zip_verify(f->zip, e, err);
    if (rc != 0) {
        return rc;
    }
    uint8_t *bytes = mb_alloc((size_t)e->n);
    rc = bytes != NULL ? mb_zip_read(f->zip, e, 0, bytes, (size_t)e->n, err)
                       : no_memory(f->name, err);
    if (rc == 0) {
        rc = mb_pickle_parse(f->name, bytes, (size_t)e->n, MB_PICKLE_OF_TORCH_SAVE, &pickle, err);
    }
    if (rc == 0) {
        rc = take_root(f, unwrap(mb_pickle_root(pickle)), err);
    }
    mb_pickle_close(pickle);
    mb_free(bytes);
    return rc;
}

static int take_zip(const char *name, struct mb_zip *zip, struct mb_torch_file **out,
                    struct mb_err *err)
{
    struct mb_torch_file *f = mb_calloc(1, sizeof *f);
    if (f == NULL) {
        mb_zip_close(zip);
        return no_memory(name, err);
    }
    f->zip = zip;
    f->name = mb_strdup(name);
    int rc = f->name != NULL ? take_stem(f, err) : no_memory(name, err);
    if (rc == 0) {
        rc = check_order(f, err);
    }
    if (rc == 0) {
        rc = take_pickle(f, err);
    }
    if (rc != 0) {
        mb_torch_close(f);
        return rc;
    }
    *out = f;
    return 0;
}

int mb_torch_open(const char *path, struct mb_torch_file **out, struct mb_err *err)
{
    struct mb_zip *zip;
    int rc = mb_zip_open(path, &zip, err);
    return rc == 0 ? take_zip(path, zip, out, err) : rc;
}

int mb_torch_open_fd(const char *name, int fd, struct mb_torch_file **out, struct mb_err *err)
{
    struct mb_zip *zip;
    int rc = mb_zip_open_fd(name, fd, &zip, err);
    return rc == 0 ? take_zip(name, zip, out, err) : rc;
}

int mb_torch_open_part(const char *name, int fd, uint64_t at, uint64_t n,
                       struct mb_torch_file **out, struct mb_err *err)
{
    struct mb_zip *zip;
    int rc = mb_zip_open_part(name, fd, at, n, &zip, err);
    return rc == 0 ? take_zip(name, zip, out, err) : rc;
}

int mb_torch_rest(struct mb_torch_file *f, struct mb_err *err)
{
    return mb_zip_rest(f->zip, err);
}

void mb_torch_close(struct mb_torch_file *f)
{
    if (f == NULL) {
        return;
    }
    for (size_t i = 0; i < f->n; i++) {
        mb_free((char *)(uintptr_t)f->tensors[i].name);
    }
    mb_free(f->tensors);
    mb_zip_close(f->zip);
    mb_free(f->stem);
    mb_free(f->args);
    json_decref(f->settings);
    mb_free(f->name);
    mb_free(f);
}

const char *mb_torch_args(const struct mb_torch_file *f)
{
    return f->args;
}

const json_t *mb_torch_settings(const struct mb_torch_file *f)
{
    return f->settings;
}

int64_t mb_torch_iteration(const struct mb_torch_file *f)
{
    return f->iteration;
}

size_t mb_torch_n_tensors(const struct mb_torch_file *f)
{
    return f->n;
}

const struct mb_torch_tensor *mb_torch_tensor(const struct mb_torch_file *f, size_t i)
{
    return &f->tensors[i];
}

uint64_t mb_torch_bytes(const struct mb_torch_file *f)
{
    return f->bytes;
}

/* ---- reading ---- */

/* Where element i, in the order of the shape, lies in the storage. */
static uint64_t place_of(const struct mb_torch_tensor *t, uint64_t i)
{
    uint64_t at = t->from;
    for (int d = t->n_dims; d-- > 0;) {
        at += i % t->shape[d] * t->strides[d];
        i /= t->shape[d];
    }
    return at;
}

/* Bytes of a storage, which has them. */
static int read_bytes(struct mb_torch_file *f, size_t entry, uint64_t at, void *out, size_t n,
                      struct mb_err *err)
{
    const struct mb_zip_entry *e = mb_zip_entry(f->zip, entry);
    if (n >= WINDOW_BYTES) {
        return mb_zip_read(f->zip, e, at, out, n, err);
    }
    if (f->window_entry != entry || at < f->window_at || at - f->window_at > f->n_window ||
        f->n_window - (at - f->window_at) < n) {
        f->n_window = 0;
        const size_t k = e->n - at < WINDOW_BYTES ? (size_t)(e->n - at) : WINDOW_BYTES;
        int rc = mb_zip_read(f->zip, e, at, f->window, k, err);
        if (rc != 0) {
            return rc;
        }
        f->window_entry = entry;
        f->window_at = at;
        f->n_window = k;
    }
    memcpy(out, f->window + (at - f->window_at), n);
    return 0;
}

int mb_torch_read(struct mb_torch_file *f, const struct mb_torch_tensor *t, uint64_t from, size_t n,
                  void *out, struct mb_err *err)
{
    const size_t size = mb_st_dtype_size(t->dtype);
    uint8_t *p = out;
    while (n > 0) {
        const uint64_t left = t->run - from % t->run;
        const size_t k = n < left ? n : (size_t)left;
        int rc = read_bytes(f, t->entry, place_of(t, from) * size, p, k * size, err);
        if (rc != 0) {
            return rc;
        }
        from += k;
        p += k * size;
        n -= k;
    }
    return 0;
}

void mb_torch_place(const struct mb_torch_file *f, const struct mb_torch_tensor *t, uint64_t *at,
                    uint64_t *n, uint32_t *crc32)
{
    const struct mb_zip_entry *e = mb_zip_entry(f->zip, t->entry);
    *at = e->at;
    *n = e->n;
    *crc32 = e->crc32;
}

int mb_torch_verify(const struct mb_torch_file *f, const uint8_t *only,
                    const struct mb_torch_watch *watch, struct mb_err *err)
{
    const size_t n_entries = mb_zip_n_entries(f->zip);
    uint8_t *is_done = mb_calloc(n_entries, 1);
    int rc = is_done != NULL ? 0 : no_memory(f->name, err);
    for (size_t i = 0; i < f->n && rc == 0; i++) {
        const size_t e = f->tensors[i].entry;
        if (!is_done[e] && (only == NULL || only[i])) {
            is_done[e] = 1;
            rc = mb_zip_verify(f->zip, mb_zip_entry(f->zip, e), err);
            rc = rc == 0 && watch != NULL ? watch->cb(watch->arg, err) : rc;
        }
    }
    mb_free(is_done);
    return rc;
}
