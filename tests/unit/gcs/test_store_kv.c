/* The tables of a job agent: what is in the file here and in the KV of a head, over restarts of
 * both. The head is ours. */
#include "head_fixture.h"
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include "base/alloc.h"
#include "gcs/store_kv.h"

#define PREFIX "record_"

struct kv {
    struct fixture *f;
    char path[128];
    struct mb_kv_store *s;
    struct mb_tables *tables;
    int synced, failed, n_foreign, n_found, n_nodes, n_judged, refuses;
    enum mb_kv_store_verdict verdict;
    int holds;            /* nothing is published behind a sync */
    uv_timer_t meanwhile; /* between the plan of a sync and its first step */
    char foreign[64], found[64];
};

static void on_synced(void *arg)
{
    struct kv *k = arg;

    if (k->holds)
        mb_kv_store_hold(k->s);
    k->synced = 1;
}

static void on_failed(void *arg, const struct mb_err *err)
{
    (void)err;
    ((struct kv *)arg)->failed = 1;
}

static int is_settled(void *arg, const char *id)
{
    (void)arg;
    return strcmp(id, "ended") == 0;
}

static void delete_between(uv_timer_t *timer)
{
    struct kv *k = timer->data;
    struct mb_err err = {0};

    assert_int_equal(mb_tables_del(k->tables, MB_TABLES_KV, mb_blob_str("job"),
                                   mb_blob_str(PREFIX "a"), NULL, NULL, &err),
                     0);
    uv_close((uv_handle_t *)timer, NULL);
}

static int on_foreign(void *arg, const char *id)
{
    struct kv *k = arg;

    if (k->meanwhile.data)
        uv_timer_start(&k->meanwhile, delete_between, 0, 0);
    k->n_foreign++;
    snprintf(k->foreign, sizeof k->foreign, "%s", id);
    return k->refuses ? MB_ESTATE : 0;
}

static int on_nodes(void *arg, const struct mb_gcs_node *nodes, size_t n)
{
    struct kv *k = arg;

    (void)nodes;
    (void)n;
    k->n_nodes++;
    return 0;
}

static enum mb_kv_store_verdict judge(void *arg, const char *id, struct mb_blob value)
{
    struct kv *k = arg;

    assert_true(k->n_nodes > 0 && value.n > 0);
    assert_int_equal(k->n_found, 0); /* not before all are judged */
    k->n_judged++;
    snprintf(k->foreign, sizeof k->foreign, "%s", id);
    return k->verdict;
}

static void on_found(void *arg, struct mb_blob key, struct mb_blob value)
{
    struct kv *k = arg;

    k->n_found++;
    snprintf(k->found, sizeof k->found, "%.*s=%.*s", (int)key.n, (const char *)key.p, (int)value.n,
             (const char *)value.p);
}

static void open_kv(struct kv *k)
{
    static const struct mb_kv_store_ops ops = {on_synced, on_failed, is_settled, on_foreign,
                                               on_nodes,  judge,     on_found};
    struct mb_err err = {0};

    if (mb_kv_store_open(&k->f->loop, k->path, PREFIX, &ops, k, &k->s, &k->tables, &err) != 0)
        fail_msg("%s", err.text);
}

static void close_kv(struct kv *k)
{
    int closed = 0;

    mb_tables_close(k->tables, fixture_set_flag, &closed);
    loop_until(&k->f->loop, &closed);
}

static void sync_kv(struct kv *k)
{
    k->synced = 0;
    mb_kv_store_sync(k->s, k->f->gcs, 0);
    loop_until(&k->f->loop, &k->synced);
}

static void on_written(void *arg, const struct mb_err *err)
{
    *(int *)arg = err->code == 0 ? 1 : -1;
}

static void put(struct kv *k, const char *ns, const char *key, const char *value, int *done)
{
    struct mb_err err = {0};

    *done = 0;
    assert_int_equal(mb_tables_put(k->tables, MB_TABLES_KV, mb_blob_str(ns), mb_blob_str(key),
                                   mb_blob_str(value), on_written, done, &err),
                     0);
}

