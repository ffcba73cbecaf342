/*
 * The carrier between devices, over a library of our own that does what NCCL does: operations stay
 * under way until every rank has started them, and then take effect. Ranks are threads that meet
 * through the real carrier of the host. A rank may be told to hang, to fail, or to be of another
 * version.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "base/log.h"
#include "tests/unit/worker/comm_world.h"
#include "worker/parallel/comm.h"

enum { MAX_WORLD = 4, MAX_OPS = 64, MAX_N = 1000, PATIENCE_MS = 60 * 1000 };

/* ---- the library ---- */

/* One operation as all ranks see it. */
struct shared_op {
    struct mb_comm_op of[MAX_WORLD];
    struct mb_comm_op parts[MAX_WORLD][MB_COMM_EXCHANGE_MAX]; /* of an exchange */
    size_t n_parts[MAX_WORLD];                                /* 0: it is none */
    uint32_t n_started;
    int is_done;
};

static struct {
    pthread_mutex_t lock;
    uint8_t id[MB_COLLECTIVE_ID_BYTES];
    uint32_t n_joined;
    struct shared_op ops[MAX_OPS];
    int is_stuck; /* it ends nothing any more */
    int n_aborted, n_ended, busy_polls, n_joins;
    uint64_t joined_last; /* so many operations, by the last join() of either rank */
    int n_stuck_lines;    /* when the ranks have ended */
    int n_wrong;          /* calls against the contract; checked when the ranks have ended */
    int log_fd;           /* of all ranks */
} lib = {.lock = PTHREAD_MUTEX_INITIALIZER};

struct mb_group {
    uint32_t rank, world;
    uint64_t n_started;
    int n_busy; /* polls that say "busy" after a start */
};

/* What a rank's device is. */
struct mb_context {
    int version;
    int fails_at;     /* operation, from 1, that poll() reports as failed */
    int n_unlaunched; /* polls that a start takes */
};

static _Thread_local struct mb_context *own; /* version() has no context */

static int fake_version(int *number, char text[32], struct mb_err *err)
{
    (void)err;
    *number = own->version;
    snprintf(text, 32, "FAKE %d", own->version);
    return 0;
}

static int fake_new_id(uint8_t id[MB_COLLECTIVE_ID_BYTES], struct mb_err *err)
{
    (void)err;
    for (int i = 0; i < MB_COLLECTIVE_ID_BYTES; i++) {
        lib.id[i] = id[i] = (uint8_t)(i * 7 + 1);
    }
    return 0;
}

static int fake_create(struct mb_context *ctx, const uint8_t id[MB_COLLECTIVE_ID_BYTES],
                       uint32_t rank, uint32_t world_size, struct mb_group **out,
                       struct mb_err *err)
{
    static _Thread_local struct mb_group g;
    (void)ctx;
    pthread_mutex_lock(&lib.lock);
    int same = memcmp(id, lib.id, sizeof lib.id) == 0;
    lib.n_joined++;
    pthread_mutex_unlock(&lib.lock);
    g = (struct mb_group){.rank = rank, .world = world_size};
    *out = &g;
    return same ? 0 : mb_err_set(err, MB_EPROTO, "another id");
}

static int fake_start(struct mb_group *g, struct mb_stream *after, const struct mb_comm_op *ops,
                      size_t n_ops, struct mb_err *err)
{
    (void)after;
    (void)err;
    pthread_mutex_lock(&lib.lock);
    struct shared_op *s = &lib.ops[g->n_started++];
    s->of[g->rank] = ops[0];
    if (n_ops > 1) {
        memcpy(s->parts[g->rank], ops, n_ops * sizeof *ops);
        s->n_parts[g->rank] = n_ops;
    }
    s->n_started++;
    g->n_busy = own->n_unlaunched;
    pthread_mutex_unlock(&lib.lock);
    return 0;
}

static void add(struct shared_op *s, uint32_t world, size_t begin, size_t end, uint32_t to)
{
    for (size_t i = begin; i < end; i++) {
        float sum = 0;
        for (uint32_t r = 0; r < world; r++) {
            sum += ((float *)s->of[r].buf)[i];
        }
        ((float *)s->of[to].buf)[i] = sum;
    }
}

