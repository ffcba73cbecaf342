/*
 * What an attempt must not forget when its agent dies: DIR/gang.json, replaced as a whole at every
 * transition. It holds no environment and no command, so no secrets.
 *
 * An attempt has ended when its logs are where they belong and its driver was told: until then it
 * drains, for an agent that comes after this one.
 *
 *  1. Writing fails (disk full): the gang goes on; the log says that a restart would lose it.
 *  2. A damaged file: the attempt is not adopted, named in the log, and left on disk for people.
 */
#include "agent/gang_run.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/str.h"

/* One format for writing and reading, so that they cannot drift apart. */
#define RANK_FORMAT "{s:I, s:I, s:I, s:s, s:I, s:b, s:i, s:i, s:s}"
#define GANG_FORMAT                                                                                \
    "{s:i, s:s, s:s, s:I, s:s, s:s, s:s, s:b, s:I, s:I, s:I, s:I, s:b, s:I, s:b, s:I, s:b, s:i, "  \
    "s:s, s:o}"

enum { STORE_MAX = 1 << 20, VERSION = 2 };

static const char *text_of(const char *s)
{
    return s != NULL ? s : "";
}

static json_t *ranks_json(const struct mb_gang_run *r)
{
    json_t *list = json_array();

    for (size_t i = 0; i < r->n_ranks; i++) {
        const struct mb_gang_rank *k = &r->ranks[i];

        json_array_append_new(
            list,
            json_pack(RANK_FORMAT, "rank", (json_int_t)k->rank, "local_rank",
                      (json_int_t)k->local_rank, "bundle_index", (json_int_t)k->bundle_index,
                      "endpoint", text_of(k->endpoint), "pid", (json_int_t)k->pid, "exited",
                      k->exited, "code", k->code, "signal", k->signal, "cause", text_of(k->cause)));
    }
    return list;
}

/* Without this an agent that is started again would not know what an edited RayJob leaves. "Never"
 * is asked anew. */
static json_t *said_json(const struct mb_deadline *d)
{
    json_t *list = json_array();

    for (size_t i = 0; i < MB_DEADLINE_N_SOURCES; i++)
        json_array_append_new(
            list, json_integer(d->said_ms[i] == MB_DEADLINE_NEVER ? 0 : (json_int_t)d->said_ms[i]));
    return list;
}

void mb_gang_store_save(const struct mb_gang_run *r)
{
    enum mb_gang_state state =
        r->fsm.state == MB_GANG_ENDED && mb_gang_logs_owe(r) ? MB_GANG_DRAINING : r->fsm.state;
    char own_job[2 * MB_JOB_ID_BYTES + 1], gang[2 * MB_PG_ID_BYTES + 1];
    json_t *o = json_pack(
        GANG_FORMAT, "version", VERSION, "placement_group_id", r->pg_hex, "gang",
        mb_hex(r->gang.bytes, sizeof(r->gang.bytes), gang), "attempt", (json_int_t)r->attempt,
        "job_id", r->job_id, "own_job_id",
        r->has_own_job ? mb_hex(r->own_job, sizeof(r->own_job), own_job) : "", "state",
        mb_gang_state_name(state), "released", r->fsm.released, "lease_ms",
        (json_int_t)r->fsm.lease_ms, "world_size", (json_int_t)r->world_size, "num_nodes",
        (json_int_t)r->num_nodes, "node_rank", (json_int_t)r->node_rank, "is_worker", r->is_worker,
        "stop_grace_ms", (json_int_t)r->stop_grace_ms, "watch_tracker", r->watch_tracker,
        "loaded_iteration", (json_int_t)r->loaded_iteration, "is_launched", r->is_launched,
        "failure_code", r->failure_code, "failure", text_of(r->failure), "ranks", ranks_json(r));
    char *path = mb_path_join(r->dir, "gang.json");
    char *text = NULL;
    struct mb_err err = {.text = "no memory"};

    if (o != NULL && r->checkpoint_dir != NULL)
        json_object_set_new(o, "checkpoint",
                            json_pack("{s:s, s:s, s:I, s:I}", "local_dir", r->checkpoint_dir, "url",
                                      text_of(r->url), "keep_last", (json_int_t)r->keep_last,
                                      "local_keep_last", (json_int_t)r->local_keep_last));
    if (o != NULL && (r->deadline.until.unix_ms != 0 || r->deadline.until.leaves))
        json_object_set_new(
            o, "deadline",
            json_pack("{s:I, s:i, s:b, s:b, s:o}", "unix_ms", (json_int_t)r->deadline.until.unix_ms,
                      "source", (int)r->deadline.until.source, "leaves", r->deadline.until.leaves,
                      "asked_end", r->deadline.state.asked_end, "said",
                      said_json(&r->deadline.until)));
    if (o != NULL && r->rendezvous_port != 0)
        json_object_set_new(o, "rendezvous_port", json_integer(r->rendezvous_port));
    if (o != NULL)
        text = json_dumps(o, JSON_INDENT(1));
    if (path == NULL || text == NULL ||
        mb_fs_replace(path, text, strlen(text), 0600, &err) != MB_OK)
        mb_warn("gang", "job=%s: a restarted agent would not know this gang: %s", r->job_id,
                err.text);
    json_decref(o);
    mb_free(text);
    mb_free(path);
}