static void put_and_wait(struct kv *k, const char *ns, const char *key, const char *value)
{
    int done;

    put(k, ns, key, value, &done);
    loop_until(&k->f->loop, &done);
    assert_int_equal(done, 1);
}

static void del_and_wait(struct kv *k, const char *ns, const char *key)
{
    struct mb_err err = {0};
    int done = 0;

    assert_int_equal(mb_tables_del(k->tables, MB_TABLES_KV, mb_blob_str(ns), mb_blob_str(key),
                                   on_written, &done, &err),
                     0);
    loop_until(&k->f->loop, &done);
    assert_int_equal(done, 1);
}

static void head_has(struct kv *k, const char *ns, const char *key, const char *value)
{
    struct result r;

    DO(k->f, r, mb_gcs_kv_get(k->f->gcs, ns, key, 5000, fixture_on_value, &r, NULL, &e));
    if (!value)
        assert_int_equal(r.code, MB_ENOENT);
    else
        assert_string_equal(r.value, value);
}

static void head_put(struct kv *k, const char *ns, const char *key, const char *value)
{
    struct result r;

    DO(k->f, r,
       mb_gcs_kv_put(k->f->gcs, ns, key, value, strlen(value), 1, 5000, fixture_on_count, &r, NULL,
                     &e));
    assert_int_equal(r.code, 0);
}

/* The text of this store's marks, at one of them; 33 bytes. */
static const char *head_mark(struct kv *k, const char *id, char *out)
{
    struct result r;
    char key[64];

    snprintf(key, sizeof key, MB_KV_STORE_MARK "%s", id);
    DO(k->f, r, mb_gcs_kv_get(k->f->gcs, "mobula", key, 5000, fixture_on_value, &r, NULL, &e));
    assert_int_equal(r.code, 0);
    assert_int_equal(strlen(r.value), 32);
    return strcpy(out, r.value);
}

static struct kv *start(void **state)
{
    static struct kv k;

    memset(&k, 0, sizeof k);
    k.f = *state;
    k.verdict = MB_KV_STORE_ADOPT;
    snprintf(k.path, sizeof k.path, "%s/jobs.sqlite", k.f->dir);
    open_kv(&k);
    return &k;
}

/* In order, and with a mark before it; other keys stay here. */
static void a_write_waits_for_the_head(void **state)
{
    struct kv *k = start(state);
    int first, second;
    char mark[33];

    put(k, "job", PREFIX "a", "1", &first);
    put(k, "mobula", "private", "x", &second);
    assert_int_equal(first, 0);
    sync_kv(k);
    loop_until(&k->f->loop, &second);
    assert_int_equal(first, 1);
    head_has(k, "job", PREFIX "a", "1");
    head_mark(k, "a", mark);
    head_has(k, "mobula", "private", NULL);
    put_and_wait(k, "job", PREFIX "a", "2");
    head_has(k, "job", PREFIX "a", "2");
    del_and_wait(k, "job", PREFIX "a");
    head_has(k, "job", PREFIX "a", NULL);
    head_has(k, "mobula", MB_KV_STORE_MARK "a", NULL);
    close_kv(k);
}

/* Closed while the head is away: kept here, and published when it is asked again. */
static void what_is_not_published_is_kept_here(void **state)
{
    struct kv *k = start(state);
    struct mb_blob value;
    int done;

    sync_kv(k);
    put_and_wait(k, "job", PREFIX "gone", "1");
    mb_kv_store_hold(k->s);
    put(k, "job", PREFIX "a", "1", &done);
    struct mb_err err = {0};
    assert_int_equal(mb_tables_del(k->tables, MB_TABLES_KV, mb_blob_str("job"),
                                   mb_blob_str(PREFIX "gone"), NULL, NULL, &err),
                     0);
    close_kv(k);
    head_has(k, "job", PREFIX "a", NULL);
    head_has(k, "job", PREFIX "gone", "1");
    open_kv(k);
    assert_true(mb_tables_get(k->tables, MB_TABLES_KV, mb_blob_str("job"), mb_blob_str(PREFIX "a"),
                              &value));
    sync_kv(k);
    head_has(k, "job", PREFIX "a", "1");
    head_has(k, "job", PREFIX "gone", NULL); /* not found as somebody's: deleted here */
    assert_int_equal(k->n_found + k->n_foreign, 0);
    close_kv(k);
}

