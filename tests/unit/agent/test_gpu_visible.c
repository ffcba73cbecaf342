/* Which devices a list names, and what each of them is called afterwards. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <unistd.h>
#include "agent/gpu_figures.h"
#include "agent/gpu_visible.h"
#include "agent/nvml.h"
#include "base/alloc.h"
#include "base/errand.h"

extern atomic_int fake_nvml_hangs[], fake_nvml_asked[], fake_nvml_shutdowns;

static const char *const part = "MIG-7e1f3c0a-0000-0000-0000-000000000001";

static int has_part(void *arg, const char *mig_id)
{
    (void)arg;
    return strcmp(mig_id, part) == 0;
}

/* "0,1" of what was chosen, or the error's text. */
static const char *chosen(const char *list)
{
    static char text[1024];
    struct mb_gpu_known known = {.n_devices = 4, .has_part = has_part};
    struct mb_gpu_choice out;
    struct mb_err err = {0};

    for (unsigned i = 0; i < 4; i++)
        snprintf(known.uuid[i], sizeof(known.uuid[i]), "GPU-%c%u5d-8932", i < 2 ? 'a' : 'b', i);
    if (mb_gpus_choose("LIST", list, &known, &out, &err) != MB_OK) {
        assert_int_equal(err.code, MB_EINVAL);
        assert_int_equal(out.n, 0);
        snprintf(text, sizeof(text), "%s", err.text);
        return text;
    }
    text[0] = '\0';
    for (unsigned i = 0; i < out.n; i++) {
        snprintf(text + strlen(text), sizeof(text) - strlen(text), "%s%s", i > 0 ? "," : "",
                 out.at[i].word);
        assert_true((out.at[i].device == MB_GPU_PART) == (strncmp(out.at[i].word, "MIG-", 4) == 0));
    }
    return text;
}

static void lists(void **state)
{
    (void)state;
    assert_string_equal(chosen(NULL), "0,1,2,3");
    assert_string_equal(chosen(""), "");
    assert_string_equal(chosen("2,3"), "2,3");
    assert_string_equal(chosen(" 3 , 1 "), "3,1"); /* the order is the list's */
    assert_string_equal(chosen("1,-1,2"), "1");
    assert_string_equal(chosen("-1"), "");
    assert_string_equal(chosen("NoDevFiles"), "");
    assert_string_equal(chosen("none"), "");
    assert_string_equal(chosen("GPU-b25d-8932,GPU-a0"), "2,0");
    assert_string_equal(chosen(part), part);
}

static void what_is_not_there_is_said(void **state)
{
    (void)state;
    assert_string_equal(chosen("0,4"), "LIST names GPU 4, this machine has 4");
    assert_string_equal(chosen("1,GPU-a15d"), "LIST names GPU 1 twice");
    assert_string_equal(chosen("GPU-a"), "LIST: more than one GPU begins with GPU-a");
    assert_string_equal(chosen("GPU-c"), "LIST names GPU-c, which this machine does not have");
    assert_string_equal(chosen("MIG-1"), "LIST names MIG-1, which this machine does not have");
    assert_string_equal(chosen("first"),
                        "LIST has first: it takes numbers, GPU-UUIDs and MIG identifiers");
    assert_string_equal(chosen("1x"),
                        "LIST has 1x: it takes numbers, GPU-UUIDs and MIG identifiers");
}

static void more_than_are_kept_is_an_error(void **state)
{
    struct mb_gpu_known known = {.n_devices = 1000};
    struct mb_gpu_choice out;
    struct mb_err err = {0};
    char list[400] = "";

    (void)state;
    for (int i = 0; i <= MB_GPUS_MAX; i++)
        snprintf(list + strlen(list), sizeof(list) - strlen(list), "%s%d", i > 0 ? "," : "", i);
    assert_int_equal(mb_gpus_choose("LIST", list, &known, &out, &err), MB_EINVAL);
    assert_string_equal(err.text, "LIST names more than 64 GPUs");
    assert_int_equal(mb_gpus_choose("LIST", NULL, &known, &out, &err), MB_OK);
    assert_int_equal(out.n, MB_GPUS_MAX);
}

/* ---- through the stand-in for a driver, which has two devices ---- */

static int detect_rc(const char *list, struct mb_gpus *out, struct mb_err *err)
{
    struct mb_gpu_lists lists;
    struct mb_nvml *nvml;
    struct mb_amd amd;
    int rc;

    if (list != NULL)
        setenv("CUDA_VISIBLE_DEVICES", list, 1);
    else
        unsetenv("CUDA_VISIBLE_DEVICES");
    lists = mb_gpu_lists_read();
    rc = mb_gpus_detect(&lists, out, &nvml, &amd, err);
    assert_int_equal(nvml != NULL, rc == MB_OK);
    mb_nvml_close(nvml);
    return rc;
}

static void detect(const char *list, struct mb_gpus *out)
{
    struct mb_err err = {0};

    assert_int_equal(detect_rc(list, out, &err), MB_OK);
}

