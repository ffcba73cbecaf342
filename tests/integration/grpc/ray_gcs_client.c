/*
 * Talks to a real GCS through base/grpc: ray_gcs_client HOST:PORT
 *
 *  1. GetClusterId gives 28 bytes; from then on every call carries them as metadata.
 *  2. CheckAlive says the version.
 *  3. InternalKVPut adds, refuses to overwrite; InternalKVGet gives the bytes back; a missing key
 * is status 17 inside an OK reply.
 *  4. A wrong cluster id is UNAUTHENTICATED, a method that Ray lacks UNIMPLEMENTED.
 *  Any surprise is printed and exits with 1.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <uv.h>
#include "base/grpc/grpc.h"
#include "base/str.h"
#include "proto/ray/gcs_service.pb-c.h"

enum { TIMEOUT_MS = 20000, BIG_BYTES = 1 << 20, GCS_NOT_FOUND = 17 };

static uv_loop_t loop;
static struct mb_grpc_channel *ch;

/* Looks at a reply; 1 if it is what was expected. */
typedef int (*check_fn)(const ProtobufCMessage *reply);

struct call {
    const char *method;
    int want_status;
    check_fn check;
    int done;
    int good;
};

static void on_reply(void *arg, int status, const char *detail, const ProtobufCMessage *reply)
{
    struct call *c = arg;

    c->done = 1;
    c->good = status == c->want_status && (c->check == NULL || c->check(reply));
    printf("%s %s: %s %s\n", c->good ? "ok  " : "FAIL", c->method, mb_grpc_status_name(status),
           detail);
}

/* One call, waited for. */
static int call(const char *method, const ProtobufCMessage *request,
                const ProtobufCMessageDescriptor *reply_desc, int want_status, check_fn check)
{
    struct call c = {method, want_status, check, 0, 0};
    struct mb_err err = {0};

    if (mb_grpc_unary(ch, method, request, reply_desc, TIMEOUT_MS, on_reply, &c, NULL, &err) != 0) {
        printf("FAIL %s\n", err.text);
        return 1;
    }
    while (!c.done)
        uv_run(&loop, UV_RUN_ONCE);
    return c.good ? 0 : 1;
}

static uint8_t big[BIG_BYTES];

static int check_cluster_id(const ProtobufCMessage *reply)
{
    const Ray__Rpc__GetClusterIdReply *r = (const void *)reply;
    char hex[57];

    if (r->cluster_id.len != 28)
        return 0;
    return mb_grpc_channel_metadata(ch, "ray_cluster_id", mb_hex(r->cluster_id.data, 28, hex)) == 0;
}

static int check_alive(const ProtobufCMessage *reply)
{
    const Ray__Rpc__CheckAliveReply *r = (const void *)reply;

    return strcmp(r->ray_version, "2.60.0") == 0 &&
           r->_is_leader_case == RAY__RPC__CHECK_ALIVE_REPLY___IS_LEADER_IS_LEADER;
}

static int check_added(const ProtobufCMessage *reply)
{
    return ((const Ray__Rpc__InternalKVPutReply *)(const void *)reply)->added;
}

static int check_not_added(const ProtobufCMessage *reply)
{
    return !check_added(reply);
}

static int check_big(const ProtobufCMessage *reply)
{
    const Ray__Rpc__InternalKVGetReply *r = (const void *)reply;

    return r->value.len == sizeof(big) && memcmp(r->value.data, big, sizeof(big)) == 0;
}

static int check_missing(const ProtobufCMessage *reply)
{
    const Ray__Rpc__InternalKVGetReply *r = (const void *)reply;

    return r->status != NULL && r->status->code == GCS_NOT_FOUND;
}

static ProtobufCBinaryData bytes(char *text)
{
    return (ProtobufCBinaryData){strlen(text), (uint8_t *)text};
}

