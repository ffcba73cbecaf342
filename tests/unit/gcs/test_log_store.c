/* A log read from the pieces that an agent left in a store, here a directory. */
#include "loop.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "gcs/log_store.h"
#include "gcs/services.h"

enum { READERS = 16, WHOLE_BYTES = 4096 };

struct fixture {
    uv_loop_t loop;
    struct mb_head head; /* as much of it as a reader needs */
    char dir[64], url[80];
    int n_ready;
};

static void begin(struct fixture *f)
{
    memset(f, 0, sizeof *f);
    assert_int_equal(uv_loop_init(&f->loop), 0);
    f->head.loop = &f->loop;
    snprintf(f->dir, sizeof f->dir, "/tmp/mb-logstore-XXXXXX");
    assert_non_null(mkdtemp(f->dir));
    snprintf(f->url, sizeof f->url, "file://%s", f->dir);
}

static void end(struct fixture *f)
{
    struct mb_err err;

    uv_run(&f->loop, UV_RUN_DEFAULT);
    assert_int_equal(f->head.n_log_stores, 0);
    assert_int_equal(uv_loop_close(&f->loop), 0);
    assert_int_equal(mb_fs_remove_tree(f->dir, &err), 0);
}

static void put(struct fixture *f, unsigned long long at, const char *text)
{
    char path[200];
    struct mb_err err;

    snprintf(path, sizeof path, "%s/logs/j/driver", f->dir);
    assert_int_equal(mb_fs_mkdir_p(path, 0700, &err), 0);
    snprintf(path, sizeof path, "%s/logs/j/driver/%020llu.log", f->dir, at);
    assert_int_equal(mb_fs_write_atomic(path, text, strlen(text), 0600, &err), 0);
}

static void on_ready(void *arg)
{
    ((struct fixture *)arg)->n_ready++;
}

static int open_log(struct fixture *f, struct log_start start, int may_be_empty,
                    struct log_store **out, struct mb_err *err)
{
    struct log_store_opts opts = {.url = f->url,
                                  .prefix = "logs/j/driver/",
                                  .start = start,
                                  .may_be_empty = may_be_empty,
                                  .ready = on_ready,
                                  .arg = f};

    return head_log_store_open(&f->head, &opts, out, err);
}

/* To its end, at most 5 bytes at a time; gaps become "<offset>". */
static int read_all(struct fixture *f, struct log_store *s, char *text, struct mb_err *err)
{
    uint64_t next = UINT64_MAX;
    struct log_piece p;
    int rc;

    *text = '\0';
    while ((rc = head_log_store_peek(s, 5, &p, err)) == 0 && !p.at_end) {
        if (p.n == 0) {
            int before = f->n_ready;
            while (f->n_ready == before)
                uv_run(&f->loop, UV_RUN_ONCE);
            continue;
        }
        if (p.offset != next)
            sprintf(text + strlen(text), "<%llu>", (unsigned long long)p.offset);
        next = p.offset + p.n;
        sprintf(text + strlen(text), "%.*s", (int)p.n, (const char *)p.data);
        head_log_store_advance(s, p.n);
    }
    return rc;
}

static void expect(struct fixture *f, struct log_start start, const char *want)
{
    struct log_store *s;
    struct mb_err err = {0};
    char text[WHOLE_BYTES];

    assert_int_equal(open_log(f, start, 0, &s, &err), 0);
    assert_int_equal(read_all(f, s, text, &err), 0);
    assert_string_equal(text, want);
    head_log_store_close(s);
}

static void pieces_are_one_log(void **state)
{
    struct fixture f;

    (void)state;
    begin(&f);
    put(&f, 0, "one\ntwo\nthr");
    put(&f, 11, "ee\nfour\n");
    put(&f, 19, "five");
    put(&f, 23, "");
    expect(&f, (struct log_start){0}, "<0>one\ntwo\nthree\nfour\nfive");
    expect(&f, (struct log_start){.offset = 9}, "<9>hree\nfour\nfive");
    expect(&f, (struct log_start){.offset = 11}, "<11>ee\nfour\nfive");
    expect(&f, (struct log_start){.offset = 99}, "");
    end(&f);
}

static void the_last_lines(void **state)
{
    static const char *const want[] = {"",
                                       "<14>four\n",
                                       "<8>three\nfour\n",
                                       "<4>two\nthree\nfour\n",
                                       "<0>one\ntwo\nthree\nfour\n",
                                       "<0>one\ntwo\nthree\nfour\n"};
    struct fixture f;

    (void)state;
    begin(&f);
    put(&f, 0, "one\ntwo\nthr");
    put(&f, 11, "ee\nf");
    put(&f, 15, "our\n");
    for (uint64_t n = 0; n < 6; n++)
        expect(&f, (struct log_start){.has_tail = 1, .tail_lines = n}, want[n]);
    end(&f);
}

static void gaps_and_overlaps(void **state)
{
    struct fixture f;
    struct log_store *s;
    struct log_piece p;
    struct mb_err err = {0};
    char text[WHOLE_BYTES];

    (void)state;
    begin(&f);
    put(&f, 5, "abcdef"); /* the front was released */
    put(&f, 8, "DEF");    /* sent again after it was shortened */
    put(&f, 20, "late");
    expect(&f, (struct log_start){0}, "<5>abcDEF<20>late");
    assert_int_equal(open_log(&f, (struct log_start){0}, 0, &s, &err), 0);
    assert_int_equal(head_log_store_peek(s, 5, &p, &err), 0); /* not yet */
    assert_true(p.n == 0 && !p.at_end);
    assert_int_equal(read_all(&f, s, text, &err), 0);
    assert_int_equal(head_log_store_first(s), 5);
    assert_int_equal(head_log_store_end(s), 24);
    head_log_store_close(s);
    end(&f);
}

