/*
 * The sockets between workers and their agent (worker/report.h).
 *
 * The supervisor keeps our end of each socket for the next agent. So a frame is looked at in place
 * (MSG_PEEK) and only taken out once it has been handled: an agent that dies in between leaves it
 * for its successor, and every message is handled at least once.
 *
 *  1. An incomplete frame: polling stops (it would spin) and the tick looks again.
 *  2. A frame larger than what the socket can hold is collected in `in`, outside this guarantee.
 *  3. Bytes that are no frame: the socket is closed; the rank goes on, deaf and mute, and the log
 *     says so. Ending it would lose what it computes.
 *  4. A worker that is gone when something is sent to it: that is dropped; the socket stays until
 *     everything in it was read.
 *  5. A worker that does not read: frames to it wait in `out`, at most 4 MiB, then it is closed.
 */
#include "agent/gang_run.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/log.h"

enum { PEEK_MAX = MB_REPORT_FRAME_MAX + 4, SOCKET_HOLDS = 100 << 10, OUT_MAX = 4 << 20 };

static void on_poll(uv_poll_t *poll, int status, int events);

static void poll_for(struct mb_gang_rank *rank, int events)
{
    if (rank->poll == NULL || events == rank->polling)
        return;
    rank->polling = events;
    if (events == 0)
        uv_poll_stop(rank->poll);
    else
        uv_poll_start(rank->poll, events, on_poll);
}

static void want(struct mb_gang_rank *rank)
{
    poll_for(rank, (rank->is_partial ? 0 : UV_READABLE) | (rank->out.len > 0 ? UV_WRITABLE : 0));
}

static void on_closed(uv_handle_t *h)
{
    mb_free(h);
}

void mb_gang_report_close(struct mb_gang_rank *rank)
{
    if (rank->poll != NULL) {
        uv_poll_stop(rank->poll);
        uv_close((uv_handle_t *)rank->poll, on_closed);
        rank->poll = NULL;
    }
    if (rank->fd >= 0)
        close(rank->fd);
    rank->fd = -1;
    rank->polling = 0;
    mb_buf_close(&rank->in);
    mb_buf_close(&rank->out);
}

/* ---- messages ---- */

static int saved(struct mb_gang_rank *rank, const struct mb_report *m)
{
    struct mb_gang_run *r = rank->run;
    struct mb_upload_file *files;
    uint64_t bytes = 0;
    struct mb_err err = {0};
    int rc;

    for (size_t i = 0; i < m->n_files; i++)
        bytes += m->files[i].size_bytes;
    mb_info("gang", "job=%s rank=%u: saved iteration=%lld files=%zu bytes=%llu", r->job_id,
            rank->rank, (long long)m->iteration, m->n_files, (unsigned long long)bytes);
    mb_gang_deadline_saved(rank, m->iteration, bytes, m->has_times ? m->stall_ms : -1);
    mb_control_saved(r, rank->rank, m->iteration, bytes);
    if (r->upload == NULL)
        return MB_OK;
    files = mb_calloc(m->n_files, sizeof(*files));
    if (files == NULL)
        return MB_ENOMEM;
    for (size_t i = 0; i < m->n_files; i++)
        files[i] = (struct mb_upload_file){.path = m->files[i].path,
                                           .size_bytes = m->files[i].size_bytes,
                                           .crc64nvme = m->files[i].crc64nvme,
                                           .has_crc = 1};
    rc = mb_upload_saved(r->upload, m->iteration, rank->rank, m->text != NULL ? m->text : "", files,
                         m->n_files, &err);
    mb_free(files);
    if (rc != MB_OK) {
        struct mb_upload_status status = {.iteration = m->iteration, .error = err.text};

        mb_error("gang", "job=%s rank=%u: iteration %lld cannot be uploaded: %s", r->job_id,
                 rank->rank, (long long)m->iteration, err.text);
        mb_control_upload(r, &status);
    } else if (mb_upload_is_busy(r->upload)) {
        mb_gang_run_event(r, MB_GANG_EV_UPLOADS_BUSY, NULL);
    }
    return MB_OK;
}

static void handle(struct mb_gang_rank *rank, struct mb_report *m)
{
    struct mb_gang_run *r = rank->run;

    switch (m->type) {
    case MB_REPORT_HELLO:
        if (m->abi != MB_REPORT_ABI)
            mb_warn("gang", "rank=%u speaks version %u of the report protocol, this agent %d",
                    rank->rank, m->abi, MB_REPORT_ABI);
        break;
    case MB_REPORT_ENDPOINT:
        mb_free(rank->endpoint);
        rank->endpoint = m->text;
        m->text = NULL;
        mb_gang_store_save(r);
        mb_control_endpoint(r, rank);
        break;
    case MB_REPORT_PROGRESS:
        rank->progress = *m;
        rank->progress.text = NULL;
        rank->progress.files = NULL;
        rank->progress.n_files = 0;
        rank->progress.endpoints = NULL;
        rank->progress.n_endpoints = 0;
        mb_gang_deadline_progress(r, m->iteration);
        mb_control_progress(r, rank);
        break;
    case MB_REPORT_SAVED:
        if (saved(rank, m) != MB_OK)
            mb_error("gang", "rank=%u: no memory to note a save", rank->rank);
        break;
    case MB_REPORT_DONE:
        mb_info("gang", "job=%s rank=%u: done iteration=%lld", r->job_id, rank->rank,
                (long long)m->iteration);
        break;
    case MB_REPORT_FAILED:
        mb_free(rank->cause);
        rank->cause = m->text;
        m->text = NULL;
        mb_warn("gang", "job=%s rank=%u: %s", r->job_id, rank->rank,
                rank->cause != NULL ? rank->cause : "failed");
        break;
    case MB_REPORT_START:
    case MB_REPORT_SAVE_NOW:
    case MB_REPORT_STOP:
    case MB_REPORT_DURABLE:
        mb_warn("gang", "rank=%u said what only an agent says", rank->rank);
        break;
    }
}

