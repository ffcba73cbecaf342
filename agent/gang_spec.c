/*
 * What a Launch means on this node: ranks, environments, devices, the supervisor's spec.
 *
 *  1. Every rank must name a bundle of the group that is committed here, no rank twice.
 *  2. Devices: the ranks of a bundle share its devices evenly by their order; a bundle with as many
 *     ranks as devices gives one to each. A bundle without devices hides them all.
 *  3. Environment: a few variables of the agent, then Launch.env, then what the rank is, then the
 *     rank's own. Later ones win. The agent's store keys are not among them. A job's driver that
 *     runs as a gang of one (mobula run --as-driver) gets what drivers get: the way to the
 *     cluster's token, and our programs in front of PATH.
 */
#include "agent/gang_run.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "agent/job_limits.h"
#include "base/alloc.h"
#include "base/fs.h"
#include "base/str.h"

enum { ENV_MAX = 4096, PEERS_GRACE_MS = 200, LEFTOVER_GRACE_MS = 500, STOP_GRACE_MS = 30000 };

extern char **environ;

static const char *const inherited[] = {"PATH=",          "HOME=",         "USER=",
                                        "LANG=",          "LC_",           "TZ=",
                                        "TMPDIR=",        "NCCL_",         "LD_LIBRARY_PATH=",
                                        "SHELL=",         "OMP_",          "OPENBLAS_",
                                        "ASAN_OPTIONS=",  "TSAN_OPTIONS=", "MOBULA_LOG=",
                                        "MOBULA_JOB_",    "MOBULA_CUDA_",  "MOBULA_TUNING_CACHE=",
                                        "XDG_CACHE_HOME="};

static const char *const inherited_by_driver[] = {
    "RAY_AUTH_MODE=", "RAY_AUTH_TOKEN=", "RAY_AUTH_TOKEN_PATH=", "RAY_USE_TLS=", "RAY_TLS_"};

char *mb_gang_log_path(const struct mb_gang_run *r, uint32_t rank)
{
    return mb_asprintf("%s/rank-%u.log", r->dir, rank);
}

/* ---- what is kept of a launch ---- */

static int check_ranks(const struct mb_gang_run *r, const Mobula__V1__Launch *l, struct mb_err *err)
{
    if (l->n_ranks == 0 || l->n_ranks > MB_GANG_RANKS_MAX)
        return mb_err_set(err, MB_EINVAL, "a launch of %zu ranks on one node; 1 to %d are possible",
                          l->n_ranks, MB_GANG_RANKS_MAX);
    if (l->n_argv == 0 || l->argv[0][0] == '\0')
        return mb_err_set(err, MB_EINVAL, "a launch without a command");
    if (l->num_nodes == 0 || l->node_rank >= l->num_nodes)
        return mb_err_set(err, MB_EINVAL, "node rank %u of %u nodes", l->node_rank, l->num_nodes);
    for (size_t i = 0; i < l->n_ranks; i++) {
        const struct mb_bundle *b =
            mb_ledger_find(r->owner->ledger, &r->pg, (int32_t)l->ranks[i]->bundle_index);

        if (b == NULL || b->state != MB_BUNDLE_COMMITTED)
            return mb_err_set(err, MB_ESTATE, "rank %u: bundle %u is not committed on this node",
                              l->ranks[i]->rank, l->ranks[i]->bundle_index);
        if (l->ranks[i]->rank >= l->world_size)
            return mb_err_set(err, MB_EINVAL, "rank %u in a world of %u", l->ranks[i]->rank,
                              l->world_size);
        for (size_t j = 0; j < i; j++)
            if (l->ranks[j]->rank == l->ranks[i]->rank)
                return mb_err_set(err, MB_EINVAL, "rank %u is launched twice", l->ranks[i]->rank);
    }
    return MB_OK;
}

static int keep_checkpoint(struct mb_gang_run *r, const Mobula__V1__Checkpoint *c)
{
    if (c == NULL)
        return MB_OK;
    if (c->local_dir[0] != '\0')
        r->checkpoint_dir = mb_strdup(c->local_dir);
    else
        r->checkpoint_dir = mb_asprintf("%s/checkpoints", r->dir);
    r->url = mb_strdup(c->url);
    r->load_url = mb_strdup(c->load_url);
    r->watch_tracker = c->watch_tracker;
    r->keep_last = c->keep_last;
    r->local_keep_last = c->local_keep_last;
    r->load_iteration = c->load_iteration;
    return r->checkpoint_dir != NULL && r->url != NULL && r->load_url != NULL ? MB_OK : MB_ENOMEM;
}