static void what_cannot_be_read(void **state)
{
    struct fixture f;
    struct log_store *s, *many[READERS];
    struct mb_err err = {0};
    char text[WHOLE_BYTES];

    (void)state;
    begin(&f);
    assert_int_equal(open_log(&f, (struct log_start){0}, 0, &s, &err), 0);
    assert_int_equal(read_all(&f, s, text, &err), MB_EUNAVAIL);
    assert_non_null(strstr(err.text, "lost before it sent any"));
    head_log_store_close(s);
    assert_int_equal(open_log(&f, (struct log_start){0}, 1, &s, &err), 0);
    assert_int_equal(read_all(&f, s, text, &err), 0);
    assert_string_equal(text, "");
    head_log_store_close(s);
    assert_int_equal(open_log(&f, (struct log_start){.since_unix_ms = 1}, 0, &s, &err),
                     MB_EUNSUPPORTED);
    put(&f, 0, "here");
    for (int i = 0; i < READERS; i++)
        assert_int_equal(open_log(&f, (struct log_start){0}, 0, &many[i], &err), 0);
    assert_int_equal(open_log(&f, (struct log_start){0}, 0, &s, &err), MB_EUNAVAIL);
    assert_non_null(strstr(err.text, "ask again"));
    for (int i = 0; i < READERS; i++)
        head_log_store_close(many[i]); /* while they are listed */
    expect(&f, (struct log_start){0}, "<0>here");
    end(&f);
}

/* More followers than may read at a time wait at the end of theirs. */
static void who_waits_at_the_end_keeps_nobody_out(void **state)
{
    struct fixture f;
    struct log_store *many[READERS + 1];
    struct log_piece p;
    struct mb_err err = {0};
    char text[WHOLE_BYTES];

    (void)state;
    begin(&f);
    put(&f, 3, "here");
    for (int i = 0; i < READERS + 1; i++) {
        assert_int_equal(open_log(&f, (struct log_start){0}, 0, &many[i], &err), 0);
        assert_int_equal(f.head.n_log_stores, 1);
        assert_int_equal(read_all(&f, many[i], text, &err), 0);
        assert_string_equal(text, "<3>here");
    }
    for (int i = 0; i < READERS + 1; i++) {
        if (i == READERS) /* else it is closed while its store is being closed */
            uv_run(&f.loop, UV_RUN_DEFAULT);
        assert_int_equal(head_log_store_peek(many[i], 5, &p, &err), 0);
        assert_true(p.at_end && p.n == 0 && p.offset == 7);
        assert_int_equal(head_log_store_first(many[i]), 3);
        assert_int_equal(head_log_store_end(many[i]), 7);
        head_log_store_close(many[i]);
    }
    expect(&f, (struct log_start){0}, "<3>here");
    end(&f);
}

/* A piece is deleted between the list and its turn. */
static void a_piece_goes_away(void **state)
{
    struct fixture f;
    struct log_store *s;
    struct log_piece p;
    struct mb_err err = {0};
    char path[200], text[WHOLE_BYTES];

    (void)state;
    begin(&f);
    put(&f, 0, "here");
    assert_int_equal(open_log(&f, (struct log_start){0}, 0, &s, &err), 0);
    while (f.n_ready == 0)
        uv_run(&f.loop, UV_RUN_ONCE);
    snprintf(path, sizeof path, "%s/logs/j/driver/%020d.log", f.dir, 0);
    assert_int_equal(remove(path), 0);
    assert_int_equal(head_log_store_peek(s, 5, &p, &err), 0);
    assert_int_equal(read_all(&f, s, text, &err), MB_EUNAVAIL);
    assert_non_null(strstr(err.text, "a piece of the log cannot be read"));
    head_log_store_close(s);
    end(&f);
}

static void memory_runs_out(void **state)
{
    struct fixture f;
    int done = 0;

    (void)state;
    begin(&f);
    put(&f, 0, "one\n");
    put(&f, 4, "two\n");
    for (unsigned long n = 1; !done; n++) {
        struct log_store *s = NULL;
        struct mb_err err = {0};
        char text[WHOLE_BYTES] = "";
        int rc;

        assert_true(n < 10000);
        mb_alloc_fail_nth(n);
        rc = open_log(&f, (struct log_start){.has_tail = 1, .tail_lines = 2}, 0, &s, &err);
        if (rc == 0)
            rc = read_all(&f, s, text, &err);
        done = !mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        assert_true(rc == 0 ? strcmp(text, "<0>one\ntwo\n") == 0 : err.code == rc);
        assert_true(rc == 0 || !done);
        head_log_store_close(s);
        uv_run(&f.loop, UV_RUN_DEFAULT);
    }
    end(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pieces_are_one_log),
        cmocka_unit_test(the_last_lines),
        cmocka_unit_test(gaps_and_overlaps),
        cmocka_unit_test(what_cannot_be_read),
        cmocka_unit_test(who_waits_at_the_end_keeps_nobody_out),
        cmocka_unit_test(a_piece_goes_away),
        cmocka_unit_test(memory_runs_out),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
