/*
 * Store operations for the tests beside this file: one JSON object a line on stdin says what to do,
 * one a line on stdout how it went. usage: store_tool URL
 *
 *   {"op": "put", "key", "text", "if": "absent" | "match", "etag"}    {"op": "get", "key", "max"}
 *   {"op": "range", "key", "offset", "size", "etag"}                  {"op": "head", "key"}
 *   {"op": "list", "prefix"}                                          {"op": "delete", "key"}
 *   {"op": "put_file", "key", "path", "resume", "stop_at"}            {"op": "get_file", "key",
 * "path"}
 *   {"op": "many", "n", "text"}: n puts at once, keys many/0 and so on
 *   {"op": "setenv", "name", "value"}: value null takes it away       {"op": "open", "url"}
 * All take "timeout_ms". stop_at: the store is closed when so many bytes are with the server, and
 * opened again afterwards, as by a process that was told to end in the middle.
 * A store that cannot be opened is said on stderr, and may be opened by a command; without any the
 * exit status says it (78, EX_CONFIG).
 * An answer: {"code": "OK" or the name of an error, "text", "etag", "size", "data", "keys",
 * "upload_id", "ms", "crc"}.  crc: of put_file and get_file.
 */
#include <inttypes.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <uv.h>
#include "base/loop.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/s3/store.h"

struct tool {
    uv_loop_t loop;
    uv_timer_t ticker; /* so that one turn of the loop returns after progress alone */
    struct mb_store *store;
    char url[512];
    int n_open; /* operations without an answer */
    int is_closing;
    uint64_t stop_at;
    uint64_t done_bytes;
    json_t *answer;
};

static void set(struct tool *t, const char *name, json_t *value)
{
    if (!value || json_object_set_new(t->answer, name, value) != 0)
        abort();
}

static void fail(struct tool *t, const struct mb_err *err)
{
    set(t, "code", json_string(mb_code_name(err->code)));
    set(t, "text", json_string(err->text));
}

static void on_result(void *arg, const struct mb_store_result *r)
{
    struct tool *t = arg;
    t->n_open--;
    if (r->error != 0 || !json_object_get(t->answer, "code")) { /* of many the failure counts */
        set(t, "code", json_string(mb_code_name(r->error)));
        set(t, "text", json_string(r->text));
    }
    if (r->error != 0)
        return;
    set(t, "etag", json_string(r->etag ? r->etag : ""));
    set(t, "size", json_integer((json_int_t)r->size_bytes));
    set(t, "crc", json_sprintf("%016" PRIx64, r->crc64nvme));
    if (r->data)
        set(t, "data", json_stringn(r->data, r->data_len));
    json_t *keys = json_array();
    for (size_t i = 0; i < r->n_entries; i++)
        json_array_append_new(keys, json_string(r->entries[i].key));
    set(t, "keys", keys);
}

static void on_upload_id(void *arg, const char *id)
{
    set(arg, "upload_id", json_string(id));
}

static void on_progress(void *arg, uint64_t done_bytes, uint64_t total_bytes)
{
    struct tool *t = arg;
    (void)total_bytes;
    t->done_bytes = done_bytes;
}

static void on_tick(uv_timer_t *timer)
{
    (void)timer;
}

static void on_closed(void *arg)
{
    struct tool *t = arg;
    t->store = NULL;
}

static void close_store(struct tool *t)
{
    if (!t->store)
        return;
    mb_store_close(t->store, on_closed, t);
    while (t->store)
        mb_loop_turn(&t->loop);
}

static int reopen(struct tool *t, struct mb_err *err)
{
    close_store(t);
    return mb_store_open(&t->loop, t->url, &t->store, err);
}

static const char *text_of(const json_t *command, const char *name)
{
    const char *value = json_string_value(json_object_get(command, name));
    return value ? value : "";
}

static uint64_t number_of(const json_t *command, const char *name, uint64_t otherwise)
{
    const json_t *value = json_object_get(command, name);
    return value ? (uint64_t)json_integer_value(value) : otherwise;
}

static enum mb_store_if condition_of(const json_t *command)
{
    const char *text = text_of(command, "if");
    return strcmp(text, "absent") == 0  ? MB_STORE_IF_ABSENT
           : strcmp(text, "match") == 0 ? MB_STORE_IF_MATCH
                                        : MB_STORE_ALWAYS;
}

static int start_put_file(struct tool *t, const json_t *c, struct mb_err *err)
{
    const char *resume = text_of(c, "resume");
    struct mb_store_put_file put = {.key = text_of(c, "key"),
                                    .path = text_of(c, "path"),
                                    .resume_upload_id = resume[0] ? resume : NULL,
                                    .on_upload_id = on_upload_id,
                                    .progress = on_progress,
                                    .timeout_ms = number_of(c, "timeout_ms", 60000)};
    t->stop_at = number_of(c, "stop_at", 0);
    return mb_store_put_file(t->store, &put, on_result, t, err);
}

static int start_many(struct tool *t, const json_t *c, struct mb_err *err)
{
    const char *text = text_of(c, "text");
    uint64_t n = number_of(c, "n", 1);
    int rc = 0;
    for (uint64_t i = 0; rc == 0 && i < n; i++) {
        char key[64];
        snprintf(key, sizeof key, "many/%llu", (unsigned long long)i);
        rc = mb_store_put(t->store, key, text, strlen(text), MB_STORE_ALWAYS, NULL,
                          number_of(c, "timeout_ms", 60000), on_result, t, err);
        t->n_open += rc == 0;
    }
    return rc;
}

