/* The flags of a tokenizer for a verb's table, made from worker/data/tokenizer/options_table.h, and
 * what becomes of them. Pure; any thread. */
#ifndef MOBULA_CLI_TOKENIZER_FLAGS_H
#define MOBULA_CLI_TOKENIZER_FLAGS_H

#include "cli/options.h"
#include "worker/data/tokenizer/options_table.h"
#include "worker/data/tokenizer/tokenizer.h"

#define MB_TOKENIZER_FIELD_TEXT(f)             const char *f;
#define MB_TOKENIZER_FIELD_INT(f)              int64_t f;
#define MB_TOKENIZER_FIELD_LIST(f)             struct mb_words f;
#define MB_TOKENIZER_FIELD_FLAG_OFF(f)         int no_##f;
#define MB_TOKENIZER_FIELD(n, t, f, d, arg, h) MB_TOKENIZER_FIELD_##t(f)

/* The first member of the verb's struct. */
struct mb_tokenizer_flags {
    const char *tokenizer_type;
    MB_TOKENIZER_FLAGS(MB_TOKENIZER_FIELD)
};

#define MB_TOKENIZER_KIND_TEXT        MB_OPTION_STRING
#define MB_TOKENIZER_KIND_INT         MB_OPTION_INT
#define MB_TOKENIZER_KIND_LIST        MB_OPTION_WORDS
#define MB_TOKENIZER_KIND_FLAG_OFF    MB_OPTION_FLAG
#define MB_TOKENIZER_NAME_TEXT(f)     f
#define MB_TOKENIZER_NAME_INT(f)      f
#define MB_TOKENIZER_NAME_LIST(f)     f
#define MB_TOKENIZER_NAME_FLAG_OFF(f) no_##f

#define MB_TOKENIZER_ROW(n, t, f, d, arg, h)                                                       \
    {n,                                                                                            \
     0,                                                                                            \
     arg,                                                                                          \
     MB_TOKENIZER_KIND_##t,                                                                        \
     offsetof(struct mb_tokenizer_flags, MB_TOKENIZER_NAME_##t(f)),                                \
     h,                                                                                            \
     0,                                                                                            \
     0},

/* Rows for the verb's table; it takes no words besides (no_words), because LIST takes several. */
#define MB_TOKENIZER_ROWS                                                                          \
    {"tokenizer-type",                                                                             \
     0,                                                                                            \
     "TYPE",                                                                                       \
     MB_OPTION_STRING,                                                                             \
     offsetof(struct mb_tokenizer_flags, tokenizer_type),                                          \
     "as Megatron-LM names them: GPT2BPETokenizer, NullTokenizer...",                              \
     0,                                                                                            \
     0},                                                                                           \
        MB_TOKENIZER_FLAGS(MB_TOKENIZER_ROW)

struct mb_tokenizer_options mb_tokenizer_flags_read(const struct mb_tokenizer_flags *f);

#endif
