/* Damaged store files: refused with a name and a next step, and left exactly as they are. */
#include "loop.h"
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/buf.h"
#include "base/fs.h"
#include "gcs/store.h"
#include "gcs/store_mark.h"

enum { RECORDS = 40, FILE_MAX = 1 << 20, N_FILES = 3 };

static const char *const suffixes[N_FILES] = {"", "-wal", "-batch"};

/* The files of a store: whole ("file", closed in order) or as SIGKILL leaves them ("journal",
 * everything in the write-ahead log). */
struct image {
    struct mb_buf bytes[N_FILES];
    int exists[N_FILES];
};

struct fixture {
    uv_loop_t loop;
    char dir[64], path[96];
    struct image closed, killed;
};

static struct mb_blob b(const char *s)
{
    return mb_blob_str(s);
}

static void on_done(void *arg, const struct mb_err *err)
{
    assert_int_equal(err->code, 0);
    ++*(int *)arg;
}

static void set_flag(void *arg)
{
    *(int *)arg = 1;
}

static void value_of(int i, char out[64])
{
    snprintf(out, 64, "the value of record %d is unlike the others", i);
}

static char *name_of(const struct fixture *f, int i, char out[120])
{
    snprintf(out, 120, "%s%s", f->path, suffixes[i]);
    return out;
}

static void take_image(const struct fixture *f, struct image *m)
{
    char name[120];

    for (int i = 0; i < N_FILES; i++) {
        m->exists[i] = mb_fs_exists(name_of(f, i, name));
        m->bytes[i].len = 0;
        if (m->exists[i])
            assert_int_equal(mb_fs_read(name, FILE_MAX, &m->bytes[i], NULL), 0);
    }
}

static void free_image(struct image *m)
{
    for (int i = 0; i < N_FILES; i++)
        mb_buf_close(&m->bytes[i]);
}

static void put_image(const struct fixture *f, const struct image *m)
{
    char name[120];

    for (int i = 0; i < N_FILES; i++) {
        unlink(name_of(f, i, name));
        if (m->exists[i]) {
            FILE *file = fopen(name, "wb");
            assert_non_null(file);
            assert_int_equal(fwrite(m->bytes[i].data, 1, m->bytes[i].len, file), m->bytes[i].len);
            fclose(file);
        }
    }
}

static int setup(void **state)
{
    static struct fixture f;
    struct mb_err err = {0};
    struct mb_tables *s;
    int done = 0, closed = 0;
    char key[16], value[64];

    memset(&f, 0, sizeof f);
    strcpy(f.dir, "/tmp/mb-store-XXXXXX");
    assert_non_null(mkdtemp(f.dir));
    snprintf(f.path, sizeof f.path, "%s/head.db", f.dir);
    uv_loop_init(&f.loop);
    assert_int_equal(mb_tables_open_sqlite(&f.loop, f.path, 0, &s, &err), 0);
    for (int i = 0; i < RECORDS; i++) {
        snprintf(key, sizeof key, "key-%02d", i);
        value_of(i, value);
        assert_int_equal(
            mb_tables_put(s, MB_TABLES_KV, b("space"), b(key), b(value), on_done, &done, &err), 0);
        while (done <= i)
            uv_run(&f.loop, UV_RUN_ONCE);
    }
    take_image(&f, &f.killed);
    mb_tables_close(s, set_flag, &closed);
    loop_until(&f.loop, &closed);
    take_image(&f, &f.closed);
    *state = &f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;

    free_image(&f->closed);
    free_image(&f->killed);
    uv_run(&f->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&f->loop), 0);
    return mb_fs_remove_tree(f->dir, NULL);
}