int mb_gang_spec_ranks(struct mb_gang_run *r, const Mobula__V1__Launch *l, struct mb_err *err)
{
    int rc = check_ranks(r, l, err);

    if (rc != MB_OK)
        return rc;
    r->ranks = mb_calloc(l->n_ranks, sizeof(*r->ranks));
    if (r->ranks == NULL || keep_checkpoint(r, l->checkpoint) != MB_OK) {
        mb_free(r->ranks);
        r->ranks = NULL;
        return mb_err_set(err, MB_ENOMEM, "no memory for %zu ranks", l->n_ranks);
    }
    r->n_ranks = l->n_ranks;
    for (size_t i = 0; i < l->n_ranks; i++)
        r->ranks[i] = (struct mb_gang_rank){.run = r,
                                            .rank = l->ranks[i]->rank,
                                            .local_rank = l->ranks[i]->local_rank,
                                            .bundle_index = l->ranks[i]->bundle_index,
                                            .progress = {.iteration = -1},
                                            .saved = -1,
                                            .fd = -1,
                                            .log = {-1, -1}};
    r->world_size = l->world_size;
    r->num_nodes = l->num_nodes;
    r->node_rank = l->node_rank;
    r->is_worker = l->is_worker;
    r->stop_grace_ms = l->stop_grace_ms > 0 && l->stop_grace_ms < UINT32_MAX
                           ? (uint32_t)l->stop_grace_ms
                           : STOP_GRACE_MS;
    return MB_OK;
}

/* ---- environments ---- */

struct env {
    char **list; /* owned strings, NULL-terminated */
    size_t n;
};

static void env_free(struct env *e)
{
    for (size_t i = 0; i < e->n; i++)
        mb_free(e->list[i]);
    mb_free(e->list);
}

/* Takes text (NULL: out of memory); a later value of a name replaces the former. */
static int env_put(struct env *e, char *text)
{
    const char *eq = text != NULL ? strchr(text, '=') : NULL;
    size_t name;

    if (eq == NULL) {
        mb_free(text);
        return text == NULL ? MB_ENOMEM : MB_EINVAL;
    }
    name = (size_t)(eq - text) + 1;
    for (size_t i = 0; i < e->n; i++)
        if (strncmp(e->list[i], text, name) == 0) {
            mb_free(e->list[i]);
            e->list[i] = text;
            return MB_OK;
        }
    if (e->n == ENV_MAX) {
        mb_free(text);
        return MB_EFULL;
    }
    e->list[e->n++] = text;
    return MB_OK;
}

static const char *env_get(const struct env *e, const char *name)
{
    size_t n = strlen(name);

    for (size_t i = 0; i < e->n; i++)
        if (strncmp(e->list[i], name, n) == 0 && e->list[i][n] == '=')
            return e->list[i] + n + 1;
    return NULL;
}

/* The devices of this rank within its bundle: "0,3", or "" for none. */
static char *device_list(const struct mb_gang_run *r, const struct mb_gang_rank *rank)
{
    const struct mb_bundle *b =
        mb_ledger_find(r->owner->ledger, &r->pg, (int32_t)rank->bundle_index);
    struct mb_buf text = {0};
    size_t peers = 0, place = 0, first, last;
    int rc = MB_OK;
    char *out;

    for (size_t i = 0; i < r->n_ranks; i++)
        if (r->ranks[i].bundle_index == rank->bundle_index) {
            if (&r->ranks[i] == rank)
                place = peers;
            peers++;
        }
    if (b == NULL) /* given back meanwhile: the stop is on its way */
        return mb_strdup("");
    first = b->n_gpus * place / peers;
    last = b->n_gpus * (place + 1) / peers;
    if (last == first && b->n_gpus > 0) { /* more ranks than devices: they share */
        first = place % b->n_gpus;
        last = first + 1;
    }
    for (size_t i = first; i < last && rc == MB_OK; i++) {
        rc = i > first ? mb_buf_puts(&text, ",") : MB_OK;
        if (rc == MB_OK)
            rc = mb_gpus_put(r->owner->opts.gpus, b->gpus[i], &text);
    }
    out = rc == MB_OK ? mb_strdup(mb_buf_str(&text)) : NULL;
    mb_buf_close(&text);
    return out;
}

