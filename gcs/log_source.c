/*
 * A driver's log is a file here and read in place, unless the head before us, on another node,
 * started it. A rank's log is on the node that the gang's
 * record in the KV names; pieces of it are asked for with ReadLog (proto/mobula/agent.proto), one
 * at a time, when the client has taken the former: so neither the head nor the wire holds more.
 *
 *  1. No file yet, no gang yet: an empty log; the reader asks again, a node at most all MISSING_MS.
 *  2. The gang begins a new attempt: what is left of the former one is read, then its log from 0.
 *  3. A node that is dead, or does not answer: MB_EUNAVAIL that names it.
 *  4. A rank that the gang does not have, or a job that ended without a gang: MB_ENOENT.
 *  5. Closed while a call is in flight: the call is cancelled, its end frees the source.
 */
#include "gcs/log_source.h"

#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/logfile.h"
#include "base/str.h"
#include "gcs/services.h"
#include "proto/mobula/agent.pb-c.h"

enum {
    PIECE_BYTES = 64 << 10,
    REMOTE_BYTES = 256 << 10,
    WAIT_MS = 2000,
    CALL_MS = 10000,
    MISSING_MS = 100,
    NAME_BYTES = 256, /* logs/job-driver-ID.log with the longest id */
    TIMES_MAX = 4096
};

static const char read_method[] = "/mobula.v1.NodeAgent/ReadLog";

struct log_source {
    struct mb_head *h;
    char *job_id;
    int64_t rank;
    int is_remote;
    struct log_start start;
    int started; /* start is resolved: offset counts */
    uint64_t offset, first, size;
    struct mb_logfile file; /* of a driver; fd -1: not open */
    /* of a rank, or of a driver elsewhere */
    Mobula__V1__ReadLogReply *reply; /* the newest piece; owned */
    size_t used;                     /* of it */
    struct mb_grpc_call *call;
    struct mb_err failure;
    char name[NAME_BYTES]; /* of the file that is being read */
    uint64_t missing_until_ms;
    int at_end, closed, rechecking;
    void (*ready)(void *arg);
    void *arg;
};

/* ---- where a rank's log is ---- */

struct place {
    struct head_node *node;
    char name[NAME_BYTES];
};

/* 1: found; 0: no gang yet; negative: none, or its node is gone. */
static int find_rank(struct mb_head *h, const char *job_id, int64_t rank, struct place *out,
                     struct mb_err *err)
{
    char key[300];
    struct mb_blob value;
    json_t *record, *nodes;
    const char *pg, *hex;
    uint8_t id[MB_NODE_ID_BYTES];
    int64_t world;
    int rc;

    snprintf(key, sizeof key, "gang:%s", job_id);
    if (!mb_tables_get(h->store, MB_TABLES_KV, mb_blob_str("mobula"), mb_blob_str(key), &value)) {
        const struct head_job *job = head_job_find(h, job_id);

        return job && mb_job_is_terminal(job->state)
                   ? mb_err_set(err, MB_ENOENT, "job %s has no ranks", job_id)
                   : 0;
    }
    record = json_loadb(value.p, value.n, 0, NULL);
    nodes = json_object_get(record, "nodes");
    pg = json_string_value(json_object_get(record, "placement_group_id"));
    world = json_integer_value(json_object_get(record, "world_size"));
    if (record && rank >= world) {
        rc = mb_err_set(err, MB_ENOENT, "job %s has no rank %lld, its world size is %lld", job_id,
                        (long long)rank, (long long)world);
    } else if (!pg || json_array_size(nodes) == 0 || world < (int64_t)json_array_size(nodes)) {
        rc = 0;
    } else {
        size_t i = (size_t)(rank / (world / (int64_t)json_array_size(nodes)));
        hex = json_string_value(json_array_get(nodes, i));
        out->node = hex && mb_unhex(hex, id, sizeof id) == 0 ? head_node_find_id(h, id) : NULL;
        snprintf(out->name, sizeof out->name, "gangs/%.8s-%lld/rank-%lld.log", pg,
                 (long long)json_integer_value(json_object_get(record, "attempt")),
                 (long long)rank);
        rc = 1;
        if (!out->node || !head_node_alive(out->node))
            rc = mb_err_set(err, MB_EUNAVAIL, "the log of rank %lld is on node %.8s, which is gone",
                            (long long)rank, hex ? hex : "");
    }
    json_decref(record);
    return rc;
}