/* The code of opening it; when it opens, every record must be right. */
static int open_and_check(struct fixture *f, int sync_full, struct mb_err *err)
{
    struct mb_tables *s;
    int closed = 0, rc = mb_tables_open_sqlite(&f->loop, f->path, sync_full, &s, err);

    if (rc != 0)
        return rc;
    assert_int_equal(mb_tables_count(s, MB_TABLES_KV), RECORDS);
    for (int i = 0; i < RECORDS; i++) {
        char key[16], value[64];
        struct mb_blob got;
        snprintf(key, sizeof key, "key-%02d", i);
        value_of(i, value);
        assert_int_equal(mb_tables_get(s, MB_TABLES_KV, b("space"), b(key), &got), 1);
        assert_string_equal(got.p, value);
    }
    mb_tables_close(s, set_flag, &closed);
    loop_until(&f->loop, &closed);
    return 0;
}

/* SQLite may leave an empty journal where there was none. */
static void assert_untouched(struct fixture *f, const struct image *m, const char *what)
{
    struct image now = {0};

    take_image(f, &now);
    for (int i = 0; i < N_FILES; i++) {
        size_t n = m->exists[i] ? m->bytes[i].len : 0;
        if ((i != 1 && now.exists[i] != m->exists[i]) || now.bytes[i].len != n ||
            (n > 0 && memcmp(now.bytes[i].data, m->bytes[i].data, n) != 0))
            fail_msg("%s: head.db%s was changed", what, suffixes[i]);
    }
    free_image(&now);
}

static size_t find_text(const struct mb_buf *in, const char *text)
{
    size_t n = strlen(text);

    for (size_t i = 0; i + n <= in->len; i++)
        if (memcmp((const char *)in->data + i, text, n) == 0)
            return i;
    fail_msg("%s is not in the file", text);
    return 0;
}

static void flip(struct mb_buf *in, size_t at)
{
    ((unsigned char *)in->data)[at] ^= 0x20;
}

/* ---- the table ---- */

static void cut_file(struct image *m)
{
    m->bytes[0].len /= 2;
}

static void flip_value(struct image *m)
{
    flip(&m->bytes[0], find_text(&m->bytes[0], "value of record 7 "));
}

static void flip_key(struct image *m)
{
    flip(&m->bytes[0], find_text(&m->bytes[0], "key-11") + 1);
}

static void text_file(struct image *m)
{
    static const char text[] = "this is no database, it is a text file of somebody else";

    m->bytes[0].len = sizeof text;
    memcpy(m->bytes[0].data, text, sizeof text);
}

static void garble_pages(struct image *m)
{
    memset((char *)m->bytes[0].data + 4096, 0xa5, 8192);
}

static void empty_file(struct image *m)
{
    m->bytes[0].len = 0;
}

static void no_file(struct image *m)
{
    m->exists[0] = 0;
}

static void no_file_nor_batch(struct image *m)
{
    m->exists[0] = m->exists[2] = 0;
}

static void no_wal(struct image *m)
{
    m->exists[1] = 0;
}

static void empty_wal(struct image *m)
{
    m->bytes[1].len = 0;
}

static void cut_wal(struct image *m)
{
    m->bytes[1].len -= 5000;
}

static void flip_wal(struct image *m)
{
    flip(&m->bytes[1], m->bytes[1].len / 2);
}

static void garble_wal_header(struct image *m)
{
    memset(m->bytes[1].data, 0xa5, 32);
}

static void garble_batch(struct image *m)
{
    memcpy(m->bytes[2].data, "not a number", 12);
}

static void cut_batch(struct image *m)
{
    m->bytes[2].len -= 10;
}

static void zero_batch(struct image *m)
{
    memset(m->bytes[2].data, 0, m->bytes[2].len);
}

static void lengthen_batch(struct image *m)
{
    assert_int_equal(mb_buf_add(&m->bytes[2], "\n", 1), 0);
}

