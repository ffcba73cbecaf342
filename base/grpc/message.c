/*
 * Messages, metadata and status codes.
 *
 *  1. Packing asks protobuf-c for the size and writes straight into the slice that is sent.
 *  2. Unpacking allocates through base/alloc.h; a flag in the allocator tells "no memory" from
 *     "not such a message", which protobuf-c both reports as NULL.
 *  3. protobuf-c does not check that strings are UTF-8: who passes them on to a strict peer must.
 *  4. What is wanted as it came keeps the library's slices: nothing is copied.
 */
#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/slice.h>
#include <string.h>
#include "base/alloc.h"
#include "base/grpc/internal.h"
#include "base/str.h"

enum {
    /* What unpacking may take for a message of n bytes: n + min(2 n + 16 MiB, 128 MiB). Ray's
     * widest ones, maps of resources, take 3.5 n. */
    UNPACKED_FREE_BYTES = 16 << 20,
    UNPACKED_MORE_MAX = 128 << 20,
    ALLOCATION_COST = 16 /* of the allocator's own */
};

static const struct {
    const char *name;
    int code;
} statuses[] = {
    [MB_GRPC_OK] = {"OK", MB_OK},
    [MB_GRPC_CANCELLED] = {"CANCELLED", MB_ECANCELED},
    [MB_GRPC_UNKNOWN] = {"UNKNOWN", MB_EPROTO},
    [MB_GRPC_INVALID_ARGUMENT] = {"INVALID_ARGUMENT", MB_EINVAL},
    [MB_GRPC_DEADLINE_EXCEEDED] = {"DEADLINE_EXCEEDED", MB_ETIMEOUT},
    [MB_GRPC_NOT_FOUND] = {"NOT_FOUND", MB_ENOENT},
    [MB_GRPC_ALREADY_EXISTS] = {"ALREADY_EXISTS", MB_EEXIST},
    [MB_GRPC_PERMISSION_DENIED] = {"PERMISSION_DENIED", MB_EDENIED},
    [MB_GRPC_RESOURCE_EXHAUSTED] = {"RESOURCE_EXHAUSTED", MB_EFULL},
    [MB_GRPC_FAILED_PRECONDITION] = {"FAILED_PRECONDITION", MB_ESTATE},
    [MB_GRPC_ABORTED] = {"ABORTED", MB_ESTATE},
    [11] = {"OUT_OF_RANGE", MB_EINVAL},
    [MB_GRPC_UNIMPLEMENTED] = {"UNIMPLEMENTED", MB_EUNSUPPORTED},
    [MB_GRPC_INTERNAL] = {"INTERNAL", MB_EPROTO},
    [MB_GRPC_UNAVAILABLE] = {"UNAVAILABLE", MB_EUNAVAIL},
    [15] = {"DATA_LOSS", MB_ECORRUPT},
    [MB_GRPC_UNAUTHENTICATED] = {"UNAUTHENTICATED", MB_EDENIED},
};

static const int n_statuses = (int)(sizeof(statuses) / sizeof(statuses[0]));

const char *mb_grpc_status_name(int status)
{
    if (status < 0 || status >= n_statuses)
        return "UNKNOWN";
    return statuses[status].name;
}

int mb_grpc_status_code(int status)
{
    if (status < 0 || status >= n_statuses)
        return MB_EPROTO;
    return statuses[status].code;
}

grpc_byte_buffer *mb_grpc_pack(const ProtobufCMessage *msg)
{
    size_t size_bytes = protobuf_c_message_get_packed_size(msg);
    grpc_slice slice = grpc_slice_malloc(size_bytes);
    grpc_byte_buffer *bytes;

    protobuf_c_message_pack(msg, GRPC_SLICE_START_PTR(slice));
    bytes = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_slice_unref(slice);
    return bytes;
}

/* What is freed meanwhile is not given back: nobody frees much before the end. */
struct budget {
    size_t left_bytes;
    int failed;
};

static void *budget_alloc(void *arg, size_t size_bytes)
{
    struct budget *b = arg;
    size_t cost_bytes = size_bytes + ALLOCATION_COST;
    void *p = cost_bytes <= b->left_bytes ? mb_alloc(size_bytes) : NULL;

    if (p == NULL)
        b->failed = 1;
    else
        b->left_bytes -= cost_bytes;
    return p;
}

static void budget_free(void *arg, void *p)
{
    (void)arg;
    mb_free(p);
}

static size_t budget_bytes(size_t packed_bytes)
{
    size_t more_bytes = UNPACKED_FREE_BYTES + 2 * packed_bytes;

    return packed_bytes + (more_bytes < UNPACKED_MORE_MAX ? more_bytes : UNPACKED_MORE_MAX);
}

