/*
 *  1. Opcode by opcode: each pushes, joins or names values; one byte makes a value at most, and the
 *     number of values is bounded, so is memory.
 *  2. GLOBAL and STACK_GLOBAL push a name, if it is listed; REDUCE and NEWOBJ make an OBJECT of
 *     name and arguments; BUILD, SETITEMS and APPENDS put something into it.
 *  3. STOP: one value is left, the root.
 * Failures, all with the offset: an opcode that such a file does not have, a name that is not
 * listed, an operand beyond the end, an empty stack, a mark that is missing, a memo that nothing
 * was put into, too many values.
 */
#include "worker/checkpoint/megatron/pickle.h"

#include <stdio.h>
#include <string.h>
#include "base/alloc.h"

enum { CHUNK = 512, MEMO_MAX = MB_PICKLE_VALUES_MAX, LONG_BYTES = 8, NAME_MAX_BYTES = 160 };

struct chunk {
    struct chunk *next;
    size_t n;
    struct mb_pickle_value values[CHUNK];
};

struct mb_pickle {
    struct chunk *chunks;
    size_t n_values;
    struct mb_pickle_value *root;
};

struct machine {
    const char *name;
    const uint8_t *bytes;
    size_t n, at, op_at;
    enum mb_pickle_source source;
    struct mb_pickle *p;
    struct mb_pickle_value **stack, **memo;
    size_t n_stack, cap_stack, n_memo, n_kept; /* kept: places of the memo that are taken */
    size_t *marks;
    size_t n_marks, cap_marks;
    struct mb_err *err;
    int rc; /* of the first failure */
};

static int fail(struct machine *m, int code, const char *what)
{
    if (m->rc == 0) {
        m->rc =
            mb_err_set(m->err, code, "%s: at byte %zu of the pickle: %s", m->name, m->op_at, what);
    }
    return m->rc;
}

static int corrupt(struct machine *m, const char *what)
{
    return fail(m, MB_ECORRUPT, what);
}

/* ---- memory ---- */

static struct mb_pickle_value *make(struct machine *m, enum mb_pickle_kind kind)
{
    struct mb_pickle *p = m->p;
    if (m->rc != 0) {
        return NULL;
    }
    if (p->n_values == MB_PICKLE_VALUES_MAX) {
        fail(m, MB_EUNSUPPORTED, "too many values");
        return NULL;
    }
    if (p->chunks == NULL || p->chunks->n == CHUNK) {
        struct chunk *c = mb_calloc(1, sizeof *c);
        if (c == NULL) {
            fail(m, MB_ENOMEM, "out of memory");
            return NULL;
        }
        c->next = p->chunks;
        p->chunks = c;
    }
    struct mb_pickle_value *v = &p->chunks->values[p->chunks->n++];
    p->n_values++;
    v->kind = kind;
    return v;
}

/* Room for one more of size bytes each. */
static int grow(struct machine *m, void **list, size_t n, size_t *cap, size_t size)
{
    if (n < *cap) {
        return 0;
    }
    const size_t more = *cap > 0 ? 2 * *cap : 8;
    void *bigger = mb_reallocarray(*list, more, size);
    if (bigger == NULL) {
        return fail(m, MB_ENOMEM, "out of memory");
    }
    *list = bigger;
    *cap = more;
    return 0;
}

static void push(struct machine *m, struct mb_pickle_value *v)
{
    if (v != NULL &&
        grow(m, (void **)&m->stack, m->n_stack, &m->cap_stack, sizeof *m->stack) == 0) {
        m->stack[m->n_stack++] = v;
    }
}

static size_t floor_of(const struct machine *m)
{
    return m->n_marks > 0 ? m->marks[m->n_marks - 1] : 0;
}

static struct mb_pickle_value *pop(struct machine *m)
{
    if (m->rc == 0 && m->n_stack == floor_of(m)) {
        corrupt(m, "nothing is on the stack");
    }
    return m->rc == 0 ? m->stack[--m->n_stack] : NULL;
}

static struct mb_pickle_value *top(struct machine *m)
{
    if (m->rc == 0 && m->n_stack == floor_of(m)) {
        corrupt(m, "nothing is on the stack");
    }
    return m->rc == 0 ? m->stack[m->n_stack - 1] : NULL;
}

