/* The verbs below `mobula checkpoint`, and what they share: a loop that shows progress and ends on
 * SIGINT or SIGTERM: in order at the first one, at once (exit status 130) at the second. */
#ifndef MOBULA_CLI_CHECKPOINT_H
#define MOBULA_CLI_CHECKPOINT_H

#include <jansson.h>
#include <uv.h>
#include "agent/upload/inventory.h"
#include "base/err.h"
#include "cli/options.h"
#include "cli/transfer_view.h"

extern const struct mb_verb mb_verb_checkpoint_push, mb_verb_checkpoint_pull, mb_verb_checkpoint_ls,
    mb_verb_checkpoint_verify, mb_verb_checkpoint_diff, mb_verb_checkpoint_rm,
    mb_verb_checkpoint_convert, mb_verb_checkpoint_inspect;

/* --retry-for, where it is not given: of verbs that move data, and of those that somebody waits
 * for. */
enum { MB_CHECKPOINT_RETRY_FOR_MS = 600000, MB_CHECKPOINT_ASK_FOR_MS = 10000 };

struct mb_checkpoint_loop {
    uv_loop_t loop;
    uv_timer_t timer;
    uv_signal_t signals[2];
    struct mb_transfer_view view;
    void (*facts)(void *arg, struct mb_transfer_facts *out);
    void (*cancel)(void *arg); /* a signal came; once */
    void (*leave)(void *arg);  /* the process exits at once: removes files. NULL: none */
    int n_signals;
    void *arg;
    int is_over;
};

int mb_checkpoint_loop_init(struct mb_checkpoint_loop *l, int json, struct mb_err *err);
/* Until mb_checkpoint_loop_stop(), which is for the callback of the work. Closes the loop. */
void mb_checkpoint_loop_run(struct mb_checkpoint_loop *l,
                            void (*facts)(void *arg, struct mb_transfer_facts *out),
                            void (*cancel)(void *arg), void *arg);
void mb_checkpoint_loop_stop(struct mb_checkpoint_loop *l);

/* What the store at url has; blocks, for retry_for_ms where it does not answer. out is to be
 * closed, also after a failure. */
int mb_checkpoint_inventory(const char *url, uint64_t retry_for_ms, struct mb_inventory *out,
                            struct mb_err *err);

/* For --json, before anything is done: MB_EINVAL if JSON cannot hold the name. */
int mb_checkpoint_json_name(const char *name, struct mb_err *err);
/* One line, or with JSON_INDENT several. Takes j, which may be NULL: memory was out. */
int mb_checkpoint_print_json(json_t *j, size_t flags, struct mb_err *err);
/* Prints the end of a verb that failed: to stderr, or with json also as a line on stdout. Returns
 * the exit status. */
int mb_checkpoint_fail(struct mb_cli *cli, int json, struct mb_err *err);

#endif
