/* The commit of an iteration in a directory as the store. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <uv.h>
#include <cmocka.h>
#include "agent/upload/commit.h"
#include "agent/upload/remove.h"
#include "base/alloc.h"
#include "base/buf.h"
#include "base/clock.h"
#include "base/fs.h"

enum { DEADLINE_MS = 100000, ITERATION = 10, NEWER = 20 };

#define TOO_LONG                                                                                   \
    "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"

static const struct mb_manifest_writer writer = {"job", "aa", 1};

struct world {
    char dir[64];
    uv_loop_t loop;
    struct mb_store *store;
    uv_timer_t repair, deadline;
    int done, closed, is_moved;
    struct mb_err err;
    struct mb_err removed; /* how the removal ended */
    int n_removals;
};

/* ---- a pointer that is put late ---- */

/* The request that moves the pointer, held while a removal runs: as a node that was stopped, or a
 * network that lost a packet, would send it. */
static struct {
    struct world *w; /* NULL: nothing is held */
    int force;
    struct mb_store *store;
    char text[64], etag[200];
    size_t n;
    enum mb_store_if cond;
    mb_store_cb cb;
    void *arg;
    struct mb_inventory_key keys[4];
    struct mb_inventory_iteration its[2];
    struct mb_inventory inv;
} held;

int __real_mb_store_put(struct mb_store *s, const char *key, const void *p, size_t n,
                        enum mb_store_if cond, const char *etag, uint64_t timeout_ms,
                        mb_store_cb cb, void *arg, struct mb_err *err);
int __wrap_mb_store_put(struct mb_store *s, const char *key, const void *p, size_t n,
                        enum mb_store_if cond, const char *etag, uint64_t timeout_ms,
                        mb_store_cb cb, void *arg, struct mb_err *err);

static void on_removed(void *arg, const struct mb_err *err, size_t n_removed)
{
    struct mb_err ignored;

    (void)arg;
    (void)n_removed;
    held.w->removed = *err;
    held.w->n_removals++;
    assert_int_equal(__real_mb_store_put(held.store, MB_LATEST_KEY, held.text, held.n, held.cond,
                                         held.etag, 60000, held.cb, held.arg, &ignored),
                     0);
}

int __wrap_mb_store_put(struct mb_store *s, const char *key, const void *p, size_t n,
                        enum mb_store_if cond, const char *etag, uint64_t timeout_ms,
                        mb_store_cb cb, void *arg, struct mb_err *err)
{
    if (held.w == NULL || held.w->n_removals > 0 || held.store != NULL ||
        strcmp(key, MB_LATEST_KEY) != 0)
        return __real_mb_store_put(s, key, p, n, cond, etag, timeout_ms, cb, arg, err);
    held.store = s;
    held.n = n;
    held.cond = cond;
    held.cb = cb;
    held.arg = arg;
    memcpy(held.text, p, n);
    snprintf(held.etag, sizeof(held.etag), "%s", etag != NULL ? etag : "");
    return mb_remove_start(
        s, &(struct mb_remove_opts){.inv = &held.inv, .it = &held.its[1], .force = held.force},
        on_removed, NULL, err);
}

/* Before the pointer's head is looked at, this one's store has another pointer. */
static struct world *mender;

int __real_mb_store_head(struct mb_store *s, const char *key, uint64_t timeout_ms, mb_store_cb cb,
                         void *arg, struct mb_err *err);
int __wrap_mb_store_head(struct mb_store *s, const char *key, uint64_t timeout_ms, mb_store_cb cb,
                         void *arg, struct mb_err *err);
static void write_pointer(const struct world *w, const char *text);

int __wrap_mb_store_head(struct mb_store *s, const char *key, uint64_t timeout_ms, mb_store_cb cb,
                         void *arg, struct mb_err *err)
{
    if (mender != NULL && strcmp(key, MB_LATEST_KEY) == 0) {
        write_pointer(mender, "20");
        mender = NULL;
    }
    return __real_mb_store_head(s, key, timeout_ms, cb, arg, err);
}

