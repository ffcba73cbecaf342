/* Collectives: right, bit for bit the same on every rank and carrier, and loud when ranks disagree.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/half.h"
#include "tests/unit/worker/comm_world.h"
#include "worker/parallel/comm_rendezvous.h"

static const size_t SIZES[] = {1, 2, 3, 5, 7, 64, 1001, 700001};
enum { N_SIZES = sizeof SIZES / sizeof SIZES[0] };

/* Values whose sum depends on the order of adding. */
static float value(uint32_t rank, size_t i)
{
    uint64_t x = ((uint64_t)rank + 1) * 0x9E3779B97F4A7C15ULL + i * 0xBF58476D1CE4E5B9ULL;
    x ^= x >> 31;
    return (float)((double)(x % 2000003) / 7.0 - 142857.0);
}

static float expected_sum(size_t n, uint32_t world, size_t i)
{
    for (uint32_t owner = 0; owner < world; owner++) {
        size_t begin, end;
        mb_comm_range(n, world, owner, &begin, &end);
        if (i >= begin && i < end) {
            float sum = value((owner + 1) % world, i);
            for (uint32_t k = 2; k <= world; k++) {
                sum = value((owner + k) % world, i) + sum;
            }
            return sum;
        }
    }
    return 0;
}

static void sums(struct mb_comm *c, void *arg)
{
    (void)arg;
    uint32_t w = mb_comm_world_size(c), rank = mb_comm_rank(c);
    struct mb_err err;
    for (int s = 0; s < N_SIZES; s++) {
        size_t n = SIZES[s], begin, end;
        float *a = mb_calloc(n, sizeof *a), *b = mb_calloc(n, sizeof *b);
        for (size_t i = 0; i < n; i++) {
            a[i] = b[i] = value(rank, i);
        }
        mb_comm_allreduce(c, NULL, a, n, MB_COMM_F32, MB_COMM_SUM);
        mb_comm_reduce_scatter(c, NULL, b, n, MB_COMM_F32, MB_COMM_SUM);
        CHECK(mb_comm_synchronize(c, &err) == 0);
        mb_comm_range(n, w, rank, &begin, &end);
        CHECK(memcmp(a + begin, b + begin, (end - begin) * sizeof *a) == 0);
        mb_comm_allgather(c, NULL, b, n, MB_COMM_F32);
        CHECK(mb_comm_synchronize(c, &err) == 0);
        CHECK(memcmp(a, b, n * sizeof *a) == 0);
        size_t bad = 0;
        for (size_t i = 0; i < n; i++) {
            float e = expected_sum(n, w, i);
            bad += memcmp(&a[i], &e, sizeof e) != 0;
        }
        CHECK(bad == 0);
        for (size_t i = 0; i < n; i++) {
            b[i] = value(rank, i);
        }
        mb_comm_reduce(c, NULL, b, n, MB_COMM_F32, MB_COMM_SUM, w - 1);
        CHECK(mb_comm_synchronize(c, &err) == 0);
        CHECK(rank != w - 1 || memcmp(a, b, n * sizeof *a) == 0);
        mb_free(a);
        mb_free(b);
    }
}

static uint16_t half_of(float x, enum mb_comm_type type)
{
    return type == MB_COMM_F16 ? mb_float_f16(x) : mb_float_bf16(x);
}

/* In fp16 or bf16, and an odd number of them: what is exact in it comes out exact, what is too
 * large is infinite. */
