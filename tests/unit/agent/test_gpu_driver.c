/* Counting GPUs at the start: an answer, a late one, none; and an end that waits for nobody. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "agent/gpu_driver.h"
#include "agent/nvml.h"
#include "base/alloc.h"
#include "base/errand.h"

enum { WAIT_MS = 60000 };

extern int fake_nvml_status;
extern atomic_int fake_nvml_init_hangs, fake_nvml_users;

struct watched {
    uv_loop_t loop;
    struct mb_gpu_driver *driver;
    int n_answers, n_silences, is_closed;
    struct mb_err err;
    struct mb_gpus gpus;
    struct mb_nvml *nvml; /* one holder more */
};

static void on_answer(void *arg, const struct mb_err *err, const struct mb_gpu_found *found)
{
    struct watched *w = arg;

    w->n_answers++;
    w->err = *err;
    w->gpus = found->gpus;
    w->nvml = found->nvml != NULL ? mb_nvml_share(found->nvml) : NULL;
}

static void on_silence(void *arg)
{
    struct watched *w = arg;

    assert_int_equal(w->n_answers, 0);
    w->n_silences++;
    atomic_store(&fake_nvml_init_hangs, 0); /* those that wait for it get a late answer */
}

static void on_closed(void *arg)
{
    ((struct watched *)arg)->is_closed = 1;
}

static const struct mb_gpu_driver_ops ops = {on_answer, on_silence};

static void ask(struct watched *w, uint64_t patience_ms)
{
    struct mb_err err = {0};

    *w = (struct watched){0};
    uv_loop_init(&w->loop);
    assert_int_equal(mb_gpu_driver_ask(&w->loop, patience_ms, &ops, w, &w->driver, &err), MB_OK);
    assert_int_equal(w->n_answers + w->n_silences, 0);
}

static void end(struct watched *w)
{
    int n_answers = w->n_answers, n_silences = w->n_silences;

    mb_gpu_driver_close(w->driver, on_closed, w);
    uv_run(&w->loop, UV_RUN_DEFAULT);
    assert_int_equal(w->is_closed, 1);
    assert_int_equal(uv_loop_close(&w->loop), 0);
    assert_int_equal(w->n_answers, n_answers);
    assert_int_equal(w->n_silences, n_silences);
    mb_nvml_close(w->nvml);
}

static void assert_nothing_open(void)
{
    assert_int_equal(mb_errands_ended(WAIT_MS), 1);
    assert_int_equal(atomic_load(&fake_nvml_users), 0);
}

static void an_answer(void **state)
{
    struct watched w;

    (void)state;
    ask(&w, WAIT_MS);
    uv_run(&w.loop, UV_RUN_DEFAULT); /* the timer keeps it no longer */
    assert_int_equal(w.n_answers, 1);
    assert_int_equal(w.n_silences, 0);
    assert_int_equal(w.err.code, MB_OK);
    assert_int_equal(w.gpus.count, 2);
    assert_string_equal(w.gpus.model, "Fake H100");
    assert_non_null(w.nvml);
    end(&w);
    assert_nothing_open();
}

static void a_failure(void **state)
{
    struct watched w;

    (void)state;
    fake_nvml_status = 999;
    ask(&w, WAIT_MS);
    uv_run(&w.loop, UV_RUN_DEFAULT);
    assert_int_equal(w.err.code, MB_EIO);
    assert_string_equal(w.err.text,
                        "NVML cannot start (status 999); is the NVIDIA driver healthy?");
    assert_null(w.nvml);
    end(&w);
    fake_nvml_status = 9; /* not loaded */
    ask(&w, WAIT_MS);
    uv_run(&w.loop, UV_RUN_DEFAULT);
    assert_int_equal(w.err.code, MB_OK);
    assert_null(w.nvml);
    assert_int_not_equal(w.gpus.vendor, MB_GPU_NVIDIA);
    end(&w);
    fake_nvml_status = 0;
    assert_nothing_open();
}

static void a_late_answer(void **state)
{
    struct watched w;

    (void)state;
    atomic_store(&fake_nvml_init_hangs, 1);
    ask(&w, 20);
    uv_run(&w.loop, UV_RUN_DEFAULT);
    assert_int_equal(w.n_silences, 1);
    assert_int_equal(w.n_answers, 1);
    assert_int_equal(w.gpus.count, 2);
    end(&w);
    assert_nothing_open();
}

static void the_end_waits_for_no_driver(void **state)
{
    struct watched w;

    (void)state;
    atomic_store(&fake_nvml_init_hangs, 1);
    ask(&w, WAIT_MS);
    uv_run(&w.loop, UV_RUN_NOWAIT);
    end(&w);
    assert_int_equal(w.n_answers, 0);
    assert_int_equal(mb_errands_ended(20), 0);
    atomic_store(&fake_nvml_init_hangs, 0); /* what it opens after all is ended */
    assert_nothing_open();
    mb_gpu_driver_close(NULL, on_closed, &w);
    assert_int_equal(w.is_closed, 1);
}

static void without_memory(void **state)
{
    (void)state;
    for (unsigned long nth = 1; nth <= 3; nth++) { /* before there is a thread, which has more */
        struct mb_err err = {0};
        struct watched w = {0};

        uv_loop_init(&w.loop);
        mb_alloc_fail_nth(nth);
        assert_int_equal(mb_gpu_driver_ask(&w.loop, WAIT_MS, &ops, &w, &w.driver, &err), MB_ENOMEM);
        assert_int_equal(mb_alloc_did_fail(), 1);
        mb_alloc_fail_nth(0);
        assert_null(w.driver);
        assert_non_null(strstr(err.text, "to count the GPUs"));
        end(&w);
    }
    assert_nothing_open();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_answer),      cmocka_unit_test(a_failure),
        cmocka_unit_test(a_late_answer),  cmocka_unit_test(the_end_waits_for_no_driver),
        cmocka_unit_test(without_memory),
    };

    unsetenv("CUDA_VISIBLE_DEVICES");
    unsetenv("NVIDIA_VISIBLE_DEVICES");
    return cmocka_run_group_tests(tests, NULL, NULL);
}
