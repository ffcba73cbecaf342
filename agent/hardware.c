/*
 *  1. Each file is read whole and taken apart by lines; a file that is not there leaves zeros,
 * which is what the page then shows.
 *  2. Partitions and layered devices repeat the traffic of the device below: only devices with a
 *     name of whole disks count.
 *  3. Percentages and speeds are differences between two looks. A counter that went back (a device
 *     is gone) is a speed of 0.
 */
#include "agent/hardware.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include "agent/gpu_figures.h"
#include "base/alloc.h"
#include "base/buf.h"
#include "base/clock.h"
#include "base/str.h"
#include "gcs/types.h"

enum { SECTOR_BYTES = 512, LINE_MAX_BYTES = 1024 };

/* Runs take() for every line. */
static void each_line(const char *proc, const char *name, struct mb_hardware *h,
                      void (*take)(struct mb_hardware *h, const char *line))
{
    char path[512], line[LINE_MAX_BYTES];
    FILE *f;

    snprintf(path, sizeof(path), "%.400s/%s", proc, name);
    f = fopen(path, "re");
    while (f != NULL && fgets(line, sizeof(line), f) != NULL)
        take(h, line);
    if (f != NULL)
        fclose(f);
}

static void take_stat(struct mb_hardware *h, const char *line)
{
    uint64_t v[8] = {0};

    if (sscanf(line, "btime %" SCNu64, &h->boot_unix_s) == 1)
        return;
    if (strncmp(line, "cpu ", 4) != 0 ||
        sscanf(line + 4,
               "%" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64
               " %" SCNu64,
               &v[0], &v[1], &v[2], &v[3], &v[4], &v[5], &v[6], &v[7]) < 4)
        return;
    for (int i = 0; i < 8; i++)
        h->cpu_ticks += v[i];
    h->cpu_busy_ticks = h->cpu_ticks - v[3] - v[4]; /* idle, and waiting for a disk */
}

static void take_cpuinfo(struct mb_hardware *h, const char *line)
{
    static const char siblings[] = "siblings", cores[] = "cpu cores";
    const char *colon = strchr(line, ':');
    unsigned n = colon != NULL ? (unsigned)strtoul(colon + 1, NULL, 10) : 0;

    /* Of one package: with as many threads on every core, as many cores on the whole. */
    if (n > 0 && strncmp(line, siblings, strlen(siblings)) == 0)
        h->n_cores = n;
    else if (n > 0 && h->n_cores > 0 && strncmp(line, cores, strlen(cores)) == 0)
        h->n_cores = h->n_cpus * n / h->n_cores > 0 ? h->n_cpus * n / h->n_cores : 1;
}

static void take_meminfo(struct mb_hardware *h, const char *line)
{
    uint64_t kib;

    if (sscanf(line, "MemTotal: %" SCNu64, &kib) == 1)
        h->host_bytes = kib << 10;
    else if (sscanf(line, "MemAvailable: %" SCNu64, &kib) == 1)
        h->host_used_bytes = h->host_bytes > kib << 10 ? h->host_bytes - (kib << 10) : 0;
    else if (sscanf(line, "Shmem: %" SCNu64, &kib) == 1)
        h->shm_bytes = kib << 10;
}

static void take_loadavg(struct mb_hardware *h, const char *line)
{
    if (sscanf(line, "%lf %lf %lf", &h->load[0], &h->load[1], &h->load[2]) != 3)
        h->load[0] = h->load[1] = h->load[2] = 0;
}

static void take_network(struct mb_hardware *h, const char *line)
{
    const char *colon = strchr(line, ':');
    uint64_t received, sent;

    while (*line == ' ')
        line++;
    /* Ray counts names with an e. A bridge, a bond or a pod's end would count the same bytes again.
     */
    if (colon == NULL || (*line != 'e' && strncmp(line, "ib", 2) != 0) ||
        sscanf(colon + 1, "%" SCNu64 " %*s %*s %*s %*s %*s %*s %*s %" SCNu64, &received, &sent) !=
            2)
        return;
    h->received_bytes += received;
    h->sent_bytes += sent;
}

static int is_whole_disk(const char *name)
{
    size_t n = strlen(name);

    if (mb_starts_with(name, "nvme") || mb_starts_with(name, "mmcblk"))
        return strrchr(name, 'p') == NULL || !isdigit((unsigned char)name[n - 1]) ||
               !isdigit((unsigned char)strrchr(name, 'p')[1]);
    if (mb_starts_with(name, "sd") || mb_starts_with(name, "vd") || mb_starts_with(name, "xvd"))
        return !isdigit((unsigned char)name[n - 1]);
    return 0;
}

