/* What the driver reads off the store about its newest checkpoint, here a directory. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "agent/upload/manifest.h"
#include "base/alloc.h"
#include "base/fs.h"
#include "cli/driver/internal.h"

enum { ITERATION = 10, ATTEMPT = 2 };

struct fixture {
    struct driver d;
    struct mb_driver_opts opts;
    char dir[64], url[80];
};

static void begin(struct fixture *f)
{
    const struct mb_drv_config config = {.n_nodes = 1, .ranks_per_node = 1, .has_url = 1};

    memset(f, 0, sizeof(*f));
    snprintf(f->dir, sizeof(f->dir), "/tmp/mb-durable-XXXXXX");
    assert_non_null(mkdtemp(f->dir));
    snprintf(f->url, sizeof(f->url), "file://%s", f->dir);
    f->opts = (struct mb_driver_opts){.checkpoint_url = f->url, .job_id = "j", .num_nodes = 1};
    f->d.opts = &f->opts;
    f->d.attempt = ATTEMPT;
    f->d.committed = -1;
    f->d.closing = 1; /* the answer is read; what follows from it is test_state's */
    assert_int_equal(uv_loop_init(&f->d.loop), 0);
    uv_timer_init(&f->d.loop, &f->d.pause);
    f->d.pause.data = &f->d;
    f->d.state = mb_drv_create(&config);
    for (int k = MB_DRV_CONNECTED; k <= MB_DRV_LAUNCHED; k++)
        if (k != MB_DRV_PAUSED)
            mb_drv_step(f->d.state, &(struct mb_drv_event){.kind = (enum mb_drv_event_kind)k});
    mb_drv_step(f->d.state, &(struct mb_drv_event){.kind = MB_DRV_SAVED, .iteration = ITERATION});
    assert_int_equal(mb_drv_saved(f->d.state), ITERATION);
}

static void end(struct fixture *f)
{
    struct mb_err err;

    uv_close((uv_handle_t *)&f->d.pause, NULL);
    uv_run(&f->d.loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&f->d.loop), 0);
    mb_drv_destroy(f->d.state);
    assert_int_equal(mb_fs_remove_tree(f->dir, &err), 0);
}

static void put(struct fixture *f, const char *key, const char *text)
{
    char path[300], *slash;
    struct mb_err err;

    snprintf(path, sizeof(path), "%s/%s", f->dir, key);
    slash = strrchr(path, '/');
    *slash = '\0';
    assert_int_equal(mb_fs_mkdir_p(path, 0700, &err), 0);
    *slash = '/';
    assert_int_equal(mb_fs_write_atomic(path, text, strlen(text), 0600, &err), 0);
}

static void put_manifest_of(struct fixture *f, int64_t iteration, const char *job_id,
                            uint32_t attempt)
{
    char key[MB_CHECKPOINT_KEY_MAX], gang[2 * MB_PG_ID_BYTES + 1] = {0};
    struct mb_manifest m = {.iteration = iteration, .node_rank = -1, .num_nodes = 1};
    struct mb_manifest_writer w = {job_id, gang, attempt};
    struct mb_err err;
    char *text;

    memset(gang, '0', sizeof(gang) - 1); /* the fixture's gang id */
    assert_int_equal(mb_manifest_set_writer(&m, &w, &err), 0);
    assert_int_equal(mb_manifest_add(&m, "shard", 4, 7, &err), 0);
    assert_int_equal(mb_manifest_encode(&m, &text, &err), 0);
    put(f, mb_manifest_key(iteration, key), text);
    mb_free(text);
    mb_manifest_close(&m);
}

static void put_manifest(struct fixture *f, const char *job_id, uint32_t attempt)
{
    put_manifest_of(f, ITERATION, job_id, attempt);
}

static int64_t asked(struct fixture *f)
{
    f->d.committed = -1;
    drv_ask_store(&f->d);
    assert_int_equal(f->d.committed, -1); /* not from inside the call */
    uv_run(&f->d.loop, UV_RUN_DEFAULT);
    return f->d.committed;
}

static void what_the_store_says(void **state)
{
    struct fixture f;

    (void)state;
    begin(&f);
    assert_int_equal(asked(&f), -1); /* nothing is there */
    put_manifest(&f, "j", ATTEMPT);
    assert_int_equal(asked(&f), -1); /* no pointer: a reader would not find it */
    put(&f, MB_LATEST_KEY, "8");
    assert_int_equal(asked(&f), -1);
    put(&f, MB_LATEST_KEY, "not a number");
    assert_int_equal(asked(&f), -1);
    put(&f, MB_LATEST_KEY, "10");
    assert_int_equal(asked(&f), ITERATION);
    put(&f, MB_LATEST_KEY, "12");
    assert_int_equal(asked(&f), ITERATION);
    put_manifest(&f, "j", ATTEMPT - 1);
    assert_int_equal(asked(&f), -1); /* what an older attempt saved is not what was saved now */
    put_manifest(&f, "another", ATTEMPT);
    assert_int_equal(asked(&f), -1);
    f.opts.checkpoint_url = "nothing://there";
    assert_int_equal(asked(&f), -1);
    end(&f);
}

/* Of several that were saved, each is asked for; one that is missing hides no other. */
static void several(void **state)
{
    struct fixture f;

    (void)state;
    begin(&f);
    for (int64_t it = 2; it <= 8; it += 3) /* 2, 5, 8, and 10 of begin() */
        mb_drv_step(f.d.state, &(struct mb_drv_event){.kind = MB_DRV_SAVED, .iteration = it});
    put(&f, MB_LATEST_KEY, "8");
    put_manifest_of(&f, 2, "j", ATTEMPT);
    put_manifest_of(&f, 8, "j", ATTEMPT);
    put_manifest_of(&f, 10, "j", ATTEMPT); /* the pointer has not reached it */
    assert_int_equal(asked(&f), 8);
    f.d.closing = 0;
    assert_int_equal(asked(&f), 8); /* now it is told */
    f.d.closing = 1;
    assert_int_equal(mb_drv_open(f.d.state, -1), 5);
    assert_int_equal(mb_drv_open(f.d.state, 5), 10);
    assert_int_equal(mb_drv_open(f.d.state, 10), -1);
    end(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(what_the_store_says),
                                       cmocka_unit_test(several)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
