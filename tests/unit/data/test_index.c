/* .idx/.bin: what is written reads back; every cut and every damaged field is an error with a text.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "worker/data/index.h"

struct place {
    char dir[64];
    char prefix[96];
};

static void place_make(struct place *p)
{
    snprintf(p->dir, sizeof(p->dir), "/tmp/mobula-index-XXXXXX");
    assert_non_null(mkdtemp(p->dir));
    snprintf(p->prefix, sizeof(p->prefix), "%s/data", p->dir);
}

static void place_remove(struct place *p)
{
    assert_int_equal(mb_fs_remove_tree(p->dir, NULL), 0);
}

static int count_files(const char *dir)
{
    DIR *d = opendir(dir);
    int n = 0;

    while (readdir(d) != NULL)
        n++;
    closedir(d);
    return n - 2;
}

/* Documents of 3, 0 (one empty document) and 2 sequences. */
static int write_sample(const char *prefix, enum mb_index_dtype dtype, struct mb_err *err)
{
    static const int32_t ids[] = {1, 2, 3, 40, 50, 60, 70};
    struct mb_index_writer *w;
    int rc = mb_index_writer_create(prefix, dtype, &w, err);

    if (rc != 0)
        return rc;
    rc = mb_index_writer_add(w, ids, 3, err);
    if (rc == 0)
        rc = mb_index_writer_add(w, ids + 3, 1, err);
    if (rc == 0)
        rc = mb_index_writer_end_document(w, err);
    if (rc == 0)
        rc = mb_index_writer_end_document(w, err);
    if (rc == 0)
        rc = mb_index_writer_add(w, ids + 4, 3, err);
    if (rc == 0)
        rc = mb_index_writer_end_document(w, err);
    if (rc == 0)
        rc = mb_index_writer_commit(w, err);
    mb_index_writer_destroy(w);
    return rc;
}

static void test_round_trip(void **state)
{
    static const enum mb_index_dtype dtypes[] = {MB_INDEX_U8,  MB_INDEX_I8,  MB_INDEX_I16,
                                                 MB_INDEX_U16, MB_INDEX_I32, MB_INDEX_I64};
    (void)state;
    for (size_t k = 0; k < sizeof(dtypes) / sizeof(*dtypes); k++) {
        struct place p;
        struct mb_index *x;
        struct mb_err err = {0};
        int32_t out[3];

        place_make(&p);
        assert_int_equal(write_sample(p.prefix, dtypes[k], &err), 0);
        assert_int_equal(count_files(p.dir), 2);
        assert_int_equal(mb_index_open(p.prefix, &x, &err), 0);
        assert_int_equal(mb_index_dtype(x), dtypes[k]);
        assert_int_equal(mb_index_n_sequences(x), 3);
        assert_int_equal(mb_index_n_documents(x), 3);
        assert_int_equal(mb_index_n_tokens(x), 7);
        assert_int_equal(mb_index_document_start(x, 1), 2);
        assert_int_equal(mb_index_document_start(x, 2), 2);
        assert_int_equal(mb_index_document_start(x, 3), 3);
        assert_int_equal(mb_index_length(x, 2), 3);
        assert_int_equal(mb_index_read(x, 2, 1, 2, 100, out, &err), 0);
        assert_int_equal(out[0], 60);
        assert_int_equal(out[1], 70);
        assert_int_equal(mb_index_read(x, 2, 0, 3, 60, out, &err), MB_ECORRUPT);
        assert_non_null(strstr(err.text, "token 60 at position 1 of sequence 2"));
        mb_index_unref(mb_index_ref(x));
        mb_index_unref(x);
        place_remove(&p);
    }
}

static void test_writer_refuses_and_cleans_up(void **state)
{
    static const int32_t wide[] = {65536};
    struct place p;
    struct mb_index_writer *w;
    struct mb_err err = {0};

    (void)state;
    place_make(&p);
    assert_int_equal(mb_index_writer_create(p.prefix, MB_INDEX_U16, &w, &err), 0);
    assert_int_equal(mb_index_writer_add(w, wide, 1, &err), MB_EINVAL);
    mb_index_writer_destroy(w);
    assert_int_equal(count_files(p.dir), 0);
    assert_int_equal(mb_index_writer_create("/nonexistent/x", MB_INDEX_U16, &w, &err), MB_ENOENT);
    assert_non_null(strstr(err.text, "/nonexistent/x"));
    assert_int_equal(mb_index_writer_create(p.prefix, (enum mb_index_dtype)9, &w, &err), MB_EINVAL);
    place_remove(&p);
}