static void assert_word(const struct mb_gpus *gpus, unsigned device, const char *word)
{
    struct mb_buf text = {0};

    assert_int_equal(mb_gpus_put(gpus, device, &text), MB_OK);
    assert_string_equal(mb_buf_str(&text), word);
    mb_buf_close(&text);
}

static void a_driver_s_devices(void **state)
{
    struct mb_err err = {0};
    struct mb_gpus gpus;

    (void)state;
    unsetenv("NVIDIA_VISIBLE_DEVICES");
    detect(NULL, &gpus);
    assert_int_equal(gpus.count, 2);
    assert_null(gpus.list);
    assert_word(&gpus, 1, "1");
    assert_word(&gpus, 7, "7"); /* --num-gpus says so */
    assert_word(NULL, 3, "3");
    detect("GPU-2", &gpus);
    assert_int_equal(gpus.count, 1);
    assert_int_equal(gpus.vendor, MB_GPU_NVIDIA);
    assert_string_equal(gpus.model, "Fake H100");
    assert_word(&gpus, 0, "1");
    detect("MIG-fake", &gpus);
    assert_int_equal(gpus.count, 1);
    assert_word(&gpus, 0, "MIG-fake");
    detect("", &gpus);
    assert_int_equal(gpus.count, 0);
    assert_string_equal(gpus.model, "");
    setenv("NVIDIA_VISIBLE_DEVICES", "none", 1);
    detect(NULL, &gpus);
    assert_int_equal(gpus.count, 0);
    detect("0", &gpus); /* that one counts first */
    assert_int_equal(gpus.count, 1);
    unsetenv("NVIDIA_VISIBLE_DEVICES");
    assert_int_equal(detect_rc("2", &gpus, &err), MB_EINVAL);
    assert_string_equal(err.text, "CUDA_VISIBLE_DEVICES names GPU 2, this machine has 2");
    unsetenv("CUDA_VISIBLE_DEVICES");
}

static void figures_are_those_of_the_chosen(void **state)
{
    struct mb_err err = {0};
    struct mb_gpu_usage usage[2];
    struct mb_nvml *nvml = NULL;
    struct mb_buf text = {0};
    struct mb_gpu_sample used;
    struct mb_gpus gpus = {0};
    json_t *list;

    (void)state;
    assert_int_equal(mb_nvml_open(&(struct mb_gpu_lists){.cuda = "1,0"}, &gpus, &nvml, &err),
                     MB_OK);
    assert_non_null(nvml);
    assert_int_equal(mb_nvml_count(nvml), 2);
    assert_word(&gpus, 0, "1");
    assert_int_equal(mb_nvml_in_use(nvml, 1, &used), MB_OK);
    assert_int_equal(used.measure, MB_GPU_BY_MEMORY);
    assert_int_equal(used.value, 0);
    assert_int_equal(mb_nvml_in_use(nvml, 2, &used), MB_OK); /* --num-gpus says there is one */
    assert_int_equal(used.measure, MB_GPU_BY_NOTHING);
    for (unsigned i = 0; i < 2; i++)
        mb_nvml_usage(nvml, i, &usage[i]);
    mb_nvml_close(nvml);
    assert_string_equal(usage[0].uuid, "GPU-2");
    assert_int_equal(usage[0].power_limit_mw, 700000);
    list = mb_gpu_usage_json(usage, 2);
    char *json = json_dumps(json_array_get(list, 0), JSON_COMPACT);
    assert_string_equal(
        json, "{\"gpu\":0,\"device\":\"1\",\"name\":\"Fake H100\",\"uuid\":\"GPU-2\","
              "\"utilization_percent\":37,\"memory_used_bytes\":0,"
              "\"memory_total_bytes\":85899345920,\"power_watts\":350.0,"
              "\"power_limit_watts\":700.0,\"temperature_celsius\":61,\"sm_clock_mhz\":1980,"
              "\"ecc_corrected\":3,\"ecc_uncorrected\":0,\"throttle\":[\"power cap\"]}");
    mb_free(json);
    json_decref(list);
    usage[1].has_ecc = 0; /* consumers' cards have none */
    assert_int_equal(mb_gpu_usage_metrics(usage, 2, &text), MB_OK);
    assert_non_null(strstr(mb_buf_str(&text), "mobula_gpu_utilization_ratio{gpu=\"0\",device=\"1\","
                                              "uuid=\"GPU-2\"} 0.37"));
    assert_non_null(strstr(mb_buf_str(&text),
                           "mobula_gpu_ecc_errors_total{gpu=\"0\",device=\"1\",uuid=\"GPU-2\","
                           "kind=\"corrected\"} 3\n"));
    assert_null(strstr(mb_buf_str(&text), "mobula_gpu_ecc_errors_total{gpu=\"1\""));
    assert_non_null(strstr(mb_buf_str(&text),
                           "mobula_gpu_throttled{gpu=\"1\",device=\"0\",uuid=\"GPU-1\","
                           "reason=\"power cap\"} 1\n"));
    assert_non_null(strstr(mb_buf_str(&text), "reason=\"power brake\"} 0\n"));
    mb_buf_close(&text);
    list = mb_gpu_usage_json(&usage[1], 1);
    assert_true(json_is_null(json_object_get(json_array_get(list, 0), "ecc_corrected")));
    json_decref(list);
}

