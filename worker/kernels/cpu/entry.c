/*
 * The exported symbol: the best table that this machine can run. MB_HAS_X86_LEVELS is set by the
 * build when the tables of the x86-64 levels v3 (AVX2, FMA) and v4 (AVX-512) were compiled besides
 * the baseline.
 */
#include "worker/kernels/cpu/cpu.h"

struct level {
    const char *name;
    const struct mb_backend *table;
};

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

static struct level best_level(void)
{
#ifdef MB_HAS_X86_LEVELS
    if (runs_v4())
        return (struct level){"AVX-512", &mb_cpu_table_v4};
    if (runs_v3())
        return (struct level){"AVX2", &mb_cpu_table_v3};
#endif
    return (struct level){"baseline", &mb_cpu_table_baseline};
}

const char *mb_cpu_isa(void)
{
    return best_level().name;
}

__attribute__((visibility("default"))) const struct mb_backend *mb_backend_table(void)
{
    return best_level().table;
}
