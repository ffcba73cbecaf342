/* AMD's devices by the files of their driver: which there are, in which order, what they say. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "agent/amd.h"
#include "base/fs.h"

static char sys[64];

static void put(const char *name, const char *text)
{
    char path[256], *slash;

    snprintf(path, sizeof(path), "%s/%s", sys, name);
    slash = strrchr(path, '/');
    *slash = '\0';
    assert_int_equal(mb_fs_mkdir_p(path, 0755, NULL), 0);
    *slash = '/';
    assert_int_equal(mb_fs_write_atomic(path, text, strlen(text), 0644, NULL), 0);
}

static int set_up(void **state)
{
    (void)state;
    strcpy(sys, "/tmp/mobula-sys-XXXXXX");
    if (mkdtemp(sys) == NULL)
        return -1;
    put("kfd/kfd/topology/nodes/0/gpu_id", "0\n"); /* a CPU */
    put("kfd/kfd/topology/nodes/0/properties", "cpu_cores_count 64\n");
    put("kfd/kfd/topology/nodes/10/gpu_id", "51003\n");
    put("kfd/kfd/topology/nodes/10/properties", "simd_count 1216\ndrm_render_minor 136\n");
    put("kfd/kfd/topology/nodes/2/gpu_id", "28851\n");
    put("kfd/kfd/topology/nodes/2/properties", "drm_render_minor 128\nunique_id 7\n");
    put("kfd/kfd/topology/nodes/3/gpu_id", "1\n"); /* not a word about it */
    put("drm/renderD128/device/product_name", "AMD Instinct MI300X OAM\n");
    put("drm/renderD128/device/unique_id", "8f3c5a1d2b4e6f70\n");
    put("drm/renderD128/device/gpu_busy_percent", "87\n");
    put("drm/renderD128/device/mem_info_vram_total", "206141652992\n");
    put("drm/renderD128/device/mem_info_vram_used", "1073741824\n");
    put("drm/renderD128/device/ras/umc_err_count", "ue: 2\nce: 31\n");
    put("drm/renderD128/device/hwmon/hwmon7/power1_average", "512000000\n");
    put("drm/renderD128/device/hwmon/hwmon7/power1_cap", "750000000\n");
    put("drm/renderD128/device/hwmon/hwmon7/temp1_input", "43000\n");
    put("drm/renderD128/device/hwmon/hwmon7/temp2_input", "61000\n");
    put("drm/renderD128/device/hwmon/hwmon7/freq1_input", "2100000000\n");
    put("drm/renderD136/device/hwmon/hwmon9/power1_input", "90000000\n");
    put("drm/renderD136/device/hwmon/hwmon9/temp2_input", "38000\n");
    put("drm/renderD136/device/gpu_busy_percent", "not a number\n");
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    return mb_fs_remove_tree(sys, NULL);
}

static void which_there_are(void **state)
{
    struct mb_amd a;

    (void)state;
    mb_amd_find(sys, &a);
    assert_int_equal(a.n, 3);
    assert_int_equal(a.at[0].node, 2);
    assert_int_equal(a.at[1].node, 3);
    assert_int_equal(a.at[2].node, 10); /* not behind the 0 of a directory's order */
    assert_non_null(strstr(a.at[0].dir, "/drm/renderD128/device"));
    assert_string_equal(a.at[1].dir, "");
    assert_string_equal(a.at[2].word, "2");
    mb_amd_find("/nowhere", &a);
    assert_int_equal(a.n, 0);
}

static void what_they_say(void **state)
{
    struct mb_amd a;
    struct mb_gpu_usage u;

    (void)state;
    mb_amd_find(sys, &a);
    mb_amd_usage(&a, 0, &u);
    assert_string_equal(u.name, "AMD Instinct MI300X OAM");
    assert_string_equal(u.uuid, "GPU-8f3c5a1d2b4e6f70");
    assert_string_equal(u.word, "0");
    assert_int_equal(u.percent, 87);
    assert_int_equal(u.used_bytes, 1 << 30);
    assert_int_equal(u.total_bytes, 206141652992);
    assert_int_equal(u.power_mw, 512000);
    assert_int_equal(u.power_limit_mw, 750000);
    assert_int_equal(u.temperature_c, 43);
    assert_int_equal(u.sm_clock_mhz, 2100);
    assert_true(u.has_ecc);
    assert_int_equal(u.ecc_uncorrected, 2);
    assert_int_equal(u.ecc_corrected, 31);
}

static void what_they_leave_out(void **state)
{
    struct mb_amd a;
    struct mb_gpu_usage u;

    (void)state;
    mb_amd_find(sys, &a);
    mb_amd_usage(&a, 2, &u);
    assert_string_equal(u.name, "AMD GPU");
    assert_string_equal(u.uuid, "");
    assert_int_equal(u.percent, 0);
    assert_int_equal(u.power_mw, 90000);
    assert_int_equal(u.temperature_c, 38);
    assert_false(u.has_ecc);
    mb_amd_usage(&a, 1, &u);
    assert_int_equal(u.total_bytes, 0);
    mb_amd_usage(&a, 3, &u); /* there is no such */
    assert_string_equal(u.name, "");
}

static void which_are_ours(void **state)
{
    struct mb_gpu_choice ours = {.n = 2};
    struct mb_gpu_usage u;
    struct mb_amd a;

    (void)state;
    ours.at[0].device = 2;
    strcpy(ours.at[0].word, "2");
    ours.at[1].device = 0;
    strcpy(ours.at[1].word, "0");
    mb_amd_find(sys, &a);
    mb_amd_choose(&a, &ours);
    assert_int_equal(a.n, 2);
    mb_amd_usage(&a, 0, &u);
    assert_int_equal(u.power_mw, 90000);
    assert_string_equal(u.word, "2");
    mb_amd_usage(&a, 1, &u);
    assert_int_equal(u.percent, 87);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(which_there_are),
        cmocka_unit_test(what_they_say),
        cmocka_unit_test(what_they_leave_out),
        cmocka_unit_test(which_are_ours),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
