/*
 * The codec of worker/report.h.
 *
 * Happy path
 *  1. encode: the type's row in TYPES says which fields the message carries; they become one JSON
 *     object, preceded by its length.
 *  2. decode: wait for the length and for that many bytes, parse, take the row's fields, consume.
 * Failures
 *  3. A length of 0 or above MB_REPORT_FRAME_MAX, bytes that are no JSON object, an unknown "t", a
 *     missing field or one of the wrong kind: MB_EPROTO, and nothing is consumed.
 *  4. A file path that could leave the iteration's directory: MB_EPROTO, because the agent opens
 * it. Fields that the row does not name are passed over, so that newer peers may add some. JSON has
 * no NaN: a number that is not finite travels as null and arrives as NaN. A checksum has 64 bits
 * and JSON integers 63: it travels as 16 hex digits.
 */
#include "worker/report.h"

#include <jansson.h>
#include <math.h>
#include <string.h>
#include "base/alloc.h"
#include "base/str.h"

enum field {
    F_ABI = 1 << 0,
    F_RANK = 1 << 1,
    F_PID = 1 << 2,
    F_ITERATION = 1 << 3,
    F_PROGRESS = 1 << 4,
    F_TEXT = 1 << 5,
    F_FILES = 1 << 6,
    F_ENDPOINTS = 1 << 7,
    F_SAVE_TIMES = 1 << 8
};

static const struct {
    const char *name;
    unsigned fields;
} TYPES[] = {
    [MB_REPORT_HELLO] = {"hello", F_ABI | F_RANK | F_PID},
    [MB_REPORT_ENDPOINT] = {"endpoint", F_RANK | F_TEXT},
    [MB_REPORT_PROGRESS] = {"progress", F_RANK | F_ITERATION | F_PROGRESS},
    [MB_REPORT_SAVED] = {"saved", F_RANK | F_ITERATION | F_TEXT | F_FILES | F_SAVE_TIMES},
    [MB_REPORT_DONE] = {"done", F_RANK | F_ITERATION},
    [MB_REPORT_FAILED] = {"failed", F_RANK | F_TEXT},
    [MB_REPORT_START] = {"start", F_ENDPOINTS},
    [MB_REPORT_SAVE_NOW] = {"save_now", F_TEXT},
    [MB_REPORT_STOP] = {"stop", F_TEXT},
    [MB_REPORT_DURABLE] = {"durable", F_ITERATION},
};

enum { N_TYPES = sizeof TYPES / sizeof TYPES[0] };

/* The numbers of a progress message, by name and place. */
static const struct {
    const char *name;
    size_t offset;
} INTS[] = {
    {"train_iters", offsetof(struct mb_report, train_iters)},
    {"consumed_samples", offsetof(struct mb_report, consumed_samples)},
};
static const struct {
    const char *name;
    size_t offset;
} REALS[] = {
    {"loss", offsetof(struct mb_report, loss)},
    {"learning_rate", offsetof(struct mb_report, learning_rate)},
    {"grad_norm", offsetof(struct mb_report, grad_norm)},
    {"tokens_per_s", offsetof(struct mb_report, tokens_per_s)},
    {"validation_loss", offsetof(struct mb_report, validation_loss)},
};

/* ---- encode ---- */

/* Error texts may quote bytes of any file: what is not UTF-8 becomes '?'. */
static json_t *text_json(const char *s)
{
    if (s == NULL) {
        s = "";
    }
    json_t *j = json_string(s);
    if (j != NULL) {
        return j;
    }
    char *copy = mb_strdup(s);
    if (copy == NULL) {
        return NULL;
    }
    for (char *p = copy; *p != '\0'; p++) {
        if ((unsigned char)*p >= 0x80) {
            *p = '?';
        }
    }
    j = json_string(copy);
    mb_free(copy);
    return j;
}

static json_t *real_json(double v)
{
    return isfinite(v) ? json_real(v) : json_null();
}

static int files_json(json_t *obj, const struct mb_report *r, struct mb_err *err)
{
    json_t *list = json_array();
    for (size_t i = 0; i < r->n_files; i++) {
        const struct mb_report_file *f = &r->files[i];
        if (!mb_utf8_valid(f->path, strlen(f->path)) || f->size_bytes > INT64_MAX) {
            json_decref(list);
            return mb_err_set(err, MB_EINVAL,
                              "report: file %zu has a path or size outside the protocol", i);
        }
        char crc[17];
        uint8_t be[8];
        for (int k = 0; k < 8; k++) {
            be[k] = (uint8_t)(f->crc64nvme >> (56 - 8 * k));
        }
        json_t *o = json_pack("{s:s, s:I, s:s}", "path", f->path, "size", (json_int_t)f->size_bytes,
                              "crc64nvme", mb_hex(be, sizeof be, crc));
        if (json_array_append_new(list, o) != 0) {
            json_decref(list);
            return mb_err_set(err, MB_ENOMEM, "report: out of memory");
        }
    }
    if (json_object_set_new(obj, "files", list) != 0) {
        return mb_err_set(err, MB_ENOMEM, "report: out of memory");
    }
    return 0;
}