/* ---- looking now and then ---- */

struct watched {
    uv_loop_t loop;
    struct mb_gpu_figures *figures;
    uv_timer_t timer;
    int n_looks, is_closed;
};

static void on_figures_closed(void *arg)
{
    ((struct watched *)arg)->is_closed = 1;
}

static void look(uv_timer_t *t)
{
    struct watched *w = t->data;
    const struct mb_gpu_usage *gpus;

    w->n_looks++;
    if (mb_gpu_figures_latest(w->figures, &gpus) == 0)
        return; /* not yet */
    assert_string_equal(gpus[1].uuid, "GPU-2");
    uv_close((uv_handle_t *)t, NULL);
    mb_gpu_figures_close(w->figures, on_figures_closed, w);
}

static void begin_looking(struct watched *w)
{
    struct mb_gpus gpus = {0};
    struct mb_nvml *nvml = NULL;
    struct mb_err err = {0};

    uv_loop_init(&w->loop);
    assert_int_equal(mb_gpu_figures_create(&w->loop, &w->figures, &err), MB_OK);
    assert_int_equal(mb_nvml_open(&(struct mb_gpu_lists){0}, &gpus, &nvml, &err), MB_OK);
    assert_non_null(nvml);
    mb_gpu_figures_begin(w->figures, nvml, &(struct mb_amd){0});
    mb_nvml_close(nvml);
}

static void the_first_look_comes_at_once(void **state)
{
    const struct mb_gpu_usage *gpus;
    struct watched w = {.n_looks = 0};

    (void)state;
    assert_int_equal(mb_gpu_figures_latest(NULL, &gpus), 0);
    begin_looking(&w);
    assert_int_equal(mb_gpu_figures_latest(w.figures, &gpus), 0);
    uv_timer_init(&w.loop, &w.timer);
    w.timer.data = &w;
    uv_timer_start(&w.timer, look, 0, 5);
    uv_run(&w.loop, UV_RUN_DEFAULT);
    assert_true(w.is_closed && w.n_looks > 0);
    assert_int_equal(uv_loop_close(&w.loop), 0);
}

static void figures_of_a_silent_driver_end_too(void **state)
{
    const struct mb_gpu_usage *gpus;
    struct mb_err err = {0};
    struct watched w = {.n_looks = 0};

    (void)state;
    uv_loop_init(&w.loop);
    assert_int_equal(mb_gpu_figures_create(&w.loop, &w.figures, &err), MB_OK);
    assert_int_equal(mb_gpu_figures_latest(w.figures, &gpus), 0);
    mb_gpu_figures_close(w.figures, on_figures_closed, &w);
    uv_run(&w.loop, UV_RUN_DEFAULT);
    assert_true(w.is_closed);
    assert_int_equal(uv_loop_close(&w.loop), 0);
}

static void a_look_that_hangs_does_not_hold_up_the_end(void **state)
{
    const struct mb_gpu_usage *gpus;
    struct watched w = {.n_looks = 0};
    int n_shutdowns;

    (void)state;
    assert_int_equal(mb_errands_ended(60000), 1);
    n_shutdowns = atomic_load(&fake_nvml_shutdowns);
    atomic_store(&fake_nvml_hangs[1], 1);
    atomic_store(&fake_nvml_asked[1], 0);
    begin_looking(&w);
    while (atomic_load(&fake_nvml_asked[1]) == 0)
        uv_run(&w.loop, UV_RUN_NOWAIT);
    assert_int_equal(mb_gpu_figures_latest(w.figures, &gpus), 0);
    mb_gpu_figures_close(w.figures, on_figures_closed, &w);
    uv_run(&w.loop, UV_RUN_DEFAULT);
    assert_true(w.is_closed);
    assert_int_equal(uv_loop_close(&w.loop), 0);
    assert_int_equal(atomic_load(&fake_nvml_shutdowns), n_shutdowns);
    atomic_store(&fake_nvml_hangs[1], 0);
    assert_int_equal(mb_errands_ended(60000), 1);
    assert_int_equal(atomic_load(&fake_nvml_shutdowns), n_shutdowns + 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lists),
        cmocka_unit_test(what_is_not_there_is_said),
        cmocka_unit_test(more_than_are_kept_is_an_error),
        cmocka_unit_test(a_driver_s_devices),
        cmocka_unit_test(figures_are_those_of_the_chosen),
        cmocka_unit_test(the_first_look_comes_at_once),
        cmocka_unit_test(figures_of_a_silent_driver_end_too),
        cmocka_unit_test(a_look_that_hangs_does_not_hold_up_the_end),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