static void every_damage_is_named_and_left_alone(void **state)
{
    static const struct {
        const char *name;
        int is_killed; /* the image it starts from */
        void (*damage)(struct image *m);
        const char *text;
    } table[] = {
        {"cut", 0, cut_file, "head.db"},
        {"flipped byte in a value", 0, flip_value, "checksum"},
        {"flipped byte in a key", 0, flip_key, "head.db"},
        {"a text file", 0, text_file, "file is not a database"},
        {"garbled pages", 0, garble_pages, "head.db"},
        {"emptied", 0, empty_file, "missing or empty"},
        {"removed", 0, no_file, "missing or empty"},
        {"removed, journal left", 1, no_file_nor_batch, "missing or empty"},
        {"journal removed", 1, no_wal, "missing"},
        {"journal emptied", 1, empty_wal, "journal (-wal) is missing or damaged"},
        {"journal cut", 1, cut_wal, "journal (-wal) is missing or damaged"},
        {"flipped byte in the journal", 1, flip_wal, "journal (-wal) is missing or damaged"},
        {"journal's head garbled", 1, garble_wal_header, "journal (-wal) is missing or damaged"},
        {"batch number garbled", 0, garble_batch, "head.db-batch"},
        {"batch number cut", 0, cut_batch, "head.db-batch"},
        {"batch number zeroed", 0, zero_batch, "head.db-batch"},
        {"batch number longer", 0, lengthen_batch, "head.db-batch"},
    };
    struct fixture *f = *state;

    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        struct image m = {0};
        struct mb_err err = {0};

        put_image(f, table[i].is_killed ? &f->killed : &f->closed);
        take_image(f, &m);
        table[i].damage(&m);
        put_image(f, &m);
        if (open_and_check(f, 0, &err) != MB_ECORRUPT)
            fail_msg("%s: %d %s", table[i].name, err.code, err.text);
        if (!strstr(err.text, f->path) || !strstr(err.text, table[i].text) ||
            !strstr(err.text, "nothing was changed"))
            fail_msg("%s: the text is: %s", table[i].name, err.text);
        assert_untouched(f, &m, table[i].name);
        free_image(&m);
    }
}

/* A byte anywhere in the store or its journal: either it is refused, or every record is right. */
static void no_flipped_byte_goes_unseen(void **state)
{
    struct fixture *f = *state;
    const struct image *images[] = {&f->closed, &f->killed};
    size_t refused = 0;

    for (int which = 0; which < 2; which++) {
        for (int file = 0; file < 2; file++) {
            for (size_t at = 0; at < images[which]->bytes[file].len; at += 131) {
                struct image m = {0};
                struct mb_err err = {0};

                put_image(f, images[which]);
                take_image(f, &m);
                flip(&m.bytes[file], at);
                put_image(f, &m);
                if (open_and_check(f, 0, &err) != 0) {
                    refused++;
                    assert_untouched(f, &m, "flipped byte");
                }
                free_image(&m);
            }
        }
    }
    assert_true(refused > 100);
}

static void undamaged_images_open(void **state)
{
    struct fixture *f = *state;
    struct mb_err err = {0};

    put_image(f, &f->closed);
    assert_int_equal(open_and_check(f, 0, &err), 0);
    put_image(f, &f->killed);
    assert_int_equal(open_and_check(f, 1, &err), 0);
}

/* ---- the number beside the store ---- */

static void set_mark(struct image *m, const char *line)
{
    m->bytes[2].len = 0;
    m->exists[2] = 1;
    assert_int_equal(mb_buf_add(&m->bytes[2], line, strlen(line)), 0);
}

/* The line of before there were checksums. */
static void set_old_mark(struct image *m, int64_t batch, const char *boot_id)
{
    char line[80];

    snprintf(line, sizeof line, "%-20lld %-40s\n", (long long)batch, boot_id);
    set_mark(m, line);
}

static void close_store(struct fixture *f, struct mb_tables *s)
{
    int closed = 0;

    mb_tables_close(s, set_flag, &closed);
    loop_until(&f->loop, &closed);
}