static int start(struct tool *t, const json_t *c, struct mb_err *err)
{
    const char *op = text_of(c, "op");
    const char *key = text_of(c, "key");
    const char *text = text_of(c, "text");
    uint64_t timeout_ms = number_of(c, "timeout_ms", 60000);
    int rc;
    if (strcmp(op, "many") == 0)
        return start_many(t, c, err);
    if (strcmp(op, "put") == 0) {
        rc = mb_store_put(t->store, key, text, strlen(text), condition_of(c), text_of(c, "etag"),
                          timeout_ms, on_result, t, err);
    } else if (strcmp(op, "get") == 0) {
        rc = mb_store_get(t->store, key, number_of(c, "max", 1 << 20), timeout_ms, on_result, t,
                          err);
    } else if (strcmp(op, "range") == 0) {
        struct mb_store_range range = {.key = key,
                                       .etag = text_of(c, "etag"),
                                       .offset = number_of(c, "offset", 0),
                                       .size_bytes = number_of(c, "size", 1),
                                       .timeout_ms = timeout_ms};
        rc = mb_store_get_range(t->store, &range, on_result, t, err);
    } else if (strcmp(op, "head") == 0) {
        rc = mb_store_head(t->store, key, timeout_ms, on_result, t, err);
    } else if (strcmp(op, "list") == 0) {
        rc = mb_store_list(t->store, text_of(c, "prefix"), timeout_ms, on_result, t, err);
    } else if (strcmp(op, "delete") == 0) {
        rc = mb_store_delete(t->store, key, timeout_ms, on_result, t, err);
    } else if (strcmp(op, "put_file") == 0) {
        rc = start_put_file(t, c, err);
    } else if (strcmp(op, "get_file") == 0) {
        rc = mb_store_get_file(t->store, key, text_of(c, "path"), on_progress, timeout_ms,
                               on_result, t, err);
    } else {
        rc = mb_err_set(err, MB_EINVAL, "unknown op \"%s\"", op);
    }
    t->n_open += rc == 0;
    return rc;
}

static int set_env(const json_t *c, struct mb_err *err)
{
    const char *value = json_string_value(json_object_get(c, "value"));
    const char *name = text_of(c, "name");
    int rc = value ? setenv(name, value, 1) : unsetenv(name);
    return rc == 0 ? 0 : mb_err_set(err, MB_EINVAL, "setenv %s", name);
}

static int run_operation(struct tool *t, const json_t *c, struct mb_err *err)
{
    int rc = start(t, c, err);
    while (t->n_open > 0) {
        mb_loop_turn(&t->loop);
        if (t->stop_at > 0 && t->done_bytes >= t->stop_at && !t->is_closing) {
            t->is_closing = 1;
            mb_store_close(t->store, on_closed, t);
        }
    }
    if (!t->is_closing)
        return rc;
    while (t->store)
        mb_loop_turn(&t->loop);
    return reopen(t, err);
}

static void run_command(struct tool *t, const json_t *c)
{
    struct mb_err err = {0};
    uint64_t began_ms = mb_mono_ms();
    const char *op = text_of(c, "op");
    int rc;
    t->answer = json_object();
    t->stop_at = t->done_bytes = 0;
    t->is_closing = 0;
    if (strcmp(op, "setenv") == 0) {
        rc = set_env(c, &err);
    } else if (strcmp(op, "open") == 0) {
        if (text_of(c, "url")[0])
            snprintf(t->url, sizeof t->url, "%s", text_of(c, "url"));
        rc = reopen(t, &err);
    } else {
        rc = t->store ? run_operation(t, c, &err) : mb_err_set(&err, MB_ESTATE, "not open");
    }
    if (rc != 0)
        fail(t, &err);
    else if (!json_object_get(t->answer, "code"))
        set(t, "code", json_string("OK"));
    set(t, "ms", json_integer((json_int_t)(mb_mono_ms() - began_ms)));
    if (json_dumpf(t->answer, stdout, JSON_COMPACT) != 0)
        abort();
    putchar('\n');
    fflush(stdout);
    json_decref(t->answer);
}

int main(int argc, char **argv)
{
    static struct tool tool;
    struct tool *t = &tool;
    char *line = NULL;
    size_t cap = 0;
    struct mb_err err;
    int is_refused;
    if (argc != 2) {
        fprintf(stderr, "usage: store_tool URL\n");
        return 64;
    }
    signal(SIGPIPE, SIG_IGN);
    mb_log_init(2, MB_LOG_DEBUG);
    uv_loop_init(&t->loop);
    uv_timer_init(&t->loop, &t->ticker);
    uv_timer_start(&t->ticker, on_tick, 5, 5);
    snprintf(t->url, sizeof t->url, "%s", argv[1]);
    is_refused = reopen(t, &err) != 0;
    if (is_refused)
        fprintf(stderr, "%s\n", err.text); /* the first command may mend it */
    while (getline(&line, &cap, stdin) > 0) {
        json_t *command = json_loads(line, 0, NULL);
        if (!command) {
            fprintf(stderr, "not JSON: %s", line);
            return 64;
        }
        is_refused = 0; /* its answer says how it is */
        run_command(t, command);
        json_decref(command);
    }
    free(line);
    close_store(t);
    uv_close((uv_handle_t *)&t->ticker, NULL);
    uv_run(&t->loop, UV_RUN_DEFAULT);
    if (uv_loop_close(&t->loop) != 0)
        return 70;
    return is_refused ? 78 : 0;
}
