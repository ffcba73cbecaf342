/*
 * The command line of a tokenizer: one table, from which the trainer (worker/args_table.c),
 * `mobula preprocess` and `mobula tokenizer` (cli/tokenizer_flags.c) make theirs. Names, types and
 * defaults are Megatron-LM's (megatron/training/arguments.py, _add_tokenizer_args). A flag that a
 * tokenizer needs is a row here, a field of struct mb_tokenizer_options with the same name, and one
 * of struct mb_args.
 *
 * MB_TOKENIZER_FLAGS(X) calls X(flag, kind, field, default, argument, help); kind is TEXT, INT,
 * LIST (one or more words) or FLAG_OFF (without a value: the field, 1 by default, becomes 0),
 * default the text of Megatron-LM's default, NULL for None.
 */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_OPTIONS_TABLE_H
#define MOBULA_WORKER_DATA_TOKENIZER_OPTIONS_TABLE_H

/* clang-format off */
/* --tokenizer-type takes Megatron-LM's choices; those that are not provided are refused by name. */
#define MB_TOKENIZER_CHOICES                                                                       \
    "GPT2BPETokenizer|NullTokenizer|HuggingFaceTokenizer|Llama2Tokenizer|BertWordPieceLowerCase|"  \
    "BertWordPieceCase|SentencePieceTokenizer|GPTSentencePieceTokenizer|Llama3Tokenizer|"          \
    "MistralTokenizer|TikTokenizer|MultimodalTokenizer"

#define MB_TOKENIZER_FLAGS(X)                                                                      \
    X("vocab-size", INT, vocab_size, NULL, "N", "size of the NullTokenizer's vocabulary")          \
    X("vocab-file", TEXT, vocab_file, NULL, "FILE", "vocab.json of GPT2BPETokenizer")              \
    X("merge-file", TEXT, merge_file, NULL, "FILE", "merges.txt of GPT2BPETokenizer")              \
    X("tokenizer-model", TEXT, tokenizer_model, NULL, "PATH",                                      \
      "directory with tokenizer.json, SentencePiece model or tiktoken file")                       \
    X("tokenizer-hf-no-include-special-tokens", FLAG_OFF, tokenizer_hf_include_special_tokens,     \
      NULL, NULL, "HuggingFaceTokenizer: no BOS or EOS around a text")                             \
    X("tiktoken-pattern", TEXT, tiktoken_pattern, NULL, "v1|v2", "how TikTokenizer cuts a text")   \
    X("tiktoken-num-special-tokens", INT, tiktoken_num_special_tokens, "1000", "N",                \
      "ids of TikTokenizer before the vocabulary's own")                                           \
    X("tiktoken-special-tokens", LIST, tiktoken_special_tokens, NULL, "TOKEN...",                  \
      "the first of them by name")
/* clang-format on */

#endif
