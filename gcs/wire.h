/*
 * Between Ray's messages and our structs. The messages made here point into an arena; the structs
 * made here point into an arena and into the message they were read from. Pure; any thread, one at
 * a time per arena. MB_EPROTO: the message breaks the protocol; MB_ENOMEM: memory is out.
 */
#ifndef MOBULA_GCS_WIRE_H
#define MOBULA_GCS_WIRE_H

#include <protobuf-c/protobuf-c.h>
#include "gcs/arena.h"
#include "gcs/types.h"
#include "proto/ray/common.pb-c.h"
#include "proto/ray/gcs.pb-c.h"
#include "proto/ray/gcs_service.pb-c.h"

/* n initialised messages of one type, as a repeated field has them: the array of pointers to them.
 * NULL when memory is out, never for n = 0. */
void *mb_wire_messages(struct mb_arena *a, const ProtobufCMessageDescriptor *desc, size_t n);

/* Entries of a map<string,double> / map<string,string>; desc is the entry type's descriptor, so one
 * function serves every map of that shape. NULL when memory is out (n > 0). */
void *mb_wire_resources(struct mb_arena *a, const ProtobufCMessageDescriptor *desc,
                        const struct mb_gcs_resource *r, size_t n);
void *mb_wire_labels(struct mb_arena *a, const ProtobufCMessageDescriptor *desc,
                     const struct mb_gcs_label *l, size_t n);
/* Frees those entries of an unpacked map<string,double> whose key has word in it. Returns how many
 * stay, in their order. */
size_t mb_wire_drop_resources(void *entries, size_t n, const char *word);
/* And back: entries is the array of pointers to map entries of that shape. */
const struct mb_gcs_resource *mb_wire_get_resources(struct mb_arena *a, const void *entries,
                                                    size_t n);
const struct mb_gcs_label *mb_wire_get_labels(struct mb_arena *a, const void *entries, size_t n);

ProtobufCBinaryData mb_wire_bytes(const void *p, size_t n); /* points to p */
char *mb_wire_str(const char *s); /* s or the empty string, as protobuf-c wants it: never NULL */
/* Copies exactly n bytes; -1 (zeroed) when the length differs. */
int mb_wire_get_id(ProtobufCBinaryData b, uint8_t *out, size_t n);

/* A private copy, freed with protobuf_c_message_free_unpacked(m, NULL). NULL: out of memory. */
ProtobufCMessage *mb_wire_copy(const ProtobufCMessage *m);
/* The packed bytes, freed with mb_free(); NULL when memory is out. */
void *mb_wire_pack(const ProtobufCMessage *m, size_t *n);

/* NULL when memory is out. */
Ray__Rpc__GcsNodeInfo *mb_wire_node(struct mb_arena *a, const struct mb_gcs_node *node);
int mb_wire_get_node(struct mb_arena *a, const Ray__Rpc__GcsNodeInfo *in, struct mb_gcs_node *out);

/* Bundles of a group; indexes NULL: all, else the n of them. with_node: fill node_id. */
Ray__Rpc__Bundle **mb_wire_bundles(struct mb_arena *a, const uint8_t pg_id[MB_PG_ID_BYTES],
                                   const struct mb_gcs_bundle *bundles, const size_t *indexes,
                                   size_t n, int with_node);
/* Fields common to spec and table row. */
Ray__Rpc__PlacementGroupSpec *mb_wire_pg_spec(struct mb_arena *a, const struct mb_gcs_pg *pg);
int mb_wire_get_pg(struct mb_arena *a, const Ray__Rpc__PlacementGroupTableData *in,
                   struct mb_gcs_pg *out);

Ray__Rpc__JobTableData *mb_wire_job(struct mb_arena *a, const struct mb_gcs_job *job,
                                    const uint8_t worker_id[MB_NODE_ID_BYTES]);
int mb_wire_get_job(const Ray__Rpc__JobTableData *in, struct mb_gcs_job *out);

#endif
