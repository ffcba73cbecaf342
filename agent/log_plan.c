/*
 *  1. A size that grew is noted at most once a second: so time and offset find each other.
 *  2. A full segment is sent at once, the growing one every SHIP_MS. One at a time; a failure
 * waits, longer each time. When the writer has ended, what is left of the last one goes in pieces
 * of END_BYTES from where the store has it: over a slow link something of it arrives again and
 * again.
 *  3. Above the cap the front goes until 3/4 of the cap are left: with a store only what whole
 *     segments hold there. A store that does not keep up is waited for until twice the cap; then
 *     the disk comes first.
 *  4. After that pieces begin where bytes still are, and never overlap what is in the store. When
 *     the first of them is durable, what it left out is a gap: not before, since what was on its
 *     way when the front went arrives or does not.
 *  5. A program that truncated its own log: what it holds now counts, from byte 0 when even the
 *     released front is gone, and is sent again over what was sent.
 */
#include "agent/log_plan.h"

enum { END_BYTES = 256 << 10 };
enum { RETRY_MIN_MS = 1000, RETRY_MAX_MS = 60000, RETRY_SHIFT_MAX = 6 };

void mb_log_plan_init(struct mb_log_plan *p, uint64_t first, uint64_t shipped, uint64_t cap_bytes)
{
    uint64_t segment = MB_LOG_PLAN_SEGMENT_MAX;

    while (cap_bytes > 0 && segment > cap_bytes / 8 && segment > MB_LOG_PLAN_SEGMENT_MIN)
        segment /= 2;
    *p = (struct mb_log_plan){
        .cap_bytes = cap_bytes, .segment_bytes = segment, .first = first, .shipped = shipped};
}

static uint64_t floor_to(uint64_t v, uint64_t unit)
{
    return v - v % unit;
}

/* What is neither released nor in the store begins here. */
static uint64_t rest_begin(const struct mb_log_plan *p)
{
    return p->first > p->shipped ? p->first : p->shipped;
}

static void plan_ship(struct mb_log_plan *p, uint64_t size, int ended, uint64_t now_ms,
                      struct mb_log_step *step)
{
    uint64_t segment = floor_to(p->shipped, p->segment_bytes), begin = segment, end;
    int is_rest = ended && size < segment + p->segment_bytes && !p->is_stale;

    if (p->first > segment || is_rest)
        begin = rest_begin(p);
    end = floor_to(begin, p->segment_bytes) + p->segment_bytes;
    if (!p->has_url || p->held || p->shipping || now_ms < p->retry_ms || size <= p->shipped ||
        size <= begin)
        return;
    if (end > size) {
        if (!ended && now_ms < p->ship_ms + MB_LOG_PLAN_SHIP_MS)
            return;
        end = size;
    }
    if (is_rest && end - begin > END_BYTES)
        end = begin + END_BYTES;
    p->shipping = 1;
    p->ship_begin = begin;
    p->ship_ms = now_ms;
    step->ship = 1;
    step->ship_begin = begin;
    step->ship_end = end;
}

static void plan_release(struct mb_log_plan *p, uint64_t size, struct mb_log_step *step)
{
    uint64_t held = size - p->first, target;

    if (p->cap_bytes == 0 || p->releasing || held <= p->cap_bytes)
        return;
    target = size - p->cap_bytes / 4 * 3;
    if (p->has_url && target > floor_to(p->shipped, p->segment_bytes)) {
        if (held <= 2 * p->cap_bytes)
            target = floor_to(p->shipped, p->segment_bytes);
    }
    if (target <= p->first)
        return;
    p->releasing = 1;
    step->release = 1;
    step->release_end = target;
}

static void note_gap(struct mb_log_plan *p, uint64_t begin, uint64_t end)
{
    if (p->n_gaps > 0 && begin < p->gap_end) /* noted by an agent that died before it noted more */
        begin = p->gap_end;
    if (begin >= end)
        return;
    if (p->n_gaps++ == 0)
        p->gap_begin = begin;
    p->gap_end = end;
    p->gap_bytes += end - begin;
}

/* What comes after size is written and sent anew. */
static void cut_gaps(struct mb_log_plan *p, uint64_t size)
{
    if (p->n_gaps == 0 || size >= p->gap_end)
        return;
    if (size <= p->gap_begin) {
        p->n_gaps = 0;
        p->gap_bytes = 0;
        return;
    }
    p->gap_end = size;
    if (p->gap_bytes > size - p->gap_begin)
        p->gap_bytes = size - p->gap_begin;
}

static void notice_truncation(struct mb_log_plan *p, uint64_t size, struct mb_log_step *step)
{
    if (size >= p->first && size >= p->shipped)
        return;
    if (size < p->first)
        p->first = 0;
    if (size < p->shipped) {
        p->shipped = size;
        p->is_stale = 1;
    }
    cut_gaps(p, size);
    p->indexed = size;
    step->rewound = 1;
}

struct mb_log_step mb_log_plan_next(struct mb_log_plan *p, uint64_t size, int ended,
                                    uint64_t now_ms)
{
    struct mb_log_step step = {0};

    notice_truncation(p, size, &step);
    if (size > p->indexed && (ended || now_ms >= p->index_ms + MB_LOG_PLAN_INDEX_MS)) {
        step.index = 1;
        p->indexed = size;
        p->index_ms = now_ms;
    }
    plan_ship(p, size, ended, now_ms, &step);
    plan_release(p, size, &step);
    return step;
}

void mb_log_plan_shipped(struct mb_log_plan *p, uint64_t end, uint64_t now_ms)
{
    p->shipping = 0;
    p->failures = 0;
    p->retry_ms = 0;
    p->ship_ms = now_ms;
    if (p->ship_begin > p->shipped)
        note_gap(p, p->shipped, p->ship_begin);
    else
        p->is_stale = 0; /* its piece was written anew */
    if (end > p->shipped)
        p->shipped = end;
}

void mb_log_plan_ship_failed(struct mb_log_plan *p, uint64_t now_ms)
{
    uint64_t wait_ms = (uint64_t)RETRY_MIN_MS << p->failures;

    p->shipping = 0;
    if (p->failures < RETRY_SHIFT_MAX)
        p->failures++;
    p->ship_ms = 0;
    p->retry_ms = now_ms + (wait_ms < RETRY_MAX_MS ? wait_ms : RETRY_MAX_MS);
}

void mb_log_plan_hurry(struct mb_log_plan *p)
{
    p->failures = 0;
    p->retry_ms = 0;
}

void mb_log_plan_released(struct mb_log_plan *p, uint64_t end)
{
    p->releasing = 0;
    if (end > p->first)
        p->first = end;
}

uint64_t mb_log_plan_owes(const struct mb_log_plan *p, uint64_t size)
{
    uint64_t begin = rest_begin(p);

    return p->has_url && size > begin ? size - begin : 0;
}

int mb_log_plan_done(const struct mb_log_plan *p, uint64_t size)
{
    return !p->shipping && !p->releasing && (!p->has_url || p->shipped >= size);
}