static int load_ranks(struct mb_gang_run *r, json_t *list)
{
    json_t *item;
    size_t i;

    if (!json_is_array(list) || json_array_size(list) > MB_GANG_RANKS_MAX)
        return MB_ECORRUPT;
    r->ranks = mb_calloc(json_array_size(list), sizeof(*r->ranks));
    if (r->ranks == NULL)
        return MB_ENOMEM;
    json_array_foreach(list, i, item)
    {
        json_int_t rank, local, bundle, pid;
        const char *endpoint, *cause;
        int exited, code, sig;

        if (json_unpack(item, RANK_FORMAT, "rank", &rank, "local_rank", &local, "bundle_index",
                        &bundle, "endpoint", &endpoint, "pid", &pid, "exited", &exited, "code",
                        &code, "signal", &sig, "cause", &cause) != 0)
            return MB_ECORRUPT;
        r->ranks[i] = (struct mb_gang_rank){.run = r,
                                            .rank = (uint32_t)rank,
                                            .local_rank = (uint32_t)local,
                                            .bundle_index = (uint32_t)bundle,
                                            .pid = pid,
                                            .exited = exited,
                                            .code = code,
                                            .signal = sig,
                                            .progress = {.iteration = -1},
                                            .saved = -1,
                                            .fd = -1,
                                            .log = {-1, -1}};
        if (endpoint[0] != '\0')
            r->ranks[i].endpoint = mb_strdup(endpoint);
        if (cause[0] != '\0')
            r->ranks[i].cause = mb_strdup(cause);
        r->n_ranks = i + 1;
    }
    return MB_OK;
}

/* NULL: there was none. */
static void load_deadline(struct mb_gang_run *r, json_t *o)
{
    struct mb_gang_deadline *d = &r->deadline;
    int source, leaves, asked_end;
    json_int_t unix_ms;
    json_t *item;
    size_t i;

    if (o == NULL || json_unpack(o, "{s:I, s:i, s:b, s:b}", "unix_ms", &unix_ms, "source", &source,
                                 "leaves", &leaves, "asked_end", &asked_end) != 0)
        return;
    d->until = (struct mb_deadline){.unix_ms = (uint64_t)(unix_ms > 0 ? unix_ms : 0),
                                    .source = source > 0 && source < MB_DEADLINE_N_SOURCES
                                                  ? (enum mb_deadline_source)source
                                                  : MB_DEADLINE_RUN,
                                    .leaves = leaves};
    d->until.said_ms[d->until.source] = d->until.unix_ms;
    json_array_foreach(json_object_get(o, "said"), i, item) /* agents before this had no list */
    {
        if (i < MB_DEADLINE_N_SOURCES && json_integer_value(item) > 0)
            d->until.said_ms[i] = (uint64_t)json_integer_value(item);
    }
    d->state.asked_end = asked_end;
}

