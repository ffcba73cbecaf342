/* Any packet between agent and supervisor: refused, or a message that says the same when it is
 * formatted and read again. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "agent/supervise/protocol.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mb_sup_msg first, again;
    char out[MB_SUP_PACKET_MAX];
    size_t n;

    if (mb_sup_msg_parse((const char *)data, size, &first) != 0)
        return 0;
    if (memchr(first.text, '\0', sizeof(first.text)) == NULL)
        abort();
    n = mb_sup_msg_format(&first, out);
    if (n >= sizeof(out) || mb_sup_msg_parse(out, n, &again) != 0)
        abort();
    if (again.type != first.type || again.version != first.version || again.child != first.child ||
        again.pid != first.pid || again.ticks != first.ticks || again.code != first.code ||
        again.signal != first.signal || again.grace_ms != first.grace_ms ||
        strcmp(again.text, first.text) != 0)
        abort();
    return 0;
}
