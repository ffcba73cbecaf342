"""Data as `preprocess` leaves them, made by numpy alone: PREFIX.bin and PREFIX.idx."""

import struct

import numpy as np


def write_documents(prefix, tokens, lengths):
    """One sequence a document, tokens of 16 bits."""
    lengths = np.asarray(lengths, dtype="<i4")
    np.asarray(tokens).astype("<u2").tofile(f"{prefix}.bin")
    offsets = 2 * np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype("<i8")
    with open(f"{prefix}.idx", "wb") as f:
        f.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1) + lengths.tobytes() + offsets.tobytes() +
                np.arange(len(lengths) + 1, dtype="<i8").tobytes())


def write_tokens(prefix, tokens):
    """All in one document."""
    write_documents(prefix, tokens, [len(tokens)])
