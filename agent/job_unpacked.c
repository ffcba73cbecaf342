/*
 *  1. A driver has ended, its supervisor has proved that nothing of it is left: its job is noted.
 *  2. A thread looks who else uses what was unpacked: ranks of its gangs, uploads.
 *  3. Nobody: on the loop, where no driver of that id can begin meanwhile, it is moved to the
 *     forgotten files, which another pool thread removes, or the next agent (job_forget.h).
 *  4. Somebody: again after WAIT_MIN_MS, then each time twice as long, up to WAIT_MAX_MS.
 * Failure paths:
 *  5. The agent ends in between: the next one searches all of NODE_DIR/jobs in its first look for
 *     directories whose supervisor said that nothing is left, or is gone itself.
 *  6. Checkpoints lie in it: a file says so, and it stays until the job is forgotten. The file
 *     cannot be written: as 4. After a loss of power it may be gone: the records of gangs say so
 *     again, and where one of those cannot be read the first look of an agent lets nothing go.
 */
#include "agent/job_unpacked.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>
#include "agent/job_packages.h"
#include "agent/job_users.h"
#include "agent/supervise/state.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/str.h"

#define KEPT "kept"

enum {
    WAIT_MIN_MS = 500,
    WAIT_MAX_MS = 30000,
    GRACE_MS = 30000,  /* of a job that is not known any more */
    SHELLS_CODE = 128, /* and the signal that ended what a shell ran */
    LEASE_MS = 60000,  /* of a driver, and the grace of ranks that train: cli/launch.c */
    RANKS_GRACE_MS = 60000
};

struct mb_job_ended {
    struct mb_job_ended *next;
    char *id;
    int is_looked_at; /* by the look that is under way */
    uint64_t due_ms, wait_ms;
};

/* A driver that ended by itself, or was asked to, has seen its ranks end, those of other machines
 * too. Those of one that was killed end when its lease runs out, with the grace that it gave them.
 * Such a machine may see this directory, on a disk of all. */
static uint64_t hold_ms_of(int code, int64_t grace_ms)
{
    int was_killed =
        code == SHELLS_CODE + SIGKILL || (code < 0 && code != -SIGTERM && code != -SIGINT);

    return was_killed && grace_ms >= 0 ? LEASE_MS + RANKS_GRACE_MS + (uint64_t)grace_ms : 0;
}

static char *dir_of(const struct mb_job_unpacked *u, const char *id)
{
    return mb_asprintf("%s/jobs/%s", u->opts.node_dir, id);
}

/* In its directory, which another driver of this id begins anew. */
int mb_job_unpacked_is_kept(const char *dir)
{
    char *path = mb_path_join(dir, KEPT);
    int is = path == NULL || mb_fs_exists(path);

    mb_free(path);
    return is;
}

static int keep(const char *dir, struct mb_err *err)
{
    static const char why[] = "a gang saves in here, or has its store here\n";
    char *path = mb_path_join(dir, KEPT);
    int rc = path != NULL ? mb_fs_replace(path, why, sizeof(why) - 1, 0600, err)
                          : mb_err_set(err, MB_ENOMEM, "out of memory");

    mb_free(path);
    return rc;
}

/* ---- the thread ---- */

struct look {
    char *node_dir;
    int searches;
    struct mb_job_use *uses;
    size_t n_uses;
};

static int add_use(struct look *l, const char *id, const struct mb_job_use *use)
{
    struct mb_job_use *uses = mb_reallocarray(l->uses, l->n_uses + 1, sizeof(*uses));
    char *own_id = uses != NULL ? mb_strdup(id) : NULL;

    if (uses != NULL)
        l->uses = uses;
    if (own_id == NULL)
        return MB_ENOMEM;
    l->uses[l->n_uses] = *use;
    l->uses[l->n_uses++].id = own_id;
    return 0;
}

/* A supervisor that may not have written its state yet has a spec. Whose supervisor was killed was
 * killed, too. */
static int is_over(const char *dir, struct mb_job_use *use)
{
    struct mb_sup_state *state = mb_calloc(1, sizeof(*state));
    char text[MB_SUP_TEXT_MAX], *spec = mb_path_join(dir, "spec");
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC), is = 0;

    if (state == NULL || spec == NULL || fd < 0) {
        is = 0;
    } else if (mb_sup_state_read(fd, state, text) == 0) {
        const struct mb_sup_child_state *driver = &state->children[0];

        is =
            state->all_exited || !mb_sup_is_running(state->supervisor_pid, state->supervisor_ticks);
        use->code = !state->all_exited    ? -SIGKILL
                    : driver->signal != 0 ? -driver->signal
                                          : driver->code;
        use->grace_ms = GRACE_MS;
    } else {
        is = !mb_fs_exists(spec);
    }
    if (fd >= 0)
        close(fd);
    mb_free(spec);
    mb_free(state);
    return is;
}

