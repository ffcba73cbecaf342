/*
 * 1. All tokens are one trie over bytes; its edges are a hash table (node, byte) -> node.
 * 2. A place in the text is looked at when the two bytes there begin some token; if all tokens
 *    begin with one byte (nearly always "<"), memchr finds the places.
 * 3. From a place the trie is walked as far as it goes; the last token passed is the longest.
 * Only creation can fail; what it made is freed.
 */
#include <string.h>
#include "base/alloc.h"
#include "worker/data/tokenizer/added_tokens.h"
#include "worker/data/tokenizer/unicode_category.h"
#include "worker/data/tokenizer/utf8.h"

struct node {
    int32_t token; /* index + 1 of the token that ends here; 0: none */
};

struct edge {
    uint32_t from_byte; /* (node << 8 | byte) + 1; 0: empty */
    uint32_t to;
};

struct rule {
    int32_t id;
    uint8_t single_word, lstrip, rstrip;
};

struct mb_added_tokens {
    struct node *nodes;
    uint32_t n_nodes;
    struct edge *edges;
    uint32_t edge_mask;
    struct rule *rules;
    int only_first;           /* the byte with which all tokens begin, -1: several do */
    uint8_t first[256];       /* 1: a token begins so */
    uint64_t two[65536 / 64]; /* pairs of first bytes; a token of one byte sets all its pairs */
};

static uint32_t hash_edge(uint32_t key)
{
    return (uint32_t)(key * 0x9e3779b97f4a7c15u >> 32);
}

static struct edge *find_edge(const struct mb_added_tokens *a, uint32_t node, uint8_t byte)
{
    uint32_t key = (node << 8 | byte) + 1;
    uint32_t at = hash_edge(key) & a->edge_mask;

    while (a->edges[at].from_byte != 0 && a->edges[at].from_byte != key)
        at = (at + 1) & a->edge_mask;
    return &a->edges[at];
}

static void note_first(struct mb_added_tokens *a, const uint8_t *text, size_t n)
{
    a->first[text[0]] = 1;
    for (unsigned second = 0; second < 256; second++) {
        uint32_t pair = (uint32_t)text[0] << 8 | second;
        if (n == 1 || text[1] == second)
            a->two[pair >> 6] |= (uint64_t)1 << (pair & 63);
    }
}

/* Of two tokens with the same text the first counts, as in the peer's automaton. */
static void insert(struct mb_added_tokens *a, const struct mb_added_token *t, int32_t index)
{
    const uint8_t *text = (const uint8_t *)t->text;
    uint32_t node = 0;

    for (size_t i = 0; i < t->n; i++) {
        struct edge *e = find_edge(a, node, text[i]);
        if (e->from_byte == 0)
            *e = (struct edge){(node << 8 | text[i]) + 1, a->n_nodes++};
        node = e->to;
    }
    if (a->nodes[node].token == 0)
        a->nodes[node].token = index + 1;
    a->rules[index] = (struct rule){t->id, t->single_word, t->lstrip, t->rstrip};
    note_first(a, text, t->n);
}

static int check(const struct mb_added_token *tokens, size_t n, size_t *total, struct mb_err *err)
{
    *total = 0;
    for (size_t i = 0; i < n; i++) {
        if (tokens[i].n == 0 || tokens[i].n > MB_ADDED_TOKEN_MAX_BYTES)
            return mb_err_set(err, MB_EUNSUPPORTED,
                              "added token \"%.40s\": %zu bytes; 1 to %d are provided",
                              tokens[i].text, tokens[i].n, MB_ADDED_TOKEN_MAX_BYTES);
        *total += tokens[i].n;
    }
    if (*total >= 1 << 22)
        return mb_err_set(err, MB_EUNSUPPORTED, "added tokens: %zu bytes; at most %d are provided",
                          *total, 1 << 22);
    return 0;
}

int mb_added_tokens_create(const struct mb_added_token *tokens, size_t n,
                           struct mb_added_tokens **out, struct mb_err *err)
{
    struct mb_added_tokens *a;
    size_t total, slots = 16;
    unsigned n_first = 0;
    int rc = check(tokens, n, &total, err);

