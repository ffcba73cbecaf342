/* A libnvidia-ml that is loaded before anybody asks for it: two devices, nothing in use. As a file
 * of that name it is a driver for whole agents. */
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int nvmlInit_v2(void);
int nvmlShutdown(void);
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **out);
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *total_free_used);
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *n, void *infos);
int nvmlDeviceGetCount_v2(unsigned *out);
int nvmlDeviceGetName(void *device, char *out, unsigned n);
int nvmlDeviceGetUUID(void *device, char *out, unsigned n);
int nvmlDeviceGetUtilizationRates(void *device, unsigned gpu_memory[2]);
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts);
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius);
int nvmlDeviceGetHandleByUUID(const char *uuid, void **out);
int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned *milliwatts);
int nvmlDeviceGetClockInfo(void *device, int type, unsigned *mhz);
int nvmlDeviceGetTotalEccErrors(void *device, int kind, int counter, unsigned long long *out);
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *out);

int fake_nvml_status;                                           /* of nvmlInit */
atomic_int fake_nvml_init_hangs;                                /* while it is set */
atomic_int fake_nvml_memory_status, fake_nvml_processes_status; /* what is in use is said if 0 */
atomic_int fake_nvml_processes;                                 /* on each device */
atomic_int fake_nvml_shutdowns;
atomic_int fake_nvml_users;     /* inits without a shutdown yet */
atomic_int fake_nvml_hangs[10]; /* [1 + device]: what is in use is not said while it is set */
atomic_int fake_nvml_asked[10]; /* how often that was asked */

int nvmlInit_v2(void)
{
    while (atomic_load(&fake_nvml_init_hangs))
        usleep(1000);
    atomic_fetch_add(&fake_nvml_users, fake_nvml_status == 0);
    return fake_nvml_status;
}

int nvmlShutdown(void)
{
    atomic_fetch_add(&fake_nvml_shutdowns, 1);
    atomic_fetch_sub(&fake_nvml_users, 1);
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **out)
{
    *out = (char *)0 + i + 1;
    return 0;
}

int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *total_free_used)
{
    ptrdiff_t at = (char *)device - (char *)0;

    atomic_fetch_add(&fake_nvml_asked[at], 1);
    while (atomic_load(&fake_nvml_hangs[at]))
        usleep(1000);
    if (atomic_load(&fake_nvml_memory_status) != 0)
        return atomic_load(&fake_nvml_memory_status);
    total_free_used[0] = total_free_used[1] = 80ull << 30;
    total_free_used[2] = 0;
    return 0;
}

/* As NVIDIA's: room for too few, here for none, is an error that says how many there are. */
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *n, void *infos)
{
    unsigned there = (unsigned)atomic_load(&fake_nvml_processes), room = *n;

    (void)device;
    (void)infos;
    if (atomic_load(&fake_nvml_processes_status) != 0)
        return atomic_load(&fake_nvml_processes_status);
    *n = there;
    return there > room ? 7 : 0;
}

int nvmlDeviceGetCount_v2(unsigned *out)
{
    *out = 2;
    return 0;
}

int nvmlDeviceGetName(void *device, char *out, unsigned n)
{
    (void)device;
    snprintf(out, n, "Fake H100");
    return 0;
}

int nvmlDeviceGetUUID(void *device, char *out, unsigned n)
{
    snprintf(out, n, "GPU-%d", (int)((char *)device - (char *)0));
    return 0;
}

int nvmlDeviceGetUtilizationRates(void *device, unsigned gpu_memory[2])
{
    (void)device;
    gpu_memory[0] = 37;
    gpu_memory[1] = 5;
    return 0;
}

int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts)
{
    (void)device;
    *milliwatts = 350000;
    return 0;
}

int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius)
{
    (void)device;
    (void)sensor;
    *celsius = 61;
    return 0;
}

/* One part of a device, which is not listed. */
int nvmlDeviceGetHandleByUUID(const char *uuid, void **out)
{
    *out = (char *)0 + 9;
    return strcmp(uuid, "MIG-fake") == 0 ? 0 : 6;
}

int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned *milliwatts)
{
    (void)device;
    *milliwatts = 700000;
    return 0;
}

int nvmlDeviceGetClockInfo(void *device, int type, unsigned *mhz)
{
    (void)device;
    *mhz = type == 1 ? 1980 : 0;
    return 0;
}

int nvmlDeviceGetTotalEccErrors(void *device, int kind, int counter, unsigned long long *out)
{
    (void)device;
    (void)counter;
    *out = kind == 0 ? 3 : 0;
    return 0;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *out)
{
    (void)device;
    *out = 0x4;
    return 0;
}
