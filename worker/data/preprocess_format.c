/* Megatron-LM's progress lines, with numbers as Python prints them. And the lines for people: a
 * bar, the totals. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "worker/data/preprocess_private.h"
#include "worker/data/repr.h"

char *mb_preprocess_progress_line(const struct mb_preprocess_progress *p, char *out)
{
    char documents[32];
    char megabytes[32];

    mb_repr_double((double)p->n_documents / p->elapsed_s, documents);
    mb_repr_double((double)p->json_chars / p->elapsed_s / 1024 / 1024, megabytes);
    snprintf(out, MB_PREPROCESS_LINE_MAX, "Processed %llu documents (%s docs/s, %s MB/s).",
             (unsigned long long)p->n_documents, documents, megabytes);
    return out;
}

char *mb_preprocess_startup_line(double startup_s, char *out)
{
    char seconds[32];

    snprintf(out, MB_PREPROCESS_LINE_MAX, "Time to startup: %s",
             mb_repr_double(startup_s, seconds));
    return out;
}

/* ---- for people ---- */

static double per_second(double n, const struct mb_preprocess_progress *p)
{
    return p->elapsed_s > 0 ? n / p->elapsed_s : 0;
}

/* "950", "12.3k", "4.56M", "7.89G". */
static char *short_count(double v, char out[24])
{
    static const char units[] = " kMGT";
    size_t unit = 0;

    while (v >= 999.5 && units[unit + 1] != '\0') {
        v /= 1000;
        unit++;
    }
    if (unit == 0)
        snprintf(out, 24, "%.0f", v);
    else
        snprintf(out, 24, "%.*f%c", v < 9.995 ? 2 : v < 99.95 ? 1 : 0, v, units[unit]);
    return out;
}

/* "1:02:03", "2:03". */
static char *clock_text(double seconds, char out[24])
{
    unsigned long s = seconds < 1e8 ? (unsigned long)(seconds + 0.5) : 100000000UL;

    if (s >= 3600)
        snprintf(out, 24, "%lu:%02lu:%02lu", s / 3600, s / 60 % 60, s % 60);
    else
        snprintf(out, 24, "%lu:%02lu", s / 60, s % 60);
    return out;
}

static int put_bar(char *out, size_t size, unsigned width, double part)
{
    unsigned full = (unsigned)(part * width);

    return snprintf(out, size, "[%.*s%.*s] ", (int)full,
                    "##################################################", (int)(width - full),
                    "..................................................");
}

char *mb_preprocess_bar_line(const struct mb_preprocess_progress *p, unsigned columns, char *out)
{
    enum { BAR_MAX = 50, TEXT_COLUMNS = 78 };
    char documents[24], rate[24], tokens[24], left[24] = "?";
    double part =
        p->input_bytes_total > 0 ? (double)p->input_bytes_done / (double)p->input_bytes_total : 0;
    int n = 0;

    part = part > 1 ? 1 : part;
    if (p->input_bytes_total > 0 && columns > TEXT_COLUMNS + 4) {
        unsigned width = columns - TEXT_COLUMNS - 3;
        n = put_bar(out, MB_PREPROCESS_LINE_MAX, width < BAR_MAX ? width : BAR_MAX, part);
    }
    if (p->input_bytes_done > p->input_bytes_before && p->input_bytes_total >= p->input_bytes_done)
        clock_text(p->run_s * (double)(p->input_bytes_total - p->input_bytes_done) /
                       (double)(p->input_bytes_done - p->input_bytes_before),
                   left);
    if (p->input_bytes_total > 0)
        n += snprintf(out + n, MB_PREPROCESS_LINE_MAX - (size_t)n, "%3.0f %% ", 100 * part);
    snprintf(out + n, MB_PREPROCESS_LINE_MAX - (size_t)n,
             "%s docs, %s docs/s, %.1f MB/s, %s tokens/s, ETA %s",
             short_count((double)p->n_documents, documents),
             short_count(per_second((double)p->n_documents, p), rate),
             per_second((double)p->text_bytes, p) / 1e6,
             short_count(per_second((double)p->n_tokens, p), tokens), left);
    if (columns > 1 && strlen(out) >= columns)
        out[columns - 1] = '\0';
    return out;
}

char *mb_preprocess_total_line(const struct mb_preprocess_progress *p, char *out)
{
    int n =
        snprintf(out, MB_PREPROCESS_LINE_MAX,
                 "Done: %llu documents, %llu tokens, %.1f MB of text in %.2f s "
                 "(%.1f docs/s, %.1f MB/s, %.0f tokens/s)",
                 (unsigned long long)p->n_documents, (unsigned long long)p->n_tokens,
                 (double)p->text_bytes / 1e6, p->elapsed_s, per_second((double)p->n_documents, p),
                 per_second((double)p->text_bytes, p) / 1e6, per_second((double)p->n_tokens, p));

    if (p->n_bad_lines > 0)
        n += snprintf(out + n, MB_PREPROCESS_LINE_MAX - (size_t)n, ", %llu bad lines skipped",
                      (unsigned long long)p->n_bad_lines);
    if (p->n_repaired_lines > 0)
        snprintf(out + n, MB_PREPROCESS_LINE_MAX - (size_t)n, ", %llu lines were no UTF-8",
                 (unsigned long long)p->n_repaired_lines);
    return out;
}
