/*
 * What the table of categories is asked. Nothing fails.
 */
#include <string.h>
#include "worker/data/tokenizer/unicode_category.h"

enum mb_category mb_unicode_category(uint32_t point)
{
    size_t low = 0, high = mb_category_n_runs; /* runs[low] begins at or before point */

    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (mb_category_runs[middle] >> 5 <= point)
            low = middle;
        else
            high = middle;
    }
    return (enum mb_category)(mb_category_runs[low] & 31);
}

uint32_t mb_category_mask(const char *name, size_t n)
{
    static const char names[] = "CnLuLlLtLmLoMnMcMeNdNlNoPcPdPsPePiPfPoSmScSkSoZsZlZpCcCfCsCo";
    uint32_t mask = 0;

    if (n < 1 || n > 2)
        return 0;
    for (unsigned i = 0; i < MB_CAT_COUNT; i++) {
        int major = (name[0] | 0x20) == (names[2 * i] | 0x20);
        int minor = n == 1 || (name[1] | 0x20) == names[2 * i + 1];
        if (major && minor)
            mask |= 1u << i;
    }
    return mask;
}

int mb_unicode_is_space(uint32_t c)
{
    return (c >= 9 && c <= 13) || c == 0x20 || c == 0x85 || c == 0xa0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f ||
           c == 0x205f || c == 0x3000;
}

/* Alphabetic is L, Nl, marks and the circled and squared letters; beside it all marks, decimal
 * digits, connectors and the two joiners are of a word. */
int mb_unicode_is_word(uint32_t c)
{
    enum mb_category category = mb_unicode_category(c);

    if (category >= MB_CAT_LU && category <= MB_CAT_NL)
        return 1;
    return category == MB_CAT_PC || c == 0x200c || c == 0x200d || (c >= 0x24b6 && c <= 0x24e9) ||
           (c >= 0x1f130 && c <= 0x1f149) || (c >= 0x1f150 && c <= 0x1f169) ||
           (c >= 0x1f170 && c <= 0x1f189);
}
