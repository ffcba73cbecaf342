/*
 * Whole uploaders on one loop, with a directory as the store and a reader that looks after every
 * turn of the loop: what the latest pointer names is whole, always, whoever saves the same
 * iteration into the same place, and whenever one of them is killed.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <uv.h>
#include <cmocka.h>
#include "agent/upload/manifest.h"
#include "agent/upload/upload.h"
#include "base/alloc.h"
#include "base/buf.h"
#include "base/checksum.h"
#include "base/fs.h"
#include "nodes.h"

enum { DEADLINE_MS = 60000, TURNS = 200, N_FILES = 3, MAX_FILES = 300 };

struct world {
    struct place at;
    uv_check_t reader;
    uint64_t n_reads;
    int64_t newest; /* the pointer never goes back */
};

/* ---- the reader ---- */

static int read_file(const char *path, struct mb_buf *out)
{
    return mb_fs_read(path, 1 << 20, out, NULL) == MB_OK;
}

static void check_files(struct world *w, const struct mb_manifest *m)
{
    for (size_t i = 0; i < m->n_files; i++) {
        char *key = mb_manifest_file_key(m->iteration, m->data, m->files[i].path);
        char *path = mb_asprintf("%s/store/%s", w->at.dir, key);
        struct mb_buf bytes = {0};

        if (!read_file(path, &bytes))
            fail_msg("latest names iteration %d, and %s is missing", (int)m->iteration, key);
        if (bytes.len != m->files[i].size_bytes ||
            mb_crc64nvme(0, mb_buf_str(&bytes), bytes.len) != m->files[i].crc64nvme)
            fail_msg("latest names iteration %d, and %s is another file", (int)m->iteration, key);
        mb_buf_close(&bytes);
        mb_free(path);
        mb_free(key);
    }
}

static void check_store(struct world *w)
{
    char path[300], key[MB_CHECKPOINT_KEY_MAX];
    struct mb_buf bytes = {0};
    struct mb_manifest m = {0};
    struct mb_err err = {0};
    int64_t latest = -1;

    snprintf(path, sizeof(path), "%s/store/" MB_LATEST_KEY, w->at.dir);
    if (!read_file(path, &bytes))
        return;
    assert_int_equal(mb_latest_parse(mb_buf_str(&bytes), bytes.len, &latest, NULL), 0);
    mb_buf_reset(&bytes);
    if (latest < w->newest)
        fail_msg("latest went from %d to %d", (int)w->newest, (int)latest);
    w->newest = latest;
    snprintf(path, sizeof(path), "%s/store/%s", w->at.dir, mb_manifest_key(latest, key));
    if (!read_file(path, &bytes))
        fail_msg("latest names iteration %d, which has no manifest", (int)latest);
    if (mb_manifest_decode(mb_buf_str(&bytes), bytes.len, "manifest", &m, &err) != MB_OK)
        fail_msg("latest names iteration %d: %s", (int)latest, err.text);
    check_files(w, &m);
    mb_manifest_close(&m);
    mb_buf_close(&bytes);
    w->n_reads++;
}

static void on_turn(uv_check_t *h)
{
    check_store(h->data);
}

/* ---- uploaders ---- */

/* Files of this node, other ones for every salt. */
static void save_files(struct node *n, int64_t iteration, const char *salt, int n_files)
{
    char own[400], path[600], text[100];
    static char names[MAX_FILES][40];
    static struct mb_upload_file files[MAX_FILES];
    struct mb_err err;

    node_iteration_dir(n, iteration, own, sizeof(own));
    for (int i = 0; i < n_files; i++) {
        snprintf(names[i], sizeof(names[i]), "rank%u-%d", n->rank, i);
        snprintf(path, sizeof(path), "%s/%s", own, names[i]);
        snprintf(text, sizeof(text), "%s %d %d", salt, (int)iteration, i);
        assert_int_equal(mb_fs_write_atomic(path, text, strlen(text), 0644, NULL), 0);
        files[i] = (struct mb_upload_file){.path = names[i],
                                           .size_bytes = strlen(text),
                                           .crc64nvme = mb_crc64nvme(0, text, strlen(text)),
                                           .has_crc = 1};
    }
    if (mb_upload_saved(n->u, iteration, n->rank, own, files, (size_t)n_files, &err) != MB_OK)
        fail_msg("%s", err.text);
}

