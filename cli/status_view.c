/* One table for each: nodes, the queue (only when somebody waits), jobs with what their gang says.
 */
#include "cli/status_view.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include "base/printable.h"
#include "base/str.h"

static const char *text(const json_t *j, const char *name)
{
    const char *s = json_string_value(json_object_get(j, name));

    return s != NULL ? s : "";
}

static json_int_t number(const json_t *j, const char *name)
{
    return json_integer_value(json_object_get(j, name));
}

/* What others wrote, up to n bytes of it, without power over the terminal; padded to width bytes.
 */
static int put(struct mb_buf *out, const char *s, size_t n, size_t width)
{
    size_t len = strnlen(s, n), from = out->len;
    int rc = mb_buf_add(out, s, len);

    for (size_t i = from; rc == 0 && i < out->len; i++) {
        unsigned char c = out->data[i];
        /* C1 controls are two bytes in UTF-8: C2 80 to C2 9F. */
        int is_c1 = c == 0xc2 && i + 1 < out->len && out->data[i + 1] < 0xa0;
        if (c < 0x20 || c == 0x7f || is_c1)
            out->data[i] = '?';
        if (is_c1)
            out->data[i + 1] = '?';
    }
    for (; rc == 0 && len < width; len++)
        rc = mb_buf_add(out, " ", 1);
    return rc;
}

static int put_all(struct mb_buf *out, const char *s)
{
    return put(out, s, strlen(s), 0);
}

/* ---- nodes ---- */

static int put_resources(struct mb_buf *out, const json_t *node)
{
    json_t *total = json_object_get(node, "resources_total"), *amount;
    json_t *free_now = json_object_get(node, "resources_available");
    const char *name;
    int rc = 0;

    json_object_foreach(json_object_get(node, "for_drivers"), name, amount)
    {
        if (strcmp(name, "GPU") == 0 || strcmp(name, "memory") == 0)
            continue; /* GPUs are those of gangs, below; memory of drivers is seldom asked for */
        rc |= mb_buf_puts(out, "  ");
        rc |= put(out, name, 48, 0);
        rc |= mb_buf_printf(out, " %g/%g used", json_number_value(json_object_get(amount, "used")),
                            json_number_value(json_object_get(amount, "total")));
    }
    json_object_foreach(total, name, amount)
    {
        double all = json_number_value(amount);

        if (mb_starts_with(name, "mobula_"))
            rc |= mb_buf_printf(out, "  %s %g/%g used", name + strlen("mobula_"),
                                all - json_number_value(json_object_get(free_now, name)), all);
    }
    return rc;
}

/* One line a GPU; what went wrong with it at the end. */
static int put_gpu(struct mb_buf *out, const json_t *gpu)
{
    const double gib = 1 << 30;
    json_t *reason;
    size_t i;
    int rc = mb_buf_puts(out, "         gpu ");

    rc |= put(out, text(gpu, "device"), 48, 3);
    rc |= put(out, text(gpu, "name"), 48, 0);
    rc |= mb_buf_printf(
        out,
        "  %3" JSON_INTEGER_FORMAT " %%  %.1f/%.1f GiB  %.0f/%.0f W  %" JSON_INTEGER_FORMAT " C",
        number(gpu, "utilization_percent"), (double)number(gpu, "memory_used_bytes") / gib,
        (double)number(gpu, "memory_total_bytes") / gib,
        json_number_value(json_object_get(gpu, "power_watts")),
        json_number_value(json_object_get(gpu, "power_limit_watts")),
        number(gpu, "temperature_celsius"));
    if (number(gpu, "ecc_uncorrected") > 0)
        rc |= mb_buf_printf(out, "  %" JSON_INTEGER_FORMAT " uncorrected memory errors",
                            number(gpu, "ecc_uncorrected"));
    json_array_foreach(json_object_get(gpu, "throttle"), i, reason)
    {
        rc |= mb_buf_puts(out, i == 0 ? "  throttled: " : ", ");
        rc |= put_all(out, json_string_value(reason) ? json_string_value(reason) : "");
    }
    return rc | mb_buf_puts(out, "\n");
}

/* One that is dead has none any more. */
static const char *role_of(const json_t *node)
{
    if (strcmp(text(node, "state"), "DEAD") == 0)
        return "";
    if (json_is_true(json_object_get(node, "is_standby")))
        return " standby";
    return json_is_true(json_object_get(node, "is_head")) ? " head" : "";
}