/* Another boot wrote the number: the last writes may have gone with the power. */
static void a_power_loss_may_take_the_last_writes_unless_full(void **state)
{
    struct fixture *f = *state;
    struct mb_err err = {0};
    struct mb_tables *s;

    for (int is_old = 0; is_old < 2; is_old++) {
        char line[STORE_MARK_BYTES + 1];
        struct image m = {0};

        put_image(f, &f->closed);
        take_image(f, &m);
        store_mark_format(999999, "another-boot", line);
        if (is_old)
            set_old_mark(&m, 999999, "another-boot");
        else
            set_mark(&m, line);
        put_image(f, &m);
        assert_int_equal(mb_tables_open_sqlite(&f->loop, f->path, 1, &s, &err), MB_ECORRUPT);
        assert_int_equal(mb_tables_open_sqlite(&f->loop, f->path, 0, &s, &err), 0);
        close_store(f, s);
        free_image(&m);
    }
}

/* A damaged boot id is not another boot: what was acknowledged and is lost is never passed over. */
static void no_flipped_bit_of_the_number_lets_records_go(void **state)
{
    struct fixture *f = *state;

    for (size_t at = 0; at < STORE_MARK_BYTES; at++) {
        struct image m = {0};
        struct mb_err err = {0};
        struct mb_tables *s;

        put_image(f, &f->killed);
        take_image(f, &m);
        assert_int_equal(m.bytes[2].len, STORE_MARK_BYTES);
        cut_wal(&m);
        ((unsigned char *)m.bytes[2].data)[at] ^= (unsigned char)(1u << at % 8);
        put_image(f, &m);
        assert_int_equal(mb_tables_open_sqlite(&f->loop, f->path, 0, &s, &err), MB_ECORRUPT);
        if (!strstr(err.text, "head.db-batch is damaged"))
            fail_msg("byte %zu: %s", at, err.text);
        assert_untouched(f, &m, "flipped bit");
        free_image(&m);
    }
}

static void every_flipped_bit_of_a_line_is_seen(void **state)
{
    static const char *const boots[] = {"", "8d2ab1fe-2b5b-4f0c-a0a6-0b6a4e7c1f52"};
    char line[STORE_MARK_BYTES + 1], boot[STORE_BOOT_ID_SIZE];
    int64_t batch;

    (void)state;
    for (size_t i = 0; i < 2; i++) {
        store_mark_format(123456789012345, boots[i], line);
        assert_int_equal(strlen(line), STORE_MARK_BYTES);
        assert_int_equal(store_mark_parse(line, STORE_MARK_BYTES, &batch, boot), 0);
        assert_int_equal(batch, 123456789012345);
        assert_string_equal(boot, boots[i]);
        for (size_t bit = 0; bit < 8 * (size_t)STORE_MARK_BYTES; bit++) {
            line[bit / 8] = (char)(line[bit / 8] ^ (1 << bit % 8));
            assert_int_equal(store_mark_parse(line, STORE_MARK_BYTES, &batch, boot), MB_ECORRUPT);
            line[bit / 8] = (char)(line[bit / 8] ^ (1 << bit % 8));
        }
        for (size_t n = 0; n < STORE_MARK_BYTES; n++)
            assert_int_equal(store_mark_parse(line, n, &batch, boot), MB_ECORRUPT);
    }
}

/* What an older head wrote is read, demands what it says, and has a checksum from then on. */
static void a_line_without_checksum_is_read_and_replaced(void **state)
{
    struct fixture *f = *state;
    char boot[STORE_BOOT_ID_SIZE], read[STORE_BOOT_ID_SIZE];
    struct image m = {0}, after = {0};
    struct mb_err err = {0};
    struct mb_tables *s;
    int64_t batch;

    store_boot_id(boot);
    put_image(f, &f->killed);
    take_image(f, &m);
    set_old_mark(&m, RECORDS, boot);
    put_image(f, &m);
    assert_int_equal(open_and_check(f, 0, &err), 0);
    take_image(f, &after);
    assert_int_equal(after.bytes[2].len, STORE_MARK_BYTES);
    assert_memory_not_equal(after.bytes[2].data, m.bytes[2].data, STORE_MARK_BYTES);
    assert_int_equal(store_mark_parse(mb_buf_str(&after.bytes[2]), STORE_MARK_BYTES, &batch, read),
                     0);
    assert_int_equal(batch, RECORDS);
    assert_string_equal(read, boot);
    put_image(f, &m);
    cut_wal(&m);
    put_image(f, &m);
    assert_int_equal(mb_tables_open_sqlite(&f->loop, f->path, 0, &s, &err), MB_ECORRUPT);
    assert_non_null(strstr(err.text, "journal (-wal) is missing or damaged"));
    free_image(&m);
    free_image(&after);
}