static void save(struct node *n, int64_t iteration, const char *salt)
{
    save_files(n, iteration, salt, N_FILES);
}

/* ---- the world ---- */

static int setup(void **state)
{
    struct world *w = calloc(1, sizeof(*w));
    char store[100];

    place_open(&w->at, "upload", DEADLINE_MS);
    snprintf(store, sizeof(store), "%s/store", w->at.dir);
    snprintf(w->at.url, sizeof(w->at.url), "file://%s", store);
    assert_int_equal(mb_fs_mkdir_p(store, 0755, NULL), 0);
    w->newest = -1;
    uv_check_init(&w->at.loop, &w->reader);
    w->reader.data = w;
    uv_check_start(&w->reader, on_turn);
    *state = w;
    return 0;
}

static int teardown(void **state)
{
    struct world *w = *state;

    if (!place_can_close(&w->at))
        return 0;
    uv_close((uv_handle_t *)&w->reader, NULL);
    place_close(&w->at);
    free(w);
    return 0;
}

/* ---- places in the list of writers ---- */

static int is_in_store(const struct world *w, const char *key)
{
    char path[300];

    snprintf(path, sizeof(path), "%s/store/%s", w->at.dir, key);
    return mb_fs_exists(path);
}

/* What counts is who was launched last, not who saved last. */
static void test_order_of_launches(void **state)
{
    struct world *w = *state;
    struct node a = {.at = &w->at, .gang = "aa", .attempt = 1, .num_nodes = 1};
    struct node b = {.at = &w->at, .gang = "bb", .attempt = 1, .num_nodes = 1};
    struct node *both[] = {&a, &b};

    node_launch(&a);
    node_launch(&b);
    save(&a, 10, "before b saved");
    run_until_idle(&w->at, both, 2);
    assert_int_equal(a.n_committed, 1);
    save(&b, 20, "of b");
    run_until_idle(&w->at, both, 2);
    assert_int_equal(w->newest, 20);
    save(&a, 30, "after b saved");
    node_adopt_ended(&a);
    run_until_idle(&w->at, both, 2);
    assert_true(a.n_dropped == 1 && a.dropped[0] == 30);
    assert_non_null(strstr(a.error, "job bb (gang bb) has taken over"));
    save(&b, 40, "of b");
    run_until_idle(&w->at, both, 2);
    assert_int_equal(b.n_dropped, 0);
    assert_int_equal(w->newest, 40);
    node_close(&a);
    node_close(&b);
}

/* It never saved, and its only save is sent by an agent that was started after its successor's
 * first save. */
static void test_a_late_first_save(void **state)
{
    struct world *w = *state;
    struct node a = {.at = &w->at, .gang = "aa", .attempt = 1, .num_nodes = 1};
    struct node b = {.at = &w->at, .gang = "bb", .attempt = 1, .num_nodes = 1};
    struct node *both[] = {&a, &b};

    node_launch(&a);
    node_close(&a);
    node_launch(&b);
    save(&b, 10, "of b");
    run_until_idle(&w->at, &both[1], 1);
    node_open(&a);
    save(&a, 5, "of a");
    node_adopt_ended(&a);
    run_until_idle(&w->at, both, 2);
    assert_int_equal(a.n_dropped, 1);
    save(&b, 20, "of b");
    run_until_idle(&w->at, both, 2);
    assert_true(b.n_committed == 2 && b.n_dropped == 0);
    node_close(&a);
    node_close(&b);
}

/* Its agent died before it was in the list, and the only save was the last thing its ranks did. */
static void test_a_short_job(void **state)
{
    struct world *w = *state;
    struct node a = {.at = &w->at, .gang = "aa", .attempt = 1, .num_nodes = 1};
    struct node *one[] = {&a};

    node_open(&a);
    save(&a, 10, "of a");
    node_adopt_ended(&a);
    assert_false(node_journal_has(&a, "{\"r\":\"entered\"}"));
    run_until_idle(&w->at, one, 1);
    assert_true(a.n_committed == 1 && a.n_dropped == 0);
    assert_true(node_journal_has(&a, "{\"r\":\"entered\"}"));
    node_close(&a);
}