static int put_nodes(struct mb_buf *out, const json_t *nodes)
{
    size_t i, k;
    json_t *node, *gpu;
    int rc = mb_buf_printf(out, "nodes: %zu\n", json_array_size(nodes));

    json_array_foreach(nodes, i, node)
    {
        rc |= mb_buf_printf(out, "  %-6s %.12s  %-15s ", text(node, "state"), text(node, "node_id"),
                            text(node, "ip"));
        rc |= put(out, text(node, "node_name"), 64, 16);
        rc |= mb_buf_puts(out, role_of(node));
        rc |= put_resources(out, node);
        rc |= mb_buf_puts(out, "\n");
        json_array_foreach(json_object_get(node, "gpus"), k, gpu) rc |= put_gpu(out, gpu);
        json_array_foreach(json_object_get(node, "gpu_quarantine"), k, gpu)
        {
            rc |= mb_buf_puts(out, "         quarantine: ");
            rc |= put_all(out, text(gpu, "reason"));
            rc |= mb_buf_puts(out, "\n");
        }
    }
    return rc;
}

/* ---- the queue ---- */

/* "2 nodes x 4 mobula_gpu": the last resource is the one that counts. */
static int put_size(struct mb_buf *out, const json_t *row)
{
    json_t *bundle = json_object_get(row, "bundle"), *amount;
    json_int_t n = number(row, "num_bundles");
    const char *name, *last = "";
    double last_amount = 0;

    json_object_foreach(bundle, name, amount)
    {
        if (*last == '\0' || strcmp(name, "mobula_gpu") == 0 || strcmp(last, "mobula_gpu") != 0) {
            last = name;
            last_amount = json_number_value(amount);
        }
    }
    int rc = mb_buf_printf(out, "%" JSON_INTEGER_FORMAT " node%s x %g ", n, n == 1 ? "" : "s",
                           last_amount);
    return rc | put_all(out, last);
}

static int put_queue(struct mb_buf *out, const json_t *queue, const char *order)
{
    static const char prefix[] = "mobula-";
    size_t i, n = json_array_size(queue);
    json_t *row;
    int rc;

    if (n == 0)
        return 0;
    rc =
        mb_buf_printf(out, "queue: %zu gang%s, %s order\n", n, n == 1 ? " waits" : "s wait", order);
    json_array_foreach(queue, i, row)
    {
        const char *name = text(row, "name");

        rc |= mb_buf_printf(out, "%3" JSON_INTEGER_FORMAT ". ", number(row, "position"));
        rc |= put(out, mb_starts_with(name, prefix) ? name + strlen(prefix) : name, 200, 20);
        rc |= mb_buf_puts(out, "  ");
        rc |= put_size(out, row);
        if (number(row, "priority") != 0)
            rc |= mb_buf_printf(out, ", priority %" JSON_INTEGER_FORMAT, number(row, "priority"));
        rc |= mb_buf_printf(out, ", for %" JSON_INTEGER_FORMAT " s\n      ",
                            number(row, "waited_ms") / 1000);
        rc |= put_all(out, text(row, "reason"));
        rc |= mb_buf_puts(out, "\n");
    }
    return rc;
}

/* ---- jobs ---- */

static int put_checkpoint(struct mb_buf *out, const json_t *gang)
{
    json_t *c = json_object_get(gang, "checkpoint");
    json_int_t saved = number(c, "saved_iteration"), durable = number(c, "durable_iteration");
    json_int_t total = number(c, "total_bytes"), uploading = number(c, "uploading_bytes");
    char a[16], b[16];
    int rc;

    if (!json_is_object(c) || (saved < 0 && durable < 0 && *text(c, "url") == '\0'))
        return 0; /* none was asked for */
    if (saved < 0 && durable < 0)
        rc = mb_buf_puts(out, "      checkpoint: none yet");
    else if (durable < 0)
        rc = mb_buf_printf(
            out, "      checkpoint: saved iteration %" JSON_INTEGER_FORMAT ", none durable yet",
            saved);
    else
        rc = mb_buf_printf(out,
                           "      checkpoint: saved iteration %" JSON_INTEGER_FORMAT
                           ", durable iteration %" JSON_INTEGER_FORMAT,
                           saved, durable);
    if (*text(c, "url") != '\0') {
        rc |= mb_buf_puts(out, " in ");
        rc |= put_all(out, text(c, "url"));
    }
    if (*text(c, "progress") != '\0') { /* it names the iteration, and when it will be done */
        rc |= mb_buf_puts(out, "\n      ");
        rc |= put_all(out, text(c, "progress"));
    } else if (total > 0 && durable < saved) {
        rc |= mb_buf_printf(out, ", uploading %s of %s", mb_human_bytes((uint64_t)uploading, a),
                            mb_human_bytes((uint64_t)total, b));
    }
    return rc | mb_buf_puts(out, "\n");
}

