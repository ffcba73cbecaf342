/*
 * Counting devices.
 *
 *  1. NVIDIA's by NVML (nvml.c). A driver that is there and fails is an error, because a node that
 *     silently comes up without its GPUs is worse than one that says why.
 *  2. Without any, AMD's by the files of their kernel driver (amd.c).
 *  3. A list of visible devices in the environment leaves only those that it names.
 */
#include "agent/resources.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "agent/amd.h"
#include "agent/nvml.h"

struct mb_gpu_lists mb_gpu_lists_read(void)
{
    return (struct mb_gpu_lists){.cuda = getenv(mb_gpu_visible_env(MB_GPU_NVIDIA)),
                                 .hip = getenv(mb_gpu_visible_env(MB_GPU_AMD)),
                                 .image = getenv("NVIDIA_VISIBLE_DEVICES")};
}

int mb_gpus_detect(const struct mb_gpu_lists *lists, struct mb_gpus *out, struct mb_nvml **nvml,
                   struct mb_amd *amd, struct mb_err *err)
{
    struct mb_gpu_known known = {0};
    int rc;

    *out = (struct mb_gpus){0};
    *amd = (struct mb_amd){0};
    rc = mb_nvml_open(lists, out, nvml, err);
    if (rc != MB_OK || *nvml != NULL)
        return rc;
    mb_amd_find(MB_AMD_SYS_CLASS, amd);
    known.n_devices = amd->n;
    if (known.n_devices == 0)
        return MB_OK;
    out->vendor = MB_GPU_AMD;
    out->list_name = mb_gpu_visible_env(MB_GPU_AMD);
    out->list = lists->hip;
    rc = mb_gpus_choose(out->list_name, out->list, &known, &out->chosen, err);
    mb_amd_choose(amd, &out->chosen);
    out->count = out->chosen.n;
    snprintf(out->model, sizeof(out->model), "%s", out->count > 0 ? "AMD" : "");
    return rc;
}

int mb_gpus_put(const struct mb_gpus *gpus, unsigned device, struct mb_buf *out)
{
    if (gpus != NULL && device < gpus->chosen.n)
        return mb_buf_puts(out, gpus->chosen.at[device].word);
    return mb_buf_printf(out, "%u", device);
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
