/* Any bytes as config.json, as arguments of a state.json, as an index of files: refused, or the
 * shape is sane, its map covers every row of every tensor once, and file names stay in the
 * directory. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "worker/checkpoint/hf/files.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void must(int ok)
{
    if (!ok) {
        abort();
    }
}

static void check_map(const struct mb_hf_shape *s)
{
    struct mb_hf_map m;
    struct mb_err err;
    if (s->n_layers * s->n_groups > 256 || mb_hf_map_create(s, &m, &err) != 0) {
        return;
    }
    for (int side = 0; side < 2; side++) {
        mb_hf_map_sort(&m, (enum mb_hf_side)side);
        size_t k = 0;
        for (size_t i = 0; i < m.n_tensors[side]; i++) {
            uint64_t row = 0;
            for (; k < m.n_runs && m.runs[k].tensor[side] == i; k++) {
                must(m.runs[k].row[side] == row);
                row += m.runs[k].n_rows;
            }
            must(row <= m.tensors[side][i].rows &&
                 row + s->padded_vocab - s->vocab >= m.tensors[side][i].rows);
        }
        must(k == m.n_runs);
    }
    mb_hf_map_close(&m);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mb_hf_shape s;
    struct mb_err err;
    char **files;
    size_t n;
    if (size == 0) {
        return 0;
    }
    const uint8_t kind = data[0];
    char *text = mb_strndup((const char *)data + 1, size - 1);
    must(text != NULL);
    if (kind == 'i' && mb_hf_index_parse("fuzz", text, size - 1, &files, &n, &err) == 0) {
        for (size_t i = 0; i < n; i++) {
            must(strchr(files[i], '/') == NULL && files[i][0] != '.');
        }
        mb_hf_index_close(files, n);
    } else if (kind == 'a' && mb_hf_args_parse("fuzz", text, 0, &s, &err) == 0) {
        check_map(&s);
    } else if (kind == 'c' && mb_hf_config_parse("fuzz", text, size - 1, &s, &err) == 0) {
        check_map(&s);
        char *again = mb_hf_config_text(&s, "float32");
        struct mb_hf_shape same;
        must(again != NULL && mb_hf_config_parse("fuzz", again, strlen(again), &same, &err) == 0);
        must(same.hidden == s.hidden && same.rope_base == s.rope_base && same.untied == s.untied &&
             same.rope_factor == s.rope_factor && same.rope_interpolation == s.rope_interpolation);
        mb_free(again);
    }
    mb_free(text);
    return 0;
}
