/*
 * A job runner for tests: drivers are /bin/sh -c children of this process in their own session,
 * with a log file each. It keeps nothing over a restart. Loop-thread only.
 */
#ifndef MOBULA_TESTS_SHELL_RUNNER_H
#define MOBULA_TESTS_SHELL_RUNNER_H

#include <uv.h>
#include "gcs/runner.h"

struct shell_runner;

struct shell_runner *shell_runner_create(uv_loop_t *loop, const char *dir);
const struct mb_job_runner *shell_runner_get(const struct shell_runner *r);
void shell_runner_set_node(struct shell_runner *r, const char *node_id_hex, const char *http);
/* Kills what runs; handles close while the loop runs on. */
void shell_runner_stop(struct shell_runner *r);
void shell_runner_destroy(struct shell_runner *r); /* after the loop is empty */

#endif
