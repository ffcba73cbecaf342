/*
 * Whole uploaders on one loop with an S3 server in the same process: what goes first, whose
 * unfinished uploads are taken away, what one node's trouble does to the others.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <uv.h>
#include <cmocka.h>
#include "agent/upload/manifest.h"
#include "agent/upload/upload.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/str.h"
#include "fake_s3.h"
#include "nodes.h"

enum { DEADLINE_MS = 100000, MAX_SEEN = 300, MAX_FILES = 80, MIB = 1 << 20 };

struct world {
    struct place at;
    uv_timer_t ticker;
    struct fake_s3 *s3;
    enum fake_verdict (*judge)(struct world *w, const char *method, const char *key, int part);
    int holds;
    char seen[MAX_SEEN][80]; /* keys of data, in the order in which they came */
    size_t n_seen;
};

/* ---- the world ---- */

/* So far the clock is ahead of the kernel's. */
static uint64_t ahead_ms;

uint64_t __real_mb_mono_ms(void);
uint64_t __wrap_mb_mono_ms(void);

uint64_t __wrap_mb_mono_ms(void)
{
    return __real_mb_mono_ms() + ahead_ms;
}

static enum fake_verdict on_judge(void *arg, const char *method, const char *key, int part)
{
    struct world *w = arg;

    return w->judge != NULL ? w->judge(w, method, key, part) : FAKE_ANSWER;
}

static void on_tick(uv_timer_t *t)
{
    (void)t;
}

static int setup(void **state)
{
    struct world *w = calloc(1, sizeof(*w));

    place_open(&w->at, "upload-s3", DEADLINE_MS);
    strcpy(w->at.url, FAKE_URL);
    uv_timer_init(&w->at.loop, &w->ticker);
    uv_timer_start(&w->ticker, on_tick, 5, 5);
    w->s3 = fake_open(&w->at.loop, on_judge, w);
    *state = w;
    return 0;
}

static int teardown(void **state)
{
    struct world *w = *state;

    if (!place_can_close(&w->at))
        return 0;
    fake_close(w->s3);
    uv_close((uv_handle_t *)&w->ticker, NULL);
    place_close(&w->at);
    free(w);
    return 0;
}

/* ---- uploaders ---- */

/* Holes, under names that say whose they are; told bytes less than they have by now, if any. */
static void save_but(struct node *n, int64_t iteration, int n_files, uint64_t size_bytes,
                     uint64_t less)
{
    char own[400], path[600];
    static char names[MAX_FILES][40];
    static struct mb_upload_file files[MAX_FILES];
    struct mb_err err;

    node_iteration_dir(n, iteration, own, sizeof(own));
    for (int i = 0; i < n_files; i++) {
        int fd;

        snprintf(names[i], sizeof(names[i]), "rank%u-%02d", n->rank, i);
        snprintf(path, sizeof(path), "%s/%.39s", own, names[i]);
        fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
        assert_true(fd >= 0 && ftruncate(fd, (off_t)size_bytes) == 0);
        close(fd);
        files[i] = (struct mb_upload_file){.path = names[i], .size_bytes = size_bytes - less};
    }
    if (mb_upload_saved(n->u, iteration, n->rank, own, files, (size_t)n_files, &err) != MB_OK)
        fail_msg("%s", err.text);
}

static void save(struct node *n, int64_t iteration, int n_files, uint64_t size_bytes)
{
    save_but(n, iteration, n_files, size_bytes, 0);
}

/* ---- the deadline's order ---- */

static int is_data(const char *method, const char *key)
{
    return strcmp(method, "PUT") == 0 && strstr(key, "/rank") != NULL;
}

static void note(struct world *w, const char *key)
{
    assert_true(w->n_seen < MAX_SEEN);
    snprintf(w->seen[w->n_seen++], sizeof(*w->seen), "%s", key);
}

static enum fake_verdict hold_data(struct world *w, const char *method, const char *key, int part)
{
    (void)part;
    if (!is_data(method, key))
        return FAKE_ANSWER;
    if (!w->holds)
        return FAKE_ANSWER;
    note(w, key);
    return FAKE_HOLD;
}

