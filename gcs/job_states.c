/*
 *  1. PENDING -> RUNNING -> SUCCEEDED | FAILED, by the driver's exit status.
 *  2. Stop in PENDING is STOPPED at once, unless a driver is being started: that counts as RUNNING.
 *     Stop in RUNNING is STOPPING until the driver is gone, and then STOPPED whatever its exit
 *     status says.
 *  3. A driver that cannot start, now or ever, or that nobody knows after a restart, makes the job
 *     FAILED; so does a wait that is too long.
 *  4. A driver started although the job was stopped while PENDING must be stopped by the caller:
 *     STARTED in STOPPED is refused.
 *  5. A job is started at most once: after a restart only one that is still PENDING and whose
 *     driver nobody knows; one that had begun is lost with its driver.
 */
#include "gcs/job_states.h"

#include <string.h>
#include "base/str.h"

#define STOPPED_BUT MB_JOB_TEXT_STOPPED "; "

static const struct {
    const char *name;
    int terminal;
} states[MB_JOB_STATES] = {
    [MB_JOB_PENDING] = {"PENDING", 0},  [MB_JOB_RUNNING] = {"RUNNING", 0},
    [MB_JOB_STOPPING] = {"RUNNING", 0}, [MB_JOB_SUCCEEDED] = {"SUCCEEDED", 1},
    [MB_JOB_FAILED] = {"FAILED", 1},    [MB_JOB_STOPPED] = {"STOPPED", 1},
};

static const char *const input_names[MB_JOB_INPUTS] = {
    [MB_JOB_STARTED] = "started",
    [MB_JOB_START_FAILED] = "start failed",
    [MB_JOB_EXIT_ZERO] = "exit 0",
    [MB_JOB_EXIT_NONZERO] = "exit not 0",
    [MB_JOB_STOP] = "stop",
    [MB_JOB_LOST] = "lost",
    [MB_JOB_NEVER_FITS] = "never fits",
    [MB_JOB_START_TIMEOUT] = "start timed out",
};

/* 0 means: not possible. States are stored plus one. */
#define TO(s) ((s) + 1)
static const unsigned char table[MB_JOB_STATES][MB_JOB_INPUTS] = {
    [MB_JOB_PENDING] =
        {
            [MB_JOB_STARTED] = TO(MB_JOB_RUNNING),
            [MB_JOB_START_FAILED] = TO(MB_JOB_FAILED),
            [MB_JOB_STOP] = TO(MB_JOB_STOPPED),
            [MB_JOB_LOST] = TO(MB_JOB_FAILED),
            [MB_JOB_NEVER_FITS] = TO(MB_JOB_FAILED),
            [MB_JOB_START_TIMEOUT] = TO(MB_JOB_FAILED),
        },
    [MB_JOB_RUNNING] =
        {
            [MB_JOB_START_FAILED] = TO(MB_JOB_FAILED),
            [MB_JOB_EXIT_ZERO] = TO(MB_JOB_SUCCEEDED),
            [MB_JOB_EXIT_NONZERO] = TO(MB_JOB_FAILED),
            [MB_JOB_STOP] = TO(MB_JOB_STOPPING),
            [MB_JOB_LOST] = TO(MB_JOB_FAILED),
            [MB_JOB_STARTED] = TO(MB_JOB_RUNNING),
        },
    [MB_JOB_STOPPING] =
        {
            [MB_JOB_STARTED] = TO(MB_JOB_STOPPING),
            [MB_JOB_START_FAILED] = TO(MB_JOB_STOPPED),
            [MB_JOB_EXIT_ZERO] = TO(MB_JOB_STOPPED),
            [MB_JOB_EXIT_NONZERO] = TO(MB_JOB_STOPPED),
            [MB_JOB_STOP] = TO(MB_JOB_STOPPING),
            [MB_JOB_LOST] = TO(MB_JOB_STOPPED),
        },
};

int mb_job_next(enum mb_job_state from, enum mb_job_input input, enum mb_job_state *to,
                struct mb_err *err)
{
    unsigned char next = table[from][input];

    if (next == 0)
        return mb_err_set(err, MB_ESTATE, "job event \"%s\" is not possible in state %s",
                          input_names[input], states[from].name);
    *to = (enum mb_job_state)(next - 1);
    return 0;
}

const char *mb_job_state_name(enum mb_job_state s)
{
    return states[s].name;
}

int mb_job_state_parse(const char *name, enum mb_job_state *out)
{
    for (int s = 0; s < MB_JOB_STATES; s++) {
        if (s != MB_JOB_STOPPING && strcmp(states[s].name, name) == 0) {
            *out = (enum mb_job_state)s;
            return 0;
        }
    }
    return MB_EINVAL;
}

int mb_job_is_terminal(enum mb_job_state s)
{
    return states[s].terminal;
}

