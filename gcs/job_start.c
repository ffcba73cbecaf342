/*
 * The start of a driver, here or on another node, once.
 *
 * A head with a store of its own starts drivers of its own node at once: after a restart its runner
 * knows what runs. In every other case somebody else may have to go on with the start: another head
 * that takes over, or this one about a node that does not answer. So it has a number:
 *  1. A number that no start had before, and the node, are stored ("job_start:ID").
 *  2. After the commit, and only while this is the head, the node is asked. A node begins a number
 *     once, whoever asks, and tells who asks again what became of it (agent/job_adopt.c).
 *  3. No answer: it is asked again, until it answers or is declared dead. A head that takes over
 *     reads number and node, and does the same.
 *  4. A job that is stopped meanwhile: the node is told to end the driver, or to give the number
 * up; what it says then is final. Failure paths:
 *  5. The node has no room (MB_EFULL): it has given the number up; the job is in line again, in
 *     its old place.
 *  6. The node is dead: whether the driver began nobody knows, and it is not begun a second time:
 *     the job is FAILED, and names the node (job_remote.c).
 *  7. The store refuses the number: the same.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/job_request.h"
#include "gcs/runtime_env.h"
#include "gcs/guest.h"
#include "proto/mobula/agent.pb-c.h"

enum { ASK_MS = 5000, ASK_AGAIN_MS = 500 };

static const char *const our_ns = "mobula";
static const char *const last_number_key = "driver_starts";

static char *key_of(const char *id)
{
    return mb_asprintf("job_start:%s", id);
}

/* ---- what is stored ---- */

void head_job_start_load(struct mb_head *h, struct head_job *job)
{
    char *key = key_of(job->id);
    const char *hex = json_string_value(json_object_get(job->info, "driver_node_id"));
    struct mb_blob text;
    json_t *start = NULL;

    if (key && mb_tables_get(h->store, MB_TABLES_KV, mb_blob_str(our_ns), mb_blob_str(key), &text))
        start = json_loadb(text.p, text.n, 0, NULL);
    if (start)
        hex = json_string_value(json_object_get(start, "node"));
    if (hex && (start || h->redis))
        snprintf(job->node, sizeof job->node, "%s", hex);
    job->start_no = (uint64_t)json_integer_value(json_object_get(start, "number"));
    json_decref(start);
    mb_free(key);
}

void head_job_start_forget(struct mb_head *h, struct head_job *job)
{
    char *key = job->start_no > 0 ? key_of(job->id) : NULL;
    struct mb_err err = {0};

    if (key && mb_tables_del(h->store, MB_TABLES_KV, mb_blob_str(our_ns), mb_blob_str(key), NULL,
                             NULL, &err) != 0)
        mb_warn("jobs", "job=%s its start stays in the store: %s", job->id, err.text);
    mb_free(key);
    job->node[0] = '\0';
    job->start_no = 0;
    job->asking = 0;
}

static uint64_t last_number(struct mb_head *h)
{
    struct mb_blob value;
    char text[24] = "";

    if (mb_tables_get(h->store, MB_TABLES_KV, mb_blob_str(our_ns), mb_blob_str(last_number_key),
                      &value))
        snprintf(text, sizeof text, "%.*s", (int)value.n, (const char *)value.p);
    return strtoull(text, NULL, 10);
}

/* A question or a write under way; the job may be gone when the answer comes. */
struct asked {
    struct mb_head *h;
    uint64_t number;
    char id[];
};

static struct asked *new_asked(struct mb_head *h, const struct head_job *job)
{
    size_t n = strlen(job->id) + 1;
    struct asked *a = mb_alloc(sizeof *a + n);

    if (a) {
        a->h = h;
        a->number = job->start_no;
        memcpy(a->id, job->id, n);
    }
    return a;
}

/* The job, if the answer still is about it. */
static struct head_job *job_of(const struct asked *a)
{
    struct head_job *job = a->h->stopping ? NULL : head_job_find(a->h, a->id);

    return job && job->start_no == a->number ? job : NULL;
}

static int write_number(struct mb_head *h, const struct head_job *job, mb_tables_cb cb,
                        struct asked *a, struct mb_err *err)
{
    char number[24], text[200], *key = key_of(job->id);
    int rc = key ? 0 : mb_err_set(err, MB_ENOMEM, "out of memory");

