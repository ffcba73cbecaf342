/*
 * The log of a driver and the store that it goes to: named by the job's environment, or by the
 * driver in a file, which is where the next agent finds it, too.
 */
#include <string.h>
#include "agent/jobs_internal.h"
#include "agent/log_keeper.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/str.h"

enum { URL_FILE_MAX_BYTES = 4096 };

/* Where a driver says to which store its log goes. */
static char *url_file_of(const struct job *job)
{
    return mb_path_join(job->dir, "log_url");
}

int mb_jobs_keep_log(struct job *job, int is_new, struct mb_err *err)
{
    char *url_file = url_file_of(job), *key = mb_asprintf("%s/driver", job->id);
    struct mb_kept_log_opts opts = {
        .path = job->log_path, .is_new = is_new, .key = key, .url_file = url_file};
    int rc = url_file != NULL && key != NULL ? MB_OK : mb_err_set(err, MB_ENOMEM, "out of memory");

    if (rc == MB_OK && is_new) {
        rc = mb_log_cap_parse(mb_job_env_get(&job->env, "MOBULA_LOG_MAX_BYTES"), &opts.cap_bytes,
                              err);
        if (rc == MB_OK)
            rc =
                mb_log_wait_parse(mb_job_env_get(&job->env, "MOBULA_LOG_WAIT"), &opts.wait_ms, err);
        opts.url = mb_job_env_get(&job->env, "MOBULA_LOG_URL");
        if (rc == MB_OK && opts.url != NULL)
            rc = mb_fs_replace(url_file, opts.url, strlen(opts.url), 0600, err);
    }
    if (rc == MB_OK && job->jobs->logs != NULL)
        rc = mb_log_keeper_add(job->jobs->logs, &opts, &job->log, err);
    mb_free(key);
    mb_free(url_file);
    return rc;
}

/* A driver whose --drain-timeout is over waits no longer for its log either: it has said so in the
 * second line of the file with the store's URL. */
void mb_job_hurry_log(struct job *job)
{
    char *path = url_file_of(job);
    struct mb_buf text = {0};
    const char *line = NULL;
    int64_t by_unix_ms, now = (int64_t)mb_unix_ms();

    if (path != NULL && mb_fs_exists(path) &&
        mb_fs_read(path, URL_FILE_MAX_BYTES, &text, NULL) == MB_OK)
        line = strchr(mb_buf_str(&text), '\n');
    if (line != NULL && line[1] != '\0' &&
        mb_parse_i64(line + 1, 0, INT64_MAX, "log_url", &by_unix_ms, NULL) == MB_OK)
        mb_kept_log_hurry(job->log,
                          mb_mono_ms() + (uint64_t)(by_unix_ms > now ? by_unix_ms - now : 0));
    mb_buf_close(&text);
    mb_free(path);
}

int mb_job_tell_url_file(struct job *job, struct mb_err *err)
{
    char *path = url_file_of(job);
    int rc = path != NULL ? mb_job_env_set(&job->env, "MOBULA_LOG_URL_FILE", path) : MB_ENOMEM;

    mb_free(path);
    return rc == 0 ? 0 : mb_err_set(err, rc, "out of memory");
}
