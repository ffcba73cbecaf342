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
#include "agent/upload/manifest_cut.h"
#include "base/alloc.h"
#include "base/buf.h"
#include "base/str.h"

static void free_files(struct mb_manifest *m)
{
    for (size_t i = 0; i < m->n_files; i++)
        mb_free(m->files[i].path);
    mb_free(m->files);
}

void mb_manifest_close(struct mb_manifest *m)
{
    if (!m)
        return;
    free_files(m);
    mb_free(m->job_id);
    mb_free(m->placement_group);
    mb_free(m->data);
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

/* Room for one more: the capacity is n_files rounded up to a power of two. MB_ENOMEM. */
static int reserve_one(struct mb_manifest *m)
{
    struct mb_manifest_file *grown;

    if ((m->n_files & (m->n_files - 1)) != 0)
        return 0;
    grown = mb_reallocarray(m->files, m->n_files ? m->n_files * 2 : 1, sizeof(*grown));
    if (!grown)
        return MB_ENOMEM;
    m->files = grown;
    return 0;
}

int mb_manifest_add(struct mb_manifest *m, const char *path, uint64_t size_bytes,
                    uint64_t crc64nvme, struct mb_err *err)
{
    struct mb_manifest_file *files;
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
    if (!copy || reserve_one(m) != 0) {
        mb_free(copy);
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    files = m->files;
    memmove(files + at + 1, files + at, (m->n_files - at) * sizeof(*files));
    files[at] = (struct mb_manifest_file){copy, size_bytes, crc64nvme};
    m->n_files++;
    return 0;
}

/* A copy of f as the last one. MB_ENOMEM. */
static int append(struct mb_manifest *m, const struct mb_manifest_file *f)
{
    char *copy = mb_strdup(f->path);

    if (!copy || reserve_one(m) != 0) {
        mb_free(copy);
        return MB_ENOMEM;
    }
    m->files[m->n_files++] = (struct mb_manifest_file){copy, f->size_bytes, f->crc64nvme};
    return 0;
}

static int by_path(const void *a, const void *b)
{
    const struct mb_manifest_file *x = a, *y = b;

    return strcmp(x->path, y->path);
}

/* Sorted, with what stands there twice once: how many are left, or MB_EEXIST. */
static ptrdiff_t unite(struct mb_manifest_file *files, size_t n, struct mb_err *err)
{
    size_t kept = 0;

    qsort(files, n, sizeof(*files), by_path);
    for (size_t i = 0; i < n; i++) {
        const struct mb_manifest_file *last = kept ? &files[kept - 1] : NULL;

        if (!last || strcmp(last->path, files[i].path) != 0)
            files[kept++] = files[i];
        else if (last->size_bytes != files[i].size_bytes || last->crc64nvme != files[i].crc64nvme)
            return mb_err_set(err, MB_EEXIST, "two nodes wrote different contents as %s",
                              last->path);
    }
    return (ptrdiff_t)kept;
}

int mb_manifest_add_all(struct mb_manifest *m, const struct mb_manifest_file *files, size_t n,
                        struct mb_err *err)
{
    struct mb_manifest whole = {0};
    struct mb_manifest_file *all;
    ptrdiff_t kept;
    int rc = 0;

    for (size_t i = 0; i < n; i++)
        if (!mb_manifest_path_is_safe(files[i].path))
            return mb_err_set(err, MB_EINVAL, "\"%s\" is not a path inside a checkpoint",
                              files[i].path);
    if (n == 0)
        return 0;
    all = mb_reallocarray(NULL, m->n_files + n, sizeof(*all));
    if (!all)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    if (m->n_files)
        memcpy(all, m->files, m->n_files * sizeof(*all));
    memcpy(all + m->n_files, files, n * sizeof(*all));
    kept = unite(all, m->n_files + n, err);
    for (ptrdiff_t i = 0; rc == 0 && i < kept; i++)
        rc = append(&whole, &all[i]);
    mb_free(all);
    if (kept < 0)
        return (int)kept;
    if (rc != 0) {
        free_files(&whole);
        return mb_err_set(err, rc, "out of memory");
    }
    free_files(m);
    m->files = whole.files;
    m->n_files = whole.n_files;
    return 0;
}

int mb_manifest_set_data(struct mb_manifest *m, const char *data, struct mb_err *err)
{
    char *copy = NULL;

    if (data && data[0]) {
        if (strncmp(data, ".mobula/", 8) != 0 || !mb_manifest_path_is_safe(data))
            return mb_err_set(err, MB_EINVAL, "\"%s\" is no place for a checkpoint's files", data);
        copy = mb_strdup(data);
        if (!copy)
            return mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    mb_free(m->data);
    m->data = copy;
    return 0;
}

char *mb_manifest_file_key(int64_t iteration, const char *data, const char *path)
{
    char dir[MB_CHECKPOINT_KEY_MAX];
    int is_beside = data && data[0];

    return mb_asprintf("%s/%s%s%s", mb_iteration_dir(iteration, dir), is_beside ? data : "",
                       is_beside ? "/" : "", path);
}

/* One at a time: as a tree, 100,000 files would take 60 MiB. */
static int add_file_text(struct mb_buf *out, const struct mb_manifest_file *f)
{
    char crc[17], *text;
    json_t *file;
    int rc = MB_ENOMEM;

    snprintf(crc, sizeof(crc), "%016" PRIx64, f->crc64nvme);
    file = json_pack("{s:s, s:I, s:s}", "path", f->path, "size", (json_int_t)f->size_bytes,
                     "crc64nvme", crc);
    text = file ? json_dumps(file, JSON_COMPACT | JSON_SORT_KEYS) : NULL;
    if (text)
        rc = mb_buf_puts(out, text);
    mb_free(text);
    json_decref(file);
    return rc;
}

int mb_manifest_encode(const struct mb_manifest *m, char **out, struct mb_err *err)
{
    static const char empty[] = "\"files\":[]"; /* inside a string its quotes would be escaped */
    json_t *root =
        json_pack("{s:i, s:I, s:i, s:i, s:s, s:s, s:i, s:o*, s:s*, s:o*}", "version",
                  m->data ? MB_MANIFEST_VERSION : 1, "iteration", (json_int_t)m->iteration,
                  "node_rank", (int)m->node_rank, "num_nodes", (int)m->num_nodes, "job_id",
                  text_of(m->job_id), "placement_group_id", text_of(m->placement_group), "attempt",
                  (int)m->attempt, "files", m->is_claim ? NULL : json_array(), "data", m->data,
                  "claim", m->is_claim ? json_true() : NULL);
    char *text = root ? json_dumps(root, JSON_COMPACT | JSON_SORT_KEYS) : NULL;
    char *gap = text ? strstr(text, empty) : NULL;
    struct mb_buf all = {0};
    int rc = !text || (!gap && !m->is_claim) ? MB_ENOMEM : 0;

    if (rc == 0)
        rc = mb_buf_add(&all, text, gap ? (size_t)(gap - text) + sizeof(empty) - 2 : strlen(text));
    for (size_t i = 0; rc == 0 && gap && i < m->n_files; i++) {
        rc = i > 0 ? mb_buf_puts(&all, ",") : 0;
        if (rc == 0)
            rc = add_file_text(&all, &m->files[i]);
    }
    if (rc == 0 && gap)
        rc = mb_buf_puts(&all, gap + sizeof(empty) - 2);
    if (rc == 0 && all.len > MB_MANIFEST_MAX_BYTES)
        rc = mb_err_set(err, MB_EFULL,
                        "a manifest of %zu files has %zu bytes, and nobody reads more than %d",
                        m->n_files, all.len, MB_MANIFEST_MAX_BYTES);
    *out = rc == 0 ? mb_buf_take(&all) : NULL;
    mb_buf_close(&all);
    mb_free(text);
    json_decref(root);
    if (rc == MB_EFULL)
        return rc;
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

/* One file's tree at a time. */
static int decode_cut(const char *json, const struct mb_manifest_cut *cut, const char *what,
                      struct mb_manifest *m, struct mb_err *err)
{
    size_t at = cut->begin + 1, begin, end;
    int rc = 0;

    while (rc == 0 && mb_manifest_cut_next(json, cut, &at, &begin, &end)) {
        json_error_t je;
        json_t *file = json_loadb(json + begin, end - begin, JSON_REJECT_DUPLICATES, &je);

        rc = file ? decode_file(file, what, m, err)
                  : mb_err_set(err, MB_ECORRUPT, "%s: entry %zu of files is not a JSON object: %s",
                               what, m->n_files, je.text);
        json_decref(file);
    }
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

    if (version < 1 || version > MB_MANIFEST_VERSION)
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
    m->is_claim = json_is_true(json_object_get(root, "claim"));
    return mb_manifest_set_writer(m, &writer, err);
}

/* All of it but the files, which are an empty list in it if they could be cut out. */
static json_t *load_head(const char *json, size_t n, struct mb_manifest_cut *cut, int *is_cut,
                         json_error_t *je)
{
    struct mb_buf text = {0};
    json_t *root = NULL;

    snprintf(je->text, sizeof(je->text), "out of memory");
    *is_cut = mb_manifest_cut(json, n, cut);
    if (!*is_cut)
        return json_loadb(json, n, JSON_REJECT_DUPLICATES, je);
    if (mb_buf_add(&text, json, cut->begin) == 0 && mb_buf_puts(&text, "[]") == 0 &&
        mb_buf_add(&text, json + cut->end, n - cut->end) == 0)
        root = json_loadb(mb_buf_str(&text), text.len, JSON_REJECT_DUPLICATES, je);
    mb_buf_close(&text);
    return root;
}

int mb_manifest_is_of_newer_version(const void *json, size_t n)
{
    struct mb_manifest_cut cut;
    json_error_t je = {0};
    int is_cut;
    json_t *root = load_head(json, n, &cut, &is_cut, &je);
    int is_newer = json_integer_value(json_object_get(root, "version")) > MB_MANIFEST_VERSION;

    json_decref(root);
    return is_newer;
}

static int decode_data(json_t *root, const char *what, struct mb_manifest *m, struct mb_err *err)
{
    json_t *data = json_object_get(root, "data");
    const char *text = json_string_value(data);
    int rc = !data || (text && text[0]) ? mb_manifest_set_data(m, text, err) : MB_EINVAL;

    if (rc == MB_EINVAL)
        return mb_err_set(err, MB_ECORRUPT, "%s: data names no directory below .mobula/", what);
    return rc;
}

int mb_manifest_decode(const void *json, size_t n, const char *what, struct mb_manifest *out,
                       struct mb_err *err)
{
    struct mb_manifest m = {0};
    int rc = mb_manifest_decode_any(json, n, what, &m, err);

    if (rc == 0 && m.is_claim) {
        rc = mb_err_set(err, MB_ENOENT,
                        "%s: job %s, attempt %u, is still uploading iteration %" PRId64, what,
                        m.job_id, m.attempt, m.iteration);
        mb_manifest_close(&m);
    } else if (rc == 0) {
        *out = m;
    }
    return rc;
}

int mb_manifest_decode_any(const void *json, size_t n, const char *what, struct mb_manifest *out,
                           struct mb_err *err)
{
    struct mb_manifest m = {0};
    struct mb_manifest_cut cut;
    json_error_t je = {0};
    int rc, is_cut;
    json_t *root = load_head(json, n, &cut, &is_cut, &je);
    json_t *files = json_object_get(root, "files");

    if (!root || !json_is_object(root)) {
        rc = mb_err_set(err, MB_ECORRUPT, "%s is not a JSON object: %s (line %d)", what, je.text,
                        je.line);
        goto out;
    }
    rc = decode_head(root, what, &m, err);
    if (!rc)
        rc = decode_data(root, what, &m, err);
    if (!rc && m.is_claim)
        goto out;
    if (!rc && !json_is_array(files))
        rc = mb_err_set(err, MB_ECORRUPT, "%s: files is missing", what);
    for (size_t i = 0; !rc && i < json_array_size(files); i++)
        rc = decode_file(json_array_get(files, i), what, &m, err);
    if (!rc && is_cut)
        rc = decode_cut(json, &cut, what, &m, err);
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
    if (!rc)
        rc = mb_manifest_set_data(&m, parts[0].data, err);
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
        else if (strcmp(text_of(p->data), text_of(m.data)) != 0)
            rc = mb_err_set(err, MB_ECORRUPT,
                            "part %u of iteration %" PRId64 " has its files at another place", rank,
                            m.iteration);
        if (!rc)
            rc = mb_manifest_add_all(&m, p->files, p->n_files, err);
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

int64_t mb_iteration_of_dir(const char *name)
{
    char same[MB_CHECKPOINT_KEY_MAX];
    int64_t n;

    if (!mb_starts_with(name, "iter_") ||
        mb_parse_i64(name + 5, 0, INT64_MAX, "iteration", &n, NULL) != MB_OK ||
        strcmp(mb_iteration_dir(n, same), name) != 0)
        return -1;
    return n;
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

size_t mb_latest_format(int64_t iteration, const void *there, size_t n, int is_touched,
                        uint64_t random, char out[MB_LATEST_MAX_BYTES])
{
    const unsigned char *s = there;
    size_t len = (size_t)snprintf(out, 24, "%" PRId64, iteration);

    /* One line feed may be of an editor. */
    is_touched |= s != NULL && n >= 2 && isspace(s[n - 1]) && isspace(s[n - 2]);
    for (int i = 0; i < 40 && is_touched; i++)
        out[len++] = (random >> i & 1) != 0 ? '\t' : ' ';
    return len;
}

int mb_latest_moves(int64_t now_at, int64_t iteration)
{
    return now_at < iteration;
}
