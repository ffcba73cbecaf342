/* The table behind args.h. Only args*.c and tests include this. */
#ifndef MOBULA_WORKER_ARGS_TABLE_H
#define MOBULA_WORKER_ARGS_TABLE_H

#include <jansson.h>
#include "worker/args.h"

enum mb_arg_type {
    MB_ARG_FLAG,     /* given: 1 */
    MB_ARG_FLAG_OFF, /* --no-x: given: 0, default 1 */
    MB_ARG_INT,
    MB_ARG_FLOAT,
    MB_ARG_TEXT,
    MB_ARG_LIST,    /* any number of values */
    MB_ARG_INTS,    /* one int or more; the default is a list */
    MB_ARG_TRIPLE,  /* three values */
    MB_ARG_COMPUTED /* no argument: an int that only the dump shows */
};

enum mb_arg_use { MB_ARG_IMPLEMENTED, MB_ARG_NOTED, MB_ARG_REFUSED };

struct mb_arg_row {
    const char *name; /* without the dashes */
    const char *dest; /* Megatron's attribute when it is not the name with underscores, else NULL */
    enum mb_arg_type type;
    enum mb_arg_use use;
    const char *def;     /* default as Python prints it; NULL: None (flags: False) */
    const char *choices; /* "a|b|c", or NULL */
    const char *group;
    const char *text; /* help; noted: the note; refused: the reason */
    size_t offset;    /* of the field in struct mb_args; SIZE_MAX: none */
};

extern const struct mb_arg_row MB_ARG_ROWS[];
extern const size_t MB_ARG_N_ROWS;

/* Families of arguments that are refused by the beginning of their names. */
struct mb_arg_family {
    const char *prefix;
    const char *what;
};
extern const struct mb_arg_family MB_ARG_FAMILIES[]; /* ends with prefix NULL */

/* What was given for a row. */
struct mb_args_raw {
    int given;
    char **values; /* owned */
    size_t n_values;
};

/* As if the command line had it once more: text as it would stand there ("" for a flag), NULL: as
 * if it had it never. Errors as of mb_args_parse(). */
int mb_arg_set(struct mb_args *args, size_t row, const char *text, struct mb_err *err);

/* Whether a row that is no flag has the value that it would have without being given; a flag:
 * whether it was not given. */
int mb_arg_is_default(const struct mb_arg_row *row, const struct mb_args_raw *raw);

/* The row of Megatron's attribute; MB_ARG_N_ROWS: there is none. */
size_t mb_arg_row_of(const char *dest);

/* Whether a text of a checkpoint can be the value of that attribute, and a line of a log:
 * MB_ECORRUPT where it is too long or has control characters, MB_ENOMEM. */
int mb_arg_check_text(const char *dest, const char *text, struct mb_err *err);

/* The checkpoint's value for the row of that attribute, with its line of the notes. JSON's null
 * counts as none, which is a line, too, and changes nothing. */
int mb_arg_adopt(struct mb_args *args, const char *dest, const json_t *value, struct mb_err *err);

/* Of mb_args_adopt(), of the checkpoint's arguments: the tokenizer into args->checkpoint_tokenizer.
 */
int mb_args_find_tokenizer(struct mb_args *args, const json_t *checkpoint_args, struct mb_err *err);

/* What was given for the row of that name, which is one of the table's. */
const struct mb_args_raw *mb_arg_raw(const struct mb_args *args, const char *name);

/* Of mb_args_validate(). Formats of numbers and loss scales (args_precision.c): */
int mb_args_check_precision(struct mb_args *args, struct mb_err *err);
/* the model (args_validate_model.c): sizes that must be given; shapes; positions, recomputation. */
int mb_args_check_required(struct mb_args *args, struct mb_err *err);
int mb_args_check_shape(struct mb_args *args, struct mb_err *err);
int mb_args_check_use(struct mb_args *args, struct mb_err *err);

/* "num_layers" for --num-layers. */
void mb_arg_dest(const struct mb_arg_row *row, char out[64]);

#endif