static void copy(struct shared_op *s, uint32_t world, size_t begin, size_t end, uint32_t from)
{
    for (uint32_t r = 0; r < world; r++) {
        memmove((float *)s->of[r].buf + begin, (float *)s->of[from].buf + begin,
                (end - begin) * sizeof(float));
    }
}

/* What `to` receives from `from` as its nth; NULL: there is no such part. */
static const struct mb_comm_op *part(const struct shared_op *s, uint32_t of, enum mb_comm_kind kind,
                                     uint32_t peer, size_t nth)
{
    for (size_t i = 0; i < s->n_parts[of]; i++) {
        const struct mb_comm_op *op = &s->parts[of][i];
        if (op->kind == kind && op->peer == peer && nth-- == 0) {
            return op;
        }
    }
    return NULL;
}

static void exchange(struct shared_op *s, uint32_t world)
{
    for (uint32_t from = 0; from < world; from++) {
        for (uint32_t to = 0; to < world; to++) {
            for (size_t nth = 0; nth < MB_COMM_EXCHANGE_MAX; nth++) {
                const struct mb_comm_op *sent = part(s, from, MB_COMM_OP_SEND, to, nth);
                const struct mb_comm_op *got = part(s, to, MB_COMM_OP_RECV, from, nth);
                lib.n_wrong += (sent == NULL) != (got == NULL);
                if (sent != NULL && got != NULL) {
                    lib.n_wrong += sent->n != got->n;
                    memcpy(got->buf, sent->buf, got->n * sizeof(float));
                }
            }
        }
    }
}

/* Locked. All ranks have started it. */
static void take_effect(struct shared_op *s, uint32_t world)
{
    const struct mb_comm_op *op = &s->of[0];
    size_t share = op->n / world;
    if (s->n_parts[0] > 0) {
        exchange(s, world);
        s->is_done = 1;
        return;
    }
    for (uint32_t r = 1; r < world; r++) {
        lib.n_wrong += s->of[r].kind != op->kind || s->of[r].n != op->n;
    }
    switch (op->kind) {
    case MB_COMM_OP_ALLREDUCE:
        add(s, world, 0, op->n, 0);
        copy(s, world, 0, op->n, 0);
        break;
    case MB_COMM_OP_REDUCE:
        add(s, world, 0, op->n, op->peer);
        break;
    case MB_COMM_OP_BROADCAST:
        copy(s, world, 0, op->n, op->peer);
        break;
    case MB_COMM_OP_REDUCE_SCATTER:
        lib.n_wrong += op->n % world != 0;
        for (uint32_t r = 0; r < world; r++) {
            add(s, world, r * share, (r + 1) * share, r);
        }
        break;
    case MB_COMM_OP_ALLGATHER:
        lib.n_wrong += op->n % world != 0;
        for (uint32_t r = 0; r < world; r++) {
            copy(s, world, r * share, (r + 1) * share, r);
        }
        break;
    default:
        lib.n_wrong++;
    }
    s->is_done = 1;
}

static int fake_poll(struct mb_group *g, uint64_t *n_done, struct mb_err *err)
{
    int rc = 0;
    pthread_mutex_lock(&lib.lock);
    if (lib.n_joined < g->world || g->n_busy > 0) {
        g->n_busy -= g->n_busy > 0;
        lib.busy_polls++;
        rc = 1;
    }
    for (*n_done = 0; rc == 0 && *n_done < g->n_started; (*n_done)++) {
        struct shared_op *s = &lib.ops[*n_done];
        if (own->fails_at == (int)*n_done + 1) {
            rc = mb_err_set(err, MB_EIO, "FAKE: the cable is on fire");
            break;
        }
        if (!s->is_done && s->n_started == g->world) {
            take_effect(s, g->world);
        }
        if (!s->is_done) {
            break;
        }
    }
    pthread_mutex_unlock(&lib.lock);
    return rc;
}