/* The next move of the pointer waits until ITERATION is removed; an older one is whole. */
static void hold_pointer(struct world *w, int64_t latest)
{
    static char keys[2][MB_CHECKPOINT_KEY_MAX];

    memset(&held, 0, sizeof(held));
    held.w = w;
    held.keys[0].key = mb_manifest_key(ITERATION, keys[0]);
    held.keys[1].key = mb_part_key(ITERATION, 0, 1, keys[1]);
    held.its[0] = (struct mb_inventory_iteration){.iteration = 5, .state = MB_INVENTORY_WHOLE};
    held.its[1] = (struct mb_inventory_iteration){
        .iteration = ITERATION, .state = MB_INVENTORY_WHOLE, .keys = held.keys, .n_keys = 2};
    held.inv = (struct mb_inventory){.latest = latest, .iterations = held.its, .n = 2};
}

static void write_part(const struct world *w, const char *text)
{
    char key[MB_CHECKPOINT_KEY_MAX], path[300], *slash;

    snprintf(path, sizeof(path), "%s/%s", w->dir, mb_part_key(ITERATION, 0, 1, key));
    slash = strrchr(path, '/');
    *slash = '\0';
    assert_int_equal(mb_fs_mkdir_p(path, 0755, NULL), 0);
    *slash = '/';
    assert_int_equal(mb_fs_write_atomic(path, text, strlen(text), 0644, NULL), 0);
}

static void write_good_part(const struct world *w)
{
    struct mb_manifest m = {.iteration = ITERATION, .num_nodes = 1};
    char *text;

    assert_int_equal(mb_manifest_set_writer(&m, &writer, NULL), 0);
    assert_int_equal(mb_manifest_add(&m, "a", 1, 2, NULL), 0);
    assert_int_equal(mb_manifest_encode(&m, &text, NULL), 0);
    write_part(w, text);
    mb_free(text);
    mb_manifest_close(&m);
}

static void write_pointer(const struct world *w, const char *text)
{
    char path[300];

    snprintf(path, sizeof(path), "%s/" MB_LATEST_KEY, w->dir);
    assert_int_equal(mb_fs_write_atomic(path, text, strlen(text), 0644, NULL), 0);
}

static int64_t read_pointer(const struct world *w)
{
    struct mb_buf text = {0};
    int64_t iteration = -1;
    char path[300];

    snprintf(path, sizeof(path), "%s/" MB_LATEST_KEY, w->dir);
    if (mb_fs_read(path, 1000, &text, NULL) == 0)
        assert_int_equal(mb_latest_parse(text.data, text.len, &iteration, NULL), 0);
    mb_buf_close(&text);
    return iteration;
}

/* What stands at the manifest's key. */
static void write_manifest(const struct world *w, const char *group, int is_claim)
{
    const struct mb_manifest_writer by = {"job", group, 1};
    struct mb_manifest m = {
        .iteration = ITERATION, .node_rank = -1, .num_nodes = 1, .is_claim = is_claim};
    char key[MB_CHECKPOINT_KEY_MAX], path[300], *text;

    write_part(w, "");
    assert_int_equal(mb_manifest_set_writer(&m, &by, NULL), 0);
    assert_int_equal(mb_manifest_encode(&m, &text, NULL), 0);
    snprintf(path, sizeof(path), "%s/%s", w->dir, mb_manifest_key(ITERATION, key));
    assert_int_equal(mb_fs_write_atomic(path, text, strlen(text), 0644, NULL), 0);
    mb_free(text);
    mb_manifest_close(&m);
}

static int exists(const struct world *w, const char *key)
{
    char path[300];

    snprintf(path, sizeof(path), "%s/%s", w->dir, key);
    return mb_fs_exists(path);
}

static int setup(void **state)
{
    struct world *w = calloc(1, sizeof(*w));

    memset(&held, 0, sizeof(held));
    strcpy(w->dir, "/tmp/mobula-commit-XXXXXX");
    assert_non_null(mkdtemp(w->dir));
    assert_int_equal(uv_loop_init(&w->loop), 0);
    assert_int_equal(mb_store_open(&w->loop, w->dir, &w->store, NULL), 0);
    uv_timer_init(&w->loop, &w->repair);
    uv_timer_init(&w->loop, &w->deadline);
    w->repair.data = w->deadline.data = w;
    *state = w;
    return 0;
}

