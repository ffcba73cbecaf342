/* The inside of an upload, shared by its files only: s3_upload.c (parts, complete, ends),
 * s3_upload_begin.c (a new upload, or the parts of an old one) and s3_upload_compare.c (the object
 * that may be there already). */
#ifndef MOBULA_BASE_S3_S3_UPLOAD_H
#define MOBULA_BASE_S3_S3_UPLOAD_H

#include <stdatomic.h>
#include <sys/stat.h>
#include "base/s3/s3.h"

struct part {
    uint64_t crc;
    char etag[72]; /* "" until the server has it */
    char server_crc[16];
    uint64_t server_size_bytes;
    int is_same; /* its etag is the MD5 of what the file has there */
};

struct slot {
    uv_work_t work;
    struct upload *up;
    struct s3_turn turn;
    size_t part;
    int busy;
    int rc; /* of the pool's work */
    struct s3_call *call;
};

struct upload {
    struct mb_store_op *op;
    struct s3 *s3;
    int fd;
    struct stat st;
    uint64_t size_bytes;
    uint64_t part_bytes;
    size_t n_parts;
    struct part *parts;
    size_t next_part;
    size_t n_done;
    uint64_t done_bytes;
    uint64_t order; /* among the store's transfers */
    size_t in_flight;
    struct slot *slots;
    size_t n_slots;
    int pumping;   /* parts that end meanwhile leave the rest to the loop that runs */
    int is_hashed; /* a small file, where it was opened */
    char *upload_id;
    struct mb_buf complete_body;
    struct s3_call *call; /* of a step that is alone */
    uv_work_t work;
    atomic_int stops; /* cancelled; for the pool */
    int rc;
    int is_single;          /* one PUT, no multipart upload */
    int waits;              /* behind on_sent */
    int may_go;             /* it waited */
    int lost;               /* the upload id is unknown to the server */
    int restarted;          /* that happened before */
    uint64_t look_until_ms; /* a lost one may still appear; 0: not looked for */
    uint64_t look_delay_ms; /* before the next look */
    unsigned n_looks;
    int may_have_strays; /* a lost answer to a create */
    uint64_t create_began_ms;
    int64_t strays_since_unix_s; /* the server's clock */
    struct s3_sweep *sweep;
    int refused; /* the condition of the write failed */
    int looks;   /* ... or may: nothing was sent, the object is looked at first */
    uint64_t whole_crc;
    int has_read_crc; /* whole_crc is that of the file, read at once */
};

/* ---- s3_upload.c ---- */
/* The next step; also after a failure, which is in op->err. */
void s3_upload_pump(struct upload *up);
/* It failed for good, or a success whose parts are not needed: takes away what must not stay. */
void s3_upload_end(struct upload *up);
/* 1: its caller does not want it any more; op->err says so. */
int s3_upload_is_given_up(struct upload *up);
/* op->out_etag is set: it is one, unless the file has changed. */
void s3_upload_succeed(struct upload *up);
/* Nothing stands in the way any more. */
void s3_upload_begin_sending(struct upload *up);
int s3_upload_call(struct upload *up, const struct s3_request *request, s3_done_cb done);
int s3_upload_query(struct upload *up, const char *before, struct mb_buf *query);
int s3_upload_is_unknown(const struct s3_answer *a); /* NoSuchUpload */
/* Into op->err, unless there is one. */
void s3_upload_fail_nomem(struct upload *up);
void s3_upload_fail_hash(struct upload *up, int rc);

/* ---- s3_upload_compare.c ---- */
/* The upload is lost, its condition failed, or nothing was sent yet: is the object there, with
 * these bytes? */
void s3_upload_compare(struct upload *up);

/* ---- s3_upload_begin.c; s3_upload_pump() follows ---- */
void s3_upload_create(struct upload *up);
void s3_upload_list_parts(struct upload *up);
/* A lost upload, after look_delay_ms: its parts again, or the object. */
void s3_upload_look_again(struct upload *up);

#endif