static void seal(struct node *n, int64_t iteration)
{
    char dir[200], path[400], text[32];

    node_dir(n, dir, sizeof(dir));
    node_iteration_dir(n, iteration, path, sizeof(path));
    strcat(path, "/model.pt");
    assert_int_equal(mb_fs_write_atomic(path, "x", 1, 0644, NULL), 0);
    snprintf(path, sizeof(path), "%s/" MB_LATEST_KEY, dir);
    snprintf(text, sizeof(text), "%d", (int)iteration);
    assert_int_equal(mb_fs_write_atomic(path, text, strlen(text), 0644, NULL), 0);
}

/* A foreign trainer whose ranks have ended: the tracker file is another job's from now on. */
static void test_tracker_of_somebody_else(void **state)
{
    struct world *w = *state;
    struct node a = {.at = &w->at, .gang = "aa", .attempt = 1, .num_nodes = 1, .watches = 1};
    struct node *one[] = {&a};

    node_launch(&a);
    seal(&a, 10);
    mb_upload_look(a.u);
    seal(&a, 20);
    mb_upload_no_more(a.u); /* the last look */
    assert_int_equal(a.n_sealed, 2);
    seal(&a, 30);
    mb_upload_look(a.u);
    run_for(&w->at, 1200); /* the tracker looks twice a second */
    assert_int_equal(a.n_sealed, 2);
    node_adopt_ended(&a);
    seal(&a, 40);
    mb_upload_look(a.u);
    run_for(&w->at, 1200);
    run_until_idle(&w->at, one, 1);
    assert_int_equal(a.n_sealed, 2);
    assert_int_equal(w->newest, 20);
    assert_false(mb_upload_is_busy(a.u));
    mb_upload_repeat(a.u); /* nothing of it is on its way: the other nodes need no word */
    assert_int_equal(a.n_sealed, 2);
    node_close(&a);
}

/* An adopted one tells its driver again what is not durable: the other nodes may not have heard. */
static void test_seals_are_told_again(void **state)
{
    struct world *w = *state;
    struct node a = {.at = &w->at, .gang = "aa", .attempt = 1, .num_nodes = 2, .watches = 1};

    node_launch(&a);
    seal(&a, 10);
    mb_upload_no_more(a.u);
    assert_int_equal(a.n_sealed, 1);
    node_adopt_ended(&a);
    mb_upload_repeat(a.u);
    assert_int_equal(a.n_sealed, 2);
    node_close(&a);
}

/* What other nodes have to hear of: each save that the tracker file named while nobody looked. */
static void test_each_seal_is_told(void **state)
{
    struct world *w = *state;
    struct node a = {.at = &w->at, .gang = "aa", .attempt = 1, .num_nodes = 1, .watches = 1};
    struct node *one[] = {&a};

    node_launch(&a);
    for (int64_t i = 10; i <= 40; i += 10)
        seal(&a, i);
    mb_upload_look(a.u);
    assert_int_equal(a.n_sealed, 4);
    node_close(&a);
    a.n_sealed = 0;
    node_open(&a); /* killed: its journal has all of them */
    run_until_idle(&w->at, one, 1);
    for (int64_t i = 10; i <= 40; i += 10)
        assert_true(has(a.committed, a.n_committed, i));
    mb_upload_last_look(a.u);
    assert_true(a.n_sealed == 0 && a.n_dropped == 0);
    node_close(&a);
}

/* What this node had of an older one is gone: an empty part would make a checkpoint with a hole. */
static void test_seal_of_what_is_gone(void **state)
{
    struct world *w = *state;
    struct node saves = {
        .at = &w->at, .gang = "aa", .attempt = 1, .rank = 1, .num_nodes = 2, .watches = 1};
    struct node has_none = {
        .at = &w->at, .gang = "bb", .attempt = 1, .rank = 1, .num_nodes = 2, .watches = 1};
    struct mb_err err = {0};
    char path[400];

    node_iteration_dir(&has_none, 30, path, sizeof(path)); /* an earlier attempt's */
    usleep(50000);
    node_open(&saves);
    node_open(&has_none);
    node_iteration_dir(&saves, 20, path, sizeof(path));
    assert_int_not_equal(mb_upload_seal(saves.u, 10, NULL, 0, &err), 0);
    assert_true(saves.n_dropped == 1 && has(saves.never, saves.n_never, 10));
    assert_non_null(strstr(saves.error, "was removed before this node had taken it"));
    assert_int_equal(mb_upload_seal(has_none.u, 10, NULL, 0, &err), 0);
    assert_int_equal(has_none.n_dropped, 0);
    node_close(&saves);
    node_close(&has_none);
}