/* A driver that the head before us started runs on, and its log is on its node. 1: there; 0: here,
 * or nowhere yet; negative: that node is gone. */
static int find_driver(struct mb_head *h, const char *job_id, struct place *out, struct mb_err *err)
{
    const struct head_job *job = head_job_find(h, job_id);
    const char *hex = job ? json_string_value(json_object_get(job->info, "driver_node_id")) : NULL;
    uint8_t id[MB_NODE_ID_BYTES];

    if (!hex || strcmp(hex, h->runner->node_id_hex(h->runner->self)) == 0 ||
        mb_unhex(hex, id, sizeof id) != 0)
        return 0;
    out->node = head_node_find_id(h, id);
    snprintf(out->name, sizeof out->name, "logs/job-driver-%s.log", job_id);
    if (out->node && head_node_alive(out->node))
        return 1;
    return mb_err_set(err, MB_EUNAVAIL, "the driver's log is on node %.8s, which is gone", hex);
}

/* Is the log of a driver to be asked for at another node? What is here counts first: this node may
 * have been that one, under the id it had before. */
static int is_elsewhere(struct mb_head *h, const char *job_id)
{
    struct place unused;
    struct mb_err err = {0};
    char *path = NULL;
    int rc = h->runner->log_path(h->runner->self, job_id, &path, &err);

    mb_free(path);
    return rc == MB_ENOENT && find_driver(h, job_id, &unused, &err) != 0;
}

static int find_log(struct mb_head *h, const char *job_id, int64_t rank, struct place *out,
                    struct mb_err *err)
{
    return rank >= 0 ? find_rank(h, job_id, rank, out, err) : find_driver(h, job_id, out, err);
}

/* ---- a log on another node ---- */

static void drop_reply(struct log_source *s)
{
    if (s->reply)
        mobula__v1__read_log_reply__free_unpacked(s->reply, NULL);
    s->reply = NULL;
    s->used = 0;
}

static void free_source(struct log_source *s)
{
    drop_reply(s);
    mb_logfile_close(&s->file);
    mb_free(s->job_id);
    mb_free(s);
}

static void take_reply(struct log_source *s, const Mobula__V1__ReadLogReply *reply)
{
    s->first = reply->first_offset;
    s->size = reply->size;
    if (!s->started || reply->data.len > 0 || reply->offset < s->offset)
        s->offset = reply->offset;
    s->started = 1;
    s->at_end = reply->data.len == 0;
    if (s->at_end)
        return;
    s->reply = (Mobula__V1__ReadLogReply *)mb_wire_copy(&reply->base);
    if (!s->reply)
        mb_err_set(&s->failure, MB_ENOMEM, "out of memory");
}

static void on_piece(void *arg, int status, const char *detail, const ProtobufCMessage *reply)
{
    struct log_source *s = arg;

    s->call = NULL;
    if (s->closed) {
        free_source(s);
        return;
    }
    if (s->rechecking) {
        s->rechecking = 0; /* what it would have said may be too old */
    } else if (status == MB_GRPC_OK) {
        take_reply(s, (const Mobula__V1__ReadLogReply *)reply);
    } else if (status == MB_GRPC_NOT_FOUND) { /* the rank is about to start */
        s->at_end = 1;
        s->missing_until_ms = mb_mono_ms() + MISSING_MS;
    } else {
        mb_err_set(&s->failure, MB_EUNAVAIL, "the node of the log does not answer: %s",
                   detail ? detail : "");
    }
    s->ready(s->arg);
}

