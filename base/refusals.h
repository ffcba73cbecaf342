/*
 * Callers that were refused, as lines of the log: one a minute for each caller and reason, however
 * often it comes. Whoever can reach a port can be refused; it cannot fill the disk so.
 * One thread at a time.
 */
#ifndef MOBULA_BASE_REFUSALS_H
#define MOBULA_BASE_REFUSALS_H

#include <stdint.h>

enum { MB_REFUSALS_KEPT = 16 };

struct mb_refusals { /* {0} to begin with */
    struct mb_refusal {
        char who[64], why[128]; /* "": free */
        uint64_t said_ms;
        unsigned n_unsaid;
    } kept[MB_REFUSALS_KEPT];
};

/* 0: nothing is said. Else how many of this kind there were since the last line, this one among
 * them. More kinds than are kept within a minute are not said. Pure. */
unsigned mb_refusals_count(struct mb_refusals *r, const char *who, const char *why,
                           uint64_t now_ms);
/* The line. who: an address without a port, which is another one each time; "": not known. */
void mb_refusals_say(struct mb_refusals *r, const char *module, const char *who, const char *why);

#endif
