/*
 * Every store operation against a real S3 server: versitygw, started here on a directory of its
 * own. Its program is $MOBULA_VERSITYGW or ~/.cache/mobula/bin/versitygw; without it the test
 * fails.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <arpa/inet.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/loop.h"
#include "base/alloc.h"
#include "base/checksum.h"
#include "base/clock.h"
#include "base/fs.h"
#include "store_run.h"

enum { START_TIMEOUT_MS = 30000, BIG_BYTES = 200 * 1024 * 1024 + 12345, N_KEYS = 1100 };

static struct {
    char program[512];
    char dir[64];
    int port;
    pid_t pid;
} server;

static struct sockaddr_in loopback(int port)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return a;
}

/* Held until the test ends, as in tests/integration/ports.py: nobody else is given it meanwhile. */
static int free_port(void)
{
    struct sockaddr_in a = loopback(0);
    socklen_t len = sizeof a;
    int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one), 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &len), 0);
    return ntohs(a.sin_port);
}

static int can_connect(void)
{
    struct sockaddr_in a = loopback(server.port);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int ok = connect(fd, (struct sockaddr *)&a, sizeof a) == 0;
    close(fd);
    return ok;
}

static void exec_server(const char *root)
{
    char address[64];
    snprintf(address, sizeof address, "127.0.0.1:%d", server.port);
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* a test that dies leaves nothing behind */
    int null = open("/dev/null", O_RDWR);
    dup2(null, 0);
    dup2(null, 1);
    dup2(null, 2);
    execl(server.program, "versitygw", "--port", address, "--access", "testkey", "--secret",
          "testsecret123", "--keep-alive", "--quiet", "posix", root, (char *)NULL);
    _exit(127);
}

static int start_server(void **state)
{
    char root[128];
    char url[128];
    (void)state;
    snprintf(server.dir, sizeof server.dir, "/tmp/mobula-s3-XXXXXX");
    assert_non_null(mkdtemp(server.dir));
    snprintf(root, sizeof root, "%s/s3", server.dir);
    assert_int_equal(mkdir(root, 0755), 0);
    snprintf(root, sizeof root, "%s/s3/bucket", server.dir);
    assert_int_equal(mkdir(root, 0755), 0);
    snprintf(root, sizeof root, "%s/s3", server.dir);
    server.port = free_port();
    server.pid = fork();
    assert_true(server.pid >= 0);
    if (server.pid == 0)
        exec_server(root);
    for (uint64_t deadline = mb_mono_ms() + START_TIMEOUT_MS; !can_connect(); usleep(20000)) {
        int status;
        if (mb_mono_ms() > deadline || waitpid(server.pid, &status, WNOHANG) != 0)
            fail_msg("versitygw does not start");
    }
    snprintf(url, sizeof url, "http://127.0.0.1:%d", server.port);
    setenv("BUCKET_STORAGE_HOST", url, 1);
    setenv("BUCKET_STORAGE_ACCESS_KEY", "testkey", 1);
    setenv("BUCKET_STORAGE_SECRET_KEY", "testsecret123", 1);
    setenv("NO_PROXY", "127.0.0.1", 1);
    unsetenv("AWS_REGION");
    unsetenv("AWS_DEFAULT_REGION");
    return 0;
}

static int stop_server(void **state)
{
    (void)state;
    kill(server.pid, SIGKILL);
    waitpid(server.pid, NULL, 0);
    return mb_fs_remove_tree(server.dir, NULL);
}

struct world {
    uv_loop_t loop;
    struct store_run r;
};

static void world_open(struct world *w, const char *url)
{
    uv_loop_init(&w->loop);
    run_open(&w->r, &w->loop, url);
}

static void world_close(struct world *w)
{
    run_close(&w->r);
    assert_int_equal(uv_loop_close(&w->loop), 0);
}