/* As its own error advises. */
static void a_number_that_was_removed_is_made_again(void **state)
{
    struct fixture *f = *state;
    struct mb_err err = {0};

    for (int is_empty = 0; is_empty < 2; is_empty++) {
        struct image m = {0};

        put_image(f, &f->killed);
        take_image(f, &m);
        m.exists[2] = is_empty;
        m.bytes[2].len = 0;
        put_image(f, &m);
        assert_int_equal(open_and_check(f, 0, &err), 0);
        free_image(&m);
        take_image(f, &m);
        assert_int_equal(m.bytes[2].len, STORE_MARK_BYTES);
        free_image(&m);
    }
}

static void run_sql(const char *path, const char *sql)
{
    sqlite3 *db;

    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_exec(db, sql, NULL, NULL, NULL), SQLITE_OK);
    sqlite3_close(db);
}

static void another_programs_file_is_left_alone(void **state)
{
    struct fixture *f = *state;
    struct mb_err err = {0};
    struct image none = {0}, m = {0};

    put_image(f, &none);
    run_sql(f->path, "CREATE TABLE notes(t TEXT); INSERT INTO notes VALUES('mine')");
    take_image(f, &m);
    assert_int_equal(open_and_check(f, 0, &err), MB_ECORRUPT);
    assert_non_null(strstr(err.text, "another program"));
    assert_untouched(f, &m, "another program's file");
    free_image(&m);
}

static void a_newer_version_is_left_alone(void **state)
{
    struct fixture *f = *state;
    struct mb_err err = {0};
    struct image m = {0};

    put_image(f, &f->closed);
    run_sql(f->path, "PRAGMA user_version=3");
    take_image(f, &m);
    assert_int_equal(open_and_check(f, 0, &err), MB_EUNSUPPORTED);
    assert_untouched(f, &m, "a newer store");
    free_image(&m);
}

/* What version 1 wrote: no checksums, no batch number. */
static void an_old_store_is_brought_up_to_date(void **state)
{
    struct fixture *f = *state;
    struct mb_err err = {0};
    struct image m = {0};

    put_image(f, &f->closed);
    run_sql(f->path, "ALTER TABLE meta DROP COLUMN c; ALTER TABLE kv DROP COLUMN c;"
                     "ALTER TABLE nodes DROP COLUMN c; ALTER TABLE jobs DROP COLUMN c;"
                     "ALTER TABLE placement_groups DROP COLUMN c; DROP TABLE batches;"
                     "PRAGMA user_version=1; VACUUM; PRAGMA wal_checkpoint(TRUNCATE)");
    take_image(f, &m);
    m.exists[2] = 0;
    put_image(f, &m);
    assert_int_equal(open_and_check(f, 0, &err), 0);
    free_image(&m);
    take_image(f, &m);
    flip_value(&m);
    put_image(f, &m);
    assert_int_equal(open_and_check(f, 0, &err), MB_ECORRUPT);
    free_image(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(undamaged_images_open),
        cmocka_unit_test(every_damage_is_named_and_left_alone),
        cmocka_unit_test(no_flipped_byte_goes_unseen),
        cmocka_unit_test(a_power_loss_may_take_the_last_writes_unless_full),
        cmocka_unit_test(no_flipped_bit_of_the_number_lets_records_go),
        cmocka_unit_test(every_flipped_bit_of_a_line_is_seen),
        cmocka_unit_test(a_line_without_checksum_is_read_and_replaced),
        cmocka_unit_test(a_number_that_was_removed_is_made_again),
        cmocka_unit_test(another_programs_file_is_left_alone),
        cmocka_unit_test(a_newer_version_is_left_alone),
        cmocka_unit_test(an_old_store_is_brought_up_to_date),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