/* Lines of the log with these words. */
static int n_lines(const char *words)
{
    char text[8192], *at = text;
    ssize_t n = pread(lib.log_fd, text, sizeof text - 1, 0);
    int found = 0;
    text[n > 0 ? n : 0] = '\0';
    for (; (at = strstr(at, words)) != NULL; found++) {
        at += strlen(words);
    }
    return found;
}

/* Locked. How many ranks have logged that they end what runs, and why. */
static int n_told(void)
{
    return n_lines("ending what runs on the GPUs: ");
}

static int fake_destroy(struct mb_group *g, int failed)
{
    pthread_mutex_lock(&lib.lock);
    lib.n_aborted += g != NULL && failed;
    lib.n_wrong += n_told() < lib.n_aborted; /* an abort may take its time */
    lib.n_ended += g != NULL && !failed;
    const int ends = !failed || !lib.is_stuck;
    pthread_mutex_unlock(&lib.lock);
    return ends;
}

/* Operations take effect at once when all have come: there is nothing to wait for on a stream. */
static int fake_join(struct mb_group *g, struct mb_stream *stream, uint64_t n, struct mb_err *err)
{
    (void)stream;
    (void)err;
    pthread_mutex_lock(&lib.lock);
    lib.n_wrong += g->n_busy > 0 || n == 0;
    lib.n_joins++;
    lib.joined_last = n;
    pthread_mutex_unlock(&lib.lock);
    return 0;
}

static const struct mb_collectives FAKE = {fake_version, fake_new_id, fake_create, fake_start,
                                           fake_poll,    fake_join,   fake_destroy};
static const struct mb_backend BACKEND = {.name = "fake", .collectives = &FAKE};

/* ---- ranks ---- */

struct scene {
    struct mb_context ranks[MAX_WORLD];
    uint64_t timeout_ms;
    int is_stuck; /* the library */
    void (*body)(struct mb_comm *c, struct mb_device *dev, struct scene *s);
    int codes[MAX_WORLD]; /* of mb_comm_create_device, or what body left */
    char texts[MAX_WORLD][1024];
};

static void keep(struct scene *s, uint32_t rank, int rc, const struct mb_err *err)
{
    s->codes[rank] = rc;
    snprintf(s->texts[rank], sizeof s->texts[rank], "%s", rc != 0 ? err->text : "");
}

/* comm_world destroys the communicator that it made: the host's must live through ours. */
static void meet_and_run(struct mb_comm *host, void *arg)
{
    struct scene *s = arg;
    uint32_t rank = mb_comm_rank(host);
    struct mb_device dev = {.ops = &BACKEND, .ctx = &s->ranks[rank]};
    struct mb_comm *c = NULL;
    struct mb_err err;
    own = &s->ranks[rank];
    int rc = mb_comm_create_device(host, &dev, s->timeout_ms, &c, &err);
    keep(s, rank, rc, &err);
    if (rc == 0) {
        s->body(c, &dev, s);
        mb_comm_destroy(c);
    }
}

static void play(struct scene *s, uint32_t world)
{
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    memset(&lib, 0, sizeof lib);
    lib.lock = lock;
    lib.is_stuck = s->is_stuck;
    lib.log_fd = memfd_create("log", MFD_CLOEXEC);
    assert_true(lib.log_fd >= 0);
    /* Ranks write at the same time, and the offset of a memfd has no lock. */
    assert_int_equal(fcntl(lib.log_fd, F_SETFL, O_APPEND), 0);
    mb_log_init(lib.log_fd, MB_LOG_WARN);
    struct comm_world w = {
        .n = world, .timeout_ms = PATIENCE_MS, .body = meet_and_run, .arg = s, .body_destroys = 1};
    assert_int_equal(comm_world_run(&w), 0);
    mb_log_init(2, MB_LOG_INFO);
    lib.n_stuck_lines = n_lines("has not ended it in 30 s: this process ends");
    close(lib.log_fd);
    assert_int_equal(lib.n_wrong, 0);
}

static float value(uint32_t rank, size_t i)
{
    return (float)((rank + 1) * 1000 + i);
}

static float sum_of(uint32_t world, size_t i)
{
    float sum = 0;
    for (uint32_t r = 0; r < world; r++) {
        sum += value(r, i);
    }
    return sum;
}

