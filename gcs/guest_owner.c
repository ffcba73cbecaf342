#include "gcs/guest_owner.h"

#include <string.h>

const char *head_guest_other_owner(const void *record, size_t n, const char *our_hex, json_t *alive)
{
    json_t *info = json_loadb(record, n, 0, NULL);
    const char *hex = json_string_value(json_object_get(info, "driver_node_id"));
    void *it = hex && strcmp(hex, our_hex) != 0 ? json_object_iter_at(alive, hex) : NULL;

    json_decref(info);
    return it ? json_object_iter_key(it) : NULL;
}
