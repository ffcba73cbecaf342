/*
 *  1. The pointer, then one listing of everything below iter_.
 *  2. The manifests of those that have one, a few at a time: each file is looked for among the keys
 *     by bisection.
 *  3. A manifest that goes while we look (rm runs) makes its iteration an unfinished one.
 */
#include "agent/upload/inventory.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/str.h"

enum { TIMEOUT_MS = 60000, LIST_TIMEOUT_MS = 600000, LATEST_MAX_BYTES = 64, AT_ONCE = 8 };

const char *mb_inventory_state_name(enum mb_inventory_state state)
{
    static const char *const names[MB_INVENTORY_N_STATES] = {"whole", "damaged", "unfinished"};

    return names[state];
}

void mb_inventory_close(struct mb_inventory *inv)
{
    for (size_t i = 0; i < inv->n_keys; i++)
        mb_free(inv->keys[i].key);
    for (size_t i = 0; i < inv->n; i++) {
        mb_free(inv->iterations[i].job_id);
        mb_free(inv->iterations[i].bad);
    }
    mb_free(inv->keys);
    mb_free(inv->iterations);
    *inv = (struct mb_inventory){0};
}

struct mb_inventory_iteration *mb_inventory_find(const struct mb_inventory *inv, int64_t iteration)
{
    for (size_t i = 0; i < inv->n; i++)
        if (inv->iterations[i].iteration == iteration)
            return &inv->iterations[i];
    return NULL;
}

/* ---- pure ---- */

int64_t mb_iteration_of_key(const char *key)
{
    char dir[MB_CHECKPOINT_KEY_MAX];
    char *end = NULL;
    long long n;

    if (!mb_starts_with(key, "iter_") || key[5] < '0' || key[5] > '9')
        return -1;
    n = strtoll(key + 5, &end, 10);
    mb_iteration_dir(n, dir);
    return *end == '/' && strncmp(key, dir, strlen(dir)) == 0 && key[strlen(dir)] == '/' ? n : -1;
}

static int by_iteration(const void *a, const void *b)
{
    int64_t x = ((const struct mb_inventory_iteration *)a)->iteration;
    int64_t y = ((const struct mb_inventory_iteration *)b)->iteration;

    return (x > y) - (x < y);
}

int mb_inventory_group(struct mb_inventory *inv)
{
    int64_t last = -1;
    size_t n = 0;

    for (size_t i = 0; i < inv->n_keys; i++) {
        int64_t at = mb_iteration_of_key(inv->keys[i].key);

        n += at >= 0 && at != last;
        last = at;
    }
    inv->iterations = mb_calloc(n + 1, sizeof(*inv->iterations));
    if (!inv->iterations)
        return MB_ENOMEM;
    last = -1;
    for (size_t i = 0; i < inv->n_keys; i++) {
        int64_t at = mb_iteration_of_key(inv->keys[i].key);

        if (at >= 0 && at != last)
            inv->iterations[inv->n++] = (struct mb_inventory_iteration){
                .iteration = at, .state = MB_INVENTORY_UNFINISHED, .keys = &inv->keys[i]};
        last = at;
        if (at < 0)
            continue;
        inv->iterations[inv->n - 1].n_keys++;
        inv->iterations[inv->n - 1].stored_bytes += inv->keys[i].size_bytes;
    }
    if (inv->n > 1) /* iter_10000000 sorts before iter_9999999 */
        qsort(inv->iterations, inv->n, sizeof(*inv->iterations), by_iteration);
    return 0;
}

static int by_key(const void *a, const void *b)
{
    return strcmp(((const struct mb_inventory_key *)a)->key,
                  ((const struct mb_inventory_key *)b)->key);
}

static const struct mb_inventory_key *find_key(const struct mb_inventory_iteration *it,
                                               const char *key)
{
    struct mb_inventory_key wanted = {.key = (char *)(uintptr_t)key};

    return it->n_keys == 0 ? NULL : bsearch(&wanted, it->keys, it->n_keys, sizeof(wanted), by_key);
}

static int note_bad(struct mb_inventory_iteration *it, const char *what, const char *why)
{
    it->state = MB_INVENTORY_DAMAGED;
    if (it->n_bad++ > 0)
        return 0;
    it->bad = mb_asprintf("%s%s", what, why);
    return it->bad ? 0 : MB_ENOMEM;
}

static int judge_files(struct mb_inventory_iteration *it, const struct mb_manifest *m)
{
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < m->n_files; i++) {
        char *key = mb_manifest_file_key(it->iteration, m->data, m->files[i].path);
        const struct mb_inventory_key *have = key ? find_key(it, key) : NULL;

        it->total_bytes += m->files[i].size_bytes;
        if (!key)
            rc = MB_ENOMEM;
        else if (!have)
            rc = note_bad(it, m->files[i].path, " is not there");
        else if (have->size_bytes != m->files[i].size_bytes)
            rc = note_bad(it, m->files[i].path, " has another size");
        mb_free(key);
    }
    it->n_files = m->n_files;
    return rc;
}

