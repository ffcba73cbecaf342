/*
 * The word rules of o200k and of Megatron-LM's tiktoken pattern v2. With P a character that is
 * neither line end, letter nor number, U capitals and caseless letters and marks, and S small and
 * caseless letters and marks:
 *     P? U* S+ C?  |  P? U+ S* C?        C: an optional contraction, in o200k only
 *
 * The engine's order of trying, which decides: the first form with a P, the first form without
 * (only a mark can begin it when it could be P, too), the second form in the same two ways.
 * In the first form, capitals not followed by a small letter are given back up to the last
 * character that is in S as well; where there is none the form fails.
 */
#include "worker/data/tokenizer/split_private.h"

/* U* S+ from p on: its end, NULL if it does not match. */
static const uint8_t *small_form(const struct mb_class_table *t, const uint8_t *p,
                                 const uint8_t *end)
{
    const uint8_t *after_both = NULL; /* end of the last character of the run that is in S, too */
    const uint8_t *q = p;

    while (q < end) {
        size_t length;
        unsigned class = mb_split_class(t, q, end, &length);

        if ((MB_SET_CAPITAL >> class & 1) == 0) {
            if (class == MB_CHAR_LL)
                return mb_split_run(t, q, end, MB_SET_SMALL);
            break;
        }
        q += length;
        if ((MB_SET_SMALL >> class & 1) != 0)
            after_both = q;
    }
    return after_both;
}

/* U+ S* from p on, where the first form has failed: no S can follow. */
static const uint8_t *capital_form(const struct mb_class_table *t, const uint8_t *p,
                                   const uint8_t *end)
{
    const uint8_t *q = mb_split_run(t, p, end, MB_SET_CAPITAL);

    return q > p ? q : NULL;
}

/* The end of the word that begins at p, NULL if none does. */
const uint8_t *mb_split_next_cased(const struct mb_split *s, const uint8_t *p, const uint8_t *end)
{
    const struct mb_class_table *t = &s->classes;
    size_t length;
    unsigned class = mb_split_class(t, p, end, &length);
    const uint8_t *stop = NULL;
    int is_prefix = class < MB_CHAR_LU && class != MB_CHAR_NUMBER && *p != '\r' && *p != '\n';
    int is_word = (1 << class & (MB_SET_CAPITAL | MB_SET_SMALL)) != 0;

    if (is_prefix)
        stop = small_form(t, p + length, end);
    if (stop == NULL && is_word)
        stop = small_form(t, p, end);
    if (stop == NULL && is_prefix)
        stop = capital_form(t, p + length, end);
    if (stop == NULL && is_word)
        stop = capital_form(t, p, end);
    if (stop != NULL && s->contractions)
        stop += mb_split_contraction(stop, end, 1);
    return stop;
}
