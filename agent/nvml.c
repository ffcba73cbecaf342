/*
 *  1. libnvidia-ml.so.1 is opened at run time, so that the agent runs where there is no driver. No
 *     library: no devices. A library whose nvmlInit says "driver not loaded" (9) or "no device"
 *     (6): none either. Any other failure is an error.
 *  2. All devices are listed with their UUIDs, then the environment's list chooses among them.
 *  3. Memory in use that a device does not say: its processes are counted instead. The library is
 *     asked by the newest name that it has for that.
 *  4. Figures that a device lacks (a part of one has no power of its own) stay 0.
 */
#include "agent/nvml.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <string.h>
#include "base/alloc.h"
#include "base/errand.h"

enum { NVML_GPU_CORE = 0, NVML_CLOCK_SM = 1 }; /* nvmlTemperatureSensors_t, nvmlClockType_t */
enum {
    NVML_OK = 0,
    NVML_NOT_SUPPORTED = 3,
    NVML_NO_PERMISSION = 4,
    NVML_NOT_FOUND = 6,
    NVML_TOO_SMALL = 7,
    NVML_NO_DRIVER = 9,
    NVML_NO_LIBRARY = 12,
    NVML_NO_FUNCTION = 13
};
enum { NVML_CORRECTED = 0, NVML_UNCORRECTED = 1, NVML_SINCE_LOADED = 0 };

/* nvmlMemory_t of nvml.h */
struct nvml_memory {
    unsigned long long total, free, used;
};

struct mb_nvml {
    atomic_int n_holders;
    struct mb_errand_sent last; /* its end */
    void *library;
    struct mb_gpu_choice chosen;
    int (*init)(void);
    int (*shutdown)(void);
    int (*count)(unsigned *);
    int (*handle)(unsigned, void **);
    int (*handle_by_uuid)(const char *, void **);
    int (*name)(void *, char *, unsigned);
    int (*memory)(void *, struct nvml_memory *);
    int (*processes)(void *, unsigned *n, void *infos);
    int (*uuid)(void *, char *, unsigned);
    int (*rates)(void *, unsigned gpu_memory[2]);
    int (*power)(void *, unsigned *);
    int (*power_limit)(void *, unsigned *);
    int (*temperature)(void *, int sensor, unsigned *);
    int (*clock)(void *, int type, unsigned *);
    int (*ecc)(void *, int kind, int counter, unsigned long long *);
    int (*throttle)(void *, unsigned long long *);
};

static int load(struct mb_nvml *n)
{
    const struct {
        const char *name;
        void *to;
    } functions[] = {{"nvmlInit_v2", &n->init},
                     {"nvmlShutdown", &n->shutdown},
                     {"nvmlDeviceGetCount_v2", &n->count},
                     {"nvmlDeviceGetHandleByIndex_v2", &n->handle},
                     {"nvmlDeviceGetHandleByUUID", &n->handle_by_uuid},
                     {"nvmlDeviceGetName", &n->name},
                     {"nvmlDeviceGetMemoryInfo", &n->memory},
                     {"nvmlDeviceGetComputeRunningProcesses", &n->processes},
                     {"nvmlDeviceGetComputeRunningProcesses_v2", &n->processes},
                     {"nvmlDeviceGetComputeRunningProcesses_v3", &n->processes},
                     {"nvmlDeviceGetUUID", &n->uuid},
                     {"nvmlDeviceGetUtilizationRates", &n->rates},
                     {"nvmlDeviceGetPowerUsage", &n->power},
                     {"nvmlDeviceGetEnforcedPowerLimit", &n->power_limit},
                     {"nvmlDeviceGetTemperature", &n->temperature},
                     {"nvmlDeviceGetClockInfo", &n->clock},
                     {"nvmlDeviceGetTotalEccErrors", &n->ecc},
                     {"nvmlDeviceGetCurrentClocksThrottleReasons", &n->throttle}};

    n->library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    for (size_t i = 0; n->library != NULL && i < sizeof(functions) / sizeof(functions[0]); i++) {
        void *symbol = dlsym(n->library, functions[i].name);

        if (symbol != NULL)
            memcpy(functions[i].to, &symbol, sizeof(symbol));
    }
    return n->library != NULL;
}

/* What nvmlInit says where there are no devices. */
static int is_none(int status)
{
    return status == NVML_NO_DRIVER || status == NVML_NOT_FOUND || status == NVML_NO_LIBRARY;
}

