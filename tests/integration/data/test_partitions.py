"""--partitions against megatron-core's own IndexedDatasetBuilder: each partition built by it, then merged by
its add_index, as tools/preprocess_data.py does, equals our files byte for byte.

Usage: test_partitions.py MOBULA
"""

import json
import pathlib
import random
import resource
import subprocess
import sys
import tempfile

import torch
from megatron.core.datasets import indexed_dataset

MOBULA = sys.argv[1]


def build(prefix, rows):
    """The loop of Partition.process_json_file with a tokenizer that knows numbers."""
    builder = indexed_dataset.IndexedDatasetBuilder(prefix + ".bin", dtype=indexed_dataset.DType.optimal_dtype(1001))
    for row in rows:
        ids, lengths = [], []
        for text in row["text"]:
            ids += [int(x) for x in text.split(" ")]
            lengths.append(len(text.split(" ")))
        if ids:
            ids.append(1000)
            lengths[-1] += 1
        builder.add_document(torch.tensor(ids, dtype=torch.int64), lengths)
    builder.finalize(prefix + ".idx")


def merge(prefix, parts):
    builder = indexed_dataset.IndexedDatasetBuilder(prefix + ".bin", dtype=indexed_dataset.DType.optimal_dtype(1001))
    for part in parts:
        builder.add_index(part)
    builder.finalize(prefix + ".idx")


def preprocess(folder, name, prefix, n, **more):
    done = subprocess.run([MOBULA, "preprocess", "--input", folder / name, "--output-prefix", folder / prefix, "--tokenizer-type",
                           "NullTokenizer", "--vocab-size", "1000", "--append-eod", "--partitions", str(n), "--workers", str(n)],
                          capture_output=True, text=True, **more)
    assert more or done.returncode == 0, done
    return done


def check_many(folder, rows):
    """400 partitions are 1,201 open files at a time, more than a shell allows without being asked. (Megatron-LM's merge takes a
    minute for them: compared is the same input in that order.)"""
    n = 400
    soft, hard = 1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert hard >= 2000, hard
    (folder / "sorted.jsonl").write_text("".join(json.dumps(r) + "\n" for i in range(n) for r in rows[i::n]))
    preprocess(folder, "sorted.jsonl", "want", 1)
    done = preprocess(folder, "in.jsonl", "got", n, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)))
    assert done.returncode == 0, done
    for end in (".bin", ".idx"):
        want = (folder / f"want_text_document{end}").read_bytes()
        assert (folder / f"got_text_document{end}").read_bytes() == want, end
    before = sorted(folder.iterdir())
    done = preprocess(folder, "in.jsonl", "got", n, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft)))
    assert done.returncode == 73 and "1265 open files and 1024 are allowed" in done.stderr, done
    assert sorted(folder.iterdir()) == before


def main():
    rng = random.Random(5)
    text = lambda: " ".join(str(rng.randrange(1000)) for _ in range(rng.randrange(1, 300)))
    rows = [{"text": [text() for _ in range(rng.randrange(4))]} for _ in range(4001)]
    with tempfile.TemporaryDirectory(prefix="mb-partitions-") as folder:
        folder = pathlib.Path(folder)
        (folder / "in.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        for n in (2, 7):
            parts = [str(folder / f"part_{n}_{i}") for i in range(n)]
            for i, part in enumerate(parts):
                build(part, rows[i::n])
            merge(str(folder / "want"), parts)
            preprocess(folder, "in.jsonl", "got", n)
            for end in (".bin", ".idx"):
                want = (folder / f"want{end}").read_bytes()
                assert (folder / f"got_text_document{end}").read_bytes() == want, (n, end)
        check_many(folder, rows)
    print("partitions equal")


main()
