/*
 *  1. A varint is a field's number and kind; 2. another is its value or its length; 3. that many
 *  bytes follow: of the value to the sink, of the status into its place, of others nowhere.
 * Failure: a kind that this reply has not (groups), a number without an end, a second value (a
 * reader of protobuf takes the last, and the sink has the first), an end in the middle.
 */
#include "gcs/kv_value.h"

#include <string.h>
#include "gcs/client_internal.h"

enum { TAG, NUMBER, LENGTH };                 /* what comes next */
enum { VARINT, FIXED64, BYTES, FIXED32 = 5 }; /* kinds of fields */
enum { FIELD_STATUS = 1, FIELD_VALUE = 2, FIELD_OTHER = 0 };

void mb_kv_value_init(struct mb_kv_value *v)
{
    memset(v, 0, sizeof(*v));
}

static int odd(struct mb_err *err)
{
    return mb_err_set(err, MB_EPROTO, "the head's answer is no value of its KV");
}

static int on_tag(struct mb_kv_value *v, uint64_t tag, struct mb_err *err)
{
    const uint64_t field = tag >> 3;

    if (field == 0 || field > UINT32_MAX >> 3)
        return odd(err);
    v->field = FIELD_OTHER;
    switch (tag & 7) {
    case VARINT:
        v->what = NUMBER;
        return 0;
    case FIXED64:
        v->left = 8;
        return 0;
    case FIXED32:
        v->left = 4;
        return 0;
    case BYTES:
        v->what = LENGTH;
        if (field == FIELD_STATUS || field == FIELD_VALUE)
            v->field = field;
        return 0;
    default:
        return odd(err);
    }
}

static int on_length(struct mb_kv_value *v, uint64_t n, struct mb_err *err)
{
    v->left = n;
    if (v->field == FIELD_STATUS && n > sizeof(v->status) - v->status_len)
        return odd(err);
    if (v->field == FIELD_VALUE && v->has_value++)
        return odd(err);
    return 0;
}

static int on_byte(struct mb_kv_value *v, uint8_t byte, struct mb_err *err)
{
    const int what = v->what;
    uint64_t n;

    if (v->shift > 63 || (v->shift == 63 && (byte & 0x7e) != 0))
        return odd(err);
    v->varint |= (uint64_t)(byte & 0x7f) << v->shift;
    v->shift += 7;
    if (byte & 0x80)
        return 0;
    n = v->varint;
    v->varint = v->shift = 0;
    v->what = TAG;
    if (what == TAG)
        return on_tag(v, n, err);
    return what == LENGTH ? on_length(v, n, err) : 0;
}

static int on_bytes(struct mb_kv_value *v, const uint8_t *p, size_t n, mb_kv_sink sink, void *arg,
                    struct mb_err *err)
{
    v->left -= n;
    if (v->field == FIELD_VALUE)
        return sink(arg, p, n, err);
    if (v->field == FIELD_STATUS) { /* its parts follow each other, as protobuf merges them */
        memcpy(v->status + v->status_len, p, n);
        v->status_len += n;
    }
    return 0;
}

int mb_kv_value_feed(struct mb_kv_value *v, const uint8_t *p, size_t n, mb_kv_sink sink, void *arg,
                     struct mb_err *err)
{
    int rc = 0;

    while (n > 0 && rc == 0) {
        size_t take = 1;

        if (v->left == 0) {
            rc = on_byte(v, *p, err);
        } else {
            take = v->left < n ? (size_t)v->left : n;
            rc = on_bytes(v, p, take, sink, arg, err);
        }
        p += take;
        n -= take;
    }
    return rc;
}

int mb_kv_value_end(const struct mb_kv_value *v, struct mb_err *err)
{
    Ray__Rpc__GcsStatus *status;
    int rc;

    if (v->what != TAG || v->shift != 0 || v->left != 0)
        return odd(err);
    status = ray__rpc__gcs_status__unpack(NULL, v->status_len, v->status);
    if (status == NULL)
        return odd(err);
    rc = gcs_status_error(status, err);
    ray__rpc__gcs_status__free_unpacked(status, NULL);
    return rc;
}