static enum fake_verdict note_data(struct world *w, const char *method, const char *key, int part)
{
    (void)part;
    if (is_data(method, key))
        note(w, key);
    return FAKE_ANSWER;
}

static size_t last_seen(const struct world *w, const char *prefix)
{
    size_t at = 0;

    for (size_t i = 0; i < w->n_seen; i++)
        if (mb_starts_with(w->seen[i], prefix))
            at = i + 1;
    return at;
}

/* Iteration 10 is being sent when there is no time for it any more, but for the next one: that goes
 * first from now on, and what of 10 was begun waits. */
static void test_what_is_preferred_goes_first(void **state)
{
    struct world *w = *state;
    struct node a = {.at = &w->at, .gang = "aa", .attempt = 1, .num_nodes = 1};
    size_t n_before;

    w->judge = hold_data;
    w->holds = 1;
    node_open(&a);
    save(&a, 10, 64, 2 * MIB);
    RUN_UNTIL(&w->at, w->n_seen >= 4);
    run_for(&w->at, 100);
    n_before = w->n_seen; /* on their connections */
    save(&a, 20, 8, 2 * MIB);
    mb_upload_deadline(a.u, (int64_t)mb_unix_ms() + 200000, 4 * MIB / 10); /* 10: 320 s, 20: 40 */
    run_for(&w->at, 300);
    assert_int_equal(w->n_seen, n_before);
    w->n_seen = 0;
    w->judge = note_data;
    fake_release(w->s3);
    RUN_UNTIL(&w->at, a.n_committed == 2);
    assert_int_equal(a.committed[0], 20);
    /* What was on its way, what was read ahead, and what takes a free connection while files of 20
     * are still read: not the 32 that were begun. */
    print_message("%zu of 10 on their way, the last of 20 is number %zu\n", n_before,
                  last_seen(w, "iter_0000020/"));
    assert_true(last_seen(w, "iter_0000020/") <= 8 + 16);
    node_close(&a);
}

/* ---- unfinished uploads ---- */

#define BIG "iter_0000010/rank0-00"

static enum fake_verdict hold_parts(struct world *w, const char *method, const char *key, int part)
{
    (void)key;
    if (part == 0 || !w->holds)
        return FAKE_ANSWER;
    w->n_seen += strcmp(method, "PUT") == 0;
    return FAKE_HOLD;
}

/* An attempt that is over cleans up behind itself, and not behind its successor. */
static void test_a_successor_keeps_its_uploads(void **state)
{
    struct world *w = *state;
    struct node old = {.at = &w->at, .gang = "aa", .attempt = 1, .num_nodes = 1};
    struct node new = {.at = &w->at, .gang = "aa", .attempt = 2, .num_nodes = 1};
    struct mb_upload_status status;

    w->judge = hold_parts;
    w->holds = 1;
    node_open(&old);
    save(&old, 10, 1, 70 * MIB);
    RUN_UNTIL(&w->at, w->n_seen > 0);
    assert_true(fake_has_upload(w->s3, "u1"));
    node_close(&old);
    node_open(&new);
    w->n_seen = 0;
    save(&new, 10, 1, 70 * MIB);
    RUN_UNTIL(&w->at, w->n_seen > 0); /* its parts are on their way */
    assert_int_equal(mb_upload_pending(new.u, &status, 1), 1);
    node_open(&old);
    RUN_UNTIL(&w->at, old.n_dropped == 1 && !mb_upload_is_busy(old.u));
    assert_false(fake_has_upload(w->s3, "u1"));
    assert_int_equal(fake_count_uploads(w->s3, BIG), 1); /* the successor's */
    w->holds = 0;
    fake_release(w->s3);
    RUN_UNTIL(&w->at, new.n_committed == 1);
    assert_int_equal(fake_count_uploads(w->s3, NULL), 0);
    node_close(&old);
    node_close(&new);
}