/* The trainer removed it meanwhile: told, also to a driver that comes back. */
static void test_saved_and_gone(void **state)
{
    struct world *w = *state;
    struct node a = {.at = &w->at, .gang = "aa", .attempt = 1, .num_nodes = 1, .watches = 1};
    struct node *one[] = {&a};
    char path[400];

    node_launch(&a);
    seal(&a, 20);
    node_iteration_dir(&a, 20, path, sizeof(path));
    assert_int_equal(mb_fs_remove_tree(path, NULL), 0);
    seal(&a, 30);
    RUN_UNTIL(&w->at, a.n_committed > 0);
    run_until_idle(&w->at, one, 1);
    assert_true(has(a.committed, a.n_committed, 30));
    assert_true(a.n_dropped == 1 && has(a.never, a.n_never, 20));
    assert_non_null(strstr(a.error, "iteration 20 is not durable: it was saved and not uploaded: "
                                    "iter_0000020, or what it held, was removed"));
    node_close(&a);
    a.n_dropped = 0;
    node_open(&a);
    mb_upload_last_look(a.u);
    assert_int_equal(a.n_dropped, 0);
    mb_upload_repeat(a.u);
    assert_true(a.n_dropped == 1 && has(a.dropped, a.n_dropped, 20));
    run_until_idle(&w->at, one, 1);
    node_close(&a);
}

/* A driver that dials again tells every seal once more. By then the trainer may have removed what
 * this node's part in the store has, and written a newer one. */
static void test_a_repeated_seal(void **state)
{
    struct world *w = *state;
    struct node b = {
        .at = &w->at, .gang = "aa", .attempt = 1, .rank = 1, .num_nodes = 2, .watches = 1};
    struct mb_err err = {0};
    char path[400];

    node_launch(&b);
    seal(&b, 10);
    assert_int_equal(mb_upload_seal(b.u, 10, NULL, 0, &err), 0);
    RUN_UNTIL(&w->at, node_journal_has(&b, "\"part\"")); /* the other node's does not come */
    node_iteration_dir(&b, 10, path, sizeof(path));
    assert_int_equal(mb_fs_remove_tree(path, NULL), 0);
    seal(&b, 20);
    assert_int_equal(mb_upload_seal(b.u, 10, NULL, 0, &err), 0);
    assert_true(b.n_dropped == 0 && b.n_never == 0);
    assert_int_equal(mb_upload_pending(b.u, NULL, 0), 1);
    node_close(&b);
}

/* It goes back, and saves the same iterations once more: the store keeps the first ones, and that
 * is told, also to a driver that comes back. One that it names and has not touched is none. */