static int put_and_get(void)
{
    Ray__Rpc__InternalKVPutRequest put = RAY__RPC__INTERNAL_KVPUT_REQUEST__INIT;
    Ray__Rpc__InternalKVGetRequest get = RAY__RPC__INTERNAL_KVGET_REQUEST__INIT;
    const ProtobufCMessageDescriptor *put_reply = &ray__rpc__internal_kvput_reply__descriptor;
    const ProtobufCMessageDescriptor *get_reply = &ray__rpc__internal_kvget_reply__descriptor;
    const char *put_method = "/ray.rpc.InternalKVGcsService/InternalKVPut";
    const char *get_method = "/ray.rpc.InternalKVGcsService/InternalKVGet";
    char key[] = "from_c", missing[] = "missing", ns[] = "mobula";
    int bad = 0;

    for (size_t i = 0; i < sizeof(big); i++)
        big[i] = (uint8_t)(i * 31 >> 3);
    put.key = get.key = bytes(key);
    put.namespace_ = get.namespace_ = bytes(ns);
    put.value = (ProtobufCBinaryData){sizeof(big), big};
    bad += call(put_method, &put.base, put_reply, MB_GRPC_OK, check_added);
    bad += call(put_method, &put.base, put_reply, MB_GRPC_OK, check_not_added);
    bad += call(get_method, &get.base, get_reply, MB_GRPC_OK, check_big);
    get.key = bytes(missing);
    bad += call(get_method, &get.base, get_reply, MB_GRPC_OK, check_missing);
    return bad;
}

static int talk(void)
{
    Ray__Rpc__GetClusterIdRequest id = RAY__RPC__GET_CLUSTER_ID_REQUEST__INIT;
    Ray__Rpc__CheckAliveRequest alive = RAY__RPC__CHECK_ALIVE_REQUEST__INIT;
    const ProtobufCMessageDescriptor *alive_reply = &ray__rpc__check_alive_reply__descriptor;
    const char *alive_method = "/ray.rpc.NodeInfoGcsService/CheckAlive";
    char wrong[57];
    int bad = 0;

    bad += call("/ray.rpc.NodeInfoGcsService/GetClusterId", &id.base,
                &ray__rpc__get_cluster_id_reply__descriptor, MB_GRPC_OK, check_cluster_id);
    bad += call(alive_method, &alive.base, alive_reply, MB_GRPC_OK, check_alive);
    bad += put_and_get();
    bad += call("/ray.rpc.NodeInfoGcsService/NoSuch", &alive.base, alive_reply,
                MB_GRPC_UNIMPLEMENTED, NULL);
    memset(wrong, '7', 56);
    wrong[56] = '\0';
    mb_grpc_channel_metadata(ch, "ray_cluster_id", wrong);
    bad += call(alive_method, &alive.base, alive_reply, MB_GRPC_UNAUTHENTICATED, NULL);
    return bad;
}

static void on_stopped(void *arg)
{
    *(int *)arg = 1;
}

int main(int argc, char **argv)
{
    struct mb_grpc *g = NULL;
    struct mb_err err = {0};
    int stopped = 0;
    int bad = 1;

    if (argc != 2) {
        fprintf(stderr, "usage: ray_gcs_client HOST:PORT\n");
        return 64;
    }
    uv_loop_init(&loop);
    if (mb_grpc_create(&loop, &g, &err) == 0) {
        if (mb_grpc_channel_create(g, argv[1], NULL, &ch, &err) == 0)
            bad = talk();
        mb_grpc_stop(g, on_stopped, &stopped);
        while (!stopped)
            uv_run(&loop, UV_RUN_ONCE);
        mb_grpc_destroy(g);
    }
    if (err.code != 0)
        printf("FAIL %s\n", err.text);
    uv_run(&loop, UV_RUN_DEFAULT);
    if (uv_loop_close(&loop) != 0)
        bad++;
    return bad == 0 ? 0 : 1;
}
