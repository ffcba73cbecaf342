/*
 * Verdicts before a handler runs.
 *
 * 1. Token: the first non-empty of Authorization, X-Ray-Authorization and the cookie
 *    ray-authentication-token counts; "Bearer T" must equal the token, compared in constant time.
 * 2. Browser: any header only browsers send marks the request; the guard's status says what such a
 *    request may do. It defends against DNS rebinding, not against a hostile program.
 * Failures: none present 401, present and wrong 403, browser 405 or 403.
 */
#include "base/http/guard.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <openssl/crypto.h>

static const char cookie_name[] = "ray-authentication-token";

static int token_equal(const char *given, size_t n, const char *token)
{
    /* The length of the token is no secret; its bytes are. */
    return n == strlen(token) && CRYPTO_memcmp(given, token, n) == 0;
}

/* The value of our cookie inside a Cookie header, or NULL; *n is its length. */
static const char *find_cookie(const char *cookies, size_t *n)
{
    const size_t name_len = sizeof cookie_name - 1;
    while (cookies && *cookies) {
        cookies += strspn(cookies, " \t;");
        size_t len = strcspn(cookies, ";");
        if (len > name_len && strncmp(cookies, cookie_name, name_len) == 0 &&
            cookies[name_len] == '=') {
            const char *value = cookies + name_len + 1;
            *n = len - name_len - 1;
            while (*n > 0 && (value[*n - 1] == ' ' || value[*n - 1] == '\t'))
                (*n)--;
            if (*n >= 2 && value[0] == '"' && value[*n - 1] == '"') {
                value++;
                *n -= 2;
            }
            return value;
        }
        cookies += len;
    }
    return NULL;
}

static void refuse(struct mb_http_verdict *out, int status, const char *text)
{
    out->status = status;
    snprintf(out->text, sizeof out->text, "%s", text);
}

void mb_http_guard_token(const char *token, mb_http_header_fn header, const void *arg,
                         struct mb_http_verdict *out)
{
    out->status = 0;
    if (!token)
        return;
    const char *value = header(arg, "Authorization");
    if (!value || !*value)
        value = header(arg, "X-Ray-Authorization");
    if (value && *value) {
        if (strncasecmp(value, "Bearer ", 7) != 0 ||
            !token_equal(value + 7, strlen(value + 7), token))
            refuse(out, 403, "Forbidden: Invalid authentication token");
        return;
    }
    size_t n = 0;
    const char *cookie = find_cookie(header(arg, "Cookie"), &n);
    if (!cookie || n == 0)
        refuse(out, 401, "Unauthorized: Missing authentication token");
    else if (!token_equal(cookie, n, token))
        refuse(out, 403, "Forbidden: Invalid authentication token");
}

int mb_http_guard_is_browser(mb_http_header_fn header, const void *arg)
{
    static const char *const names[] = {"Referer",
                                        "Origin",
                                        "Sec-Fetch-Mode",
                                        "Sec-Fetch-Dest",
                                        "Sec-Fetch-Site",
                                        "Sec-Fetch-User",
                                        "Access-Control-Request-Method",
                                        "Access-Control-Request-Headers"};
    const char *agent = header(arg, "User-Agent");
    if (agent && strncmp(agent, "Mozilla", 7) == 0)
        return 1;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (header(arg, names[i]))
            return 1;
    }
    return 0;
}

void mb_http_guard_browser(int guard_status, const char *method, mb_http_header_fn header,
                           const void *arg, struct mb_http_verdict *out)
{
    out->status = 0;
    if (guard_status == 0 || !mb_http_guard_is_browser(header, arg))
        return;
    if (guard_status != 405) {
        refuse(out, guard_status, "Browser requests not allowed.");
        return;
    }
    if (strcmp(method, "GET") == 0 || strcmp(method, "HEAD") == 0 || strcmp(method, "OPTIONS") == 0)
        return;
    out->status = 405;
    snprintf(out->text, sizeof out->text, "'%.32s' method not allowed for browser traffic.",
             method);
}
