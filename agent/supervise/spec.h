/*
 * What a supervisor is asked to run: a file the agent writes and `mobula-init supervise` reads.
 * libc only, so that the supervisor stays tiny; memory is malloc's, errors are a line of text.
 *
 * File format: the line "mobula-supervise 1", then records "KEY LENGTH\nBYTES\n". Lengths make it
 * safe for any byte but NUL; a record "child" opens the next child, and arg, env, cwd, log and
 * report belong to the child opened last. Unknown keys are an error: the writer is never older
 * than the reader, since both are installed together.
 */
#ifndef MOBULA_AGENT_SUPERVISE_SPEC_H
#define MOBULA_AGENT_SUPERVISE_SPEC_H

#include <stddef.h>
#include <stdint.h>

enum {
    MB_SUP_CHILDREN_MAX = 256,       /* processes of one supervisor: ranks of one node */
    MB_SUP_SPEC_MAX_BYTES = 8 << 20, /* a spec file larger than this is refused */
    MB_SUP_TEXT_MAX = 256            /* texts that this room writes, the NUL included */
};

struct mb_sup_child {
    const char *const
        *argv;              /* NULL-terminated; argv[0] with a slash is a path, else PATH is used */
    const char *const *env; /* NULL-terminated "NAME=value": the whole environment */
    const char *cwd;        /* NULL: the attempt directory */
    const char *log_path;   /* absolute; stdout and stderr are appended to it */
    int want_report;        /* a stream socket in MOBULA_REPORT_FD, its other end kept for agents */
};

struct mb_sup_spec {
    const char *dir;             /* absolute attempt directory: socket and state live here */
    int stop_signal;             /* what a stop sends to the tree first: SIGTERM or SIGINT */
    uint32_t stop_grace_ms;      /* used when the supervisor ends without being told a grace */
    int32_t end_peers_after_ms;  /* after the first child that failed; -1: the others go on */
    uint32_t end_peers_grace_ms; /* between the stop signal to those peers and their SIGKILL */
    uint64_t memory_limit_bytes; /* of all children together with what they start; 0: none */
    uint32_t nofile;             /* open files of each process; 0: as inherited */
    int core_files;              /* 0: no core file is written */
    uint32_t leftover_grace_ms;  /* for what children left behind, once all of them exited */
    size_t n_children;
    const struct mb_sup_child *children;
    void *memory; /* of mb_sup_spec_read(); NULL in a spec that the caller built */
};

/* The file appears whole or not at all, readable by its owner only (it holds environments). 0, or
 * -1 with a line in text[MB_SUP_TEXT_MAX]. */
int mb_sup_spec_write(const struct mb_sup_spec *spec, const char *path, char *text);

/* 0: *out is filled, end it with mb_sup_spec_close(); -1: a line in text, *out is untouched. */
int mb_sup_spec_read(const char *path, struct mb_sup_spec *out, char *text);
void mb_sup_spec_close(struct mb_sup_spec *spec);

#endif
