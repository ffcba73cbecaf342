/*
 * gRPC core (C API) on a libuv loop: unary and streaming, client and server.
 *
 * One poller thread waits in the completion queue while nothing happens; when something does, the
 * loop empties the queue itself until nothing is left. Every callback and handler here runs on the
 * loop's thread.
 * All functions are loop-thread only. Messages are protobuf-c; a message passed to a callback is
 * borrowed for the duration of the callback. A callback never runs inside the call that asked for
 * it, runs exactly once per unary call, and never after mb_grpc_stop() has reported.
 * Every call carries a deadline: timeout_ms 0 is allowed for streams only.
 * Traps this layer hides are listed at the top of grpc.c (byte buffers emptied by sending,
 * SO_REUSEPORT, the lifetime of a server call).
 */
#ifndef MOBULA_BASE_GRPC_H
#define MOBULA_BASE_GRPC_H

#include <protobuf-c/protobuf-c.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>
#include "base/err.h"
#include "base/grpc/tls.h"

/* gRPC status codes (the wire's numbers). */
enum mb_grpc_status {
    MB_GRPC_OK = 0,
    MB_GRPC_CANCELLED = 1,
    MB_GRPC_UNKNOWN = 2,
    MB_GRPC_INVALID_ARGUMENT = 3,
    MB_GRPC_DEADLINE_EXCEEDED = 4,
    MB_GRPC_NOT_FOUND = 5,
    MB_GRPC_ALREADY_EXISTS = 6,
    MB_GRPC_PERMISSION_DENIED = 7,
    MB_GRPC_RESOURCE_EXHAUSTED = 8,
    MB_GRPC_FAILED_PRECONDITION = 9,
    MB_GRPC_ABORTED = 10,
    MB_GRPC_UNIMPLEMENTED = 12,
    MB_GRPC_INTERNAL = 13,
    MB_GRPC_UNAVAILABLE = 14,
    MB_GRPC_UNAUTHENTICATED = 16
};

/* "UNAVAILABLE" and so on. */
const char *mb_grpc_status_name(int status);
/* The MB_E* a status means for a caller (UNAVAILABLE -> MB_EUNAVAIL, ...); OK gives 0. */
int mb_grpc_status_code(int status);

struct mb_grpc;         /* runtime: completion queue, poller thread, uv_async */
struct mb_grpc_channel; /* client connection to one target, reconnects by itself */
struct mb_grpc_call;    /* one unary client call in flight */
struct mb_grpc_stream;  /* one end of a streaming call, client or server */
struct mb_grpc_server;
struct mb_grpc_req; /* one unary request being served; must be answered exactly once */

/* ---- runtime ---- */
int mb_grpc_create(uv_loop_t *loop, struct mb_grpc **out, struct mb_err *err);
/* Mutual TLS for every channel and server; before the first of them. tls is taken. */
void mb_grpc_secure(struct mb_grpc *g, struct mb_grpc_tls *tls);
/* cb, on the loop's thread: a server's port takes no connections any more, for good. The library
 * gives it up where no descriptor is left for one. Of several runtimes the last that asked is told.
 */
void mb_grpc_on_deaf(struct mb_grpc *g, void (*cb)(void *arg), void *arg);
/* Why a channel cannot connect (mb_grpc_channel_fault()) is no line of the log: the caller says it.
 */
void mb_grpc_quiet_faults(struct mb_grpc *g);
/* What went through the runtime since it was made. A stream is none of the first three. */
struct mb_grpc_counts {
    uint64_t calls;        /* unary calls of ours that ended, with whatever status */
    uint64_t calls_failed; /* ... not OK */
    uint64_t requests;     /* that came: answered, refused or abandoned */
    uint64_t messages_in;  /* of streams, decoded */
    uint64_t messages_out; /* of streams, taken by the connection */
};
void mb_grpc_count(const struct mb_grpc *g, struct mb_grpc_counts *out);
const struct mb_grpc_tls *mb_grpc_tls(const struct mb_grpc *g); /* NULL: plain */
/* Stops servers, cancels every call and stream (their callbacks run with CANCELLED), drains, then
 * calls stopped_cb on the loop. After that only mb_grpc_destroy() is legal. What is still open is
 * freed: channels, servers, requests that were never answered. A second stop does nothing. */
