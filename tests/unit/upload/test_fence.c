/* Who may write: the rule, and the object in a directory as the store. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <uv.h>
#include <cmocka.h>
#include "agent/upload/claim.h"
#include "agent/upload/fence.h"
#include "base/alloc.h"
#include "base/buf.h"
#include "base/fs.h"

struct answer {
    int done;
    int code;
    char over[200];
};

static void on_answer(void *arg, const struct mb_err *err, const char *over)
{
    struct answer *a = arg;

    a->done = 1;
    a->code = err->code;
    snprintf(a->over, sizeof(a->over), "%s", over != NULL ? over : "");
}

static void on_closed(void *arg)
{
    *(int *)arg = 1;
}

static struct answer look(const char *dir, const char *gang, uint32_t attempt)
{
    struct mb_fence_writer writer = {.id = {"job", gang, attempt}};
    struct answer a = {0};
    struct mb_store *store = NULL;
    struct mb_err err = {0};
    char url[200];
    uv_loop_t loop;
    int closed = 0;

    snprintf(url, sizeof(url), "file://%s", dir);
    assert_int_equal(uv_loop_init(&loop), 0);
    assert_int_equal(mb_store_open(&loop, url, &store, &err), 0);
    assert_int_equal(mb_fence_look(store, &writer, on_answer, &a, &err), 0);
    while (!a.done)
        uv_run(&loop, UV_RUN_ONCE);
    mb_store_close(store, on_closed, &closed);
    while (!closed)
        uv_run(&loop, UV_RUN_ONCE);
    uv_run(&loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&loop), 0);
    return a;
}

static enum mb_fence_verdict decide_as(char **text, const struct mb_fence_writer *writer)
{
    enum mb_fence_verdict verdict;
    char *out = NULL;

    assert_int_equal(
        mb_fence_decide(*text, *text ? strlen(*text) : 0, writer, &verdict, &out, NULL), 0);
    assert_true((out != NULL) == (verdict != MB_FENCE_OURS));
    if (verdict == MB_FENCE_ENTER) {
        mb_free(*text);
        *text = out;
    } else {
        mb_free(out);
    }
    return verdict;
}

static enum mb_fence_verdict decide(char **text, const char *gang, uint32_t attempt)
{
    struct mb_fence_writer writer = {.id = {"job", gang, attempt}};

    return decide_as(text, &writer);
}

static enum mb_fence_verdict launch(char **text, const char *gang, uint32_t attempt,
                                    int64_t launched_unix_ms)
{
    struct mb_fence_writer writer = {
        .id = {"job", gang, attempt}, .launched_unix_ms = launched_unix_ms, .waits = 1};

    return decide_as(text, &writer);
}

/* With its first save, after the launch was noted. */
static enum mb_fence_verdict save(char **text, const char *gang, uint32_t attempt, int has_ended)
{
    struct mb_fence_writer writer = {
        .id = {"job", gang, attempt}, .has_entered = 1, .has_ended = has_ended};

    return decide_as(text, &writer);
}

static void test_launches(void **state)
{
    char *text = NULL;

    (void)state;
    assert_int_equal(launch(&text, "aa", 1, 10), MB_FENCE_ENTER);
    assert_int_equal(launch(&text, "aa", 1, 11), MB_FENCE_OURS); /* the other node */
    assert_int_equal(launch(&text, "bb", 1, 20), MB_FENCE_ENTER);
    /* Who waits ends nobody's uploads; who saves does, whoever saved first. */
    assert_int_equal(save(&text, "aa", 1, 0), MB_FENCE_ENTER);
    assert_int_equal(save(&text, "aa", 1, 1), MB_FENCE_OURS);
    assert_int_equal(launch(&text, "aa", 2, 30), MB_FENCE_OURS);
    assert_int_equal(save(&text, "aa", 1, 1), MB_FENCE_OURS);
    assert_int_equal(save(&text, "aa", 2, 0), MB_FENCE_ENTER);
    assert_int_equal(save(&text, "aa", 1, 1), MB_FENCE_OVER);
    assert_int_equal(save(&text, "bb", 1, 0), MB_FENCE_ENTER);
    assert_int_equal(save(&text, "bb", 1, 0), MB_FENCE_OURS);
    assert_int_equal(save(&text, "aa", 2, 1), MB_FENCE_OVER);
    assert_int_equal(launch(&text, "aa", 3, 40), MB_FENCE_OVER);
    mb_free(text);
    /* A gang that never saved, and whose successor did. */
    text = NULL;
    launch(&text, "aa", 1, 10);
    launch(&text, "bb", 1, 20);
    assert_int_equal(save(&text, "bb", 1, 0), MB_FENCE_ENTER);
    assert_int_equal(save(&text, "aa", 1, 1), MB_FENCE_OVER);
    mb_free(text);
}