ProtobufCMessage *mb_grpc_unpack(const ProtobufCMessageDescriptor *desc, grpc_byte_buffer *bytes,
                                 int *status)
{
    struct budget budget = {0};
    ProtobufCAllocator allocator = {budget_alloc, budget_free, &budget};
    ProtobufCMessage *msg;
    grpc_byte_buffer_reader reader;
    grpc_slice slice;

    *status = MB_GRPC_INVALID_ARGUMENT;
    if (bytes->data.raw.compression != GRPC_COMPRESS_NONE || /* see bound.c */
        !grpc_byte_buffer_reader_init(&reader, bytes))
        return NULL;
    slice = grpc_byte_buffer_reader_readall(&reader);
    budget.left_bytes = budget_bytes(GRPC_SLICE_LENGTH(slice));
    msg = protobuf_c_message_unpack(desc, &allocator, GRPC_SLICE_LENGTH(slice),
                                    GRPC_SLICE_START_PTR(slice));
    grpc_slice_unref(slice);
    grpc_byte_buffer_reader_destroy(&reader);
    if (msg != NULL)
        *status = MB_GRPC_OK;
    else if (budget.failed)
        *status = MB_GRPC_RESOURCE_EXHAUSTED;
    return msg;
}

void mb_grpc_message_free(ProtobufCMessage *msg)
{
    ProtobufCAllocator allocator = {budget_alloc, budget_free, NULL};

    if (msg != NULL)
        protobuf_c_message_free_unpacked(msg, &allocator);
}

/* ---- as it came ---- */

struct mb_grpc_bytes {
    grpc_byte_buffer *buffer;
    grpc_byte_buffer_reader reader;
};

struct mb_grpc_bytes *mb_grpc_bytes_take(grpc_byte_buffer *buffer, int *status)
{
    struct mb_grpc_bytes *b;

    *status = MB_GRPC_INVALID_ARGUMENT;
    if (buffer->data.raw.compression != GRPC_COMPRESS_NONE) /* see bound.c */
        return NULL;
    *status = MB_GRPC_RESOURCE_EXHAUSTED;
    b = mb_calloc(1, sizeof(*b));
    if (b == NULL)
        return NULL;
    if (!grpc_byte_buffer_reader_init(&b->reader, buffer)) {
        mb_free(b);
        *status = MB_GRPC_INVALID_ARGUMENT;
        return NULL;
    }
    b->buffer = buffer;
    *status = MB_GRPC_OK;
    return b;
}

size_t mb_grpc_bytes_next(struct mb_grpc_bytes *b, const uint8_t **p)
{
    grpc_slice *slice;

    do {
        if (!grpc_byte_buffer_reader_peek(&b->reader, &slice))
            return 0;
    } while (GRPC_SLICE_LENGTH(*slice) == 0);
    *p = GRPC_SLICE_START_PTR(*slice);
    return GRPC_SLICE_LENGTH(*slice);
}

void mb_grpc_bytes_destroy(struct mb_grpc_bytes *b)
{
    if (b == NULL)
        return;
    grpc_byte_buffer_reader_destroy(&b->reader);
    grpc_byte_buffer_destroy(b->buffer);
    mb_free(b);
}

void mb_grpc_detail(grpc_slice slice, char out[MB_GRPC_DETAIL_MAX])
{
    size_t len = GRPC_SLICE_LENGTH(slice);

    if (len >= MB_GRPC_DETAIL_MAX)
        len = mb_utf8_floor(GRPC_SLICE_START_PTR(slice), MB_GRPC_DETAIL_MAX - 1);
    memcpy(out, GRPC_SLICE_START_PTR(slice), len);
    out[len] = '\0';
}

char *mb_grpc_bearer(const char *token)
{
    return mb_asprintf("Bearer %s", token);
}

int mb_grpc_metadata_check(const char *key, const char *value)
{
    grpc_slice k = grpc_slice_from_static_string(key);
    grpc_slice v = grpc_slice_from_static_string(value);

    if (mb_ends_with(key, "-bin") || !grpc_header_key_is_legal(k) ||
        !grpc_header_nonbin_value_is_legal(v))
        return MB_EINVAL;
    return 0;
}

static char *slice_text(grpc_slice slice)
{
    return mb_strndup((const char *)GRPC_SLICE_START_PTR(slice), GRPC_SLICE_LENGTH(slice));
}

int mb_grpc_pairs_copy(const grpc_metadata_array *from, struct mb_grpc_pair **out, size_t *out_n)
{
    struct mb_grpc_pair *pairs = NULL;

    if (from->count > 0) {
        pairs = mb_calloc(from->count, sizeof(*pairs));
        if (pairs == NULL)
            return MB_ENOMEM;
    }
    for (size_t i = 0; i < from->count; i++) {
        pairs[i].key = slice_text(from->metadata[i].key);
        pairs[i].value = slice_text(from->metadata[i].value);
        if (pairs[i].key == NULL || pairs[i].value == NULL) {
            mb_grpc_pairs_free(pairs, from->count);
            return MB_ENOMEM;
        }
    }
    *out = pairs;
    *out_n = from->count;
    return 0;
}

void mb_grpc_pairs_free(struct mb_grpc_pair *pairs, size_t n)
{
    if (pairs == NULL)
        return;
    for (size_t i = 0; i < n; i++) {
        mb_free(pairs[i].key);
        mb_free(pairs[i].value);
    }
    mb_free(pairs);
}

const char *mb_grpc_pairs_find(const struct mb_grpc_pair *pairs, size_t n, const char *key)
{
    for (size_t i = 0; i < n; i++) {
        if (strcmp(pairs[i].key, key) == 0)
            return pairs[i].value;
    }
    return NULL;
}
