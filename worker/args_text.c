/*
 * Arguments as text (args.h): help, Megatron's dump, JSON for checkpoints.
 *
 *  1. A row's value is its field when it has one (validation may have derived it), else what was
 *     given, else the default.
 *  2. The dump prints it as Python's str() would, JSON with JSON's own types.
 *  3. Names are sorted without regard to case, as Megatron sorts its lines.
 * Failure: only memory.
 */
#include "worker/args_table.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include "base/alloc.h"

void mb_arg_float_text(double v, char out[MB_ARG_FLOAT_TEXT_MAX])
{
    char digits[40];
    int precision = 1;
    do {
        snprintf(digits, sizeof digits, "%.*e", precision - 1, v);
    } while (strtod(digits, NULL) != v && precision++ < 17);
    int exponent = atoi(strchr(digits, 'e') + 1);
    if (v == 0 || (exponent >= -4 && exponent < 16)) {
        int decimals = precision - 1 - exponent;
        snprintf(out, MB_ARG_FLOAT_TEXT_MAX, "%.*f", decimals > 1 ? decimals : 1, v);
    } else {
        *strchr(digits, 'e') = '\0';
        snprintf(out, MB_ARG_FLOAT_TEXT_MAX, "%se%c%02d", digits, exponent < 0 ? '-' : '+',
                 abs(exponent));
    }
}

struct view { /* a row's value */
    enum mb_arg_type type;
    int none;
    int64_t i;
    double d;
    const char *text;
    char *const *list;
    size_t n_list;
};

static struct view from_field(const struct mb_args *args, const struct mb_arg_row *row)
{
    const char *field = (const char *)args + row->offset;
    struct view v = {.type = row->type};
    struct mb_args_list list;
    switch (row->type) {
    case MB_ARG_FLOAT:
        memcpy(&v.d, field, sizeof v.d);
        v.none = isnan(v.d);
        break;
    case MB_ARG_TEXT:
        memcpy(&v.text, field, sizeof v.text);
        v.none = v.text == NULL;
        break;
    case MB_ARG_LIST:
    case MB_ARG_INTS:
    case MB_ARG_TRIPLE:
        memcpy(&list, field, sizeof list);
        v.list = list.items;
        v.n_list = list.n;
        v.none = list.n == 0;
        break;
    default:
        memcpy(&v.i, field, sizeof v.i);
        v.none = v.i == MB_ARGS_NONE;
        break;
    }
    return v;
}

static struct view from_raw(const struct mb_arg_row *row, const struct mb_args_raw *raw)
{
    struct view v = {.type = row->type};
    if (row->type == MB_ARG_FLAG || row->type == MB_ARG_FLAG_OFF) {
        v.i = raw->given == (row->type == MB_ARG_FLAG);
    } else if (raw->given && (row->type == MB_ARG_LIST || row->type == MB_ARG_TRIPLE)) {
        v.list = raw->values;
        v.n_list = raw->n_values;
    } else {
        v.type = MB_ARG_TEXT; /* already as people write it */
        v.text = raw->given ? raw->values[0] : row->def;
        v.none = v.text == NULL;
    }
    return v;
}

static struct view view_of(const struct mb_args *args, size_t row)
{
    return MB_ARG_ROWS[row].offset != SIZE_MAX ? from_field(args, &MB_ARG_ROWS[row])
                                               : from_raw(&MB_ARG_ROWS[row], &args->raw[row]);
}

/* A default that nothing has replaced is shown as the table has it: in Python an int stands for a
 * float there, and a list is one. */
static const char *own_default(const struct mb_args *args, size_t row, const struct view *v)
{
    const struct mb_arg_row *r = &MB_ARG_ROWS[row];
    if (args->raw[row].given || r->def == NULL) {
        return NULL;
    }
    const int is_float = v->type == MB_ARG_FLOAT && strtod(r->def, NULL) == v->d;
    return is_float || (v->type == MB_ARG_INTS && v->n_list == 0) ? r->def : NULL;
}

static int add_value(struct mb_buf *out, const struct view *v)
{
    char text[MB_ARG_FLOAT_TEXT_MAX];
    int rc = 0;
    if (v->none) {
        return mb_buf_puts(out, "None");
    }
    switch (v->type) {
    case MB_ARG_FLAG:
    case MB_ARG_FLAG_OFF:
        return mb_buf_puts(out, v->i ? "True" : "False");
    case MB_ARG_INT:
    case MB_ARG_COMPUTED:
        return mb_buf_printf(out, "%lld", (long long)v->i);
    case MB_ARG_FLOAT:
        mb_arg_float_text(v->d, text);
        return mb_buf_puts(out, text);
    case MB_ARG_TEXT:
        return mb_buf_puts(out, v->text);
    case MB_ARG_LIST:
    case MB_ARG_TRIPLE:
    case MB_ARG_INTS:
        rc = mb_buf_puts(out, "[");
        for (size_t i = 0; i < v->n_list && rc == 0; i++) {
            const char *quote = v->type == MB_ARG_INTS ? "" : "'";
            rc = mb_buf_printf(out, "%s%s%s%s", i > 0 ? ", " : "", quote, v->list[i], quote);
        }
        return rc == 0 ? mb_buf_puts(out, "]") : rc;
    }
    return 0;
}