    snprintf(number, sizeof number, "%llu", (unsigned long long)job->start_no);
    snprintf(text, sizeof text, "{\"node\":\"%.60s\",\"number\":%s}", job->node, number);
    if (rc == 0)
        rc = mb_tables_put(h->store, MB_TABLES_KV, mb_blob_str(our_ns),
                           mb_blob_str(last_number_key), mb_blob_str(number), NULL, NULL, err);
    if (rc == 0)
        rc = mb_tables_put(h->store, MB_TABLES_KV, mb_blob_str(our_ns), mb_blob_str(key),
                           mb_blob_str(text), cb, a, err);
    mb_free(key);
    return rc;
}

/* ---- the question ---- */

static const char *text_of(const struct head_job *job, const char *key, const char *otherwise)
{
    const char *text = json_string_value(json_object_get(job->info, key));

    return text ? text : otherwise;
}

/* metadata is owned by the caller: jansson's, free(). */
static void fill_spec(struct mb_head *h, const struct head_job *job, char address[300],
                      char **metadata, struct mb_job_spec *spec)
{
    double gpus = json_number_value(json_object_get(job->info, "entrypoint_num_gpus"));

    /* NULL for the null of a submission without metadata */
    *metadata = json_dumps(json_object_get(job->info, "metadata"), JSON_COMPACT);
    if (h->guest)
        snprintf(address, 300, "%s", head_guest_ray_address(h->guest));
    else
        snprintf(address, 300, "%s:%d", h->node_ip, h->gcs_port);
    *spec = (struct mb_job_spec){.submission_id = job->id,
                                 .entrypoint = text_of(job, "entrypoint", ""),
                                 .runtime_env_json = text_of(job, "runtime_env_json", "{}"),
                                 .metadata_json = *metadata ? *metadata : "{}",
                                 .ray_address = address,
                                 .packages_dir = h->guest ? NULL : h->packages_dir,
                                 .n_gpus = (uint32_t)ceil(gpus > 0 ? gpus : 0),
                                 .hides_gpus = head_job_wants_gpu_node(job),
                                 .start_no = job->start_no,
                                 .pipefail =
                                     strcmp(head_job_metadata(job, MB_JOB_PIPEFAIL_KEY), "1") == 0};
}

static int start_here(struct mb_head *h, const struct head_job *job, struct mb_err *err)
{
    char address[300], *metadata;
    struct mb_job_spec spec;
    int rc;

    fill_spec(h, job, address, &metadata, &spec);
    rc = h->runner->start(h->runner->self, &spec, err);
    free(metadata);
    return rc;
}

static void back_in_line(struct mb_head *h, struct head_job *job, const char *why)
{
    mb_info("jobs", "job=%s waits on: %s", job->id, why);
    head_job_start_forget(h, job);
    mb_job_queue_put_back(&job->ticket, mb_mono_ms() + ASK_AGAIN_MS,
                          "its start did not succeed and is tried again");
}

/* What the node said of the start; it will say no other thing of this number. */
static void answered(struct mb_head *h, struct head_job *job, int code, const char *text)
{
    struct mb_job_facts facts = {.text = text};

    job->asking = 0;
    if (code == 0) {
        mb_job_queue_confirm(&job->ticket);
        return;
    }
    if (code == MB_EFULL && job->state == MB_JOB_PENDING) {
        back_in_line(h, job, text);
        return;
    }
    head_admission_leave(job);
    head_job_apply(h, job, MB_JOB_START_FAILED, &facts);
}

static int is_refusal(int status)
{
    return status == MB_GRPC_PERMISSION_DENIED || status == MB_GRPC_UNAUTHENTICATED ||
           status == MB_GRPC_INVALID_ARGUMENT || status == MB_GRPC_UNIMPLEMENTED;
}

