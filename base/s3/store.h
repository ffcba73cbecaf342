/*
 * Object store: one interface over s3:// (any S3-compatible endpoint; gs:// through its XML
 * interface) and file:// (a directory: objects are files, written atomically), so that checkpoints,
 * data and tests speak of keys and conditions only.
 *
 * Loop-thread only; blocking file work goes to the libuv pool. Exactly one callback per operation,
 * never from inside the call. Operations retry transient faults inside their deadline (back-off
 * with jitter, fewer connections on SlowDown); what comes back is final. Errors name bucket and
 * key, never a credential. Source of the S3 rules: the measured list in docs/formats.md, "Object
 * store".
 */
#ifndef MOBULA_BASE_S3_STORE_H
#define MOBULA_BASE_S3_STORE_H

#include <stddef.h>
#include <stdint.h>
#include <uv.h>
#include "base/err.h"

struct mb_store;
struct mb_store_op;

/* url: "s3://bucket/prefix", "file:///dir" or a plain absolute path. Keys are relative to it.
 * Credentials and endpoint come from the environment: BUCKET_STORAGE_HOST, _ACCESS_KEY,
 * _SECRET_KEY, then AWS_* and what it names (source.h). Nothing is contacted yet. Keys are at most
 * 1024 bytes of UTF-8 without control characters and without empty, "." or ".." segments: they then
 * mean the same in both stores. */
int mb_store_open(uv_loop_t *loop, const char *url, struct mb_store **out, struct mb_err *err);
/* Ends operations in flight with MB_ECANCELED, then cb. */
void mb_store_close(struct mb_store *s, void (*cb)(void *arg), void *arg);
const char *mb_store_url(const struct mb_store *s); /* without credentials, as given */

/* For somebody who says how long a store that is away is asked: every operation from now on that
 * has no outage_ms of its own ends with MB_EUNAVAIL when its requests have failed for so long, also
 * when they got no connection; before, its time-out ends it only where that is longer. A server
 * that took a request has MB_STORE_ANSWER_MS, or longer, to say something. */
enum { MB_STORE_ANSWER_MS = 10000 };
void mb_store_set_outage(struct mb_store *s, uint64_t outage_ms);

/* 0 from the first conditional write on that the server did not implement: such writes end with
 * MB_EUNSUPPORTED and change nothing, but for the first one to a server that takes conditions and
 * does not heed them. Until then, and of file://, 1. */
int mb_store_has_conditions(const struct mb_store *s);

/* In what pieces large files are sent, and their progress is counted; bigger ones where there were
 * too many. */
uint64_t mb_store_part_bytes(const struct mb_store *s);

/* How many requests were sent once more since it was opened: after a fault, a refusal that could be
 * put right, or by the HTTP client on a new connection. Of file:// 0. */
uint64_t mb_store_retries(const struct mb_store *s);

/* Condition of a write. */
enum mb_store_if {
    MB_STORE_ALWAYS,
    MB_STORE_IF_ABSENT, /* If-None-Match: * */
    MB_STORE_IF_MATCH   /* If-Match: etag */
};

struct mb_store_result {
    int error;        /* 0; MB_ENOENT; MB_EEXIST = the condition failed; MB_EDENIED; ... */
    const char *text; /* for people; "" on success */
    const void *data; /* get: the bytes (NULL when written to a file) */
    size_t data_len;
    uint64_t size_bytes;                  /* head, get: of the object */
    uint64_t crc64nvme;                   /* put_file, get_file: of the bytes */
    const char *etag;                     /* put, get, head, *_file: opaque, "" if none; also of
                                           * a put_file whose condition failed */
    int has_strays;                       /* put_file with leaves_strays, also of one that failed */
    const struct mb_store_entry *entries; /* list: sorted by key */
    size_t n_entries;
};
/* 1: etags of one object, whether or not both have their quotes. "" is none's. */
int mb_store_same_etag(const char *a, const char *b);

struct mb_store_entry {
    const char *key; /* relative to the store's prefix */
    uint64_t size_bytes;
    const char *etag; /* "" in a file:// listing: head tells it */
};
typedef void (*mb_store_cb)(void *arg, const struct mb_store_result *r);
/* Progress of long transfers; may be NULL. */
typedef void (*mb_store_progress_cb)(void *arg, uint64_t done_bytes, uint64_t total_bytes);

int mb_store_put(struct mb_store *s, const char *key, const void *p, size_t n,
                 enum mb_store_if cond, const char *etag, uint64_t timeout_ms, mb_store_cb cb,
                 void *arg, struct mb_err *err); /* p is copied */

/* All files of a store share its connections, part by part, so a caller begins this many at once,
 * whatever their sizes, and one more with each that ends. */
enum { MB_STORE_FILES_AT_ONCE = 32 };

/* Whole file as one object: a single PUT below 64 MiB, multipart above. upload_id_io, when not
 * NULL, is a multipart upload to resume (only parts the server lacks are sent). on_upload_id tells
 * the id as soon as it is known, so that the caller can journal it. A failed upload is aborted, its
 * parts deleted, unless the caller knows the id and the failure is MB_EUNAVAIL, MB_ETIMEOUT or
 * MB_ECANCELED: then it can be resumed. An id the server does not know any more is no error: if the
 * object is there with these bytes that is success, else a new upload begins (on_upload_id). */
