/*
 * Encoding is deterministic (sorted files, sorted keys), so that two agents that see the same parts
 * write the same manifest, and the loser of a conditional write can compare bytes.
 */
#include "agent/upload/manifest.h"

#include <ctype.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"

void mb_manifest_close(struct mb_manifest *m)
{
    if (!m)
        return;
    for (size_t i = 0; i < m->n_files; i++)
        mb_free(m->files[i].path);
    mb_free(m->files);
    mb_free(m->job_id);
    mb_free(m->placement_group);
    memset(m, 0, sizeof(*m));
}

int mb_manifest_set_writer(struct mb_manifest *m, const struct mb_manifest_writer *w,
                           struct mb_err *err)
{
    char *job_id = mb_strdup(w->job_id), *group = mb_strdup(w->placement_group);

    if (!job_id || !group) {
        mb_free(job_id);
        mb_free(group);
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    mb_free(m->job_id);
    mb_free(m->placement_group);
    m->job_id = job_id;
    m->placement_group = group;
    m->attempt = w->attempt;
    return 0;
}

static const char *text_of(const char *s)
{
    return s ? s : "";
}

int mb_manifest_is_of(const struct mb_manifest *m, const struct mb_manifest_writer *w)
{
    return m->attempt == w->attempt && strcmp(text_of(m->job_id), w->job_id) == 0 &&
           strcmp(text_of(m->placement_group), w->placement_group) == 0;
}

int mb_manifest_is_newer(const struct mb_manifest *m, const struct mb_manifest_writer *w)
{
    struct mb_manifest_writer same = *w;

    same.attempt = m->attempt;
    return m->attempt > w->attempt && mb_manifest_is_of(m, &same);
}

int mb_manifest_path_is_safe(const char *path)
{
    if (!path[0])
        return 0;
    for (const char *p = path;;) {
        size_t n = strcspn(p, "/");

        if (n == 0 || (n == 1 && p[0] == '.') || (n == 2 && p[0] == '.' && p[1] == '.'))
            return 0;
        if (!p[n])
            return 1;
        p += n + 1;
    }
}

/* Index of path, or where it belongs; *found says which. */
static size_t find(const struct mb_manifest *m, const char *path, int *found)
{
    size_t low = 0, high = m->n_files;

    *found = 0;
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        int c = strcmp(m->files[mid].path, path);

        if (c == 0) {
            *found = 1;
            return mid;
        }
        if (c < 0)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

int mb_manifest_add(struct mb_manifest *m, const char *path, uint64_t size_bytes,
                    uint64_t crc64nvme, struct mb_err *err)
{
    struct mb_manifest_file *grown;
    char *copy;
    size_t at;
    int found;

    if (!mb_manifest_path_is_safe(path))
        return mb_err_set(err, MB_EINVAL, "\"%s\" is not a path inside a checkpoint", path);
    at = find(m, path, &found);
    if (found) {
        if (m->files[at].size_bytes == size_bytes && m->files[at].crc64nvme == crc64nvme)
            return 0;
        return mb_err_set(err, MB_EEXIST, "two nodes wrote different contents as %s", path);
    }
    copy = mb_strdup(path);
    grown = copy ? mb_reallocarray(m->files, m->n_files + 1, sizeof(*grown)) : NULL;
    if (!grown) {
        mb_free(copy);
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    m->files = grown;
    memmove(grown + at + 1, grown + at, (m->n_files - at) * sizeof(*grown));
    grown[at] = (struct mb_manifest_file){copy, size_bytes, crc64nvme};
    m->n_files++;
    return 0;
}

int mb_manifest_encode(const struct mb_manifest *m, char **out, struct mb_err *err)
{
    json_t *files = json_array();
    json_t *root = json_pack(
        "{s:i, s:I, s:i, s:i, s:s, s:s, s:i, s:O*}", "version", MB_MANIFEST_VERSION, "iteration",
        (json_int_t)m->iteration, "node_rank", (int)m->node_rank, "num_nodes", (int)m->num_nodes,
        "job_id", text_of(m->job_id), "placement_group_id", text_of(m->placement_group), "attempt",
        (int)m->attempt, "files", files);
    int bad = !files || !root;

    for (size_t i = 0; !bad && i < m->n_files; i++) {
        char crc[17];

        snprintf(crc, sizeof(crc), "%016" PRIx64, m->files[i].crc64nvme);
        bad = json_array_append_new(files, json_pack("{s:s, s:I, s:s}", "path", m->files[i].path,
                                                     "size", (json_int_t)m->files[i].size_bytes,
                                                     "crc64nvme", crc)) < 0;
    }
    *out = bad ? NULL : json_dumps(root, JSON_COMPACT | JSON_SORT_KEYS);
    json_decref(root);
    json_decref(files);
    return *out ? 0 : mb_err_set(err, MB_ENOMEM, "out of memory");
}

static int decode_file(json_t *file, const char *what, struct mb_manifest *m, struct mb_err *err)
{
    const char *path = json_string_value(json_object_get(file, "path"));
    const char *crc = json_string_value(json_object_get(file, "crc64nvme"));
    json_t *size = json_object_get(file, "size");
    uint64_t crc_value;
    int end = 0, rc;

    if (!path || !crc || !json_is_integer(size) || json_integer_value(size) < 0 ||
        strlen(crc) != 16 || strspn(crc, "0123456789abcdef") != 16 ||
        sscanf(crc, "%" SCNx64 "%n", &crc_value, &end) != 1 || end != 16)
        return mb_err_set(err, MB_ECORRUPT, "%s: a file entry lacks path, size or crc64nvme", what);
    rc = mb_manifest_add(m, path, (uint64_t)json_integer_value(size), crc_value, err);
    if (rc == MB_EINVAL || rc == MB_EEXIST)
        return mb_err_set(err, MB_ECORRUPT, "%s: bad file entry \"%s\"", what, path);
    return rc;
}

static int decode_head(json_t *root, const char *what, struct mb_manifest *m, struct mb_err *err)
{
    json_int_t version = json_integer_value(json_object_get(root, "version"));
    json_t *iteration = json_object_get(root, "iteration");
    json_t *node_rank = json_object_get(root, "node_rank");
    json_int_t num_nodes = json_integer_value(json_object_get(root, "num_nodes"));
    json_int_t attempt = json_integer_value(json_object_get(root, "attempt"));
    const char *job_id = json_string_value(json_object_get(root, "job_id"));
    const char *group = json_string_value(json_object_get(root, "placement_group_id"));
    struct mb_manifest_writer writer = {job_id, text_of(group), (uint32_t)attempt};

    if (version != MB_MANIFEST_VERSION)
        return mb_err_set(err, MB_ECORRUPT,
                          "%s: version %lld; this program reads version %d: use a newer mobula",
                          what, (long long)version, MB_MANIFEST_VERSION);
    if (!json_is_integer(iteration) || json_integer_value(iteration) < 0 ||
        !json_is_integer(node_rank) || num_nodes < 1 || num_nodes > 1000000 || attempt < 0 ||
        attempt > INT32_MAX || !job_id || json_integer_value(node_rank) < -1 ||
        json_integer_value(node_rank) >= num_nodes)
        return mb_err_set(
            err, MB_ECORRUPT,
            "%s: iteration, node_rank, num_nodes, job_id or attempt is missing or out "
            "of range",
            what);
    m->iteration = json_integer_value(iteration);
    m->node_rank = (int32_t)json_integer_value(node_rank);
    m->num_nodes = (uint32_t)num_nodes;
    return mb_manifest_set_writer(m, &writer, err);
}

int mb_manifest_decode(const void *json, size_t n, const char *what, struct mb_manifest *out,
                       struct mb_err *err)
{
    struct mb_manifest m = {0};
    json_error_t je;
    json_t *root = json_loadb(json, n, JSON_REJECT_DUPLICATES, &je);
    json_t *files = json_object_get(root, "files");
    int rc;

    if (!root || !json_is_object(root)) {
        rc = mb_err_set(err, MB_ECORRUPT, "%s is not a JSON object: %s (line %d)", what, je.text,
                        je.line);
        goto out;
    }
    rc = decode_head(root, what, &m, err);
    if (!rc && !json_is_array(files))
        rc = mb_err_set(err, MB_ECORRUPT, "%s: files is missing", what);
    for (size_t i = 0; !rc && i < json_array_size(files); i++)
        rc = decode_file(json_array_get(files, i), what, &m, err);
out:
    json_decref(root);
    if (rc < 0)
        mb_manifest_close(&m);
    else
        *out = m;
    return rc;
}

static const struct mb_manifest *part_of(const struct mb_manifest *parts, size_t n, uint32_t rank)
{
    for (size_t i = 0; i < n; i++)
        if (parts[i].node_rank == (int32_t)rank)
            return &parts[i];
    return NULL;
}

int mb_manifest_merge(const struct mb_manifest *parts, size_t n, struct mb_manifest *out,
                      struct mb_err *err)
{
    struct mb_manifest m = {.node_rank = -1};
    struct mb_manifest_writer writer;
    int rc;

    if (n == 0)
        return mb_err_set(err, MB_ENOENT, "no part of the checkpoint is there");
    m.iteration = parts[0].iteration;
    m.num_nodes = parts[0].num_nodes;
    writer = (struct mb_manifest_writer){text_of(parts[0].job_id),
                                         text_of(parts[0].placement_group), parts[0].attempt};
    rc = mb_manifest_set_writer(&m, &writer, err);
    for (uint32_t rank = 0; !rc && rank < m.num_nodes; rank++) {
        const struct mb_manifest *p = part_of(parts, n, rank);

        if (!p)
            rc = mb_err_set(err, MB_ENOENT, "part %u of %u of iteration %" PRId64 " is not there",
                            rank, m.num_nodes, m.iteration);
        else if (p->iteration != m.iteration || p->num_nodes != m.num_nodes ||
                 !mb_manifest_is_of(p, &writer))
            rc = mb_err_set(err, MB_ECORRUPT,
                            "part %u of iteration %" PRId64
                            " is of job %s attempt %u group %.8s, not of job %s attempt %u group "
                            "%.8s",
                            rank, m.iteration, p->job_id, p->attempt, text_of(p->placement_group),
                            m.job_id, m.attempt, m.placement_group);
        for (size_t i = 0; !rc && i < p->n_files; i++)
            rc = mb_manifest_add(&m, p->files[i].path, p->files[i].size_bytes,
                                 p->files[i].crc64nvme, err);
        if (rc == MB_EEXIST)
            rc = mb_err_set(err, MB_ECORRUPT,
                            "iteration %" PRId64 ": node %u and another node wrote different "
                            "contents under one name",
                            m.iteration, rank);
    }
    if (rc < 0)
        mb_manifest_close(&m);
    else
        *out = m;
    return rc;
}

char *mb_iteration_dir(int64_t iteration, char out[MB_CHECKPOINT_KEY_MAX])
{
    snprintf(out, MB_CHECKPOINT_KEY_MAX, "iter_%07" PRId64, iteration);
    return out;
}

char *mb_manifest_key(int64_t iteration, char out[MB_CHECKPOINT_KEY_MAX])
{
    snprintf(out, MB_CHECKPOINT_KEY_MAX, "iter_%07" PRId64 "/.mobula/manifest.json", iteration);
    return out;
}

char *mb_part_key(int64_t iteration, uint32_t node_rank, uint32_t num_nodes,
                  char out[MB_CHECKPOINT_KEY_MAX])
{
    snprintf(out, MB_CHECKPOINT_KEY_MAX, "iter_%07" PRId64 "/.mobula/part-%u-of-%u.json", iteration,
             node_rank, num_nodes);
    return out;
}

int mb_latest_parse(const void *p, size_t n, int64_t *out, struct mb_err *err)
{
    const unsigned char *s = p;
    int64_t value = 0;
    size_t digits = 0;

    while (n && isspace(s[n - 1]))
        n--;
    for (; digits < n && digits < 18 && isdigit(s[digits]); digits++)
        value = value * 10 + (s[digits] - '0');
    if (n == 0 || digits != n)
        return mb_err_set(err, MB_ECORRUPT, MB_LATEST_KEY " does not hold an iteration number");
    *out = value;
    return 0;
}

int mb_latest_moves(int64_t now_at, int64_t iteration)
{
    return now_at < iteration;
}