static void add_item(struct machine *m, struct mb_pickle_value *to, struct mb_pickle_value *v)
{
    if (m->rc == 0 && grow(m, (void **)&to->items, to->n_items, &to->cap, sizeof *to->items) == 0) {
        to->items[to->n_items++] = v;
    }
}

static void mark(struct machine *m)
{
    if (grow(m, (void **)&m->marks, m->n_marks, &m->cap_marks, sizeof *m->marks) == 0) {
        m->marks[m->n_marks++] = m->n_stack;
    }
}

/* What lies above the last mark, which goes: *values of the return's number. */
static size_t above_mark(struct machine *m, struct mb_pickle_value ***values)
{
    if (m->rc == 0 && m->n_marks == 0) {
        corrupt(m, "there is no mark");
    }
    if (m->rc != 0) {
        return 0;
    }
    const size_t from = m->marks[--m->n_marks], n = m->n_stack - from;
    *values = n > 0 ? m->stack + from : NULL; /* there may be no stack yet */
    m->n_stack = from;
    return n;
}

/* ---- operands ---- */

static const uint8_t *operand(struct machine *m, size_t n)
{
    if (m->rc == 0 && n > m->n - m->at) {
        corrupt(m, "it ends in the middle");
    }
    if (m->rc != 0) {
        return NULL;
    }
    const uint8_t *p = m->bytes + m->at;
    m->at += n;
    return p;
}

static uint64_t unsigned_operand(struct machine *m, size_t n)
{
    const uint8_t *p = operand(m, n);
    uint64_t v = 0;
    for (size_t i = 0; p != NULL && i < n; i++) {
        v |= (uint64_t)p[i] << 8 * i;
    }
    return v;
}

static void push_int(struct machine *m, enum mb_pickle_kind kind, int64_t number)
{
    struct mb_pickle_value *v = make(m, kind);
    if (v != NULL) {
        v->number = number;
    }
    push(m, v);
}

/* Two's complement of n bytes. */
static void push_long(struct machine *m)
{
    const size_t n = (size_t)unsigned_operand(m, 1);
    if (n > LONG_BYTES) {
        operand(m, n);
        push(m, make(m, MB_PICKLE_LONG));
        return;
    }
    uint64_t v = unsigned_operand(m, n);
    if (n > 0 && n < LONG_BYTES && (v >> (8 * n - 1) & 1) != 0) {
        v |= ~(uint64_t)0 << 8 * n;
    }
    push_int(m, MB_PICKLE_INT, (int64_t)v);
}

static void push_float(struct machine *m)
{
    uint64_t bits = __builtin_bswap64(unsigned_operand(m, 8));
    struct mb_pickle_value *v = make(m, MB_PICKLE_FLOAT);
    if (v != NULL) {
        memcpy(&v->real, &bits, sizeof v->real);
    }
    push(m, v);
}

static void push_text(struct machine *m, size_t n_size)
{
    const size_t n = (size_t)unsigned_operand(m, n_size);
    const uint8_t *text = operand(m, n);
    struct mb_pickle_value *v = make(m, MB_PICKLE_TEXT);
    if (v != NULL) {
        v->text = (const char *)text;
        v->n_text = n;
    }
    push(m, v);
}

static int is_printable(const char *text, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if ((text[i] <= ' ' || text[i] > '~') && text[i] != '\n') {
            return 0;
        }
    }
    return 1;
}

static int is_listed(const struct machine *m, const char *text, size_t n)
{
    return mb_pickle_name_is_listed(text, n) ||
           (m->source == MB_PICKLE_OF_METADATA && mb_pickle_name_is_of_metadata(text, n));
}

/* text has n bytes, of which the first n_module are the module's, and one that divides. */
static void refuse_name(struct machine *m, const char *text, size_t n, size_t n_module)
{
    char what[256];
    const int shown = n < 150 && is_printable(text, n);
    snprintf(what, sizeof what,
             "it names %.*s%s%.*s, which no checkpoint of Megatron-LM has: it is refused",
             shown ? (int)n_module : 0, text, shown ? "." : "something",
             shown ? (int)(n - n_module - 1) : 0, text + n_module + 1);
    fail(m, MB_EUNSUPPORTED, what);
}