static void halves(struct mb_comm *c, enum mb_comm_type type)
{
    enum { N = 100001 };
    const float large = type == MB_COMM_F16 ? 60000 : 3e38f;
    const uint32_t w = mb_comm_world_size(c), rank = mb_comm_rank(c);
    uint16_t *sum = mb_calloc(N, sizeof *sum), *max = mb_calloc(N, sizeof *max);
    struct mb_err err;
    for (size_t i = 0; i < N; i++) {
        sum[i] = half_of(i + 1 < N ? (float)(rank + i % 19) / 8 : large, type);
        max[i] = half_of((float)(rank + i % 19) / 8 - 7, type);
    }
    mb_comm_allreduce(c, NULL, sum, N, type, MB_COMM_SUM);
    mb_comm_allreduce(c, NULL, max, N, type, MB_COMM_MAX);
    CHECK(mb_comm_synchronize(c, &err) == 0);
    size_t bad = 0;
    for (size_t i = 0; i < N; i++) {
        const float all = (float)(w * (i % 19) + w * (w - 1) / 2) / 8;
        bad += sum[i] != half_of(i + 1 < N ? all : large * (float)w, type);
        bad += max[i] != half_of((float)(w - 1 + i % 19) / 8 - 7, type);
    }
    CHECK(bad == 0);
    mb_free(sum);
    mb_free(max);
}

static void others(struct mb_comm *c, void *arg)
{
    (void)arg;
    uint32_t w = mb_comm_world_size(c), rank = mb_comm_rank(c);
    struct mb_err err;
    int64_t flag[3] = {(int64_t)rank, -(int64_t)rank - 1, rank == w - 1};
    mb_comm_allreduce(c, NULL, flag, 3, MB_COMM_I64, MB_COMM_MAX);
    double d[2] = {rank + 0.5, 1};
    mb_comm_allreduce(c, NULL, d, 2, MB_COMM_F64, MB_COMM_SUM);
    mb_comm_barrier(c);
    CHECK(mb_comm_synchronize(c, &err) == 0);
    CHECK(flag[0] == (int64_t)w - 1 && flag[1] == -1 && flag[2] == 1);
    CHECK(d[1] == w && d[0] == w * (w - 1) / 2.0 + 0.5 * w);

    halves(c, MB_COMM_F16);
    halves(c, MB_COMM_BF16);

    size_t n = 400003;
    int64_t *buf = mb_calloc(n, sizeof *buf);
    for (uint32_t root = 0; root < w; root++) {
        for (size_t i = 0; i < n; i++) {
            buf[i] = rank == root ? (int64_t)(i * 3 + root) : -1;
        }
        mb_comm_broadcast(c, NULL, buf, n, MB_COMM_I64, root);
        CHECK(mb_comm_synchronize(c, &err) == 0);
        size_t bad = 0;
        for (size_t i = 0; i < n; i++) {
            bad += buf[i] != (int64_t)(i * 3 + root);
        }
        CHECK(bad == 0);
    }
    /* Rank 0 sends to everybody and hears back. */
    for (uint32_t r = 1; r < w; r++) {
        int64_t x = 1000 + r;
        if (rank == 0) {
            mb_comm_send(c, NULL, &x, 1, MB_COMM_I64, r);
            mb_comm_recv(c, NULL, buf, n, MB_COMM_I64, r);
            CHECK(mb_comm_synchronize(c, &err) == 0);
            CHECK(buf[0] == 1000 + r && buf[n - 1] == r);
        } else if (rank == r) {
            mb_comm_recv(c, NULL, &x, 1, MB_COMM_I64, 0);
            CHECK(mb_comm_synchronize(c, &err) == 0);
            buf[0] = x;
            buf[n - 1] = r;
            mb_comm_send(c, NULL, buf, n, MB_COMM_I64, 0);
            CHECK(mb_comm_synchronize(c, &err) == 0);
        }
    }
    /* More operations at once than the queue holds. */
    int64_t *many = mb_calloc(2 * MB_COMM_QUEUE_MAX, sizeof *many);
    for (int i = 0; i < 2 * MB_COMM_QUEUE_MAX; i++) {
        many[i] = i;
        mb_comm_allreduce(c, NULL, &many[i], 1, MB_COMM_I64, MB_COMM_SUM);
    }
    CHECK(mb_comm_synchronize(c, &err) == 0);
    for (int i = 0; i < 2 * MB_COMM_QUEUE_MAX; i++) {
        CHECK(many[i] == (int64_t)w * i);
    }
    mb_free(many);
    mb_free(buf);
}

