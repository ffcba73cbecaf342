/*
 *  1. The head's agent hears a deadline: it is put into the KV, again until that is acknowledged.
 *  2. The others ask soon after their start, then every look_ms. What is not there yet, or no
 * answer: the next question comes after a back-off; what was known stays.
 *  3. A value that is none: said once a value, otherwise as 2.
 */
#include "agent/rayjob_news.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include "agent/deadline.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/client.h"

enum { FIRST_MS = 1000, CALL_MS = 10000, VALUE_MAX = 32 };

static const char NS[] = "mobula", NEVER[] = "never";

struct mb_rayjob_news {
    struct mb_rayjob_news_opts opts;
    void (*on_deadline)(void *arg, uint64_t unix_ms);
    void *arg;
    uv_timer_t timer;
    struct mb_gcs_op *op;
    char key[320];
    char value[VALUE_MAX]; /* to tell, or heard last; "": none */
    int is_told;
    unsigned attempt; /* since the last success */
    int closing;      /* parts that are not closed yet */
    void (*close_cb)(void *arg);
    void *close_arg;
};

static void part_closed(struct mb_rayjob_news *n)
{
    void (*cb)(void *arg) = n->close_cb;
    void *arg = n->close_arg;

    if (--n->closing > 0)
        return;
    mb_free(n);
    cb(arg);
}

static void on_timer_closed(uv_handle_t *h)
{
    part_closed(h->data);
}

static void on_timer(uv_timer_t *t);

static void again(struct mb_rayjob_news *n, int has_worked)
{
    uint64_t ms = n->opts.look_ms;

    if (has_worked)
        n->attempt = 0;
    else
        ms = FIRST_MS + mb_backoff_ms(n->attempt++, FIRST_MS, n->opts.look_ms, mb_random_u64());
    uv_timer_start(&n->timer, on_timer, ms, 0);
}

/* ---- tell ---- */

static void on_put(void *arg, const struct mb_err *err, int64_t count)
{
    struct mb_rayjob_news *n = arg;

    (void)count;
    n->op = NULL;
    if (n->closing > 0) {
        part_closed(n);
        return;
    }
    if (err->code != MB_OK) {
        mb_warn("rayjob", "the other nodes do not know the deadline yet: %s", err->text);
        again(n, 0);
    } else if (!n->is_told) { /* it has become another meanwhile */
        uv_timer_start(&n->timer, on_timer, 0, 0);
    }
}

static void put(struct mb_rayjob_news *n, struct mb_gcs *gcs)
{
    struct mb_err err = {0};

    n->is_told = 1;
    if (mb_gcs_kv_put(gcs, NS, n->key, n->value, strlen(n->value), 1, CALL_MS, on_put, n, &n->op,
                      &err) != MB_OK)
        again(n, n->is_told = 0);
}

void mb_rayjob_news_tell(struct mb_rayjob_news *n, uint64_t unix_ms)
{
    if (n == NULL || n->closing > 0)
        return;
    if (unix_ms == MB_DEADLINE_NEVER)
        snprintf(n->value, sizeof(n->value), "%s", NEVER);
    else
        snprintf(n->value, sizeof(n->value), "%" PRIu64, unix_ms);
    n->is_told = 0;
    if (n->op == NULL)
        uv_timer_start(&n->timer, on_timer, 0, 0);
}

/* ---- ask ---- */

static void hear(struct mb_rayjob_news *n, const char *value, size_t len)
{
    uint64_t unix_ms = MB_DEADLINE_NEVER;
    int64_t number = 0;

    if (len >= VALUE_MAX || strcmp(n->value, value) == 0)
        return;
    snprintf(n->value, sizeof(n->value), "%s", value);
    if (strcmp(value, NEVER) != 0) {
        struct mb_err err = {0};

        if (mb_parse_i64(value, 1, INT64_MAX, "the RayJob's deadline", &number, &err) != MB_OK) {
            mb_warn("rayjob", "%s", err.text);
            return;
        }
        unix_ms = (uint64_t)number;
    }
    n->on_deadline(n->arg, unix_ms);
}

static void on_got(void *arg, const struct mb_err *err, const void *value, size_t len)
{
    struct mb_rayjob_news *n = arg;

    n->op = NULL;
    if (n->closing > 0) {
        part_closed(n);
        return;
    }
    if (err->code == MB_OK)
        hear(n, value, len);
    again(n, err->code == MB_OK);
}

static void get(struct mb_rayjob_news *n, struct mb_gcs *gcs)
{
    struct mb_err err = {0};

    if (mb_gcs_kv_get(gcs, NS, n->key, CALL_MS, on_got, n, &n->op, &err) != MB_OK)
        again(n, 0);
}

static void on_timer(uv_timer_t *t)
{
    struct mb_rayjob_news *n = t->data;
    struct mb_gcs *gcs = mb_node_gcs(n->opts.node);

    if (n->op != NULL)
        return;
    if (gcs == NULL || !mb_gcs_connected(gcs))
        again(n, 0);
    else if (n->opts.tells)
        put(n, gcs);
    else
        get(n, gcs);
}

/* ---- life ---- */

int mb_rayjob_news_start(uv_loop_t *loop, const struct mb_rayjob_news_opts *opts,
                         void (*on_deadline)(void *arg, uint64_t unix_ms), void *arg,
                         struct mb_rayjob_news **out, struct mb_err *err)
{
    struct mb_rayjob_news *n = mb_calloc(1, sizeof(*n));

    if (n == NULL)
        return mb_err_set(err, MB_ENOMEM, "no memory for the RayJob's deadline");
    n->opts = *opts;
    n->on_deadline = on_deadline;
    n->arg = arg;
    snprintf(n->key, sizeof(n->key), "rayjob-deadline:%.256s",
             opts->cluster != NULL ? opts->cluster : "");
    uv_timer_init(loop, &n->timer);
    n->timer.data = n;
    if (!opts->tells)
        uv_timer_start(&n->timer, on_timer, FIRST_MS, 0);
    *out = n;
    return MB_OK;
}

void mb_rayjob_news_stop(struct mb_rayjob_news *n, void (*cb)(void *arg), void *arg)
{
    n->close_cb = cb;
    n->close_arg = arg;
    n->closing = 1 + (n->op != NULL);
    if (n->op != NULL)
        mb_gcs_op_cancel(n->op);
    uv_close((uv_handle_t *)&n->timer, on_timer_closed);
}