static void push_global(struct machine *m)
{
    const char *text = (const char *)m->bytes + m->at;
    const char *line = memchr(text, '\n', m->n - m->at);
    const char *end =
        line != NULL ? memchr(line + 1, '\n', m->n - m->at - (size_t)(line + 1 - text)) : NULL;
    if (end == NULL) {
        corrupt(m, "it ends in the middle");
        return;
    }
    const size_t n = (size_t)(end - text);
    if (!is_listed(m, text, n)) {
        refuse_name(m, text, n, (size_t)(line - text));
        return;
    }
    m->at += n + 1;
    struct mb_pickle_value *v = make(m, MB_PICKLE_GLOBAL);
    if (v != NULL) {
        v->text = text;
        v->n_text = n;
    }
    push(m, v);
}

/* Of two texts on the stack. */
static void push_stack_global(struct machine *m)
{
    const struct mb_pickle_value *name = pop(m), *module = pop(m);
    if (m->rc == 0 && (name->kind != MB_PICKLE_TEXT || module->kind != MB_PICKLE_TEXT)) {
        corrupt(m, "it names what is no text");
    }
    if (m->rc == 0 &&
        (module->n_text > NAME_MAX_BYTES || name->n_text > NAME_MAX_BYTES - module->n_text)) {
        fail(m, MB_EUNSUPPORTED, "it names something, which no checkpoint of Megatron-LM has");
    }
    char *text = m->rc == 0 ? mb_alloc(module->n_text + name->n_text + 2) : NULL;
    if (text == NULL) {
        fail(m, MB_ENOMEM, "out of memory");
        return;
    }
    const size_t n = module->n_text + 1 + name->n_text;
    memcpy(text, module->text, module->n_text);
    text[module->n_text] = '\n';
    memcpy(text + module->n_text + 1, name->text, name->n_text);
    if (!is_listed(m, text, n)) {
        refuse_name(m, text, n, module->n_text);
    }
    struct mb_pickle_value *v = make(m, MB_PICKLE_GLOBAL);
    if (v == NULL) {
        mb_free(text);
        return;
    }
    v->text = v->owned = text;
    v->n_text = n;
    push(m, v);
}

/* ---- joining ---- */

static void push_tuple(struct machine *m, struct mb_pickle_value **values, size_t n)
{
    struct mb_pickle_value *v = make(m, MB_PICKLE_TUPLE);
    for (size_t i = 0; v != NULL && i < n; i++) {
        add_item(m, v, values[i]);
    }
    push(m, v);
}

static void tuple_of(struct machine *m, size_t n)
{
    struct mb_pickle_value *values[3];
    for (size_t i = n; i-- > 0;) {
        values[i] = pop(m);
    }
    if (m->rc == 0) {
        push_tuple(m, values, n);
    }
}

static void append(struct machine *m, struct mb_pickle_value **values, size_t n)
{
    struct mb_pickle_value *list = top(m);
    if (list == NULL) {
        return;
    }
    if (list->kind != MB_PICKLE_LIST) {
        corrupt(m, "it appends to what is no list");
        return;
    }
    for (size_t i = 0; i < n; i++) {
        add_item(m, list, values[i]);
    }
}

static void set_items(struct machine *m, struct mb_pickle_value **values, size_t n)
{
    struct mb_pickle_value *dict = top(m);
    if (dict == NULL) {
        return;
    }
    if ((dict->kind != MB_PICKLE_DICT && dict->kind != MB_PICKLE_OBJECT) || n % 2 != 0) {
        corrupt(m, "it sets items of what is no dictionary");
        return;
    }
    for (size_t i = 0; i < n; i++) {
        add_item(m, dict, values[i]);
    }
}

static void call(struct machine *m)
{
    struct mb_pickle_value *args = pop(m), *callable = pop(m);
    if (m->rc == 0 && (args->kind != MB_PICKLE_TUPLE || callable->kind != MB_PICKLE_GLOBAL)) {
        corrupt(m, "it calls what is no name");
    }
    struct mb_pickle_value *v = make(m, MB_PICKLE_OBJECT);
    if (v != NULL) {
        v->callable = callable;
        v->args = args;
    }
    push(m, v);
}