static void test_saved_again(void **state)
{
    struct world *w = *state;
    struct node a = {.at = &w->at, .gang = "aa", .attempt = 1, .num_nodes = 1, .watches = 1};
    struct node *one[] = {&a};
    char dir[200], path[400];

    node_launch(&a);
    seal(&a, 10);
    seal(&a, 20);
    mb_upload_look(a.u);
    run_until_idle(&w->at, one, 1);
    assert_int_equal(w->newest, 20);
    node_dir(&a, dir, sizeof(dir));
    snprintf(path, sizeof(path), "%s/" MB_LATEST_KEY, dir);
    assert_int_equal(mb_fs_write_atomic(path, "10", 2, 0644, NULL), 0);
    mb_upload_look(a.u);
    assert_int_equal(a.n_dropped, 0);
    seal(&a, 20);
    mb_upload_look(a.u);
    assert_true(a.n_dropped == 1 && a.dropped[0] == 20 && a.n_never == 0);
    assert_non_null(strstr(a.error, "iteration 20 is not durable: it was saved and not uploaded: "
                                    "it was saved again"));
    seal(&a, 10);
    mb_upload_look(a.u);
    assert_true(a.n_dropped == 2 && a.dropped[1] == 10);
    a.n_dropped = 0;
    mb_upload_repeat(a.u);
    assert_true(a.n_dropped == 2 && a.n_sealed == 2);
    seal(&a, 30); /* it goes on */
    mb_upload_look(a.u);
    seal(&a, 10); /* amid the upload of what it goes back from */
    mb_upload_look(a.u);
    seal(&a, 30);
    mb_upload_look(a.u);
    run_until_idle(&w->at, one, 1);
    assert_true(a.n_dropped == 3 && a.dropped[2] == 30);
    assert_non_null(strstr(a.error, "it was saved again before it was durable"));
    assert_int_equal(w->newest, 20);
    node_close(&a);
}

/* Another run saves the iteration that latest names: before, between and after it is whole. */
static void test_the_same_iteration_again(void **state)
{
    struct world *w = *state;
    struct node a = {.at = &w->at, .gang = "aa", .attempt = 1, .num_nodes = 1};
    struct node b = {.at = &w->at, .gang = "bb", .attempt = 1, .num_nodes = 1};
    struct node c = {.at = &w->at, .gang = "bb", .attempt = 2, .num_nodes = 1};
    struct node *all[] = {&a, &b, &c};

    for (int i = 0; i < 3; i++) {
        node_open(all[i]);
        save(all[i], 10, i == 0 ? "one" : i == 1 ? "another" : "third");
        run_until_idle(&w->at, &all[i], 1);
        assert_true(all[i]->n_committed == 1 && all[i]->committed[0] == 10);
        assert_int_equal(w->newest, 10);
    }
    save(&a, 20, "one"); /* it went on, and hears that it is over */
    run_until_idle(&w->at, all, 3);
    assert_true(a.n_dropped == 1 && a.dropped[0] == 20);
    assert_non_null(strstr(a.error, "job bb (gang bb) has taken over"));
    assert_int_equal(w->newest, 10);
    save(&c, 20, "third");
    run_until_idle(&w->at, all, 3);
    assert_int_equal(w->newest, 20);
    assert_true(w->n_reads > 10);
    for (int i = 0; i < 3; i++)
        node_close(all[i]);
}

/* What another run began and did not finish is taken over where it lies. */
static void test_taken_over(void **state)
{
    struct world *w = *state;
    struct node a = {.at = &w->at, .gang = "aa", .attempt = 1, .num_nodes = 2};
    struct node b[2] = {{.at = &w->at, .gang = "bb", .attempt = 1, .num_nodes = 2},
                        {.at = &w->at, .gang = "bb", .attempt = 1, .rank = 1, .num_nodes = 2}};
    struct node *all[] = {&b[0], &b[1]};
    char path[200];

    node_open(&a);
    save(&a, 10, "one");
    snprintf(path, sizeof(path), "%s/store/iter_0000010/.mobula/part-0-of-2.json", w->at.dir);
    RUN_UNTIL(&w->at, mb_fs_exists(path));
    for (int i = 0; i < 2; i++) {
        node_open(all[i]);
        save(all[i], 10, "another");
    }
    run_until_idle(&w->at, all, 2);
    assert_int_equal(b[0].n_committed + b[1].n_committed, 2);
    assert_int_equal(w->newest, 10);
    RUN_UNTIL(&w->at, !mb_upload_is_busy(a.u));
    assert_int_equal(a.n_committed, 0);
    assert_non_null(strstr(a.error, "taken over"));
    snprintf(path, sizeof(path), "%s/store/iter_0000010/rank0-0", w->at.dir);
    assert_true(mb_fs_exists(path));
    node_close(&a);
    node_close(&b[0]);
    node_close(&b[1]);
}

/* A node has sent its part and is gone for good, the first one, too: who is left commits what is
 * whole. */
