/*
 * Ports that are chosen automatically. The kernel's own choice (port 0) lies in its ephemeral
 * range: while a server is down for a moment, an outgoing connection or anybody's port 0 may get
 * its port, and it cannot come back to where others know it. So a port is chosen outside of that
 * range, where only who names it gets it. Any thread.
 */
#ifndef MOBULA_BASE_PORTS_H
#define MOBULA_BASE_PORTS_H

struct mb_port_range {
    int first, last; /* last < first: empty */
};

/* Where to choose, given the kernel's ephemeral range; empty when nothing suitable is left. Pure.
 * 20000 to 26999, else 61000 to 65535: clear of Ray's worker ports (10002 to 19999), torch's
 * MASTER_PORT (29500), Kubernetes' node ports (30000 to 32767). */
struct mb_port_range mb_ports_outside(int ephemeral_first, int ephemeral_last);

/* 1 if a server can listen there now. bind_addr is a numeric address. */
int mb_port_is_free(const char *bind_addr, int port);
/* One that is free now, at random; 0 when none was found: then the kernel chooses. */
int mb_port_pick(const char *bind_addr);
/* How often a server chooses again because another one was faster. */
enum { MB_PORT_RACES = 8 };

#endif
