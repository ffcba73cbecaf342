/*
 * The proto2 wire format, as far as the model's messages need it.
 *
 * 1. A message is a row of fields; each field is a key (number and wire type) and a value: varint,
 * eight bytes, length and bytes, or four bytes. 2. The walk hands each field to the function of its
 * message; fields that it does not know are passed over. A message field that comes twice is merged
 * and a plain one overwritten, as protobuf parsers do. 3. A length beyond the end, an unfinished
 * varint, field number 0 and the old group types are MB_ECORRUPT with the position in the file.
 */
#include <string.h>
#include "base/alloc.h"
#include "worker/data/tokenizer/sentencepiece/model.h"

enum wire { WIRE_VARINT = 0, WIRE_64 = 1, WIRE_BYTES = 2, WIRE_32 = 5 };

struct field {
    uint32_t number;
    enum wire wire;
    uint64_t value;          /* of a varint, also the 32 or 64 bits */
    struct mb_spm_span span; /* of WIRE_BYTES */
};

struct reader {
    const uint8_t *start; /* of the file, for positions in errors */
    struct mb_spm_model *m;
    size_t cap;
    struct mb_err *err;
};

typedef int field_cb(struct reader *r, const struct field *f, void *target);

static int broken(struct reader *r, const uint8_t *at, const char *what)
{
    return mb_err_set(r->err, MB_ECORRUPT, "byte %zu: %s; is this a SentencePiece model?",
                      (size_t)(at - r->start), what);
}

static int read_varint(struct reader *r, const uint8_t **p, const uint8_t *end, uint64_t *out)
{
    uint64_t value = 0;

    for (unsigned shift = 0; shift < 70 && *p < end; shift += 7) {
        uint8_t byte = *(*p)++;
        if (shift < 64)
            value |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80) {
            *out = value;
            return 0;
        }
    }
    return broken(r, *p, "a number without an end");
}

static uint64_t little_endian(const uint8_t *p, unsigned n)
{
    uint64_t value = 0;

    for (unsigned i = 0; i < n; i++)
        value |= (uint64_t)p[i] << 8 * i;
    return value;
}

static int read_field(struct reader *r, const uint8_t **p, const uint8_t *end, struct field *f)
{
    uint64_t key = 0;
    uint64_t length = 0;
    int rc = read_varint(r, p, end, &key);

    if (rc != 0)
        return rc;
    if (key >> 3 == 0 || key >> 32 != 0)
        return broken(r, *p, "a field without a number");
    f->number = (uint32_t)(key >> 3);
    f->wire = (enum wire)(key & 7);
    f->span = (struct mb_spm_span){0};
    switch (f->wire) {
    case WIRE_VARINT:
        return read_varint(r, p, end, &f->value);
    case WIRE_64:
    case WIRE_32:
        length = f->wire == WIRE_64 ? 8 : 4;
        if ((size_t)(end - *p) < length)
            return broken(r, *p, "the file ends within a number");
        f->value = little_endian(*p, (unsigned)length);
        *p += length;
        return 0;
    case WIRE_BYTES:
        rc = read_varint(r, p, end, &length);
        if (rc == 0 && length > (uint64_t)(end - *p))
            rc = broken(r, *p, "a length beyond the end");
        if (rc == 0) {
            f->span = (struct mb_spm_span){*p, (size_t)length};
            *p += length;
        }
        return rc;
    }
    return broken(r, *p, "a field of a form that is not used");
}

static int walk(struct reader *r, struct mb_spm_span message, field_cb *on_field, void *target)
{
    const uint8_t *end;

    if (message.n == 0)
        return 0;
    end = message.p + message.n;
    for (const uint8_t *p = message.p; p < end;) {
        struct field f = {0};
        int rc = read_field(r, &p, end, &f);
        if (rc == 0)
            rc = on_field(r, &f, target);
        if (rc != 0)
            return rc;
    }
    return 0;
}

static int on_piece_field(struct reader *r, const struct field *f, void *target)
{
    struct mb_spm_piece *piece = target;
    uint32_t bits = (uint32_t)f->value;

    if (f->number == 1 && f->wire == WIRE_BYTES)
        piece->text = f->span;
    else if (f->number == 2 && f->wire == WIRE_32)
        memcpy(&piece->score, &bits, sizeof(bits));
    else if (f->number == 3 && f->wire == WIRE_VARINT) {
        if (f->value < MB_SPM_NORMAL || f->value > MB_SPM_BYTE)
            return mb_err_set(r->err, MB_EUNSUPPORTED, "piece %zu has the unknown type %llu",
                              r->m->n_pieces, (unsigned long long)f->value);
        piece->type = (enum mb_spm_piece_type)f->value;
    }
    return 0;
}

