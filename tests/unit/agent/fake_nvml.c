/* A libnvidia-ml that is loaded before anybody asks for it: two devices, nothing in use. As a file
 * of that name it is a driver for whole agents. */
#include <stdio.h>
#include <string.h>

int nvmlInit_v2(void);
int nvmlShutdown(void);
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **out);
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *total_free_used);
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

int fake_nvml_status; /* of nvmlInit */

int nvmlInit_v2(void)
{
    return fake_nvml_status;
}

int nvmlShutdown(void)
{
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **out)
{
    *out = (char *)0 + i + 1;
    return 0;
}

int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *total_free_used)
{
    (void)device;
    total_free_used[0] = total_free_used[1] = 80ull << 30;
    total_free_used[2] = 0;
    return 0;
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