static void on_start_answer(void *arg, int status, const char *detail, const ProtobufCMessage *m)
{
    struct asked *a = arg;
    struct head_job *job = job_of(a);
    const Mobula__V1__StartDriverReply *reply = (const Mobula__V1__StartDriverReply *)m;

    if (job) {
        job->start_in_flight = 0;
        job->ask_at_ms = mb_mono_ms() + ASK_AGAIN_MS;
        if (!job->asking) {
            ; /* its driver's first event was faster */
        } else if (status == MB_GRPC_OK) {
            answered(a->h, job, reply->code, reply->text);
        } else if (is_refusal(status)) {
            answered(a->h, job, MB_EDENIED, detail ? detail : "the node refused its driver");
        } else {
            mb_info("jobs", "job=%s node %.8s does not answer, it is asked again: %s", job->id,
                    job->node, detail ? detail : "");
        }
        head_admission_pump(a->h);
    }
    mb_free(a);
}

static struct mb_grpc_channel *channel_to(struct mb_head *h, const struct head_job *job)
{
    struct mb_err err = {0};
    struct head_node *n = head_node_find_hex(h, job->node);

    return n && head_node_alive(n) ? head_node_channel(h, n, &err) : NULL;
}

static void ask_node(struct mb_head *h, struct head_job *job)
{
    Mobula__V1__StartDriverRequest q = MOBULA__V1__START_DRIVER_REQUEST__INIT;
    struct mb_grpc_channel *channel = channel_to(h, job);
    struct asked *a = channel ? new_asked(h, job) : NULL;
    char address[300], *metadata;
    struct mb_job_spec spec;
    struct mb_err err = {0};

    job->ask_at_ms = mb_mono_ms() + ASK_AGAIN_MS;
    if (!a)
        return; /* the tick asks again, or the node is declared dead */
    fill_spec(h, job, address, &metadata, &spec);
    q.submission_id = mb_wire_str(spec.submission_id);
    q.start_no = spec.start_no;
    q.entrypoint = mb_wire_str(spec.entrypoint);
    q.runtime_env_json = mb_wire_str(spec.runtime_env_json);
    q.metadata_json = mb_wire_str(spec.metadata_json);
    q.ray_address = mb_wire_str(spec.ray_address);
    q.n_gpus = spec.n_gpus;
    q.hides_gpus = spec.hides_gpus;
    q.pipefail = spec.pipefail;
    job->start_in_flight = mb_grpc_unary(channel, "/mobula.v1.NodeAgent/StartDriver", &q.base,
                                         &mobula__v1__start_driver_reply__descriptor, ASK_MS,
                                         on_start_answer, a, NULL, &err) == 0;
    if (!job->start_in_flight)
        mb_free(a);
    free(metadata);
}

static void ask(struct mb_head *h, struct head_job *job)
{
    struct mb_err err = {0};
    int rc;

    if (head_job_is_elsewhere(h, job)) {
        ask_node(h, job);
        return;
    }
    rc = start_here(h, job, &err);
    answered(h, job, rc, err.text);
}

static void on_noted(void *arg, const struct mb_err *err)
{
    struct asked *a = arg;
    struct head_job *job = job_of(a);

    if (job) {
        job->start_in_flight = 0;
        if (job->state != MB_JOB_PENDING) {
            ; /* stopped meanwhile: nobody was asked to begin */
        } else if (err->code != 0) {
            back_in_line(a->h, job, err->text);
        } else if (!head_closed(a->h)) { /* else the head that comes goes on with it */
            ask(a->h, job);
            head_admission_pump(a->h);
        }
    }
    mb_free(a);
}

static int begin_numbered(struct mb_head *h, struct head_job *job, const char *node,
                          struct mb_err *err)
{
    struct asked *a;
    int rc;

    if (*node == '\0')
        return mb_err_set(err, MB_EFULL, "the head's own node is not registered yet");
    snprintf(job->node, sizeof job->node, "%s", node);
    job->start_no = last_number(h) + 1;
    a = new_asked(h, job);
    rc = a ? write_number(h, job, on_noted, a, err) : mb_err_set(err, MB_ENOMEM, "out of memory");
    if (rc != 0) {
        mb_free(a);
        job->node[0] = '\0';
        job->start_no = 0;
        return rc;
    }
    job->asking = job->start_in_flight = 1;
    job->stop_told = 0;
    return 0;
}

