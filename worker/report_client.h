/*
 * The worker's end of the report socket: a small thread that keeps the socket moving, so that a
 * training step never waits for its agent.
 *
 * Outgoing: of progress only the newest waits; every other message is kept, at most
 * MB_REPORT_CLIENT_QUEUE_MAX of them. Incoming wishes are remembered until the training loop asks.
 * A socket that ends, or that speaks another protocol, is a wish to stop: nobody is left to train
 * for. Threads: start and close from one thread, the others from any, until close.
 */
#ifndef MOBULA_WORKER_REPORT_CLIENT_H
#define MOBULA_WORKER_REPORT_CLIENT_H

#include "worker/report.h"

enum {
    MB_REPORT_CLIENT_QUEUE_MAX = 1024,
    MB_REPORT_REASON_MAX = 256,
    MB_REPORT_DURABLE_MAX = 1024
};

struct mb_report_client;

/* fd is taken (made non-blocking and close-on-exec). The hello is the first message. */
int mb_report_client_start(int fd, uint32_t rank, struct mb_report_client **out,
                           struct mb_err *err);
/* Send what may be sent within flush_ms, then end. NULL is legal. */
void mb_report_client_close(struct mb_report_client *c, uint64_t flush_ms);

/* r is read before the call returns; its rank is filled in. MB_EFULL, MB_ENOMEM; MB_EUNAVAIL after
 * the socket has ended. */
int mb_report_client_send(struct mb_report_client *c, struct mb_report *r, struct mb_err *err);

/* Wait for start; *out is then the caller's, to be closed. MB_ETIMEOUT, or MB_ECANCELED with the
 * reason when stop came instead. */
int mb_report_client_wait_start(struct mb_report_client *c, uint64_t timeout_ms,
                                struct mb_report *out, struct mb_err *err);

/* 1 if a stop was asked for; reason is filled. It stays. */
int mb_report_client_stopping(struct mb_report_client *c, char reason[MB_REPORT_REASON_MAX]);
/* 1 once per save_now. */
int mb_report_client_take_save_now(struct mb_report_client *c, char reason[MB_REPORT_REASON_MAX]);
/* 1 if the agent called this iteration durable; it remembers the last MB_REPORT_DURABLE_MAX. */
int mb_report_client_is_durable(struct mb_report_client *c, int64_t iteration);

#endif
