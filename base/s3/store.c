/*
 * The interface over both backends.
 *
 * 1. open picks the backend by the scheme.
 * 2. Each call copies its arguments into an operation, checks the key, and starts it.
 * 3. The backend finishes it from the loop: result out, memory freed.
 * 4. close cancels what runs, waits for the last operation, releases the backend, calls back.
 * Failures at the call itself (bad key, memory) are returned and no callback comes.
 */
#include "base/s3/internal.h"

#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/str.h"

enum { DEFAULT_TIMEOUT_MS = 60000, DEFAULT_FILE_TIMEOUT_MS = 24 * 3600 * 1000 };

/* ---- open and close ---- */

int mb_store_open(uv_loop_t *loop, const char *url, struct mb_store **out, struct mb_err *err)
{
    struct mb_store *s = mb_calloc(1, sizeof *s);
    if (!s || !(s->url = mb_strdup(url))) {
        mb_free(s);
        return mb_err_set(err, MB_ENOMEM, "object store: out of memory");
    }
    s->loop = loop;
    int rc;
    if (mb_starts_with(url, "s3://"))
        rc = mb_store_s3_open(s, url + 5, err);
    else if (mb_starts_with(url, "file:///"))
        rc = mb_store_file_open(s, url + 7, err);
    else if (url[0] == '/')
        rc = mb_store_file_open(s, url, err);
    else
        rc = mb_err_set(err, strstr(url, "://") ? MB_EUNSUPPORTED : MB_EINVAL,
                        "object store \"%.200s\": s3://BUCKET/PREFIX, file:///DIR or an absolute "
                        "path is expected",
                        url);
    if (rc != 0) {
        mb_free(s->url);
        mb_free(s);
        return rc;
    }
    uv_timer_init(loop, &s->close_timer);
    s->close_timer.data = s;
    *out = s;
    return 0;
}

const char *mb_store_url(const struct mb_store *s)
{
    return s->url;
}

void mb_store_set_outage(struct mb_store *s, uint64_t outage_ms)
{
    s->outage_ms = outage_ms;
}

int mb_store_has_conditions(const struct mb_store *s)
{
    return !s->backend->has_conditions || s->backend->has_conditions(s);
}

uint64_t mb_store_part_bytes(const struct mb_store *s)
{
    return s->backend->part_bytes ? s->backend->part_bytes(s) : (uint64_t)16 << 20;
}

uint64_t mb_store_retries(const struct mb_store *s)
{
    return s->backend->retries ? s->backend->retries(s) : 0;
}

static void on_timer_closed(uv_handle_t *h)
{
    struct mb_store *s = h->data;
    void (*cb)(void *arg) = s->close_cb;
    void *arg = s->close_arg;
    mb_free(s->url);
    mb_free(s);
    if (cb)
        cb(arg);
}

static void on_backend_closed(void *arg)
{
    struct mb_store *s = arg;
    uv_close((uv_handle_t *)&s->close_timer, on_timer_closed);
}

static void close_if_quiet(struct mb_store *s)
{
    if (!s->closing || s->backend_closing || s->ops)
        return;
    s->backend_closing = 1;
    s->backend->close(s, on_backend_closed, s);
}

static void on_close_timer(uv_timer_t *timer)
{
    struct mb_store *s = timer->data;
    struct mb_store_op *op = s->ops;
    for (struct mb_store_op *o = op; o; o = o->next)
        o->canceled = 1;
    while (op) { /* from the head again: one that ends may end others, which waited for its place */
        int is_told = op->is_told && op->patience_ms == 0;
        op->is_told = 1;
        op->patience_ms = 0;
        if (!is_told)
            s->backend->cancel(op);
        op = is_told ? op->next : s->ops;
    }
    close_if_quiet(s);
}

void mb_store_close(struct mb_store *s, void (*cb)(void *arg), void *arg)
{
    if (s->closing)
        return;
    s->closing = 1;
    s->close_cb = cb;
    s->close_arg = arg;
    uv_timer_start(&s->close_timer, on_close_timer, 0, 0);
}

/* ---- operations ---- */

static void op_free(struct mb_store_op *op)
{
    for (size_t i = 0; i < op->n_entries; i++) {
        mb_free((char *)op->entries[i].key);
        mb_free((char *)op->entries[i].etag);
    }
    mb_free(op->entries);
    mb_buf_close(&op->body);
    mb_free(op->key);
    mb_free(op->path);
    mb_free(op->data);
    mb_free(op->etag);
    mb_free(op->resume_upload_id);
    mb_free(op);
}