static void search(struct look *l)
{
    char *root = mb_path_join(l->node_dir, "jobs");
    DIR *d = root != NULL ? opendir(root) : NULL;
    const struct dirent *e;

    while (d != NULL && (e = readdir(d)) != NULL) {
        char *dir = e->d_name[0] != '.' ? mb_path_join(root, e->d_name) : NULL;
        struct mb_job_use use = {.grace_ms = -1};

        if (dir != NULL && mb_job_packages_are_in(dir) && !mb_job_unpacked_is_kept(dir) &&
            is_over(dir, &use))
            (void)add_use(l, e->d_name, &use); /* else the next agent finds it */
        mb_free(dir);
    }
    if (d != NULL)
        closedir(d);
    mb_free(root);
}

static void do_look(void *load)
{
    struct look *l = load;

    if (l->searches)
        search(l);
    if (l->n_uses > 0 && mb_job_users_look(l->node_dir, l->uses, l->n_uses) && l->searches)
        for (size_t i = 0; i < l->n_uses; i++)
            l->uses[i].is_kept = 1; /* it may be anybody's; once, so that it keeps no later ones */
}

static void drop_look(void *load)
{
    struct look *l = load;

    for (size_t i = 0; i < l->n_uses; i++)
        mb_free(l->uses[i].id);
    mb_free(l->uses);
    mb_free(l->node_dir);
    mb_free(l);
}

/* ---- the loop ---- */

static struct mb_job_ended **find(struct mb_job_unpacked *u, const char *id)
{
    struct mb_job_ended **at = &u->list;

    while (*at != NULL && strcmp((*at)->id, id) != 0)
        at = &(*at)->next;
    return at;
}

static void drop(struct mb_job_ended **at)
{
    struct mb_job_ended *job = *at;

    *at = job->next;
    mb_free(job->id);
    mb_free(job);
}

/* NULL: out of memory, and it stays until the next agent looks. */
static struct mb_job_ended *note(struct mb_job_unpacked *u, const char *id)
{
    struct mb_job_ended **at = find(u, id), *job = *at;

    if (job != NULL)
        return job;
    job = mb_calloc(1, sizeof(*job));
    if (job != NULL && (job->id = mb_strdup(id)) != NULL) {
        *at = job;
        return job;
    }
    mb_free(job);
    mb_warn("jobs", "job=%s what was unpacked for it stays: out of memory", id);
    return NULL;
}

static void look(struct mb_job_unpacked *u);

static void on_timer(uv_timer_t *timer)
{
    look(timer->data);
}

static void look_later(struct mb_job_unpacked *u)
{
    uint64_t now = mb_mono_ms(), due = UINT64_MAX;

    for (const struct mb_job_ended *job = u->list; job != NULL; job = job->next)
        due = job->due_ms < due ? job->due_ms : due;
    if (u->closing || u->look != NULL)
        return;
    if (!u->has_searched && due > now + WAIT_MAX_MS) /* no thread could be had for it */
        due = now + WAIT_MAX_MS;
    uv_timer_stop(&u->timer);
    if (due != UINT64_MAX)
        uv_timer_start(&u->timer, on_timer, due > now ? due - now : 0, 0);
}

static void wait_more(struct mb_job_ended *job)
{
    job->wait_ms = job->wait_ms == 0                ? WAIT_MIN_MS
                   : job->wait_ms < WAIT_MAX_MS / 2 ? job->wait_ms * 2
                                                    : WAIT_MAX_MS;
    job->due_ms = mb_mono_ms() + job->wait_ms;
}

/* No driver of that id is there. 0: no more is to be done. */
static int settle(struct mb_job_unpacked *u, const struct mb_job_use *use, const char *dir)
{
    struct mb_err err = {0};

    if (use->is_kept && keep(dir, &err) != 0) {
        mb_warn("jobs", "job=%s a checkpoint lies in what was unpacked for it: %s", use->id,
                err.text);
        return -1;
    }
    if (use->is_kept) {
        mb_info("jobs", "job=%s what was unpacked for it stays: a checkpoint lies in it", use->id);
        return 0;
    }
    if (use->is_used)
        return -1;
    mb_info("jobs", "job=%s what was unpacked for it is removed", use->id);
    mb_job_forget_unpacked(u->opts.forget, dir);
    return 0;
}