/* ---- which devices are ours ---- */

static int has_part(void *arg, const char *mig_id)
{
    const struct mb_nvml *n = arg;
    void *handle = NULL;

    return n->handle_by_uuid != NULL && n->handle_by_uuid(mig_id, &handle) == NVML_OK;
}

static const char *visible_list(const struct mb_gpu_lists *lists, const char **name)
{
    const char *list = lists->cuda, *image = lists->image;

    *name = "CUDA_VISIBLE_DEVICES";
    if (list == NULL && image != NULL && (strcmp(image, "none") == 0 || strcmp(image, "void") == 0))
        *name = "NVIDIA_VISIBLE_DEVICES";
    return strcmp(*name, "CUDA_VISIBLE_DEVICES") == 0 ? list : image;
}

/* n_devices: of the machine. */
static int choose(struct mb_nvml *n, const struct mb_gpu_lists *lists, unsigned *n_devices,
                  struct mb_err *err)
{
    struct mb_gpu_known known = {.has_part = has_part, .arg = n};
    const char *name, *list = visible_list(lists, &name);
    int status = n->count(&known.n_devices);

    *n_devices = known.n_devices;
    if (status != NVML_OK)
        return mb_err_set(err, MB_EIO, "NVML cannot count the GPUs (status %d)", status);
    for (unsigned i = 0; i < known.n_devices && i < MB_GPUS_MAX; i++) {
        void *handle = NULL;

        if (n->uuid == NULL || n->handle(i, &handle) != NVML_OK ||
            n->uuid(handle, known.uuid[i], sizeof(known.uuid[i])) != NVML_OK)
            known.uuid[i][0] = '\0';
    }
    return mb_gpus_choose(name, list, &known, &n->chosen, err);
}

static int handle_of(const struct mb_nvml *n, unsigned device, void **out)
{
    if (device >= n->chosen.n)
        return MB_EIO;
    return (n->chosen.at[device].device == MB_GPU_PART
                ? n->handle_by_uuid(n->chosen.at[device].word, out)
                : n->handle((unsigned)n->chosen.at[device].device, out)) == NVML_OK
               ? MB_OK
               : MB_EIO;
}

static int start(struct mb_nvml *n, struct mb_err *err)
{
    int status;

    if (!n->init || !n->shutdown || !n->count || !n->handle || !n->name)
        return mb_err_set(err, MB_EIO, "libnvidia-ml.so.1 lacks functions that every driver has");
    status = n->init();
    if (is_none(status))
        return MB_ENOENT;
    if (status != NVML_OK)
        return mb_err_set(err, MB_EIO,
                          "NVML cannot start (status %d); is the NVIDIA driver healthy?", status);
    return MB_OK;
}

static void describe(const struct mb_nvml *n, const struct mb_gpu_lists *lists, struct mb_gpus *out)
{
    void *device = NULL;

    out->vendor = MB_GPU_NVIDIA;
    out->chosen = n->chosen;
    out->count = n->chosen.n;
    out->list = visible_list(lists, &out->list_name);
    if (out->count > 0 && (handle_of(n, 0, &device) != MB_OK ||
                           n->name(device, out->model, sizeof(out->model)) != NVML_OK))
        out->model[0] = '\0';
}

int mb_nvml_open(const struct mb_gpu_lists *lists, struct mb_gpus *gpus, struct mb_nvml **out,
                 struct mb_err *err)
{
    struct mb_nvml *n = mb_calloc(1, sizeof(*n));
    unsigned n_devices = 0;
    int rc;

    *out = NULL;
    if (n == NULL)
        return mb_err_set(err, MB_ENOMEM, "no memory for NVML");
    atomic_init(&n->n_holders, 1);
    if (!load(n)) {
        mb_free(n);
        return MB_OK;
    }
    rc = start(n, err);
    if (rc == MB_OK) {
        rc = choose(n, lists, &n_devices, err);
        if (rc == MB_OK && n_devices > 0) {
            describe(n, lists, gpus);
            *out = n;
            return MB_OK;
        }
        n->shutdown();
    }
    dlclose(n->library);
    mb_free(n);
    return rc == MB_ENOENT ? MB_OK : rc;
}

struct mb_nvml *mb_nvml_share(struct mb_nvml *n)
{
    atomic_fetch_add(&n->n_holders, 1);
    return n;
}

