#include "cli/transfer_view.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>
#include "base/str.h"

enum { BAR_EVERY_MS = 200, JSON_EVERY_MS = 1000, BAR_COLUMNS = 24 };

/* ---- the rate ---- */

void mb_transfer_view_rate(struct mb_transfer_view *v, uint64_t sent_bytes, uint64_t now_ms)
{
    double s = (double)(now_ms - v->last_ms) / 1000, share = 1 - exp(-s / 3);
    double bytes = sent_bytes > v->last_bytes ? (double)(sent_bytes - v->last_bytes) : 0;

    if (v->last_ms == 0) {
        v->last_ms = now_ms;
        v->last_bytes = sent_bytes;
        return;
    }
    if (now_ms == v->last_ms)
        return;
    if (v->rate <= 0)
        share = bytes > 0 ? 1 : 0;
    v->rate += share * (bytes / s - v->rate);
    v->last_ms = now_ms;
    v->last_bytes = sent_bytes;
}

/* Seconds to the end; -1: not known. */
static double left_s(const struct mb_transfer_view *v, const struct mb_transfer_facts *f)
{
    if (v->rate < 1 || f->total_bytes < f->done_bytes)
        return -1;
    return (double)(f->total_bytes - f->done_bytes) / v->rate;
}

/* ---- the bar ---- */

void mb_transfer_view_line(const struct mb_transfer_view *v, const struct mb_transfer_facts *f,
                           char *out, size_t size)
{
    double part = f->total_bytes > 0 ? (double)f->done_bytes / (double)f->total_bytes : 0;
    char bar[BAR_COLUMNS + 1], done[16], total[16], rate[16], left[32] = "", where[40] = "";
    int full = (int)(part * BAR_COLUMNS);
    double eta = left_s(v, f);

    for (int i = 0; i < BAR_COLUMNS; i++)
        bar[i] = i < full ? '=' : i == full ? '>' : ' ';
    bar[BAR_COLUMNS] = '\0';
    if (eta >= 0)
        snprintf(left, sizeof(left), ", %.0f s left", eta);
    if (f->iteration >= 0)
        snprintf(where, sizeof(where), " iteration %" PRId64, f->iteration);
    snprintf(out, size, "%s%s %s [%s] %3d%% %s of %s, %" PRIu64 "/%" PRIu64 " files, %s/s%s",
             f->verb, where, f->phase, bar, (int)(part * 100), mb_human_bytes(f->done_bytes, done),
             mb_human_bytes(f->total_bytes, total), f->n_done, f->n_files,
             mb_human_bytes((uint64_t)v->rate, rate), left);
    if (v->columns > 1 && strlen(out) >= v->columns)
        out[v->columns - 1] = '\0';
}

int mb_transfer_view_json(const struct mb_transfer_view *v, const struct mb_transfer_facts *f,
                          struct mb_buf *out)
{
    double eta = left_s(v, f);
    int rc = mb_buf_printf(out,
                           "{\"event\": \"progress\", \"verb\": \"%s\", \"phase\": \"%s\", "
                           "\"iteration\": %" PRId64 ", \"done_bytes\": %" PRIu64
                           ", \"kept_bytes\": %" PRIu64 ", \"total_bytes\": %" PRIu64
                           ", \"done_files\": %" PRIu64 ", \"files\": %" PRIu64
                           ", \"bytes_per_s\": %.0f, \"left_s\": ",
                           f->verb, f->phase, f->iteration, f->done_bytes, f->kept_bytes,
                           f->total_bytes, f->n_done, f->n_files, v->rate);

    if (rc == 0)
        rc = eta >= 0 ? mb_buf_printf(out, "%.1f}\n", eta) : mb_buf_puts(out, "null}\n");
    return rc;
}

void mb_transfer_view_init(struct mb_transfer_view *v, int json)
{
    struct winsize size = {0};

    *v = (struct mb_transfer_view){.json = json, .is_terminal = !json && isatty(2)};
    v->columns = ioctl(2, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 100;
}

void mb_transfer_view_show(struct mb_transfer_view *v, const struct mb_transfer_facts *f,
                           uint64_t now_ms)
{
    struct mb_buf json = {0};
    char line[512];

    if ((!v->json && !v->is_terminal) ||
        (v->last_ms != 0 && now_ms - v->last_ms < (v->json ? JSON_EVERY_MS : BAR_EVERY_MS)))
        return;
    mb_transfer_view_rate(v, f->done_bytes - f->kept_bytes, now_ms);
    if (v->json) {
        if (mb_transfer_view_json(v, f, &json) == 0) {
            fputs(mb_buf_str(&json), stdout);
            fflush(stdout);
        }
        mb_buf_close(&json);
        return;
    }
    mb_transfer_view_line(v, f, line, sizeof(line));
    fprintf(stderr, "\r%s\033[K", line);
    v->is_drawn = 1;
}

void mb_transfer_view_end(struct mb_transfer_view *v)
{
    if (v->is_drawn)
        fputs("\r\033[K", stderr);
    v->is_drawn = 0;
}