static void on_worlds(void (*body)(struct mb_comm *, void *))
{
    static const uint64_t TCP_ONLY[] = {0, ~0ULL, 2}; /* shared memory, TCP, both in one ring */
    for (uint32_t w = 1; w <= 4; w++) {
        for (size_t k = 0; k < (w == 1 ? 1 : 3); k++) {
            struct comm_world world = {
                .n = w, .timeout_ms = 60000, .tcp_only = TCP_ONLY[k], .body = body};
            assert_int_equal(comm_world_run(&world), 0);
            assert_int_equal(atomic_load(&comm_world_wrong), 0);
        }
    }
}

static void sums_have_one_order_on_every_carrier(void **state)
{
    (void)state;
    on_worlds(sums);
}

static void the_other_operations_are_right(void **state)
{
    (void)state;
    on_worlds(others);
}

/* Neighbours, and those with the same place among neighbours: what a layout with tensor and data
 * parallel ranks uses, one kind after the other, and the world between them. */
static void in_groups(struct mb_comm *world, void *arg)
{
    const uint32_t size = *(const uint32_t *)arg, rank = mb_comm_rank(world);
    const uint32_t n_groups = mb_comm_world_size(world) / size;
    struct mb_comm *near = NULL, *far = NULL;
    struct mb_err err;
    CHECK(mb_comm_create_group(world, rank / size * size, 1, size, &near, &err) == 0);
    CHECK(mb_comm_create_group(world, rank % size, size, n_groups, &far, &err) == 0);
    CHECK(mb_comm_rank(near) == rank % size && mb_comm_world_size(near) == size);
    CHECK(mb_comm_rank(far) == rank / size && mb_comm_world_size(far) == n_groups);
    sums(near, arg); /* value() by the rank in the group, which has the same in every group */
    sums(far, arg);
    mb_comm_barrier(world);
    others(near, arg);
    others(far, arg);
    float x = (float)rank;
    mb_comm_allreduce(near, NULL, &x, 1, MB_COMM_F32, MB_COMM_SUM);
    mb_comm_join(near, NULL); /* on the host: it is done */
    float want = 0;
    for (uint32_t r = 0; r < size; r++) {
        want += (float)(rank / size * size + r);
    }
    CHECK(x == want);
    mb_comm_destroy(near);
    mb_comm_destroy(far);
}

/* Two of four ranks sum more often among themselves than the others do; then all sum, and a group
 * of one of each kind does. */
static void unevenly_often(struct mb_comm *world, void *arg)
{
    const uint32_t rank = mb_comm_rank(world);
    struct mb_comm *near = NULL, *far = NULL;
    struct mb_err err;
    (void)arg;
    CHECK(mb_comm_create_group(world, rank / 2 * 2, 1, 2, &near, &err) == 0);
    CHECK(mb_comm_create_group(world, rank % 2, 2, 2, &far, &err) == 0);
    for (int i = 0; i < (rank < 2 ? 5 : 2); i++) {
        double x = 1;
        mb_comm_allreduce(near, NULL, &x, 1, MB_COMM_F64, MB_COMM_SUM);
        CHECK(mb_comm_synchronize(near, &err) == 0 && x == 2);
    }
    struct mb_comm *const groups[] = {world, far, near, world};
    static const double WANT[] = {4, 2, 2, 4};
    for (size_t i = 0; i < 4; i++) {
        double x = 1;
        mb_comm_allreduce(groups[i], NULL, &x, 1, MB_COMM_F64, MB_COMM_SUM);
        CHECK(mb_comm_synchronize(groups[i], &err) == 0 && x == WANT[i]);
    }
    mb_comm_destroy(near);
    mb_comm_destroy(far);
}

static void groups_count_for_themselves(void **state)
{
    (void)state;
    struct comm_world w = {.n = 4, .timeout_ms = 60000, .body = unevenly_often};
    assert_int_equal(comm_world_run(&w), 0);
    assert_int_equal(atomic_load(&comm_world_wrong), 0);
}

