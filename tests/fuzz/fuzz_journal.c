/* Any bytes as an upload journal: refused, or a plan; and what was taken reads back as the same. To
 * get past the checksum, the input is also taken as the payloads themselves, one a line. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "agent/upload/journal.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const uint32_t ranks[] = {0, 1};

static int apply(void *arg, const void *payload, size_t n, struct mb_err *err)
{
    return mb_journal_apply(arg, payload, n, err);
}

static struct mb_plan *scan(const void *p, size_t n, size_t *valid)
{
    struct mb_plan *plan = NULL;
    struct mb_err err;

    if (mb_plan_create(ranks, 2, &plan, &err) != 0)
        abort();
    if (mb_journal_scan(p, n, apply, plan, valid, &err) != 0) {
        mb_plan_destroy(plan);
        return NULL;
    }
    return plan;
}

static void frame_lines(const uint8_t *data, size_t size, struct mb_buf *out)
{
    mb_buf_puts(out, "mobula-journal 1\n");
    while (size > 0) {
        const uint8_t *end = memchr(data, '\n', size);
        size_t n = end != NULL ? (size_t)(end - data) : size;

        if (n > 0)
            mb_journal_frame(out, data, n);
        n += end != NULL;
        data += n;
        size -= n;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mb_buf framed = {0};
    struct mb_plan *plan, *again;
    size_t valid = 0, valid_again = 0;

    mb_plan_destroy(scan(data, size, &valid));
    if (valid > size)
        abort();
    frame_lines(data, size, &framed);
    plan = scan(framed.data, framed.len, &valid);
    if (plan != NULL) {
        again = scan(framed.data, valid, &valid_again);
        if (again == NULL || valid_again != valid || mb_plan_count(again) != mb_plan_count(plan))
            abort();
        mb_plan_destroy(again);
    }
    mb_plan_destroy(plan);
    mb_buf_close(&framed);
    return 0;
}
