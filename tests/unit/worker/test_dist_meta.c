/* .metadata of torch.distributed.checkpoint as data. The real one is in
 * tests/integration/worker/test_megatron_dist.py, hostile bytes are in tests/fuzz/fuzz_dist_meta.c.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "worker/checkpoint/megatron/dist_meta.h"

#define META "torch.distributed.checkpoint.metadata"

static void op(struct mb_buf *b, char code)
{
    assert_int_equal(mb_buf_add(b, &code, 1), 0);
}

static void text(struct mb_buf *b, const char *s)
{
    op(b, '\x8c');
    op(b, (char)strlen(s));
    assert_int_equal(mb_buf_puts(b, s), 0);
}

/* An object of a class, without arguments; its state follows, and end_object. */
static void object(struct mb_buf *b, const char *module, const char *class)
{
    text(b, module);
    text(b, class);
    op(b, '\x93');
    op(b, ')');
    op(b, '\x81');
}

static void begin_object(struct mb_buf *b, const char *module, const char *class)
{
    object(b, module, class);
    op(b, '}');
    op(b, '(');
}

static void end_object(struct mb_buf *b)
{
    op(b, 'u');
    op(b, 'b');
}

static void size(struct mb_buf *b, uint8_t x, uint8_t y)
{
    text(b, "torch");
    text(b, "Size");
    op(b, '\x93');
    op(b, 'K');
    op(b, (char)x);
    op(b, 'K');
    op(b, (char)y);
    op(b, '\x86');
    op(b, '\x85');
    op(b, 'R');
}

static void number(struct mb_buf *b, const char *name, uint8_t v)
{
    text(b, name);
    op(b, 'K');
    op(b, (char)v);
}

struct chunk {
    uint8_t x, y, n_x, n_y;
};

struct sample {
    const char *name;
    uint8_t rows, columns;
    const struct chunk *chunks;
    size_t n_chunks;
    size_t n_places; /* of chunks that a file has */
};

static void put_tensor(struct mb_buf *b, const struct sample *s)
{
    text(b, s->name);
    begin_object(b, META, "TensorStorageMetadata");
    text(b, "properties");
    object(b, META, "TensorProperties");
    assert_int_equal(mb_buf_puts(b, "ctorch\nbfloat16\n"), 0);
    op(b, '\x85');
    op(b, 'b');
    text(b, "size");
    size(b, s->rows, s->columns);
    text(b, "chunks");
    op(b, ']');
    op(b, '(');
    for (size_t i = 0; i < s->n_chunks; i++) {
        begin_object(b, META, "ChunkStorageMetadata");
        text(b, "offsets");
        size(b, s->chunks[i].x, s->chunks[i].y);
        text(b, "sizes");
        size(b, s->chunks[i].n_x, s->chunks[i].n_y);
        end_object(b);
    }
    op(b, 'e');
    end_object(b);
}

static void put_place(struct mb_buf *b, const struct sample *s, size_t i, const char *file)
{
    begin_object(b, META, "MetadataIndex");
    text(b, "fqn");
    text(b, s->name);
    text(b, "offset");
    size(b, s->chunks[i].x, s->chunks[i].y);
    end_object(b);
    begin_object(b, "torch.distributed.checkpoint.filesystem", "_StorageInfo");
    text(b, "relative_path");
    text(b, file);
    number(b, "offset", (uint8_t)(10 * i));
    number(b, "length", 10);
    end_object(b);
}

static const char OBJECT[] = "optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1";

static void put_place_of_object(struct mb_buf *b, const char *file)
{
    begin_object(b, META, "MetadataIndex");
    text(b, "fqn");
    text(b, OBJECT);
    end_object(b);
    begin_object(b, "torch.distributed.checkpoint.filesystem", "_StorageInfo");
    text(b, "relative_path");
    text(b, file);
    number(b, "offset", 70);
    number(b, "length", 80);
    end_object(b);
}

