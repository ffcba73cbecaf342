"""`mobula preprocess` against files that Megatron-LM's own classes write: its tokenizers and IndexedDatasetBuilder, driven
line by line as tools/preprocess_data.py does it. Whole files are compared.

Usage: test_megatron.py MOBULA gpt2|llama3 MEGABYTES     with the Python of torch-python
"""

import json
import os
import subprocess
import sys
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

from megatron.core.datasets import indexed_dataset  # noqa: E402
from megatron.core.tokenizers.text.libraries import HuggingFaceTokenizer, MegatronHFTokenizer  # noqa: E402

CACHE = os.environ.get("MOBULA_CACHE", os.path.expanduser("~/.cache/mobula"))
VOCAB = CACHE + "/gpt2-vocab"
LLAMA3 = CACHE + "/tokenizers/llama3"
CORPUS = CACHE + "/corpus-240mb.jsonl"
ODD = [{"text": ""}, {"text": ["Two sentences. ", "", "One document."]}, {"text": []}, {"text": ["", ""]},
       {"text": "a\u2028b\x85c\r\n\td", "text2": 1}]


def gpt2():
    """Its tokenizer is named "gpt2" to the hub even when the files are given; a folder of that name is taken instead."""
    os.symlink(CACHE + "/tokenizers/gpt2", "gpt2")
    return (MegatronHFTokenizer("GPT2BPETokenizer", vocab_file=VOCAB + "/vocab.json", merges_file=VOCAB + "/merges.txt",
                                use_fast=True),
            ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", VOCAB + "/vocab.json",
             "--merge-file", VOCAB + "/merges.txt"])


def llama3():
    return (HuggingFaceTokenizer(LLAMA3, use_fast=True),
            ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", LLAMA3])


def write_lines(path, megabytes):
    """A special string in a text is left out: GPT2BPETokenizer's treatment of it changed between Megatron's versions."""
    size = 0
    with open(CORPUS, encoding="utf-8") as source, open(path, "w", encoding="utf-8") as target:
        for row in ODD:
            target.write(json.dumps(row) + "\n")
        for line in source:
            if "<|" not in line:
                target.write(line)
                size += len(line.encode())
            if size > megabytes * 1e6:
                break


def megatron(tokenizer, path, prefix):
    builder = indexed_dataset.IndexedDatasetBuilder(
        prefix + ".bin", dtype=indexed_dataset.DType.optimal_dtype(tokenizer.vocab_size))
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            text = json.loads(line)["text"]
            document, lengths = [], []
            for ids in (tokenizer.text_to_ids(t) for t in (text if isinstance(text, list) else [text])):
                if ids:
                    document += ids
                    lengths.append(len(ids))
            if document:
                document.append(tokenizer.eod)
                lengths[-1] += 1
            builder.add_document(document, lengths)
    builder.finalize(prefix + ".idx")


def main():
    program, name, megabytes = sys.argv[1], sys.argv[2], float(sys.argv[3])
    program = os.path.abspath(program)
    with tempfile.TemporaryDirectory(prefix="mb-megatron-") as folder:
        os.chdir(folder)
        tokenizer, flags = {"gpt2": gpt2, "llama3": llama3}[name]()
        write_lines("in.jsonl", megabytes)
        megatron(tokenizer, "in.jsonl", "theirs")
        subprocess.run([program, "preprocess", "--input", "in.jsonl", "--output-prefix", "ours", "--append-eod",
                        "--workers", "3", *flags], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for end in (".bin", ".idx"):
            with open("theirs" + end, "rb") as a, open("ours_text_document" + end, "rb") as b:
                theirs, ours = a.read(), b.read()
            assert theirs == ours, f"{name}{end}: {len(theirs)} and {len(ours)} bytes, first difference at " + str(
                next((i for i, (x, y) in enumerate(zip(theirs, ours)) if x != y), min(len(theirs), len(ours))))
            print(f"{name}{end}: {len(ours)} bytes identical")
        os.chdir("/")


main()
