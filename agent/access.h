/*
 * Who may reach this node's ports, and with which token. Blocking; before the loop runs.
 * Without a token every port is bound to loopback, unless somebody said in so many words that the
 * network is trusted: launching a gang or a job is running a program. HTTP without a token is on no
 * other address of this machine than the node's then. Mutual TLS stands for a token
 * where programs are started through gRPC alone: on a node that takes no jobs over HTTP.
 */
#ifndef MOBULA_AGENT_ACCESS_H
#define MOBULA_AGENT_ACCESS_H

#include "agent/options.h"
#include "base/err.h"
#include "gcs/token.h"

enum mb_access_step {
    MB_ACCESS_USE,   /* the token that was found */
    MB_ACCESS_NONE,  /* no token: loopback, or the network is trusted */
    MB_ACCESS_MAKE,  /* a head that others can reach: its first start makes the token */
    MB_ACCESS_REFUSE /* a node that others can reach, and the head's token is not here */
};

/* Pure. */
enum mb_access_step mb_access_decide(int has_token, int is_trusted, int is_loopback, int is_head,
                                     int is_mutual);

struct mb_access {
    struct mb_token token;
    char bind_addr[16]; /* of gRPC, and of HTTP with a token */
    char http_addr[16]; /* of HTTP; another one than bind_addr: and on 127.0.0.1, as Ray's agents */
    int is_mutual;      /* gRPC callers show a certificate (RAY_USE_TLS); HTTP's do not */
    int is_open;        /* other machines may start programs here, and need neither */
};

/* 127.0.0.0/8, as an address that is bound and told to others. */
int mb_access_is_loopback(const char *ip);
/* What the options, Ray's variables and ip ask for. MB_EDENIED: MB_ACCESS_REFUSE, with the next
 * step in its text. */
int mb_access_choose(const struct mb_agent_options *o, const char *ip, struct mb_access *out,
                     struct mb_err *err);
/* HTTP is on 127.0.0.1 besides its own address. */
int mb_access_is_local_too(const struct mb_access *a);
/* Programs are started by callers who have shown who they are, or whom somebody trusts. */
int mb_access_callers_are_trusted(const struct mb_access *a);
/* Drivers on this node look where Ray looks: they find the same token, or none, and the same
 * certificates. */
int mb_access_hand_down(const struct mb_access *a, struct mb_err *err);

#endif
