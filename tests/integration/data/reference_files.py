"""The .idx/.bin format, written again from its description with the standard library alone."""

import struct
from array import array

CODES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}


def write_index(prefix, documents, vocab_size):
    """documents: a list of documents, each a list of sequences, each a list of ids."""
    code = 8 if vocab_size < 65500 else 4
    sequences = [s for d in documents for s in d]
    offsets, entries, at = [], [0], 0
    for s in sequences:
        offsets.append(at)
        at += len(s) * struct.calcsize(CODES[code])
    for d in documents:
        entries.append(entries[-1] + len(d))
    with open(prefix + ".bin", "wb") as f:
        for s in sequences:
            f.write(array(CODES[code], s).tobytes())
    with open(prefix + ".idx", "wb") as f:
        f.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(entries)))
        f.write(array("i", [len(s) for s in sequences]).tobytes())
        f.write(array("q", offsets).tobytes() + array("q", entries).tobytes())


def read_index(prefix):
    data = open(prefix + ".idx", "rb").read()
    raw = open(prefix + ".bin", "rb").read()
    assert data[:9] == b"MMIDIDX\x00\x00"
    version, code, n, n_entries = struct.unpack_from("<QBQQ", data, 9)
    assert version == 1 and len(data) == 34 + 12 * n + 8 * n_entries
    lengths = struct.unpack_from(f"<{n}i", data, 34)
    offsets = struct.unpack_from(f"<{n}q", data, 34 + 4 * n)
    entries = struct.unpack_from(f"<{n_entries}q", data, 34 + 12 * n)
    sequences = [list(struct.unpack_from(f"<{k}{CODES[code]}", raw, o)) for k, o in zip(lengths, offsets)]
    return [sequences[a:b] for a, b in zip(entries, entries[1:])]