/* Who is not in the list but was never enters anew behind somebody else. */
static void test_forgotten(void **state)
{
    char *text = NULL;

    (void)state;
    assert_int_equal(save(&text, "aa", 1, 1), MB_FENCE_OVER);
    assert_int_equal(save(&text, "aa", 1, 0), MB_FENCE_ENTER); /* its ranks run, nobody is there */
    mb_free(text);
    text = NULL;
    launch(&text, "bb", 1, 20);
    assert_int_equal(save(&text, "aa", 1, 0), MB_FENCE_OVER);
    assert_int_equal(save(&text, "aa", 1, 1), MB_FENCE_OVER);
    mb_free(text);
}

/* The store was away while they were launched: who has ended comes before those after it. */
static void test_late(void **state)
{
    struct mb_fence_writer late = {.id = {"job", "aa", 1}, .launched_unix_ms = 15, .has_ended = 1};
    struct mb_fence_writer later = {.id = {"job", "cc", 1}, .launched_unix_ms = 19, .has_ended = 1};
    struct mb_fence_writer behind = {.id = {"job", "dd", 1}, .launched_unix_ms = 9};
    char *text = NULL;

    (void)state;
    launch(&text, "00", 1, 10);
    save(&text, "00", 1, 1);
    launch(&text, "bb", 1, 20);
    assert_int_equal(decide_as(&text, &late), MB_FENCE_ENTER);
    assert_int_equal(decide_as(&text, &late), MB_FENCE_OURS);
    assert_int_equal(save(&text, "00", 1, 1), MB_FENCE_OVER);
    assert_int_equal(save(&text, "bb", 1, 0), MB_FENCE_ENTER);
    assert_int_equal(decide_as(&text, &late), MB_FENCE_OVER);
    assert_int_equal(decide_as(&text, &later), MB_FENCE_OVER);
    assert_int_equal(save(&text, "bb", 1, 0), MB_FENCE_OURS);
    /* One that runs is the newest, whatever its clock says. */
    assert_int_equal(decide_as(&text, &behind), MB_FENCE_ENTER);
    assert_int_equal(save(&text, "bb", 1, 0), MB_FENCE_OVER);
    /* The list is full: no place before all the others. */
    for (int i = 0; i < MB_FENCE_MAX; i++) {
        char gang[16];

        snprintf(gang, sizeof(gang), "c%d", i);
        launch(&text, gang, 1, 100 + i);
    }
    later.id.placement_group = "ee";
    assert_int_equal(decide_as(&text, &later), MB_FENCE_OVER);
    mb_free(text);
}

static void test_rule(void **state)
{
    char *text = NULL, gang[16];

    (void)state;
    assert_int_equal(decide(&text, "aa", 1), MB_FENCE_ENTER);
    assert_int_equal(decide(&text, "aa", 1), MB_FENCE_OURS); /* the other node of the attempt */
    assert_int_equal(decide(&text, "aa", 3), MB_FENCE_ENTER);
    assert_int_equal(decide(&text, "aa", 2), MB_FENCE_OVER);
    assert_int_equal(decide(&text, "bb", 1), MB_FENCE_ENTER);
    assert_int_equal(decide(&text, "aa", 3), MB_FENCE_OVER);
    assert_int_equal(decide(&text, "aa", 4), MB_FENCE_OVER); /* nobody comes back to the end */
    assert_int_equal(decide(&text, "bb", 1), MB_FENCE_OURS);
    for (int i = 0; i < 3 * MB_FENCE_MAX; i++) {
        snprintf(gang, sizeof(gang), "c%d", i);
        assert_int_equal(decide(&text, gang, 1), MB_FENCE_ENTER);
    }
    assert_true(strlen(text) < 100 * (size_t)MB_FENCE_MAX);
    assert_int_equal(decide(&text, "c190", 1), MB_FENCE_OVER);
    mb_free(text);
}

static void test_damage(void **state)
{
    static const char *const bad[] = {"x",
                                      "[]",
                                      "{}",
                                      "{\"version\":1}",
                                      "{\"version\":2,\"writers\":[]}",
                                      "{\"version\":1,\"writers\":[{}]}"};
    struct mb_fence_writer writer = {.id = {"job", "aa", 1}};
    enum mb_fence_verdict verdict;
    char *out = NULL;

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        assert_int_equal(mb_fence_decide(bad[i], strlen(bad[i]), &writer, &verdict, &out, NULL),
                         MB_ECORRUPT);
        assert_null(out);
    }
}

