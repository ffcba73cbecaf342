#include "cli/driver/words.h"

#include <string.h>

int drv_words_lack_optimizer(const char *const *argv)
{
    for (; *argv; argv++)
        if (strcmp(*argv, "--no-save-optim") == 0)
            return 1;
    return 0;
}

size_t drv_words_going_on(const char *const *argv, const char **out)
{
    size_t n = 0;

    for (size_t i = 0; argv[i]; i++)
        if (strcmp(argv[i], "--finetune") != 0 && strcmp(argv[i], "--no-load-optim") != 0)
            out[n++] = argv[i];
    if (drv_words_lack_optimizer(argv))
        out[n++] = "--no-load-optim";
    return n;
}