typedef void (*mb_grpc_stopped_cb)(void *arg);
void mb_grpc_stop(struct mb_grpc *g, mb_grpc_stopped_cb stopped_cb, void *arg);
void mb_grpc_destroy(struct mb_grpc *g); /* after the stopped callback; NULL is legal */

/* ---- client ---- */
struct mb_grpc_channel_opts {
    size_t max_message_bytes; /* that comes; 0: 512 MiB, what Ray uses. 32 MiB more may wait to be
                                 read; unpacked it takes 128 MiB more at most. */
    const char *token; /* "authorization: Bearer <token>" on every call; NULL: none; copied */
    /* A connection on which nothing sent has arrived for so long is given up and made anew; 0: 2
     * min, as Ray. After a cut network the kernel tries an old one again only after as long as the
     * cut. */
    int unacknowledged_ms;
};
/* target "host:port"; connects when first used. opts may be NULL. */
int mb_grpc_channel_create(struct mb_grpc *g, const char *target,
                           const struct mb_grpc_channel_opts *opts, struct mb_grpc_channel **out,
                           struct mb_err *err);
/* Metadata sent with every later unary call (not with streams); value NULL removes the key. */
int mb_grpc_channel_metadata(struct mb_grpc_channel *ch, const char *key, const char *value);
/* Why the channel cannot connect, if that is TLS or the peer no server of gRPC's
 * (mb_grpc_tls_probe()), else NULL. Known some time after a first call failed with UNAVAILABLE, and
 * logged once; forgotten when a call succeeds. */
const char *mb_grpc_channel_fault(const struct mb_grpc_channel *ch);
int mb_grpc_channel_fault_code(const struct mb_grpc_channel *ch); /* of that, while there is one */
/* Calls in flight end with CANCELLED; NULL is legal. */
void mb_grpc_channel_destroy(struct mb_grpc_channel *ch);

/* reply is NULL unless status is MB_GRPC_OK and the reply decodes (else INTERNAL). */
typedef void (*mb_grpc_unary_cb)(void *arg, int status, const char *detail,
                                 const ProtobufCMessage *reply);
/* method "/package.Service/Method". On failure (negative return) cb does not run.
 * out_call may be NULL; the handle is valid until cb has run. */
int mb_grpc_unary(struct mb_grpc_channel *ch, const char *method, const ProtobufCMessage *request,
                  const ProtobufCMessageDescriptor *reply_desc, uint64_t timeout_ms,
                  mb_grpc_unary_cb cb, void *arg, struct mb_grpc_call **out_call,
                  struct mb_err *err);
void mb_grpc_call_cancel(struct mb_grpc_call *call); /* cb still runs once */

/* A reply as it came: for those so large that a copy hurts. Nothing bounds it but the channel. */
struct mb_grpc_bytes;
/* reply is NULL unless status is MB_GRPC_OK; it is taken. */
typedef void (*mb_grpc_bytes_cb)(void *arg, int status, const char *detail,
                                 struct mb_grpc_bytes *reply);
int mb_grpc_unary_bytes(struct mb_grpc_channel *ch, const char *method,
                        const ProtobufCMessage *request, uint64_t timeout_ms, mb_grpc_bytes_cb cb,
                        void *arg, struct mb_grpc_call **out_call, struct mb_err *err);
/* Its next piece, borrowed until destroy; 0: that was all. Both on any thread, one at a time. */
size_t mb_grpc_bytes_next(struct mb_grpc_bytes *b, const uint8_t **p);
void mb_grpc_bytes_destroy(struct mb_grpc_bytes *b); /* NULL is legal */

/* ---- streams, both sides ---- */
struct mb_grpc_stream_ops {
    /* A message arrived. The next one is read when this returns. */
    void (*on_message)(void *arg, struct mb_grpc_stream *s, const ProtobufCMessage *msg);
    /* Server: the client will send no more (half-close); NULL allowed. A server has no half-close:
     * at a client the end of its messages is on_end. */
    void (*on_peer_done)(void *arg, struct mb_grpc_stream *s);
    /* The stream is over, for whatever reason; runs exactly once, last; the handle dies with it. */
    void (*on_end)(void *arg, struct mb_grpc_stream *s, int status, const char *detail);
};

struct mb_grpc_metadata {
    const char *key;   /* lower case */
    const char *value; /* ASCII */
};

/* Open a stream (bidirectional, or either one-sided form) from the client.
 * Metadata of the channel is not added, the token is. */