static void test_a_survivor_commits(void **state)
{
    struct world *w = *state;
    char part[60];

    for (uint32_t gone = 0; gone < 2; gone++) {
        struct node a[2] = {
            {.at = &w->at, .gang = "aa", .attempt = gone + 1, .num_nodes = 2},
            {.at = &w->at, .gang = "aa", .attempt = gone + 1, .rank = 1, .num_nodes = 2}};
        struct node *left[] = {&a[1 - gone]};
        int64_t iteration = 10 + 10 * (int64_t)gone;

        node_launch(&a[0]);
        node_launch(&a[1]);
        save(&a[gone], iteration, "of who goes");
        snprintf(part, sizeof(part), "iter_00000%d/.mobula/part-%u-of-2.json", (int)iteration,
                 gone);
        RUN_UNTIL(&w->at, is_in_store(w, part));
        node_close(&a[gone]);
        assert_true(w->newest < iteration);
        save(left[0], iteration, "of who stays");
        run_until_idle(&w->at, left, 1);
        assert_true(left[0]->n_committed == 1 && left[0]->n_dropped == 0);
        assert_int_equal(w->newest, iteration);
        node_close(left[0]);
    }
}

/* Only the newest stay, also when another run had left some, whole or not; the pointer's always. */
static void test_keep_last(void **state)
{
    struct world *w = *state;
    struct node other = {.at = &w->at, .gang = "aa", .attempt = 1, .num_nodes = 2};
    struct node a = {.at = &w->at, .gang = "bb", .attempt = 1, .num_nodes = 1, .keep_last = 2};
    struct node *both[] = {&a, &other};

    node_open(&other);
    save(&other, 5, "unfinished");
    RUN_UNTIL(&w->at, is_in_store(w, "iter_0000005/.mobula/part-0-of-2.json"));
    node_close(&other);
    node_open(&a);
    for (int64_t iteration = 10; iteration <= 50; iteration += 10) {
        save(&a, iteration, "kept");
        run_until_idle(&w->at, both, 1);
        assert_int_equal(a.committed[a.n_committed - 1], iteration);
    }
    for (int i = 1; i <= 5; i++) {
        char key[MB_CHECKPOINT_KEY_MAX];

        assert_int_equal(is_in_store(w, mb_manifest_key(10 * i, key)), i >= 4);
        snprintf(key, sizeof(key), "iter_%07d/rank0-0", 10 * i);
        assert_int_equal(is_in_store(w, key), i >= 4);
        snprintf(key, sizeof(key), "iter_%07d/.mobula/part-0-of-1.json", 10 * i);
        assert_int_equal(is_in_store(w, key), i >= 4);
    }
    assert_false(is_in_store(w, "iter_0000005/rank0-0"));
    assert_false(is_in_store(w, "iter_0000005/.mobula/manifest.json"));
    node_close(&a);
}

/* ---- a writer that was stopped ---- */

/* In a process of its own: saves one iteration and ends when that is committed or dropped. */
static int run_writer(const char *dir)
{
    static struct world w;
    struct node a = {.at = &w.at, .gang = "aa", .attempt = 1, .num_nodes = 1};

    snprintf(w.at.dir, sizeof(w.at.dir), "%s", dir);
    snprintf(w.at.url, sizeof(w.at.url), "file://%s/store", dir);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    assert_int_equal(uv_loop_init(&w.at.loop), 0);
    node_open(&a);
    save_files(&a, 10, "of the stopped writer", MAX_FILES);
    while (mb_upload_is_busy(a.u))
        uv_run(&w.at.loop, UV_RUN_ONCE);
    node_close(&a);
    return a.n_committed > 0 ? 10 : strstr(a.error, "taken over") ? 11 : 12;
}

static void on_look(uv_timer_t *t)
{
    (void)t;
}

/* Between two writes: stopped in one it would hold the store's lock, and nobody could take over. */
static int stop_between_writes(const struct world *w, pid_t pid)
{
    char path[300];
    int status = 0, fd, is_free;

    snprintf(path, sizeof(path), "%s/store", w->at.dir);
    fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    assert_true(fd >= 0);
    do {
        assert_int_equal(kill(pid, SIGSTOP), 0);
        assert_int_equal(waitpid(pid, &status, WUNTRACED), pid);
        is_free = flock(fd, LOCK_EX | LOCK_NB) == 0;
        if (!is_free && WIFSTOPPED(status))
            assert_int_equal(kill(pid, SIGCONT), 0);
    } while (!is_free && WIFSTOPPED(status));
    close(fd);
    return status;
}

