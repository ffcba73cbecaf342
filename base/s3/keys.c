/*
 * Answers with credentials.
 *
 * 1. The JSON or XML is parsed; the four fields are copied into secrets, what the parser made of
 *    them is overwritten.
 * 2. Access key and secret are needed; a time that cannot be read is an error, since keys without
 *    an end would never be fetched again.
 * Failures: what is no such answer, a refusal inside it ("Code": not "Success"), memory. Texts
 * never quote a field other than the error's code.
 */
#include "base/s3/keys.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include "base/alloc.h"
#include "base/s3/s3_xml.h"

enum { REFRESH_BEFORE_MS = 300000, JITTER_MS = 60000, MAX_FIELD_BYTES = 16 * 1024 };

void mb_s3_keys_close(struct mb_s3_keys *k)
{
    mb_free(k->access_key);
    mb_secret_destroy(k->secret_key);
    mb_secret_destroy(k->session_token);
    memset(k, 0, sizeof *k);
}

int mb_s3_keys_set(struct mb_s3_keys *k, const char *access_key, const char *secret_key,
                   const char *token)
{
    int has_token = token && *token;
    memset(k, 0, sizeof *k);
    k->access_key = mb_strdup(access_key);
    k->secret_key = mb_secret_create(secret_key, strlen(secret_key));
    if (has_token)
        k->session_token = mb_secret_create(token, strlen(token));
    if (k->access_key && k->secret_key && (!has_token || k->session_token))
        return 0;
    mb_s3_keys_close(k);
    return MB_ENOMEM;
}

int mb_s3_keys_time(const char *text, uint64_t *unix_ms)
{
    struct tm tm = {0};
    const char *rest = strptime(text, "%Y-%m-%dT%H:%M:%S", &tm);
    if (!rest)
        return MB_EPROTO;
    if (*rest == '.')
        rest += 1 + strspn(rest + 1, "0123456789");
    time_t seconds = strcmp(rest, "Z") == 0 || strcmp(rest, "+00:00") == 0 ? timegm(&tm) : -1;
    if (seconds <= 0)
        return MB_EPROTO;
    *unix_ms = (uint64_t)seconds * 1000;
    return 0;
}

/* What else there is could never be sent in a header. */
int mb_s3_keys_is_plain(const char *s)
{
    size_t n = 0;
    for (; s[n]; n++) {
        if ((unsigned char)s[n] <= 0x20 || (unsigned char)s[n] >= 0x7f || n > MAX_FIELD_BYTES)
            return 0;
    }
    return n > 0;
}

static int take(struct mb_s3_keys *out, const char *access, const char *secret, const char *token,
                const char *expires, struct mb_err *err)
{
    uint64_t unix_ms = 0;
    if (!access || !secret || !mb_s3_keys_is_plain(access) || !mb_s3_keys_is_plain(secret) ||
        (token && *token && !mb_s3_keys_is_plain(token)))
        return mb_err_set(err, MB_EPROTO, "the answer holds no credentials");
    if (expires && mb_s3_keys_time(expires, &unix_ms) != 0)
        return mb_err_set(err, MB_EPROTO, "the credentials' expiration cannot be read");
    if (mb_s3_keys_set(out, access, secret, token) != 0)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    out->expires_unix_ms = unix_ms;
    return 0;
}

/* ---- JSON ---- */

static void wipe_strings(json_t *o)
{
    const char *name;
    json_t *value;
    json_object_foreach(o, name, value)
    {
        if (json_is_string(value))
            mb_secret_wipe((char *)json_string_value(value), json_string_length(value));
    }
}

int mb_s3_keys_from_json(const void *p, size_t n, struct mb_s3_keys *out, struct mb_err *err)
{
    json_t *o = json_loadb(p, n, 0, NULL);
    const char *code = json_string_value(json_object_get(o, "Code"));
    int rc;
    memset(out, 0, sizeof *out);
    if (!json_is_object(o))
        rc = mb_err_set(err, MB_EPROTO, "the answer is no JSON object");
    else if (code && strcmp(code, "Success") != 0)
        rc = mb_err_set(err, MB_EDENIED, "the answer's code is %.60s", code);
    else
        rc = take(out, json_string_value(json_object_get(o, "AccessKeyId")),
                  json_string_value(json_object_get(o, "SecretAccessKey")),
                  json_string_value(json_object_get(o, "Token")),
                  json_string_value(json_object_get(o, "Expiration")), err);
    if (json_is_object(o))
        wipe_strings(o);
    json_decref(o);
    return rc;
}

/* ---- XML ---- */

struct sts {
    struct mb_secret *field[4]; /* access key, secret key, token, expiration */
};

static int on_field(void *arg, const char *parent, const char *name, const char *text)
{
    static const char *const names[] = {"AccessKeyId", "SecretAccessKey", "SessionToken",
                                        "Expiration"};
    struct sts *sts = arg;
    for (size_t i = 0; strcmp(parent, "Credentials") == 0 && i < 4; i++) {
        if (strcmp(name, names[i]) != 0)
            continue;
        mb_secret_destroy(sts->field[i]);
        sts->field[i] = mb_secret_create(text, strlen(text));
        if (!sts->field[i])
            return MB_ENOMEM;
    }
    return 0;
}

int mb_s3_keys_from_sts(const void *p, size_t n, struct mb_s3_keys *out, struct mb_err *err)
{
    struct sts sts = {{NULL}};
    memset(out, 0, sizeof *out);
    int rc = mb_s3_xml_parse(p, n, on_field, &sts, err);
    if (rc == 0)
        rc = take(out, mb_secret_text(sts.field[0]), mb_secret_text(sts.field[1]),
                  mb_secret_text(sts.field[2]), mb_secret_text(sts.field[3]), err);
    for (size_t i = 0; i < 4; i++)
        mb_secret_destroy(sts.field[i]);
    return rc;
}

/* ---- age ---- */

enum mb_s3_keys_age mb_s3_keys_age(uint64_t expires_unix_ms, uint64_t lifetime_ms, uint64_t random,
                                   uint64_t now_unix_ms)
{
    uint64_t before = REFRESH_BEFORE_MS + random % JITTER_MS;
    if (expires_unix_ms == 0)
        return MB_S3_KEYS_FRESH;
    if (now_unix_ms >= expires_unix_ms)
        return MB_S3_KEYS_EXPIRED;
    if (before > lifetime_ms / 2)
        before = lifetime_ms / 2;
    return expires_unix_ms - now_unix_ms <= before ? MB_S3_KEYS_AGING : MB_S3_KEYS_FRESH;
}
