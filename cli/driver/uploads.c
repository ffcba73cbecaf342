/*
 * Sums over nodes, and one line of text about them. Before the first node has said anything of an
 * iteration that is saved it is "waiting"; once all bytes are there its manifest is what is
 * missing.
 */
#include "cli/driver/uploads.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

static void add(struct mb_drv_uploads *sum, const struct mb_drv_upload *node)
{
    uint64_t eta_ms = node->done_bytes < node->total_bytes ? node->eta_ms : 0;

    sum->done_bytes += node->done_bytes;
    sum->total_bytes += node->total_bytes;
    sum->parts_done += node->parts_done;
    sum->parts_total += node->parts_total;
    sum->rate_bytes_per_s += node->rate_bytes_per_s;
    if (eta_ms > sum->eta_ms)
        sum->eta_ms = eta_ms;
    sum->is_left |= node->is_left;
}

void mb_drv_uploads_sum(const struct mb_drv_upload *nodes, size_t n, struct mb_drv_uploads *out)
{
    int64_t given_up = -1;

    *out = (struct mb_drv_uploads){.iteration = -1};
    for (size_t i = 0; i < n; i++)
        if (nodes[i].is_given_up && nodes[i].iteration > given_up)
            given_up = nodes[i].iteration;
    for (size_t i = 0; i < n; i++) {
        if (nodes[i].total_bytes == 0 || nodes[i].iteration < out->iteration ||
            nodes[i].iteration == given_up)
            continue;
        if (nodes[i].iteration > out->iteration)
            *out = (struct mb_drv_uploads){.iteration = nodes[i].iteration};
        add(out, &nodes[i]);
    }
    out->given_up = given_up;
}

/* A piece of text at *at, cut at the bound. */
static void put(char *out, size_t *at, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

static void put(char *out, size_t *at, const char *fmt, ...)
{
    va_list ap;
    int n;

    va_start(ap, fmt);
    n = vsnprintf(out + *at, MB_DRV_UPLOADS_TEXT_MAX - *at, fmt, ap);
    va_end(ap);
    if (n > 0)
        *at += (size_t)n;
    if (*at >= MB_DRV_UPLOADS_TEXT_MAX)
        *at = MB_DRV_UPLOADS_TEXT_MAX - 1;
}

static uint64_t seconds(uint64_t ms)
{
    return (ms + 999) / 1000;
}

void mb_drv_uploads_text(const struct mb_drv_uploads *u, int64_t saved, int64_t durable,
                         uint64_t deadline_unix_ms, uint64_t now_unix_ms,
                         char out[MB_DRV_UPLOADS_TEXT_MAX])
{
    size_t at = 0;

    out[0] = '\0';
    if (saved <= durable)
        return;
    if (u->given_up > durable)
        put(out, &at, "iteration %" PRId64 " was given up", u->given_up);
    if (u->given_up >= saved && u->iteration <= durable)
        return;
    put(out, &at, u->given_up > durable ? "; " : "");
    if (u->iteration <= durable) {
        put(out, &at, "iteration %" PRId64 " waits for its upload", saved);
    } else if (u->parts_total > 0) {
        put(out, &at, "uploading iteration %" PRId64 ": %" PRIu64 " of %" PRIu64 " parts",
            u->iteration, u->parts_done, u->parts_total);
    } else {
        put(out, &at, "uploading iteration %" PRId64 ": %" PRIu64 " of %" PRIu64 " bytes",
            u->iteration, u->done_bytes, u->total_bytes);
    }
    if (u->iteration > durable && u->done_bytes >= u->total_bytes)
        put(out, &at, ", its manifest is missing");
    else if (u->iteration > durable && u->eta_ms != UINT64_MAX)
        put(out, &at, ", done in %" PRIu64 " s", seconds(u->eta_ms));
    if (u->iteration > durable && u->is_left)
        put(out, &at, ", not before the deadline");
    if (deadline_unix_ms > now_unix_ms)
        put(out, &at, ", deadline in %" PRIu64 " s", (deadline_unix_ms - now_unix_ms) / 1000);
    else if (deadline_unix_ms != 0)
        put(out, &at, ", %" PRIu64 " s after the deadline",
            (now_unix_ms - deadline_unix_ms) / 1000);
}
