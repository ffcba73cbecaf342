/*
 * Events by hand: four messages with few fields each.
 *
 *  1. open: the file and its first record, file_version "brain.Event:2".
 *  2. scalar, text: a record is appended to the buffer.
 *  3. flush: the buffer goes to the file, and so it does when as many records wait as may.
 * Failures: a directory that cannot be made, a file that cannot be written: MB_EIO or what the
 * system says, with the path. A record is never torn by us: what could not be written is dropped.
 */
#include "worker/tensorboard.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "base/checksum.h"
#include "base/fs.h"

struct mb_tensorboard {
    int fd;
    char *path;
    struct mb_buf out, message;   /* whole records; the one that is made */
    int failed;                   /* memory was out */
    size_t n_waiting, queue_size; /* records in out, and how many may be */
    struct mb_err kept;           /* of writing when the queue was full, for the next flush */
};

/* ---- protobuf ---- */

enum { VARINT = 0, FIXED64 = 1, BYTES = 2, FIXED32 = 5 };

static int put_varint(struct mb_buf *b, uint64_t v)
{
    uint8_t bytes[10];
    size_t n = 0;
    do {
        bytes[n++] = (uint8_t)((v & 0x7f) | (v > 0x7f ? 0x80 : 0));
        v >>= 7;
    } while (v != 0);
    return mb_buf_add(b, bytes, n);
}

static int put_key(struct mb_buf *b, unsigned field, unsigned type)
{
    return put_varint(b, field << 3 | type);
}

static int put_bytes(struct mb_buf *b, unsigned field, const void *p, size_t n)
{
    return put_key(b, field, BYTES) != 0 || put_varint(b, n) != 0 || mb_buf_add(b, p, n) != 0;
}

static int put_text(struct mb_buf *b, unsigned field, const char *text)
{
    return put_bytes(b, field, text, strlen(text));
}

static int put_number(struct mb_buf *b, unsigned field, uint64_t v)
{
    return put_key(b, field, VARINT) != 0 || put_varint(b, v) != 0;
}

static int put_double(struct mb_buf *b, unsigned field, double v)
{
    uint64_t bits;
    memcpy(&bits, &v, sizeof bits);
    return put_key(b, field, FIXED64) != 0 || mb_buf_u64le(b, bits) != 0;
}

static int put_float(struct mb_buf *b, unsigned field, double v)
{
    float narrow = (float)v;
    uint32_t bits;
    memcpy(&bits, &narrow, sizeof bits);
    return put_key(b, field, FIXED32) != 0 || mb_buf_u32le(b, bits) != 0;
}

/* ---- records ---- */

static uint32_t masked(uint32_t crc)
{
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

static int put_record(struct mb_buf *out, const struct mb_buf *message)
{
    size_t kept = out->len;
    int bad = mb_buf_u64le(out, message->len);
    bad = bad || mb_buf_u32le(out, masked(mb_crc32c(0, out->data + kept, 8)));
    bad = bad || mb_buf_add(out, message->data, message->len);
    bad = bad || mb_buf_u32le(out, masked(mb_crc32c(0, message->data, message->len)));
    if (bad) {
        out->len = kept;
    }
    return bad;
}

/* wall_time 1, step 2 */
static int begin_event(struct mb_tensorboard *t, int64_t step)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    mb_buf_reset(&t->message);
    return put_double(&t->message, 1, (double)now.tv_sec + (double)now.tv_nsec / 1e9) != 0 ||
           put_number(&t->message, 2, (uint64_t)step) != 0;
}

static int write_out(struct mb_tensorboard *t, struct mb_err *err)
{
    int rc = mb_fs_write_all(t->fd, t->out.data, t->out.len, err);
    mb_buf_reset(&t->out);
    t->n_waiting = 0;
    return rc;
}

/* Event{summary 5{value 1{...}}} around the value's bytes. */
static int end_event(struct mb_tensorboard *t, const struct mb_buf *value)
{
    struct mb_buf summary = {0};
    if (t->n_waiting >= t->queue_size && t->kept.code == 0) {
        (void)write_out(t, &t->kept);
    }
    t->n_waiting++;
    int bad = put_bytes(&summary, 1, value->data, value->len) ||
              put_bytes(&t->message, 5, summary.data, summary.len) ||
              put_record(&t->out, &t->message);
    mb_buf_close(&summary);
    return bad;
}