static void end(void *load)
{
    struct mb_nvml *n = load;

    n->shutdown();
    dlclose(n->library);
    mb_free(n);
}

void mb_nvml_close(struct mb_nvml *n)
{
    if (n == NULL || atomic_fetch_sub(&n->n_holders, 1) > 1)
        return;
    n->last = (struct mb_errand_sent){end, n};
    mb_errand_send(&n->last); /* without a thread it stays open until the process ends */
}

unsigned mb_nvml_count(const struct mb_nvml *n)
{
    return n->chosen.n;
}

static int is_not_said(int status)
{
    return status == NVML_NOT_SUPPORTED || status == NVML_NO_FUNCTION;
}

int mb_nvml_in_use(struct mb_nvml *n, unsigned device, struct mb_gpu_sample *out)
{
    struct nvml_memory memory = {0};
    unsigned n_processes = 0; /* room for none: all are counted */
    void *handle = NULL;
    int status;

    *out = (struct mb_gpu_sample){.measure = MB_GPU_BY_NOTHING};
    if (device >= n->chosen.n)
        return MB_OK;
    if (handle_of(n, device, &handle) != MB_OK)
        return MB_EIO;
    status = n->memory != NULL ? n->memory(handle, &memory) : NVML_NOT_SUPPORTED;
    if (status == NVML_OK) {
        *out = (struct mb_gpu_sample){MB_GPU_BY_MEMORY, memory.used};
        return MB_OK;
    }
    if (!is_not_said(status))
        return MB_EIO;
    status = n->processes != NULL ? n->processes(handle, &n_processes, NULL) : NVML_NOT_SUPPORTED;
    if (is_not_said(status) || status == NVML_NO_PERMISSION)
        return MB_OK;
    if (status != NVML_OK && status != NVML_TOO_SMALL)
        return MB_EIO;
    *out = (struct mb_gpu_sample){MB_GPU_BY_PROCESSES, n_processes};
    return MB_OK;
}

static unsigned number(int (*ask)(void *, unsigned *), void *handle)
{
    unsigned value = 0;

    return ask != NULL && ask(handle, &value) == NVML_OK ? value : 0;
}

static void read_ecc(const struct mb_nvml *n, void *handle, struct mb_gpu_usage *out)
{
    unsigned long long corrected = 0, uncorrected = 0;

    out->has_ecc = n->ecc != NULL &&
                   n->ecc(handle, NVML_CORRECTED, NVML_SINCE_LOADED, &corrected) == NVML_OK &&
                   n->ecc(handle, NVML_UNCORRECTED, NVML_SINCE_LOADED, &uncorrected) == NVML_OK;
    if (!out->has_ecc)
        return;
    out->ecc_corrected = corrected;
    out->ecc_uncorrected = uncorrected;
}

void mb_nvml_usage(struct mb_nvml *n, unsigned device, struct mb_gpu_usage *out)
{
    struct nvml_memory memory = {0};
    unsigned long long throttle = 0;
    unsigned rates[2] = {0, 0};
    void *handle = NULL;

    *out = (struct mb_gpu_usage){.percent = 0};
    if (handle_of(n, device, &handle) != MB_OK)
        return;
    memcpy(out->word, n->chosen.at[device].word, sizeof(out->word));
    if (n->name(handle, out->name, sizeof(out->name)) != NVML_OK)
        out->name[0] = '\0';
    if (n->uuid && n->uuid(handle, out->uuid, sizeof(out->uuid)) != NVML_OK)
        out->uuid[0] = '\0';
    if (n->memory != NULL && n->memory(handle, &memory) == NVML_OK) {
        out->used_bytes = memory.used;
        out->total_bytes = memory.total;
    }
    if (n->rates && n->rates(handle, rates) == NVML_OK)
        out->percent = rates[0];
    out->power_mw = number(n->power, handle);
    out->power_limit_mw = number(n->power_limit, handle);
    if (n->temperature && n->temperature(handle, NVML_GPU_CORE, &out->temperature_c) != NVML_OK)
        out->temperature_c = 0;
    if (n->clock && n->clock(handle, NVML_CLOCK_SM, &out->sm_clock_mhz) != NVML_OK)
        out->sm_clock_mhz = 0;
    if (n->throttle && n->throttle(handle, &throttle) == NVML_OK)
        out->throttle = throttle;
    read_ecc(n, handle, out);
}