#define must(call)                                                                                 \
    do {                                                                                           \
        if ((call) != 0)                                                                           \
            fail_msg("%s: %s", #call, w.r.text);                                                   \
    } while (0)

static void test_small_objects(void **state)
{
    static const char *const keys[] = {"plain",         "dir/with space",
                                       "a+b=c:d@e,f;g", "\xc3\xa9/\xe2\x82\xac",
                                       "p%20q&r?s#t",   "(x)'*!~"};
    struct world w;
    (void)state;
    world_open(&w, "s3://bucket/small/objects");
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        must(run_put(&w.r, keys[i], keys[i], MB_STORE_ALWAYS, NULL));
        assert_true(w.r.etag[0] != '\0');
        must(run_get(&w.r, keys[i], 100));
        assert_string_equal(mb_buf_str(&w.r.data), keys[i]);
        must(run_head(&w.r, keys[i]));
        assert_int_equal(w.r.size_bytes, strlen(keys[i]));
    }
    must(run_list(&w.r, ""));
    assert_string_equal(mb_buf_str(&w.r.keys),
                        "(x)'*!~\na+b=c:d@e,f;g\ndir/with space\np%20q&r?s#t\nplain\n\xc3\xa9/"
                        "\xe2\x82\xac\n");
    must(run_list(&w.r, "dir/"));
    assert_string_equal(mb_buf_str(&w.r.keys), "dir/with space\n");
    must(run_put(&w.r, "empty", "", MB_STORE_ALWAYS, NULL));
    must(run_get(&w.r, "empty", 10));
    assert_int_equal(w.r.data.len, 0);
    assert_int_equal(run_get(&w.r, "plain", 3), MB_EFULL);
    assert_int_equal(run_get(&w.r, "none", 10), MB_ENOENT);
    assert_int_equal(run_head(&w.r, "none"), MB_ENOENT);
    must(run_delete(&w.r, "plain"));
    must(run_delete(&w.r, "plain"));
    assert_int_equal(run_head(&w.r, "plain"), MB_ENOENT);
    world_close(&w);
}

static void test_conditions(void **state)
{
    struct world w;
    char etag[200];
    (void)state;
    world_open(&w, "s3://bucket/conditions");
    assert_int_equal(run_put(&w.r, "latest", "10", MB_STORE_IF_MATCH, "\"x\""), MB_EEXIST);
    must(run_put(&w.r, "latest", "10", MB_STORE_IF_ABSENT, NULL));
    snprintf(etag, sizeof etag, "%s", w.r.etag);
    assert_int_equal(run_put(&w.r, "latest", "11", MB_STORE_IF_ABSENT, NULL), MB_EEXIST);
    must(run_put(&w.r, "latest", "20", MB_STORE_IF_MATCH, etag));
    assert_int_equal(run_put(&w.r, "latest", "30", MB_STORE_IF_MATCH, etag), MB_EEXIST);
    must(run_get(&w.r, "latest", 10));
    assert_string_equal(mb_buf_str(&w.r.data), "20");
    world_close(&w);
}

static void test_long_listing(void **state)
{
    struct world w;
    char want[32];
    (void)state;
    world_open(&w, "s3://bucket/many");
    for (int i = 0; i < N_KEYS; i++) {
        struct mb_err err;
        char key[32];
        snprintf(key, sizeof key, "d%d/k+%04d", i % 3, i);
        assert_int_equal(mb_store_put(w.r.store, key, "x", 1, MB_STORE_ALWAYS, NULL, 60000,
                                      run_on_result, &w.r, &err),
                         0);
        if (i % 50 == 49) /* a few at a time */
            run_wait(&w.r, i + 1);
    }
    run_wait(&w.r, N_KEYS);
    must(run_list(&w.r, ""));
    assert_int_equal(w.r.n_keys, N_KEYS);
    snprintf(want, sizeof want, "d0/k+0000\n");
    assert_int_equal(strncmp(mb_buf_str(&w.r.keys), want, strlen(want)), 0);
    must(run_list(&w.r, "d1/"));
    assert_int_equal(w.r.n_keys, 367);
    world_close(&w);
}

static void write_big(const char *path)
{
    static uint8_t block[1 << 20];
    uint64_t x = 88172645463325252ull;
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    assert_true(fd >= 0);
    for (size_t left = BIG_BYTES; left > 0;) {
        size_t n = left < sizeof block ? left : sizeof block;
        for (size_t i = 0; i + 8 <= sizeof block; i += 8) {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            memcpy(block + i, &x, 8);
        }
        assert_int_equal(mb_fs_write_all(fd, block, n, NULL), 0);
        left -= n;
    }
    close(fd);
}