int mb_grpc_stream_open(struct mb_grpc_channel *ch, const char *method,
                        const ProtobufCMessageDescriptor *recv_desc,
                        const struct mb_grpc_metadata *metadata, size_t n_metadata,
                        uint64_t timeout_ms, const struct mb_grpc_stream_ops *ops, void *arg,
                        struct mb_grpc_stream **out, struct mb_err *err);
/* Queue one message (encoded at once). MB_EFULL when more than 64 MiB wait to be sent (each message
 * counts 512 bytes more than its size): nothing was queued, and the sender must slow down.
 * MB_ESTATE after close_send, finish or cancel, and before accept. */
int mb_grpc_stream_send(struct mb_grpc_stream *s, const ProtobufCMessage *msg, struct mb_err *err);
size_t mb_grpc_stream_queued_bytes(const struct mb_grpc_stream *s);
void mb_grpc_stream_close_send(struct mb_grpc_stream *s);        /* client half-close */
void mb_grpc_stream_finish(struct mb_grpc_stream *s, int status, /* server: after what is queued */
                           const char *detail);
void mb_grpc_stream_cancel(struct mb_grpc_stream *s); /* on_end runs with CANCELLED */
/* Server side: value of a metadata key the client sent, or NULL. Borrowed. */
const char *mb_grpc_stream_metadata(const struct mb_grpc_stream *s, const char *key);
/* Server side: who dialled, "ipv4:1.2.3.4:5". Borrowed. */
const char *mb_grpc_stream_peer(const struct mb_grpc_stream *s);

/* ---- server ---- */
typedef void (*mb_grpc_unary_handler)(void *arg, struct mb_grpc_req *req,
                                      const ProtobufCMessage *request);
/* A stream was opened by a client: set its ops with mb_grpc_stream_accept() before returning, or
 * refuse it with mb_grpc_stream_finish(). */
typedef void (*mb_grpc_stream_handler)(void *arg, struct mb_grpc_stream *s);

struct mb_grpc_method {
    const char *name; /* "/package.Service/Method", borrowed for ever */
    const ProtobufCMessageDescriptor *request_desc;
    mb_grpc_unary_handler unary; /* exactly one of unary, stream */
    mb_grpc_stream_handler stream;
    int is_public; /* 1: served without the token (health) */
};

struct mb_grpc_server_opts {
    const char *token;          /* required as "authorization: Bearer"; NULL: open. Copied;
                                   compared in constant time */
    size_t max_message_bytes;   /* as of a channel; with 512 MiB, what waits has no bound */
    uint64_t unary_deadline_ms; /* own bound on a handler that forgets to answer; 0: 60 s */
};
int mb_grpc_server_create(struct mb_grpc *g, const struct mb_grpc_server_opts *opts,
                          struct mb_grpc_server **out, struct mb_err *err);
/* Before listen. Unknown methods are answered UNIMPLEMENTED; a request that does not decode,
 * INVALID_ARGUMENT. */
int mb_grpc_server_add(struct mb_grpc_server *srv, const struct mb_grpc_method *methods, size_t n,
                       void *arg, struct mb_err *err);
/* addr "host:port", port 0 picks one (base/ports.h); the bound port goes to *out_port. A port in
 * use is MB_EEXIST with a text that says so. */
int mb_grpc_server_listen(struct mb_grpc_server *srv, const char *addr, int *out_port,
                          struct mb_err *err);

void mb_grpc_stream_accept(struct mb_grpc_stream *s, const ProtobufCMessageDescriptor *recv_desc,
                           const struct mb_grpc_stream_ops *ops, void *arg);

void mb_grpc_reply(struct mb_grpc_req *req, const ProtobufCMessage *reply);
void mb_grpc_reply_error(struct mb_grpc_req *req, int status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* For handlers that answer later: runs once if the client went away first or unary_deadline_ms
 * passed; answering stays a duty (it frees the request), the answer goes nowhere. */
void mb_grpc_req_on_cancel(struct mb_grpc_req *req, void (*cb)(void *arg), void *arg);
const char *mb_grpc_req_metadata(const struct mb_grpc_req *req, const char *key); /* or NULL */
const char *mb_grpc_req_peer(const struct mb_grpc_req *req); /* "ipv4:1.2.3.4:5", borrowed */

#endif