static int endpoints_json(json_t *obj, const struct mb_report *r)
{
    json_t *list = json_array();
    for (size_t i = 0; i < r->n_endpoints; i++) {
        if (json_array_append_new(list, json_string(r->endpoints[i])) != 0) {
            json_decref(list);
            return -1;
        }
    }
    return json_object_set_new(obj, "endpoints", list);
}

static int progress_json(json_t *obj, const struct mb_report *r)
{
    int bad = 0;
    for (size_t i = 0; i < sizeof INTS / sizeof INTS[0]; i++) {
        int64_t v;
        memcpy(&v, (const char *)r + INTS[i].offset, sizeof v);
        bad |= json_object_set_new(obj, INTS[i].name, json_integer(v));
    }
    for (size_t i = 0; i < sizeof REALS / sizeof REALS[0]; i++) {
        double v;
        memcpy(&v, (const char *)r + REALS[i].offset, sizeof v);
        bad |= json_object_set_new(obj, REALS[i].name, real_json(v));
    }
    return bad;
}

static int build(json_t *obj, const struct mb_report *r, struct mb_err *err)
{
    unsigned f = TYPES[r->type].fields;
    int bad = json_object_set_new(obj, "t", json_string(TYPES[r->type].name));
    if (f & F_ABI) {
        bad |= json_object_set_new(obj, "abi", json_integer(r->abi));
    }
    if (f & F_RANK) {
        bad |= json_object_set_new(obj, "rank", json_integer(r->rank));
    }
    if (f & F_PID) {
        bad |= json_object_set_new(obj, "pid", json_integer(r->pid));
    }
    if (f & F_ITERATION) {
        bad |= json_object_set_new(obj, "iteration", json_integer(r->iteration));
    }
    if (f & F_PROGRESS) {
        bad |= progress_json(obj, r);
    }
    if ((f & F_SAVE_TIMES) && r->has_times) {
        bad |= json_object_set_new(obj, "stall_ms", json_integer(r->stall_ms));
        bad |= json_object_set_new(obj, "write_ms", json_integer(r->write_ms));
    }
    if (f & F_TEXT) {
        bad |= json_object_set_new(obj, "text", text_json(r->text));
    }
    if (f & F_ENDPOINTS) {
        bad |= endpoints_json(obj, r);
    }
    if (bad != 0) {
        return mb_err_set(err, MB_ENOMEM, "report: cannot build a %s message", TYPES[r->type].name);
    }
    return (f & F_FILES) ? files_json(obj, r, err) : 0;
}

int mb_report_encode(const struct mb_report *r, struct mb_buf *out, struct mb_err *err)
{
    if ((size_t)r->type >= N_TYPES) {
        return mb_err_set(err, MB_EINVAL, "report: %d is no message type", (int)r->type);
    }
    json_t *obj = json_object();
    if (obj == NULL) {
        return mb_err_set(err, MB_ENOMEM, "report: out of memory");
    }
    char *text = NULL;
    int rc = build(obj, r, err);
    if (rc != 0) {
        goto out;
    }
    text = json_dumps(obj, JSON_COMPACT);
    if (text == NULL) {
        rc = mb_err_set(err, MB_ENOMEM, "report: out of memory");
        goto out;
    }
    size_t n = strlen(text);
    if (n > MB_REPORT_FRAME_MAX) {
        rc = mb_err_set(err, MB_EFULL, "report: a %s message of %zu bytes exceeds %d",
                        TYPES[r->type].name, n, (int)MB_REPORT_FRAME_MAX);
        goto out;
    }
    if (mb_buf_reserve(out, n + 4) != 0 || mb_buf_u32le(out, (uint32_t)n) != 0 ||
        mb_buf_add(out, text, n) != 0) {
        rc = mb_err_set(err, MB_ENOMEM, "report: out of memory");
    }
out:
    mb_free(text);
    json_decref(obj);
    return rc;
}

/* ---- decode ---- */

static int bad_field(struct mb_err *err, const char *type, const char *field, const char *expected)
{
    return mb_err_set(err, MB_EPROTO, "report: %s message: field \"%s\": expected %s", type, field,
                      expected);
}

