/* The input of preprocess: whatever a source is, its pieces laid end to end are its bytes, pieces
 * end at newlines, and what is damaged, missing or too long is told in one line. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <fcntl.h>
#include <lzma.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "worker/data/input/input.h"

enum { MIB = 1 << 20 };

static char dir[64];
static char paths[8][128];

static int setup(void **state)
{
    (void)state;
    snprintf(dir, sizeof(dir), "/tmp/mobula-input-XXXXXX");
    return mkdtemp(dir) == NULL;
}

static int teardown(void **state)
{
    (void)state;
    return mb_fs_remove_tree(dir, NULL);
}

/* One of eight path buffers. */
static const char *in_dir(const char *name)
{
    static unsigned next;
    char *path = paths[next++ % 8];

    snprintf(path, sizeof(paths[0]), "%s/%s", dir, name);
    return path;
}

static const char *write_file(const char *name, const struct mb_buf *b)
{
    const char *path = in_dir(name);

    assert_int_equal(mb_fs_write_atomic(path, b->data, b->len, 0644, NULL), 0);
    return path;
}

/* n_bytes or more of lines whose lengths vary around `mean`; every line differs. */
static void make_lines(struct mb_buf *out, size_t n_bytes, size_t mean)
{
    unsigned seed = 7;

    for (int i = 0; out->len < n_bytes; i++) {
        size_t n = (size_t)rand_r(&seed) % (2 * mean);

        assert_int_equal(mb_buf_printf(out, "%d ", i), 0);
        assert_int_equal(mb_buf_reserve(out, n + 1), 0);
        memset(out->data + out->len, 'a' + i % 26, n);
        out->len += n;
        assert_int_equal(mb_buf_add(out, "\n", 1), 0);
    }
}

/* ---- compressors ---- */

static void gzip_add(struct mb_buf *out, const void *p, size_t n)
{
    z_stream z = {.next_in = (void *)(uintptr_t)p, .avail_in = (uInt)n};

    assert_int_equal(deflateInit2(&z, 6, Z_DEFLATED, 31, 8, Z_DEFAULT_STRATEGY), Z_OK);
    assert_int_equal(mb_buf_reserve(out, deflateBound(&z, n)), 0);
    z.next_out = out->data + out->len;
    z.avail_out = (uInt)(out->cap - out->len);
    assert_int_equal(deflate(&z, Z_FINISH), Z_STREAM_END);
    out->len += z.total_out;
    deflateEnd(&z);
}

static void xz_add(struct mb_buf *out, const void *p, size_t n)
{
    size_t bound = lzma_stream_buffer_bound(n);

    assert_int_equal(mb_buf_reserve(out, bound), 0);
    assert_int_equal(lzma_easy_buffer_encode(1, LZMA_CHECK_CRC64, NULL, p, n, out->data, &out->len,
                                             out->len + bound),
                     LZMA_OK);
}

static void zstd_add(struct mb_buf *out, const void *p, size_t n)
{
    ZSTD_CCtx *c = ZSTD_createCCtx();
    size_t made;

    ZSTD_CCtx_setParameter(c, ZSTD_c_checksumFlag, 1);
    assert_int_equal(mb_buf_reserve(out, ZSTD_compressBound(n)), 0);
    made = ZSTD_compress2(c, out->data + out->len, ZSTD_compressBound(n), p, n);
    assert_false(ZSTD_isError(made));
    out->len += made;
    ZSTD_freeCCtx(c);
}

static const struct {
    const char *end;
    void (*add)(struct mb_buf *out, const void *p, size_t n);
} packers[] = {{".gz", gzip_add}, {".xz", xz_add}, {".zst", zstd_add}};

/* ---- reading ---- */

static struct mb_input *open_words(const char *const *words, size_t n)
{
    struct mb_input_options o = {.words = words, .n_words = n};
    struct mb_input *in = NULL;
    struct mb_err err = {0};

    if (mb_input_open(&o, &in, &err) != 0)
        fail_msg("%s", err.text);
    return in;
}