/* It has the claim and sends its files when it is stopped; somebody else takes over, and it goes
 * on. */
static void test_a_stopped_writer(void **state)
{
    struct world *w = *state;
    struct node b = {.at = &w->at, .gang = "bb", .attempt = 1, .num_nodes = 1};
    struct node *one[] = {&b};
    uv_timer_t often;
    pid_t pid = fork();
    int status = 0, n_sent = 0;

    if (pid == 0) {
        execl("/proc/self/exe", "test_upload", "--writer", w->at.dir, (char *)NULL);
        _exit(127);
    }
    uv_timer_init(&w->at.loop, &often);
    uv_timer_start(&often, on_look, 1, 1);
    RUN_UNTIL(&w->at, is_in_store(w, "iter_0000010/rank0-0"));
    status = stop_between_writes(w, pid);
    if (WIFSTOPPED(status))
        assert_false(is_in_store(w, MB_LATEST_KEY)); /* 300 files take longer than one look */
    for (int i = 0; i < MAX_FILES; i++) {
        char key[60];

        snprintf(key, sizeof(key), "iter_0000010/rank0-%d", i);
        n_sent += is_in_store(w, key);
    }
    assert_true(n_sent > 0 && n_sent < MAX_FILES);
    node_open(&b);
    save_files(&b, 10, "of the newer one", MAX_FILES);
    run_until_idle(&w->at, one, 1);
    assert_int_equal(b.n_committed, 1);
    assert_int_equal(w->newest, 10);
    assert_int_equal(kill(pid, SIGCONT), 0);
    RUN_UNTIL(&w->at, waitpid(pid, &status, WNOHANG) != 0); /* the reader looks */
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 11);
    check_store(w);
    uv_close((uv_handle_t *)&often, NULL);
    node_close(&b);
    print_message("%d of %d files were sent when it was stopped\n", n_sent, MAX_FILES);
}

/* A claim is no checkpoint: it counts for nothing among those that stay. */
static void test_keep_last_beside_a_claim(void **state)
{
    struct world *w = *state;
    struct node a = {.at = &w->at, .gang = "aa", .attempt = 1, .num_nodes = 1, .keep_last = 2};
    struct node *all[] = {&a};
    char key[MB_CHECKPOINT_KEY_MAX];

    node_open(&a);
    for (int64_t iteration = 10; iteration <= 40; iteration += 10) {
        save(&a, iteration, "kept");
        RUN_UNTIL(&w->at, iteration != 30 || is_in_store(w, mb_manifest_key(30, key)));
        if (iteration == 30)
            mb_upload_abandon(a.u, 0);
        run_until_idle(&w->at, all, 1);
    }
    assert_int_equal(a.n_dropped, 1);
    assert_int_equal(a.n_committed, 3);
    for (int i = 1; i <= 4; i++)
        assert_int_equal(is_in_store(w, mb_manifest_key(10 * i, key)), i > 1);
    assert_true(is_in_store(w, "iter_0000020/rank0-0"));
    node_close(&a);
}

/* What a newer program has written is not taken for damage, and stays. */
static void test_a_newer_manifest(void **state)
{
    static const char text[] = "{\"version\":3,\"all\":\"new\"}";
    struct world *w = *state;
    struct node a = {.at = &w->at, .gang = "aa", .attempt = 1, .num_nodes = 1};
    struct node *all[] = {&a};
    struct mb_buf bytes = {0};
    char path[300];

    snprintf(path, sizeof(path), "%s/store/iter_0000010/.mobula", w->at.dir);
    assert_int_equal(mb_fs_mkdir_p(path, 0755, NULL), 0);
    strcat(path, "/manifest.json");
    assert_int_equal(mb_fs_write_atomic(path, text, strlen(text), 0644, NULL), 0);
    node_open(&a);
    save(&a, 10, "one");
    run_until_idle(&w->at, all, 1);
    assert_int_equal(a.n_dropped, 1);
    assert_non_null(strstr(a.error, "a newer mobula has written it"));
    assert_true(read_file(path, &bytes));
    assert_string_equal(mb_buf_str(&bytes), text);
    mb_buf_close(&bytes);
    node_close(&a);
}

