/*
 * Any bytes as what a Redis answers, in pieces, through hiredis as the store reads it: whatever
 * comes is no table, or one whose records can be found again. Numbers and parts of scripts' answers
 * are looked up in every answer, whatever its kind. What an answer announces is bounded as in
 * redis_link.c, lower, so that a run stays short.
 */
#include <hiredis.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "gcs/redis_bound.h"
#include "gcs/store_redis_internal.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static volatile long long seen; /* what was read is used, so that it is really read */

static int use_record(void *arg, struct mb_blob key, struct mb_blob value)
{
    size_t *n = arg;

    for (size_t i = 0; i < key.n; i++)
        seen += ((const char *)key.p)[i];
    for (size_t i = 0; i < value.n; i++)
        seen += ((const char *)value.p)[i];
    ++*n;
    return 0;
}

/* The namespace that a field names, as store_redis_write.c writes it: "LENGTH:NAMESPACE KEY". */
static void find_again(struct mb_tables *tables, const redisReply *field)
{
    char *end;
    size_t n = strtoul(field->str, &end, 10);
    struct mb_blob ns = {end + 1, n}, key = {end + 1 + n, 0}, found;

    key.n = (size_t)(field->str + field->len - (end + 1 + n));
    if (!mb_tables_get(tables, MB_TABLES_KV, ns, key, &found))
        abort();
}

static void read_table(const redisReply *reply)
{
    struct mb_tables *tables = tables_create("store");
    size_t n = 0;

    if (tables == NULL)
        abort();
    if (redis_load_pairs(tables, MB_TABLES_KV, reply) == 0) {
        for (size_t i = 0; i < reply->elements; i += 2)
            find_again(tables, reply->element[i]);
        mb_tables_each(tables, MB_TABLES_KV, mb_blob_str(""), mb_blob_str(""), use_record, &n);
    }
    tables_free(tables);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    redisReader *reader = redisReaderCreate();
    struct redis_bound bound;
    size_t step = size > 0 ? data[0] + (size_t)1 : 1;
    void *reply = NULL;

    if (reader == NULL)
        abort();
    redis_bound_reader(&bound, reader, 1 << 14);
    for (size_t at = 1; at < size; at += step) {
        size_t n = size - at < step ? size - at : step;
        if (redisReaderFeed(reader, (const char *)data + at, n) != REDIS_OK)
            break;
        while (redisReaderGetReply(reader, &reply) == REDIS_OK && reply != NULL) {
            for (size_t i = 0; i < 4; i++)
                seen += redis_number_at(reply, i) + (redis_element(reply, i) != NULL);
            read_table(reply);
            freeReplyObject(reply);
            reply = NULL;
        }
        if (reader->err != 0)
            break;
    }
    redisReaderFree(reader);
    return 0;
}
