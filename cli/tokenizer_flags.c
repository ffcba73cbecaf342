/* One assignment a flag: what is missing is found out by the tokenizer that needs it. */
#include "cli/tokenizer_flags.h"

struct mb_tokenizer_options mb_tokenizer_flags_read(const struct mb_tokenizer_flags *f)
{
    return (struct mb_tokenizer_options){
        .type = f->tokenizer_type,
        .vocab_file = f->vocab_file,
        .merge_file = f->merge_file,
        .vocab_size = f->vocab_size,
        .tokenizer_model = f->tokenizer_model,
        .leaves_out_special_tokens = f->no_tokenizer_hf_include_special_tokens,
        .tiktoken_pattern = f->tiktoken_pattern,
        .tiktoken_num_special_tokens = f->tiktoken_num_special_tokens,
        .tiktoken_special_tokens = f->tiktoken_special_tokens.at,
        .n_tiktoken_special_tokens = f->tiktoken_special_tokens.n,
    };
}