static uint64_t next_random(uint64_t *x)
{
    *x ^= *x << 13;
    *x ^= *x >> 7;
    *x ^= *x << 17;
    return *x;
}

/* Three writers of two nodes, all alive, save the same iterations and are killed again and again.
 */
static void test_all_at_once(void **state)
{
    static const struct {
        const char *gang;
        uint32_t attempt;
    } writers[] = {{"aa", 1}, {"bb", 1}, {"bb", 2}};
    struct world *w = *state;
    struct node nodes[6] = {0}, *all[6];
    const char *seed_text = getenv("MOBULA_SEED");
    uint64_t x = seed_text ? strtoull(seed_text, NULL, 10) : 88172645463325252ull;
    uint64_t kills = 0;

    for (int i = 0; i < 6; i++) {
        nodes[i] = (struct node){.at = &w->at,
                                 .gang = writers[i / 2].gang,
                                 .attempt = writers[i / 2].attempt,
                                 .rank = (uint32_t)i % 2,
                                 .num_nodes = 2};
        all[i] = &nodes[i];
        node_launch(all[i]); /* one after the other: that is their order */
    }
    for (int turn = 0; turn < TURNS; turn++) {
        int i = (int)(next_random(&x) % 6);
        struct node *n = all[i];

        if (next_random(&x) % 4 == 0) {
            node_close(n);
            node_open(n);
            kills++;
        } else if (turn >= i / 2 * TURNS / 4 && n->next_iteration < 60) {
            char salt[40];

            n->next_iteration += 10;
            snprintf(salt, sizeof(salt), "%s-%u", n->gang, n->attempt);
            save(n, n->next_iteration, salt);
        }
        for (uint64_t k = next_random(&x) % 6; k > 0; k--)
            uv_run(&w->at.loop, UV_RUN_ONCE);
    }
    for (int i = 4; i < 6; i++)
        while (all[i]->next_iteration < 60)
            save(all[i], all[i]->next_iteration += 10, "the last");
    for (int i = 0; i < 6; i++) {
        mb_upload_no_more(all[i]->u);
        mb_upload_release(all[i]->u);
    }
    run_until_idle(&w->at, all, 6);
    /* Nobody came after the last writer: all that it saved is durable. */
    for (int64_t iteration = 10; iteration <= 60; iteration += 10)
        assert_true(has(nodes[4].committed, nodes[4].n_committed, iteration) ||
                    has(nodes[5].committed, nodes[5].n_committed, iteration));
    assert_int_equal(w->newest, 60);
    print_message("%d kills, %d looks of the reader\n", (int)kills, (int)w->n_reads);
    for (int i = 0; i < 6; i++)
        node_close(all[i]);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_order_of_launches, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_late_first_save, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_short_job, setup, teardown),
        cmocka_unit_test_setup_teardown(test_tracker_of_somebody_else, setup, teardown),
        cmocka_unit_test_setup_teardown(test_seals_are_told_again, setup, teardown),
        cmocka_unit_test_setup_teardown(test_each_seal_is_told, setup, teardown),
        cmocka_unit_test_setup_teardown(test_seal_of_what_is_gone, setup, teardown),
        cmocka_unit_test_setup_teardown(test_saved_and_gone, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_repeated_seal, setup, teardown),
        cmocka_unit_test_setup_teardown(test_saved_again, setup, teardown),
        cmocka_unit_test_setup_teardown(test_the_same_iteration_again, setup, teardown),
        cmocka_unit_test_setup_teardown(test_taken_over, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_stopped_writer, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_survivor_commits, setup, teardown),
        cmocka_unit_test_setup_teardown(test_keep_last, setup, teardown),
        cmocka_unit_test_setup_teardown(test_keep_last_beside_a_claim, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_newer_manifest, setup, teardown),
        cmocka_unit_test_setup_teardown(test_all_at_once, setup, teardown)};

    if (argc == 3 && strcmp(argv[1], "--writer") == 0)
        return run_writer(argv[2]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