/* Of two ranks one asks the world, the other a group that both are in. */
static void ask_different_groups(struct mb_comm *world, void *arg)
{
    struct mb_comm *both = NULL;
    struct mb_err err;
    double x = 1;
    (void)arg;
    CHECK(mb_comm_create_group(world, 0, 1, 2, &both, &err) == 0);
    mb_comm_allreduce(mb_comm_rank(world) == 0 ? world : both, NULL, &x, 1, MB_COMM_F64,
                      MB_COMM_SUM);
    CHECK(mb_comm_synchronize(world, &err) != 0);
    mb_comm_destroy(both);
}

static void another_group_s_operation_is_another(void **state)
{
    (void)state;
    struct comm_world w = {.n = 2, .timeout_ms = 60000, .body = ask_different_groups};
    assert_int_equal(comm_world_run(&w), 0);
    assert_int_equal(atomic_load(&comm_world_wrong), 0);
}

static void groups_sum_among_themselves(void **state)
{
    (void)state;
    static uint32_t layouts[][2] = {{4, 2}, {6, 3}, {2, 1}};
    for (size_t i = 0; i < sizeof layouts / sizeof layouts[0]; i++) {
        struct comm_world w = {.n = layouts[i][0],
                               .timeout_ms = 60000,
                               .tcp_only = i == 1 ? 2 : 0,
                               .body = in_groups,
                               .arg = &layouts[i][1]};
        assert_int_equal(comm_world_run(&w), 0);
    }
    assert_int_equal(atomic_load(&comm_world_wrong), 0);
}

/* Rank 3 waits in its group for rank 2, which gives up in the other kind of group. */
static void give_up_in_a_group(struct mb_comm *world, void *arg)
{
    const uint32_t rank = mb_comm_rank(world);
    struct mb_comm *near = NULL;
    struct mb_err err;
    float x = 0;
    (void)arg;
    CHECK(mb_comm_create_group(world, rank / 2 * 2, 1, 2, &near, &err) == 0);
    /* All have met: who still looked for another would find rank 2 gone. It may be through, and
     * give up, before the others have heard so: then they hear that here. */
    mb_comm_barrier(world);
    const int met = mb_comm_synchronize(world, &err) == 0;
    if (rank == 2) {
        CHECK(met);
        mb_comm_abort(near, "no space left on device");
    } else {
        mb_comm_allreduce(near, NULL, &x, 1, MB_COMM_F32, MB_COMM_SUM);
        int rc = mb_comm_synchronize(near, &err);
        if (rc == 0) { /* ranks 0 and 1 are through; the world has ended for them, too */
            mb_comm_barrier(world);
            rc = mb_comm_synchronize(world, &err);
        }
        CHECK(rc == MB_EUNAVAIL);
        CHECK(strstr(err.text, "rank 2 gave up: no space left on device") != NULL);
    }
    mb_comm_destroy(near);
}

static void a_group_names_ranks_of_the_world(void **state)
{
    (void)state;
    struct comm_world w = {.n = 4, .timeout_ms = 60000, .body = give_up_in_a_group};
    assert_int_equal(comm_world_run(&w), 0);
    assert_int_equal(atomic_load(&comm_world_wrong), 0);
}

static void ranges_cover_without_overlap(void **state)
{
    (void)state;
    for (uint32_t w = 1; w <= 9; w++) {
        for (size_t n = 0; n < 40; n++) {
            size_t at = 0, begin, end;
            for (uint32_t r = 0; r < w; r++) {
                mb_comm_range(n, w, r, &begin, &end);
                assert_int_equal(begin, at);
                assert_true(end - begin <= n / w + 1);
                at = end;
            }
            assert_int_equal(at, n);
        }
    }
}

static void disagree(struct mb_comm *c, void *arg)
{
    (void)arg;
    struct mb_err err;
    float x[4] = {0};
    if (mb_comm_rank(c) == 0) {
        mb_comm_allreduce(c, NULL, x, 4, MB_COMM_F32, MB_COMM_SUM);
    } else {
        mb_comm_broadcast(c, NULL, x, 4, MB_COMM_F32, 1);
    }
    int rc = mb_comm_synchronize(c, &err);
    /* Who notices says so; the other hears of it, as soon as it waits for something. */
    if (rc == 0) {
        mb_comm_barrier(c);
        rc = mb_comm_synchronize(c, &err);
    }
    CHECK(rc == MB_EPROTO || rc == MB_EUNAVAIL);
    CHECK(strstr(err.text, "ranks do not call the same operations") != NULL);
    CHECK(mb_comm_synchronize(c, &err) == rc); /* the failure stays */
}

