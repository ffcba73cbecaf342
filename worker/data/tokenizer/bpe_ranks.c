/*
 * Merges out of ranks. tiktoken joins the two neighbours whose joined bytes are the token of the
 * lowest rank; that is byte pair encoding with one merge for each way to cut a token in two.
 */
#include "base/alloc.h"
#include "worker/data/tokenizer/bpe_private.h"

/* How many there are; written to out unless that is NULL. */
static size_t ways(const struct mb_bpe_map *map, const struct mb_bpe_token *tokens, size_t n,
                   struct mb_bpe_merge *out)
{
    size_t count = 0;

    for (size_t i = 0; i < n; i++) {
        for (size_t cut = 1; cut < tokens[i].n; cut++) {
            int32_t left = mb_bpe_map_find(map, tokens[i].bytes, cut);
            int32_t right =
                left < 0 ? -1 : mb_bpe_map_find(map, tokens[i].bytes + cut, tokens[i].n - cut);
            if (right < 0)
                continue;
            if (out != NULL)
                out[count] = (struct mb_bpe_merge){left, right, tokens[i].id, tokens[i].id};
            count++;
        }
    }
    return count;
}

int mb_bpe_merges_of_ranks(const struct mb_bpe_token *tokens, size_t n, struct mb_bpe_merge **out,
                           size_t *n_out, struct mb_err *err)
{
    struct mb_bpe_map map;
    int rc = mb_bpe_map_make(&map, tokens, n, err);

    if (rc != 0)
        return rc;
    *n_out = ways(&map, tokens, n, NULL);
    *out = mb_reallocarray(NULL, *n_out + 1, sizeof(**out));
    if (*out == NULL)
        rc = mb_err_set(err, MB_ENOMEM, "tokenizer: out of memory");
    else
        ways(&map, tokens, n, *out);
    mb_bpe_map_close(&map);
    return rc;
}