int mb_inventory_judge(struct mb_inventory_iteration *it, const void *manifest, size_t n)
{
    struct mb_manifest m = {0};
    struct mb_err err = {0};
    int rc;

    it->state = MB_INVENTORY_UNFINISHED;
    if (!manifest)
        return 0;
    rc = mb_manifest_decode_any(manifest, n, "its manifest", &m, &err);
    if (rc == MB_ENOMEM)
        return rc;
    if (rc != 0)
        return note_bad(it, err.text, "");
    it->job_id = mb_strdup(m.job_id);
    it->attempt = m.attempt;
    it->is_claimed = m.is_claim;
    rc = it->job_id ? 0 : MB_ENOMEM;
    if (rc == 0 && !m.is_claim) {
        it->state = MB_INVENTORY_WHOLE;
        rc = m.iteration == it->iteration
                 ? judge_files(it, &m)
                 : note_bad(it, "its manifest is of another iteration", "");
    }
    mb_manifest_close(&m);
    return rc;
}

/* ---- the shell ---- */

struct look;

struct slot {
    struct look *l;
    struct mb_inventory_iteration *it; /* NULL: free */
};

struct look {
    struct mb_store *store;
    mb_inventory_cb cb;
    void *arg;
    struct mb_inventory inv;
    struct mb_err err;
    size_t next;
    unsigned in_flight;
    struct slot slots[AT_ONCE];
};

static void finish(struct look *l)
{
    if (l->err.code != 0)
        mb_inventory_close(&l->inv);
    l->cb(l->arg, &l->err, &l->inv);
    mb_free(l);
}

static void look_at_more(struct look *l);

static void on_manifest(void *arg, const struct mb_store_result *r)
{
    struct slot *s = arg;
    struct look *l = s->l;
    int rc = r->error == MB_ENOENT ? 0 : r->error;

    if (rc == 0 && mb_inventory_judge(s->it, r->error == 0 ? r->data : NULL, r->data_len) != 0)
        mb_err_set(&l->err, MB_ENOMEM, "out of memory");
    else if (rc != 0 && l->err.code == 0)
        mb_err_set(&l->err, rc, "%s", r->text);
    s->it = NULL;
    l->in_flight--;
    look_at_more(l);
}

static void look_at_more(struct look *l)
{
    for (size_t i = 0; i < AT_ONCE && l->err.code == 0; i++) {
        char key[MB_CHECKPOINT_KEY_MAX];

        if (l->slots[i].it)
            continue;
        while (l->next < l->inv.n &&
               !find_key(&l->inv.iterations[l->next],
                         mb_manifest_key(l->inv.iterations[l->next].iteration, key)))
            l->next++;
        if (l->next == l->inv.n)
            break;
        l->slots[i] = (struct slot){.l = l, .it = &l->inv.iterations[l->next++]};
        if (mb_store_get(l->store, key, MB_MANIFEST_MAX_BYTES, TIMEOUT_MS, on_manifest,
                         &l->slots[i], &l->err) == 0)
            l->in_flight++;
    }
    if (l->in_flight == 0)
        finish(l);
}

static void on_list(void *arg, const struct mb_store_result *r)
{
    struct look *l = arg;

    if (r->error != 0)
        mb_err_set(&l->err, r->error, "%s", r->text);
    else if (!(l->inv.keys = mb_calloc(r->n_entries + 1, sizeof(*l->inv.keys))))
        mb_err_set(&l->err, MB_ENOMEM, "out of memory");
    for (size_t i = 0; l->err.code == 0 && i < r->n_entries; i++) {
        struct mb_inventory_key *k = &l->inv.keys[l->inv.n_keys];

        *k = (struct mb_inventory_key){mb_strdup(r->entries[i].key), r->entries[i].size_bytes};
        if (!k->key)
            mb_err_set(&l->err, MB_ENOMEM, "out of memory");
        else
            l->inv.n_keys++;
    }
    if (l->err.code == 0 && mb_inventory_group(&l->inv) != 0)
        mb_err_set(&l->err, MB_ENOMEM, "out of memory");
    if (l->err.code != 0)
        finish(l);
    else
        look_at_more(l);
}

static void on_latest(void *arg, const struct mb_store_result *r)
{
    struct look *l = arg;
    struct mb_err ignored;

    l->inv.latest = -1;
    if (r->error != 0 && r->error != MB_ENOENT && r->error != MB_EFULL)
        mb_err_set(&l->err, r->error, "%s", r->text);
    else if (r->error == MB_EFULL ||
             (r->error == 0 &&
              mb_latest_parse(r->data, r->data_len, &l->inv.latest, &ignored) != 0))
        l->inv.latest = -2;
    if (l->err.code != 0 ||
        mb_store_list(l->store, "iter_", LIST_TIMEOUT_MS, on_list, l, &l->err) != 0)
        finish(l);
}

int mb_inventory_start(struct mb_store *store, mb_inventory_cb cb, void *arg, struct mb_err *err)
{
    struct look *l = mb_calloc(1, sizeof(*l));
    int rc;

    if (!l)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    l->store = store;
    l->cb = cb;
    l->arg = arg;
    rc = mb_store_get(store, MB_LATEST_KEY, LATEST_MAX_BYTES, TIMEOUT_MS, on_latest, l, err);
    if (rc != 0)
        mb_free(l);
    return rc;
}