static uint64_t crc_of(const char *path)
{
    static uint8_t block[1 << 20];
    uint64_t crc = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    for (ssize_t n; (n = read(fd, block, sizeof block)) > 0;)
        crc = mb_crc64nvme(crc, block, (size_t)n);
    close(fd);
    return crc;
}

static char *path_in(const char *name)
{
    return mb_path_join(server.dir, name);
}

static void test_big_file(void **state)
{
    struct world w;
    char *source = path_in("big");
    char *copy = path_in("copy");
    char *stored = path_in("s3/bucket/big/shard_0");
    (void)state;
    write_big(source);
    uint64_t crc = crc_of(source);
    world_open(&w, "s3://bucket/big");
    uint64_t t0 = mb_mono_ms();
    must(run_put_file(&w.r, "shard_0", source, NULL));
    print_message("multipart upload of %d bytes: %d ms\n", BIG_BYTES, (int)(mb_mono_ms() - t0));
    assert_int_equal(w.r.size_bytes, BIG_BYTES);
    assert_int_equal(w.r.progress_bytes, BIG_BYTES);
    assert_true(w.r.crc64nvme == crc);
    assert_true(w.r.upload_id[0] != '\0');
    assert_true(w.r.etag[0] != '\0');
    assert_true(crc_of(stored) == crc);
    must(run_get_file(&w.r, "shard_0", copy));
    assert_true(w.r.crc64nvme == crc);
    assert_true(crc_of(copy) == crc);
    must(run_head(&w.r, "shard_0"));
    assert_int_equal(w.r.size_bytes, BIG_BYTES);
    /* The upload id of a completed upload is unknown: the object itself proves that all is done. */
    char id[512];
    snprintf(id, sizeof id, "%s", w.r.upload_id);
    w.r.upload_id[0] = '\0';
    must(run_put_file(&w.r, "shard_0", source, id));
    assert_string_equal(w.r.upload_id, "");
    /* An id that never was, for an object that is not there: a new upload. */
    must(run_put_file(&w.r, "shard_1", source, "0b1f8f5e-0000-4000-8000-000000000000"));
    assert_true(w.r.upload_id[0] != '\0');
    unlink(copy);
    mb_free(source);
    mb_free(copy);
    mb_free(stored);
    world_close(&w);
}

static void on_upload_id(void *arg, const char *id)
{
    struct store_run *r = arg;
    snprintf(r->upload_id, sizeof r->upload_id, "%s", id);
}

static void on_progress(void *arg, uint64_t done_bytes, uint64_t total_bytes)
{
    struct store_run *r = arg;
    (void)total_bytes;
    r->progress_bytes = done_bytes;
}

static void test_ranges(void **state)
{
    struct world w;
    struct mb_err err;
    struct mb_store_range range = {.key = "r", .offset = 3, .size_bytes = 4};
    (void)state;
    world_open(&w, "s3://bucket/ranges");
    must(run_put(&w.r, "r", "0123456789", MB_STORE_ALWAYS, NULL));
    char etag[200];
    snprintf(etag, sizeof etag, "%s", w.r.etag);
    range.etag = etag;
    for (int i = 0; i < 2; i++) {
        int before = w.r.n_calls;
        assert_int_equal(mb_store_get_range(w.r.store, &range, run_on_result, &w.r, &err), 0);
        run_wait(&w.r, before + 1);
        assert_int_equal(w.r.error, 0);
        assert_string_equal(mb_buf_str(&w.r.data), i == 0 ? "3456" : "89");
        range.offset = 8;
    }
    must(run_put(&w.r, "r", "other bytes", MB_STORE_ALWAYS, NULL));
    int before = w.r.n_calls;
    assert_int_equal(mb_store_get_range(w.r.store, &range, run_on_result, &w.r, &err), 0);
    run_wait(&w.r, before + 1);
    assert_int_equal(w.r.error, MB_ESTATE);
    world_close(&w);
}

static struct mb_store_op *sent_op;

