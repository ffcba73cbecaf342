/* Any bytes as the journal of a push, framed and as payloads, one a line: refused, or facts about
 * the files; nothing leaks. */
#include <stdint.h>
#include <string.h>
#include "agent/upload/journal.h"
#include "agent/upload/push_journal.h"
#include "base/alloc.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int apply(void *arg, const void *payload, size_t n, struct mb_err *err)
{
    return mb_push_journal_apply(NULL, arg, payload, n, err);
}

static void scan(const void *p, size_t n)
{
    struct mb_push_source s = {.n_files = 2};
    struct mb_err err;
    size_t valid = 0;

    s.files = mb_calloc(2, sizeof(*s.files));
    s.files[0].path = mb_strdup("a");
    s.files[1].path = mb_strdup("b");
    mb_journal_scan(p, n, apply, &s, &valid, &err);
    mb_push_source_close(&s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mb_buf framed = {0};

    scan(data, size);
    mb_buf_puts(&framed, "mobula-journal 1\n");
    while (size > 0) {
        const uint8_t *end = memchr(data, '\n', size);
        size_t n = end != NULL ? (size_t)(end - data) : size;

        if (n > 0)
            mb_journal_frame(&framed, data, n);
        n += end != NULL;
        data += n;
        size -= n;
    }
    scan(framed.data, framed.len);
    mb_buf_close(&framed);
    return 0;
}