static void draw(float *x, size_t n, uint32_t rank)
{
    for (size_t i = 0; i < n; i++) {
        x[i] = value(rank, i);
    }
}

static void all_operations(struct mb_comm *c, struct mb_device *dev, struct scene *s)
{
    static const size_t SIZES[] = {12, 13, MAX_N};
    float x[MAX_N];
    uint32_t rank = mb_comm_rank(c), world = mb_comm_world_size(c);
    int64_t host = 1;
    struct mb_err err;
    for (size_t k = 0; k < sizeof SIZES / sizeof SIZES[0]; k++) {
        size_t n = SIZES[k], begin, end;
        int bad = 0;
        mb_comm_range(n, world, rank, &begin, &end);
        draw(x, n, rank);
        mb_comm_allreduce(c, dev, x, n, MB_COMM_F32, MB_COMM_SUM);
        mb_comm_allreduce(c, NULL, &host, 1, MB_COMM_I64, MB_COMM_SUM);
        int rc = mb_comm_synchronize(c, &err);
        for (size_t i = 0; i < n; i++) {
            bad += x[i] != sum_of(world, i);
        }
        draw(x, n, rank);
        mb_comm_reduce_scatter(c, dev, x, n, MB_COMM_F32, MB_COMM_SUM);
        mb_comm_allgather(c, dev, x, n, MB_COMM_F32);
        rc = rc == 0 ? mb_comm_synchronize(c, &err) : rc;
        for (size_t i = 0; i < n; i++) {
            bad += x[i] != sum_of(world, i);
        }
        draw(x, n, rank);
        mb_comm_reduce(c, dev, x, n, MB_COMM_F32, MB_COMM_SUM, world - 1);
        mb_comm_broadcast(c, dev, x, n, MB_COMM_F32, world - 1);
        rc = rc == 0 ? mb_comm_synchronize(c, &err) : rc;
        for (size_t i = 0; i < n; i++) {
            bad += x[i] != sum_of(world, i);
        }
        if (rc == 0 && bad != 0) {
            rc = mb_err_set(&err, MB_ECORRUPT, "%d elements of %zu are wrong", bad, n);
        }
        if (rc != 0) {
            keep(s, rank, rc, &err);
            return;
        }
    }
    mb_comm_barrier(c);
    keep(s, rank, mb_comm_synchronize(c, &err), &err);
}

static void operations_give_what_the_host_gives(void **state)
{
    (void)state;
    for (uint32_t world = 2; world <= MAX_WORLD; world++) {
        struct scene s = {.timeout_ms = PATIENCE_MS, .body = all_operations};
        for (int r = 0; r < MAX_WORLD; r++) {
            s.ranks[r].n_unlaunched = r; /* some take a while to be taken */
        }
        play(&s, world);
        for (uint32_t r = 0; r < world; r++) {
            assert_string_equal(s.texts[r], "");
        }
        assert_int_equal(lib.n_ended, world);
        assert_int_equal(lib.n_aborted, 0);
        assert_true(lib.busy_polls > 0);
    }
}

/* Round a ring, both ways at once, twice; with two ranks both neighbours are the same one. */
static void round_a_ring(struct mb_comm *c, struct mb_device *dev, struct scene *s)
{
    uint32_t rank = mb_comm_rank(c), world = mb_comm_world_size(c);
    uint32_t next = (rank + 1) % world, before = (rank + world - 1) % world;
    float out = value(rank, 0), back = value(rank, 1), in = 0, gradient = 0;
    struct mb_err err;
    int rc = 0;
    for (int i = 0; i < 2 && rc == 0; i++) {
        struct mb_comm_transfer transfers[] = {{1, &out, 1, next},
                                               {0, &in, 1, before},
                                               {1, &back, 1, before},
                                               {0, &gradient, 1, next}};
        mb_comm_exchange(c, i == 0 ? dev : NULL, transfers, 4, MB_COMM_F32);
        rc = mb_comm_synchronize(c, &err);
        if (rc == 0 && (in != value(before, 0) || gradient != value(next, 1))) {
            rc = mb_err_set(&err, MB_ECORRUPT, "%g and %g came", (double)in, (double)gradient);
        }
        in = gradient = 0;
    }
    mb_comm_exchange(c, dev, NULL, 0, MB_COMM_F32); /* nothing is nothing */
    keep(s, rank, rc, &err);
}

