/*
 * A driver's log is a file here and read in place, unless it runs on another node. A rank's log is
 * on the node that the gang's record in the KV names; pieces of it are asked for with ReadLog
 * (proto/mobula/agent.proto), one at a time, when the client has taken the former: so neither the
 * head nor the wire holds more.
 *
 *  1. No file yet, no gang yet: an empty log; the reader asks again, a node at most all MISSING_MS.
 *  2. The gang begins a new attempt: what is left of the former one is read, asked for after the
 *     new one is known, then its log from 0. Is that of the former one lost, the new one follows.
 *  3. A node that does not answer: MB_EUNAVAIL that names it. One that is dead, or has no such file
 *     any more: the log is read from the job's store (log_store.c), from the byte where we are;
 * while the job runs, a new attempt is looked for at its end. No store: MB_EUNAVAIL that says so.
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
#include "gcs/health.h"
#include "gcs/log_place.h"
#include "gcs/log_store.h"
#include "gcs/services.h"
#include "proto/mobula/agent.pb-c.h"

enum {
    PIECE_BYTES = 64 << 10,
    REMOTE_BYTES = 256 << 10,
    SMALL_BYTES = 4 << 10,
    HELD_BYTES = 8 << 20, /* of all readers' pieces from other nodes; then they are small ones */
    WAIT_MS = 2000,
    CALL_MS = 10000,
    MISSING_MS = 100,
    SILENT_MS = 500, /* until a node that did not answer is asked again */
    TIMES_MAX = 4096
};

/* A node that was found silent here first is dead before its reader fails, whoever keeps its second
 * channel open: only then the log is looked for in the store. */
_Static_assert(LOG_SILENT_MAX_MS >= MB_HEALTH_DOUBT_MAX_MS + MB_HEALTH_BOUND_MS,
               "a log is given up while its node may still be declared dead");

static const char read_method[] = "/mobula.v1.NodeAgent/ReadLog";

struct log_source {
    struct mb_head *h;
    char *job_id;
    int64_t rank;
    struct log_attempt attempt;
    int saw_next; /* what is asked for now is asked for with another attempt known */
    int is_remote;
    struct log_start start;
    int started; /* start is resolved: offset counts */
    uint64_t offset, first, size;
    struct mb_logfile file; /* of a driver; fd -1: not open */
    /* of a rank, or of a driver elsewhere */
    Mobula__V1__ReadLogReply *reply; /* the newest piece; owned */
    size_t used;                     /* of it */
    size_t held;                     /* counted for it in log_held_bytes, also while it is asked */
    struct mb_grpc_call *call;
    struct mb_err failure;
    uint64_t missing_until_ms;
    int at_end, closed, rechecking;
    int is_missing; /* its node lives and has no such file */
    int is_patient;
    uint64_t silent_ms;      /* since when its node does not answer; 0: it does */
    struct log_store *store; /* of a log whose node is gone */
    struct log_origin origin;
    uint64_t look_again_ms;
    void (*ready)(void *arg);
    void *arg;
};

/* Is the log of a driver to be asked for at another node? If that node is gone, what is here
 * counts: this node may have been that one, under the id it had before. */
static int is_elsewhere(struct mb_head *h, const char *job_id)
{
    const struct log_whose driver = {.rank = -1};
    struct log_place unused;
    struct mb_err err = {0};
    char *path = NULL;
    int found = head_log_place(h, job_id, &driver, &unused, &err), rc;

    if (found == LOG_ON_NODE || found == LOG_NOWHERE)
        return found == LOG_ON_NODE;
    rc = h->runner->log_path(h->runner->self, job_id, &path, &err);
    mb_free(path);
    return rc == MB_ENOENT;
}

/* ---- attempts ---- */

static struct log_whose whose_log(const struct log_source *s)
{
    return (struct log_whose){s->rank, s->attempt.number};
}

/* Once it has a place, the log that is read is that attempt's. */
static int find_place(struct log_source *s, struct log_place *p, struct mb_err *err)
{
    struct log_whose whose = whose_log(s);
    int rc = head_log_place(s->h, s->job_id, &whose, p, err);

    if (rc >= 0 && p->attempt > 0) {
        s->attempt.number = p->attempt;
        s->attempt.newest = p->newest_attempt;
        s->attempt.world_size = p->world_size;
    }
    return rc;
}

static int64_t next_attempt(const struct log_source *s)
{
    struct log_whose whose = whose_log(s);

    return s->start.is_one || whose.attempt == 0 ? 0
                                                 : head_log_next_attempt(s->h, s->job_id, &whose);
}