/* Nobody noted the id, since the process was killed before: who has the claim takes it away. */
static void test_uploads_without_an_id(void **state)
{
    struct world *w = *state;
    struct node old = {.at = &w->at, .gang = "aa", .attempt = 1, .num_nodes = 1};
    struct node new = {.at = &w->at, .gang = "aa", .attempt = 2, .num_nodes = 1};

    w->judge = hold_parts;
    w->holds = 1;
    node_open(&old);
    for (int i = 1; i <= 2; i++) {
        save(&old, 10 * i, 1, 70 * MIB);
        RUN_UNTIL(&w->at, fake_count_uploads(w->s3, NULL) == (size_t)i);
    }
    node_close(&old);
    fake_begin_upload(w->s3, BIG);
    fake_begin_upload(w->s3, "iter_0000020/rank0-00");
    node_open(&new); /* it saves one of the two iterations */
    w->n_seen = 0;
    save(&new, 10, 1, 70 * MIB);
    w->holds = 0;
    RUN_UNTIL(&w->at, new.n_committed == 1);
    assert_int_equal(fake_count_uploads(w->s3, BIG), 0);
    node_open(&old);
    RUN_UNTIL(&w->at, old.n_dropped == 2 && !mb_upload_is_busy(old.u));
    assert_int_equal(fake_count_uploads(w->s3, NULL), 0);
    node_close(&old);
    node_close(&new);
}

static enum fake_verdict begin_late(struct world *w, const char *method, const char *key, int part)
{
    if (strcmp(method, "POST") == 0 && strcmp(key, BIG) == 0 && w->holds)
        return FAKE_HOLD;
    if (part > 0 && w->n_seen++ == 0)
        fake_begin_upload(w->s3, BIG);
    return FAKE_ANSWER;
}

/* What a killed process had asked for may be carried out when its successor has looked already. */
static void test_an_upload_that_comes_late(void **state)
{
    struct world *w = *state;
    struct node a = {.at = &w->at, .gang = "aa", .attempt = 1, .num_nodes = 1};

    w->judge = begin_late;
    w->holds = 1;
    node_open(&a);
    save(&a, 10, 1, 70 * MIB);
    run_for(&w->at, 300);
    node_close(&a);
    w->holds = 0;
    assert_int_equal(fake_count_uploads(w->s3, NULL), 0);
    node_open(&a);
    RUN_UNTIL(&w->at, a.n_committed == 1);
    assert_true(w->n_seen > 0);
    assert_int_equal(fake_count_uploads(w->s3, NULL), 0);
    node_close(&a);
}

static enum fake_verdict count_lists(struct world *w, const char *method, const char *key, int part)
{
    (void)part;
    w->n_seen += strcmp(method, "GET") == 0 && key[0] == '\0';
    return FAKE_ANSWER;
}

/* Once it is noted that nothing is left, an agent that starts again does not look any more. */
static void test_a_dropped_one_is_swept_once(void **state)
{
    struct world *w = *state;
    struct node a = {.at = &w->at, .gang = "aa", .attempt = 1, .num_nodes = 1};

    w->judge = hold_parts;
    w->holds = 1;
    node_open(&a);
    save(&a, 10, 3, 70 * MIB);
    RUN_UNTIL(&w->at, fake_count_uploads(w->s3, NULL) == 3);
    node_close(&a);
    w->holds = 0;
    for (int i = 0; i < 3; i++) {
        w->judge = count_lists;
        w->n_seen = 0;
        node_open(&a);
        mb_upload_abandon(a.u, 0);
        RUN_UNTIL(&w->at, !mb_upload_is_busy(a.u));
        run_for(&w->at, 300);
        assert_int_equal(fake_count_uploads(w->s3, NULL), 0);
        assert_int_equal(w->n_seen, i == 0 ? 3 : 0);
        node_close(&a);
    }
}

/* Each abort takes nine seconds. */
static enum fake_verdict slow_aborts(struct world *w, const char *method, const char *key, int part)
{
    (void)w;
    (void)key;
    (void)part;
    if (strcmp(method, "DELETE") == 0)
        ahead_ms += 9000;
    return FAKE_ANSWER;
}

