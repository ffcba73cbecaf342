/* What becomes of a follower whose connection has ended. Pure: what is known comes in, time too. */
#ifndef MOBULA_CLI_FOLLOW_RULES_H
#define MOBULA_CLI_FOLLOW_RULES_H

#include <stdint.h>

enum { MB_FOLLOW_LOST_MS = 300 * 1000, MB_FOLLOW_NO_SUCH_LOG = 4404 };

struct mb_follow_end {
    long http_status; /* of a handshake that was refused; 0: there was a stream */
    int status_code;  /* of the stream's close (RFC 6455) */
    int once;         /* up to the log's present end is enough */
    int answers;      /* the server, asked for the job after it */
    int is_terminal;  /* the job, then */
};

enum mb_follow_verdict {
    MB_FOLLOW_AGAIN,
    MB_FOLLOW_DONE,       /* all of it came: the only success */
    MB_FOLLOW_NOWHERE,    /* there is no such log */
    MB_FOLLOW_UNREADABLE, /* it will not become so by asking again */
    MB_FOLLOW_SILENT,     /* no answer for too long */
    MB_FOLLOW_BROKEN,     /* answers, and no end of the log, for too long */
};

/* *seen_ms: when the job was last seen to need its log, begun with the following; renewed here. */
enum mb_follow_verdict mb_follow_judge(const struct mb_follow_end *e, uint64_t now_ms,
                                       uint64_t *seen_ms);

#endif