static void begin_attempt(struct log_source *s, int64_t number, const char *lost)
{
    head_log_store_close(s->store);
    s->store = NULL;
    s->attempt = (struct log_attempt){.number = number};
    snprintf(s->attempt.lost, sizeof s->attempt.lost, "%s", lost);
    s->started = 1;
    s->offset = s->first = s->size = 0;
    s->at_end = s->is_missing = s->saw_next = 0;
    s->missing_until_ms = s->silent_ms = 0;
}

/* ---- a log on another node ---- */

/* n bytes are asked for, or came. The head may be gone when a cancelled call ends. */
static void hold(struct log_source *s, size_t n)
{
    if (!s->closed)
        s->h->log_held_bytes += n - s->held;
    s->held = n;
}

static void drop_reply(struct log_source *s)
{
    hold(s, 0);
    if (s->reply)
        mobula__v1__read_log_reply__free_unpacked(s->reply, NULL);
    s->reply = NULL;
    s->used = 0;
}

static void free_source(struct log_source *s)
{
    drop_reply(s);
    head_log_store_close(s->store);
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
    s->is_missing = 0;
    s->silent_ms = 0;
    s->at_end = reply->data.len == 0;
    if (s->at_end)
        return;
    hold(s, reply->data.len);
    s->reply = (Mobula__V1__ReadLogReply *)mb_wire_copy(&reply->base);
    if (!s->reply)
        mb_err_set(&s->failure, MB_ENOMEM, "out of memory");
}

/* 1: the node is asked again in a moment, or is declared dead by then. */
static int is_patient(struct log_source *s)
{
    uint64_t now_ms = mb_mono_ms();

    if (!s->is_patient || (s->silent_ms > 0 && now_ms - s->silent_ms > LOG_SILENT_MAX_MS))
        return 0;
    if (s->silent_ms == 0)
        s->silent_ms = now_ms;
    s->at_end = 0;
    s->missing_until_ms = now_ms + SILENT_MS;
    return 1;
}

static void on_piece(void *arg, int status, const char *detail, const ProtobufCMessage *reply)
{
    struct log_source *s = arg;

    s->call = NULL;
    if (s->closed) {
        free_source(s);
        return;
    }
    hold(s, 0);
    if (s->rechecking) {
        s->rechecking = 0; /* what it would have said may be too old */
    } else if (status == MB_GRPC_OK) {
        take_reply(s, (const Mobula__V1__ReadLogReply *)reply);
    } else if (status == MB_GRPC_NOT_FOUND) { /* the rank is about to start */
        s->at_end = s->is_missing = 1;
        s->missing_until_ms = mb_mono_ms() + MISSING_MS;
    } else if (!is_patient(s)) {
        mb_err_set(&s->failure, MB_EUNAVAIL, "the node of the log does not answer: %s",
                   detail ? detail : "");
    }
    s->ready(s->arg);
}

static int fetch(struct log_source *s, const struct log_place *p, struct mb_err *err)
{
    Mobula__V1__ReadLogRequest q = MOBULA__V1__READ_LOG_REQUEST__INIT;
    struct mb_grpc_channel *channel = head_node_channel(s->h, p->node, err);
    int rc;

    if (!channel)
        return err->code;
    q.name = (char *)(uintptr_t)p->name;
    /* Who is at the end waits, perhaps for long, and for little. */
    q.max_bytes = s->at_end || s->h->log_held_bytes >= HELD_BYTES ? SMALL_BYTES : REMOTE_BYTES;
    q.offset = s->started ? s->offset : s->start.offset;
    if (!s->started && s->start.has_tail) {
        q.tail_lines = s->start.tail_lines;
        q.offset = UINT64_MAX >> 1; /* tail 0: the end */
    }
    if (!s->started)
        q.since_unix_ms = s->start.since_unix_ms;
    else if (s->at_end)
        q.wait_ms = WAIT_MS;
    rc = mb_grpc_unary(channel, read_method, &q.base, &mobula__v1__read_log_reply__descriptor,
                       CALL_MS, on_piece, s, &s->call, err);
    if (rc == 0)
        hold(s, q.max_bytes);
    return rc;
}

static int job_has_ended(const struct log_source *s)
{
    const struct head_job *job = head_job_find(s->h, s->job_id);

    return !job || mb_job_is_terminal(job->state);
}

/* ---- a log whose node is gone ---- */