static void take_disk(struct mb_hardware *h, const char *line)
{
    uint64_t reads, read_sectors, writes, written_sectors;
    char name[64];

    if (sscanf(line, "%*u %*u %63s %" SCNu64 " %*u %" SCNu64 " %*u %" SCNu64 " %*u %" SCNu64, name,
               &reads, &read_sectors, &writes, &written_sectors) != 5 ||
        !is_whole_disk(name))
        return;
    h->disk_ops[0] += reads;
    h->disk_bytes[0] += read_sectors * SECTOR_BYTES;
    h->disk_ops[1] += writes;
    h->disk_bytes[1] += written_sectors * SECTOR_BYTES;
}

static void take_self(struct mb_hardware *h, const char *line)
{
    const char *after = strrchr(line, ')'); /* a name may hold anything */
    uint64_t user, system, vm, pages;

    if (after != NULL && sscanf(after + 1,
                                " %*c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %" SCNu64 " %" SCNu64
                                " %*s %*s %*s %*s %*s %*s %*s %" SCNu64 " %" SCNu64,
                                &user, &system, &vm, &pages) == 4) {
        h->agent_ticks = user + system;
        h->agent_vm_bytes = vm;
        h->agent_rss_bytes = pages * (uint64_t)sysconf(_SC_PAGESIZE);
    }
}

static void read_space(const char *dir, struct mb_hardware *h)
{
    struct statvfs v;

    if (statvfs(dir, &v) != 0)
        return;
    h->space_bytes = (uint64_t)v.f_blocks * v.f_frsize;
    h->space_used_bytes = (uint64_t)(v.f_blocks - v.f_bfree) * v.f_frsize;
    h->space_free_bytes = (uint64_t)v.f_bavail * v.f_frsize;
}

void mb_hardware_read(const char *proc, const char *dir, struct mb_hardware *h)
{
    *h = (struct mb_hardware){.at_ms = mb_mono_ms(), .unix_ms = mb_unix_ms()};
    h->n_cpus = mb_cpus_detect();
    each_line(proc, "cpuinfo", h, take_cpuinfo);
    if (h->n_cores == 0)
        h->n_cores = h->n_cpus;
    each_line(proc, "stat", h, take_stat);
    each_line(proc, "meminfo", h, take_meminfo);
    each_line(proc, "loadavg", h, take_loadavg);
    each_line(proc, "net/dev", h, take_network);
    each_line(proc, "diskstats", h, take_disk);
    each_line(proc, "self/stat", h, take_self);
    read_space(dir, h);
    h->mem_bytes = mb_memory_detect();
    h->mem_used_bytes = mb_memory_used();
    if (h->mem_used_bytes == 0 || h->mem_bytes >= h->host_bytes) { /* no limit */
        h->mem_bytes = h->host_bytes;
        h->mem_used_bytes = h->host_used_bytes;
    }
}

/* ---- as the dashboard reads it ---- */

static double percent(uint64_t part, uint64_t whole)
{
    return whole > 0 ? (double)(part * 1000 / whole) / 10 : 0;
}

static double speed(uint64_t now, uint64_t before, uint64_t ms)
{
    return now > before && ms > 0 ? (double)(now - before) * 1000 / (double)ms : 0;
}

static json_t *gpus_json(const struct mb_hardware *h)
{
    json_t *list = json_array();

    for (unsigned i = 0; i < h->n_gpus; i++) {
        const struct mb_gpu_usage *g = &h->gpus[i];

        json_array_append_new(
            list, json_pack("{s:i, s:s, s:s, s:i, s:I, s:I, s:[], s:i, s:i}", "index", (int)i,
                            "name", g->name, "uuid", g->uuid, "utilizationGpu", (int)g->percent,
                            "memoryUsed", (json_int_t)(g->used_bytes >> 20), "memoryTotal",
                            (json_int_t)(g->total_bytes >> 20), "processesPids", "powerMw",
                            (int)g->power_mw, "temperatureC", (int)g->temperature_c));
    }
    return list;
}