static void on_closed(void *arg)
{
    ((struct world *)arg)->closed = 1;
}

static int teardown(void **state)
{
    struct world *w = *state;

    mb_store_close(w->store, on_closed, w);
    uv_close((uv_handle_t *)&w->repair, NULL);
    uv_close((uv_handle_t *)&w->deadline, NULL);
    uv_run(&w->loop, UV_RUN_DEFAULT);
    assert_int_equal(w->closed, 1);
    assert_int_equal(uv_loop_close(&w->loop), 0);
    mb_fs_remove_tree(w->dir, NULL);
    free(w);
    return 0;
}

static void on_committed(void *arg, const struct mb_err *err, int is_moved)
{
    struct world *w = arg;

    w->is_moved = is_moved;
    w->done++;
    w->err = *err;
    uv_stop(&w->loop);
}

static void on_repair(uv_timer_t *t)
{
    write_good_part(t->data);
}

static void on_deadline(uv_timer_t *t)
{
    (void)t;
    print_error("deadline\n");
    _exit(65);
}

static void commit(struct world *w, uint64_t give_up_at_ms)
{
    struct mb_commit_opts opts = {
        .iteration = ITERATION, .num_nodes = 1, .writer = writer, .give_up_at_ms = give_up_at_ms};
    struct mb_commit *c;

    assert_int_equal(mb_commit_start(&w->loop, w->store, &opts, on_committed, w, &c, NULL), 0);
    uv_timer_start(&w->deadline, on_deadline, DEADLINE_MS, 0);
    while (!w->done)
        uv_run(&w->loop, UV_RUN_DEFAULT);
    uv_timer_stop(&w->deadline);
    assert_int_equal(w->done, 1);
}

static void test_parts_that_do_not_come_are_given_up(void **state)
{
    struct world *w = *state;
    char key[MB_CHECKPOINT_KEY_MAX], path[300];

    write_manifest(w, "aa", 1);
    snprintf(path, sizeof(path), "%s/%s", w->dir, mb_part_key(ITERATION, 0, 1, key));
    assert_int_equal(unlink(path), 0);
    commit(w, mb_mono_ms() + 1);
    assert_int_equal(w->err.code, MB_ETIMEOUT);
    assert_non_null(strstr(w->err.text, "part of node 0"));
}

/* Without its claim, or under that of somebody else, nothing becomes visible. */
static void test_who_has_no_claim(void **state)
{
    struct world *w = *state;
    char key[MB_CHECKPOINT_KEY_MAX];

    write_good_part(w);
    commit(w, 0);
    assert_int_equal(w->err.code, MB_ESTATE);
    for (int is_claim = 0; is_claim < 2; is_claim++) {
        write_manifest(w, "bb", is_claim);
        write_good_part(w);
        w->done = 0;
        commit(w, 0);
        assert_int_equal(w->err.code, MB_ESTATE);
    }
    assert_false(exists(w, MB_LATEST_KEY));
    assert_true(exists(w, mb_manifest_key(ITERATION, key)));
}

static void test_the_pointer_is_moved_once(void **state)
{
    struct world *w = *state;

    write_manifest(w, "aa", 1);
    write_good_part(w);
    commit(w, 0);
    assert_true(w->err.code == 0 && w->is_moved);
    w->done = 0;
    commit(w, 0);
    assert_true(w->err.code == 0 && !w->is_moved);
}

/* The time to wait for others is over; one answer that cannot be used is no reason to stop. */
static void test_trouble_is_tried_again(void **state)
{
    struct world *w = *state;

    write_manifest(w, "aa", 1);
    write_part(w, "{");
    uv_timer_start(&w->repair, on_repair, 100, 0);
    commit(w, 1);
    assert_int_equal(w->err.code, 0);
}

/* One whole iteration below the one that is committed. */
static void write_older(const struct world *w)
{
    char key[MB_CHECKPOINT_KEY_MAX], path[300], *slash;

    snprintf(path, sizeof(path), "%s/%s", w->dir, mb_manifest_key(5, key));
    slash = strrchr(path, '/');
    *slash = '\0';
    assert_int_equal(mb_fs_mkdir_p(path, 0755, NULL), 0);
    *slash = '/';
    assert_int_equal(mb_fs_write_atomic(path, "{}", 2, 0644, NULL), 0);
}

