/*
 * mobula-worker: one rank.
 *
 *  1. Arguments; --help prints them and ends.
 *  2. RANK and WORLD_SIZE from the environment; MOBULA_REPORT_FD, when set, is the socket to the
 * agent and everything below is reported there.
 *     With --use-checkpoint-args the ranks meet and take the model's arguments from the checkpoint.
 *  3. Build the trainer, run it, say done, flush the report, exit 0.
 * Failures: one line on stderr and a failed report; the exit status is mb_exit_status() of the
 * error, but 2, as argparse's, for a command line that cannot be parsed or lacks a required
 * argument. What every rank
 * finds alike before they have met (arguments) is printed by rank 0 only; what one rank finds later
 * is told to its peers, whose operations then fail with that text. SIGTERM and SIGINT, once
 * training runs, only set a flag: the step is finished, a checkpoint saved.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/fs.h"
#include "base/log.h"
#include "base/str.h"
#include "worker/trainer.h"

enum { FLUSH_MS = 5000 };

static void on_signal(int number)
{
    mb_trainer_signal = number;
}

static void catch_signals(void)
{
    struct sigaction sa = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigemptyset(&sa.sa_mask);
    sigaction(SIGTERM, &sa, NULL);
    sigaction(SIGINT, &sa, NULL);
}

static int env_number(const char *name, int64_t fallback, int64_t min, int64_t max, int64_t *out,
                      struct mb_err *err)
{
    const char *text = getenv(name);
    *out = fallback;
    return text != NULL ? mb_parse_i64(text, min, max, name, out, err) : 0;
}

static int read_environment(struct mb_trainer *t, struct mb_err *err)
{
    int64_t rank = 0, world = 1, fd = -1;
    int rc = env_number("WORLD_SIZE", 1, 1, MB_COMM_WORLD_MAX, &world, err);
    if (rc == 0) {
        rc = env_number("RANK", 0, 0, world - 1, &rank, err);
    }
    if (rc == 0) {
        rc = env_number("MOBULA_REPORT_FD", -1, 0, 1 << 20, &fd, err);
    }
    if (rc != 0) {
        return rc;
    }
    t->rank = (uint32_t)rank;
    t->world_size = (uint32_t)world;
    if (fd < 0) {
        return world == 1
                   ? 0
                   : mb_err_set(err, MB_EINVAL,
                                "WORLD_SIZE is %d and MOBULA_REPORT_FD is not set: ranks meet "
                                "through their agents; start them with `mobula train`",
                                (int)world);
    }
    rc = mb_report_client_start((int)fd, t->rank, &t->report, err);
    return rc != 0 ? mb_err_wrap(err, "MOBULA_REPORT_FD") : 0;
}

/* Peers hear of it at once. A checkpoint that is being written is not lost with the run: all ranks
 * end it first. If it failed here, that is why a peer gave up before this rank could. */
static int settle(struct mb_trainer *t, int rc, struct mb_err *err)
{
    struct mb_err of_save;
    if (t->comm != NULL && !t->everybody_knows) {
        mb_comm_abort(t->comm, err->text);
    }
    int save_rc = mb_trainer_wait_saved(t, &of_save);
    if (rc == MB_EUNAVAIL && save_rc != 0 && save_rc != MB_EUNAVAIL && save_rc != MB_ETIMEOUT) {
        *err = of_save;
        return save_rc;
    }
    return rc;
}

/* The one line of a failure, to stderr and to the agent. */
static void tell(struct mb_trainer *t, const struct mb_err *err, int everybody_knows)
{
    struct mb_err ignored;
    struct mb_report r = {.type = MB_REPORT_FAILED, .text = (char *)(uintptr_t)err->text};
    if (!everybody_knows || t->rank == 0) {
        fprintf(stderr, "mobula-worker: %s\n", err->text);
    }
    if (t->report != NULL) {
        (void)mb_report_client_send(t->report, &r, &ignored); /* nobody is left to tell */
    }
}

static int print_help(void)
{
    struct mb_buf help = {0};
    int rc = mb_args_help(&help);
    fputs(mb_buf_str(&help), stdout);
    mb_buf_close(&help);
    return rc == 0 ? 0 : mb_exit_status(rc);
}

static int train(struct mb_trainer *t, struct mb_err *err)
{
    int rc = mb_trainer_create(t, err);
    if (rc == 0) {
        catch_signals(); /* until here there is nothing to save: a signal simply ends the process */
        rc = mb_trainer_run(t, err);
    }
    if (rc == 0 && t->report != NULL) {
        struct mb_report done = {.type = MB_REPORT_DONE, .iteration = t->iteration};
        struct mb_err why;
        if (mb_report_client_send(t->report, &done, &why) != 0) {
            mb_warn("worker", "the end was not reported: %s", why.text);
        }
    }
    return rc;
}

enum { DATA_ARGS_MAX = 64 << 20 };

/* Each rank reads its own node's file. */
static int read_data_args(struct mb_args *a, struct mb_err *err)
{
    struct mb_buf text = {0};
    int rc = mb_fs_read(a->data_args_path, DATA_ARGS_MAX, &text, err);
    if (rc == 0) {
        rc = mb_args_take_data_args(a, mb_buf_str(&text), text.len, err);
    }
    mb_buf_close(&text);
    return rc != 0 ? mb_err_wrap(err, "--data-args-path %s", a->data_args_path) : 0;
}

int main(int argc, char **argv)
{
    static struct mb_trainer t;
    struct mb_err err = {0};
    int status = 0, known = 1;
    signal(SIGXFSZ, SIG_IGN); /* a file that may not grow is an error code */
    int rc = mb_args_parse(&t.args, argc - 1, (const char *const *)argv + 1, &err);
    if (rc == MB_ARGS_HELP) {
        status = print_help();
        mb_args_close(&t.args);
        return status;
    }
    int parsed = rc;
    rc = read_environment(&t, parsed == 0 ? &err : &(struct mb_err){0});
    if (parsed != 0) {
        rc = parsed;
    }
    if (rc == 0 && t.args.data_args_path != NULL && strstr(t.args.data_args_path, "://") == NULL) {
        known = 0;
        rc = read_data_args(&t.args, &err);
        known = rc == 0;
    }
    if (rc == 0 && t.args.use_checkpoint_args) {
        known = 0;
        rc = mb_trainer_adopt(&t, &err);
        known = rc == 0;
    }
    if (rc == 0) {
        rc = mb_args_validate(&t.args, t.rank, t.world_size, &err);
    }
    if (rc == 0) {
        known = 0;
        rc = train(&t, &err);
    }
    if (rc != 0) {
        rc = settle(&t, rc, &err);
        tell(&t, &err, known || t.everybody_knows);
        status = t.args.is_usage ? MB_ARGS_EXIT_USAGE : mb_exit_status(rc);
    }
    /* What hangs uses what would be freed, or freeing would wait for the device; the peers were
     * told by settle(). */
    if (t.hangs || mb_comm_device_is_stuck()) {
        mb_report_client_close(t.report, FLUSH_MS);
        _exit(status);
    }
    mb_trainer_close(&t);
    mb_report_client_close(t.report, FLUSH_MS);
    mb_args_close(&t.args);
    return status;
}
