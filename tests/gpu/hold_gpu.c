/*
 * hold_gpu MIB [once|ignore-term]: has MIB of memory on the first visible GPU until it is killed.
 *
 *  1. libcuda.so.1 is opened at run time: nothing of CUDA is needed to build this;
 *  2. a context, MIB of memory, every byte written, so that the driver really gave it;
 *  3. one line says so: how many devices are visible and which one this is, by its UUID;
 *  4. pause. SIGTERM ends it, unless ignore-term says that it does not. With once it ends by
 * itself.
 */
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Types of cuda.h */
struct cuda_uuid {
    unsigned char bytes[16];
};
typedef int cuda_device;
typedef unsigned long long cuda_ptr;

struct cuda {
    int (*init)(unsigned);
    int (*count)(int *);
    int (*get)(cuda_device *, int);
    int (*uuid)(struct cuda_uuid *, cuda_device);
    int (*retain)(void **, cuda_device);
    int (*set_current)(void *);
    int (*alloc)(cuda_ptr *, size_t);
    int (*fill)(cuda_ptr, unsigned char, size_t);
    int (*synchronize)(void);
};

static void *symbol(void *library, const char *name)
{
    void *found = dlsym(library, name);

    if (found == NULL) {
        fprintf(stderr, "hold_gpu: libcuda.so.1 has no %s\n", name);
        exit(69);
    }
    return found;
}

static void cuda_open(struct cuda *c)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);

    if (library == NULL) {
        fprintf(stderr, "hold_gpu: %s\n", dlerror());
        exit(69);
    }
    *(void **)&c->init = symbol(library, "cuInit");
    *(void **)&c->count = symbol(library, "cuDeviceGetCount");
    *(void **)&c->get = symbol(library, "cuDeviceGet");
    *(void **)&c->uuid = symbol(library, "cuDeviceGetUuid");
    *(void **)&c->retain = symbol(library, "cuDevicePrimaryCtxRetain");
    *(void **)&c->set_current = symbol(library, "cuCtxSetCurrent");
    *(void **)&c->alloc = symbol(library, "cuMemAlloc_v2");
    *(void **)&c->fill = symbol(library, "cuMemsetD8_v2");
    *(void **)&c->synchronize = symbol(library, "cuCtxSynchronize");
}

static void must(int status, const char *what)
{
    if (status == 0)
        return;
    fprintf(stderr, "hold_gpu: %s failed with CUDA error %d\n", what, status);
    exit(70);
}

static void say(unsigned long mib, int count, const struct cuda_uuid *id)
{
    static const int dashes[] = {4, 6, 8, 10};
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    size_t k = 0;

    printf("holding %lu MiB, visible %d, CUDA_VISIBLE_DEVICES=%s, GPU-", mib, count,
           visible != NULL ? visible : "(unset)");
    for (int i = 0; i < 16; i++) {
        if (k < sizeof(dashes) / sizeof(dashes[0]) && dashes[k] == i) {
            putchar('-');
            k++;
        }
        printf("%02x", id->bytes[i]);
    }
    putchar('\n');
    fflush(stdout);
}

int main(int argc, char **argv)
{
    unsigned long mib = argc > 1 ? strtoul(argv[1], NULL, 10) : 0;
    struct cuda_uuid id = {{0}};
    struct cuda c = {0};
    cuda_device device = 0;
    cuda_ptr memory = 0;
    void *context = NULL;
    int count = 0;

    if (mib == 0) {
        fprintf(stderr, "usage: hold_gpu MIB [once|ignore-term]\n");
        return 64;
    }
    if (argc > 2 && strcmp(argv[2], "ignore-term") == 0)
        signal(SIGTERM, SIG_IGN);
    cuda_open(&c);
    must(c.init(0), "cuInit");
    must(c.count(&count), "cuDeviceGetCount");
    must(c.get(&device, 0), "cuDeviceGet");
    must(c.uuid(&id, device), "cuDeviceGetUuid");
    must(c.retain(&context, device), "cuDevicePrimaryCtxRetain");
    must(c.set_current(context), "cuCtxSetCurrent");
    must(c.alloc(&memory, (size_t)mib << 20), "cuMemAlloc");
    must(c.fill(memory, 0xa5, (size_t)mib << 20), "cuMemsetD8");
    must(c.synchronize(), "cuCtxSynchronize");
    say(mib, count, &id);
    if (argc > 2 && strcmp(argv[2], "once") == 0)
        return 0;
    for (;;)
        pause();
}