/* How many of six unfinished uploads are left when the uploader has come to rest. */
static size_t left_by_a_slow_store(struct world *w, uint64_t within_ms)
{
    struct node a = {.at = &w->at, .gang = "aa", .attempt = 1, .num_nodes = 1};

    w->judge = hold_parts;
    w->holds = 1;
    node_open(&a);
    save(&a, 10, 6, 70 * MIB);
    RUN_UNTIL(&w->at, fake_count_uploads(w->s3, NULL) == 6);
    node_close(&a);
    w->holds = 0;
    w->judge = slow_aborts;
    node_open(&a);
    mb_upload_abandon(a.u, within_ms);
    RUN_UNTIL(&w->at, !mb_upload_is_busy(a.u));
    run_for(&w->at, 300);
    node_close(&a);
    return fake_count_uploads(w->s3, NULL);
}

/* A store that is slow and answers is waited for; not beyond the time that there is. */
static void test_a_slow_store_is_cleaned(void **state)
{
    assert_int_equal(left_by_a_slow_store(*state, 0), 0);
}

static void test_cleaning_ends_in_time(void **state)
{
    size_t left = left_by_a_slow_store(*state, 15000);

    assert_in_range(left, 1, 5);
}

/* ---- what one node drops ---- */

static void two_nodes(struct world *w, struct node out[2])
{
    for (uint32_t i = 0; i < 2; i++) {
        out[i] = (struct node){.at = &w->at, .gang = "aa", .attempt = 1, .rank = i, .num_nodes = 2};
        node_open(&out[i]);
    }
}

/* A node cannot send what it saved. While the others do not hear of it they wait for its part:
 * newer iterations become durable all the same, on both. One that is complete late does too, and
 * the pointer stays. */
static void test_commits_past_an_incomplete_one(void **state)
{
    struct world *w = *state;
    struct node n[2];
    struct mb_upload_status status;

    two_nodes(w, n);
    save(&n[0], 10, 1, 100);
    save_but(&n[1], 10, 1, 100, 1);
    RUN_UNTIL(&w->at, n[1].n_dropped == 1);
    for (int i = 0; i < 2; i++) {
        save(&n[i], 20, 1, 100);
        save(&n[i], 30, 1, 100);
    }
    for (int i = 0; i < 2; i++)
        RUN_UNTIL(&w->at, has(n[i].committed, n[i].n_committed, 20) &&
                              has(n[i].committed, n[i].n_committed, 30));
    assert_true(mb_upload_pending(n[0].u, &status, 1) == 1 && status.iteration == 10);
    save(&n[0], 40, 1, 100);
    save(&n[0], 50, 1, 100);
    save(&n[1], 50, 1, 100);
    for (int i = 0; i < 2; i++)
        RUN_UNTIL(&w->at, has(n[i].committed, n[i].n_committed, 50));
    save(&n[1], 40, 1, 100);
    for (int i = 0; i < 2; i++)
        RUN_UNTIL(&w->at, has(n[i].committed, n[i].n_committed, 40));
    assert_string_equal(fake_object(w->s3, MB_LATEST_KEY), "50");
    for (int i = 0; i < 2; i++)
        node_close(&n[i]);
}

static int is_of_iteration_30(const char *method, const char *key)
{
    return is_data(method, key) && mb_starts_with(key, "iter_0000030/");
}

static enum fake_verdict hold_30(struct world *w, const char *method, const char *key, int part)
{
    (void)part;
    if (!is_of_iteration_30(method, key))
        return FAKE_ANSWER;
    note(w, key);
    return w->holds ? FAKE_HOLD : FAKE_ANSWER;
}

/* A node that hears of it sends no more of it, and waits for nothing: whether its own part is
 * there, or it sends, or has not even saved. */