/* One more piece, checked against its place in what source number i should hold: 1, 0 or MB_E*. */
static int next_checked(struct mb_input *in, const struct mb_buf *want, uint64_t *at,
                        uint32_t *source, struct mb_buf *text, struct mb_err *err)
{
    struct mb_input_piece piece;
    int rc = mb_input_next(in, text, &piece, err);

    if (rc != 1)
        return rc;
    assert_int_equal(mb_input_load(in, &piece, text, err), 0);
    if (piece.at.source != *source) {
        assert_int_equal(*at, want[*source].len);
        assert_int_equal(piece.at.line, 1);
        *source = piece.at.source;
        *at = 0;
    }
    assert_int_equal(piece.at.offset, *at);
    assert_int_equal(piece.size_bytes, text->len);
    assert_true(text->len > 0 && *at + text->len <= want[*source].len);
    assert_memory_equal(text->data, want[*source].data + *at, text->len);
    *at += text->len;
    if (*at < want[*source].len)
        assert_int_equal(text->data[text->len - 1], '\n');
    return 1;
}

static void expect(const char *const *words, size_t n, const struct mb_buf *want)
{
    struct mb_input *in = open_words(words, n);
    struct mb_buf text = {0};
    struct mb_err err = {0};
    uint64_t at = 0;
    uint32_t source = 0;
    int rc;

    while ((rc = next_checked(in, want, &at, &source, &text, &err)) == 1)
        ;
    if (rc != 0)
        fail_msg("%s", err.text);
    assert_int_equal(at, want[source].len);
    if (mb_input_bytes_total(in) > 0)
        assert_int_equal(mb_input_bytes_done(in), mb_input_bytes_total(in));
    mb_input_close(in);
    mb_buf_close(&text);
}

/* Reads to the failure and returns its text; *inside as reported. */
static const char *failure_of(const char *word, int code, int *inside)
{
    static struct mb_err err;
    struct mb_input_options o = {.words = &word, .n_words = 1};
    struct mb_input *in = NULL;
    struct mb_input_piece piece = {0};
    struct mb_buf text = {0};
    int rc = mb_input_open(&o, &in, &err);

    *inside = 0;
    while (rc >= 0 && (rc = mb_input_next(in, &text, &piece, &err)) == 1)
        rc = mb_input_load(in, &piece, &text, &err);
    *inside = piece.failed_inside;
    mb_input_close(in);
    mb_buf_close(&text);
    assert_int_equal(rc, code);
    return err.text;
}

/* ---- tests ---- */

static void test_plain(void **state)
{
    static const size_t sizes[] = {0, 1, 100, MIB - 1, MIB, 5 * MIB};

    (void)state;
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct mb_buf b = {0};
        const char *word;

        make_lines(&b, sizes[i], 3000);
        word = write_file("a", &b);
        expect(&word, 1, &b);
        b.len -= b.len > 0; /* no newline at the end */
        word = write_file("a", &b);
        expect(&word, 1, &b);
        mb_buf_close(&b);
    }
}

static void test_long_lines(void **state)
{
    static const size_t means[] = {MIB / 2, MIB, 4 * MIB};

    (void)state;
    for (size_t i = 0; i < 3; i++) {
        struct mb_buf b = {0};
        struct mb_buf packed = {0};
        const char *word;

        make_lines(&b, 20 * MIB, means[i]);
        word = write_file("a", &b);
        expect(&word, 1, &b);
        zstd_add(&packed, b.data, b.len);
        word = write_file("a.zst", &packed);
        expect(&word, 1, &b);
        mb_buf_close(&b);
        mb_buf_close(&packed);
    }
}

static void test_compressed(void **state)
{
    struct mb_buf b = {0};

    (void)state;
    make_lines(&b, 6 * MIB, 3000);
    for (size_t k = 0; k < 3; k++) {
        struct mb_buf packed = {0};
        const char *word;
        char name[16];

        /* Three members that begin anywhere, an empty one among them; found by content. */
        packers[k].add(&packed, b.data, 1000);
        packers[k].add(&packed, b.data, 0);
        packers[k].add(&packed, b.data + 1000, b.len - 1000);
        word = write_file("packed", &packed);
        expect(&word, 1, &b);
        snprintf(name, sizeof(name), "a%s", packers[k].end);
        word = write_file(name, &packed);
        expect(&word, 1, &b);
        mb_buf_close(&packed);
    }
    mb_buf_close(&b);
}

