/*
 * What NVTX tells a profiler, written to the file that MOBULA_NVTX_RECORD names: "begin NAME" and
 * "end", a line each. The process loads this object through NVTX_INJECTION64_PATH, as it would load
 * a profiler's.
 */
#include <nvtx3/nvToolsExt.h>
#include <stdio.h>
#include <stdlib.h>

static FILE *record;

static int begin(const char *name)
{
    fprintf(record, "begin %s\n", name);
    return 0;
}

static int end(void)
{
    fprintf(record, "end\n");
    return fflush(record);
}

/* What NVTX calls: 1 is success. */
__attribute__((visibility("default"))) int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get)
{
    NvtxFunctionTable functions = NULL;
    unsigned int n = 0;
    const NvtxExportTableCallbacks *callbacks = get(NVTX_ETID_CALLBACKS);
    const char *path = getenv("MOBULA_NVTX_RECORD");
    record = path != NULL ? fopen(path, "we") : NULL;
    if (record == NULL || callbacks == NULL ||
        !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &functions, &n) ||
        n <= NVTX_CBID_CORE_RangePop)
        return 0;
    *functions[NVTX_CBID_CORE_RangePushA] = (NvtxFunctionPointer)begin;
    *functions[NVTX_CBID_CORE_RangePop] = (NvtxFunctionPointer)end;
    return 1;
}
