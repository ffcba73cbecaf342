/*
 * The names that checkpoints of Megatron-LM have in them. None of them is ever run: the list is
 * there so that a pickle made for something else is refused as what it is.
 */
#include "worker/checkpoint/megatron/pickle.h"

#include <string.h>

static const char *const NAMES[] = {
    "_codecs\nencode", /* bytes, in protocol 2 */
    "_io\nBytesIO",
    "__builtin__\nbytes",
    "__builtin__\nbytearray",
    "__builtin__\ncomplex",
    "__builtin__\ngetattr", /* members of enumerations, by Python 3.11.0 to 3.11.3 */
    "__builtin__\nset",
    "argparse\nNamespace",
    "collections\nOrderedDict",
    "collections\ndefaultdict",
    "datetime\ntimedelta",
    "numpy\ndtype",
    "numpy\nndarray",
    "numpy._core.multiarray\n_reconstruct",
    "numpy._core.multiarray\nscalar",
    "numpy.core.multiarray\n_reconstruct",
    "numpy.core.multiarray\nscalar",
    "pathlib\nPath",
    "pathlib\nPosixPath",
    "signal\nSignals",
    "torch\nSize",
    "torch\nTensor",
    "torch\ndevice",
    "torch\nBFloat16Storage",
    "torch\nBoolStorage",
    "torch\nByteStorage",
    "torch\nCharStorage",
    "torch\nDoubleStorage",
    "torch\nFloatStorage",
    "torch\nHalfStorage",
    "torch\nIntStorage",
    "torch\nLongStorage",
    "torch\nShortStorage",
    "torch\nbfloat16",
    "torch\nfloat",
    "torch\nfloat16",
    "torch\nfloat32",
    "torch\nfloat64",
    "torch\nfloat8_e4m3fn",
    "torch\nfloat8_e5m2",
    "torch\nhalf",
    "torch\nint32",
    "torch\nint64",
    "torch\nuint8",
    "torch._tensor\n_rebuild_from_type_v2", /* a tensor with attributes */
    "torch._utils\n_rebuild_parameter",
    "torch._utils\n_rebuild_tensor_v2",
    "torch.storage\nUntypedStorage",
};

/* What torch.distributed.checkpoint pickles of its own. */
static const char *const OF_METADATA[] = {
    "torch.distributed.checkpoint.filesystem\n_StorageInfo",
    "torch.distributed.checkpoint.metadata\nBytesStorageMetadata",
    "torch.distributed.checkpoint.metadata\nChunkStorageMetadata",
    "torch.distributed.checkpoint.metadata\nMetadata",
    "torch.distributed.checkpoint.metadata\nMetadataIndex",
    "torch.distributed.checkpoint.metadata\nStorageMeta",
    "torch.distributed.checkpoint.metadata\nTensorProperties",
    "torch.distributed.checkpoint.metadata\nTensorStorageMetadata",
    "torch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.planner\nBytesIOWriteData",
    "torch.distributed.checkpoint.planner\nSavePlan",
    "torch.distributed.checkpoint.planner\nTensorWriteData",
    "torch.distributed.checkpoint.planner\nWriteItem",
    "torch.distributed.checkpoint.planner\nWriteItemType",
    "torch.serialization\n_get_layout",
};

/* Packages whose enumerations and settings move from release to release. */
static const char *const PACKAGES[] = {"megatron.", "transformer_engine."};

static int is_in(const char *const *names, size_t n_names, const char *text, size_t n)
{
    for (size_t i = 0; i < n_names; i++) {
        if (strlen(names[i]) == n && memcmp(names[i], text, n) == 0) {
            return 1;
        }
    }
    return 0;
}

int mb_pickle_name_is_listed(const char *text, size_t n)
{
    if (is_in(NAMES, sizeof NAMES / sizeof NAMES[0], text, n)) {
        return 1;
    }
    for (size_t i = 0; i < sizeof PACKAGES / sizeof PACKAGES[0]; i++) {
        const size_t k = strlen(PACKAGES[i]);
        if (n > k && memcmp(PACKAGES[i], text, k) == 0) {
            return 1;
        }
    }
    return 0;
}

int mb_pickle_name_is_of_metadata(const char *text, size_t n)
{
    return is_in(OF_METADATA, sizeof OF_METADATA / sizeof OF_METADATA[0], text, n);
}
