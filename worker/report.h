/*
 * What a rank and its node agent say to each other, over one inherited stream socket whose number
 * is in the environment variable MOBULA_REPORT_FD. Agent and worker meet here and nowhere else.
 *
 * A frame is a little-endian u32 length (at most MB_REPORT_FRAME_MAX) and that many bytes of one
 * JSON object whose field "t" names the message. The functions below are pure: bytes in, struct
 * out. The supervisor keeps the socket open across an agent restart, so a worker must never treat a
 * slow reader as an error: it drops progress (only the newest counts) and keeps the other messages.
 *
 *   worker -> agent   hello, endpoint, progress, saved, done, failed
 *   agent -> worker   start, save_now, stop, durable
 */
#ifndef MOBULA_WORKER_REPORT_H
#define MOBULA_WORKER_REPORT_H

#include <stddef.h>
#include <stdint.h>
#include "base/buf.h"
#include "base/err.h"

enum { MB_REPORT_ABI = 1, MB_REPORT_FRAME_MAX = 1 << 20 };

enum mb_report_type {
    MB_REPORT_HELLO,    /* abi, rank, pid */
    MB_REPORT_ENDPOINT, /* rank, text = endpoint, opaque to everybody but workers */
    MB_REPORT_PROGRESS, /* iteration .. validation_loss */
    MB_REPORT_SAVED,  /* iteration, text = directory of the iteration, files: this rank's, fsynced;
                         stall_ms, write_ms */
    MB_REPORT_DONE,   /* iteration: training ended as asked */
    MB_REPORT_FAILED, /* text = one line: what failed, naming the operation and the peer */
    MB_REPORT_START,  /* endpoints by rank */
    MB_REPORT_SAVE_NOW, /* text = reason */
    MB_REPORT_STOP,     /* text = reason: finish the step, save, exit */
    MB_REPORT_DURABLE   /* iteration is committed in the store */
};

struct mb_report_file {
    char *path; /* relative to the iteration's directory */
    uint64_t size_bytes;
    uint64_t crc64nvme;
};

/* One decoded message; fields that the type does not use are zero. Close with mb_report_close(). */
struct mb_report {
    enum mb_report_type type;
    uint32_t abi;
    uint32_t rank;
    int64_t pid;
    int64_t iteration;
    int64_t train_iters;
    int64_t consumed_samples;
    int has_times;    /* saved: the two below are told; an older worker does not tell them */
    int64_t stall_ms; /* training stood still for the save */
    int64_t write_ms; /* from the snapshot until it was whole on disk */
    double loss;
    double learning_rate;
    double grad_norm;
    double tokens_per_s;
    double validation_loss;
    char *text;
    struct mb_report_file *files;
    size_t n_files;
    char **endpoints;
    size_t n_endpoints;
};

/* Append one frame to out. 0, MB_ENOMEM, or MB_EFULL if it would exceed MB_REPORT_FRAME_MAX. */
int mb_report_encode(const struct mb_report *r, struct mb_buf *out, struct mb_err *err);

/* Take one frame from the front of in (consumed). 1: *out is filled, the caller closes it;
 * 0: the frame is not complete yet; MB_EPROTO: not our protocol, the socket must be closed. */
int mb_report_decode(struct mb_buf *in, struct mb_report *out, struct mb_err *err);

void mb_report_close(struct mb_report *r);

#endif
