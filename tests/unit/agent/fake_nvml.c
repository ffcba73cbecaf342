/* A libnvidia-ml that is loaded before anybody asks for it: two devices, nothing in use. */
int nvmlInit_v2(void);
int nvmlShutdown(void);
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **out);
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *total_free_used);

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
