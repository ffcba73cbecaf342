#include "nodes.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>
#include "agent/upload/manifest.h"
#include "base/buf.h"
#include "base/clock.h"
#include "base/fs.h"

/* ---- the place ---- */

static void on_deadline(uv_timer_t *t)
{
    (void)t;
    print_error("deadline\n");
    _exit(65);
}

void place_open(struct place *p, const char *name, uint64_t deadline_ms)
{
    snprintf(p->dir, sizeof(p->dir), "/tmp/mobula-%.30s-XXXXXX", name);
    assert_non_null(mkdtemp(p->dir));
    assert_int_equal(uv_loop_init(&p->loop), 0);
    uv_timer_init(&p->loop, &p->deadline);
    uv_timer_start(&p->deadline, on_deadline, deadline_ms, 0);
}

int place_can_close(const struct place *p)
{
    if (p->n_open == 0)
        return 1;
    mb_fs_remove_tree(p->dir, NULL);
    return 0;
}

void place_close(struct place *p)
{
    uv_close((uv_handle_t *)&p->deadline, NULL);
    uv_run(&p->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&p->loop), 0);
    mb_fs_remove_tree(p->dir, NULL);
}

void run_for(struct place *p, uint64_t ms)
{
    uint64_t end = mb_mono_ms() + ms;

    RUN_UNTIL(p, mb_mono_ms() >= end);
}

void run_until_idle(struct place *p, struct node *const *nodes, size_t n)
{
    for (size_t i = 0; i < n;)
        if (nodes[i]->u != NULL && mb_upload_is_busy(nodes[i]->u))
            uv_run(&p->loop, UV_RUN_ONCE);
        else
            i++;
}

/* ---- what an uploader says ---- */

int has(const int64_t *list, size_t n, int64_t iteration)
{
    for (size_t i = 0; i < n; i++)
        if (list[i] == iteration)
            return 1;
    return 0;
}

static void on_status(void *arg, const struct mb_upload_status *s)
{
    struct node *n = arg;

    if (s->committed && n->n_committed < NODE_SEEN_MAX)
        n->committed[n->n_committed++] = s->iteration;
    if (s->error[0] != '\0') {
        if (n->n_dropped < NODE_SEEN_MAX)
            n->dropped[n->n_dropped++] = s->iteration;
        snprintf(n->error, sizeof(n->error), "%s", s->error);
    }
    if (s->never && n->n_never < 8)
        n->never[n->n_never++] = s->iteration;
    if (s->is_left && n->n_left < 8 && !has(n->left, n->n_left, s->iteration))
        n->left[n->n_left++] = s->iteration;
}

static void on_sealed(void *arg, int64_t iteration, const uint64_t *prints, size_t n)
{
    ((struct node *)arg)->n_sealed++;
    (void)iteration;
    (void)prints;
    (void)n;
}

static void on_idle(void *arg)
{
    (void)arg;
}

static const struct mb_upload_ops ops = {on_status, on_sealed, on_idle};

/* ---- uploaders ---- */

void node_dir(const struct node *n, char *out, size_t size)
{
    snprintf(out, size, "%s/%s-%u-%u", n->at->dir, n->gang, n->attempt, n->rank);
}

void node_open(struct node *n)
{
    char dir[200];
    struct mb_upload_opts opts = {.dir = dir,
                                  .url = n->at->url,
                                  .local_dir = dir,
                                  .job_id = n->gang,
                                  .placement_group = n->gang,
                                  .attempt = n->attempt,
                                  .node_rank = n->rank,
                                  .num_nodes = n->num_nodes,
                                  .world_size = n->num_nodes,
                                  .ranks = &n->rank,
                                  .n_ranks = 1,
                                  .keep_last = n->keep_last,
                                  .local_keep_last = n->local_keep_last,
                                  .watch_tracker = n->watches,
                                  .has_ended = n->has_ended};
    struct mb_err err;

    node_dir(n, dir, sizeof(dir));
    assert_int_equal(mb_fs_mkdir_p(dir, 0755, NULL), 0);
    if (mb_upload_create(&n->at->loop, &opts, &ops, n, &n->u, &err) != MB_OK)
        fail_msg("%s", err.text);
    n->at->n_open++;
}

static void on_closed(void *arg)
{
    ((struct node *)arg)->is_closed = 1;
}

void node_close(struct node *n)
{
    n->is_closed = 0;
    mb_upload_close(n->u, on_closed, n);
    RUN_UNTIL(n->at, n->is_closed);
    n->u = NULL;
    n->at->n_open--;
}

int node_journal_has(const struct node *n, const char *record)
{
    char dir[200], path[300];
    struct mb_buf bytes = {0};
    int has_it;

    node_dir(n, dir, sizeof(dir));
    snprintf(path, sizeof(path), "%s/upload.journal", dir);
    assert_int_equal(mb_fs_read(path, 1 << 20, &bytes, NULL), MB_OK);
    has_it = memmem(bytes.data, bytes.len, record, strlen(record)) != NULL;
    mb_buf_close(&bytes);
    return has_it;
}

void node_launch(struct node *n)
{
    node_open(n);
    RUN_UNTIL(n->at, node_journal_has(n, "{\"r\":\"entered\"}"));
}

void node_adopt_ended(struct node *n)
{
    node_close(n);
    n->has_ended = 1;
    node_open(n);
    mb_upload_no_more(n->u);
}

void node_iteration_dir(const struct node *n, int64_t iteration, char *out, size_t size)
{
    char dir[200], name[MB_CHECKPOINT_KEY_MAX];

    node_dir(n, dir, sizeof(dir));
    snprintf(out, size, "%s/%s", dir, mb_iteration_dir(iteration, name));
    assert_int_equal(mb_fs_mkdir_p(out, 0755, NULL), 0);
}