    if (rc != 0)
        return rc;
    while (slots < 2 * total + 2)
        slots *= 2;
    a = mb_calloc(1, sizeof(*a));
    if (a != NULL) {
        a->nodes = mb_calloc(total + 1, sizeof(*a->nodes));
        a->edges = mb_calloc(slots, sizeof(*a->edges));
        a->rules = mb_calloc(n + 1, sizeof(*a->rules));
    }
    if (a == NULL || a->nodes == NULL || a->edges == NULL || a->rules == NULL) {
        mb_added_tokens_destroy(a);
        return mb_err_set(err, MB_ENOMEM, "added tokens: out of memory");
    }
    a->n_nodes = 1;
    a->edge_mask = (uint32_t)slots - 1;
    for (size_t i = 0; i < n; i++)
        insert(a, &tokens[i], (int32_t)i);
    a->only_first = -1;
    for (int byte = 0; byte < 256; byte++) {
        if (a->first[byte]) {
            a->only_first = byte;
            n_first++;
        }
    }
    if (n_first != 1)
        a->only_first = -1;
    *out = a;
    return 0;
}

void mb_added_tokens_destroy(struct mb_added_tokens *a)
{
    if (a == NULL)
        return;
    mb_free(a->nodes);
    mb_free(a->edges);
    mb_free(a->rules);
    mb_free(a);
}

/* The next place from p on where a token may begin; end: none. */
static const uint8_t *find_place(const struct mb_added_tokens *a, const uint8_t *p,
                                 const uint8_t *end)
{
    for (; p < end; p++) {
        if (a->only_first >= 0) {
            p = memchr(p, a->only_first, (size_t)(end - p));
            if (p == NULL)
                return end;
        } else if (!a->first[*p]) {
            continue;
        }
        if (p + 1 == end)
            return p;
        uint32_t pair = (uint32_t)p[0] << 8 | p[1];
        if (a->two[pair >> 6] >> (pair & 63) & 1)
            return p;
    }
    return end;
}

/* Length of the longest token at p, 0: none. */
static size_t longest_at(const struct mb_added_tokens *a, const uint8_t *p, const uint8_t *end,
                         int32_t *token)
{
    uint32_t node = 0;
    size_t length = 0;

    for (const uint8_t *q = p; q < end; q++) {
        const struct edge *e = find_edge(a, node, *q);
        if (e->from_byte == 0)
            break;
        node = e->to;
        if (a->nodes[node].token != 0) {
            *token = a->nodes[node].token - 1;
            length = (size_t)(q + 1 - p);
        }
    }
    return length;
}

/* The first byte of the character that ends before `at`. */
static size_t char_before(const uint8_t *text, size_t at)
{
    uint32_t c;

    for (size_t length = 1; length <= 4 && length <= at; length++)
        if (mb_utf8_decode(text + at - length, text + at, &c) == length)
            return at - length;
    return at - 1;
}

static int is_word_at(const uint8_t *p, const uint8_t *end)
{
    uint32_t c;

    return mb_utf8_decode(p, end, &c) > 0 && mb_unicode_is_word(c);
}

static size_t space_length(const uint8_t *p, const uint8_t *end)
{
    uint32_t c;
    size_t length = mb_utf8_decode(p, end, &c);

    return length > 0 && mb_unicode_is_space(c) ? length : 0;
}

static int is_single(const struct mb_added_search *s, size_t start, size_t end)
{
    if (start > 0 && is_word_at(s->text + char_before(s->text, start), s->text + start))
        return 0;
    return end == s->n || !is_word_at(s->text + end, s->text + s->n);
}

static size_t strip_left(const struct mb_added_search *s, size_t start)
{
    while (start > s->done) {
        size_t before = char_before(s->text, start);
        if (space_length(s->text + before, s->text + start) == 0)
            break;
        start = before;
    }
    return start > s->done ? start : s->done;
}

static size_t strip_right(const struct mb_added_search *s, size_t end)
{
    while (end < s->n) {
        size_t length = space_length(s->text + end, s->text + s->n);
        if (length == 0)
            break;
        end += length;
    }
    return end;
}

int mb_added_tokens_next(const struct mb_added_tokens *a, struct mb_added_search *s,
                         struct mb_added_match *match)
{
    const uint8_t *end = s->text + s->n;

    while (s->at < s->n) {
        const uint8_t *p = find_place(a, s->text + s->at, end);
        int32_t token = 0;
        size_t length = p < end ? longest_at(a, p, end, &token) : 0;
        const struct rule *rule = &a->rules[token];

        if (p == end) {
            s->at = s->n;
            return 0;
        }
        match->start = (size_t)(p - s->text);
        match->end = match->start + length;
        s->at = length > 0 ? match->end : match->start + 1;
        if (length == 0 || (rule->single_word && !is_single(s, match->start, match->end)))
            continue;
        if (rule->lstrip)
            match->start = strip_left(s, match->start);
        if (rule->rstrip)
            match->end = strip_right(s, match->end);
        match->id = rule->id;
        s->done = match->end;
        return 1;
    }
    return 0;
}