static void on_sent(void *arg, struct mb_store_op *op)
{
    (void)arg;
    sent_op = op;
}

/* Nothing is to be seen of a file that was sent until it may go. */
static void test_sent_and_waiting(void **state)
{
    static const int sizes[] = {0, 1000, 70 * 1024 * 1024};
    struct world w;
    struct mb_err err;
    char *source = path_in("waits");
    (void)state;
    world_open(&w, "s3://bucket/waits");
    for (int i = 0; i < 9; i++) {
        struct mb_store_put_file req = {.key = "w", .path = source, .on_sent = on_sent};
        int before = w.r.n_calls;
        int fd = open(source, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        assert_int_equal(ftruncate(fd, sizes[i % 3]), 0);
        close(fd);
        must(run_put(&w.r, "w", "old", MB_STORE_ALWAYS, NULL));
        sent_op = NULL;
        before = w.r.n_calls;
        assert_int_equal(mb_store_put_file(w.r.store, &req, run_on_result, &w.r, &err), 0);
        while (!sent_op)
            mb_loop_turn(&w.loop);
        assert_int_equal(w.r.n_calls, before);
        if (i < 3)
            mb_store_put_go(sent_op);
        else if (i < 6)
            mb_store_put_give_up(sent_op);
        else
            break; /* the store closes */
        run_wait(&w.r, before + 1);
        assert_int_equal(w.r.error, i < 3 ? 0 : MB_ECANCELED);
        must(run_head(&w.r, "w"));
        assert_int_equal(w.r.size_bytes, i < 3 ? sizes[i] : 3);
    }
    world_close(&w);
    assert_int_equal(w.r.error, MB_ECANCELED);
    mb_free(source);
}

static void write_sized(const char *path, int fill, size_t size_bytes)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    assert_int_equal(ftruncate(fd, (off_t)size_bytes), 0);
    assert_int_equal(pwrite(fd, &fill, 1, 0), 1);
    close(fd);
}

/* Whole files with a condition, as one request and in parts. */
static void test_file_conditions(void **state)
{
    static const size_t sizes[] = {1000, 70 * 1024 * 1024};
    char *one = path_in("one"), *two = path_in("two");
    (void)state;
    for (int i = 0; i < 2; i++) {
        struct world w;
        char etag[200], id[512];
        const char *key = i == 0 ? "small" : "parts";
        world_open(&w, "s3://bucket/file-conditions");
        write_sized(one, 1, sizes[i]);
        write_sized(two, 2, sizes[i]);
        assert_int_equal(run_put_file_if(&w.r, key, one, NULL, MB_STORE_IF_MATCH, "\"x\""),
                         MB_EEXIST);
        must(run_abort_uploads(&w.r, key, NULL));
        must(run_put_file_if(&w.r, key, one, NULL, MB_STORE_IF_ABSENT, NULL));
        snprintf(etag, sizeof etag, "%s", w.r.etag);
        assert_int_equal(run_put_file_if(&w.r, key, two, NULL, MB_STORE_IF_ABSENT, NULL),
                         MB_EEXIST);
        assert_string_equal(w.r.etag, etag);
        snprintf(id, sizeof id, "%s", w.r.upload_id);
        must(run_put_file_if(&w.r, key, one, NULL, MB_STORE_IF_ABSENT, NULL)); /* the same bytes */
        w.r.upload_id[0] = '\0';
        must(run_put_file_if(&w.r, key, two, i == 0 ? NULL : id, MB_STORE_IF_MATCH, etag));
        assert_string_equal(w.r.upload_id, ""); /* went on with the parts that were there */
        assert_string_not_equal(w.r.etag, etag);
        assert_int_equal(run_put_file_if(&w.r, key, one, NULL, MB_STORE_IF_MATCH, etag), MB_EEXIST);
        world_close(&w);
    }
    mb_free(one);
    mb_free(two);
}

static size_t count_uploads(void)
{
    char command[400], line[100];
    snprintf(command, sizeof command,
             "find %s/s3/bucket/.sgwtmp -mindepth 3 -maxdepth 3 -type d 2>/dev/null | wc -l",
             server.dir);
    FILE *f = popen(command, "re");
    assert_non_null(fgets(line, sizeof line, f));
    pclose(f);
    return strtoul(line, NULL, 10);
}