static void ranks_that_disagree_are_told(void **state)
{
    (void)state;
    struct comm_world world = {.n = 2, .timeout_ms = 20000, .body = disagree};
    assert_int_equal(comm_world_run(&world), 0);
    assert_int_equal(atomic_load(&comm_world_wrong), 0);
}

static void give_up(struct mb_comm *c, void *arg)
{
    (void)arg;
    struct mb_err err;
    int rc;

    /* A barrier of its own, so that everybody is connected to everybody before one leaves. The
     * reason of a faster rank may overtake its last message. */
    mb_comm_barrier(c);
    rc = mb_comm_synchronize(c, &err);
    if (mb_comm_rank(c) == 1) {
        mb_comm_abort(c, "the disk is full");
        mb_comm_barrier(c);
        CHECK(mb_comm_synchronize(c, &err) != 0);
        return;
    }
    if (rc == 0) {
        mb_comm_barrier(c);
        rc = mb_comm_synchronize(c, &err);
    }
    CHECK(rc == MB_EUNAVAIL);
    CHECK(strstr(err.text, "rank 1 gave up: the disk is full") != NULL ||
          strstr(err.text, "rank 0 gave up: ") != NULL ||
          strstr(err.text, "rank 2 gave up: ") != NULL);
    CHECK(strstr(err.text, "the disk is full") != NULL);
}

static void a_reason_reaches_every_rank(void **state)
{
    (void)state;
    for (int tcp = 0; tcp < 2; tcp++) {
        struct comm_world world = {
            .n = 3, .timeout_ms = 20000, .tcp_only = tcp ? ~0ULL : 0, .body = give_up};
        assert_int_equal(comm_world_run(&world), 0);
        assert_int_equal(atomic_load(&comm_world_wrong), 0);
    }
}

/* How often a text has a word. */
static int count(const char *text, const char *word)
{
    int n = 0;
    for (const char *at = strstr(text, word); at != NULL; at = strstr(at + 1, word)) {
        n++;
    }
    return n;
}

struct hang {
    struct comm_world world;
    uint32_t victim;
    pthread_t thread;
    int rc;
};

/* The victim computes, and hears of the failure between operations. */
static void hang(struct mb_comm *c, void *arg)
{
    const struct hang *h = arg;
    char named[64];
    struct mb_err err;
    snprintf(named, sizeof named, "barrier 1: timeout of 10 s: rank %u has not come to it",
             h->victim);
    if (mb_comm_rank(c) == h->victim) {
        while (mb_comm_synchronize(c, &err) == 0) {
            usleep(1000);
        }
        CHECK(strstr(err.text, "gave up: barrier 1: timeout") != NULL);
    } else {
        mb_comm_barrier(c);
        const int rc = mb_comm_synchronize(c, &err);
        CHECK(rc == MB_ETIMEOUT || rc == MB_EUNAVAIL);
    }
    CHECK(strstr(err.text, named) != NULL && count(err.text, "timeout") == 1);
}

static void *run_hang(void *arg)
{
    struct hang *h = arg;
    h->rc = comm_world_run(&h->world);
    return NULL;
}

/* Each rank of two and of four, on both carriers: all at once, as each waits for its timeout. */
static void a_rank_that_hangs_is_named(void **state)
{
    struct hang hangs[12] = {0};
    (void)state;
    for (uint32_t i = 0; i < 12; i++) {
        struct hang *h = &hangs[i];
        h->victim = i < 4 ? i / 2 : (i - 4) / 2;
        h->world = (struct comm_world){.n = i < 4 ? 2 : 4,
                                       .timeout_ms = 10000, /* they have to meet */
                                       .tcp_only = i % 2 ? ~0ULL : 0,
                                       .body = hang,
                                       .arg = h};
        assert_int_equal(pthread_create(&h->thread, NULL, run_hang, h), 0);
    }
    for (int i = 0; i < 12; i++) {
        pthread_join(hangs[i].thread, NULL);
        assert_int_equal(hangs[i].rc, 0);
    }
    assert_int_equal(atomic_load(&comm_world_wrong), 0);
}