/* MB_EUNAVAIL: it comes yet. */
static int lacks(struct mb_head *h, const char *uri, struct mb_err *err)
{
    if (h->restore)
        return mb_err_set(err, MB_EUNAVAIL,
                          "the packages of the head before this one are restored");
    return mb_err_set(err, MB_ENOENT,
                      "runtime_env setup failed: Failed to set up runtime environment.\n"
                      "The package %s is not on this head.%s",
                      uri,
                      h->redis ? " If it was uploaded to a head before this one: only packages of "
                                 "at most 8 MiB are kept in the store."
                               : "");
}

/* Said before the runner is asked, with Ray's words: what can never work, and what is not here. */
static int check_runtime_env(struct mb_head *h, const struct head_job *job, struct mb_err *err)
{
    json_t *json = json_loads(text_of(job, "runtime_env_json", "{}"), 0, NULL);
    struct mb_runtime_env env;
    struct mb_err why = {0};
    int rc = mb_runtime_env_parse(json, &env, &why);

    if (rc != 0)
        mb_err_set(err, rc, "Failed to start supervisor actor %s: '%s'", job->id, why.text);
    for (size_t i = 0; rc == 0 && i < env.n_refs; i++)
        if (env.refs[i].place == MB_RUNTIME_ENV_UPLOADED && !h->guest &&
            !head_package_known(h, env.refs[i].rest))
            rc = lacks(h, env.refs[i].uri, err);
    json_decref(json);
    return rc;
}

int head_job_start_driver(struct mb_head *h, struct head_job *job, struct mb_err *err)
{
    const char *node = mb_job_queue_node_of(&job->ticket);
    int is_here = !node || strcmp(node, MB_JOB_HEAD_NODE) == 0;
    int rc = check_runtime_env(h, job, err);

    if (rc != 0)
        return rc;
    if (!is_here || h->redis)
        return begin_numbered(h, job, is_here ? h->runner->node_id_hex(h->runner->self) : node,
                              err);
    rc = start_here(h, job, err);
    if (rc == 0)
        mb_job_queue_confirm(&job->ticket);
    return rc;
}

/* ---- stop ---- */

static void on_stop_answer(void *arg, int status, const char *detail, const ProtobufCMessage *m)
{
    struct asked *a = arg;
    struct head_job *job = job_of(a);
    struct mb_job_facts facts = {0};

    (void)detail;
    if (job) {
        job->stop_in_flight = 0;
        job->ask_at_ms = mb_mono_ms() + ASK_AGAIN_MS;
        job->stop_told = status == MB_GRPC_OK;
        if (job->stop_told && !((const Mobula__V1__StopDriverReply *)m)->known) {
            job->asking = 0;
            head_admission_leave(job);
            head_job_apply(a->h, job, MB_JOB_LOST, &facts);
            head_admission_pump(a->h);
        }
    }
    mb_free(a);
}

void head_job_stop_elsewhere(struct mb_head *h, struct head_job *job)
{
    Mobula__V1__StopDriverRequest q = MOBULA__V1__STOP_DRIVER_REQUEST__INIT;
    struct mb_grpc_channel *channel = channel_to(h, job);
    struct asked *a = channel && !job->stop_in_flight ? new_asked(h, job) : NULL;
    struct mb_err err = {0};

    job->ask_at_ms = mb_mono_ms() + ASK_AGAIN_MS;
    if (!a)
        return; /* the tick tells it again, or the node is declared dead */
    q.submission_id = job->id;
    q.start_no = job->start_no;
    job->stop_in_flight = mb_grpc_unary(channel, "/mobula.v1.NodeAgent/StopDriver", &q.base,
                                        &mobula__v1__stop_driver_reply__descriptor, ASK_MS,
                                        on_stop_answer, a, NULL, &err) == 0;
    if (!job->stop_in_flight)
        mb_free(a);
}

void head_job_start_tick(struct mb_head *h, struct head_job *job, uint64_t now_ms)
{
    if (!head_job_is_elsewhere(h, job) || now_ms < job->ask_at_ms)
        return;
    if (job->state == MB_JOB_PENDING && job->asking && !job->start_in_flight)
        ask_node(h, job);
    else if (job->state == MB_JOB_STOPPING && !job->stop_told)
        head_job_stop_elsewhere(h, job);
}