static size_t len_without_slashes(const char *url)
{
    size_t n = strlen(url);

    while (n > 0 && url[n - 1] == '/')
        n--;
    return n;
}

/* What was loaded is durable where this gang's checkpoints go. */
static int loads_from_own_store(const struct mb_gang_run *r)
{
    size_t n = r->url != NULL ? len_without_slashes(r->url) : 0;

    return n > 0 && r->load_url != NULL && len_without_slashes(r->load_url) == n &&
           strncmp(r->url, r->load_url, n) == 0;
}

static int put_identity(struct env *e, const struct mb_gang_run *r, const struct mb_gang_rank *rank)
{
    const enum mb_gpu_vendor vendor = r->owner->opts.gpus->vendor;
    const char *order = mb_gpu_order_env(vendor);
    char *devices = device_list(r, rank);
    int rc = devices != NULL ? MB_OK : MB_ENOMEM;
    char *const lines[] = {
        mb_asprintf("RANK=%u", rank->rank),
        mb_asprintf("LOCAL_RANK=%u", rank->local_rank),
        mb_asprintf("WORLD_SIZE=%u", r->world_size),
        mb_asprintf("LOCAL_WORLD_SIZE=%zu", r->n_ranks),
        mb_asprintf("NODE_RANK=%u", r->node_rank),
        mb_asprintf("GROUP_RANK=%u", r->node_rank),
        mb_asprintf("MOBULA_JOB_ID=%s", r->job_id),
        mb_asprintf("MOBULA_ATTEMPT=%u", r->attempt),
        mb_asprintf("MOBULA_CHECKPOINT_DIR=%s", r->checkpoint_dir != NULL ? r->checkpoint_dir : ""),
        mb_asprintf("MOBULA_CHECKPOINT_URL=%s", r->url != NULL ? r->url : ""),
        mb_asprintf("MOBULA_DURABLE_ITERATION=%lld",
                    (long long)(loads_from_own_store(r) ? r->loaded_iteration : -1)),
        mb_asprintf("%s=%s", mb_gpu_visible_env(vendor), devices != NULL ? devices : ""),
    };

    for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++) {
        int one = env_put(e, lines[i]);

        if (rc == MB_OK)
            rc = one;
    }
    if (rc == MB_OK && order != NULL)
        rc = env_put(e, mb_asprintf("%s=" MB_GPU_ORDER, order));
    mb_free(devices);
    return rc;
}

static int put_inherited(struct env *e, const char *const *prefixes, size_t n)
{
    int rc = MB_OK;

    for (char **v = environ; *v != NULL && rc == MB_OK; v++)
        for (size_t k = 0; k < n; k++)
            if (mb_starts_with(*v, prefixes[k])) {
                rc = env_put(e, mb_strdup(*v));
                break;
            }
    return rc;
}

static int put_drivers_own(struct env *e, const struct mb_gang_run *r)
{
    const char *path = env_get(e, "PATH");
    int rc = env_put(e, mb_asprintf("PATH=%s:%s", r->owner->opts.self_dir,
                                    path != NULL ? path : "/usr/bin:/bin"));

    return rc != MB_OK
               ? rc
               : put_inherited(e, inherited_by_driver,
                               sizeof(inherited_by_driver) / sizeof(inherited_by_driver[0]));
}

static int build_env(struct env *e, const struct mb_gang_run *r, size_t at)
{
    const Mobula__V1__Launch *l = r->launch;
    int rc = MB_OK;

    e->list = mb_calloc(ENV_MAX + 1, sizeof(*e->list));
    if (e->list == NULL)
        return MB_ENOMEM;
    rc = put_inherited(e, inherited, sizeof(inherited) / sizeof(inherited[0]));
    for (size_t i = 0; i < l->n_env && rc == MB_OK; i++)
        rc = env_put(e, mb_strdup(l->env[i]));
    if (rc == MB_OK && env_get(e, "MOBULA_DRIVER") != NULL)
        rc = put_drivers_own(e, r);
    if (rc == MB_OK)
        rc = put_identity(e, r, &r->ranks[at]);
    for (size_t i = 0; i < l->ranks[at]->n_env && rc == MB_OK; i++)
        rc = env_put(e, mb_strdup(l->ranks[at]->env[i]));
    return rc;
}

/* ---- the spec ---- */