static int fetch(struct log_source *s, const struct place *p, struct mb_err *err)
{
    Mobula__V1__ReadLogRequest q = MOBULA__V1__READ_LOG_REQUEST__INIT;
    struct mb_grpc_channel *channel = head_node_channel(s->h, p->node, err);

    if (!channel)
        return err->code;
    q.name = (char *)(uintptr_t)p->name;
    q.max_bytes = REMOTE_BYTES;
    q.offset = s->started ? s->offset : s->start.offset;
    if (!s->started && s->start.has_tail) {
        q.tail_lines = s->start.tail_lines;
        q.offset = UINT64_MAX >> 1; /* tail 0: the end */
    }
    if (!s->started)
        q.since_unix_ms = s->start.since_unix_ms;
    else if (s->at_end)
        q.wait_ms = WAIT_MS;
    snprintf(s->name, sizeof s->name, "%s", p->name);
    return mb_grpc_unary(channel, read_method, &q.base, &mobula__v1__read_log_reply__descriptor,
                         CALL_MS, on_piece, s, &s->call, err);
}

static int peek_remote(struct log_source *s, size_t max, struct log_piece *out, struct mb_err *err)
{
    struct place p;
    int rc;

    if (s->failure.code != 0) {
        *err = s->failure;
        return err->code;
    }
    if (s->reply) {
        size_t left = s->reply->data.len - s->used;
        out->data = s->reply->data.data + s->used;
        out->n = left < max ? left : max;
        out->offset = s->offset;
        return 0;
    }
    out->at_end = s->at_end;
    out->offset = s->offset;
    if (s->call || mb_mono_ms() < s->missing_until_ms)
        return 0;
    rc = find_log(s->h, s->job_id, s->rank, &p, err);
    if (rc == 0)
        out->at_end = 1;
    if (rc <= 0)
        return rc;
    if (s->at_end && strcmp(p.name, s->name) != 0) { /* a new attempt */
        s->offset = 0;
        s->at_end = out->at_end = 0;
    }
    return fetch(s, &p, err);
}

/* ---- a driver's log ---- */

static int open_file(struct log_source *s, struct mb_err *err)
{
    char *path = NULL;
    int rc = s->h->runner->log_path(s->h->runner->self, s->job_id, &path, err);

    if (rc == 0)
        rc = mb_logfile_open(path, &s->file, err);
    mb_free(path);
    if (rc != 0)
        s->file = (struct mb_logfile){-1, -1};
    return rc;
}

static int peek_file(struct log_source *s, size_t max, struct log_piece *out, struct mb_err *err)
{
    static char piece[PIECE_BYTES]; /* loop thread only: a thousand idle readers cost nothing */
    int rc = s->file.fd < 0 ? open_file(s, err) : 0;
    long n;

    if (rc == MB_ENOENT) {
        out->at_end = 1; /* a job that never wrote a log has an empty one */
        return 0;
    }
    if (rc != 0)
        return rc;
    if (!s->started) {
        s->offset = s->start.since_unix_ms ? mb_logfile_since(&s->file, s->start.since_unix_ms)
                    : s->start.has_tail    ? mb_logfile_last_lines(&s->file, s->start.tail_lines)
                                           : s->start.offset;
        if (s->offset > mb_logfile_size(&s->file))
            s->offset = mb_logfile_size(&s->file);
        s->started = 1;
    }
    n = mb_logfile_read(&s->file, &s->offset, piece, max < sizeof piece ? max : sizeof piece);
    if (n < 0)
        return mb_err_set(err, MB_EIO, "the log of %s cannot be read", s->job_id);
    if (n == 0 || s->size == 0) {
        s->size = mb_logfile_size(&s->file);
        s->first = mb_logfile_first(&s->file);
    }
    out->data = piece;
    out->n = (size_t)n;
    out->offset = s->offset;
    out->at_end = n == 0;
    return 0;
}

/* ---- both ---- */

int head_log_open(struct mb_head *h, const char *job_id, int64_t rank,
                  const struct log_start *start, void (*ready)(void *arg), void *arg,
                  struct log_source **out, struct mb_err *err)
{
    struct log_source *s = mb_calloc(1, sizeof *s);