static int take_int(const json_t *obj, const char *type, const char *name, int64_t min, int64_t max,
                    int64_t *out, struct mb_err *err)
{
    const json_t *j = json_object_get(obj, name);
    if (!json_is_integer(j) || json_integer_value(j) < min || json_integer_value(j) > max) {
        return bad_field(err, type, name, "an integer in range");
    }
    *out = json_integer_value(j);
    return 0;
}

static int take_u32(const json_t *obj, const char *type, const char *name, uint32_t *out,
                    struct mb_err *err)
{
    int64_t v = 0;
    int rc = take_int(obj, type, name, 0, UINT32_MAX, &v, err);
    *out = (uint32_t)v;
    return rc;
}

static int take_times(const json_t *obj, const char *type, struct mb_report *r, struct mb_err *err)
{
    int rc = take_int(obj, type, "stall_ms", 0, INT64_MAX, &r->stall_ms, err);
    r->has_times = 1;
    return rc == 0 ? take_int(obj, type, "write_ms", 0, INT64_MAX, &r->write_ms, err) : rc;
}

static int take_progress(const json_t *obj, const char *type, struct mb_report *r,
                         struct mb_err *err)
{
    for (size_t i = 0; i < sizeof INTS / sizeof INTS[0]; i++) {
        int64_t v = 0;
        int rc = take_int(obj, type, INTS[i].name, INT64_MIN, INT64_MAX, &v, err);
        if (rc != 0) {
            return rc;
        }
        memcpy((char *)r + INTS[i].offset, &v, sizeof v);
    }
    for (size_t i = 0; i < sizeof REALS / sizeof REALS[0]; i++) {
        const json_t *j = json_object_get(obj, REALS[i].name);
        if (!json_is_number(j) && !json_is_null(j)) {
            return bad_field(err, type, REALS[i].name, "a number or null");
        }
        double v = json_is_null(j) ? NAN : json_number_value(j);
        memcpy((char *)r + REALS[i].offset, &v, sizeof v);
    }
    return 0;
}

/* A relative path that stays below its directory: no empty, "." or ".." component. */
static int path_stays_below(const char *path)
{
    const char *p = path;
    for (;;) {
        size_t n = strcspn(p, "/");
        if (n == 0 || (n == 1 && p[0] == '.') || (n == 2 && p[0] == '.' && p[1] == '.')) {
            return 0;
        }
        if (p[n] == '\0') {
            return 1;
        }
        p += n + 1;
    }
}

static int take_file(const json_t *o, const char *type, struct mb_report_file *f,
                     struct mb_err *err)
{
    const char *path = json_string_value(json_object_get(o, "path"));
    const char *crc = json_string_value(json_object_get(o, "crc64nvme"));
    uint8_t be[8];
    int64_t size = 0;
    if (path == NULL || !path_stays_below(path)) {
        return bad_field(err, type, "files", "paths that stay below the iteration's directory");
    }
    if (crc == NULL || strlen(crc) != 16 || mb_unhex(crc, be, sizeof be) != 0) {
        return bad_field(err, type, "crc64nvme", "16 hex digits");
    }
    int rc = take_int(o, type, "size", 0, INT64_MAX, &size, err);
    if (rc != 0) {
        return rc;
    }
    f->size_bytes = (uint64_t)size;
    for (int k = 0; k < 8; k++) {
        f->crc64nvme = f->crc64nvme << 8 | be[k];
    }
    f->path = mb_strdup(path);
    return f->path != NULL ? 0 : mb_err_set(err, MB_ENOMEM, "report: out of memory");
}

static int take_files(const json_t *obj, const char *type, struct mb_report *r, struct mb_err *err)
{
    const json_t *list = json_object_get(obj, "files");
    if (!json_is_array(list)) {
        return bad_field(err, type, "files", "a list");
    }
    size_t n = json_array_size(list);
    r->files = mb_calloc(n + 1, sizeof *r->files);
    if (r->files == NULL) {
        return mb_err_set(err, MB_ENOMEM, "report: out of memory");
    }
    for (; r->n_files < n; r->n_files++) {
        int rc = take_file(json_array_get(list, r->n_files), type, &r->files[r->n_files], err);
        if (rc != 0) {
            return rc;
        }
    }
    return 0;
}