static json_t *agent_json(const struct mb_hardware *h, const struct mb_hardware *b, uint64_t ms)
{
    double hz = (double)sysconf(_SC_CLK_TCK);

    return json_pack("{s:i, s:f, s:f, s:n, s:[s], s:{s:I, s:I}, s:n, s:n}", "pid", (int)getpid(),
                     "createTime", 0.0, "cpuPercent",
                     speed(h->agent_ticks, b->agent_ticks, ms) / hz * 100, "cpuTimes", "cmdline",
                     "mobula-agent", "memoryInfo", "rss", (json_int_t)h->agent_rss_bytes, "vms",
                     (json_int_t)h->agent_vm_bytes, "memoryFullInfo", "numFds");
}

static json_t *traffic_json(const struct mb_hardware *h, const struct mb_hardware *b, uint64_t ms)
{
    return json_pack(
        "{s:[I,I,I,I], s:[f,f,f,f], s:[I,I], s:[f,f]}", "diskIo", (json_int_t)h->disk_bytes[0],
        (json_int_t)h->disk_bytes[1], (json_int_t)h->disk_ops[0], (json_int_t)h->disk_ops[1],
        "diskIoSpeed", speed(h->disk_bytes[0], b->disk_bytes[0], ms),
        speed(h->disk_bytes[1], b->disk_bytes[1], ms), speed(h->disk_ops[0], b->disk_ops[0], ms),
        speed(h->disk_ops[1], b->disk_ops[1], ms), "network", (json_int_t)h->sent_bytes,
        (json_int_t)h->received_bytes, "networkSpeed", speed(h->sent_bytes, b->sent_bytes, ms),
        speed(h->received_bytes, b->received_bytes, ms));
}

/* Names of the machine's are bytes; JSON's are text. NULL: no memory. */
static char *text_of(const char *name)
{
    struct mb_buf b = {0};

    if (mb_buf_utf8(&b, name, strlen(name)) == 0)
        return mb_buf_take(&b);
    mb_buf_close(&b);
    return NULL;
}

json_t *mb_hardware_json(const struct mb_hardware *h, const struct mb_hardware *before,
                         const char *hostname, const char *ip, const char *dir)
{
    const struct mb_hardware *b = before != NULL ? before : h;
    uint64_t ms = h->at_ms - b->at_ms, cpus = h->n_cpus > 0 ? h->n_cpus : 1;
    uint64_t free_bytes = h->mem_bytes > h->mem_used_bytes ? h->mem_bytes - h->mem_used_bytes : 0;
    uint64_t busy =
        h->cpu_busy_ticks > b->cpu_busy_ticks ? h->cpu_busy_ticks - b->cpu_busy_ticks : 0;
    uint64_t ticks = h->cpu_ticks > b->cpu_ticks ? h->cpu_ticks - b->cpu_ticks : 0;
    char *host = text_of(hostname), *path = text_of(dir);
    json_t *traffic = traffic_json(h, b, ms);
    json_t *o = json_pack(
        "{s:f, s:s, s:s, s:f, s:[i,i], s:[I,I,f,I], s:[I,I], s:n, s:I, s:[], s:n, s:o, s:f,"
        " s:[[f,f,f],[f,f,f]], s:{s:{s:I, s:I, s:I, s:f}}, s:o, s:o, s:[], s:[], s:n}",
        "now", (double)h->unix_ms / 1000, "hostname", host, "ip", ip, "cpu", percent(busy, ticks),
        "cpus", (int)h->n_cpus, (int)h->n_cores, "mem", (json_int_t)h->mem_bytes,
        (json_int_t)free_bytes, percent(h->mem_used_bytes, h->mem_bytes),
        (json_int_t)h->mem_used_bytes, "hostMem", (json_int_t)h->host_used_bytes,
        (json_int_t)h->host_bytes, "cgroupMem", "shm", (json_int_t)h->shm_bytes, "workers",
        "raylet", "agent", agent_json(h, b, ms), "bootTime", (double)h->boot_unix_s, "loadAvg",
        h->load[0], h->load[1], h->load[2], h->load[0] / (double)cpus, h->load[1] / (double)cpus,
        h->load[2] / (double)cpus, "disk", path, "total", (json_int_t)h->space_bytes, "used",
        (json_int_t)h->space_used_bytes, "free", (json_int_t)h->space_free_bytes, "percent",
        percent(h->space_used_bytes, h->space_used_bytes + h->space_free_bytes), "gpus",
        gpus_json(h), MB_GCS_PAGE_GPUS, mb_gpu_usage_json(h->gpus, h->n_gpus), "tpus", "cmdline",
        "gcs");

    if (o == NULL || traffic == NULL || json_object_update(o, traffic) != 0) {
        json_decref(o);
        o = NULL;
    }
    json_decref(traffic);
    mb_free(host);
    mb_free(path);
    return o;
}