static void test_what_another_node_gave_up(void **state)
{
    static const char why[] = "node 1 has given it up";
    struct world *w = *state;
    struct node n[2], *first[] = {&n[0]};

    two_nodes(w, n);
    save(&n[0], 10, 1, 100);
    save_but(&n[1], 10, 1, 100, 1);
    RUN_UNTIL(&w->at, n[1].n_dropped == 1);
    assert_true(n[1].n_never == 1 && n[1].never[0] == 10);
    RUN_UNTIL(&w->at, fake_has_object(w->s3, "iter_0000010/.mobula/part-0-of-2.json"));
    assert_true(mb_upload_is_busy(n[0].u));
    mb_upload_given_up(n[0].u, 10, why);
    assert_true(n[0].n_dropped == 1 && n[0].dropped[0] == 10);
    assert_string_equal(n[0].error, "iteration 10 is not durable: node 1 has given it up");
    run_until_idle(&w->at, first, 1);

    w->judge = hold_30;
    w->holds = 1;
    save(&n[0], 30, 64, 2 * MIB);
    RUN_UNTIL(&w->at, w->n_seen >= 4);
    mb_upload_given_up(n[0].u, 30, why);
    w->holds = 0;
    w->n_seen = 0;
    fake_release(w->s3);
    run_until_idle(&w->at, first, 1);
    print_message("%zu of 64 files were begun\n", w->n_seen);
    assert_true(w->n_seen <= 32); /* so many at a time */

    mb_upload_given_up(n[0].u, 50, why);
    save(&n[0], 50, 1, 100);
    assert_false(mb_upload_is_busy(n[0].u));
    run_for(&w->at, 300);
    assert_false(fake_has_object(w->s3, "iter_0000050/rank0-00"));
    assert_int_equal(n[0].n_dropped, 3);

    for (int i = 0; i < 2; i++)
        save(&n[i], 60, 1, 100);
    for (int i = 0; i < 2; i++)
        RUN_UNTIL(&w->at, has(n[i].committed, n[i].n_committed, 60));
    mb_upload_given_up(n[0].u, 60, why); /* too late: it is durable */
    assert_int_equal(n[0].n_dropped, 3);
    for (int i = 0; i < 2; i++)
        node_close(&n[i]);
}

/* With its part in the store others can still make it durable. */
static void test_given_up_after_its_part(void **state)
{
    struct world *w = *state;
    struct node n[2];

    two_nodes(w, n);
    save(&n[0], 10, 1, 100);
    RUN_UNTIL(&w->at, fake_has_object(w->s3, "iter_0000010/.mobula/part-0-of-2.json"));
    run_for(&w->at, 100);
    mb_upload_abandon(n[0].u, 0);
    assert_int_equal(n[0].n_dropped, 1);
    assert_int_equal(n[0].n_never, 0);
    save(&n[1], 10, 1, 100);
    RUN_UNTIL(&w->at, n[1].n_committed == 1);
    for (int i = 0; i < 2; i++)
        node_close(&n[i]);
}

static enum fake_verdict hold_node_1(struct world *w, const char *method, const char *key, int part)
{
    (void)part;
    if (!is_data(method, key))
        return FAKE_ANSWER;
    if (strstr(key, "/rank1-") != NULL || w->holds)
        return FAKE_HOLD;
    note(w, key);
    return FAKE_ANSWER;
}

/* One node has time for either iteration, the other for the older one only: both send that first,
 * or neither would be whole at the deadline. */
static void test_what_another_node_leaves(void **state)
{
    struct world *w = *state;
    struct node n[2];
    int64_t deadline = (int64_t)mb_unix_ms() + 300000;

    w->judge = hold_node_1;
    w->holds = 1;
    two_nodes(w, n);
    for (int i = 0; i < 2; i++) {
        mb_upload_deadline(n[i].u, deadline, 4 * MIB / 10);
        save(&n[i], 10, 24, 2 * MIB);               /* 120 s */
        save(&n[i], 20, i == 0 ? 24 : 80, 2 * MIB); /* node 1 takes 400 s */
    }
    RUN_UNTIL(&w->at, n[1].n_left == 1);
    assert_int_equal(n[1].left[0], 20);
    assert_int_equal(n[0].n_left, 0);
    mb_upload_left(n[0].u, 20, 1);
    w->holds = 0;
    fake_release(w->s3);
    RUN_UNTIL(&w->at, w->n_seen == 48);
    print_message("the last of 10 is number %zu\n", last_seen(w, "iter_0000010/"));
    assert_true(last_seen(w, "iter_0000010/") < last_seen(w, "iter_0000020/"));
    for (int i = 0; i < 2; i++)
        node_close(&n[i]);
}