static void an_exchange_is_one_operation(void **state)
{
    (void)state;
    for (uint32_t world = 2; world <= MAX_WORLD; world++) {
        struct scene s = {.timeout_ms = PATIENCE_MS, .body = round_a_ring};
        s.ranks[1].n_unlaunched = 2;
        play(&s, world);
        for (uint32_t r = 0; r < world; r++) {
            assert_string_equal(s.texts[r], "");
        }
        assert_int_equal(lib.ops[0].n_started, world);
        assert_int_equal(lib.ops[1].n_started, 0);
    }
}

/* More operations than the compute stream may be behind; the caller goes on before they are done.
 */
static void many_joins(struct mb_comm *c, struct mb_device *dev, struct scene *s)
{
    enum { MANY = 40 };
    float x[MANY], more = 1;
    uint32_t rank = mb_comm_rank(c), world = mb_comm_world_size(c);
    struct mb_err err;
    int bad = 0;
    mb_comm_join(c, dev); /* behind nothing */
    for (size_t i = 0; i < MANY; i++) {
        x[i] = value(rank, i);
        mb_comm_allreduce(c, dev, &x[i], 1, MB_COMM_F32, MB_COMM_SUM);
        mb_comm_join(c, dev);
    }
    const uint64_t mark = mb_comm_mark(c);
    mb_comm_allreduce(c, dev, &more, 1, MB_COMM_F32, MB_COMM_SUM);
    mb_comm_join_until(c, dev, mark); /* not behind the last one */
    bad += mark != MANY;
    int rc = mb_comm_synchronize(c, &err);
    for (size_t i = 0; i < MANY; i++) {
        bad += x[i] != sum_of(world, i);
    }
    if (rc == 0 && bad != 0) {
        rc = mb_err_set(&err, MB_ECORRUPT, "%d sums are wrong", bad);
    }
    keep(s, rank, rc, &err);
}

static void the_compute_stream_waits_instead_of_the_caller(void **state)
{
    (void)state;
    struct scene s = {.timeout_ms = PATIENCE_MS, .body = many_joins};
    s.ranks[1].n_unlaunched = 2;
    play(&s, 2);
    for (uint32_t r = 0; r < 2; r++) {
        assert_string_equal(s.texts[r], "");
    }
    assert_int_equal(lib.n_joins, 2 * 41);
    assert_int_equal(lib.joined_last, 40);
}

/* Rank 1 does not come to the second all-reduce. */
static void one_is_absent(struct mb_comm *c, struct mb_device *dev, struct scene *s)
{
    float x[8] = {0};
    uint32_t rank = mb_comm_rank(c);
    struct mb_err err;
    mb_comm_allreduce(c, dev, x, 8, MB_COMM_F32, MB_COMM_SUM);
    int rc = mb_comm_synchronize(c, &err);
    if (rc == 0 && rank == 0) {
        mb_comm_allreduce(c, dev, x, 4, MB_COMM_F32, MB_COMM_SUM);
        rc = mb_comm_synchronize(c, &err);
    } else if (rc == 0) {
        mb_comm_barrier(c); /* until rank 0 has given up */
        rc = mb_comm_synchronize(c, &err);
    }
    keep(s, rank, rc, &err);
}

static void a_hang_ends_with_the_operations_name(void **state)
{
    (void)state;
    /* It also bounds the meeting, which a loaded machine makes slow. */
    struct scene s = {.timeout_ms = 10 * 1000, .body = one_is_absent};
    play(&s, 2);
    assert_int_equal(s.codes[0], MB_ETIMEOUT);
    assert_string_equal(s.texts[0],
                        "all-reduce 2 between GPUs (4 elements): timeout of 10 s: a rank "
                        "hangs or calls something else");
    assert_non_null(strstr(s.texts[1], "rank 0 gave up: all-reduce 2 between GPUs"));
    assert_int_equal(lib.n_aborted, 2);
}

