/*
 * --split: "969, 30, 1" becomes shares, shares become cumulative bookends by adding doubles in
 * Megatron-LM's order, bookends become sequence numbers with Python's rounding. Text that has no
 * positive number, more than three, or one like "1.2.3" is MB_EINVAL.
 */
#include <math.h>
#include <string.h>
#include "base/str.h"
#include "worker/data/dataset.h"

const char *mb_split_name(enum mb_split split)
{
    static const char *const names[MB_N_SPLITS] = {"train", "valid", "test"};
    return names[split];
}

/* numpy's pairwise summation: eight running sums in blocks of at most 128. */
static double pairwise_sum(const double *a, size_t n)
{
    double r[8];
    size_t i;
    double sum = 0.0;

    if (n > 128) {
        size_t half = n / 2 - n / 2 % 8;
        return pairwise_sum(a, half) + pairwise_sum(a + half, n - half);
    }
    if (n < 8) {
        for (i = 0; i < n; i++)
            sum += a[i];
        return sum;
    }
    memcpy(r, a, sizeof(r));
    for (i = 8; i < n - n % 8; i += 8) {
        for (size_t k = 0; k < 8; k++)
            r[k] += a[i + k];
    }
    sum = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
    for (; i < n; i++)
        sum += a[i];
    return sum;
}

void mb_normalize(const double *in, size_t n, double *out)
{
    double sum = pairwise_sum(in, n);

    for (size_t i = 0; i < n; i++)
        out[i] = in[i] / sum;
}

static int parse_numbers(const char *text, double out[MB_N_SPLITS], struct mb_err *err)
{
    static const char digits[] = ".0123456789";
    size_t n = 0;
    const char *p = text;

    for (p += strcspn(p, digits); *p != '\0'; p += strcspn(p, digits)) {
        char word[64];
        size_t length = strspn(p, digits);

        if (n == MB_N_SPLITS)
            return mb_err_set(err, MB_EINVAL,
                              "--split %s: more than three numbers; give train,valid,test", text);
        if (length >= sizeof(word))
            return mb_err_set(err, MB_EINVAL, "--split: a number is too long");
        memcpy(word, p, length);
        word[length] = '\0';
        if (mb_parse_double(word, "--split", &out[n], err) != 0) {
            mb_err_wrap(err, "--split %s", text);
            return MB_EINVAL;
        }
        n++;
        p += length;
    }
    return 0;
}

int mb_split_parse(const char *text, struct mb_split_matrix *out, struct mb_err *err)
{
    double numbers[MB_N_SPLITS] = {0};
    double shares[MB_N_SPLITS];
    double at = 0.0;
    int rc = parse_numbers(text, numbers, err);

    if (rc != 0)
        return rc;
    if (!(numbers[0] + numbers[1] + numbers[2] > 0.0))
        return mb_err_set(err, MB_EINVAL,
                          "--split %s: no share is positive; give for example 969,30,1", text);
    mb_normalize(numbers, MB_N_SPLITS, shares);
    for (int i = 0; i < MB_N_SPLITS; i++) {
        out->begin[i] = at;
        at += shares[i];
        out->end[i] = at;
        out->present[i] = out->end[i] > out->begin[i];
    }
    return 0;
}

void mb_split_range(const struct mb_split_matrix *m, enum mb_split split, uint64_t n_sequences,
                    uint64_t *begin, uint64_t *end)
{
    /* rint rounds halves to even in the default rounding mode. A bookend may be a hair over 1. */
    *begin = (uint64_t)rint(m->begin[split] * (double)n_sequences);
    *end = (uint64_t)rint(m->end[split] * (double)n_sequences);
    if (*end > n_sequences)
        *end = n_sequences;
    if (*begin > *end)
        *begin = *end;
}
