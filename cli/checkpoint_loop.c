/* What the verbs of `mobula checkpoint` run on. */
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/printable.h"
#include "base/str.h"
#include "cli/checkpoint.h"

enum { TICK_MS = 200, INTERRUPTED = 130 };

static void on_tick(uv_timer_t *timer)
{
    struct mb_checkpoint_loop *l = timer->data;
    struct mb_transfer_facts facts = {.iteration = -1};

    if (l->is_over)
        return;
    l->facts(l->arg, &facts);
    mb_transfer_view_show(&l->view, &facts, mb_mono_ms());
}

static void on_signal(uv_signal_t *handle, int signum)
{
    struct mb_checkpoint_loop *l = handle->data;

    (void)signum;
    if (++l->n_signals > 1) {
        if (!l->is_over && l->leave)
            l->leave(l->arg);
        mb_transfer_view_end(&l->view);
        _exit(INTERRUPTED);
    }
    if (!l->is_over)
        l->cancel(l->arg);
}

int mb_checkpoint_loop_init(struct mb_checkpoint_loop *l, int json, struct mb_err *err)
{
    *l = (struct mb_checkpoint_loop){0};
    if (uv_loop_init(&l->loop) < 0)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    mb_transfer_view_init(&l->view, json);
    return 0;
}

void mb_checkpoint_loop_run(struct mb_checkpoint_loop *l,
                            void (*facts)(void *arg, struct mb_transfer_facts *out),
                            void (*cancel)(void *arg), void *arg)
{
    static const int signums[2] = {SIGINT, SIGTERM};

    l->facts = facts;
    l->cancel = cancel;
    l->arg = arg;
    if (facts && !l->is_over) {
        uv_timer_init(&l->loop, &l->timer);
        l->timer.data = l;
        uv_timer_start(&l->timer, on_tick, TICK_MS, TICK_MS);
        for (int i = 0; i < 2; i++) {
            uv_signal_init(&l->loop, &l->signals[i]);
            l->signals[i].data = l;
            uv_signal_start(&l->signals[i], on_signal, signums[i]);
            uv_unref((uv_handle_t *)&l->signals[i]);
        }
        uv_unref((uv_handle_t *)&l->timer);
        uv_run(&l->loop, UV_RUN_DEFAULT);
        uv_close((uv_handle_t *)&l->timer, NULL);
        uv_close((uv_handle_t *)&l->signals[0], NULL);
        uv_close((uv_handle_t *)&l->signals[1], NULL);
    }
    uv_run(&l->loop, UV_RUN_DEFAULT);
    uv_loop_close(&l->loop);
    mb_transfer_view_end(&l->view);
}

void mb_checkpoint_loop_stop(struct mb_checkpoint_loop *l)
{
    l->is_over = 1;
}

int mb_checkpoint_json_name(const char *name, struct mb_err *err)
{
    return mb_utf8_valid(name, strlen(name))
               ? 0
               : mb_err_set(err, MB_EINVAL,
                            "--json cannot say a name that is no UTF-8: leave it out");
}

int mb_checkpoint_print_json(json_t *j, size_t flags, struct mb_err *err)
{
    int rc = 0;

    if (j == NULL || mb_printable_json(j, flags, stdout) != 0)
        rc = ferror(stdout) ? mb_err_set(err, MB_EIO, MB_CLI_NOT_PRINTED)
                            : mb_err_set(err, MB_ENOMEM, "out of memory printing JSON");
    else if (putchar('\n') == EOF || fflush(stdout) != 0)
        rc = mb_err_set(err, MB_EIO, MB_CLI_NOT_PRINTED);
    json_decref(j);
    return rc;
}

int mb_checkpoint_fail(struct mb_cli *cli, int json, struct mb_err *err)
{
    mb_err_printable(err);
    if (json) {
        json_t *j = json_pack("{s:s, s:s, s:s}", "event", "failed", "code", mb_code_name(err->code),
                              "error", err->text);
        char *text = j ? json_dumps(j, 0) : NULL;

        puts(text ? text : "{\"event\": \"failed\"}");
        mb_free(text);
        json_decref(j);
    }
    return mb_cli_fail(cli, err);
}
