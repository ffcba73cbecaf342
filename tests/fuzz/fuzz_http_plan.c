/* Any headers in any order: the plan never asks for a byte twice, never drops one that is new, and
 * ends only where the server's own length says so. Each line of the input is one step. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "worker/data/input/http_plan.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void step(struct mb_http_plan *p, char *line, uint64_t now_ms)
{
    struct mb_http_plan_head h = {.status = 200};
    struct mb_err err = {0};
    uint64_t before = p->offset;
    uint64_t delay_ms;
    char *rest = line + 1;

    if (line[0] == 'b') {
        uint64_t n = strlen(rest) * 1000;
        uint64_t known = p->skip_bytes;
        uint64_t dropped = mb_http_plan_bytes(p, n);

        if (dropped != (n < known ? n : known) || p->offset != before + n - dropped)
            abort();
        return;
    }
    if (line[0] == 'd') {
        h.status = atoi(rest);
        if (mb_http_plan_done(p, -(int)(strlen(rest) % 15), rest, &h, 0, now_ms, now_ms, &delay_ms,
                              &err) == MB_HTTP_PLAN_END &&
            p->has_total && p->offset < p->total_bytes)
            abort();
        return;
    }
    h.etag = strtok(rest, ";");
    h.modified = strtok(NULL, ";");
    h.content_range = strtok(NULL, ";");
    if (!(line[0] & 1))
        h.etag = NULL;
    if (!(line[0] & 2))
        h.modified = NULL;
    h.status = line[0] & 4 ? 206 : 200;
    h.content_length = h.content_range;
    if (mb_http_plan_answer(p, &h, &err) == 0 && p->skip_bytes > p->offset)
        abort();
    if (p->offset != before)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mb_http_plan p;
    char *text = malloc(size + 1);
    char *save = NULL;
    uint64_t now_ms = 0;

    memcpy(text, data, size);
    text[size] = '\0';
    mb_http_plan_init(&p, 0, 60000);
    for (char *line = strtok_r(text, "\n", &save); line != NULL; line = strtok_r(NULL, "\n", &save))
        step(&p, line, now_ms += 100);
    free(text);
    return 0;
}