static int take_endpoints(const json_t *obj, const char *type, struct mb_report *r,
                          struct mb_err *err)
{
    const json_t *list = json_object_get(obj, "endpoints");
    if (!json_is_array(list) || json_array_size(list) == 0) {
        return bad_field(err, type, "endpoints", "a list with one entry per rank");
    }
    size_t n = json_array_size(list);
    r->endpoints = mb_calloc(n, sizeof *r->endpoints);
    if (r->endpoints == NULL) {
        return mb_err_set(err, MB_ENOMEM, "report: out of memory");
    }
    for (; r->n_endpoints < n; r->n_endpoints++) {
        const char *s = json_string_value(json_array_get(list, r->n_endpoints));
        if (s == NULL) {
            return bad_field(err, type, "endpoints", "strings");
        }
        r->endpoints[r->n_endpoints] = mb_strdup(s);
        if (r->endpoints[r->n_endpoints] == NULL) {
            return mb_err_set(err, MB_ENOMEM, "report: out of memory");
        }
    }
    return 0;
}

static int take_text(const json_t *obj, const char *type, struct mb_report *r, struct mb_err *err)
{
    const char *s = json_string_value(json_object_get(obj, "text"));
    if (s == NULL) {
        return bad_field(err, type, "text", "a string");
    }
    r->text = mb_strdup(s);
    return r->text != NULL ? 0 : mb_err_set(err, MB_ENOMEM, "report: out of memory");
}

static int take_fields(const json_t *obj, struct mb_report *r, struct mb_err *err)
{
    const char *type = TYPES[r->type].name;
    unsigned f = TYPES[r->type].fields;
    int rc = 0;
    if (rc == 0 && (f & F_ABI)) {
        rc = take_u32(obj, type, "abi", &r->abi, err);
    }
    if (rc == 0 && (f & F_RANK)) {
        rc = take_u32(obj, type, "rank", &r->rank, err);
    }
    if (rc == 0 && (f & F_PID)) {
        rc = take_int(obj, type, "pid", 0, INT32_MAX, &r->pid, err);
    }
    if (rc == 0 && (f & F_ITERATION)) {
        rc = take_int(obj, type, "iteration", 0, INT64_MAX, &r->iteration, err);
    }
    if (rc == 0 && (f & F_PROGRESS)) {
        rc = take_progress(obj, type, r, err);
    }
    if (rc == 0 && (f & F_SAVE_TIMES) && json_object_get(obj, "stall_ms") != NULL) {
        rc = take_times(obj, type, r, err);
    }
    if (rc == 0 && (f & F_TEXT)) {
        rc = take_text(obj, type, r, err);
    }
    if (rc == 0 && (f & F_FILES)) {
        rc = take_files(obj, type, r, err);
    }
    if (rc == 0 && (f & F_ENDPOINTS)) {
        rc = take_endpoints(obj, type, r, err);
    }
    return rc;
}

static int take_type(const json_t *obj, struct mb_report *r, struct mb_err *err)
{
    const char *t = json_string_value(json_object_get(obj, "t"));
    for (size_t i = 0; t != NULL && i < N_TYPES; i++) {
        if (strcmp(t, TYPES[i].name) == 0) {
            r->type = (enum mb_report_type)i;
            return 0;
        }
    }
    return mb_err_set(err, MB_EPROTO, "report: \"%.40s\" is no message type", t ? t : "(none)");
}

int mb_report_decode(struct mb_buf *in, struct mb_report *out, struct mb_err *err)
{
    memset(out, 0, sizeof *out);
    if (in->len < 4) {
        return 0;
    }
    uint32_t n = (uint32_t)in->data[0] | (uint32_t)in->data[1] << 8 | (uint32_t)in->data[2] << 16 |
                 (uint32_t)in->data[3] << 24;
    if (n == 0 || n > MB_REPORT_FRAME_MAX) {
        return mb_err_set(err, MB_EPROTO, "report: a frame of %u bytes; 1 to %d are allowed", n,
                          (int)MB_REPORT_FRAME_MAX);
    }
    if (in->len - 4 < n) {
        return 0;
    }
    json_error_t je;
    json_t *obj = json_loadb((const char *)in->data + 4, n, JSON_REJECT_DUPLICATES, &je);
    if (!json_is_object(obj)) {
        json_decref(obj);
        return mb_err_set(err, MB_EPROTO, "report: the frame is no JSON object");
    }
    int rc = take_type(obj, out, err);
    if (rc == 0) {
        rc = take_fields(obj, out, err);
    }
    json_decref(obj);
    if (rc != 0) {
        mb_report_close(out);
        return rc;
    }
    mb_buf_consume(in, (size_t)n + 4);
    return 1;
}

void mb_report_close(struct mb_report *r)
{
    mb_free(r->text);
    for (size_t i = 0; i < r->n_files; i++) {
        mb_free(r->files[i].path);
    }
    mb_free(r->files);
    for (size_t i = 0; i < r->n_endpoints; i++) {
        mb_free(r->endpoints[i]);
    }
    mb_free(r->endpoints);
    memset(r, 0, sizeof *r);
}