void mb_tensorboard_scalar(struct mb_tensorboard *t, const char *tag, int64_t step, double value)
{
    struct mb_buf v = {0}; /* tag 1, simple_value 2 */
    t->failed |=
        put_text(&v, 1, tag) || put_float(&v, 2, value) || begin_event(t, step) || end_event(t, &v);
    mb_buf_close(&v);
}

void mb_tensorboard_text(struct mb_tensorboard *t, const char *name, int64_t step, const char *text)
{
    enum { DT_STRING = 7 };
    struct mb_buf v = {0}, plugin = {0}, metadata = {0}, dim = {0}, shape = {0}, tensor = {0};
    char tag[160];
    snprintf(tag, sizeof tag, "%.128s/text_summary", name);
    /* metadata 9{plugin_data 1{plugin_name 1}}, tensor 8{dtype 1, shape 2{dim 2{size 1}},
     * string_val 8} */
    int bad = put_text(&plugin, 1, "text") || put_bytes(&metadata, 1, plugin.data, plugin.len) ||
              put_number(&dim, 1, 1) || put_bytes(&shape, 2, dim.data, dim.len) ||
              put_number(&tensor, 1, DT_STRING) || put_bytes(&tensor, 2, shape.data, shape.len) ||
              put_text(&tensor, 8, text) || put_text(&v, 1, tag) ||
              put_bytes(&v, 8, tensor.data, tensor.len) ||
              put_bytes(&v, 9, metadata.data, metadata.len) || begin_event(t, step) ||
              end_event(t, &v);
    t->failed |= bad;
    mb_buf_close(&v);
    mb_buf_close(&plugin);
    mb_buf_close(&metadata);
    mb_buf_close(&dim);
    mb_buf_close(&shape);
    mb_buf_close(&tensor);
}

int mb_tensorboard_flush(struct mb_tensorboard *t, struct mb_err *err)
{
    if (t->failed) {
        t->failed = 0;
        return mb_err_set(err, MB_ENOMEM, "%s: out of memory for events", t->path);
    }
    int rc =
        t->kept.code != 0 ? mb_err_set(err, t->kept.code, "%s", t->kept.text) : write_out(t, err);
    return rc != 0 ? mb_err_wrap(err, "%s", t->path) : 0;
}

/* ---- life ---- */

static int open_file(struct mb_tensorboard *t, const char *dir, struct mb_err *err)
{
    char host[256] = "localhost";
    (void)gethostname(host, sizeof host - 1);
    t->path = mb_asprintf("%s/events.out.tfevents.%lld.%s.%d.0", dir, (long long)time(NULL), host,
                          (int)getpid());
    if (t->path == NULL) {
        return mb_err_set(err, MB_ENOMEM, "out of memory for events");
    }
    int rc = mb_fs_mkdir_p(dir, 0755, err);
    if (rc != 0) {
        return rc;
    }
    t->fd = open(t->path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (t->fd < 0) {
        return mb_err_sys(err, errno, "%s", t->path);
    }
    t->failed |= begin_event(t, 0) || put_text(&t->message, 3, "brain.Event:2") ||
                 put_record(&t->out, &t->message);
    return mb_tensorboard_flush(t, err);
}

int mb_tensorboard_open(const char *dir, size_t queue_size, struct mb_tensorboard **out,
                        struct mb_err *err)
{
    struct mb_tensorboard *t = mb_calloc(1, sizeof *t);
    if (t == NULL) {
        return mb_err_set(err, MB_ENOMEM, "out of memory for events");
    }
    t->fd = -1;
    t->queue_size = queue_size;
    int rc = open_file(t, dir, err);
    if (rc != 0) {
        mb_tensorboard_close(t);
        return mb_err_wrap(err, "--tensorboard-dir");
    }
    *out = t;
    return 0;
}

void mb_tensorboard_close(struct mb_tensorboard *t)
{
    if (t == NULL) {
        return;
    }
    if (t->fd >= 0) {
        (void)mb_tensorboard_flush(t, NULL); /* whoever cares has flushed */
        close(t->fd);
    }
    mb_buf_close(&t->out);
    mb_buf_close(&t->message);
    mb_free(t->path);
    mb_free(t);
}
