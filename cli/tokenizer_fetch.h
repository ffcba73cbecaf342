/* A tokenizer's files that lie in a bucket, brought here for a verb that runs here. Blocking. */
#ifndef MOBULA_CLI_TOKENIZER_FETCH_H
#define MOBULA_CLI_TOKENIZER_FETCH_H

#include "cli/tokenizer_flags.h"

struct mb_tokenizer_fetched {
    char *paths[3]; /* what flags point to */
};

/* s3:// of --vocab-file, --merge-file and --tokenizer-model become paths below MOBULA_INPUT_DIR, or
 * inputs/ of the temp dir: what the nodes fetched is there, too. Says on stderr what comes. */
int mb_tokenizer_fetch(struct mb_tokenizer_flags *flags, struct mb_tokenizer_fetched *out,
                       struct mb_err *err);
void mb_tokenizer_fetched_close(struct mb_tokenizer_fetched *f); /* legal on a zeroed one */

#endif