static void build(struct machine *m)
{
    struct mb_pickle_value *state = pop(m), *object = top(m);
    if (m->rc == 0 && object->kind != MB_PICKLE_OBJECT) {
        corrupt(m, "it sets the state of what is no object");
    }
    if (m->rc == 0) {
        object->state = state;
    }
}

static void persistent(struct machine *m)
{
    struct mb_pickle_value *id = pop(m), *v = make(m, MB_PICKLE_PERSISTENT);
    if (v != NULL) {
        add_item(m, v, id);
    }
    push(m, v);
}

static void memo_put(struct machine *m, size_t i)
{
    struct mb_pickle_value *v = top(m);
    if (m->rc == 0 && i >= MEMO_MAX) {
        fail(m, MB_EUNSUPPORTED, "too many values are kept");
    }
    if (m->rc != 0) {
        return;
    }
    if (i >= m->n_memo) {
        size_t n = 2 * i + 64;
        struct mb_pickle_value **bigger = mb_reallocarray(m->memo, n, sizeof *m->memo);
        if (bigger == NULL) {
            fail(m, MB_ENOMEM, "out of memory");
            return;
        }
        memset(bigger + m->n_memo, 0, (n - m->n_memo) * sizeof *bigger);
        m->memo = bigger;
        m->n_memo = n;
    }
    m->n_kept += m->memo[i] == NULL;
    m->memo[i] = v;
}

static void memo_get(struct machine *m, size_t i)
{
    if (m->rc == 0 && (i >= m->n_memo || m->memo[i] == NULL)) {
        corrupt(m, "it takes what was not kept");
    }
    push(m, m->rc == 0 ? m->memo[i] : NULL);
}

static void one_item(struct machine *m)
{
    struct mb_pickle_value *values[2];
    values[1] = pop(m);
    values[0] = pop(m);
    if (m->rc == 0) {
        set_items(m, values, 2);
    }
}

static void one_append(struct machine *m)
{
    struct mb_pickle_value *v = pop(m);
    if (m->rc == 0) {
        append(m, &v, 1);
    }
}

static void many(struct machine *m,
                 void (*put)(struct machine *, struct mb_pickle_value **, size_t))
{
    struct mb_pickle_value **values;
    const size_t n = above_mark(m, &values);
    if (m->rc == 0) {
        put(m, values, n);
    }
}

static void unknown(struct machine *m, uint8_t op)
{
    char what[64];
    snprintf(what, sizeof what, "opcode 0x%02x is none that torch.save writes", op);
    fail(m, MB_EUNSUPPORTED, what);
}

static void check_protocol(struct machine *m)
{
    const uint64_t most = m->source == MB_PICKLE_OF_METADATA ? 5 : 2;
    if (unsigned_operand(m, 1) > most) {
        fail(m, MB_EUNSUPPORTED,
             most == 2 ? "its protocol is not torch.save's own, 2" : "its protocol is beyond 5");
    }
}

/* What protocol 4 has beyond 2. */
static void later_step(struct machine *m, uint8_t op)
{
    switch (op) {
    case 0x8c:
        push_text(m, 1);
        break;
    case 0x8d:
        push_text(m, 8);
        break;
    case 0x93:
        push_stack_global(m);
        break;
    case 0x94:
        memo_put(m, m->n_kept);
        break;
    case 0x95:
        operand(m, 8); /* how long a frame is */
        break;
    default:
        unknown(m, op);
    }
}