static struct mb_buf make(const struct sample *s, size_t n, const char *file)
{
    struct mb_buf b = {0};
    assert_int_equal(mb_buf_add(&b, "\x80\x04\x95\0\0\0\0\0\0\0\0", 11), 0);
    begin_object(&b, META, "Metadata");
    text(&b, "state_dict_metadata");
    op(&b, '}');
    op(&b, '(');
    for (size_t i = 0; i < n; i++) {
        put_tensor(&b, &s[i]);
    }
    text(&b, "rng_state/shard_0_1");
    object(&b, META, "BytesStorageMetadata");
    text(&b, OBJECT);
    object(&b, META, "BytesStorageMetadata");
    op(&b, 'u');
    text(&b, "storage_data");
    op(&b, '}');
    op(&b, '(');
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < s[i].n_places; k++) {
            put_place(&b, &s[i], k, file);
        }
    }
    put_place_of_object(&b, file);
    op(&b, 'u');
    end_object(&b);
    op(&b, '.');
    return b;
}

static int parse(const struct sample *s, size_t n, const char *file, struct mb_dist_meta *out,
                 struct mb_err *err)
{
    struct mb_buf b = make(s, n, file);
    int rc = mb_dist_meta_parse("here", b.data, b.len, out, err);
    mb_buf_close(&b);
    return rc;
}

/* Of unlike sizes, and not in order: 5 x 7. */
static const struct chunk CHUNKS[] = {
    {3, 2, 2, 5}, {0, 0, 3, 4}, {0, 4, 1, 3}, {3, 0, 2, 2}, {1, 4, 2, 3}};

static const struct sample SAMPLES[] = {
    {"b", 5, 7, CHUNKS, 5, 5},
    {"optimizer.state.exp_avg.b", 5, 7, CHUNKS, 5, 5},
    {"a", 3, 4, CHUNKS + 1, 1, 1},
};

static void each_element_is_where_it_was_said(void **state)
{
    (void)state;
    struct mb_dist_meta m;
    struct mb_err err = {0};
    assert_int_equal(parse(SAMPLES, 3, "__0_0.distcp", &m, &err), 0);
    assert_int_equal(m.n_tensors, 4);
    assert_int_equal(m.n_files, 1);
    assert_string_equal(m.files[0], "__0_0.distcp");
    assert_true(m.has_optimizer);
    assert_null(mb_dist_meta_find(&m, "c"));
    const struct mb_dist_tensor *t = mb_dist_meta_find(&m, "b");
    assert_non_null(t);
    assert_true(t->is_read && t->dtype == MB_ST_BF16);
    for (uint64_t i = 0; i < 35; i++) {
        size_t k;
        uint64_t at, run = mb_dist_place(t, i, &k, &at);
        assert_in_range(run, 1, 35 - i);
        const struct mb_dist_chunk *c = &t->chunks[k];
        for (uint64_t e = 0; e < run; e++) { /* the other way round */
            const uint64_t x = c->offset[0] + (at + e) / c->size[1];
            const uint64_t y = c->offset[1] + (at + e) % c->size[1];
            assert_int_equal(x * 7 + y, i + e);
        }
    }
    /* One that is whole is one run. */
    size_t k;
    uint64_t at;
    assert_int_equal(mb_dist_place(mb_dist_meta_find(&m, "a"), 1, &k, &at), 11);
    assert_false(t->is_of_optimizer || mb_dist_meta_find(&m, "a")->is_of_optimizer);
    t = mb_dist_meta_find(&m, SAMPLES[1].name);
    assert_true(t->is_of_optimizer && !t->is_object && t->is_wrong == NULL && t->n == 35);
    t = mb_dist_meta_find(&m, OBJECT);
    assert_true(t->is_of_optimizer && t->is_object && t->is_wrong == NULL);
    assert_int_equal(t->chunks->at, 70);
    assert_int_equal(t->chunks->n_bytes, 80);
    mb_dist_meta_close(&m);
}