static void on_store_ready(void *arg)
{
    struct log_source *s = arg;

    s->ready(s->arg);
}

/* From here on it is read from the store, where we are in it. */
static int to_store(struct log_source *s, const struct log_place *p, struct mb_err *err)
{
    struct log_store_opts opts = {.url = p->url,
                                  .prefix = p->prefix,
                                  .start = s->start,
                                  .may_be_empty = p->node != NULL,
                                  .ready = on_store_ready,
                                  .arg = s};
    int rc;

    if (p->url[0] == '\0')
        return head_log_place_lost(p, s->rank, err);
    if (s->started)
        opts.start = (struct log_start){.offset = s->offset};
    head_log_store_close(s->store);
    s->store = NULL;
    rc = head_log_store_open(s->h, &opts, &s->store, err);
    if (rc != 0)
        return rc;
    s->origin.number++;
    s->origin.is_forgotten = opts.may_be_empty;
    snprintf(s->origin.node_hex, sizeof s->origin.node_hex, "%s", p->node_hex);
    snprintf(s->origin.url, sizeof s->origin.url, "%.1700s/%s", p->url, p->prefix);
    s->at_end = 0;
    return 0;
}

/* ---- both of these ---- */

/* The end of an attempt's log; if another attempt is known, that is next. What the node wrote until
 * then is asked for once more before; a store says nothing new. */
static void pass_end(struct log_source *s, struct log_piece *out)
{
    int64_t next = next_attempt(s);

    if (next == 0)
        return;
    if (s->saw_next || s->store)
        begin_attempt(s, next, "");
    else
        s->saw_next = 1;
    s->at_end = out->at_end = 0;
    out->offset = s->offset;
}

/* The rest of an attempt's log is nowhere: 0 if another one follows, else the error. */
static int pass_lost(struct log_source *s, struct log_piece *out, const struct mb_err *why)
{
    int64_t next = next_attempt(s);

    if (next == 0)
        return why->code;
    begin_attempt(s, next, why->text);
    *out = (struct log_piece){.offset = 0};
    return 0;
}

/* The end of what the store has, and the job goes on: is its node back? */
static int look_for_node(struct log_source *s, struct log_piece *out, struct mb_err *err)
{
    struct log_place p;
    int rc;

    if (job_has_ended(s))
        return 0;
    rc = find_place(s, &p, err);
    if (rc < 0 || rc == LOG_NOWHERE || rc == LOG_GONE)
        return rc < 0 ? rc : 0;
    out->at_end = 0;
    head_log_store_close(s->store);
    s->store = NULL;
    s->at_end = 0;
    return fetch(s, &p, err);
}

/* Afterwards s->store is NULL if the log goes on elsewhere. */
static int peek_store(struct log_source *s, size_t max, struct log_piece *out, struct mb_err *err)
{
    int rc = head_log_store_peek(s->store, max, out, err);

    if (rc != 0)
        return rc == MB_EUNAVAIL ? pass_lost(s, out, err) : rc;
    s->offset = out->offset;
    s->at_end = out->at_end;
    s->started |= out->n > 0 || out->at_end;
    s->first = head_log_store_first(s->store);
    s->size = s->origin.complete_to = head_log_store_end(s->store);
    if (!out->at_end || (!job_has_ended(s) && mb_mono_ms() < s->look_again_ms))
        return 0;
    s->look_again_ms = mb_mono_ms() + MISSING_MS;
    pass_end(s, out);
    return s->store ? look_for_node(s, out, err) : 0;
}

/* Where the node, or the store, is asked for the next piece. */
static int ask(struct log_source *s, struct log_piece *out, struct mb_err *err)
{
    int is_forgotten = s->is_missing && job_has_ended(s); /* by its node, as old ones are */
    struct log_place p;
    int rc = find_place(s, &p, err);

    while (rc == LOG_GONE && p.url[0] == '\0') {
        head_log_place_lost(&p, s->rank, err);
        rc = pass_lost(s, out, err);
        rc = rc == 0 ? find_place(s, &p, err) : rc;
    }
    if (rc == LOG_NOWHERE)
        out->at_end = 1;
    if (rc < 0 || rc == LOG_NOWHERE)
        return rc;
    if (rc == LOG_GONE || (is_forgotten && p.url[0] != '\0')) {
        out->at_end = 0;
        return to_store(s, &p, err);
    }
    return mb_mono_ms() < s->missing_until_ms ? 0 : fetch(s, &p, err);
}