/* 1: that was the last one. */
static int step(struct machine *m)
{
    m->op_at = m->at;
    const uint8_t *p = operand(m, 1);
    const uint8_t op = p != NULL ? *p : 0;
    if (m->rc != 0) {
        return 1;
    }
    switch (op) {
    case 0x80:
        check_protocol(m);
        break;
    case '.':
        m->p->root = pop(m);
        return 1;
    case '(':
        mark(m);
        break;
    case 'N':
        push(m, make(m, MB_PICKLE_NONE));
        break;
    case 0x88:
    case 0x89:
        push_int(m, MB_PICKLE_BOOL, op == 0x88);
        break;
    case 'J':
        push_int(m, MB_PICKLE_INT, (int32_t)unsigned_operand(m, 4));
        break;
    case 'K':
        push_int(m, MB_PICKLE_INT, (int64_t)unsigned_operand(m, 1));
        break;
    case 'M':
        push_int(m, MB_PICKLE_INT, (int64_t)unsigned_operand(m, 2));
        break;
    case 0x8a:
        push_long(m);
        break;
    case 'G':
        push_float(m);
        break;
    case 'X':
        push_text(m, 4);
        break;
    case 'c':
        push_global(m);
        break;
    case '}':
        push(m, make(m, MB_PICKLE_DICT));
        break;
    case ']':
        push(m, make(m, MB_PICKLE_LIST));
        break;
    case ')':
        push(m, make(m, MB_PICKLE_TUPLE));
        break;
    case 't':
        many(m, push_tuple);
        break;
    case 0x85:
    case 0x86:
    case 0x87:
        tuple_of(m, op - 0x84u);
        break;
    case 'q':
        memo_put(m, (size_t)unsigned_operand(m, 1));
        break;
    case 'r':
        memo_put(m, (size_t)unsigned_operand(m, 4));
        break;
    case 'h':
        memo_get(m, (size_t)unsigned_operand(m, 1));
        break;
    case 'j':
        memo_get(m, (size_t)unsigned_operand(m, 4));
        break;
    case 'R':
    case 0x81:
        call(m);
        break;
    case 'b':
        build(m);
        break;
    case 'a':
        one_append(m);
        break;
    case 'e':
        many(m, append);
        break;
    case 's':
        one_item(m);
        break;
    case 'u':
        many(m, set_items);
        break;
    case 'Q':
        persistent(m);
        break;
    default:
        if (m->source == MB_PICKLE_OF_METADATA) {
            later_step(m, op);
        } else {
            unknown(m, op);
        }
    }
    return m->rc != 0;
}

int mb_pickle_parse(const char *name, const void *bytes, size_t n, enum mb_pickle_source source,
                    struct mb_pickle **out, struct mb_err *err)
{
    struct machine m = {.name = name, .bytes = bytes, .n = n, .source = source, .err = err};
    if (n > MB_PICKLE_MAX) {
        return mb_err_set(err, MB_EUNSUPPORTED, "%s: a pickle of %zu bytes", name, n);
    }
    m.p = mb_calloc(1, sizeof *m.p);
    if (m.p == NULL) {
        return mb_err_set(err, MB_ENOMEM, "%s: out of memory", name);
    }
    while (!step(&m)) {
    }
    mb_free(m.stack);
    mb_free(m.marks);
    mb_free(m.memo);
    if (m.rc != 0) {
        mb_pickle_close(m.p);
        return m.rc;
    }
    *out = m.p;
    return 0;
}

void mb_pickle_close(struct mb_pickle *p)
{
    if (p == NULL) {
        return;
    }
    while (p->chunks != NULL) {
        struct chunk *next = p->chunks->next;
        for (size_t i = 0; i < p->chunks->n; i++) {
            mb_free(p->chunks->values[i].items);
            mb_free(p->chunks->values[i].owned);
        }
        mb_free(p->chunks);
        p->chunks = next;
    }
    mb_free(p);
}

const struct mb_pickle_value *mb_pickle_root(const struct mb_pickle *p)
{
    return p->root;
}

int mb_pickle_is(const struct mb_pickle_value *v, enum mb_pickle_kind kind, const char *text)
{
    return v != NULL && v->kind == kind && strlen(text) == v->n_text &&
           (v->n_text == 0 || memcmp(v->text, text, v->n_text) == 0);
}

const struct mb_pickle_value *mb_pickle_get(const struct mb_pickle_value *v, const char *key)
{
    if (v == NULL || (v->kind != MB_PICKLE_DICT && v->kind != MB_PICKLE_OBJECT)) {
        return NULL;
    }
    for (size_t i = v->n_items / 2; i-- > 0;) { /* as in Python, the last one counts */
        if (mb_pickle_is(v->items[2 * i], MB_PICKLE_TEXT, key)) {
            return v->items[2 * i + 1];
        }
    }
    return NULL;
}
