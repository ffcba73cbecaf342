/*
 * Shapes of published models by name: each stands for a list of Megatron-LM's arguments. Pure.
 *   gpt3-SIZE    the models of Megatron-LM's scaling papers, 1.7 to 310.1 billion parameters
 *   llama3.1-*   Llama 3.1: everything of the model but its tokenizer
 */
#ifndef MOBULA_WORKER_ARGS_PRESET_H
#define MOBULA_WORKER_ARGS_PRESET_H

#include <stddef.h>

/* As the choices of an argument's row. */
#define MB_ARG_PRESETS                                                                             \
    "gpt3-1.7b|gpt3-3.6b|gpt3-7.5b|gpt3-18.4b|gpt3-39.1b|gpt3-76.1b|gpt3-145.6b|gpt3-310.1b|"      \
    "llama3.1-8b|llama3.1-70b"

/* The words that the last --model-preset of a command line stands for; 0: there is none, or none of
 * that name. They are borrowed and live as long as the program. */
size_t mb_args_preset(int argc, const char *const *argv, const char *const **words);

#endif