/* Between the look at the pointer and its move the iteration is removed: the pointer must not come
 * to name it, however late the move arrives. */
static void test_removed_before_the_pointer_moves(void **state)
{
    struct world *w = *state;

    write_older(w);
    write_manifest(w, "aa", 1);
    write_good_part(w);
    write_pointer(w, "5");
    hold_pointer(w, 5);
    commit(w, 0);
    assert_int_equal(w->n_removals, 1);
    assert_int_equal(w->removed.code, 0);
    assert_int_equal(w->err.code, MB_ESTATE);
    assert_non_null(strstr(w->err.text, "removed"));
    assert_int_equal(read_pointer(w), 5);
}

/* ITERATION is removed by force before its pointer moves; latest as of hold_pointer(). */
static void remove_before_the_move(struct world *w, int64_t latest)
{
    write_manifest(w, "aa", 1);
    write_good_part(w);
    hold_pointer(w, latest);
    held.force = 1;
    commit(w, 0);
    assert_int_equal(w->n_removals, 1);
    assert_int_equal(w->removed.code, 0);
    assert_int_equal(w->err.code, MB_ESTATE);
    assert_int_equal(read_pointer(w), 5);
}

/* Without a pointer, too: the removal leaves one, to what is whole. */
static void test_removed_before_there_is_a_pointer(void **state)
{
    struct world *w = *state;

    write_older(w);
    remove_before_the_move(w, -1);
}

/* Without a pointer a reader takes the newest whole one: that one is not removed unasked. */
static void test_the_newest_without_a_pointer_stays(void **state)
{
    struct world *w = *state;

    write_older(w);
    write_manifest(w, "aa", 1);
    write_good_part(w);
    hold_pointer(w, -1);
    commit(w, 0);
    assert_int_equal(w->removed.code, MB_ESTATE);
    assert_int_equal(w->err.code, 0);
    assert_int_equal(read_pointer(w), ITERATION);
}

/* A pointer that is too long to be one says nothing of what is in use, as any that is damaged. */
static void test_removed_when_the_pointer_is_too_long(void **state)
{
    struct world *w = *state;

    write_older(w);
    write_pointer(w, TOO_LONG);
    remove_before_the_move(w, -2);
}

/* What no iteration can be, short or long, is replaced. */
static void test_a_damaged_pointer(void **state)
{
    struct world *w = *state;
    static const char *const texts[] = {TOO_LONG, "x"};

    write_manifest(w, "aa", 1);
    write_good_part(w);
    for (size_t i = 0; i < 2; i++) {
        write_pointer(w, texts[i]);
        w->done = 0;
        commit(w, mb_mono_ms() + 5000);
        assert_int_equal(w->err.code, 0);
        assert_int_equal(read_pointer(w), ITERATION);
    }
}

/* A long one is looked at twice: what somebody puts in between is newer, and stays. */
static void test_a_damaged_pointer_is_mended_meanwhile(void **state)
{
    struct world *w = *state;

    write_manifest(w, "aa", 1);
    write_good_part(w);
    write_pointer(w, TOO_LONG);
    mender = w;
    commit(w, mb_mono_ms() + 5000);
    assert_null(mender);
    assert_int_equal(w->err.code, 0);
    assert_int_equal(read_pointer(w), NEWER);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_parts_that_do_not_come_are_given_up, setup, teardown),
        cmocka_unit_test_setup_teardown(test_who_has_no_claim, setup, teardown),
        cmocka_unit_test_setup_teardown(test_the_pointer_is_moved_once, setup, teardown),
        cmocka_unit_test_setup_teardown(test_trouble_is_tried_again, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_damaged_pointer, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_damaged_pointer_is_mended_meanwhile, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_removed_when_the_pointer_is_too_long, setup, teardown),
        cmocka_unit_test_setup_teardown(test_removed_before_the_pointer_moves, setup, teardown),
        cmocka_unit_test_setup_teardown(test_removed_before_there_is_a_pointer, setup, teardown),
        cmocka_unit_test_setup_teardown(test_the_newest_without_a_pointer_stays, setup, teardown)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