static int by_key(const void *a, const void *b)
{
    return strcmp(((const struct mb_store_entry *)a)->key, ((const struct mb_store_entry *)b)->key);
}

void mb_store_op_finish(struct mb_store_op *op)
{
    struct mb_store *s = op->store;
    if (op->err.code == 0 && op->canceled && op->kind != MB_STORE_PUT &&
        op->kind != MB_STORE_DELETE)
        mb_err_set(&op->err, MB_ECANCELED, "cancelled");
    if (op->err.code != 0)
        mb_err_wrap(&op->err, "%.200s, key \"%.200s\"", s->url, op->key);
    if (op->prev)
        op->prev->next = op->next;
    else
        s->ops = op->next;
    if (op->next)
        op->next->prev = op->prev;
    if (op->n_entries > 1)
        qsort(op->entries, op->n_entries, sizeof *op->entries, by_key);
    struct mb_store_result r = {.error = op->err.code,
                                .text = op->err.code ? op->err.text : "",
                                .size_bytes = op->size_bytes,
                                .crc64nvme = op->crc64nvme,
                                .etag = op->out_etag,
                                .has_strays = op->has_strays,
                                .entries = op->entries,
                                .n_entries = op->n_entries};
    if (op->err.code == 0 && op->kind == MB_STORE_GET) {
        r.data = mb_buf_str(&op->body);
        r.data_len = op->body.len;
    }
    op->cb(op->arg, &r);
    op_free(op);
    close_if_quiet(s);
}

int mb_store_op_add_entry(struct mb_store_op *op, const char *key, uint64_t size_bytes,
                          const char *etag)
{
    if (op->n_entries == MB_STORE_MAX_KEYS)
        return MB_EFULL;
    if (op->n_entries == op->cap_entries) {
        size_t cap = op->cap_entries ? 2 * op->cap_entries : 64;
        struct mb_store_entry *grown = mb_reallocarray(op->entries, cap, sizeof *grown);
        if (!grown)
            return MB_ENOMEM;
        op->entries = grown;
        op->cap_entries = cap;
    }
    struct mb_store_entry entry = {mb_strdup(key), size_bytes, mb_strdup(etag)};
    if (!entry.key || !entry.etag) {
        mb_free((char *)entry.key);
        mb_free((char *)entry.etag);
        return MB_ENOMEM;
    }
    op->entries[op->n_entries++] = entry;
    return 0;
}

/* Keys that mean the same everywhere: no control character, no empty, "." or ".." segment. A list
 * prefix may end anywhere, so its last segment is free. */
static int check_key(const char *key, int is_prefix, struct mb_err *err)
{
    const char *seg = key;
    for (;;) {
        size_t n = strcspn(seg, "/");
        int last = seg[n] == '\0';
        int odd = n == 0 || (n == 1 && seg[0] == '.') || (n == 2 && seg[0] == '.' && seg[1] == '.');
        if (odd && !(last && is_prefix && (n == 0 || seg[0] != '.')))
            return mb_err_set(err, MB_EINVAL,
                              "object key \"%.200s\": empty, \".\" and \"..\" segments are refused",
                              key);
        if (last)
            break;
        seg += n + 1;
    }
    for (const char *p = key; *p; p++) {
        if ((unsigned char)*p < 0x20 || *p == 0x7f) /* XML 1.0 cannot list them */
            return mb_err_set(err, MB_EINVAL, "object key \"%.200s\": control characters", key);
    }
    if (strlen(key) > 1024)
        return mb_err_set(err, MB_EINVAL, "object key \"%.100s...\": longer than 1024 bytes", key);
    return 0;
}

/* The common part of every call; NULL with err filled when it fails. */
static struct mb_store_op *op_create(struct mb_store *s, enum mb_store_kind kind, const char *key,
                                     uint64_t timeout_ms, mb_store_cb cb, void *arg,
                                     struct mb_err *err)
{
    struct mb_store_op *op = NULL;
    if (s->closing) {
        mb_err_set(err, MB_ESTATE, "object store: closed");
        return NULL;
    }
    if (check_key(key, kind == MB_STORE_LIST, err) != 0)
        return NULL;
    op = mb_calloc(1, sizeof *op);
    if (!op || !(op->key = mb_strdup(key))) {
        mb_free(op);
        mb_err_set(err, MB_ENOMEM, "object store: out of memory");
        return NULL;
    }
    op->store = s;
    op->kind = kind;
    timeout_ms = timeout_ms ? timeout_ms : DEFAULT_TIMEOUT_MS;
    op->deadline_ms =
        mb_mono_ms() + timeout_ms + s->outage_ms; /* an outage ends by its own bound */
    op->outage_ms = s->outage_ms;
    op->is_outage_of_all = s->outage_ms != 0;
    op->cb = cb;
    op->arg = arg;
    return op;
}