/* The run is registered with g before its fields are known: its key comes from the file. */
static int load(struct mb_gangs *g, json_t *o, struct mb_gang_run **out, struct mb_err *err)
{
    const char *pg_hex, *gang_hex, *job_id, *own_job, *state, *failure, *dir = NULL, *url = NULL;
    json_int_t attempt, lease, world, nodes, node, grace, loaded, port, keep_last = 0,
                                                                        local_keep_last = 0;
    int version, released, is_worker, watch, is_launched, failure_code;
    json_t *ranks;
    struct mb_pg_id pg, gang;
    struct mb_gang_run *r;
    enum mb_gang_state s;

    if (json_unpack(o, GANG_FORMAT, "version", &version, "placement_group_id", &pg_hex, "gang",
                    &gang_hex, "attempt", &attempt, "job_id", &job_id, "own_job_id", &own_job,
                    "state", &state, "released", &released, "lease_ms", &lease, "world_size",
                    &world, "num_nodes", &nodes, "node_rank", &node, "is_worker", &is_worker,
                    "stop_grace_ms", &grace, "watch_tracker", &watch, "loaded_iteration", &loaded,
                    "is_launched", &is_launched, "failure_code", &failure_code, "failure", &failure,
                    "ranks", &ranks) != 0 ||
        version != VERSION || mb_unhex(pg_hex, pg.bytes, sizeof(pg.bytes)) != MB_OK ||
        mb_unhex(gang_hex, gang.bytes, sizeof(gang.bytes)) != MB_OK)
        return mb_err_set(err, MB_ECORRUPT, "gang.json is damaged or of another version");
    s = mb_gang_state_parse(state);
    if (s == MB_GANG_N_STATES)
        return mb_err_set(err, MB_ECORRUPT, "gang.json names the state %s", state);
    if (s == MB_GANG_ENDED)
        return MB_OK;
    r = mb_gangs_new_run(g, &pg, &gang, (uint32_t)attempt, job_id, err);
    if (r == NULL)
        return err->code;
    r->has_own_job = mb_unhex(own_job, r->own_job, sizeof(r->own_job)) == MB_OK;
    r->fsm.state = s;
    r->fsm.released = released;
    r->fsm.is_up = is_launched;
    r->world_size = (uint32_t)world;
    r->num_nodes = (uint32_t)nodes;
    r->node_rank = (uint32_t)node;
    r->is_worker = is_worker;
    r->stop_grace_ms = (uint32_t)grace;
    r->watch_tracker = watch;
    r->loaded_iteration = loaded;
    r->is_launched = is_launched;
    r->failure_code = failure_code;
    if (failure[0] != '\0')
        r->failure = mb_strdup(failure);
    mb_gang_lease(&r->fsm, (uint64_t)lease, mb_mono_ms());
    if (json_unpack(o, "{s:{s:s, s:s, s?:I, s?:I}}", "checkpoint", "local_dir", &dir, "url", &url,
                    "keep_last", &keep_last, "local_keep_last", &local_keep_last) == 0) {
        r->keep_last = (uint32_t)keep_last;
        r->local_keep_last = (uint32_t)local_keep_last;
        r->checkpoint_dir = mb_strdup(dir);
        r->url = mb_strdup(url);
    }
    load_deadline(r, json_object_get(o, "deadline"));
    /* An agent from before this was kept says another one to a driver that dials again, which does
     * not mind (cli/driver/node.c). */
    if (json_unpack(o, "{s:I}", "rendezvous_port", &port) == 0 && port > 0 && port <= UINT16_MAX)
        r->rendezvous_port = (uint32_t)port;
    *out = r;
    if (load_ranks(r, ranks) != MB_OK)
        return mb_err_set(err, MB_ECORRUPT, "gang.json: its ranks are damaged");
    return MB_OK;
}

struct mb_gang_run *mb_gang_store_load(struct mb_gangs *g, const char *dir, struct mb_err *err)
{
    char *path = mb_path_join(dir, "gang.json");
    struct mb_buf text = {0};
    struct mb_gang_run *r = NULL;
    json_t *o = NULL;
    int rc = MB_ENOMEM;

    if (path != NULL)
        rc = mb_fs_read(path, STORE_MAX, &text, err);
    if (rc == MB_OK) {
        o = json_loads(mb_buf_str(&text), 0, NULL);
        rc = load(g, o, &r, err);
    }
    if (rc != MB_OK && r != NULL) {
        mb_gang_run_close(r);
        r = NULL;
    }
    json_decref(o);
    mb_buf_close(&text);
    mb_free(path);
    return r;
}