static void test_gzip_padding(void **state)
{
    struct mb_buf b = {0};
    struct mb_buf packed = {0};
    const char *word;
    int inside;

    (void)state;
    make_lines(&b, 3000, 100);
    gzip_add(&packed, b.data, b.len);
    for (int i = 0; i < 1000; i++)
        assert_int_equal(mb_buf_add(&packed, "\0", 1), 0);
    word = write_file("a.gz", &packed);
    expect(&word, 1, &b);
    assert_int_equal(mb_buf_puts(&packed, "rubbish at the end"), 0);
    word = write_file("a.gz", &packed);
    assert_non_null(strstr(failure_of(word, MB_ECORRUPT, &inside), "no gzip header"));
    assert_int_equal(inside, 1); /* the lines before it were handed out */
    mb_buf_close(&b);
    mb_buf_close(&packed);
}

/* Cut or changed at many places: an error, or (if the damage is in unchecked bytes such as a gzip
 * header's time) the right lines; never wrong ones. */
static void test_damage(void **state)
{
    struct mb_buf b = {0};

    (void)state;
    make_lines(&b, 30000, 100);
    for (size_t k = 0; k < 3; k++) {
        struct mb_buf packed = {0};

        packers[k].add(&packed, b.data, b.len);
        for (size_t cut = 1; cut < packed.len; cut += cut < 40 || cut + 40 > packed.len ? 1 : 97) {
            struct mb_buf part = {.data = packed.data, .len = cut};
            const char *word = write_file("cut", &part);
            int inside;

            if (cut >= 6)
                assert_non_null(strstr(failure_of(word, MB_ECORRUPT, &inside), "fetch it again"));
        }
        for (size_t at = 6; at < packed.len; at += at < 40 || at + 40 > packed.len ? 1 : 97) {
            struct mb_buf text = {0};
            struct mb_input_piece piece;
            struct mb_input *in;
            struct mb_err err;
            uint64_t done = 0;
            const char *word;
            int rc;

            packed.data[at] ^= 0x10;
            word = write_file("flip", &packed);
            packed.data[at] ^= 0x10;
            in = open_words(&word, 1);
            while ((rc = mb_input_next(in, &text, &piece, &err)) == 1) {
                done += text.len;
                assert_true(done <= b.len + 2 * MIB);
            }
            assert_true(rc == MB_ECORRUPT || rc == MB_EUNSUPPORTED || (rc == 0 && done == b.len));
            mb_input_close(in);
            mb_buf_close(&text);
        }
        mb_buf_close(&packed);
    }
    mb_buf_close(&b);
}

static void test_many_sources(void **state)
{
    enum { N = 12 };
    struct mb_buf want[N] = {0};
    const char *words[1];

    (void)state;
    for (int i = 0; i < N; i++) {
        struct mb_buf packed = {0};
        char name[32];

        make_lines(&want[i], (size_t)(i % 5) * 700000, 500);
        if (want[i].len > 0 && i % 2)
            want[i].len--; /* the last line does not run into the next file */
        snprintf(name, sizeof(name), "many-%02d", i);
        if (i % 4 == 3)
            assert_int_equal(mb_buf_add(&packed, want[i].data, want[i].len), 0);
        else
            packers[i % 4].add(&packed, want[i].data, want[i].len);
        write_file(name, &packed);
        mb_buf_close(&packed);
    }
    words[0] = in_dir("many-*");
    {
        /* Sources without a line have no piece: leave them out of what is wanted, too. */
        struct mb_input *in = open_words(words, 1);
        struct mb_buf text = {0};
        struct mb_input_piece piece;
        struct mb_err err;
        uint64_t at[N] = {0};
        uint32_t last = 0;

        assert_int_equal(mb_input_n_sources(in), N);
        while (mb_input_next(in, &text, &piece, &err) == 1) {
            uint32_t s = piece.at.source;

            assert_true(s >= last);
            last = s;
            assert_int_equal(mb_input_load(in, &piece, &text, &err), 0);
            assert_memory_equal(text.data, want[s].data + at[s], text.len);
            at[s] += text.len;
        }
        for (int i = 0; i < N; i++)
            assert_int_equal(at[i], want[i].len);
        mb_input_close(in);
        mb_buf_close(&text);
    }
    for (int i = 0; i < N; i++)
        mb_buf_close(&want[i]);
}

