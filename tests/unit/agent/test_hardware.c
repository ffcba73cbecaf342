/* What a machine says of itself in files, and the page that is made of it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "agent/hardware.h"
#include "base/fs.h"

static char proc[64];

static void put(const char *name, const char *text)
{
    char path[128];

    snprintf(path, sizeof(path), "%s/%s", proc, name);
    assert_int_equal(mb_fs_write_atomic(path, text, strlen(text), 0644, NULL), 0);
}

static int set_up(void **state)
{
    char path[128];

    (void)state;
    strcpy(proc, "/tmp/mobula-proc-XXXXXX");
    if (mkdtemp(proc) == NULL)
        return -1;
    snprintf(path, sizeof(path), "%s/net", proc);
    mb_fs_mkdir_p(path, 0755, NULL);
    snprintf(path, sizeof(path), "%s/self", proc);
    mb_fs_mkdir_p(path, 0755, NULL);
    put("cpuinfo", "processor\t: 0\nsiblings\t: 8\ncpu cores\t: 4\n");
    put("stat", "cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1 2 3 4\nbtime 1700000000\n");
    put("meminfo", "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 600 kB\nShmem: 7 kB\n");
    put("loadavg", "0.50 1.25 2.00 1/100 4242\n");
    put("net/dev", "Inter-| Receive\n face |bytes\n    lo: 9 9 9 9 9 9 9 9 9 9\n"
                   "  eth0: 1000 1 0 0 0 0 0 0 500 2 0 0 0 0 0 0\n"
                   " veth1: 7 1 0 0 0 0 0 0 7 2 0 0 0 0 0 0\n"
                   "docker0: 7 1 0 0 0 0 0 0 7 2 0 0 0 0 0 0\n"
                   " bond0: 7 1 0 0 0 0 0 0 7 2 0 0 0 0 0 0\n"
                   "  ib0:2000 1 0 0 0 0 0 0 700 2 0 0 0 0 0 0\n");
    put("diskstats", " 259 0 nvme0n1 10 0 100 0 20 0 200 0 0 0 0\n"
                     " 259 1 nvme0n1p1 9 0 99 0 19 0 199 0 0 0 0\n"
                     " 8 0 sda 1 0 2 0 3 0 4 0 0 0 0\n 8 1 sda1 1 0 2 0 3 0 4 0 0 0 0\n"
                     " 7 0 loop0 5 0 5 0 5 0 5 0 0 0 0\n 253 0 dm-0 5 0 5 0 5 0 5 0 0 0 0\n");
    put("self/stat", "77 (mob ) ula) S 1 1 1 0 -1 4 1 2 3 4 30 12 0 0 20 0 3 0 99 123456 50 1\n");
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    return mb_fs_remove_tree(proc, NULL);
}

static void what_files_say(void **state)
{
    struct mb_hardware h;

    (void)state;
    mb_hardware_read(proc, proc, &h);
    assert_int_equal(h.cpu_ticks, 1000);
    assert_int_equal(h.cpu_busy_ticks, 150);
    assert_int_equal(h.boot_unix_s, 1700000000);
    assert_int_equal(h.n_cores, (h.n_cpus * 4) / 8 > 0 ? (h.n_cpus * 4) / 8 : 1);
    assert_int_equal(h.host_bytes, 1000 << 10);
    assert_int_equal(h.host_used_bytes, 400 << 10);
    assert_int_equal(h.shm_bytes, 7 << 10);
    assert_int_equal(h.received_bytes, 3000);
    assert_int_equal(h.sent_bytes, 1200);
    assert_int_equal(h.disk_ops[0], 11);
    assert_int_equal(h.disk_bytes[0], 102 * 512);
    assert_int_equal(h.disk_ops[1], 23);
    assert_int_equal(h.disk_bytes[1], 204 * 512);
    assert_int_equal(h.agent_ticks, 42);
    assert_int_equal(h.agent_vm_bytes, 123456);
    assert_int_equal(h.agent_rss_bytes, 50 * sysconf(_SC_PAGESIZE));
    assert_true(h.space_bytes > 0);
}

static void a_machine_that_says_nothing(void **state)
{
    struct mb_hardware h;
    json_t *o;

    (void)state;
    mb_hardware_read("/nonexistent", "/nonexistent", &h);
    assert_int_equal(h.cpu_ticks, 0);
    assert_int_equal(h.host_bytes, 0);
    assert_true(h.n_cpus >= 1 && h.n_cores == h.n_cpus);
    o = mb_hardware_json(&h, NULL, "h", "1.2.3.4", "/d");
    assert_non_null(o);
    assert_true(json_real_value(json_object_get(o, "cpu")) == 0);
    json_decref(o);
}

static void names_need_not_be_text(void **state)
{
    struct mb_hardware h;
    json_t *o, *disk;

    (void)state;
    mb_hardware_read(proc, proc, &h);
    o = mb_hardware_json(&h, NULL, "h\xff", "1.2.3.4", "/d\xe9/x");
    assert_non_null(o);
    assert_string_equal(json_string_value(json_object_get(o, "hostname")), "h\xef\xbf\xbd");
    disk = json_object_get(o, "disk");
    assert_int_equal(json_object_size(disk), 1);
    assert_non_null(json_object_get(disk, "/d\xef\xbf\xbd/x"));
    json_decref(o);
}

static double item(json_t *o, const char *list, size_t i)
{
    return json_number_value(json_array_get(json_object_get(o, list), i));
}

static void speeds_are_differences(void **state)
{
    struct mb_hardware a, b;
    json_t *o;

    (void)state;
    mb_hardware_read(proc, proc, &a);
    put("stat", "cpu  150 0 75 900 75 0 0 0 0 0\nbtime 1700000000\n");
    put("net/dev", "  eth0: 5000 1 0 0 0 0 0 0 500 2 0 0 0 0 0 0\n"); /* ib0 is gone */
    mb_hardware_read(proc, proc, &b);
    b.at_ms = a.at_ms + 2000;
    o = mb_hardware_json(&b, &a, "h", "1.2.3.4", "/d");
    assert_non_null(o);
    assert_true(json_real_value(json_object_get(o, "cpu")) == 37.5); /* 75 of 200 */
    assert_true(item(o, "networkSpeed", 1) == 1000);
    assert_true(item(o, "networkSpeed", 0) == 0); /* not a negative speed */
    assert_true(item(o, "diskIoSpeed", 0) == 0);
    assert_int_equal(json_array_size(json_object_get(o, "gpus")), 0);
    json_decref(o);
    o = mb_hardware_json(&b, NULL, "h", "1.2.3.4", "/d"); /* the first page has no speeds */
    assert_true(item(o, "networkSpeed", 1) == 0);
    json_decref(o);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(what_files_say, set_up, tear_down),
        cmocka_unit_test(a_machine_that_says_nothing),
        cmocka_unit_test_setup_teardown(names_need_not_be_text, set_up, tear_down),
        cmocka_unit_test_setup_teardown(speeds_are_differences, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
