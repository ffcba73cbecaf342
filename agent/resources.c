/*
 * Counting devices.
 *
 *  1. libnvidia-ml.so.1 is opened at run time, so that the agent runs where there is no driver. No
 *     library: no NVIDIA devices. A library whose nvmlInit says "driver not loaded" (9) or "no
 *     device" (6): none either. Any other failure is an error, because a node that silently comes
 *     up without its GPUs is worse than one that says why.
 *  2. Without NVIDIA devices the nodes of the AMD kernel driver's topology are counted; entries
 *     whose gpu_id is 0 are CPUs.
 */
#include "agent/resources.h"

#include <dirent.h>
#include <dlfcn.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"

enum { NVML_GPU_CORE = 0 }; /* nvmlTemperatureSensors_t */
enum { NVML_OK = 0, NVML_NOT_FOUND = 6, NVML_NO_DRIVER = 9, NVML_NO_LIBRARY = 12 };

/* nvmlMemory_t of nvml.h */
struct nvml_memory {
    unsigned long long total, free, used;
};

#define KFD_NODES "/sys/class/kfd/kfd/topology/nodes"

struct mb_nvml {
    void *library;
    int (*init)(void);
    int (*shutdown)(void);
    int (*count)(unsigned *);
    int (*handle)(unsigned, void **);
    int (*name)(void *, char *, unsigned);
    int (*memory)(void *, struct nvml_memory *);
    int (*uuid)(void *, char *, unsigned);
    int (*rates)(void *, unsigned gpu_memory[2]);
    int (*power)(void *, unsigned *);
    int (*temperature)(void *, int sensor, unsigned *);
};

static int nvml_open(struct mb_nvml *n)
{
    n->library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (n->library == NULL)
        return 0;
    *(void **)&n->init = dlsym(n->library, "nvmlInit_v2");
    *(void **)&n->shutdown = dlsym(n->library, "nvmlShutdown");
    *(void **)&n->count = dlsym(n->library, "nvmlDeviceGetCount_v2");
    *(void **)&n->handle = dlsym(n->library, "nvmlDeviceGetHandleByIndex_v2");
    *(void **)&n->name = dlsym(n->library, "nvmlDeviceGetName");
    *(void **)&n->memory = dlsym(n->library, "nvmlDeviceGetMemoryInfo");
    *(void **)&n->uuid = dlsym(n->library, "nvmlDeviceGetUUID");
    *(void **)&n->rates = dlsym(n->library, "nvmlDeviceGetUtilizationRates");
    *(void **)&n->power = dlsym(n->library, "nvmlDeviceGetPowerUsage");
    *(void **)&n->temperature = dlsym(n->library, "nvmlDeviceGetTemperature");
    return 1;
}

/* What nvmlInit says where there are no devices. */
static int is_none(int status)
{
    return status == NVML_NO_DRIVER || status == NVML_NOT_FOUND || status == NVML_NO_LIBRARY;
}

static int detect_nvidia(struct mb_gpus *out, struct mb_err *err)
{
    struct mb_nvml n = {0};
    void *device = NULL;
    int rc = MB_OK;
    int status;

    if (!nvml_open(&n))
        return MB_OK;
    if (!n.init || !n.shutdown || !n.count || !n.handle || !n.name) {
        rc = mb_err_set(err, MB_EIO, "libnvidia-ml.so.1 lacks functions that every driver has");
        goto out;
    }
    status = n.init();
    if (is_none(status))
        goto out;
    if (status != NVML_OK) {
        rc = mb_err_set(err, MB_EIO, "NVML cannot start (status %d); is the NVIDIA driver healthy?",
                        status);
        goto out;
    }
    status = n.count(&out->count);
    if (status != NVML_OK)
        rc = mb_err_set(err, MB_EIO, "NVML cannot count the GPUs (status %d)", status);
    if (rc == MB_OK && out->count > 0) {
        out->vendor = MB_GPU_NVIDIA;
        if (n.handle(0, &device) != NVML_OK ||
            n.name(device, out->model, sizeof(out->model)) != NVML_OK)
            out->model[0] = '\0';
    }
    n.shutdown();
out:
    dlclose(n.library);
    return rc;
}

int mb_nvml_open(struct mb_nvml **out, struct mb_err *err)
{
    struct mb_nvml *n = mb_calloc(1, sizeof(*n));
    int status = NVML_OK;

    *out = NULL;
    if (n == NULL)
        return mb_err_set(err, MB_ENOMEM, "no memory for NVML");
    if (nvml_open(n)) {
        if (n->init && n->shutdown && n->handle && n->memory && (status = n->init()) == NVML_OK) {
            *out = n;
            return MB_OK;
        }
        dlclose(n->library);
    }
    mb_free(n);
    if (status == NVML_OK || is_none(status))
        return MB_OK;
    return mb_err_set(err, MB_EIO, "NVML cannot start (status %d); is the NVIDIA driver healthy?",
                      status);
}

