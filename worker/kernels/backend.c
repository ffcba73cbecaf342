/*
 * Opening a backend.
 *  1. The path must be absolute and exist: checked first, because dlopen's own text hides which it
 * was.
 *  2. dlopen with all symbols resolved at once, private to the library; its reason is passed on.
 *  3. mb_backend_table() must be there and carry this build's ABI: a table of another shape would
 * be called through wrong slots.
 *  4. Open the device, then its compute stream. Whatever fails, what was opened is closed again.
 */
#include "worker/kernels/backend.h"

#include <dlfcn.h>
#include <errno.h>
#include <string.h>
#include <unistd.h>

typedef const struct mb_backend *table_fn(void);

static int load_table(const char *path, void **library, const struct mb_backend **table,
                      struct mb_err *err)
{
    if (path[0] != '/')
        return mb_err_set(err, MB_EINVAL, "backend %s: the path must be absolute", path);
    if (access(path, R_OK) != 0)
        return mb_err_sys(err, errno, "backend %s", path);
    *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (*library == NULL)
        return mb_err_set(err, MB_EUNSUPPORTED, "backend %s: %s", path, dlerror());
    table_fn *get;
    void *symbol = dlsym(*library, "mb_backend_table");
    if (symbol == NULL)
        return mb_err_set(err, MB_EUNSUPPORTED, "backend %s: exports no mb_backend_table", path);
    memcpy(&get, &symbol, sizeof(get)); /* ISO C has no cast from object to function pointer */
    *table = get();
    if ((*table)->abi != MB_BACKEND_ABI)
        return mb_err_set(err, MB_EUNSUPPORTED, "backend %s: has ABI %u, this worker needs %d",
                          path, (*table)->abi, MB_BACKEND_ABI);
    return 0;
}

int mb_backend_open(const char *path, int device_index, struct mb_device *out, struct mb_err *err)
{
    struct mb_device dev = {0};
    int rc = load_table(path, &dev.library, &dev.ops, err);
    if (rc == 0) {
        rc = dev.ops->open(device_index, &dev.ctx, err);
        if (rc == 0)
            rc = dev.ops->stream_create(dev.ctx, &dev.stream, err);
        if (rc != 0)
            mb_err_wrap(err, "backend %s", dev.ops->name);
    }
    if (rc != 0) {
        mb_backend_close(&dev);
        return rc;
    }
    *out = dev;
    return 0;
}

void mb_backend_close(struct mb_device *dev)
{
    if (dev->stream != NULL)
        dev->ops->stream_destroy(dev->ctx, dev->stream);
    if (dev->ctx != NULL)
        dev->ops->close(dev->ctx);
    if (dev->library != NULL)
        dlclose(dev->library);
    *dev = (struct mb_device){0};
}
