/*
 * What a peer can make this side keep in memory.
 *
 *  1. A message beyond the limit is RESOURCE_EXHAUSTED. The library looks at its length when it has
 *     all of it, though, and takes up to 4 GiB until then.
 *  2. So what all connections of a channel or server have received and nobody has read is bounded
 *     too, by a quota of the library: near it windows are not opened further; beyond it a stream,
 *     at last the connection ends (ENHANCE_YOUR_CALM), and a channel makes it anew.
 *     A message counts about twice while it is put together: one of the largest, or as much in
 *     several, passes; of two of the largest at once one may have to come again. A server whose
 *     messages are as large as Ray's has none: it would be one for all of a cluster.
 *  3. Nothing compressed is taken: 1 and 2 count bytes as they come, and a gzip is a thousandth of
 *     what it unpacks to. Ray compresses nothing. Who does gets UNIMPLEMENTED; the library would
 *     unpack what it refuses so first, if it were not told to leave it.
 *  4. What protobuf makes of a message is bounded in message.c.
 */
#include <grpc/compression.h>
#include "base/grpc/internal.h"

enum {
    MORE_THAN_A_MESSAGE_BYTES = 32 << 20 /* of other streams meanwhile, and what a stream's window
                                            is ahead of its reader */
};

grpc_arg mb_grpc_int_arg(const char *key, int value)
{
    /* The library's struct has a non-const key and does not write through it. */
    union {
        const char *in;
        char *out;
    } cast = {.in = key};

    return (grpc_arg){.type = GRPC_ARG_INTEGER, .key = cast.out, .value.integer = value};
}

void mb_grpc_bound_open(struct mb_grpc_bound *b, size_t max, int has_quota)
{
    b->quota = grpc_resource_quota_create(NULL);
    if (has_quota)
        grpc_resource_quota_resize(b->quota, max + MORE_THAN_A_MESSAGE_BYTES);
    b->args[0] = mb_grpc_int_arg(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH,
                                 max > INT32_MAX ? INT32_MAX : (int)max);
    b->args[1] = mb_grpc_int_arg(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET,
                                 1 << GRPC_COMPRESS_NONE);
    b->args[2] = mb_grpc_int_arg(GRPC_ARG_RESOURCE_QUOTA, 0);
    b->args[2].type = GRPC_ARG_POINTER;
    b->args[2].value.pointer.p = b->quota;
    b->args[2].value.pointer.vtable = grpc_resource_quota_arg_vtable();
    b->args[3] = mb_grpc_int_arg(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
}

void mb_grpc_bound_close(struct mb_grpc_bound *b)
{
    grpc_resource_quota_unref(b->quota);
}