struct entry {
    char name[64];
    size_t row;
};

static int by_name(const void *a, const void *b)
{
    const struct entry *x = a, *y = b;
    int c = strcasecmp(x->name, y->name);
    return c != 0 ? c : strcmp(x->name, y->name);
}

static struct entry *sorted(void)
{
    struct entry *e = mb_calloc(MB_ARG_N_ROWS, sizeof *e);
    for (size_t i = 0; e != NULL && i < MB_ARG_N_ROWS; i++) {
        mb_arg_dest(&MB_ARG_ROWS[i], e[i].name);
        e[i].row = i;
    }
    if (e != NULL) {
        qsort(e, MB_ARG_N_ROWS, sizeof *e, by_name);
    }
    return e;
}

int mb_args_dump(const struct mb_args *args, struct mb_buf *out)
{
    static const char DOTS[] = "................................................";
    struct entry *e = sorted();
    int rc = e != NULL ? 0 : MB_ENOMEM;
    for (size_t i = 0; i < MB_ARG_N_ROWS && rc == 0; i++) {
        struct view v = view_of(args, e[i].row);
        size_t n = strlen(e[i].name);
        rc = mb_buf_printf(out, "  %s %.*s ", e[i].name, n < 48 ? (int)(48 - n) : 0, DOTS);
        const char *def = own_default(args, e[i].row, &v);
        if (rc == 0) {
            rc = def != NULL ? mb_buf_puts(out, def) : add_value(out, &v);
        }
        rc = rc == 0 ? mb_buf_puts(out, "\n") : rc;
    }
    mb_free(e);
    return rc;
}

static json_t *value_json(const struct view *v)
{
    if (v->none) {
        return json_null();
    }
    switch (v->type) {
    case MB_ARG_FLAG:
    case MB_ARG_FLAG_OFF:
        return json_boolean(v->i);
    case MB_ARG_INT:
    case MB_ARG_COMPUTED:
        return json_integer(v->i);
    case MB_ARG_FLOAT:
        return json_real(v->d);
    case MB_ARG_TEXT:
        return json_string(v->text);
    case MB_ARG_LIST:
    case MB_ARG_INTS:
    case MB_ARG_TRIPLE:
        break;
    }
    json_t *list = json_array();
    for (size_t i = 0; i < v->n_list; i++) {
        json_array_append_new(list, v->type == MB_ARG_INTS ? json_integer(atoll(v->list[i]))
                                                           : json_string(v->list[i]));
    }
    return list;
}

char *mb_args_json(const struct mb_args *args)
{
    struct entry *e = sorted();
    json_t *o = json_object();
    int bad = e == NULL || o == NULL;
    for (size_t i = 0; i < MB_ARG_N_ROWS && !bad; i++) {
        struct view v = view_of(args, e[i].row);
        json_t *j = value_json(&v);
        /* A path that is no UTF-8 has no JSON; the dump still shows it. */
        bad = json_object_set_new(o, e[i].name, j != NULL ? j : json_null()) != 0;
    }
    char *text = bad ? NULL : json_dumps(o, JSON_COMPACT);
    json_decref(o);
    mb_free(e);
    return text;
}

int mb_args_help(struct mb_buf *out)
{
    static const char *const USE[] = {"", "(accepted, no effect) ", "(not provided) "};
    const char *group = "";
    int rc = mb_buf_puts(out, "usage: mobula-worker [Megatron-LM arguments]\n\n"
                              "Trains a GPT model. One process is one rank: RANK, WORLD_SIZE and "
                              "MOBULA_REPORT_FD\ncome from the environment; without them it trains "
                              "alone.\n");
    for (size_t i = 0; i < MB_ARG_N_ROWS && rc == 0; i++) {
        const struct mb_arg_row *r = &MB_ARG_ROWS[i];
        if (r->type == MB_ARG_COMPUTED) {
            continue;
        }
        if (strcmp(group, r->group) != 0) {
            group = r->group;
            rc = mb_buf_printf(out, "\n%s:\n", group);
        }
        static const char *const VALUES[] = {"",     "",       " N",     " X", " TEXT",
                                             " ...", " N ...", " A B C", ""};
        if (rc == 0) {
            rc = mb_buf_printf(out, "  --%s%s\n      %s%s%s%s\n", r->name, VALUES[r->type],
                               USE[r->use], r->text, r->def != NULL ? "; default " : "",
                               r->def != NULL ? r->def : "");
        }
    }
    return rc;
}