static void test_order_of_words(void **state)
{
    struct mb_buf one = {.data = (uint8_t *)(uintptr_t) "x\n", .len = 2};
    const char *words[3];
    struct mb_input *in;

    (void)state;
    write_file("g-10", &one);
    write_file("g-9", &one);
    write_file("g-B", &one);
    write_file("g-a", &one);
    write_file("g-[z]", &one); /* a name that looks like a pattern */
    words[0] = in_dir("g-a");
    words[1] = in_dir("g-[0-9]*");
    words[2] = in_dir("g-[z]");
    in = open_words(words, 3);
    assert_int_equal(mb_input_n_sources(in), 4);
    assert_non_null(strstr(mb_input_name(in, 0), "g-a"));
    assert_non_null(strstr(mb_input_name(in, 1), "g-10"));
    assert_non_null(strstr(mb_input_name(in, 2), "g-9"));
    assert_non_null(strstr(mb_input_name(in, 3), "g-[z]"));
    mb_input_close(in);
}

/* From the place of every piece on, the rest is the same. */
static void test_seek(void **state)
{
    struct mb_buf want[2] = {0};
    struct mb_buf packed = {0};
    struct mb_buf text = {0};
    enum { MAX = 32 };
    struct mb_input_piece pieces[MAX];
    struct mb_input *in;
    struct mb_err err;
    const char *words[2];
    size_t n = 0;

    (void)state;
    make_lines(&want[0], 4 * MIB, 3000);
    make_lines(&want[1], 3 * MIB, 2000);
    words[0] = write_file("s0", &want[0]);
    gzip_add(&packed, want[1].data, want[1].len);
    words[1] = write_file("s1.gz", &packed);
    in = open_words(words, 2);
    while (n < MAX && mb_input_next(in, &text, &pieces[n], &err) == 1)
        n++;
    assert_true(n > 12 && n < MAX);
    mb_input_close(in); /* pieces of a file that nobody loaded */
    for (size_t i = 0; i < n; i++) {
        struct mb_input_place to = pieces[i].at;
        uint64_t at = to.offset;
        uint32_t source = to.source;
        struct mb_input_piece first;
        int rc;

        to.line = 77;
        in = open_words(words, 2);
        assert_int_equal(mb_input_seek(in, &to, &err), 0);
        assert_int_equal(mb_input_next(in, &text, &first, &err), 1);
        assert_int_equal(first.at.line, 77);
        assert_int_equal(first.at.offset, at);
        assert_int_equal(mb_input_load(in, &first, &text, &err), 0);
        assert_memory_equal(text.data, want[source].data + at, text.len);
        at += text.len;
        while ((rc = next_checked(in, want, &at, &source, &text, &err)) == 1)
            ;
        assert_int_equal(rc, 0);
        assert_int_equal(source, 1);
        assert_int_equal(at, want[1].len);
        mb_input_close(in);
    }
    mb_buf_close(&want[0]);
    mb_buf_close(&want[1]);
    mb_buf_close(&packed);
    mb_buf_close(&text);
}

static void test_file_changes(void **state)
{
    struct mb_buf b = {0};
    struct mb_buf text = {0};
    struct mb_input_piece first;
    struct mb_input_piece second;
    struct mb_input *in;
    struct mb_err err;
    const char *word;
    FILE *more;
    int rc;

    (void)state;
    make_lines(&b, 3 * MIB, 3000);
    word = write_file("shrinks", &b);
    in = open_words(&word, 1);
    assert_int_equal(mb_input_next(in, &text, &first, &err), 1);
    assert_int_equal(mb_input_next(in, &text, &second, &err), 1);
    assert_int_equal(truncate(word, MB_INPUT_PIECE_BYTES / 2), 0);
    assert_int_equal(mb_input_load(in, &first, &text, &err), MB_ESTATE);
    assert_int_equal(mb_input_load(in, &second, &text, &err), MB_ESTATE);
    assert_non_null(strstr(err.text, "became shorter"));
    assert_int_equal(mb_input_next(in, &text, &first, &err), MB_ESTATE);
    mb_input_close(in);

    word = write_file("grows", &b);
    in = open_words(&word, 1);
    assert_int_equal(mb_input_next(in, &text, &first, &err), 1);
    assert_int_equal(mb_input_load(in, &first, &text, &err), 0);
    more = fopen(word, "a");
    assert_non_null(more);
    fputs("one more line\n", more);
    fclose(more);
    while ((rc = mb_input_next(in, &text, &first, &err)) == 1)
        assert_int_equal(mb_input_load(in, &first, &text, &err), 0);
    assert_int_equal(rc, 0);
    assert_true(text.len > 14 && memcmp(text.data + text.len - 14, "one more line\n", 14) == 0);
    assert_int_equal(mb_input_bytes_done(in), b.len + 14);
    mb_input_close(in);
    mb_buf_close(&b);
    mb_buf_close(&text);
}