/* "deadline (--deadline) in 310 s, the last save in 280 s" */
static int put_deadline(struct mb_buf *out, const json_t *gang, json_int_t now_ms)
{
    json_t *d = json_object_get(gang, "deadline");
    json_int_t at = number(d, "unix_ms"), save_at = number(d, "save_at_unix_ms");
    int rc;

    if (at == 0)
        return 0;
    rc = mb_buf_puts(out, "      deadline (");
    rc |= put_all(out, text(d, "source"));
    if (at > now_ms)
        rc |= mb_buf_printf(out, ") in %" JSON_INTEGER_FORMAT " s", (at - now_ms) / 1000);
    else
        rc |= mb_buf_printf(out, ") %" JSON_INTEGER_FORMAT " s ago", (now_ms - at) / 1000);
    if (json_is_true(json_object_get(d, "reached")))
        rc |= mb_buf_puts(out, ": the ranks save and end");
    else if (save_at > now_ms)
        rc |= mb_buf_printf(out, ", the last save in %" JSON_INTEGER_FORMAT " s",
                            (save_at - now_ms) / 1000);
    return rc | mb_buf_puts(out, "\n");
}

static int put_gang(struct mb_buf *out, const json_t *gang, json_int_t now_ms)
{
    json_int_t iteration = number(gang, "iteration");
    double loss = json_number_value(json_object_get(gang, "loss"));
    double validation = json_number_value(json_object_get(gang, "validation_loss"));
    int rc;

    rc = mb_buf_printf(
        out, "      gang: %s, %" JSON_INTEGER_FORMAT " ranks on %" JSON_INTEGER_FORMAT " nodes",
        text(gang, "state"), number(gang, "world_size"), number(gang, "num_nodes"));
    if (number(gang, "max_nodes") > number(gang, "num_nodes"))
        rc |= mb_buf_printf(out, " (of %" JSON_INTEGER_FORMAT ")", number(gang, "max_nodes"));
    rc |= mb_buf_printf(out, ", attempt %" JSON_INTEGER_FORMAT, number(gang, "attempt"));
    if (iteration > 0)
        rc |= mb_buf_printf(out,
                            ", iteration %" JSON_INTEGER_FORMAT "/%" JSON_INTEGER_FORMAT
                            ", loss %.4f, %.0f tokens/s",
                            iteration, number(gang, "train_iters"), loss,
                            json_number_value(json_object_get(gang, "tokens_per_s")));
    if (validation > 0)
        rc |= mb_buf_printf(out, ", validation loss %.4f", validation);
    rc |= mb_buf_puts(out, "\n");
    return rc | put_checkpoint(out, gang) | put_deadline(out, gang, now_ms);
}

/* The part of a job's message that a person needs here: why it failed, without the announcement of
 * a log that does not follow; what it waits for, without Ray's sentences on waiting in general. */
static int put_why(struct mb_buf *out, const json_t *job)
{
    static const char general[] = "to become available. ";
    const char *why = text(job, "message"), *found;
    size_t n;
    int rc;

    if (strcmp(text(job, "status"), "PENDING") == 0) {
        found = strstr(why, general);
        why = found != NULL ? found + sizeof(general) - 1 : "";
    } else if (strcmp(text(job, "status"), "FAILED") != 0) {
        why = "";
    }
    n = strcspn(why, "\n");
    found = strstr(why, ", last available logs");
    if (found != NULL && (size_t)(found - why) < n)
        n = (size_t)(found - why);
    if (n == 0)
        return 0;
    rc = mb_buf_puts(out, "      ");
    rc |= put(out, why, n, 0);
    return rc | mb_buf_puts(out, "\n");
}

static int put_job(struct mb_buf *out, const json_t *job, json_int_t now_ms)
{
    const char *id = text(job, "submission_id");
    json_t *gang = json_object_get(job, "gang");
    int rc = mb_buf_printf(out, "  %-9s ", text(job, "status"));

    rc |= put_all(out, *id != '\0' ? id : text(job, "job_id"));
    rc |= mb_buf_puts(out, "  ");
    rc |= put(out, text(job, "entrypoint"), MB_ENTRYPOINT_SHOWN_MAX, 0);
    rc |= mb_buf_puts(out, "\n");
    rc |= put_why(out, job);
    if (json_is_object(gang) && *text(gang, "error") != '\0') {
        rc |= mb_buf_puts(out, "      cause: ");
        rc |= put_all(out, text(gang, "error"));
        rc |= mb_buf_puts(out, "\n");
    }
    return rc | (json_is_object(gang) ? put_gang(out, gang, now_ms) : 0);
}

