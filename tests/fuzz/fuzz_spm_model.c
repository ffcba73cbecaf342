/* Any bytes as a SentencePiece model: refused, or a model whose ids are ids, which encodes the same
 * with a new cache as with one in use, and whose ids can all be decoded. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "worker/data/tokenizer/sentencepiece/spm.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(const struct mb_spm *m, struct mb_spm_scratch *s, const void *text, size_t n)
{
    struct mb_ids ids = {0};
    struct mb_ids again = {0};
    struct mb_buf back = {0};

    if (mb_spm_encode(m, s, text, n, &ids) != 0 || mb_spm_encode(m, s, text, n, &again) != 0)
        abort();
    if (ids.n != again.n || (ids.n > 0 && memcmp(ids.data, again.data, 4 * ids.n) != 0))
        abort();
    for (size_t i = 0; i < ids.n; i++) {
        if (ids.data[i] < 0 || (size_t)ids.data[i] >= mb_spm_n_pieces(m))
            abort();
    }
    if (mb_spm_decode(m, ids.data, ids.n, &back) != 0)
        abort();
    mb_buf_close(&back);
    mb_ids_close(&ids);
    mb_ids_close(&again);
}

static void check_pieces(const struct mb_spm *m)
{
    struct mb_buf back = {0};

    for (int32_t id = 0; (size_t)id < mb_spm_n_pieces(m); id++) {
        size_t n;
        const uint8_t *text = mb_spm_piece(m, id, &n);
        if (mb_spm_piece_id(m, text, n) != id || mb_spm_decode(m, &id, 1, &back) != 0)
            abort();
    }
    mb_buf_close(&back);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char text[] =
        "  the cat <x> sat\t\xef\xac\x81 e\xcc\x81 \xe2\x96\x81\xe2\x96\x81 the\x01"
        "atatatatatatatatatatatatatatatatatatatatatatatatatatatatatatatatatatatat "
        "\xf0\x9f\x99\x82\xff the cat ";
    struct mb_spm *m;
    struct mb_spm_scratch *s;

    if (mb_spm_create(data, size, &m, NULL) != 0)
        return 0;
    if (mb_spm_scratch_create(m, &s, NULL) != 0)
        abort();
    check(m, s, text, sizeof(text) - 1);
    check(m, s, data, size);
    check_pieces(m);
    mb_spm_scratch_destroy(s);
    mb_spm_destroy(m);
    return 0;
}