/* The request's own. */
static void set_outage(struct mb_store_op *op, uint64_t outage_ms)
{
    if (outage_ms == 0)
        return;
    op->outage_ms = outage_ms;
    op->is_outage_of_all = 0;
}

static int op_start(struct mb_store_op *op, struct mb_err *err)
{
    struct mb_store *s = op->store;
    int rc = s->backend->start(op, err);
    if (rc != 0) {
        op_free(op);
        return rc;
    }
    op->next = s->ops;
    if (s->ops)
        s->ops->prev = op;
    s->ops = op;
    return 0;
}

static int op_nomem(struct mb_store_op *op, struct mb_err *err)
{
    op_free(op);
    return mb_err_set(err, MB_ENOMEM, "object store: out of memory");
}

int mb_store_put(struct mb_store *s, const char *key, const void *p, size_t n,
                 enum mb_store_if cond, const char *etag, uint64_t timeout_ms, mb_store_cb cb,
                 void *arg, struct mb_err *err)
{
    struct mb_store_op *op = op_create(s, MB_STORE_PUT, key, timeout_ms, cb, arg, err);
    if (!op)
        return err ? err->code : MB_EINVAL;
    op->cond = cond;
    op->etag = mb_strdup(etag ? etag : "");
    op->data = mb_alloc(n);
    op->data_len = n;
    if (!op->etag || !op->data)
        return op_nomem(op, err);
    if (n > 0)
        memcpy(op->data, p, n);
    return op_start(op, err);
}

int mb_store_put_file(struct mb_store *s, const struct mb_store_put_file *req, mb_store_cb cb,
                      void *arg, struct mb_err *err)
{
    uint64_t timeout_ms = req->timeout_ms ? req->timeout_ms : DEFAULT_FILE_TIMEOUT_MS;
    struct mb_store_op *op = op_create(s, MB_STORE_PUT_FILE, req->key, timeout_ms, cb, arg, err);
    if (!op)
        return err ? err->code : MB_EINVAL;
    op->on_sent = req->on_sent;
    if (op->on_sent && !s->backend->go) {
        op_free(op);
        return mb_err_set(err, MB_EUNSUPPORTED, "object store: on_sent is for s3:// only");
    }
    op->path = mb_strdup(req->path);
    op->etag = mb_strdup(req->etag ? req->etag : "");
    op->resume_upload_id = mb_strdup(req->resume_upload_id);
    if (!op->path || !op->etag || (req->resume_upload_id && !op->resume_upload_id))
        return op_nomem(op, err);
    op->cond = req->cond;
    op->look_first = req->look_first;
    op->leaves_strays = req->leaves_strays;
    op->gives_up = req->gives_up;
    op->on_upload_id = req->on_upload_id;
    op->progress = req->progress;
    set_outage(op, req->outage_ms);
    op->priority = req->priority;
    if (req->op)
        *req->op = op;
    return op_start(op, err);
}

void mb_store_put_set_priority(struct mb_store_op *op, int32_t priority)
{
    if (op->priority == priority)
        return;
    op->priority = priority;
    if (op->impl && op->store->backend->set_priority)
        op->store->backend->set_priority(op);
}

void mb_store_put_cancel(struct mb_store_op *op, uint64_t patience_ms)
{
    if (op->is_told)
        return;
    op->canceled = op->is_told = 1;
    op->patience_ms = patience_ms;
    op->store->backend->cancel(op);
}

void mb_store_put_go(struct mb_store_op *op)
{
    op->store->backend->go(op, 0);
}

void mb_store_put_give_up(struct mb_store_op *op)
{
    op->store->backend->go(op, 1);
}

int mb_store_get(struct mb_store *s, const char *key, size_t max_bytes, uint64_t timeout_ms,
                 mb_store_cb cb, void *arg, struct mb_err *err)
{
    struct mb_store_op *op = op_create(s, MB_STORE_GET, key, timeout_ms, cb, arg, err);
    if (!op)
        return err ? err->code : MB_EINVAL;
    op->max_bytes = max_bytes;
    return op_start(op, err);
}