static int is_live(const json_t *job)
{
    const char *status = text(job, "status");

    return strcmp(status, "PENDING") == 0 || strcmp(status, "RUNNING") == 0;
}

static int newest_first(const void *a, const void *b)
{
    const json_t *x = *(json_t *const *)a, *y = *(json_t *const *)b;
    json_int_t at_x = number(x, "start_time"), at_y = number(y, "start_time");

    if (is_live(x) != is_live(y))
        return is_live(y) - is_live(x);
    return (at_y > at_x) - (at_y < at_x);
}

static int put_jobs(struct mb_buf *out, const json_t *jobs, int live_first, json_int_t now_ms)
{
    size_t n = json_array_size(jobs);
    json_t **order = calloc(n + 1, sizeof(json_t *));
    int rc = order == NULL ? MB_ENOMEM : mb_buf_printf(out, "jobs: %zu\n", n);

    for (size_t i = 0; rc == 0 && i < n; i++)
        order[i] = json_array_get(jobs, i);
    if (rc == 0 && live_first && n > 1)
        qsort(order, n, sizeof(json_t *), newest_first);
    for (size_t i = 0; rc == 0 && i < n; i++)
        rc = put_job(out, order[i], now_ms);
    free(order);
    return rc;
}

int mb_status_view(const json_t *status, int live_first, struct mb_buf *out)
{
    const json_t *cluster = json_object_get(status, "cluster");
    int rc = 0;

    if (json_is_true(json_object_get(cluster, "is_open")))
        rc |= mb_buf_puts(out, "WARNING: no token is needed here: whoever reaches the head may run "
                               "programs on this cluster\n");
    rc |= put_nodes(out, json_object_get(status, "nodes"));
    rc |= put_queue(out, json_object_get(status, "queue"), text(cluster, "gang_order"));
    rc |=
        put_jobs(out, json_object_get(status, "jobs"), live_first, number(cluster, "now_unix_ms"));
    return rc == 0 ? 0 : MB_ENOMEM;
}

/* ---- a screen ---- */

/* Bytes of the first `columns` characters of a line of n bytes. */
static size_t cut(const char *line, size_t n, unsigned columns)
{
    size_t at = 0, len;

    for (; at < n && columns > 0; columns--) {
        (void)mb_utf8_look(line + at, n - at, &len);
        at += len > 0 ? len : 1;
    }
    return at;
}

static size_t count_lines(const char *s)
{
    size_t n = 0;

    for (; *s != '\0'; s += *s == '\n') {
        n++;
        s += strcspn(s, "\n");
    }
    return n;
}

int mb_status_screen(const char *s, unsigned rows, unsigned columns, struct mb_buf *out)
{
    size_t total = count_lines(s), shown = total <= rows ? total : rows > 0 ? rows - 1 : 0;
    int rc = mb_buf_puts(out, "\x1b[H"); /* home; each line then clears its own rest */
    char more[64];

    for (size_t i = 0; i < shown; i++) {
        size_t n = strcspn(s, "\n");

        rc |= mb_buf_puts(out, i > 0 ? "\r\n" : "");
        rc |= mb_buf_add(out, s, cut(s, n, columns));
        rc |= mb_buf_puts(out, "\x1b[K");
        s += n + (s[n] == '\n');
    }
    if (shown < total && rows > 0) {
        int n = snprintf(more, sizeof(more), "... %zu more lines", total - shown);
        rc |= mb_buf_puts(out, shown > 0 ? "\r\n" : "");
        rc |= mb_buf_add(out, more, cut(more, (size_t)n, columns));
        rc |= mb_buf_puts(out, "\x1b[K");
    }
    rc |= mb_buf_puts(out, "\x1b[J"); /* what an earlier, longer picture left below */
    return rc == 0 ? 0 : MB_ENOMEM;
}

char *mb_status_essence(const json_t *status)
{
    json_t *copy = json_deep_copy(status), *row;
    char *out;
    size_t i;

    if (copy == NULL)
        return NULL;
    json_object_del(json_object_get(copy, "cluster"), "now_unix_ms");
    json_array_foreach(json_object_get(copy, "queue"), i, row) json_object_del(row, "waited_ms");
    out = json_dumps(copy, JSON_COMPACT | JSON_SORT_KEYS);
    json_decref(copy);
    return out;
}
