/*
 * Prints the bytes of an input as preprocess gets them, for tests/integration/data:
 *   dump_input [--outage-ms N] [--max-line-bytes N] [--from SOURCE OFFSET] [--identity] WORD...
 * An error goes to stderr as "NAME: text" and becomes the exit status.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "worker/data/input/input.h"

static int print_pieces(struct mb_input *in, struct mb_err *err)
{
    struct mb_input_piece piece = {0};
    struct mb_buf text = {0};
    int rc;

    while ((rc = mb_input_next(in, &text, &piece, err)) == 1) {
        rc = mb_input_load(in, &piece, &text, err);
        if (rc != 0)
            break;
        fwrite(text.data, 1, text.len, stdout);
    }
    if (rc != 0 && piece.failed_inside)
        mb_err_wrap(err, "%s", mb_input_name(in, piece.at.source));
    mb_buf_close(&text);
    return rc;
}

static int print_identity(struct mb_input *in, struct mb_err *err)
{
    struct mb_buf text = {0};
    int rc = mb_input_identity(in, &text, err);

    if (rc == 0)
        fwrite(text.data, 1, text.len, stdout);
    mb_buf_close(&text);
    return rc;
}

int main(int argc, char **argv)
{
    struct mb_input_options o = {0};
    struct mb_input_place from = {.line = 1};
    struct mb_input *in = NULL;
    struct mb_err err = {0};
    int identity = 0;
    int at = 1;
    int rc;

    for (; at < argc && strncmp(argv[at], "--", 2) == 0; at++) {
        if (strcmp(argv[at], "--identity") == 0) {
            identity = 1;
        } else if (at + 1 < argc && strcmp(argv[at], "--outage-ms") == 0) {
            o.outage_ms = strtoull(argv[++at], NULL, 10);
        } else if (at + 1 < argc && strcmp(argv[at], "--max-line-bytes") == 0) {
            o.max_line_bytes = strtoull(argv[++at], NULL, 10);
        } else if (at + 2 < argc && strcmp(argv[at], "--from") == 0) {
            from.source = (uint32_t)strtoul(argv[++at], NULL, 10);
            from.offset = strtoull(argv[++at], NULL, 10);
        } else {
            fprintf(stderr, "unknown argument %s\n", argv[at]);
            return 2;
        }
    }
    o.words = (const char *const *)(argv + at);
    o.n_words = (size_t)(argc - at);
    rc = mb_input_open(&o, &in, &err);
    if (rc == 0)
        rc = mb_input_seek(in, &from, &err);
    if (rc == 0)
        rc = identity ? print_identity(in, &err) : print_pieces(in, &err);
    mb_input_close(in);
    if (rc != 0)
        fprintf(stderr, "%s\n", err.text);
    return mb_exit_status(rc);
}