static void a_head_without_memory_is_told_everything(void **state)
{
    struct kv *k = start(state);
    struct result r;
    char mark[33];

    sync_kv(k);
    put_and_wait(k, "job", PREFIX "a", "1");
    DO(k->f, r, mb_gcs_kv_del(k->f->gcs, "job", "", 1, 5000, fixture_on_count, &r, NULL, &e));
    DO(k->f, r,
       mb_gcs_kv_del(k->f->gcs, "mobula", MB_KV_STORE_MARK, 1, 5000, fixture_on_count, &r, NULL,
                     &e));
    head_has(k, "job", PREFIX "a", NULL);
    sync_kv(k);
    head_has(k, "job", PREFIX "a", "1");
    head_mark(k, "a", mark);
    close_kv(k);
}

static void records_of_others_are_told(void **state)
{
    struct kv *k = start(state);

    head_put(k, "job", PREFIX "theirs", "1");
    k->refuses = 1;
    mb_kv_store_sync(k->s, k->f->gcs, 0);
    loop_until(&k->f->loop, &k->failed);
    assert_string_equal(k->foreign, "theirs");
    assert_false(mb_kv_store_has_served(k->s, mb_gcs_cluster_id(k->f->gcs)));
    k->refuses = 0;
    sync_kv(k);
    assert_int_equal(k->n_foreign, 2);
    head_has(k, "job", PREFIX "theirs", "1");
    assert_true(mb_kv_store_has_served(k->s, mb_gcs_cluster_id(k->f->gcs)));
    close_kv(k);
}

/* The node of its store is gone, and what was published: ours from then on, over a restart too. */
static void records_of_a_lost_directory_are_found(void **state)
{
    struct kv *k = start(state);
    char mark[33], again[33];

    head_put(k, "mobula", MB_KV_STORE_MARK "old", "1");
    head_put(k, "job", PREFIX "old", "text");
    head_put(k, "mobula", MB_KV_STORE_MARK "older", "1");
    head_put(k, "job", PREFIX "older", "text");
    sync_kv(k);
    assert_int_equal(k->n_judged, 2);
    assert_int_equal(k->n_nodes, 1);
    assert_int_equal(k->n_found, 2);
    assert_non_null(strstr(k->found, "=text"));
    head_has(k, "job", PREFIX "old", "text");
    put_and_wait(k, "job", PREFIX "old", "text");
    head_mark(k, "old", mark);
    close_kv(k);
    open_kv(k);
    k->n_found = 0;
    sync_kv(k);
    put_and_wait(k, "job", PREFIX "new", "text");
    assert_string_equal(head_mark(k, "new", again), mark);
    close_kv(k);
}

/* Its node lives: neither taken nor deleted, also when this store has served the cluster before. */
static void records_of_another_store_are_left(void **state)
{
    struct kv *k = start(state);

    sync_kv(k);
    put_and_wait(k, "job", PREFIX "a", "1");
    head_put(k, "mobula", MB_KV_STORE_MARK "b", "0123456789abcdef0123456789abcdef");
    head_put(k, "job", PREFIX "b", "text");
    k->verdict = MB_KV_STORE_LEAVE;
    sync_kv(k);
    assert_string_equal(k->foreign, "b");
    head_has(k, "job", PREFIX "b", "text");
    head_has(k, "mobula", MB_KV_STORE_MARK "b", "0123456789abcdef0123456789abcdef");
    k->verdict = MB_KV_STORE_REFUSE;
    mb_kv_store_sync(k->s, k->f->gcs, 0);
    loop_until(&k->f->loop, &k->failed);
    assert_int_equal(k->n_found, 0);
    head_has(k, "job", PREFIX "b", "text");
    close_kv(k);
}