static void on_seen(struct mb_job_unpacked *u, const struct mb_job_use *use)
{
    struct mb_job_ended **at = find(u, use->id), *job = *at;
    char *dir;

    if (job == NULL || !job->is_looked_at)
        return; /* another driver of this id has ended since: what was seen was of the former */
    job->is_looked_at = 0;
    dir = dir_of(u, use->id);
    if (u->opts.is_live(u->opts.arg, use->id)) /* it will end, too */
        drop(at);
    else if (dir != NULL && settle(u, use, dir) == 0)
        drop(at);
    else
        wait_more(job);
    mb_free(dir);
}

/* By the search, and looked at, too. */
static void note_found(struct mb_job_unpacked *u, const struct mb_job_use *use)
{
    uint64_t hold_ms = hold_ms_of(use->code, use->grace_ms);
    struct mb_job_ended *job = *find(u, use->id) == NULL ? note(u, use->id) : NULL;

    if (job == NULL)
        return;                                       /* it has ended again since */
    job->is_looked_at = hold_ms == 0 || use->is_kept; /* nothing to hold: noted while it is known */
    job->due_ms = mb_mono_ms() + hold_ms;
}

static void on_looked(void *owner, void *load)
{
    struct mb_job_unpacked *u = owner;
    const struct look *l = load;

    u->look = NULL;
    for (size_t i = 0; i < l->n_uses; i++) {
        if (l->searches)
            note_found(u, &l->uses[i]);
        on_seen(u, &l->uses[i]);
    }
    u->has_searched = 1;
    look_later(u);
}

/* All that are due at once: processes and gangs are looked at once for all of them. What there is
 * no memory for is due again later. */
static void look(struct mb_job_unpacked *u)
{
    static const struct mb_errand_plan plan = {do_look, on_looked, drop_look};
    uint64_t now = mb_mono_ms();
    struct look *l;

    if (u->look != NULL || u->closing)
        return;
    l = mb_calloc(1, sizeof(*l));
    if (l != NULL)
        *l = (struct look){.node_dir = mb_strdup(u->opts.node_dir), .searches = !u->has_searched};
    for (struct mb_job_ended *job = u->list; job != NULL; job = job->next) {
        if (job->due_ms > now)
            continue;
        job->due_ms = now + WAIT_MAX_MS;
        job->is_looked_at = l != NULL && add_use(l, job->id, &(struct mb_job_use){0}) == 0;
    }
    if (l != NULL && l->node_dir != NULL && (l->searches || l->n_uses > 0))
        u->look = mb_errand_start(u->opts.loop, &plan, u, l);
    else if (l != NULL)
        drop_look(l);
    look_later(u);
}

/* A new node has nothing to search for: no thread. */
static int has_jobs(const char *node_dir)
{
    char *root = mb_path_join(node_dir, "jobs");
    DIR *d = root != NULL ? opendir(root) : NULL;
    const struct dirent *e;
    int found = 0;

    while (d != NULL && !found && (e = readdir(d)) != NULL)
        found = e->d_name[0] != '.';
    if (d != NULL)
        closedir(d);
    mb_free(root);
    return found;
}

void mb_job_unpacked_init(struct mb_job_unpacked *u, const struct mb_job_unpacked_opts *opts)
{
    *u = (struct mb_job_unpacked){.opts = *opts};
    uv_timer_init(opts->loop, &u->timer);
    u->timer.data = u;
    u->has_searched = !has_jobs(opts->node_dir);
    look(u);
}

void mb_job_unpacked_ended(struct mb_job_unpacked *u, const char *job_id, int code,
                           int64_t grace_ms)
{
    char *dir = dir_of(u, job_id);
    struct mb_job_ended *job =
        !u->closing && dir != NULL && mb_job_packages_are_in(dir) && !mb_job_unpacked_is_kept(dir)
            ? note(u, job_id)
            : NULL;

    mb_free(dir);
    if (job == NULL)
        return;
    job->is_looked_at = 0;
    job->wait_ms = 0;
    job->due_ms = mb_mono_ms() + hold_ms_of(code, grace_ms);
    look_later(u);
}

static void on_timer_closed(uv_handle_t *timer)
{
    struct mb_job_unpacked *u = timer->data;

    u->is_closed = 1;
    u->opts.on_closed(u->opts.arg);
}

void mb_job_unpacked_close(struct mb_job_unpacked *u)
{
    u->closing = 1;
    mb_errand_leave(u->look);
    u->look = NULL;
    uv_close((uv_handle_t *)&u->timer, on_timer_closed);
}

void mb_job_unpacked_free(struct mb_job_unpacked *u)
{
    while (u->list != NULL)
        drop(&u->list);
}
