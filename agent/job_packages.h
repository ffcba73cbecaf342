/* What a driver's runtime_env has it import: packages fetched and unpacked into the job's
 * directory, and directories that are there already. */
#ifndef MOBULA_AGENT_JOB_PACKAGES_H
#define MOBULA_AGENT_JOB_PACKAGES_H

#include "agent/unpack/run.h"
#include "base/err.h"
#include "gcs/runtime_env.h"

struct mb_job_package {
    char *uri;
    char *file; /* the archive; of a remote one where it is to be fetched to; NULL: in place */
    char *dir;  /* where its content is, or will be */
    enum mb_runtime_env_place place;
    int is_module;
    int is_missing; /* still to be fetched into file */
    int is_fetched; /* file is the job's own */
};

struct mb_job_packages {
    struct mb_job_package *items;
    size_t n;
    const char *working_dir; /* borrowed from an item; NULL: none */
};

/* Pure. runtime_env_json: an object; packages_dir holds the uploaded ones; NULL: they are
 * to be fetched. After an error out holds
 * nothing. */
int mb_job_packages_init(struct mb_job_packages *out, const char *runtime_env_json,
                         const char *packages_dir, const char *job_dir, struct mb_err *err);
void mb_job_packages_close(struct mb_job_packages *p);
/* One that is still to be fetched, or NULL. */
struct mb_job_package *mb_job_packages_missing(struct mb_job_packages *p);
/* Blocking: has what is an archive unpacked by the program unpacker (mobula-unpack), looks for what
 * is in place. What was fetched is removed. child: by which another thread ends it (MB_ECANCELED).
 */
int mb_job_packages_unpack(struct mb_job_packages *p, const char *unpacker,
                           struct mb_unpack_child *child, struct mb_err *err);
/* Is the path, below a job's directory and n bytes long, one of what this module puts there, or in
 * it? */
int mb_job_packages_is_unpacked(const char *path, size_t n);
int mb_job_packages_are_in(const char *job_dir); /* anything of it */
/* PYTHONPATH of the driver: modules, working_dir, then old (may be NULL). Owned by the caller; NULL
 * when memory is out, and "" for nothing. */
char *mb_job_packages_python_path(const struct mb_job_packages *p, const char *old);

/* Puts Ray's words, which its clients look for, before the reason. Returns its code. */
int mb_job_setup_failed(struct mb_err *err);

#endif
