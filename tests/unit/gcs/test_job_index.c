/* Records by id, and which is forgotten: the one that ended first, never one that has not ended. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "gcs/job_index.h"

enum { N = 2000 };

static struct mb_job_entry entries[N];
static char ids[N][24];

static void fill(struct mb_job_index *x)
{
    memset(x, 0, sizeof *x);
    memset(entries, 0, sizeof entries);
    for (int i = 0; i < N; i++) {
        snprintf(ids[i], sizeof ids[i], "job-%d", i);
        entries[i].id = ids[i];
        entries[i].record = &ids[i];
        assert_int_equal(mb_job_index_add(x, &entries[i]), 0);
    }
}

static void empty(struct mb_job_index *x)
{
    for (int i = 0; i < N; i++)
        if (mb_job_index_find(x, ids[i]))
            mb_job_index_remove(x, &entries[i]);
    assert_int_equal(x->n, 0);
    assert_int_equal(x->n_ended, 0);
    assert_null(x->tree);
    assert_null(x->oldest);
    assert_null(x->newest);
}

static void found_by_id(void **state)
{
    struct mb_job_index x;

    (void)state;
    fill(&x);
    assert_int_equal(x.n, N);
    for (int i = 0; i < N; i++)
        assert_ptr_equal(mb_job_index_find(&x, ids[i]), &ids[i]);
    assert_null(mb_job_index_find(&x, "job-"));
    mb_job_index_remove(&x, &entries[7]);
    assert_null(mb_job_index_find(&x, ids[7]));
    assert_non_null(mb_job_index_find(&x, ids[8]));
    empty(&x);
    assert_null(mb_job_index_find(&x, ids[0]));
}

static void forgotten_in_the_order_of_their_ends(void **state)
{
    struct mb_job_index x;

    (void)state;
    fill(&x);
    assert_null(mb_job_index_surplus(&x, 0)); /* none has ended, whatever the bound */
    for (int i = N - 1; i >= 0; i -= 2) {     /* the later it was added the earlier it ends */
        mb_job_index_ended(&x, &entries[i]);
        mb_job_index_ended(&x, &entries[i]);
    }
    assert_int_equal(x.n_ended, N / 2);
    assert_null(mb_job_index_surplus(&x, N / 2));
    for (int i = N - 1; i >= 0; i -= 2) {
        assert_ptr_equal(mb_job_index_surplus(&x, 0), &ids[i]);
        mb_job_index_remove(&x, &entries[i]);
    }
    assert_null(mb_job_index_surplus(&x, 0));
    assert_int_equal(x.n, N / 2);
    empty(&x);
}

static void removed_from_the_middle(void **state)
{
    struct mb_job_index x;

    (void)state;
    fill(&x);
    for (int i = 0; i < 5; i++)
        mb_job_index_ended(&x, &entries[i]);
    mb_job_index_remove(&x, &entries[2]);
    mb_job_index_remove(&x, &entries[0]);
    mb_job_index_remove(&x, &entries[4]);
    assert_ptr_equal(mb_job_index_surplus(&x, 1), &ids[1]);
    mb_job_index_remove(&x, &entries[1]);
    assert_ptr_equal(mb_job_index_surplus(&x, 0), &ids[3]);
    assert_null(mb_job_index_surplus(&x, 1));
    empty(&x);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(found_by_id),
        cmocka_unit_test(forgotten_in_the_order_of_their_ends),
        cmocka_unit_test(removed_from_the_middle),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
