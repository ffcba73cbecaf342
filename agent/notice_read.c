/*
 * Reading notices. What clouds answer:
 *   EC2 spot/instance-action      {"action": "terminate", "time": "2017-09-18T08:22:00Z"}
 *   EC2 spot/termination-time     2017-09-18T08:22:00Z
 *   GCE instance/preempted        TRUE or FALSE; 30 s are left
 *   GCE maintenance-event         NONE, MIGRATE_ON_HOST_MAINTENANCE, TERMINATE_ON_HOST_MAINTENANCE;
 * 60 s A migration is none: the machine goes on.
 */
#include <ctype.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include "agent/deadline.h"
#include "agent/notice.h"
#include "base/moment.h"
#include "base/str.h"

enum { WORD_MAX = 256, GCE_PREEMPTED_MS = 30000, GCE_MAINTENANCE_MS = 60000, ALLOWANCE_S = 120 };

static int read_json(const char *text, size_t n, uint64_t written_ms, uint64_t *unix_ms,
                     struct mb_err *err)
{
    json_t *o = json_loadb(text, n, 0, NULL);
    const char *time = json_string_value(json_object_get(o, "time"));
    const char *action = json_string_value(json_object_get(o, "action"));
    int rc;

    if (time == NULL || action == NULL)
        rc = mb_err_set(err, MB_EPROTO, "a notice without \"action\" and \"time\"");
    else
        rc = mb_moment_parse(time, written_ms, "\"time\"", unix_ms, err) == MB_OK ? 1 : MB_EPROTO;
    json_decref(o);
    return rc;
}

static int is_word(const char *text, const char *word)
{
    return strcasecmp(text, word) == 0;
}

int mb_notice_take(struct mb_notice_times *t, enum mb_notice_source from, uint64_t unix_ms)
{
    uint64_t earliest = UINT64_MAX;
    int is_new;

    t->has_said[from] = 1;
    t->unix_ms[from] = unix_ms;
    for (int i = 0; i < MB_NOTICE_N_SOURCES; i++) {
        if (t->has_said[i] && t->unix_ms[i] < earliest)
            earliest = t->unix_ms[i];
    }
    is_new = !t->was_told || t->told_ms != earliest;
    t->was_told = 1;
    t->told_ms = earliest;
    return is_new;
}

int mb_notice_read(const char *text, size_t n, uint64_t written_ms, uint64_t *unix_ms,
                   struct mb_err *err)
{
    char word[WORD_MAX];

    *unix_ms = 0;
    while (n > 0 && isspace((unsigned char)text[n - 1]))
        n--;
    while (n > 0 && isspace((unsigned char)text[0])) {
        text++;
        n--;
    }
    if (n > 0 && text[0] == '{')
        return read_json(text, n, written_ms, unix_ms, err);
    if (n >= WORD_MAX || memchr(text, '\0', n) != NULL)
        return mb_err_set(err, MB_EPROTO, "a notice of %zu bytes that is no JSON object", n);
    memcpy(word, text, n);
    word[n] = '\0';
    if (n == 0)
        return 1;
    if (is_word(word, "FALSE") || is_word(word, "NONE") ||
        is_word(word, "MIGRATE_ON_HOST_MAINTENANCE"))
        return 0;
    if (is_word(word, "TRUE")) {
        *unix_ms = written_ms + GCE_PREEMPTED_MS;
        return 1;
    }
    if (is_word(word, "TERMINATE_ON_HOST_MAINTENANCE")) {
        *unix_ms = written_ms + GCE_MAINTENANCE_MS;
        return 1;
    }
    if (mb_moment_parse(word, written_ms, "the notice", unix_ms, err) != MB_OK)
        return MB_EPROTO;
    return 1;
}

static int seconds_of(const char *(*get)(const char *name), const char *name, int64_t otherwise,
                      int64_t *out, struct mb_err *err)
{
    const char *text = get(name);

    *out = otherwise;
    return text == NULL || text[0] == '\0' ? MB_OK
                                           : mb_parse_i64(text, 0, INT32_MAX, name, out, err);
}

int mb_notice_active_deadline(const char *(*get)(const char *name), uint64_t started_unix_ms,
                              uint64_t *unix_ms, struct mb_err *err)
{
    int64_t active, allowance, margin;
    int rc = seconds_of(get, "MOBULA_ACTIVE_DEADLINE_SECONDS", 0, &active, err);

    *unix_ms = 0;
    if (rc == MB_OK)
        rc = seconds_of(get, "MOBULA_START_ALLOWANCE_SECONDS", ALLOWANCE_S, &allowance, err);
    if (rc == MB_OK)
        rc = seconds_of(get, "MOBULA_DEADLINE_MARGIN_SECONDS", 0, &margin, err);
    if (rc != MB_OK || active == 0)
        return rc;
    *unix_ms = mb_deadline_of_job(started_unix_ms, (uint64_t)active * 1000,
                                  (uint64_t)(allowance + margin) * 1000);
    return MB_OK;
}