/* In a group of arg ranks the last of the world does not come. In one of two its neighbour waits
 * for it and the others, who are through, for the world; in one of four two wait for neighbours. */
static void hang_in_a_group(struct mb_comm *world, void *arg)
{
    const uint32_t rank = mb_comm_rank(world), size = *(const uint32_t *)arg;
    struct mb_comm *near = NULL;
    struct mb_err err;
    CHECK(mb_comm_create_group(world, rank / size * size, 1, size, &near, &err) == 0);
    if (rank == 3) {
        while (mb_comm_synchronize(world, &err) == 0) {
            usleep(1000);
        }
    } else {
        mb_comm_barrier(near);
        CHECK(rank / size == 3 / size || mb_comm_synchronize(near, &err) == 0);
        mb_comm_barrier(world);
        CHECK(mb_comm_synchronize(world, &err) != 0);
    }
    CHECK(strstr(err.text, "timeout of 3 s: rank 3 has not come to it") != NULL);
    mb_comm_destroy(near);
}

static void a_rank_that_hangs_is_named_in_a_group(void **state)
{
    (void)state;
    for (uint32_t size = 2; size <= 4; size += 2) {
        struct comm_world w = {.n = 4, .timeout_ms = 3000, .body = hang_in_a_group, .arg = &size};
        assert_int_equal(comm_world_run(&w), 0);
        assert_int_equal(atomic_load(&comm_world_wrong), 0);
    }
}

/* Every rank waits for its neighbour to send. */
static void wait_in_a_circle(struct mb_comm *c, void *arg)
{
    struct mb_err err;
    float x;
    (void)arg;
    mb_comm_recv(c, NULL, &x, 1, MB_COMM_F32, (mb_comm_rank(c) + 1) % mb_comm_world_size(c));
    const int rc = mb_comm_synchronize(c, &err);
    CHECK(rc == MB_ETIMEOUT || rc == MB_EUNAVAIL);
    CHECK(strstr(err.text, "timeout of 3 s: a rank hangs or calls something else") != NULL);
}

static void who_waits_is_not_blamed(void **state)
{
    (void)state;
    struct comm_world w = {.n = 3, .timeout_ms = 3000, .body = wait_in_a_circle};
    assert_int_equal(comm_world_run(&w), 0);
    assert_int_equal(atomic_load(&comm_world_wrong), 0);
}

static int stranger(const struct mb_endpoint *e, const void *bytes, size_t n)
{
    int fd = socket(e->address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (const struct sockaddr *)&e->address, e->address_len), 0);
    assert_int_equal(send(fd, bytes, n, 0), (ssize_t)n);
    return fd;
}

struct pair {
    struct mb_comm_listener *l;
    const char *const *endpoints;
    struct mb_comm *c;
    int rc;
};

static void *join_pair(void *arg)
{
    struct pair *p = arg;
    struct mb_err err;
    p->rc = mb_comm_connect(p->l, p->endpoints, 2, &p->c, &err);
    return NULL;
}