/* However many wait for a part that never comes, the next save is taken. */
static void test_many_incomplete_ones(void **state)
{
    struct world *w = *state;
    struct node n[2];

    two_nodes(w, n);
    for (int64_t i = 1; i <= 255; i++)
        save(&n[0], i, 1, 100);
    save(&n[1], 255, 1, 100);
    for (int i = 0; i < 2; i++)
        RUN_UNTIL(&w->at, n[i].n_committed == 1);
    for (int64_t i = 256; i <= 258; i++)
        save(&n[0], i, 1, 100);
    assert_int_equal(n[0].n_dropped, 1);
    assert_int_equal(n[0].dropped[0], 1);
    save(&n[1], 258, 1, 100);
    for (int i = 0; i < 2; i++)
        RUN_UNTIL(&w->at, has(n[i].committed, n[i].n_committed, 258));
    for (int i = 0; i < 2; i++)
        node_close(&n[i]);
}

/* ---- files of a foreign trainer ---- */

static void write_file(const char *dir, const char *name, const char *last)
{
    char path[700], made[720];
    int fd;

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    snprintf(made, sizeof(made), "%s/.mobula-new", dir); /* renamed into place, as trainers do */
    fd = open(made, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    assert_true(fd >= 0 && pwrite(fd, last, 1, 2 * MIB) == 1);
    close(fd);
    assert_int_equal(rename(made, path), 0);
}

/* One of two files is another one, of the same size, when both are with the store; with the old
 * one of the other that would be a checkpoint that nobody saved. has_restarted: in between the
 * agent was started again, and knows of the files from its journal. */
static void written_again(struct world *w, int has_restarted)
{
    struct node a = {.at = &w->at, .gang = "aa", .attempt = 1, .num_nodes = 1};
    struct mb_err err;
    char own[400];

    w->judge = hold_data;
    w->holds = 1;
    w->n_seen = 0;
    node_open(&a);
    node_iteration_dir(&a, 10, own, sizeof(own));
    write_file(own, "rank0-00", "a");
    write_file(own, "rank0-01", "a");
    assert_int_equal(mb_upload_seal(a.u, 10, NULL, 0, &err), MB_OK);
    RUN_UNTIL(&w->at, w->n_seen == 2);
    if (has_restarted)
        node_close(&a);
    write_file(own, "rank0-01", "b");
    if (has_restarted)
        node_open(&a);
    w->holds = 0;
    fake_release(w->s3);
    RUN_UNTIL(&w->at, a.n_dropped + a.n_committed == 1);
    assert_int_equal(a.n_dropped, 1);
    assert_non_null(strstr(a.error, "rank0-01: it changed after it was saved (written again)"));
    RUN_UNTIL(&w->at, !mb_upload_is_busy(a.u));
    assert_false(fake_has_object(w->s3, "latest_checkpointed_iteration.txt"));
    node_close(&a);
}

static void test_written_again_while_it_is_sent(void **state)
{
    written_again(*state, 0);
}

static void test_written_again_while_the_agent_is_away(void **state)
{
    written_again(*state, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_what_is_preferred_goes_first, setup, teardown),
        cmocka_unit_test_setup_teardown(test_written_again_while_it_is_sent, setup, teardown),
        cmocka_unit_test_setup_teardown(test_written_again_while_the_agent_is_away, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_a_successor_keeps_its_uploads, setup, teardown),
        cmocka_unit_test_setup_teardown(test_uploads_without_an_id, setup, teardown),
        cmocka_unit_test_setup_teardown(test_an_upload_that_comes_late, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_slow_store_is_cleaned, setup, teardown),
        cmocka_unit_test_setup_teardown(test_cleaning_ends_in_time, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_dropped_one_is_swept_once, setup, teardown),
        cmocka_unit_test_setup_teardown(test_commits_past_an_incomplete_one, setup, teardown),
        cmocka_unit_test_setup_teardown(test_what_another_node_gave_up, setup, teardown),
        cmocka_unit_test_setup_teardown(test_given_up_after_its_part, setup, teardown),
        cmocka_unit_test_setup_teardown(test_what_another_node_leaves, setup, teardown),
        cmocka_unit_test_setup_teardown(test_many_incomplete_ones, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
