/* Any text as a saved ledger: refused and nothing changed, or taken with every promise kept. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "agent/ledger.h"
#include "base/alloc.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const struct mb_resource totals[2] = {{MB_RESOURCE_GPU, 4}, {MB_RESOURCE_SLOT, 8}};
    char *text = mb_strndup((const char *)data, size);
    struct mb_ledger *l = NULL;
    char *dump;

    if (text == NULL || mb_ledger_create(totals, 2, &l, NULL) != 0)
        abort();
    if (mb_ledger_load(l, text, NULL) != 0 && mb_ledger_count(l) != 0)
        abort();
    if (mb_ledger_invariant(l) != NULL)
        abort();
    dump = mb_ledger_dump(l);
    if (dump == NULL)
        abort();
    mb_free(dump);
    mb_ledger_destroy(l);
    mb_free(text);
    return 0;
}
