/*
 *  1. kfd/kfd/topology/nodes has a directory for each processor; those whose gpu_id is 0 are CPUs.
 *     `properties` names a device's render node, below which the driver's figures are.
 *  2. Figures are one number a file, in units of hwmon (microwatts, thousandths of a degree,
 * hertz). Which sensors there are differs between devices: the first that is there counts.
 *  3. Errors of memory are lines "ue: N", "ce: N" where the device has RAS.
 */
#include "agent/amd.h"

#include <dirent.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PATH_BYTES = 512 };

static int read_line(const char *dir, const char *name, char *out, size_t size)
{
    char path[PATH_BYTES];
    FILE *f;
    int done;

    out[0] = '\0';
    snprintf(path, sizeof(path), "%.300s/%.200s", dir, name);
    f = fopen(path, "re");
    if (f == NULL)
        return 0;
    done = fgets(out, (int)size, f) != NULL;
    fclose(f);
    if (!done)
        out[0] = '\0';
    out[strcspn(out, "\n")] = '\0';
    return out[0] != '\0';
}

static uint64_t number(const char *dir, const char *name)
{
    char text[64];

    return read_line(dir, name, text, sizeof(text)) ? strtoull(text, NULL, 10) : 0;
}

/* The value of "NAME VALUE", or "NAME: VALUE", in a file of such lines. */
static uint64_t value_of(const char *dir, const char *file, const char *name, int *is_there)
{
    char path[PATH_BYTES], line[256];
    size_t n = strlen(name);
    uint64_t value = 0;
    FILE *f;

    *is_there = 0;
    snprintf(path, sizeof(path), "%.300s/%.200s", dir, file);
    f = fopen(path, "re");
    while (f != NULL && !*is_there && fgets(line, sizeof(line), f) != NULL)
        if (strncmp(line, name, n) == 0 && strspn(line + n, ": ") > 0) {
            value = strtoull(line + n + strspn(line + n, ": "), NULL, 10);
            *is_there = 1;
        }
    if (f != NULL)
        fclose(f);
    return value;
}

static int by_node(const void *a, const void *b)
{
    unsigned x = *(const unsigned *)a, y = *(const unsigned *)b; /* the first member */

    return x < y ? -1 : x > y;
}

void mb_amd_find(const char *sys_class, struct mb_amd *out)
{
    char nodes[PATH_BYTES / 2];
    struct dirent *e;
    DIR *d;

    *out = (struct mb_amd){0};
    snprintf(nodes, sizeof(nodes), "%.160s/kfd/kfd/topology/nodes", sys_class);
    d = opendir(nodes);
    while (d != NULL && (e = readdir(d)) != NULL && out->n < MB_GPUS_MAX) {
        char dir[PATH_BYTES];
        uint64_t minor;
        int is_there;

        snprintf(dir, sizeof(dir), "%s/%.32s", nodes, e->d_name);
        if (e->d_name[0] == '.' || number(dir, "gpu_id") == 0)
            continue;
        minor = value_of(dir, "properties", "drm_render_minor", &is_there);
        out->at[out->n].node = (unsigned)strtoul(e->d_name, NULL, 10);
        if (is_there)
            snprintf(out->at[out->n].dir, sizeof(out->at[out->n].dir),
                     "%.80s/drm/renderD%" PRIu64 "/device", sys_class, minor);
        out->n++;
    }
    if (d != NULL)
        closedir(d);
    qsort(out->at, out->n, sizeof(out->at[0]), by_node);
    for (unsigned i = 0; i < out->n; i++)
        snprintf(out->at[i].word, sizeof(out->at[i].word), "%u", i);
}

void mb_amd_choose(struct mb_amd *all, const struct mb_gpu_choice *ours)
{
    struct mb_amd left = {.n = 0};

    for (unsigned i = 0; i < ours->n; i++)
        if (ours->at[i].device >= 0 && (unsigned)ours->at[i].device < all->n) {
            left.at[left.n] = all->at[ours->at[i].device];
            memcpy(left.at[left.n++].word, ours->at[i].word, sizeof(ours->at[i].word));
        }
    *all = left;
}

/* The directory of the device's sensors. */
static int find_hwmon(const char *dir, char *out, size_t size)
{
    char all[PATH_BYTES];
    struct dirent *e;
    int found = 0;
    DIR *d;

    snprintf(all, sizeof(all), "%.300s/hwmon", dir);
    d = opendir(all);
    while (d != NULL && !found && (e = readdir(d)) != NULL)
        if (strncmp(e->d_name, "hwmon", strlen("hwmon")) == 0) {
            snprintf(out, size, "%.300s/%.32s", all, e->d_name);
            found = 1;
        }
    if (d != NULL)
        closedir(d);
    return found;
}

static uint64_t first_of(const char *dir, const char *one, const char *other)
{
    uint64_t n = number(dir, one);

    return n != 0 ? n : number(dir, other);
}

static void read_sensors(const char *dir, struct mb_gpu_usage *out)
{
    char hwmon[PATH_BYTES];

    if (!find_hwmon(dir, hwmon, sizeof(hwmon)))
        return;
    out->power_mw = (unsigned)(first_of(hwmon, "power1_average", "power1_input") / 1000);
    out->power_limit_mw = (unsigned)(number(hwmon, "power1_cap") / 1000);
    /* At the edge; where there is none, at the junction. */
    out->temperature_c = (unsigned)(first_of(hwmon, "temp1_input", "temp2_input") / 1000);
    out->sm_clock_mhz = (unsigned)(number(hwmon, "freq1_input") / 1000000);
}

void mb_amd_usage(const struct mb_amd *a, unsigned device, struct mb_gpu_usage *out)
{
    const char *dir = device < a->n ? a->at[device].dir : "";
    char text[32];
    int has_ue, has_ce;

    *out = (struct mb_gpu_usage){.percent = 0};
    if (device >= a->n)
        return;
    memcpy(out->word, a->at[device].word, sizeof(out->word));
    if (!read_line(dir, "product_name", out->name, sizeof(out->name)))
        snprintf(out->name, sizeof(out->name), "AMD GPU");
    if (read_line(dir, "unique_id", text, sizeof(text)))
        snprintf(out->uuid, sizeof(out->uuid), "GPU-%s", text);
    out->percent = (unsigned)number(dir, "gpu_busy_percent");
    out->used_bytes = number(dir, "mem_info_vram_used");
    out->total_bytes = number(dir, "mem_info_vram_total");
    read_sensors(dir, out);
    out->ecc_uncorrected = value_of(dir, "ras/umc_err_count", "ue", &has_ue);
    out->ecc_corrected = value_of(dir, "ras/umc_err_count", "ce", &has_ce);
    out->has_ecc = has_ue && has_ce;
}