static void test_line_bound(void **state)
{
    struct mb_input_options o = {.n_words = 1, .max_line_bytes = 2 * MIB};
    struct mb_buf b = {0};
    struct mb_buf packed = {0};

    (void)state;
    make_lines(&b, 100, 30);
    for (int extra = 0; extra < 2; extra++) {
        for (int newline = 0; newline < 2; newline++) {
            size_t head = b.len;
            const char *words[2];

            assert_int_equal(mb_buf_reserve(&b, 2 * MIB + 2), 0);
            memset(b.data + b.len, 'x', (size_t)(2 * MIB + extra));
            b.len += (size_t)(2 * MIB + extra);
            if (newline)
                assert_int_equal(mb_buf_add(&b, "\n", 1), 0);
            mb_buf_reset(&packed);
            gzip_add(&packed, b.data, b.len);
            words[0] = write_file("long", &b);
            words[1] = write_file("long.gz", &packed);
            for (int i = 0; i < 2; i++) {
                struct mb_buf text = {0};
                struct mb_input_piece piece;
                struct mb_input *in = NULL;
                struct mb_err err = {0};
                int rc;

                o.words = &words[i];
                assert_int_equal(mb_input_open(&o, &in, &err), 0);
                while ((rc = mb_input_next(in, &text, &piece, &err)) == 1)
                    assert_int_equal(mb_input_load(in, &piece, &text, &err), 0);
                assert_int_equal(rc, extra ? MB_EINVAL : 0);
                if (extra)
                    assert_non_null(strstr(err.text, "longer than 2097152 bytes"));
                mb_input_close(in);
                mb_buf_close(&text);
            }
            b.len = head;
        }
    }
    mb_buf_close(&b);
    mb_buf_close(&packed);
}

static void *write_fifo(void *arg)
{
    const struct mb_buf *b = arg;
    char path[128];
    int fd;

    snprintf(path, sizeof(path), "%s/fifo", dir);
    fd = open(path, O_WRONLY | O_CLOEXEC);

    if (fd < 0 || mb_fs_write_all(fd, b->data, b->len, NULL) != 0)
        abort();
    close(fd);
    return NULL;
}

static void test_fifo(void **state)
{
    struct mb_buf b = {0};
    struct mb_buf packed = {0};
    struct mb_err err;
    struct mb_buf identity = {0};
    const char *word;
    struct mb_input *in;
    pthread_t thread;

    (void)state;
    make_lines(&b, 3 * MIB, 3000);
    gzip_add(&packed, b.data, b.len);
    assert_int_equal(mkfifo(in_dir("fifo"), 0600), 0);
    assert_int_equal(pthread_create(&thread, NULL, write_fifo, &packed), 0);
    word = in_dir("fifo");
    in = open_words(&word, 1);
    assert_int_equal(mb_input_identity(in, &identity, &err), MB_EUNSUPPORTED);
    mb_input_close(in);
    expect(&word, 1, &b);
    pthread_join(thread, NULL);
    mb_buf_close(&b);
    mb_buf_close(&identity);
    mb_buf_close(&packed);
}

static void *cancel_soon(void *arg)
{
    usleep(20000); /* either order is right: cancel before next, or while it waits */
    mb_input_cancel(arg);
    return NULL;
}