static void test_attempts(void **state)
{
    char dir[] = "/tmp/mobula-fence-XXXXXX", path[200];
    struct answer a;

    (void)state;
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof(path), "%s/" MB_FENCE_KEY, dir);
    for (int i = 0; i < 4; i++) {
        a = look(dir, "abcd", i < 2 ? 1 : 4);
        assert_true(a.code == 0 && a.over[0] == '\0');
    }
    for (uint32_t older = 1; older < 4; older++) {
        a = look(dir, "abcd", older);
        assert_int_equal(a.code, 0);
        assert_string_equal(a.over, "attempt 4 of its gang has taken over");
    }
    a = look(dir, "ef", 1);
    assert_true(a.code == 0 && a.over[0] == '\0');
    a = look(dir, "abcd", 4);
    assert_string_equal(a.over, "job job (gang ef) has taken over");
    assert_int_equal(mb_fs_write_atomic(path, "x", 1, 0644, NULL), 0); /* damaged: not known */
    assert_int_equal(look(dir, "abcd", 5).code, MB_ECORRUPT);
    assert_int_equal(mb_fs_remove_tree(dir, NULL), 0);
}

/* ---- a claim that appears while the list is looked at ---- */

static void post(uv_work_t *req)
{
    uv_sem_post(req->data);
}

static void after(uv_work_t *req, int status)
{
    (void)req;
    (void)status;
}

/* The one thread of the pool has done what was asked for so far; the loop has not heard of it. */
static void wait_for_pool(uv_loop_t *loop, uv_work_t *work, uv_sem_t *done)
{
    work->data = done;
    assert_int_equal(uv_sem_init(done, 0), 0);
    assert_int_equal(uv_queue_work(loop, work, post, after), 0);
    uv_sem_wait(done);
    uv_sem_destroy(done);
}

static void put_claim(const char *dir, const char *gang)
{
    struct mb_manifest_writer writer = {"job", gang, 1};
    struct mb_manifest m = {.iteration = 10, .node_rank = -1, .num_nodes = 1, .is_claim = 1};
    char path[200], key[MB_CHECKPOINT_KEY_MAX], *text = NULL;
    struct mb_err err;

    assert_int_equal(mb_manifest_set_writer(&m, &writer, &err), 0);
    assert_int_equal(mb_manifest_encode(&m, &text, &err), 0);
    snprintf(path, sizeof(path), "%s/%s", dir, mb_manifest_key(10, key));
    *strrchr(path, '/') = '\0';
    assert_int_equal(mb_fs_mkdir_p(path, 0755, NULL), 0);
    strcat(path, "/manifest.json");
    assert_int_equal(mb_fs_write_atomic(path, text, strlen(text), 0644, NULL), 0);
    mb_free(text);
    mb_manifest_close(&m);
}

struct claimed {
    int done, code, is_fenced;
};

static void on_claimed(void *arg, const struct mb_claim_answer *answer)
{
    *(struct claimed *)arg = (struct claimed){1, answer->err.code, answer->is_fenced};
}

/* bb enters and claims right after the first thing that aa has read: aa, the older, must not take
 * that claim away. */
static void test_a_claim_of_somebody_newer(void **state)
{
    char dir[] = "/tmp/mobula-fence-XXXXXX", url[200], path[200], key[MB_CHECKPOINT_KEY_MAX];
    struct mb_claim_opts opts = {
        .iteration = 10, .num_nodes = 1, .writer.id = {"job", "aa", 1}, .writer.has_entered = 1};
    struct claimed claimed = {0};
    struct mb_store *store = NULL;
    struct mb_buf bytes = {0};
    struct mb_err err = {0};
    uv_work_t work;
    uv_sem_t sem;
    uv_loop_t loop;
    int closed = 0;

    (void)state;
    assert_non_null(mkdtemp(dir));
    assert_string_equal(look(dir, "aa", 1).over, "");
    snprintf(url, sizeof(url), "file://%s", dir);
    assert_int_equal(uv_loop_init(&loop), 0);
    assert_int_equal(mb_store_open(&loop, url, &store, &err), 0);
    assert_int_equal(mb_claim_take(store, &opts, on_claimed, &claimed, &err), 0);
    wait_for_pool(&loop, &work, &sem);
    assert_string_equal(look(dir, "bb", 1).over, "");
    put_claim(dir, "bb");
    while (!claimed.done)
        uv_run(&loop, UV_RUN_ONCE);
    assert_int_equal(claimed.code, 0);
    assert_true(claimed.is_fenced);
    snprintf(path, sizeof(path), "%s/%s", dir, mb_manifest_key(10, key));
    assert_int_equal(mb_fs_read(path, 1 << 16, &bytes, NULL), 0);
    assert_non_null(strstr(mb_buf_str(&bytes), "\"bb\""));
    mb_buf_close(&bytes);
    mb_store_close(store, on_closed, &closed);
    while (!closed)
        uv_run(&loop, UV_RUN_ONCE);
    uv_run(&loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&loop), 0);
    assert_int_equal(mb_fs_remove_tree(dir, NULL), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rule),      cmocka_unit_test(test_launches),
        cmocka_unit_test(test_forgotten), cmocka_unit_test(test_late),
        cmocka_unit_test(test_damage),    cmocka_unit_test(test_a_claim_of_somebody_newer),
        cmocka_unit_test(test_attempts)};

    setenv("UV_THREADPOOL_SIZE", "1", 1); /* what is asked for is done in that order */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