/* Except what may still change, and what is not there; everything after the head was away. */
static void a_sync_leaves_what_is_settled(void **state)
{
    struct kv *k = start(state);
    struct result r;

    sync_kv(k);
    put_and_wait(k, "job", PREFIX "ended", "1");
    put_and_wait(k, "job", PREFIX "live", "1");
    sync_kv(k);
    head_put(k, "job", PREFIX "ended", "other");
    head_put(k, "job", PREFIX "live", "other");
    sync_kv(k);
    head_has(k, "job", PREFIX "ended", "other");
    head_has(k, "job", PREFIX "live", "1");
    DO(k->f, r,
       mb_gcs_kv_del(k->f->gcs, "job", PREFIX "ended", 0, 5000, fixture_on_count, &r, NULL, &e));
    sync_kv(k);
    head_has(k, "job", PREFIX "ended", "1");
    head_put(k, "job", PREFIX "ended", "other");
    mb_kv_store_hold(k->s);
    sync_kv(k);
    head_has(k, "job", PREFIX "ended", "1");
    head_put(k, "job", PREFIX "ended", "other");
    k->synced = 0;
    mb_kv_store_sync(k->s, k->f->gcs, 1);
    loop_until(&k->f->loop, &k->synced);
    head_has(k, "job", PREFIX "ended", "1");
    close_kv(k);
}

/* Neither the record, nor a mark for it, nor a text that is no record. */
static void a_record_deleted_while_a_sync_is_under_way_is_not_put(void **state)
{
    struct kv *k = start(state);
    int done;

    put(k, "job", PREFIX "a", "text", &done);
    put(k, "job", PREFIX "b", "text", &done);
    head_put(k, "job", PREFIX "theirs", "1");
    uv_timer_init(&k->f->loop, &k->meanwhile);
    k->meanwhile.data = k;
    k->holds = 1;
    sync_kv(k);
    head_has(k, "job", PREFIX "a", NULL);
    head_has(k, "mobula", MB_KV_STORE_MARK "a", NULL);
    head_has(k, "job", PREFIX "b", "text");
    close_kv(k);
}

/* Each allocation of a life fails once: an error is told, nothing hangs, the file stays whole. */
static void memory_running_out(void **state)
{
    struct kv *k = start(state);

    sync_kv(k);
    for (unsigned long n = 1; n < 16; n++) {
        struct mb_err err = {0};
        int done = 0;

        mb_alloc_fail_nth(n);
        int rc = mb_tables_put(k->tables, MB_TABLES_KV, mb_blob_str("job"), mb_blob_str(PREFIX "m"),
                               mb_blob_str("1"), on_written, &done, &err);
        if (rc == 0)
            loop_until(&k->f->loop, &done);
        mb_alloc_fail_nth(0);
    }
    put_and_wait(k, "job", PREFIX "m", "last");
    head_has(k, "job", PREFIX "m", "last");
    close_kv(k);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_write_waits_for_the_head, fixture_setup,
                                        fixture_teardown),
        cmocka_unit_test_setup_teardown(what_is_not_published_is_kept_here, fixture_setup,
                                        fixture_teardown),
        cmocka_unit_test_setup_teardown(a_head_without_memory_is_told_everything, fixture_setup,
                                        fixture_teardown),
        cmocka_unit_test_setup_teardown(records_of_others_are_told, fixture_setup,
                                        fixture_teardown),
        cmocka_unit_test_setup_teardown(records_of_a_lost_directory_are_found, fixture_setup,
                                        fixture_teardown),
        cmocka_unit_test_setup_teardown(records_of_another_store_are_left, fixture_setup,
                                        fixture_teardown),
        cmocka_unit_test_setup_teardown(a_sync_leaves_what_is_settled, fixture_setup,
                                        fixture_teardown),
        cmocka_unit_test_setup_teardown(a_record_deleted_while_a_sync_is_under_way_is_not_put,
                                        fixture_setup, fixture_teardown),
        cmocka_unit_test_setup_teardown(memory_running_out, fixture_setup, fixture_teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