static void test_cancel(void **state)
{
    struct mb_input_piece piece;
    struct mb_buf text = {0};
    struct mb_err err;
    struct mb_input *in;
    pthread_t thread;
    const char *word;
    int fd;

    (void)state;
    assert_int_equal(mkfifo(in_dir("silent"), 0600), 0);
    fd = open(in_dir("silent"), O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    word = in_dir("silent");
    in = open_words(&word, 1);
    assert_int_equal(pthread_create(&thread, NULL, cancel_soon, in), 0);
    assert_int_equal(mb_input_next(in, &text, &piece, &err), MB_ECANCELED);
    pthread_join(thread, NULL);
    mb_input_close(in);
    mb_buf_close(&text);
    close(fd);
}

static void test_refusals(void **state)
{
    static const struct {
        const char *bytes;
        size_t n;
        const char *name, *text;
    } files[] = {
        {"BZh91AY", 7, "a.bz2", "bunzip2"},   {"PAR1....", 8, "a.parquet", "Parquet"},
        {"PK\3\4....", 8, "a.zip", "zip"},    {"{}\n", 3, "b.gz", "not gzip"},
        {"{}\n", 3, "b.xz", "not xz"},        {"{}\n", 3, "b.zst", "not zstd"},
        {"\x1f\x8b", 2, "c.zst", "not zstd"},
    };
    struct mb_input_options o = {.n_words = 1};
    struct mb_input *in;
    struct mb_err err;
    const char *word;
    int inside;

    (void)state;
    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
        struct mb_buf b = {.data = (uint8_t *)(uintptr_t)files[i].bytes, .len = files[i].n};
        const char *text = failure_of(write_file(files[i].name, &b), MB_EINVAL, &inside);

        assert_int_equal(inside, 0);
        assert_non_null(strstr(text, files[i].text));
        assert_non_null(strstr(text, files[i].name));
        assert_int_equal(strncmp(text, "--input ", 8), 0);
    }
    o.words = &word;
    word = in_dir("no-such-file");
    assert_int_equal(mb_input_open(&o, &in, &err), MB_ENOENT);
    word = in_dir("no-such-*");
    assert_int_equal(mb_input_open(&o, &in, &err), MB_ENOENT);
    assert_non_null(strstr(err.text, "pattern"));
    word = dir;
    assert_int_equal(mb_input_open(&o, &in, &err), MB_EINVAL);
    assert_non_null(strstr(err.text, "directory"));
}

static void test_allocation_failures(void **state)
{
    struct mb_buf b = {0};
    struct mb_buf packed = {0};
    const char *words[2];
    int failed = 1;

    (void)state;
    make_lines(&b, 3000, 100);
    gzip_add(&packed, b.data, b.len);
    words[0] = write_file("m", &b);
    words[1] = write_file("m.gz", &packed);
    for (unsigned long nth = 1; failed; nth++) {
        struct mb_input_options o = {.words = words, .n_words = 2};
        struct mb_input *in = NULL;
        struct mb_input_piece piece;
        struct mb_buf text = {0};
        struct mb_err err = {0};
        int rc;

        mb_alloc_fail_nth(nth);
        rc = mb_input_open(&o, &in, &err);
        while (rc >= 0 && (rc = mb_input_next(in, &text, &piece, &err)) == 1)
            rc = mb_input_load(in, &piece, &text, &err);
        mb_input_close(in);
        mb_buf_close(&text);
        failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        assert_int_equal(rc, failed ? MB_ENOMEM : 0);
        assert_true(nth < 1000);
    }
    mb_buf_close(&b);
    mb_buf_close(&packed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plain),          cmocka_unit_test(test_long_lines),
        cmocka_unit_test(test_compressed),     cmocka_unit_test(test_gzip_padding),
        cmocka_unit_test(test_damage),         cmocka_unit_test(test_many_sources),
        cmocka_unit_test(test_order_of_words), cmocka_unit_test(test_seek),
        cmocka_unit_test(test_file_changes),   cmocka_unit_test(test_line_bound),
        cmocka_unit_test(test_fifo),           cmocka_unit_test(test_cancel),
        cmocka_unit_test(test_refusals),       cmocka_unit_test(test_allocation_failures),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