struct mb_store_put_file {
    const char *key;
    const char *path; /* read with pread; MB_ESTATE if it changes while it is sent */
    const char *resume_upload_id;
    void (*on_upload_id)(void *arg, const char *upload_id);
    mb_store_progress_cb progress;
    uint64_t timeout_ms; /* 0: 24 h */
    /* A request that has failed for so long is not repeated: MB_EUNAVAIL, and the caller may look
     * again whether the file is still to be sent. 0: repeated until the time-out. */
    uint64_t outage_ms;
    /* Of the write that makes the object. A condition that fails is MB_EEXIST, and the result's
     * etag is that of the object which is there ("" if it is not known); but if that object has
     * these bytes, whoever wrote it, it is success. An upload whose condition failed keeps its
     * parts if the caller knows its id: it can go on under another condition, and sends no part
     * again. */
    enum mb_store_if cond;
    const char *etag;
    const int *gives_up; /* becomes 1: no further part is begun, and it ends with MB_ECANCELED */
    /* Perhaps the object is there with these bytes: look before anything is sent. */
    int look_first;
    /* Lower goes first; files of one priority in the order of the calls. A transfer that was begun
     * keeps its connection until the part it sends is through. */
    int32_t priority;
    /* An upload whose id never came, since the answer to its begin was lost, is not looked for: the
     * result says that there may be one (has_strays), and the caller looks, who knows whether
     * others write this key by now. */
    int leaves_strays;
    /* Where to tell the operation, for mb_store_put_set_priority(); NULL: nowhere. */
    struct mb_store_op **op;
    /* s3:// only. When all bytes are with the server and the object is unchanged, this is called,
     * once, and the operation waits for mb_store_put_go() or _give_up(). So several objects change
     * together, and a transfer that fails changes none. */
    void (*on_sent)(void *arg, struct mb_store_op *op);
};
/* Not from inside on_sent. The callback of the operation follows, perhaps before this returns. */
void mb_store_put_go(struct mb_store_op *op);
void mb_store_put_give_up(struct mb_store_op *op); /* ends with MB_ECANCELED, parts are deleted */
/* Of a transfer whose callback has not run: all its parts that are not prepared yet go by it. */
void mb_store_put_set_priority(struct mb_store_op *op, int32_t priority);
/* Ends it soon, with MB_ECANCELED unless all was there; an unfinished upload stays as it is, and
 * may be aborted then: the answers to parts that were sent as a whole are waited for, for so long
 * at most. The callback follows, perhaps before this returns. */
void mb_store_put_cancel(struct mb_store_op *op, uint64_t patience_ms);
int mb_store_put_file(struct mb_store *s, const struct mb_store_put_file *req, mb_store_cb cb,
                      void *arg, struct mb_err *err);

/* Small objects into memory (at most max_bytes, MB_EFULL beyond). */
int mb_store_get(struct mb_store *s, const char *key, size_t max_bytes, uint64_t timeout_ms,
                 mb_store_cb cb, void *arg, struct mb_err *err);
/* Bytes [offset, offset + size_bytes) of an object into memory, fewer at its end. */
struct mb_store_range {
    const char *key;
    const char *etag; /* MB_ESTATE if another object is there now (s3://). NULL or "": any */
    uint64_t offset;
    size_t size_bytes;
    uint64_t timeout_ms; /* 0: 60 s */
    uint64_t outage_ms;  /* as of mb_store_put_file */
};
int mb_store_get_range(struct mb_store *s, const struct mb_store_range *range, mb_store_cb cb,
                       void *arg, struct mb_err *err);
/* Object to file: temporary name, fsync, rename; the CRC64NVME of the bytes is in the result. */
int mb_store_get_file(struct mb_store *s, const char *key, const char *path,
                      mb_store_progress_cb progress, uint64_t timeout_ms, mb_store_cb cb, void *arg,
                      struct mb_err *err);
/* The same with more wishes. */
struct mb_store_get_file {
    const char *key;
    const char *path; /* NULL: written nowhere, only size and CRC64NVME are wanted */
    /* The size is known: a request less, and MB_ECORRUPT at once if it is another. */
    int has_size;
    uint64_t size_bytes;
    int is_lazy; /* neither file nor directory is synced: the caller does, or does not care */
    /* A wish: past the page cache (O_DIRECT), for what nobody reads soon. It takes a third of the
     * processor time, and leaves other programs' pages alone. s3:// only, files of several MiB, and
     * file systems that can. */
    int is_direct;
    int32_t priority; /* as of mb_store_put_file */
    mb_store_progress_cb progress;
    uint64_t timeout_ms; /* 0: 24 h */
    uint64_t outage_ms;  /* as of mb_store_put_file */
};
int mb_store_get_file_as(struct mb_store *s, const struct mb_store_get_file *req, mb_store_cb cb,
                         void *arg, struct mb_err *err);
int mb_store_head(struct mb_store *s, const char *key, uint64_t timeout_ms, mb_store_cb cb,
                  void *arg, struct mb_err *err);
/* Every key that starts with prefix. */
int mb_store_list(struct mb_store *s, const char *prefix, uint64_t timeout_ms, mb_store_cb cb,
                  void *arg, struct mb_err *err);
int mb_store_delete(struct mb_store *s, const char *key, uint64_t timeout_ms, mb_store_cb cb,
                    void *arg, struct mb_err *err); /* an absent key is success */
/* The unfinished multipart uploads of exactly this key: the key of an entry is the id of one.
 * MB_EUNSUPPORTED: a store that cannot tell them, such as file://. */
int mb_store_list_uploads(struct mb_store *s, const char *key, uint64_t timeout_ms, mb_store_cb cb,
                          void *arg, struct mb_err *err);
/* Unfinished multipart uploads of exactly this key are forgotten with their parts: the one of this
 * id, or with NULL all of them. One that is not there is success. file:// has none, but what killed
 * writers left in the object's directory goes. */
int mb_store_abort_uploads(struct mb_store *s, const char *key, const char *upload_id,
                           uint64_t timeout_ms, mb_store_cb cb, void *arg, struct mb_err *err);

#endif