/* What was begun and given up leaves nothing, whether its id is known or not. */
static void test_abort_uploads(void **state)
{
    struct world w;
    struct mb_err err;
    char *source = path_in("big");
    size_t before = count_uploads();
    (void)state;
    for (int i = 0; i < 3; i++) {
        struct mb_store_put_file req = {.key = i < 2 ? "k" : "k-longer",
                                        .path = source,
                                        .on_upload_id = on_upload_id,
                                        .progress = on_progress};
        world_open(&w, "s3://bucket/abort");
        assert_int_equal(mb_store_put_file(w.r.store, &req, run_on_result, &w.r, &err), 0);
        while (w.r.progress_bytes == 0)
            mb_loop_turn(&w.loop);
        world_close(&w);
    }
    assert_int_equal(count_uploads(), before + 3);
    char id[512];
    snprintf(id, sizeof id, "%s", w.r.upload_id);
    world_open(&w, "s3://bucket/abort");
    must(run_abort_uploads(&w.r, "k", NULL)); /* and not those of a longer key */
    assert_int_equal(count_uploads(), before + 1);
    must(run_abort_uploads(&w.r, "k-longer", id));
    assert_int_equal(count_uploads(), before);
    must(run_abort_uploads(&w.r, "k-longer", id));
    must(run_abort_uploads(&w.r, "none", NULL));
    world_close(&w);
    mb_free(source);
}

/* The store closes in the middle of an upload; another one goes on where it stopped. */
static void test_resume(void **state)
{
    struct world w;
    struct mb_err err;
    char id[512];
    char *source = path_in("big");
    char *stored = path_in("s3/bucket/resume/shard");
    struct mb_store_put_file req = {
        .key = "shard", .path = source, .on_upload_id = on_upload_id, .progress = on_progress};
    (void)state;
    world_open(&w, "s3://bucket/resume");
    assert_int_equal(mb_store_put_file(w.r.store, &req, run_on_result, &w.r, &err), 0);
    while (w.r.progress_bytes < BIG_BYTES / 3)
        mb_loop_turn(&w.loop);
    world_close(&w);
    assert_int_equal(w.r.error, MB_ECANCELED);
    snprintf(id, sizeof id, "%s", w.r.upload_id);
    world_open(&w, "s3://bucket/resume");
    assert_int_equal(run_head(&w.r, "shard"), MB_ENOENT);
    must(run_put_file(&w.r, "shard", source, id));
    assert_string_equal(w.r.upload_id, ""); /* no new upload was begun */
    assert_true(crc_of(stored) == crc_of(source));
    must(run_list(&w.r, ""));
    assert_string_equal(mb_buf_str(&w.r.keys), "shard\n");
    world_close(&w);
    mb_free(source);
    mb_free(stored);
}

