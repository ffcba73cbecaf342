/*
 * What agent, init and supervisors say to each other: SOCK_SEQPACKET, one text message a packet.
 * libc only, used by both ends.
 *
 * agent -> init (socket MOBULA_INIT_FD)     init -> agent
 *   ready                                     -
 *   spawn PATH-OF-SPEC                        ok PID PATH | error PATH\nTEXT
 *   drop PATH-OF-SPEC                         -  (nobody waits for that answer any more)
 *
 * agent -> supervisor (socket DIR/s)        supervisor -> agent
 *   hello 1                                   hello 1 PID TICKS N, then the replay: per child
 *                                             started/failed/exit, ending/all-exited, replayed
 *   fds                                       fd I (SCM_RIGHTS) for each report socket, then fds
 *   stop GRACE_MS SIGNAL                      ending REASON
 *   kill                                      ending REASON
 *   release                                   (closes: the agent has everything it needs)
 *                                             started I PID TICKS | failed I TEXT |
 *                                             exit I CODE SIGNAL | all-exited, as they happen
 */
#ifndef MOBULA_AGENT_SUPERVISE_PROTOCOL_H
#define MOBULA_AGENT_SUPERVISE_PROTOCOL_H

#include <stddef.h>
#include <stdint.h>
#include "agent/supervise/spec.h"

#define MB_SUP_SOCKET     "s" /* in the attempt directory; reached through /proc/self/fd/N/s */
#define MB_SUP_STATE_FILE "state"
#define MB_INIT_FD_ENV    "MOBULA_INIT_FD"
#define MB_REPORT_FD_ENV  "MOBULA_REPORT_FD"
#define MB_LIFE_FD_ENV    "MOBULA_LIFE_FD"  /* a pipe that hangs up when init is gone */
#define MB_READY_FD_ENV   "MOBULA_READY_FD" /* the supervisor writes "ok" or why it cannot start */
#define MB_SECRET_FD_ENV                                                                           \
    "MOBULA_SECRET_FD"              /* of --secret-fd, for the agent: pread it and close it */
#define MB_INIT_PID_FILE "init.pid" /* in the run directory: "PID START_TICKS\n" */

enum { MB_SUP_PROTOCOL = 1, MB_SUP_PACKET_MAX = 4096 + MB_SUP_TEXT_MAX };

enum mb_sup_type {
    MB_SUP_MSG_HELLO,
    MB_SUP_MSG_STARTED,
    MB_SUP_MSG_START_FAILED,
    MB_SUP_MSG_EXIT,
    MB_SUP_MSG_ENDING,
    MB_SUP_MSG_ALL_EXITED,
    MB_SUP_MSG_REPLAYED,
    MB_SUP_MSG_FD,
    MB_SUP_MSG_FDS,
    MB_SUP_MSG_STOP,
    MB_SUP_MSG_KILL,
    MB_SUP_MSG_RELEASE
};

/* One message between agent and supervisor; fields that the type does not use are zero. */
struct mb_sup_msg {
    enum mb_sup_type type;
    uint32_t version; /* hello */
    uint32_t child;   /* index, or in hello the number of children */
    int64_t pid;      /* hello: the supervisor's (0 from an agent) */
    uint64_t ticks;
    int code;
    int signal;
    uint32_t grace_ms;
    char text[MB_SUP_TEXT_MAX];
};

/* Length of the text in out (no NUL needed on the wire), never more than MB_SUP_PACKET_MAX. */
size_t mb_sup_msg_format(const struct mb_sup_msg *m, char out[MB_SUP_PACKET_MAX]);
/* 0, or -1 when the bytes are not a message. */
int mb_sup_msg_parse(const char *p, size_t n, struct mb_sup_msg *out);

#endif