    if (!s || !(s->job_id = mb_strdup(job_id))) {
        mb_free(s);
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    s->h = h;
    s->rank = rank;
    s->is_remote = rank >= 0 || is_elsewhere(h, job_id);
    s->start = *start;
    s->file = (struct mb_logfile){-1, -1};
    s->ready = ready;
    s->arg = arg;
    *out = s;
    return 0;
}

int head_log_peek(struct log_source *s, size_t max, struct log_piece *out, struct mb_err *err)
{
    *out = (struct log_piece){.offset = s->offset};
    return s->is_remote ? peek_remote(s, max, out, err) : peek_file(s, max, out, err);
}

void head_log_advance(struct log_source *s, size_t n)
{
    s->offset += n;
    s->used += n;
    if (s->reply && s->used == s->reply->data.len)
        drop_reply(s);
}

void head_log_recheck(struct log_source *s)
{
    s->at_end = 0;
    s->missing_until_ms = 0;
    if (s->call && !s->rechecking) {
        s->rechecking = 1;
        mb_grpc_call_cancel(s->call);
    }
}

uint64_t head_log_first(const struct log_source *s)
{
    return s->first;
}

uint64_t head_log_size(const struct log_source *s)
{
    return s->size;
}

void head_log_close(struct log_source *s)
{
    if (!s)
        return;
    s->closed = 1;
    if (s->call)
        mb_grpc_call_cancel(s->call);
    else
        free_source(s);
}

/* ---- times ---- */

struct asked {
    log_times_cb cb;
    void *arg;
};

static void on_times(void *arg, int status, const char *detail, const ProtobufCMessage *message)
{
    struct asked *a = arg;
    const Mobula__V1__ReadLogReply *reply = (const Mobula__V1__ReadLogReply *)message;
    struct log_times times = {0};
    struct mb_err err = {0};

    if (status == MB_GRPC_OK)
        times = (struct log_times){reply->offset, reply->time_offsets, reply->times_unix_ms,
                                   reply->n_time_offsets};
    else if (status != MB_GRPC_NOT_FOUND)
        mb_err_set(&err, MB_EUNAVAIL, "the node of the log does not answer: %s",
                   detail ? detail : "");
    a->cb(a->arg, &times, &err);
    mb_free(a);
}

static void remote_times(struct mb_head *h, const char *job_id, int64_t rank, uint64_t from,
                         log_times_cb cb, void *arg)
{
    Mobula__V1__ReadLogRequest q = MOBULA__V1__READ_LOG_REQUEST__INIT;
    struct asked *a = mb_calloc(1, sizeof *a);
    struct log_times none = {0};
    struct mb_grpc_channel *channel;
    struct place p;
    struct mb_err err = {0};
    int rc = a ? find_log(h, job_id, rank, &p, &err) : mb_err_set(&err, MB_ENOMEM, "no memory");

    channel = rc == 1 ? head_node_channel(h, p.node, &err) : NULL;
    if (channel) {
        *a = (struct asked){cb, arg};
        q.name = p.name;
        q.offset = from;
        q.times = 1;
        if (mb_grpc_unary(channel, read_method, &q.base, &mobula__v1__read_log_reply__descriptor,
                          CALL_MS, on_times, a, NULL, &err) == 0)
            return;
    }
    mb_free(a);
    cb(arg, &none, &err);
}

void head_log_times(struct mb_head *h, const char *job_id, int64_t rank, uint64_t from,
                    log_times_cb cb, void *arg)
{
    static struct mb_logfile_time found[TIMES_MAX]; /* loop thread only */
    static uint64_t offsets[TIMES_MAX], unix_ms[TIMES_MAX];
    struct log_times times = {.offset = from, .offsets = offsets, .unix_ms = unix_ms};
    struct mb_logfile f;
    struct mb_err err = {0};
    char *path = NULL;
    int rc;

    if (rank >= 0 || is_elsewhere(h, job_id)) {
        remote_times(h, job_id, rank, from, cb, arg);
        return;
    }
    rc = h->runner->log_path(h->runner->self, job_id, &path, &err);
    if (rc == 0)
        rc = mb_logfile_open(path, &f, &err);
    if (rc == 0) {
        times.n = mb_logfile_times(&f, from, found, TIMES_MAX);
        mb_logfile_close(&f);
    }
    for (size_t i = 0; i < times.n; i++) {
        offsets[i] = found[i].offset;
        unix_ms[i] = found[i].unix_ms;
    }
    if (rc == MB_ENOENT)
        err = (struct mb_err){0};
    cb(arg, &times, &err);
    mb_free(path);
}
