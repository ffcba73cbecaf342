/*
 * The exported symbol: the best table that this machine can run. MB_HAS_X86_LEVELS is set by the
 * build when the tables of the x86-64 levels v3 (AVX2, FMA) and v4 (AVX-512) were compiled besides
 * the baseline. MOBULA_CPU_ISA (baseline, v3, v4) asks for no more than that level, so that
 * machines of different age can give the same bits and every level can be tested on one machine.
 */
#include <stdlib.h>
#include <string.h>
#include "worker/kernels/cpu/cpu.h"

extern const struct mb_backend mb_cpu_table_baseline;

#ifdef MB_HAS_X86_LEVELS
extern const struct mb_backend mb_cpu_table_v3;
extern const struct mb_backend mb_cpu_table_v4;

/* The features of each level that the compiler may use in it. */
static int runs_v3(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
           __builtin_cpu_supports("popcnt");
}

static int runs_v4(void)
{
    return runs_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}
#endif

struct level {
    const char *name;
    const struct mb_backend *table;
    int (*runs)(void);
};

/* Best first; the last one runs everywhere. */
static const struct level LEVELS[] = {
#ifdef MB_HAS_X86_LEVELS
    {"v4", &mb_cpu_table_v4, runs_v4},
    {"v3", &mb_cpu_table_v3, runs_v3},
#endif
    {"baseline", &mb_cpu_table_baseline, NULL},
};
enum { N_LEVELS = sizeof(LEVELS) / sizeof(LEVELS[0]) };

/* Index of the level that MOBULA_CPU_ISA names, 0 without it, N_LEVELS if there is none of that
 * name. */
static int asked_level(void)
{
    const char *name = getenv("MOBULA_CPU_ISA");
    int i = 0;
    while (name != NULL && i < N_LEVELS && strcmp(LEVELS[i].name, name) != 0)
        i++;
    return i;
}

static const struct level *best_level(void)
{
    int i = asked_level() % N_LEVELS;
    while (LEVELS[i].runs != NULL && !LEVELS[i].runs())
        i++;
    return &LEVELS[i];
}

int mb_cpu_isa(const char **name, struct mb_err *err)
{
    if (asked_level() == N_LEVELS)
        return mb_err_set(err, MB_EINVAL,
                          "MOBULA_CPU_ISA is '%s' and must be one of baseline, v3, v4",
                          getenv("MOBULA_CPU_ISA"));
    *name = best_level()->name;
    return 0;
}

__attribute__((visibility("default"))) const struct mb_backend *mb_backend_table(void)
{
    return best_level()->table;
}