void mb_job_on_event(enum mb_job_state s, const struct mb_job_event *e, struct mb_job_news *out)
{
    *out = (struct mb_job_news){0};
    switch (e->kind) {
    case MB_JOB_EVENT_RUNNING:
        if (mb_job_is_terminal(s))
            out->stop_driver = 1;
        else
            out->inputs[out->n_inputs++] = MB_JOB_STARTED;
        break;
    case MB_JOB_EVENT_EXITED:
        if (s == MB_JOB_PENDING) /* it began and ended between two looks */
            out->inputs[out->n_inputs++] = MB_JOB_STARTED;
        if (s != MB_JOB_STOPPING && !mb_job_is_terminal(s) && e->text &&
            mb_starts_with(e->text, MB_JOB_TEXT_STOPPED))
            out->inputs[out->n_inputs++] = MB_JOB_STOP;
        out->inputs[out->n_inputs++] = e->exit_code == 0 ? MB_JOB_EXIT_ZERO : MB_JOB_EXIT_NONZERO;
        break;
    case MB_JOB_EVENT_START_FAILED:
        out->inputs[out->n_inputs++] = MB_JOB_START_FAILED;
        break;
    case MB_JOB_EVENT_ENDING: /* changes no state */
        break;
    }
}

void mb_job_on_stop(enum mb_job_state s, int has_driver, struct mb_job_news *out)
{
    *out = (struct mb_job_news){0};
    if (mb_job_is_terminal(s))
        return;
    if (s == MB_JOB_PENDING && has_driver) /* it may exist already: the job is not over before it */
        out->inputs[out->n_inputs++] = MB_JOB_STARTED;
    out->inputs[out->n_inputs++] = MB_JOB_STOP;
    if (s != MB_JOB_PENDING && !has_driver)
        out->inputs[out->n_inputs++] = MB_JOB_LOST;
}

enum mb_job_recovery mb_job_recover(enum mb_job_state s, enum mb_job_adopt found)
{
    if (mb_job_is_terminal(s) || found == MB_JOB_ADOPT_EXITED)
        return MB_JOB_RECOVER_WAIT;
    if (found == MB_JOB_ADOPT_RUNNING)
        return s == MB_JOB_STOPPING ? MB_JOB_RECOVER_STOP : MB_JOB_RECOVER_WAIT;
    return s == MB_JOB_PENDING ? MB_JOB_RECOVER_START : MB_JOB_RECOVER_LOST;
}

/* Ray's first line; error texts of ours have no line break. */
#define SETUP_FAILED "runtime_env setup failed: Failed to set up runtime environment."

static int failed_message(enum mb_job_input input, const struct mb_job_facts *f, struct mb_buf *out)
{
    if (input == MB_JOB_EXIT_NONZERO) { /* with a reason when it did not end by itself */
        const char *why = f->text ? f->text : "";

        return mb_buf_printf(
            out,
            "Job entrypoint command failed with exit code %d%s%s%s, last available "
            "logs (truncated to 20,000 chars):\n%s",
            f->exit_code, *why ? " (" : "", why, *why ? ")" : "", f->log_tail ? f->log_tail : "");
    }
    if (f->text && strncmp(f->text, SETUP_FAILED " ", sizeof SETUP_FAILED) == 0)
        return mb_buf_printf(out, SETUP_FAILED "\n%s", f->text + sizeof SETUP_FAILED);
    if (f->text && *f->text)
        return mb_buf_puts(out, f->text);
    return mb_buf_puts(out, input == MB_JOB_LOST
                                ? "The driver was lost: it was not found after a restart."
                                : "The driver could not be started.");
}

int mb_job_message(enum mb_job_state s, enum mb_job_input input, const struct mb_job_facts *f,
                   struct mb_buf *out)
{
    switch (s) {
    case MB_JOB_PENDING:
        return mb_buf_printf(
            out, "Job has not started yet.%s%s",
            f->asks_resources ? " It may be waiting for resources (CPUs, GPUs, memory, custom "
                                "resources) to become available."
                              : "",
            f->has_runtime_env ? " It may be waiting for the runtime environment to be set up."
                               : "");
    case MB_JOB_RUNNING:
    case MB_JOB_STOPPING:
        return mb_buf_puts(out, "Job is currently running.");
    case MB_JOB_SUCCEEDED:
        if (f->text == NULL || *f->text == '\0')
            return mb_buf_puts(out, "Job finished successfully.");
        return mb_buf_printf(out, "Job finished successfully, but %s.", f->text);
    case MB_JOB_STOPPED:
        if (f->text == NULL || !mb_starts_with(f->text, STOPPED_BUT))
            return mb_buf_puts(out, "Job was intentionally stopped.");
        return mb_buf_printf(out, "Job was intentionally stopped, but %s.",
                             f->text + sizeof(STOPPED_BUT) - 1);
    case MB_JOB_FAILED:
    case MB_JOB_STATES:
        break;
    }
    return failed_message(input, f, out);
}

const char *mb_job_error_type(enum mb_job_state s, enum mb_job_input input, const char *text)
{
    if (s != MB_JOB_FAILED)
        return NULL;
    if (input == MB_JOB_EXIT_NONZERO)
        return "JOB_ENTRYPOINT_COMMAND_ERROR";
    if (input == MB_JOB_LOST)
        return "JOB_SUPERVISOR_ACTOR_DIED";
    if (input == MB_JOB_NEVER_FITS)
        return "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE";
    if (input == MB_JOB_START_TIMEOUT)
        return "JOB_SUPERVISOR_ACTOR_START_TIMEOUT";
    if (text && mb_starts_with(text, "Failed to start supervisor actor"))
        return "JOB_SUPERVISOR_ACTOR_START_FAILURE";
    if (text && strncmp(text, "runtime_env setup failed", 24) == 0)
        return "RUNTIME_ENV_SETUP_FAILURE";
    return "JOB_ENTRYPOINT_COMMAND_START_ERROR";
}
