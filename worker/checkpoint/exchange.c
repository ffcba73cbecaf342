/*
 *  1. A window starts as zeros. The rank adds what it gives: of its part the runs that lie in the
 *     window, of a whole buffer the overlap.
 *  2. The sum over ranks, of words of 64 bits: every element is one rank's, and zeros are the
 * others', so nothing carries and it is that element's bits, a negative zero's and a NaN's too.
 *  3. The rank takes what it wants, in the same way.
 * Failure: a rank that cannot read gives zeros and says so at the end, so that nobody waits for it.
 */
#include "worker/checkpoint/exchange.h"

#include <string.h>
#include "worker/checkpoint/common.h"
#include "worker/checkpoint/watch.h"

struct window {
    size_t begin, end; /* of the whole model's flat buffer */
    float *p;
};

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

static void move(float *window, float *own, size_t n, int gives)
{
    memcpy(gives ? window : own, gives ? own : window, n * sizeof *own);
}

/* One run of a part: elements [whole, whole + n) of the whole buffer, [own, own + n) of the rank's.
 */
static void move_run(const struct window *w, const struct mb_exchange_side *s, size_t whole,
                     size_t own, size_t n, int gives)
{
    size_t from = larger(whole, w->begin), to = smaller(whole + n, w->end);
    if (from >= to) {
        return;
    }
    size_t own_from = larger(own + (from - whole), s->begin);
    size_t own_to = smaller(own + (to - whole), s->end);
    if (own_from < own_to) {
        move(w->p + (whole + (own_from - own) - w->begin), s->p + (own_from - s->begin),
             own_to - own_from, gives);
    }
}

static void move_parts(const struct mb_checkpoint_model *m, const struct window *w,
                       const struct mb_exchange_side *s, int gives)
{
    for (size_t i = 0; i < m->n_tensors; i++) {
        const struct mb_checkpoint_tensor *t = &m->tensors[i];
        const struct mb_checkpoint_part *p = &m->layout->parts[i];
        if (t->offset >= w->end || t->offset + t->n <= w->begin || p->n == 0 ||
            (gives && p->is_another_s)) {
            continue;
        }
        size_t skip = w->begin > t->offset + p->start ? w->begin - t->offset - p->start : 0;
        for (size_t k = skip / p->stride; k * p->run < p->n; k++) {
            size_t whole = t->offset + p->start + k * p->stride;
            if (whole >= w->end) {
                break;
            }
            move_run(w, s, whole, p->offset + k * p->run, p->run, gives);
        }
    }
}

static int move_side(const struct mb_checkpoint_model *m, const struct window *w,
                     const struct mb_exchange_side *s, int gives, struct mb_err *err)
{
    if (s->read != NULL) {
        return s->read(s->arg, w->p, w->begin, w->end, err);
    }
    if (s->p != NULL && s->is_part) {
        move_parts(m, w, s, gives);
    } else if (s->p != NULL) {
        move_run(w, s, s->begin, s->begin, s->end - s->begin, gives);
    }
    return 0;
}

int mb_checkpoint_exchange(const struct mb_checkpoint_model *m, struct mb_comm *comm,
                           const struct mb_exchange_side *give, const struct mb_exchange_side *take,
                           float *window, struct mb_err *err)
{
    struct mb_err of_reading = {0};
    int read_rc = 0;
    for (size_t begin = 0; begin < m->n_elements; begin += MB_EXCHANGE_WINDOW) {
        struct window w = {begin, smaller(begin + MB_EXCHANGE_WINDOW, m->n_elements), window};
        const size_t n_words = (w.end - w.begin + 1) / 2;
        memset(window, 0, n_words * sizeof(int64_t));
        if (read_rc == 0) {
            read_rc = move_side(m, &w, give, 1, &of_reading);
        }
        mb_comm_allreduce(comm, NULL, window, n_words, MB_COMM_I64, MB_COMM_SUM);
        int rc = mb_comm_synchronize(comm, err);
        if (rc != 0) {
            return rc;
        }
        (void)move_side(m, &w, take, 0, err); /* memory: it cannot fail */
        if (m->progress != NULL) {
            mb_checkpoint_progress_move(m->progress);
        }
    }
    if (read_rc != 0) {
        *err = of_reading;
    }
    return mb_checkpoint_agree(comm, read_rc, "exchanging a checkpoint's parts", err);
}