static int peek_remote(struct log_source *s, size_t max, struct log_piece *out, struct mb_err *err)
{
    int rc = 0;

    if (s->failure.code != 0) {
        *err = s->failure;
        return err->code;
    }
    if (s->store)
        rc = peek_store(s, max, out, err);
    if (rc != 0 || s->store)
        return rc;
    if (s->reply) {
        size_t left = s->reply->data.len - s->used;
        out->data = s->reply->data.data + s->used;
        out->n = left < max ? left : max;
        out->offset = s->offset;
        return 0;
    }
    out->at_end = s->at_end;
    out->offset = s->offset;
    if (s->call || (mb_mono_ms() < s->missing_until_ms && !(s->is_missing && job_has_ended(s))))
        return 0;
    if (s->at_end)
        pass_end(s, out);
    return ask(s, out, err);
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
    s->attempt.number = start->attempt;
    s->file = (struct mb_logfile){-1, -1};
    s->ready = ready;
    s->arg = arg;
    *out = s;
    return 0;
}

int head_log_peek(struct log_source *s, size_t max, struct log_piece *out, struct mb_err *err)
{
    *out = (struct log_piece){.offset = s->offset};
    if (!s->is_remote && s->file.fd < 0) /* it was opened before the driver had its place */
        s->is_remote = is_elsewhere(s->h, s->job_id);
    return s->is_remote ? peek_remote(s, max, out, err) : peek_file(s, max, out, err);
}

void head_log_advance(struct log_source *s, size_t n)
{
    s->offset += n;
    if (s->store) {
        head_log_store_advance(s->store, n);
        return;
    }
    s->used += n;
    if (s->reply && s->used == s->reply->data.len)
        drop_reply(s);
}

void head_log_recheck(struct log_source *s)
{
    s->at_end = 0;
    s->missing_until_ms = 0;
    s->look_again_ms = 0;
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

void head_log_be_patient(struct log_source *s)
{
    s->is_patient = 1;
}

int head_log_origin_text(const struct log_origin *o, char *buf, size_t max)
{
    return snprintf(
        buf, max,
        "[mobula: node %s, which had this log, %s: it is read from %.700s, which has it "
        "up to byte %llu; what was written after that is lost]\n",
        o->node_hex, o->is_forgotten ? "has removed it" : "is gone", o->url,
        (unsigned long long)o->complete_to);
}

const struct log_attempt *head_log_attempt(const struct log_source *s)
{
    return &s->attempt;
}

const struct log_origin *head_log_origin(const struct log_source *s)
{
    return s->store ? &s->origin : NULL;
}

void head_log_close(struct log_source *s)
{
    if (!s)
        return;
    hold(s, 0);
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

static void remote_times(struct mb_head *h, const char *job_id, int64_t rank,
                         const struct log_start *from, log_times_cb cb, void *arg)
{
    const struct log_whose whose = {rank, from->attempt};
    Mobula__V1__ReadLogRequest q = MOBULA__V1__READ_LOG_REQUEST__INIT;
    struct asked *a = mb_calloc(1, sizeof *a);
    struct log_times none = {0};
    struct mb_grpc_channel *channel;
    struct log_place p;
    struct mb_err err = {0};
    int rc =
        a ? head_log_place(h, job_id, &whose, &p, &err) : mb_err_set(&err, MB_ENOMEM, "no memory");

    if (rc == LOG_GONE && p.url[0] == '\0')
        head_log_place_lost(&p, rank, &err);
    channel = rc == LOG_ON_NODE ? head_node_channel(h, p.node, &err) : NULL;
    if (channel) {
        *a = (struct asked){cb, arg};
        q.name = p.name;
        q.offset = from->offset;
        q.times = 1;
        if (mb_grpc_unary(channel, read_method, &q.base, &mobula__v1__read_log_reply__descriptor,
                          CALL_MS, on_times, a, NULL, &err) == 0)
            return;
    }
    mb_free(a);
    cb(arg, &none, &err);
}

void head_log_times(struct mb_head *h, const char *job_id, int64_t rank,
                    const struct log_start *from, log_times_cb cb, void *arg)
{
    static struct mb_logfile_time found[TIMES_MAX]; /* loop thread only */
    static uint64_t offsets[TIMES_MAX], unix_ms[TIMES_MAX];
    struct log_times times = {.offset = from->offset, .offsets = offsets, .unix_ms = unix_ms};
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
        times.n = mb_logfile_times(&f, from->offset, found, TIMES_MAX);
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