static int on_trainer_field(struct reader *r, const struct field *f, void *target)
{
    struct mb_spm_model *m = target;

    if (f->wire == WIRE_VARINT && f->number == 3) {
        if (f->value < MB_SPM_UNIGRAM || f->value > MB_SPM_CHAR)
            return mb_err_set(r->err, MB_EUNSUPPORTED, "the unknown model_type %llu",
                              (unsigned long long)f->value);
        m->algorithm = (enum mb_spm_algorithm)f->value;
    } else if (f->wire == WIRE_VARINT && f->number == 24) {
        m->treat_whitespace_as_suffix = f->value != 0;
    } else if (f->wire == WIRE_VARINT && f->number == 35) {
        m->byte_fallback = f->value != 0;
    } else if (f->wire == WIRE_BYTES && f->number == 44) {
        m->unk_surface = f->span;
    } else if (f->wire == WIRE_BYTES && f->number == 46) {
        m->bos_piece = f->span;
    } else if (f->wire == WIRE_BYTES && f->number == 47) {
        m->eos_piece = f->span;
    } else if (f->wire == WIRE_BYTES && f->number == 48) {
        m->pad_piece = f->span;
    }
    return 0;
}

static int on_normalizer_field(struct reader *r, const struct field *f, void *target)
{
    struct mb_spm_normalizer_spec *spec = target;

    (void)r;
    if (f->number == 2 && f->wire == WIRE_BYTES)
        spec->charsmap = f->span;
    else if (f->number == 3 && f->wire == WIRE_VARINT)
        spec->add_dummy_prefix = f->value != 0;
    else if (f->number == 4 && f->wire == WIRE_VARINT)
        spec->remove_extra_whitespaces = f->value != 0;
    else if (f->number == 5 && f->wire == WIRE_VARINT)
        spec->escape_whitespaces = f->value != 0;
    return 0;
}

static int add_piece(struct reader *r, struct mb_spm_span message)
{
    struct mb_spm_model *m = r->m;
    struct mb_spm_piece piece = {.type = MB_SPM_NORMAL};
    int rc = walk(r, message, on_piece_field, &piece);

    if (rc != 0)
        return rc;
    if (m->n_pieces == r->cap) {
        size_t cap = r->cap > 0 ? 2 * r->cap : 4096;
        struct mb_spm_piece *pieces = mb_reallocarray(m->pieces, cap, sizeof(*pieces));
        if (pieces == NULL)
            return mb_err_set(r->err, MB_ENOMEM, "out of memory");
        m->pieces = pieces;
        r->cap = cap;
    }
    m->pieces[m->n_pieces++] = piece;
    return 0;
}

static int on_model_field(struct reader *r, const struct field *f, void *target)
{
    struct mb_spm_model *m = target;

    if (f->wire != WIRE_BYTES)
        return 0;
    switch (f->number) {
    case 1:
        return add_piece(r, f->span);
    case 2:
        return walk(r, f->span, on_trainer_field, m);
    case 3:
        return walk(r, f->span, on_normalizer_field, &m->normalizer);
    case 5:
        return walk(r, f->span, on_normalizer_field, &m->denormalizer);
    default:
        return 0;
    }
}

static struct mb_spm_span literal(const char *s)
{
    return (struct mb_spm_span){(const uint8_t *)s, strlen(s)};
}

int mb_spm_model_parse(const uint8_t *bytes, size_t n, struct mb_spm_model *m, struct mb_err *err)
{
    static const struct mb_spm_normalizer_spec by_default = {
        .add_dummy_prefix = 1, .remove_extra_whitespaces = 1, .escape_whitespaces = 1};
    struct reader r = {.start = bytes, .m = m, .err = err};
    int rc;

    *m = (struct mb_spm_model){.algorithm = MB_SPM_UNIGRAM,
                               .unk_surface = literal(" \xe2\x81\x87 "), /* U+2047 */
                               .bos_piece = literal("<s>"),
                               .eos_piece = literal("</s>"),
                               .pad_piece = literal("<pad>"),
                               .normalizer = by_default,
                               .denormalizer = by_default};
    rc = walk(&r, (struct mb_spm_span){bytes, n}, on_model_field, m);
    if (rc == 0 && m->n_pieces == 0)
        rc = mb_err_set(err, MB_ECORRUPT, "no pieces; is this a SentencePiece model?");
    if (rc != 0)
        mb_spm_model_close(m);
    return rc;
}

void mb_spm_model_close(struct mb_spm_model *m)
{
    mb_free(m->pieces);
    *m = (struct mb_spm_model){0};
}
