/*
 * A pickle as data: what Python would make of the bytes, as a tree of values. Nothing is ever
 * imported, called or looked up; a call is a value of its own that says what would be called with
 * what, and names outside a list are refused all the same (pickle_names.c). Protocol 2, which
 * torch.save uses, or 4 and 5 of pickle.dump. Pure; one thread.
 *
 * Values may be shared and, in a hostile pickle, contain themselves: who walks deeper than a level
 * bounds the way himself.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_MEGATRON_PICKLE_H
#define MOBULA_WORKER_CHECKPOINT_MEGATRON_PICKLE_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

enum { MB_PICKLE_MAX = 64 << 20 /* bytes */, MB_PICKLE_VALUES_MAX = 2 << 20 };

enum mb_pickle_source {
    MB_PICKLE_OF_TORCH_SAVE, /* protocol 2, names of checkpoints */
    MB_PICKLE_OF_METADATA    /* up to 5, also names of torch.distributed.checkpoint's .metadata */
};

enum mb_pickle_kind {
    MB_PICKLE_NONE,
    MB_PICKLE_BOOL,
    MB_PICKLE_INT,
    MB_PICKLE_LONG, /* an integer beyond 64 bits; its value is not kept */
    MB_PICKLE_FLOAT,
    MB_PICKLE_TEXT,
    MB_PICKLE_TUPLE,
    MB_PICKLE_LIST,
    MB_PICKLE_DICT,
    MB_PICKLE_GLOBAL,     /* text: "module name" with a line feed between them */
    MB_PICKLE_OBJECT,     /* callable(*args), with what was set in it later */
    MB_PICKLE_PERSISTENT, /* items[0]: what stands for a thing outside the pickle */
};

struct mb_pickle_value {
    enum mb_pickle_kind kind;
    int64_t number;   /* BOOL, INT */
    double real;      /* FLOAT */
    const char *text; /* TEXT, GLOBAL: into the pickle's bytes, without a NUL, or owned */
    size_t n_text;
    /* TUPLE, LIST: the elements; DICT, OBJECT: keys and values in turn */
    struct mb_pickle_value **items;
    size_t n_items, cap;
    char *owned; /* a GLOBAL that was put together of two texts */
    struct mb_pickle_value *callable, *args, *state; /* OBJECT; state: NULL, or what BUILD set */
};

struct mb_pickle;

/* bytes are borrowed until close. MB_ECORRUPT and MB_EUNSUPPORTED name the offset. */
int mb_pickle_parse(const char *name, const void *bytes, size_t n, enum mb_pickle_source source,
                    struct mb_pickle **out, struct mb_err *err);
void mb_pickle_close(struct mb_pickle *p); /* NULL is legal */
const struct mb_pickle_value *mb_pickle_root(const struct mb_pickle *p);

/* The value of a text key in a DICT or OBJECT; NULL: none, also of v NULL. */
const struct mb_pickle_value *mb_pickle_get(const struct mb_pickle_value *v, const char *key);
/* Whether v is this text, or this GLOBAL ("collections\nOrderedDict"). */
int mb_pickle_is(const struct mb_pickle_value *v, enum mb_pickle_kind kind, const char *text);

/* Whether a GLOBAL is one that checkpoints have. module and name in one text, as in text above. */
int mb_pickle_name_is_listed(const char *text, size_t n);
/* Those that .metadata has beside them. */
int mb_pickle_name_is_of_metadata(const char *text, size_t n);

#endif
