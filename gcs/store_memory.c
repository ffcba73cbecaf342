/*
 * The store without a disk: what is written is kept at the next turn of the loop, and gone with
 * the process. For clusters that end with their head, and for those who want the speed.
 */
#include "base/alloc.h"
#include "gcs/store_backend.h"

struct memory {
    struct mb_tables *tables;
    struct store_queue waiting;
    uv_idle_t turn; /* active while something waits */
    int closing;
};

static void on_closed(uv_handle_t *handle)
{
    struct memory *m = handle->data;
    struct mb_tables *s = m->tables;

    mb_free(m);
    tables_closed(s);
}

static void on_turn(uv_idle_t *turn)
{
    struct memory *m = turn->data;
    struct store_queue batch = {0};

    store_queue_append(&batch, &m->waiting);
    uv_idle_stop(turn);
    tables_kept(m->tables, &batch);
    if (m->closing && !m->waiting.head)
        uv_close((uv_handle_t *)&m->turn, on_closed);
}

static void submit(void *self, struct store_write *w)
{
    struct memory *m = self;

    store_queue_push(&m->waiting, w);
    uv_idle_start(&m->turn, on_turn);
}

static void close_memory(void *self)
{
    struct memory *m = self;

    m->closing = 1;
    uv_idle_start(&m->turn, on_turn);
}

int mb_tables_open_memory(uv_loop_t *loop, struct mb_tables **out, struct mb_err *err)
{
    static const struct store_backend backend = {submit, close_memory};
    struct mb_tables *s = tables_create("store memory");
    struct memory *m = mb_calloc(1, sizeof *m);

    *out = NULL;
    if (!s || !m) {
        if (s)
            tables_free(s);
        mb_free(m);
        return mb_err_set(err, MB_ENOMEM, "store memory: out of memory");
    }
    m->tables = s;
    uv_idle_init(loop, &m->turn);
    m->turn.data = m;
    s->backend = &backend;
    s->self = m;
    *out = s;
    return 0;
}