static void strangers_stay_outside_and_do_not_disturb(void **state)
{
    (void)state;
    struct mb_comm_options o = {.rank = 0, .world_size = 2, .timeout_ms = 20000};
    struct pair pairs[2];
    const char *endpoints[2];
    struct mb_err err;
    for (uint32_t r = 0; r < 2; r++) {
        o.rank = r;
        assert_int_equal(mb_comm_listen(&o, &pairs[r].l, &err), 0);
        endpoints[r] = mb_comm_listener_endpoint(pairs[r].l);
        pairs[r].endpoints = endpoints;
    }
    struct mb_endpoint e;
    assert_int_equal(mb_endpoint_parse(endpoints[0], &e, &err), 0);
    uint8_t hello[80] = {'M', 'B', 'C', 'O', 'M', 'M', '0', '2'};
    hello[12] = 1; /* rank 1 of 2, and the right port: only the cookies are missing */
    hello[16] = 2;
    int fds[100];
    for (int i = 0; i < 100; i++) { /* more than there are places */
        fds[i] = stranger(&e, hello, i % 2 == 0 ? sizeof hello : 10);
    }
    pthread_t threads[2];
    for (int r = 0; r < 2; r++) {
        pthread_create(&threads[r], NULL, join_pair, &pairs[r]);
    }
    for (int r = 0; r < 2; r++) {
        pthread_join(threads[r], NULL);
        assert_int_equal(pairs[r].rc, 0);
    }
    mb_comm_barrier(pairs[0].c);
    mb_comm_barrier(pairs[1].c);
    assert_int_equal(mb_comm_synchronize(pairs[0].c, &err), 0);
    assert_int_equal(mb_comm_synchronize(pairs[1].c, &err), 0);
    for (int r = 0; r < 2; r++) {
        mb_comm_destroy(pairs[r].c);
        mb_comm_listener_destroy(pairs[r].l);
    }
    for (int i = 0; i < 100; i++) {
        close(fds[i]);
    }
}

static void a_wrong_endpoint_is_no_rank(void **state)
{
    (void)state;
    struct mb_comm_options o = {.rank = 1, .world_size = 2, .timeout_ms = 300};
    struct mb_comm_listener *l, *other;
    struct mb_comm *c;
    struct mb_err err;
    assert_int_equal(mb_comm_listen(&o, &l, &err), 0);
    assert_int_equal(mb_comm_listen(&o, &other, &err), 0);
    const char *mine = mb_comm_listener_endpoint(l);
    const char *bad[][2] = {{"", mine},
                            {"mobula-tcp/1 127.0.0.1 99999 h 00", mine},
                            {"mobula-tcp/2 127.0.0.1 1 h 00112233445566778899aabbccddeeff", mine},
                            {mb_comm_listener_endpoint(other), mb_comm_listener_endpoint(other)},
                            /* Nobody listens on port 1. */
                            {"mobula-tcp/1 127.0.0.1 1 h 00112233445566778899aabbccddeeff", mine},
                            /* Somebody listens, but never answers. */
                            {mb_comm_listener_endpoint(other), mine}};
    const int expected[] = {MB_EPROTO, MB_EPROTO, MB_EPROTO, MB_EPROTO, MB_EUNAVAIL, MB_ETIMEOUT};
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++) {
        assert_int_equal(mb_comm_connect(l, bad[i], 2, &c, &err), expected[i]);
        assert_non_null(strstr(err.text, "rank "));
    }
    assert_int_equal(mb_comm_connect(l, bad[0], 1, &c, &err), MB_EPROTO);
    mb_comm_listener_destroy(l);
    mb_comm_listener_destroy(other);
    o.world_size = 0;
    assert_int_equal(mb_comm_listen(&o, &l, &err), MB_EINVAL);
    o.world_size = 2;
    o.address = "localhost";
    assert_int_equal(mb_comm_listen(&o, &l, &err), MB_EINVAL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranges_cover_without_overlap),
        cmocka_unit_test(sums_have_one_order_on_every_carrier),
        cmocka_unit_test(the_other_operations_are_right),
        cmocka_unit_test(groups_sum_among_themselves),
        cmocka_unit_test(groups_count_for_themselves),
        cmocka_unit_test(another_group_s_operation_is_another),
        cmocka_unit_test(a_group_names_ranks_of_the_world),
        cmocka_unit_test(ranks_that_disagree_are_told),
        cmocka_unit_test(a_reason_reaches_every_rank),
        cmocka_unit_test(a_rank_that_hangs_is_named),
        cmocka_unit_test(a_rank_that_hangs_is_named_in_a_group),
        cmocka_unit_test(who_waits_is_not_blamed),
        cmocka_unit_test(strangers_stay_outside_and_do_not_disturb),
        cmocka_unit_test(a_wrong_endpoint_is_no_rank),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