int mb_store_get_range(struct mb_store *s, const struct mb_store_range *range, mb_store_cb cb,
                       void *arg, struct mb_err *err)
{
    struct mb_store_op *op =
        op_create(s, MB_STORE_GET, range->key, range->timeout_ms, cb, arg, err);
    if (!op)
        return err ? err->code : MB_EINVAL;
    op->etag = mb_strdup(range->etag ? range->etag : "");
    if (!op->etag)
        return op_nomem(op, err);
    op->is_range = 1;
    op->offset = range->offset;
    op->max_bytes = range->size_bytes;
    set_outage(op, range->outage_ms);
    return op_start(op, err);
}

int mb_store_get_file_as(struct mb_store *s, const struct mb_store_get_file *req, mb_store_cb cb,
                         void *arg, struct mb_err *err)
{
    uint64_t timeout_ms = req->timeout_ms ? req->timeout_ms : DEFAULT_FILE_TIMEOUT_MS;
    struct mb_store_op *op = op_create(s, MB_STORE_GET_FILE, req->key, timeout_ms, cb, arg, err);
    if (!op)
        return err ? err->code : MB_EINVAL;
    op->path = mb_strdup(req->path);
    if (req->path && !op->path)
        return op_nomem(op, err);
    op->has_size = req->has_size;
    op->want_bytes = req->size_bytes;
    op->is_lazy = req->is_lazy;
    op->is_direct = req->is_direct;
    op->priority = req->priority;
    op->progress = req->progress;
    set_outage(op, req->outage_ms);
    return op_start(op, err);
}

int mb_store_get_file(struct mb_store *s, const char *key, const char *path,
                      mb_store_progress_cb progress, uint64_t timeout_ms, mb_store_cb cb, void *arg,
                      struct mb_err *err)
{
    struct mb_store_get_file req = {
        .key = key, .path = path, .progress = progress, .timeout_ms = timeout_ms};
    return mb_store_get_file_as(s, &req, cb, arg, err);
}

static int start_simple(struct mb_store *s, enum mb_store_kind kind, const char *key,
                        uint64_t timeout_ms, mb_store_cb cb, void *arg, struct mb_err *err)
{
    struct mb_store_op *op = op_create(s, kind, key, timeout_ms, cb, arg, err);
    if (!op)
        return err ? err->code : MB_EINVAL;
    return op_start(op, err);
}

int mb_store_head(struct mb_store *s, const char *key, uint64_t timeout_ms, mb_store_cb cb,
                  void *arg, struct mb_err *err)
{
    return start_simple(s, MB_STORE_HEAD, key, timeout_ms, cb, arg, err);
}

int mb_store_list(struct mb_store *s, const char *prefix, uint64_t timeout_ms, mb_store_cb cb,
                  void *arg, struct mb_err *err)
{
    return start_simple(s, MB_STORE_LIST, prefix, timeout_ms, cb, arg, err);
}

int mb_store_delete(struct mb_store *s, const char *key, uint64_t timeout_ms, mb_store_cb cb,
                    void *arg, struct mb_err *err)
{
    return start_simple(s, MB_STORE_DELETE, key, timeout_ms, cb, arg, err);
}

int mb_store_same_etag(const char *a, const char *b)
{
    size_t n_a = strlen(a), n_b = strlen(b);

    if (n_a >= 2 && a[0] == '"' && a[n_a - 1] == '"')
        a++, n_a -= 2;
    if (n_b >= 2 && b[0] == '"' && b[n_b - 1] == '"')
        b++, n_b -= 2;
    return n_a > 0 && n_a == n_b && memcmp(a, b, n_a) == 0;
}

int mb_store_list_uploads(struct mb_store *s, const char *key, uint64_t timeout_ms, mb_store_cb cb,
                          void *arg, struct mb_err *err)
{
    return start_simple(s, MB_STORE_LIST_UPLOADS, key, timeout_ms, cb, arg, err);
}

int mb_store_abort_uploads(struct mb_store *s, const char *key, const char *upload_id,
                           uint64_t timeout_ms, mb_store_cb cb, void *arg, struct mb_err *err)
{
    struct mb_store_op *op = op_create(s, MB_STORE_ABORT_UPLOADS, key, timeout_ms, cb, arg, err);
    if (!op)
        return err ? err->code : MB_EINVAL;
    op->resume_upload_id = mb_strdup(upload_id);
    if (upload_id && !op->resume_upload_id)
        return op_nomem(op, err);
    return op_start(op, err);
}
