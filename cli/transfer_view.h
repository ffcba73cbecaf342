/*
 * How a transfer is shown while it runs: a bar on a terminal, JSON lines for programs, nothing in a
 * pipe. One thread.
 */
#ifndef MOBULA_CLI_TRANSFER_VIEW_H
#define MOBULA_CLI_TRANSFER_VIEW_H

#include <stddef.h>
#include <stdint.h>
#include "base/buf.h"

struct mb_transfer_facts {
    const char *verb;  /* "push", "pull", ... */
    const char *phase; /* "sending", ... */
    int64_t iteration; /* -1: none */
    uint64_t done_bytes, kept_bytes, total_bytes;
    uint64_t n_done, n_files;
};

struct mb_transfer_view {
    int json, is_terminal, is_drawn;
    unsigned columns;
    uint64_t last_ms, last_bytes;
    double rate; /* bytes a second, smoothed over about 3 s */
};

void mb_transfer_view_init(struct mb_transfer_view *v, int json);
/* To be called a few times a second. The bar goes to stderr, JSON to stdout. */
void mb_transfer_view_show(struct mb_transfer_view *v, const struct mb_transfer_facts *facts,
                           uint64_t now_ms);
/* The bar is wiped away, so that other text can follow. */
void mb_transfer_view_end(struct mb_transfer_view *v);

/* Pure: the bar's line, at most columns wide (a NUL ends it). */
void mb_transfer_view_line(const struct mb_transfer_view *v, const struct mb_transfer_facts *facts,
                           char *out, size_t size);
/* Pure: one JSON object and a newline. 0 or MB_ENOMEM. */
int mb_transfer_view_json(const struct mb_transfer_view *v, const struct mb_transfer_facts *facts,
                          struct mb_buf *out);
/* Pure: bytes of a second's share of the work become the rate. */
void mb_transfer_view_rate(struct mb_transfer_view *v, uint64_t sent_bytes, uint64_t now_ms);

#endif
