/*
 * What the ranks print goes to our stdout: line by line, so that lines of two ranks never mix.
 * A line longer than the bound is passed on in pieces rather than kept.
 */
#include "cli/driver/internal.h"
#include "cli/driver/offsets.h"

#include <stdio.h>
#include <string.h>

enum { LINE_MAX_BYTES = 64 * 1024 };

static void put(struct driver *d, uint32_t rank, const void *p, size_t n)
{
    if (d->opts->tag_ranks)
        printf("[rank %u] ", rank);
    fwrite(p, 1, n, stdout);
    d->lines_after_verdict += d->verdict_said != 0;
}

void drv_output(struct driver *d, uint32_t rank, uint64_t offset, const void *p, size_t n)
{
    struct drv_rank_output *o = &d->output[rank];
    const char *bytes = p;
    uint64_t missing;
    size_t known;

    known = mb_drv_known_bytes(&o->next_offset, offset, n, &missing);
    if (missing > 0)
        fprintf(stderr,
                "mobula: %llu bytes of the output of rank %u are missing here: its log's cap "
                "(MOBULA_LOG_MAX_BYTES, --log-max-bytes) let go of them before they were read\n",
                (unsigned long long)missing, rank);
    bytes += known;
    n -= known;
    while (n) {
        const char *end = memchr(bytes, '\n', n);
        size_t take = end ? (size_t)(end - bytes) + 1 : n;

        if (end && o->partial.len == 0) {
            put(d, rank, bytes, take);
        } else {
            if (mb_buf_add(&o->partial, bytes, take) < 0) {
                put(d, rank, o->partial.data, o->partial.len);
                put(d, rank, bytes, take);
                mb_buf_reset(&o->partial);
            } else if (end || o->partial.len > LINE_MAX_BYTES) {
                put(d, rank, o->partial.data, o->partial.len);
                mb_buf_reset(&o->partial);
            }
        }
        bytes += take;
        n -= take;
    }
    fflush(stdout);
}

void drv_output_flush(struct driver *d)
{
    for (uint32_t r = 0; d->output && r < drv_ranks_max(d); r++) {
        struct mb_buf *partial = &d->output[r].partial;

        if (partial->len) {
            put(d, r, partial->data, partial->len);
            putchar('\n');
        }
        mb_buf_close(partial);
        d->output[r].next_offset = 0;
    }
    fflush(stdout);
}
