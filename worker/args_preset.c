/*
 * The table of presets. A name that is none is left to the argument's own check of its choices.
 */
#include "worker/args_preset.h"

#include <string.h>
#include "base/str.h"

#define GPT3(layers, hidden, heads)                                                                \
    {                                                                                              \
        "--num-layers", layers, "--hidden-size", hidden, "--num-attention-heads", heads,           \
            "--seq-length", "2048", "--max-position-embeddings", "2048"                            \
    }
#define LLAMA31(layers, hidden, ffn, heads)                                                        \
    {                                                                                              \
        "--num-layers", layers, "--hidden-size", hidden, "--ffn-hidden-size", ffn,                 \
            "--num-attention-heads", heads, "--group-query-attention", "--num-query-groups", "8",  \
            "--max-position-embeddings", "131072", "--position-embedding-type", "rope",            \
            "--rotary-base", "500000", "--use-rope-scaling", "--normalization", "RMSNorm",         \
            "--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights",          \
            "--attention-dropout", "0", "--hidden-dropout", "0"                                    \
    }

enum { WORDS_MAX = 32 };

static const struct {
    const char *name;
    const char *words[WORDS_MAX];
} PRESETS[] = {
    {"gpt3-1.7b", GPT3("24", "2304", "24")},
    {"gpt3-3.6b", GPT3("30", "3072", "32")},
    {"gpt3-7.5b", GPT3("36", "4096", "32")},
    {"gpt3-18.4b", GPT3("40", "6144", "48")},
    {"gpt3-39.1b", GPT3("48", "8192", "64")},
    {"gpt3-76.1b", GPT3("60", "10240", "80")},
    {"gpt3-145.6b", GPT3("80", "12288", "96")},
    {"gpt3-310.1b", GPT3("96", "16384", "128")},
    {"llama3.1-8b", LLAMA31("32", "4096", "14336", "32")},
    {"llama3.1-70b", LLAMA31("80", "8192", "28672", "64")},
};

size_t mb_args_preset(int argc, const char *const *argv, const char *const **words)
{
    static const char OPTION[] = "--model-preset";
    const char *name = NULL;
    size_t n = 0;
    for (int i = 0; i < argc; i++) {
        if (strcmp(argv[i], OPTION) == 0 && i + 1 < argc) {
            name = argv[i + 1];
        } else if (mb_starts_with(argv[i], OPTION) && argv[i][sizeof OPTION - 1] == '=') {
            name = argv[i] + sizeof OPTION;
        }
    }
    for (size_t i = 0; name != NULL && i < sizeof PRESETS / sizeof PRESETS[0]; i++) {
        if (strcmp(PRESETS[i].name, name) == 0) {
            *words = PRESETS[i].words;
            while (n < WORDS_MAX && PRESETS[i].words[n] != NULL) {
                n++;
            }
        }
    }
    return n;
}