/* Handle every whole frame in front; *taken is how many bytes they had. */
static int handle_frames(struct mb_gang_rank *rank, struct mb_buf *bytes, size_t *taken)
{
    size_t before = bytes->len;
    struct mb_err err;

    for (;;) {
        struct mb_report m;
        int rc = mb_report_decode(bytes, &m, &err);

        if (rc == 1) {
            handle(rank, &m);
            mb_report_close(&m);
            if (rank->fd < 0) /* the attempt was closed by what the message led to */
                return MB_ECANCELED;
            continue;
        }
        *taken = before - bytes->len;
        if (rc < 0)
            mb_error("gang", "job=%s rank=%u: closing the report socket: %s", rank->run->job_id,
                     rank->rank, err.text);
        return rc;
    }
}

/* Take what was handled out of the socket. */
static void take(struct mb_gang_rank *rank, size_t n)
{
    uint8_t *scratch = rank->run->owner->scratch;

    while (n > 0) {
        ssize_t got = recv(rank->fd, scratch, n < PEEK_MAX ? n : PEEK_MAX, MSG_DONTWAIT);

        if (got <= 0)
            break;
        n -= (size_t)got;
    }
}

/* One look at the socket. 1: more may be there. */
static int look(struct mb_gang_rank *rank)
{
    uint8_t *scratch = rank->run->owner->scratch;
    struct mb_buf bytes = {0};
    ssize_t got = recv(rank->fd, scratch, PEEK_MAX, MSG_PEEK | MSG_DONTWAIT);
    size_t taken = 0;
    int rc, again = 0;

    rank->is_partial = 0;
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return 0;
    if (got <= 0) { /* the worker closed its end */
        mb_gang_report_close(rank);
        return 0;
    }
    if (rank->in.len > 0 || mb_buf_add(&bytes, scratch, (size_t)got) != MB_OK) {
        rc = mb_buf_add(&rank->in, scratch, (size_t)got) == MB_OK ? MB_OK : MB_EPROTO;
        take(rank, (size_t)got);
        if (rc == MB_OK)
            rc = handle_frames(rank, &rank->in, &taken);
        again = 1;
    } else {
        rc = handle_frames(rank, &bytes, &taken);
        if (rc == MB_OK)
            take(rank, taken);
        rank->is_partial = rc == MB_OK && bytes.len > 0;
        if (rank->is_partial && bytes.len >= SOCKET_HOLDS) {
            if (mb_buf_add(&rank->in, bytes.data, bytes.len) == MB_OK)
                take(rank, bytes.len);
            rank->is_partial = 0;
        }
        again = taken > 0 && !rank->is_partial;
    }
    mb_buf_close(&bytes);
    if (rc != MB_OK) {
        mb_gang_report_close(rank);
        return 0;
    }
    return again;
}

static void flush(struct mb_gang_rank *rank)
{
    while (rank->out.len > 0) {
        ssize_t sent = send(rank->fd, rank->out.data, rank->out.len, MSG_DONTWAIT | MSG_NOSIGNAL);

        if (sent < 0 && (errno == EAGAIN || errno == EINTR))
            break;
        if (sent <= 0) { /* it is gone: what it said last may still wait to be read */
            mb_buf_reset(&rank->out);
            break;
        }
        mb_buf_consume(&rank->out, (size_t)sent);
    }
    want(rank);
}

static void on_poll(uv_poll_t *poll, int status, int events)
{
    struct mb_gang_rank *rank = poll->data;

    if (status < 0) {
        mb_gang_report_close(rank);
        return;
    }
    if (events & UV_READABLE)
        look(rank);
    if (rank->fd >= 0)
        flush(rank);
}

void mb_gang_report_tick(struct mb_gang_rank *rank)
{
    if (rank->fd < 0 || !rank->is_partial)
        return;
    look(rank);
    if (rank->fd >= 0)
        want(rank);
}

void mb_gang_report_drain(struct mb_gang_rank *rank)
{
    while (rank->fd >= 0 && look(rank))
        ;
}

void mb_gang_report_open(struct mb_gang_rank *rank, int fd)
{
    mb_gang_report_close(rank);
    rank->poll = mb_calloc(1, sizeof(*rank->poll));
    if (rank->poll == NULL || uv_poll_init(rank->run->owner->loop, rank->poll, fd) != 0) {
        mb_error("gang", "rank=%u: its report socket cannot be watched", rank->rank);
        mb_free(rank->poll);
        rank->poll = NULL;
        close(fd);
        return;
    }
    rank->poll->data = rank;
    rank->fd = fd;
    rank->is_partial = 0;
    want(rank);
}

void mb_gang_report_send(struct mb_gang_rank *rank, const struct mb_report *message)
{
    struct mb_err err = {0};

    if (rank->fd < 0 || rank->exited)
        return;
    if (rank->out.len > OUT_MAX)
        mb_err_set(&err, MB_EFULL, "it does not read what it is told");
    else
        mb_report_encode(message, &rank->out, &err);
    if (err.code != MB_OK) {
        mb_error("gang", "job=%s rank=%u: cannot tell the worker: %s", rank->run->job_id,
                 rank->rank, err.text);
        return;
    }
    flush(rank);
}
