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
 * _SECRET_KEY, then AWS_* . Nothing is contacted yet. Keys are at most 1024 bytes of UTF-8 without
 * control characters and without empty, "." or ".." segments: they then mean the same in both
 * stores. */
int mb_store_open(uv_loop_t *loop, const char *url, struct mb_store **out, struct mb_err *err);
/* Ends operations in flight with MB_ECANCELED, then cb. */
void mb_store_close(struct mb_store *s, void (*cb)(void *arg), void *arg);
const char *mb_store_url(const struct mb_store *s); /* without credentials, as given */

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
    const char *etag;                     /* put, get, head, *_file: opaque, "" if none */
    const struct mb_store_entry *entries; /* list: sorted by key */
    size_t n_entries;
};
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

/* Whole file as one object: a single PUT below 64 MiB, multipart above. upload_id_io, when not
 * NULL, is a multipart upload to resume (only parts the server lacks are sent). on_upload_id tells
 * the id as soon as it is known, so that the caller can journal it. A failed upload is aborted, its
 * parts deleted, unless the caller knows the id and the failure is MB_EUNAVAIL, MB_ETIMEOUT or
 * MB_ECANCELED: then it can be resumed. An id the server does not know any more is no error: if the
 * object is there with these bytes that is success, else a new upload begins (on_upload_id). */
struct mb_store_put_file {
    const char *key;
    const char *path; /* read with pread; must not change while it is sent (size is checked) */
    const char *resume_upload_id;
    void (*on_upload_id)(void *arg, const char *upload_id);
    mb_store_progress_cb progress;
    uint64_t timeout_ms; /* 0: 24 h */
    /* A request that has failed for so long is not repeated: MB_EUNAVAIL, and the caller may look
     * again whether the file is still to be sent. 0: repeated until the time-out. */
    uint64_t outage_ms;
};
int mb_store_put_file(struct mb_store *s, const struct mb_store_put_file *req, mb_store_cb cb,
                      void *arg, struct mb_err *err);

/* Small objects into memory (at most max_bytes, MB_EFULL beyond). */
int mb_store_get(struct mb_store *s, const char *key, size_t max_bytes, uint64_t timeout_ms,
                 mb_store_cb cb, void *arg, struct mb_err *err);
/* Object to file: temporary name, fsync, rename; the CRC64NVME of the bytes is in the result. */
int mb_store_get_file(struct mb_store *s, const char *key, const char *path,
                      mb_store_progress_cb progress, uint64_t timeout_ms, mb_store_cb cb, void *arg,
                      struct mb_err *err);
int mb_store_head(struct mb_store *s, const char *key, uint64_t timeout_ms, mb_store_cb cb,
                  void *arg, struct mb_err *err);
/* Every key that starts with prefix. */
int mb_store_list(struct mb_store *s, const char *prefix, uint64_t timeout_ms, mb_store_cb cb,
                  void *arg, struct mb_err *err);
int mb_store_delete(struct mb_store *s, const char *key, uint64_t timeout_ms, mb_store_cb cb,
                    void *arg, struct mb_err *err); /* an absent key is success */

#endif
