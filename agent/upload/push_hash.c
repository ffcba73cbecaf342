#include "agent/upload/push_hash.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/checksum.h"
#include "base/fs.h"

enum { BLOCK_BYTES = 256 * 1024 };

struct mb_push_hash {
    uv_work_t work;
    struct mb_push_source *source;
    atomic_int cancelled;
    struct mb_err err;
    void (*cb)(void *arg, const struct mb_err *err);
    void *arg;
};

int mb_file_crc64nvme(const char *path, uint64_t size_bytes, const atomic_int *cancelled,
                      uint64_t *out, struct mb_err *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    uint8_t *block;
    uint64_t crc = 0, done = 0;
    ssize_t n = 1;
    int rc = 0;

    if (fd < 0)
        return mb_err_sys(err, errno, "open %s", path);
    block = mb_alloc(BLOCK_BYTES);
    if (!block)
        rc = mb_err_set(err, MB_ENOMEM, "out of memory");
    while (rc == 0 && n > 0) {
        n = read(fd, block, BLOCK_BYTES);
        if (n < 0 && errno == EINTR)
            n = 1;
        else if (n < 0)
            rc = mb_err_sys(err, errno, "reading %s", path);
        else {
            crc = mb_crc64nvme(crc, block, (size_t)n);
            done += (uint64_t)n;
        }
        if (cancelled && atomic_load(cancelled))
            rc = mb_err_set(err, MB_ECANCELED, "cancelled");
    }
    if (rc == 0 && done != size_bytes)
        rc = mb_err_set(err, MB_ESTATE, "%s has another size than before", path);
    mb_free(block);
    close(fd);
    *out = crc;
    return rc;
}

static void run(uv_work_t *work)
{
    struct mb_push_hash *h = work->data;

    for (size_t i = 0; h->err.code == 0 && i < h->source->n_files; i++) {
        struct mb_push_file *f = &h->source->files[i];
        char *path = mb_path_join(h->source->root, f->path);

        if (!path)
            mb_err_set(&h->err, MB_ENOMEM, "out of memory");
        else
            mb_file_crc64nvme(path, f->size_bytes, &h->cancelled, &f->crc64nvme, &h->err);
        mb_free(path);
    }
}

static void on_ran(uv_work_t *work, int status)
{
    struct mb_push_hash *h = work->data;

    if (status != 0)
        mb_err_set(&h->err, MB_ECANCELED, "cancelled");
    h->cb(h->arg, &h->err);
    mb_free(h);
}

int mb_push_hash_start(uv_loop_t *loop, struct mb_push_source *source,
                       void (*cb)(void *arg, const struct mb_err *err), void *arg,
                       struct mb_push_hash **out, struct mb_err *err)
{
    struct mb_push_hash *h = mb_calloc(1, sizeof(*h));

    if (!h)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    h->source = source;
    h->cb = cb;
    h->arg = arg;
    h->work.data = h;
    if (uv_queue_work(loop, &h->work, run, on_ran) != 0) {
        mb_free(h);
        return mb_err_set(err, MB_EIO, "the thread pool takes no work");
    }
    *out = h;
    return 0;
}

void mb_push_hash_cancel(struct mb_push_hash *h)
{
    atomic_store(&h->cancelled, 1);
    uv_cancel((uv_req_t *)&h->work);
}