static void test_writer_allocation_failures(void **state)
{
    struct place p;

    (void)state;
    place_make(&p);
    for (unsigned long n = 1;; n++) {
        struct mb_err err = {0};
        int rc;
        mb_alloc_fail_nth(n);
        rc = write_sample(p.prefix, MB_INDEX_U16, &err);
        if (!mb_alloc_did_fail()) {
            mb_alloc_fail_nth(0);
            assert_int_equal(rc, 0);
            break;
        }
        assert_int_equal(rc, MB_ENOMEM);
        assert_int_equal(count_files(p.dir), 0);
    }
    place_remove(&p);
}

/* The sample's files in memory. */
struct image {
    struct mb_buf idx;
    struct mb_buf bin;
};

static void image_make(struct image *m)
{
    struct place p;
    char path[128];

    *m = (struct image){0};
    place_make(&p);
    assert_int_equal(write_sample(p.prefix, MB_INDEX_U16, NULL), 0);
    snprintf(path, sizeof(path), "%s.idx", p.prefix);
    assert_int_equal(mb_fs_read(path, 1 << 20, &m->idx, NULL), 0);
    snprintf(path, sizeof(path), "%s.bin", p.prefix);
    assert_int_equal(mb_fs_read(path, 1 << 20, &m->bin, NULL), 0);
    place_remove(&p);
}

static void image_close(struct image *m)
{
    mb_buf_close(&m->idx);
    mb_buf_close(&m->bin);
}

static int open_image(const struct image *m, size_t idx_size, size_t bin_size, struct mb_err *err)
{
    struct mb_index *x;
    int rc = mb_index_open_memory("image", m->idx.data, idx_size, m->bin.data, bin_size, &x, err);

    if (rc == 0)
        mb_index_unref(x);
    return rc;
}

/* Documents of sizes 1, 2, ... dealt over three lanes, marked in the middle, cut, gone on with. */
static int add_numbered(struct mb_index_writer *w, uint16_t first, uint16_t end)
{
    int rc = 0;

    for (uint16_t i = first; rc == 0 && i < end; i++) {
        uint16_t tokens[] = {i, (uint16_t)(i + 1000), (uint16_t)(i + 2000)};
        int32_t lengths[] = {1, 2};
        uint32_t count = i % 4 == 3 ? 0 : 2;
        struct mb_index_batch b = {tokens, count > 0 ? sizeof(tokens) : 0, lengths, count, &count,
                                   1};

        rc = mb_index_writer_add_batch(w, i % 3, &b, NULL);
    }
    return rc;
}

static void test_lanes_and_marks(void **state)
{
    enum { N = 3000, CUT = 1234 };
    struct place p;
    struct mb_index_mark marks[3];
    struct mb_index_writer_options o = {.dtype = MB_INDEX_U16, .n_lanes = 3};
    struct mb_index_writer *w;
    struct mb_index *x;
    char work[96];
    uint64_t seq = 0, document = 0;

    (void)state;
    place_make(&p);
    snprintf(work, sizeof(work), "%s/work", p.dir);
    o.prefix = p.prefix;
    o.work = work;
    assert_int_equal(mb_index_writer_open(&o, &w, NULL), 0);
    assert_int_equal(add_numbered(w, 0, CUT), 0);
    assert_int_equal(mb_index_writer_mark(w, marks, NULL), 0);
    assert_int_equal(mb_index_writer_sync(w, NULL), 0);
    assert_int_equal(add_numbered(w, CUT, CUT + 500), 0); /* lost */
    mb_index_writer_keep(w);
    mb_index_writer_destroy(w);
    assert_int_equal(count_files(p.dir), 9);
    o.marks = marks;
    assert_int_equal(mb_index_writer_open(&o, &w, NULL), 0);
    assert_int_equal(add_numbered(w, CUT, N), 0);
    assert_int_equal(mb_index_writer_commit(w, NULL), 0);
    assert_int_equal(mb_index_finish(p.prefix, work, NULL), 0); /* once more changes nothing */
    mb_index_writer_destroy(w);
    assert_int_equal(count_files(p.dir), 2);
    assert_int_equal(mb_index_open(p.prefix, &x, NULL), 0);
    assert_int_equal(mb_index_n_documents(x), N);
    for (int32_t lane = 0; lane < 3; lane++) {
        for (int32_t i = lane; i < N; i += 3, document++) {
            int32_t got[2];

            assert_int_equal(mb_index_document_start(x, document), seq);
            if (i % 4 == 3)
                continue;
            assert_int_equal(mb_index_read(x, seq, 0, 1, 0, got, NULL), 0);
            assert_int_equal(got[0], i);
            assert_int_equal(mb_index_read(x, seq + 1, 0, 2, 0, got, NULL), 0);
            assert_int_equal(got[0], i + 1000);
            assert_int_equal(got[1], i + 2000);
            seq += 2;
        }
    }
    assert_int_equal(mb_index_n_sequences(x), seq);
    mb_index_unref(x);
    /* Marks beyond what is there, and files that are gone, are said. */
    assert_int_equal(mb_index_writer_open(&o, &w, NULL), MB_ENOENT);
    o.marks = NULL;
    assert_int_equal(mb_index_writer_open(&o, &w, NULL), 0);
    mb_index_writer_keep(w);
    mb_index_writer_destroy(w);
    o.marks = marks;
    assert_int_equal(mb_index_writer_open(&o, &w, NULL), MB_ECORRUPT);
    place_remove(&p);
}