static char **build_argv(const struct mb_gang_run *r, char **program)
{
    const Mobula__V1__Launch *l = r->launch;
    char **argv = mb_calloc(l->n_argv + 1, sizeof(*argv));

    *program = NULL;
    if (argv == NULL)
        return NULL;
    memcpy(argv, l->argv, l->n_argv * sizeof(*argv));
    if (strcmp(l->argv[0], "mobula-worker") == 0) {
        *program = mb_path_join(r->owner->opts.self_dir, "mobula-worker");
        argv[0] = *program;
    }
    return argv;
}

/* What a spec borrows, for as long as the supervisor is being started. */
struct parts {
    size_t n;
    struct mb_sup_child *children;
    struct env *envs;
    char **logs;
    char **argv;
    char *program, *cwd;
};

static void close_parts(struct parts *p)
{
    for (size_t i = 0; p->envs != NULL && i < p->n; i++)
        env_free(&p->envs[i]);
    for (size_t i = 0; p->logs != NULL && i < p->n; i++)
        mb_free(p->logs[i]);
    free(p->cwd);
    mb_free(p->program);
    mb_free(p->argv);
    mb_free(p->logs);
    mb_free(p->envs);
    mb_free(p->children);
}

static int no_spec(int rc, size_t n, struct mb_err *err)
{
    return mb_err_set(err, rc,
                      rc == MB_ENOMEM  ? "no memory to launch %zu ranks"
                      : rc == MB_EFULL ? "more than 4096 environment variables for %zu ranks"
                                       : "an environment entry without '=' (%zu ranks)",
                      n);
}

static int open_parts(struct parts *p, const struct mb_gang_run *r, struct mb_err *err)
{
    *p = (struct parts){.n = r->n_ranks,
                        .children = mb_calloc(r->n_ranks, sizeof(*p->children)),
                        .envs = mb_calloc(r->n_ranks, sizeof(*p->envs)),
                        .logs = mb_calloc(r->n_ranks, sizeof(*p->logs)),
                        .cwd = getcwd(NULL, 0)};
    p->argv = build_argv(r, &p->program);
    return p->children && p->envs && p->logs && p->argv && p->argv[0]
               ? MB_OK
               : no_spec(MB_ENOMEM, p->n, err);
}

static int fill_child(struct parts *p, struct mb_gang_run *r, size_t i, struct mb_err *err)
{
    int rc;

    p->logs[i] = mb_gang_log_path(r, r->ranks[i].rank);
    rc = p->logs[i] != NULL ? build_env(&p->envs[i], r, i) : MB_ENOMEM;
    if (rc != MB_OK)
        return no_spec(rc, p->n, err);
    p->children[i] = (struct mb_sup_child){
        .argv = (const char *const *)p->argv,
        .env = (const char *const *)p->envs[i].list,
        .cwd = r->launch->cwd[0] != '\0' ? r->launch->cwd : p->cwd,
        .log_path = p->logs[i],
        .want_report = r->is_worker,
    };
    return mb_gang_logs_keep(&r->ranks[i], env_get(&p->envs[i], "MOBULA_LOG_MAX_BYTES"),
                             env_get(&p->envs[i], "MOBULA_LOG_WAIT"), err);
}

int mb_gang_spec_start(struct mb_gang_run *r, const struct mb_supervisor_ops *ops,
                       struct mb_err *err)
{
    struct parts p;
    struct mb_sup_spec spec = {.dir = r->dir,
                               .stop_signal = SIGTERM,
                               .stop_grace_ms = r->stop_grace_ms,
                               .end_peers_after_ms = 0,
                               .end_peers_grace_ms = PEERS_GRACE_MS,
                               .leftover_grace_ms = LEFTOVER_GRACE_MS,
                               .n_children = r->n_ranks};
    struct mb_job_limits limits;
    int rc = open_parts(&p, r, err);

    for (size_t i = 0; i < p.n && rc == MB_OK; i++)
        rc = fill_child(&p, r, i, err);
    if (rc == MB_OK)
        rc = mb_job_limits_read(p.envs[0].list, &limits, err); /* the job's: all ranks agree */
    if (rc == MB_OK) {
        spec.children = p.children;
        mb_job_limits_apply(&limits, &spec);
        rc = mb_supervisor_start(r->owner->init, &spec, ops, r, &r->sup, err);
    }
    close_parts(&p);
    return rc;
}
