/* Any bytes as a part, manifest, claim or list of writers from a store: refused, or paths that stay
 * below their directory, and an encoding that reads back as itself. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "agent/upload/claim.h"
#include "agent/upload/fence.h"
#include "agent/upload/manifest.h"
#include "base/alloc.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_paths(const struct mb_manifest *m)
{
    for (size_t i = 0; i < m->n_files; i++) {
        const char *path = m->files[i].path;

        if (path[0] == '/' || path[0] == '\0' || strcmp(path, "..") == 0 ||
            strncmp(path, "../", 3) == 0 || strstr(path, "/../") != NULL)
            abort();
        if (i > 0 && strcmp(m->files[i - 1].path, path) >= 0)
            abort();
    }
}

/* Who enters is the last one afterwards. */
static void check_fence(const uint8_t *data, size_t size)
{
    const struct mb_fence_writer writer = {.id = {"job", "aa", 2}};
    enum mb_fence_verdict verdict;
    char *text = NULL, *again = NULL;
    struct mb_err err;

    if (size == 0 || mb_fence_decide(data, size, &writer, &verdict, &text, &err) != 0)
        return;
    if ((text == NULL) != (verdict == MB_FENCE_OURS))
        abort();
    if (verdict == MB_FENCE_ENTER &&
        (mb_fence_decide(text, strlen(text), &writer, &verdict, &again, &err) != 0 ||
         verdict != MB_FENCE_OURS))
        abort();
    mb_free(text);
    mb_free(again);
}

/* Nobody may put a claim where a whole manifest stands. */
static void check_claim(const struct mb_manifest *m)
{
    const struct mb_manifest_writer writer = {"job", "aa", 2};
    char place[MB_CLAIM_PLACE_MAX];
    enum mb_claim_act act = mb_claim_decide(m, &writer, NULL, place);

    if (act == MB_CLAIM_PUT && !m->is_claim)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mb_manifest m = {0}, again = {0};
    struct mb_err err;
    int64_t iteration;
    char *first = NULL, *second = NULL;

    if (mb_latest_parse(data, size, &iteration, &err) == 0 && iteration < 0)
        abort();
    check_fence(data, size);
    if (mb_manifest_decode_any(data, size, "fuzz", &m, &err) != 0)
        return 0;
    check_paths(&m);
    check_claim(&m);
    if (mb_manifest_encode(&m, &first, &err) != 0 ||
        mb_manifest_decode_any(first, strlen(first), "fuzz", &again, &err) != 0 ||
        mb_manifest_encode(&again, &second, &err) != 0 || strcmp(first, second) != 0)
        abort();
    mb_free(first);
    mb_free(second);
    mb_manifest_close(&m);
    mb_manifest_close(&again);
    return 0;
}