int mb_nvml_used_bytes(struct mb_nvml *n, unsigned device, uint64_t *out)
{
    struct nvml_memory memory = {0};
    void *handle = NULL;

    if (n->handle(device, &handle) != NVML_OK || n->memory(handle, &memory) != NVML_OK)
        return MB_EIO;
    *out = memory.used;
    return MB_OK;
}

void mb_nvml_usage(struct mb_nvml *n, unsigned device, struct mb_gpu_usage *out)
{
    struct nvml_memory memory = {0};
    unsigned rates[2] = {0, 0};
    void *handle = NULL;

    *out = (struct mb_gpu_usage){.percent = 0};
    if (n->handle(device, &handle) != NVML_OK)
        return;
    if (n->name && n->name(handle, out->name, sizeof(out->name)) != NVML_OK)
        out->name[0] = '\0';
    if (n->uuid && n->uuid(handle, out->uuid, sizeof(out->uuid)) != NVML_OK)
        out->uuid[0] = '\0';
    if (n->memory(handle, &memory) == NVML_OK) {
        out->used_bytes = memory.used;
        out->total_bytes = memory.total;
    }
    if (n->rates && n->rates(handle, rates) == NVML_OK)
        out->percent = rates[0];
    if (n->power && n->power(handle, &out->power_mw) != NVML_OK)
        out->power_mw = 0;
    if (n->temperature && n->temperature(handle, NVML_GPU_CORE, &out->temperature_c) != NVML_OK)
        out->temperature_c = 0;
}

void mb_nvml_close(struct mb_nvml *n)
{
    if (n == NULL)
        return;
    n->shutdown();
    dlclose(n->library);
    mb_free(n);
}

unsigned mb_gpus_count_kfd(const char *topology_nodes_dir)
{
    DIR *dir = opendir(topology_nodes_dir);
    unsigned count = 0;
    struct dirent *e;

    if (dir == NULL)
        return 0;
    while ((e = readdir(dir)) != NULL) {
        char path[512], id[32] = "";
        FILE *f;

        if (e->d_name[0] == '.')
            continue;
        snprintf(path, sizeof(path), "%.200s/%.200s/gpu_id", topology_nodes_dir, e->d_name);
        f = fopen(path, "re");
        if (f == NULL)
            continue;
        if (fgets(id, sizeof(id), f) != NULL && strtoull(id, NULL, 10) != 0)
            count++;
        fclose(f);
    }
    closedir(dir);
    return count;
}

int mb_gpus_detect(struct mb_gpus *out, struct mb_err *err)
{
    int rc;

    *out = (struct mb_gpus){0};
    rc = detect_nvidia(out, err);
    if (rc != MB_OK || out->count > 0)
        return rc;
    out->count = mb_gpus_count_kfd(KFD_NODES);
    if (out->count > 0) {
        out->vendor = MB_GPU_AMD;
        snprintf(out->model, sizeof(out->model), "AMD");
    }
    return MB_OK;
}

unsigned mb_cpus_detect(void)
{
    cpu_set_t set;

    if (sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) > 0)
        return (unsigned)CPU_COUNT(&set);
    return 1;
}

static uint64_t read_number(const char *path)
{
    unsigned long long n = 0;
    FILE *f = fopen(path, "re");

    if (f == NULL)
        return 0;
    if (fscanf(f, "%llu", &n) != 1) /* "max" */
        n = 0;
    fclose(f);
    return n;
}

uint64_t mb_memory_detect(void)
{
    static const char *const limits[] = {"/sys/fs/cgroup/memory.max",
                                         "/sys/fs/cgroup/memory/memory.limit_in_bytes"};
    uint64_t bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);

    for (size_t i = 0; i < sizeof(limits) / sizeof(limits[0]); i++) {
        uint64_t limit = read_number(limits[i]);

        if (limit > 0 && limit < bytes)
            bytes = limit;
    }
    return bytes;
}

uint64_t mb_memory_used(void)
{
    uint64_t used = read_number("/sys/fs/cgroup/memory.current"), inactive = 0;
    unsigned long long bytes;
    FILE *f = fopen("/sys/fs/cgroup/memory.stat", "re");
    char line[128];

    while (f != NULL && fgets(line, sizeof(line), f) != NULL)
        if (sscanf(line, "inactive_file %llu", &bytes) == 1)
            inactive = bytes;
    if (f != NULL)
        fclose(f);
    return used > inactive ? used - inactive : 0;
}

const char *mb_gpu_visible_env(enum mb_gpu_vendor vendor)
{
    return vendor == MB_GPU_AMD ? "HIP_VISIBLE_DEVICES" : "CUDA_VISIBLE_DEVICES";
}

const char *mb_gpu_order_env(enum mb_gpu_vendor vendor)
{
    return vendor == MB_GPU_AMD ? NULL : "CUDA_DEVICE_ORDER";
}