/* With a size that is known, and without a file. */
static void test_get_file_as(void **state)
{
    static const uint64_t sizes[] = {0, 1000, 40 * 1024 * 1024 + 7};
    struct world w;
    char *source = path_in("as");
    char *copy = path_in("as-copy");
    (void)state;
    world_open(&w, "s3://bucket/as");
    for (int i = 0; i < 3; i++) {
        struct mb_store_get_file req = {
            .key = "as", .path = copy, .has_size = 1, .size_bytes = sizes[i], .is_lazy = 1};
        int fd = open(source, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        assert_int_equal(ftruncate(fd, (off_t)sizes[i]), 0);
        assert_true(sizes[i] == 0 || pwrite(fd, "end", 3, (off_t)sizes[i] - 3) == 3);
        close(fd);
        must(run_put_file(&w.r, "as", source, NULL));
        uint64_t crc = w.r.crc64nvme;
        must(run_get_file_as(&w.r, &req));
        assert_true(w.r.crc64nvme == crc && w.r.size_bytes == sizes[i]);
        assert_true(crc_of(copy) == crc);
        unlink(copy);
        req.path = NULL;
        must(run_get_file_as(&w.r, &req));
        assert_true(w.r.crc64nvme == crc);
        req.has_size = 0;
        must(run_get_file_as(&w.r, &req));
        assert_true(w.r.crc64nvme == crc && w.r.size_bytes == sizes[i]);
        req.has_size = 1;
        req.path = copy;
        req.size_bytes = sizes[i] + 1;
        assert_int_equal(run_get_file_as(&w.r, &req), MB_ECORRUPT);
        if (sizes[i] > 0) {
            req.size_bytes = sizes[i] - 1;
            assert_int_equal(run_get_file_as(&w.r, &req), MB_ECORRUPT);
        }
        assert_int_equal(access(copy, F_OK), -1);
        req.key = "nope";
        assert_int_equal(run_get_file_as(&w.r, &req), MB_ENOENT);
    }
    unlink(source);
    mb_free(source);
    mb_free(copy);
    world_close(&w);
}

static void test_small_files(void **state)
{
    struct world w;
    char *path = path_in("small");
    char *copy = path_in("small-copy");
    (void)state;
    world_open(&w, "s3://bucket/files");
    assert_int_equal(mb_fs_write_atomic(path, "0123456789", 10, 0644, NULL), 0);
    must(run_put_file(&w.r, "ten", path, NULL));
    assert_true(w.r.crc64nvme == mb_crc64nvme(0, "0123456789", 10));
    assert_string_equal(w.r.upload_id, "");
    must(run_get_file(&w.r, "ten", copy));
    assert_int_equal(w.r.size_bytes, 10);
    assert_int_equal(mb_fs_write_atomic(path, "", 0, 0644, NULL), 0);
    must(run_put_file(&w.r, "zero", path, NULL));
    must(run_get_file(&w.r, "zero", copy));
    assert_int_equal(w.r.size_bytes, 0);
    assert_int_equal(run_put_file(&w.r, "x", "/nope", NULL), MB_ENOENT);
    assert_int_equal(run_get_file(&w.r, "nope", copy), MB_ENOENT);
    mb_free(path);
    mb_free(copy);
    world_close(&w);
}

static void test_refusals(void **state)
{
    struct world w;
    (void)state;
    world_open(&w, "s3://no-such-bucket/x");
    assert_int_equal(run_put(&w.r, "k", "x", MB_STORE_ALWAYS, NULL), MB_ENOENT);
    assert_non_null(strstr(w.r.text, "NoSuchBucket"));
    assert_int_equal(run_list(&w.r, ""), MB_ENOENT);
    assert_int_equal(run_delete(&w.r, "k"), MB_ENOENT);
    world_close(&w);
    setenv("BUCKET_STORAGE_SECRET_KEY", "wrong-secret", 1);
    world_open(&w, "s3://bucket/x");
    assert_int_equal(run_put(&w.r, "k", "x", MB_STORE_ALWAYS, NULL), MB_EDENIED);
    assert_null(strstr(w.r.text, "wrong-secret"));
    world_close(&w);
    setenv("BUCKET_STORAGE_SECRET_KEY", "testsecret123", 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_small_objects),   cmocka_unit_test(test_conditions),
        cmocka_unit_test(test_long_listing),    cmocka_unit_test(test_big_file),
        cmocka_unit_test(test_ranges),          cmocka_unit_test(test_sent_and_waiting),
        cmocka_unit_test(test_file_conditions), cmocka_unit_test(test_abort_uploads),
        cmocka_unit_test(test_resume),          cmocka_unit_test(test_small_files),
        cmocka_unit_test(test_refusals),        cmocka_unit_test(test_get_file_as),
    };
    const char *program = getenv("MOBULA_VERSITYGW");
    const char *home = getenv("HOME");
    if (program)
        snprintf(server.program, sizeof server.program, "%s", program);
    else
        snprintf(server.program, sizeof server.program, "%s/.cache/mobula/bin/versitygw",
                 home ? home : "");
    if (access(server.program, X_OK) != 0) {
        fprintf(stderr, "no S3 server %s: tools/test builds it; MOBULA_VERSITYGW names another\n",
                server.program);
        return 1;
    }
    return cmocka_run_group_tests(tests, start_server, stop_server);
}
