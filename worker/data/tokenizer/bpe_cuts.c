/* A byte that is not known stands for all that may be there. */
#include "worker/data/tokenizer/bpe_cuts.h"

static void note(struct mb_bpe_cuts *c, uint32_t bytes)
{
    uint32_t hash = mb_bpe_cut_hash(bytes);

    c->joined[hash / 64] |= (uint64_t)1 << (hash % 64);
}

void mb_bpe_cuts_join(struct mb_bpe_cuts *c, const uint8_t *left, size_t n_left,
                      const uint8_t *right, size_t n_right)
{
    uint8_t end = left[n_left - 1];
    unsigned low[2] = {0x80, 0x80};
    unsigned high[2] = {0xff, 0xbf};

    if ((end & 0xc0) != 0x80 || right[0] < 0xc0)
        return;
    if (n_left > 1)
        low[0] = high[0] = left[n_left - 2];
    if (n_right > 1)
        low[1] = high[1] = right[1];
    for (unsigned a = low[0]; a <= high[0]; a++) {
        for (unsigned b = low[1]; b <= high[1]; b++)
            note(c, a | (uint32_t)end << 8 | (uint32_t)right[0] << 16 | b << 24);
    }
}
