/*
 *  1. --no-token, or RAY_AUTH_MODE=disabled: no token, wherever the node listens.
 *  2. A token that is given or found holds on loopback too: it is one cluster with one token.
 *  3. None, on loopback: none is needed. Else the head makes one, and a node needs the head's.
 *  4. With RAY_USE_TLS a node without a token is as safe, unless it takes jobs over HTTP, which has
 *     no TLS with Ray.
 */
#include "agent/access.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/address.h"
#include "gcs/tls.h"

enum mb_access_step mb_access_decide(int has_token, int is_trusted, int is_loopback, int is_head,
                                     int is_mutual)
{
    if (is_trusted)
        return MB_ACCESS_NONE;
    if (has_token)
        return MB_ACCESS_USE;
    if (is_loopback || (is_mutual && !is_head))
        return MB_ACCESS_NONE;
    return is_head ? MB_ACCESS_MAKE : MB_ACCESS_REFUSE;
}

int mb_access_is_loopback(const char *ip)
{
    struct in_addr a;

    /* Only what is an address: "127.example.org" is a name that may lead anywhere. */
    return inet_pton(AF_INET, ip, &a) == 1 && ntohl(a.s_addr) >> 24 == 127;
}

static int refuse(const struct mb_agent_options *o, const char *ip, struct mb_err *err)
{
    return mb_err_set(err, MB_EDENIED,
                      "this node would listen on %s and has no token: copy the head's "
                      "~/.ray/auth_token here (mode 0600), or give it with --token-file FILE or "
                      "RAY_AUTH_TOKEN; if the head at %s has none and the network is trusted: "
                      "--no-token",
                      ip, o->address);
}

/* As Ray's agents do; an address that the machine does not have (NAT) is reached at all of them. */
static void choose_http_addr(const char *ip, struct mb_access *a)
{
    struct in_addr v4;
    int is_bound =
        a->token.text == NULL && inet_pton(AF_INET, ip, &v4) == 1 && !mb_address_is_elsewhere(ip);

    snprintf(a->http_addr, sizeof(a->http_addr), "%s", is_bound ? ip : a->bind_addr);
}

int mb_access_choose(const struct mb_agent_options *o, const char *ip, struct mb_access *out,
                     struct mb_err *err)
{
    int is_loopback = mb_access_is_loopback(ip), is_trusted = o->no_token, grpc_only, rc = MB_OK;
    enum mb_token_mode mode;

    *out = (struct mb_access){.is_open = 0};
    snprintf(out->bind_addr, sizeof(out->bind_addr), "%s", is_loopback ? ip : "0.0.0.0");
    if (o->no_token && o->token_file != NULL)
        return mb_err_set(err, MB_EINVAL, "either --token-file or --no-token, not both");
    if (!is_trusted && o->token_file == NULL) {
        rc = mb_token_mode(&mode, err);
        is_trusted = mode == MB_TOKEN_OFF;
    }
    if (rc == MB_OK && !is_trusted)
        rc = mb_token_find(o->token_file, &out->token, err);
    if (rc == MB_OK)
        rc = mb_gcs_use_tls(&out->is_mutual, err);
    if (rc != MB_OK) {
        mb_token_close(&out->token);
        return rc;
    }
    choose_http_addr(ip, out);
    grpc_only = out->is_mutual && !o->is_head && !o->is_job_agent;
    switch (
        mb_access_decide(out->token.text != NULL, is_trusted, is_loopback, o->is_head, grpc_only)) {
    case MB_ACCESS_USE:
        return MB_OK;
    case MB_ACCESS_NONE:
        out->is_open = !is_loopback && !grpc_only;
        return MB_OK;
    case MB_ACCESS_MAKE:
        snprintf(out->http_addr, sizeof(out->http_addr), "%s", out->bind_addr);
        return mb_token_make(&out->token, err);
    case MB_ACCESS_REFUSE:
        break;
    }
    return refuse(o, ip, err);
}

int mb_access_is_local_too(const struct mb_access *a)
{
    return strcmp(a->http_addr, a->bind_addr) != 0;
}

int mb_access_callers_are_trusted(const struct mb_access *a)
{
    return a->token.text != NULL || a->is_open || a->is_mutual;
}

int mb_access_hand_down(const struct mb_access *a, struct mb_err *err)
{
    const char *mode = a->token.text != NULL ? "token" : a->is_open ? "disabled" : NULL;
    int rc = mb_gcs_tls_hand_down(err);

    if (rc != MB_OK || mode == NULL)
        return rc;
    if (setenv("RAY_AUTH_MODE", mode, 1) != 0 ||
        (a->token.path != NULL &&
         (setenv("RAY_AUTH_TOKEN_PATH", a->token.path, 1) != 0 || unsetenv("RAY_AUTH_TOKEN") != 0)))
        return mb_err_sys(err, errno, "the environment of drivers");
    return MB_OK;
}
