/* A libnccl.so.2 that has all names and only says a version, STUB_NCCL_VERSION: for the line about
 * one that is too old. */
#include <stdlib.h>

int ncclGetVersion(int *version);
int ncclGetVersion(int *version)
{
    *version = atoi(getenv("STUB_NCCL_VERSION"));
    return 0;
}

#define STUB(name)                                                                                 \
    int nccl##name(void);                                                                          \
    int nccl##name(void)                                                                           \
    {                                                                                              \
        abort();                                                                                   \
    }
STUB(GetUniqueId)
STUB(GetErrorString)
STUB(GetLastError)
STUB(CommInitRankConfig)
STUB(CommGetAsyncError)
STUB(CommFinalize)
STUB(CommDestroy)
STUB(CommAbort)
STUB(AllReduce)
STUB(Reduce)
STUB(ReduceScatter)
STUB(AllGather)
STUB(Broadcast)
STUB(Send)
STUB(Recv)
STUB(GroupStart)
STUB(GroupEnd)