static void of_the_optimizer_it_is_kept_what_is_wrong(void **state)
{
    (void)state;
    static const struct chunk beyond[] = {{0, 0, 3, 5}}, hole[] = {{0, 0, 1, 4}, {2, 0, 1, 4}},
                              same[] = {{0, 0, 3, 4}};
    static const struct {
        struct sample s;
        const char *text;
    } cases[] = {
        {{"optimizer.a", 3, 4, beyond, 1, 1}, "a chunk does not lie in it"},
        {{"optimizer.a", 3, 4, hole, 2, 2}, "its chunks are not all of it"},
        {{"optimizer.a", 3, 4, hole, 2, 1}, "no file has one of its chunks"},
        {{"optimizer.a", 0, 4, same, 1, 1}, "its shape is none"},
        {{"chained_0.optimizer.a", 3, 4, same, 0, 0}, "it has no list of chunks"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const struct sample both[] = {cases[i].s, SAMPLES[2]};
        struct mb_dist_meta m;
        struct mb_err err = {0};
        assert_int_equal(parse(both, 2, "f", &m, &err), 0);
        assert_null(mb_dist_meta_find(&m, "a")->is_wrong);
        assert_non_null(strstr(mb_dist_meta_find(&m, cases[i].s.name)->is_wrong, cases[i].text));
        mb_dist_meta_close(&m);
    }
}

static void what_is_not_whole_is_named(void **state)
{
    (void)state;
    static const struct chunk beyond[] = {{0, 0, 3, 5}}, twice[] = {{0, 0, 2, 4}, {1, 0, 2, 4}},
                              hole[] = {{0, 0, 1, 4}, {2, 0, 1, 4}}, same[] = {{0, 0, 3, 4}};
    static const struct {
        struct sample s;
        const char *file, *text;
    } cases[] = {
        {{"a", 3, 4, beyond, 1, 1}, "f", "a chunk does not lie in it"},
        {{"a", 3, 4, twice, 2, 2}, "f", "two of its chunks overlap"},
        {{"a", 3, 4, hole, 2, 2}, "f", "its chunks are not all of it"},
        {{"a", 3, 4, hole, 2, 1}, "f", "no file has one of its chunks"},
        {{"a", 0, 4, same, 1, 1}, "f", "its shape is none"},
        {{"a", 3, 4, same, 0, 0}, "f", "it has no list of chunks"},
        {{"a", 3, 4, same, 1, 1}, "..", "lies outside of the directory"},
        {{"a", 3, 4, same, 1, 1}, "/etc/passwd", "lies outside of the directory"},
        {{"a", 3, 4, same, 1, 1}, "", "a chunk has no file"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct mb_dist_meta m;
        struct mb_err err = {0};
        assert_int_equal(parse(&cases[i].s, 1, cases[i].file, &m, &err), MB_ECORRUPT);
        assert_non_null(strstr(err.text, cases[i].text));
    }
    const struct sample two[] = {SAMPLES[2], SAMPLES[2]};
    struct mb_dist_meta m;
    struct mb_err err = {0};
    assert_int_equal(parse(two, 2, "f", &m, &err), MB_ECORRUPT);
    assert_non_null(strstr(err.text, "it is there twice"));
}

static void names_that_it_has_not_are_refused(void **state)
{
    (void)state;
    static const char *const classes[][2] = {{"posix", "system"}, {"torch", "load"}};
    for (size_t i = 0; i < 2; i++) {
        struct mb_buf b = {0};
        struct mb_dist_meta m;
        struct mb_err err = {0};
        assert_int_equal(mb_buf_add(&b, "\x80\x04", 2), 0);
        object(&b, classes[i][0], classes[i][1]);
        op(&b, '.');
        assert_int_equal(mb_dist_meta_parse("here", b.data, b.len, &m, &err), MB_EUNSUPPORTED);
        assert_non_null(strstr(err.text, classes[i][1]));
        mb_buf_close(&b);
    }
}

/* A pickle shows one object as often as it likes: what small files ask for is bounded. */
static void one_list_of_chunks_for_many_tensors_is_refused(void **state)
{
    const struct chunk whole = {0, 0, 1, 1};
    struct sample one = {"a", 1, 1, &whole, 1, 0};
    struct mb_dist_meta m;
    struct mb_err err = {0};
    struct mb_buf b = {0}, tensor = {0};
    (void)state;
    put_tensor(&tensor, &one);
    assert_int_equal(mb_buf_add(&b, "\x80\x04\x95\0\0\0\0\0\0\0\0", 11), 0);
    begin_object(&b, META, "Metadata");
    text(&b, "state_dict_metadata");
    op(&b, '}');
    op(&b, '(');
    /* The chunk is the last but the ends of list and object: 'e', 'u', 'b'. */
    assert_int_equal(mb_buf_add(&b, tensor.data, tensor.len - 3), 0);
    assert_int_equal(mb_buf_add(&b, "q\x01", 2), 0);
    for (size_t i = 1; i < MB_DIST_CHUNKS_MAX; i++)
        assert_int_equal(mb_buf_add(&b, "h\x01", 2), 0);
    op(&b, 'e');
    end_object(&b);
    assert_int_equal(mb_buf_add(&b, "q\x02", 2), 0);
    for (size_t i = 0; i < MB_DIST_ALL_CHUNKS_MAX / MB_DIST_CHUNKS_MAX; i++) {
        text(&b, "b");
        assert_int_equal(mb_buf_add(&b, "h\x02", 2), 0);
    }
    op(&b, 'u');
    end_object(&b);
    op(&b, '.');
    assert_int_equal(mb_dist_meta_parse("here", b.data, b.len, &m, &err), MB_ECORRUPT);
    assert_non_null(strstr(err.text, "too many chunks"));
    mb_buf_close(&tensor);
    mb_buf_close(&b);
}

static void an_object_of_many_fields_is_refused(void **state)
{
    struct mb_dist_meta m;
    struct mb_err err = {0};
    struct mb_buf b = {0};
    (void)state;
    assert_int_equal(mb_buf_add(&b, "\x80\x04\x95\0\0\0\0\0\0\0\0", 11), 0);
    begin_object(&b, META, "Metadata");
    text(&b, "state_dict_metadata");
    op(&b, '}');
    text(&b, "storage_data");
    op(&b, '}');
    op(&b, '(');
    begin_object(&b, META, "MetadataIndex");
    text(&b, "fqn");
    text(&b, "a");
    for (int i = 0; i < 100; i++)
        number(&b, "x", 1);
    end_object(&b);
    object(&b, "torch.distributed.checkpoint.filesystem", "_StorageInfo");
    op(&b, '}');
    op(&b, 'b');
    op(&b, 'u');
    end_object(&b);
    op(&b, '.');
    assert_int_equal(mb_dist_meta_parse("here", b.data, b.len, &m, &err), MB_ECORRUPT);
    assert_non_null(strstr(err.text, "a chunk has no name"));
    mb_buf_close(&b);
}

static void it_bears_every_failed_allocation(void **state)
{
    (void)state;
    struct mb_buf b = make(SAMPLES, 3, "f");
    int did_fail = 1;
    for (unsigned long nth = 1; did_fail; nth++) {
        struct mb_dist_meta m;
        struct mb_err err = {0};
        mb_alloc_fail_nth(nth);
        int rc = mb_dist_meta_parse("here", b.data, b.len, &m, &err);
        did_fail = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        assert_int_equal(rc, did_fail ? MB_ENOMEM : 0);
        if (rc == 0) {
            mb_dist_meta_close(&m);
        }
    }
    mb_buf_close(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_element_is_where_it_was_said),
        cmocka_unit_test(of_the_optimizer_it_is_kept_what_is_wrong),
        cmocka_unit_test(what_is_not_whole_is_named),
        cmocka_unit_test(names_that_it_has_not_are_refused),
        cmocka_unit_test(one_list_of_chunks_for_many_tensors_is_refused),
        cmocka_unit_test(an_object_of_many_fields_is_refused),
        cmocka_unit_test(it_bears_every_failed_allocation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