static void test_every_cut_is_found(void **state)
{
    struct image m;
    struct mb_err err;

    (void)state;
    image_make(&m);
    assert_int_equal(open_image(&m, m.idx.len, m.bin.len, &err), 0);
    for (size_t n = 0; n < m.idx.len; n++) {
        assert_int_equal(open_image(&m, n, m.bin.len, &err), MB_ECORRUPT);
        assert_non_null(strstr(err.text, "image.idx"));
    }
    for (size_t n = 0; n < m.bin.len; n++) {
        assert_int_equal(open_image(&m, m.idx.len, n, &err), MB_ECORRUPT);
        assert_non_null(strstr(err.text, "image.bin"));
        assert_non_null(strstr(err.text, "shorter than its index"));
    }
    image_close(&m);
}

struct damage {
    size_t at;
    uint64_t value;
    size_t n_bytes;
    const char *text;
};

static void test_every_damage_is_named(void **state)
{
    /* Three sequences: lengths at 34, offsets at 46, documents at 70. */
    static const struct damage damages[] = {
        {0, 'X', 1, "bad header, cannot read: image.idx"},
        {9, 2, 8, "bad version, cannot read: image.idx (version 2"},
        {17, 0, 1, "dtype code 0"},
        {17, 9, 1, "dtype code 9"},
        {18, UINT64_MAX, 8, "contradict"},
        {18, 1ull << 61, 8, "contradict"},
        {18, 2, 8, "contradict"},
        {26, UINT64_MAX, 8, "contradict"},
        {26, 0, 8, "contradict"},
        {34, 0xffffffff, 4, "sequence 0 has length -1"},
        {34, 0x7fffffff, 4, "shorter than its index"},
        {46, UINT64_MAX, 8, "at offset -1"},
        {54, 15, 8, "shorter than its index"},
        {54, INT64_MAX, 8, "shorter than its index"},
        {70, 1, 8, "document index entry 0 is 1"},
        {78, 4, 8, "document index entry 1 is 4"},
        {86, 1, 8, "document index entry 2 is 1"},
        {94, 2, 8, "ends at sequence 2 of 3"},
        {94, UINT64_MAX, 8, "document index entry 3 is -1"},
    };
    struct image m;
    struct mb_err err;

    (void)state;
    image_make(&m);
    for (size_t i = 0; i < sizeof(damages) / sizeof(*damages); i++) {
        const struct damage *d = &damages[i];
        uint8_t saved[8];
        memcpy(saved, m.idx.data + d->at, d->n_bytes);
        memcpy(m.idx.data + d->at, &d->value, d->n_bytes);
        assert_int_equal(open_image(&m, m.idx.len, m.bin.len, &err), MB_ECORRUPT);
        if (strstr(err.text, d->text) == NULL)
            fail_msg("%s not in: %s", d->text, err.text);
        assert_null(strchr(err.text, '\n'));
        memcpy(m.idx.data + d->at, saved, d->n_bytes);
    }
    image_close(&m);
}

static void test_modes_are_read_past(void **state)
{
    struct image m;
    struct mb_err err;

    (void)state;
    image_make(&m);
    assert_int_equal(mb_buf_add(&m.idx, "\0\0\0", 3), 0);
    assert_int_equal(open_image(&m, m.idx.len, m.bin.len, &err), 0);
    assert_int_equal(open_image(&m, m.idx.len - 1, m.bin.len, &err), MB_ECORRUPT);
    image_close(&m);
}

static void test_missing_files(void **state)
{
    struct place p;
    struct mb_index *x;
    struct mb_err err;
    char path[128];

    (void)state;
    place_make(&p);
    assert_int_equal(mb_index_open(p.prefix, &x, &err), MB_ENOENT);
    assert_non_null(strstr(err.text, "data.idx"));
    assert_int_equal(write_sample(p.prefix, MB_INDEX_U16, &err), 0);
    snprintf(path, sizeof(path), "%s.bin", p.prefix);
    unlink(path);
    assert_int_equal(mb_index_open(p.prefix, &x, &err), MB_ENOENT);
    assert_non_null(strstr(err.text, "data.bin"));
    place_remove(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_writer_refuses_and_cleans_up),
        cmocka_unit_test(test_writer_allocation_failures),
        cmocka_unit_test(test_lanes_and_marks),
        cmocka_unit_test(test_every_cut_is_found),
        cmocka_unit_test(test_every_damage_is_named),
        cmocka_unit_test(test_modes_are_read_past),
        cmocka_unit_test(test_missing_files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