/* Rank 1 gives up while rank 0 waits for it on the device. */
static void one_gives_up(struct mb_comm *c, struct mb_device *dev, struct scene *s)
{
    float x[8] = {0};
    uint32_t rank = mb_comm_rank(c);
    struct mb_err err;
    if (rank == 1) {
        mb_comm_abort(c, "no space left on device");
        return;
    }
    mb_comm_allreduce(c, dev, x, 8, MB_COMM_F32, MB_COMM_SUM);
    keep(s, rank, mb_comm_synchronize(c, &err), &err);
    mb_comm_allreduce(c, dev, x, 8, MB_COMM_F32, MB_COMM_SUM); /* fails the same way */
    struct mb_err again;
    int is_other =
        mb_comm_synchronize(c, &again) != s->codes[0] || strcmp(again.text, s->texts[0]) != 0;
    pthread_mutex_lock(&lib.lock); /* the other rank may still be ending */
    lib.n_wrong += is_other;
    pthread_mutex_unlock(&lib.lock);
}

static void a_peers_words_end_what_waits_for_it(void **state)
{
    (void)state;
    struct scene s = {.timeout_ms = PATIENCE_MS, .body = one_gives_up};
    play(&s, 2);
    assert_int_equal(s.codes[0], MB_EUNAVAIL);
    assert_non_null(strstr(s.texts[0], "all-reduce 1 between GPUs (8 elements): "));
    assert_non_null(strstr(s.texts[0], "rank 1 gave up: no space left on device"));
    assert_int_equal(lib.n_aborted, 2);
}

/* The last test: a process that is stuck stays so. */
static void a_library_that_ends_nothing(void **state)
{
    (void)state;
    struct scene s = {.timeout_ms = PATIENCE_MS, .body = one_gives_up, .is_stuck = 1};
    assert_false(mb_comm_device_is_stuck());
    play(&s, 2);
    assert_true(mb_comm_device_is_stuck());
    assert_non_null(strstr(s.texts[0], "rank 1 gave up: no space left on device"));
    assert_int_equal(lib.n_aborted, 2);
    assert_int_equal(lib.n_stuck_lines, 2);
}

static void a_failure_of_the_library_is_told_to_all(void **state)
{
    (void)state;
    struct scene s = {.timeout_ms = PATIENCE_MS, .body = all_operations};
    s.ranks[1].fails_at = 3;
    play(&s, 3);
    assert_int_equal(s.codes[1], MB_EIO);
    assert_non_null(
        strstr(s.texts[1], " 3 between GPUs (12 elements): FAKE: the cable is on fire"));
    for (int r = 0; r < 3; r += 2) {
        assert_int_equal(s.codes[r], MB_EUNAVAIL);
        assert_non_null(strstr(s.texts[r], "the cable is on fire"));
    }
    assert_int_equal(lib.n_aborted, 3);
}

static void versions_must_be_the_same(void **state)
{
    (void)state;
    struct scene s = {.timeout_ms = PATIENCE_MS, .body = all_operations};
    s.ranks[1].version = 22;
    play(&s, 2);
    assert_int_equal(s.codes[1], MB_EUNSUPPORTED);
    assert_string_equal(s.texts[1],
                        "FAKE 22 here, version number 0 on rank 0, 22 here: install the "
                        "same on all nodes");
    assert_int_equal(s.codes[0], MB_EUNAVAIL);
    assert_non_null(strstr(s.texts[0], "install the same on all nodes"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(operations_give_what_the_host_gives),
        cmocka_unit_test(an_exchange_is_one_operation),
        cmocka_unit_test(the_compute_stream_waits_instead_of_the_caller),
        cmocka_unit_test(a_hang_ends_with_the_operations_name),
        cmocka_unit_test(a_peers_words_end_what_waits_for_it),
        cmocka_unit_test(a_failure_of_the_library_is_told_to_all),
        cmocka_unit_test(versions_must_be_the_same),
        cmocka_unit_test(a_library_that_ends_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
