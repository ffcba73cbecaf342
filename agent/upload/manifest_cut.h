/*
 * The list of files out of a manifest's text, so that it is parsed one file at a time: as a tree in
 * memory, 100,000 files take 60 MiB. For manifest.c.
 */
#ifndef MOBULA_AGENT_UPLOAD_MANIFEST_CUT_H
#define MOBULA_AGENT_UPLOAD_MANIFEST_CUT_H

#include <stddef.h>

/* json[begin, end) is the array that the outer object has as "files", brackets and all. */
struct mb_manifest_cut {
    size_t begin, end;
};

/* 1: found, once. 0: not, or more than once, or the text ends early; a parser of all of it says
 * why. What is outside the cut, and each of its elements, is still to be parsed: only strings and
 * brackets were looked at. */
int mb_manifest_cut(const char *json, size_t n, struct mb_manifest_cut *out);

/* The next element of the cut, from *at on, which begins as cut.begin + 1 and moves. 1: it is
 * json[*begin, *end), perhaps with white space around it, perhaps empty, which is no element; 0:
 * there are no more. */
int mb_manifest_cut_next(const char *json, const struct mb_manifest_cut *cut, size_t *at,
                         size_t *begin, size_t *end);

#endif
