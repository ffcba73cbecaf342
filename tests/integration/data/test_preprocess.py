"""run_preprocess against Python's json, tiktoken and reference.py's writer, byte for byte.

Usage: test_preprocess.py RUN_PREPROCESS
"""

import gzip
import json
import os
import random
import re
import subprocess
import sys
import tempfile

import gpt2
import reference_files as reference

RUN = sys.argv[1]
VOCAB = gpt2.VOCAB
ENCODING = gpt2.encoding()
EOD = 50256


def run(folder, data, *args, name="in.jsonl", keys=("text",), workers=2):
    path = os.path.join(folder, name)
    with open(path, "wb") as f:
        f.write(gzip.compress(data) if name.endswith(".gz") else data)
    return path, subprocess.run(
        [RUN, "--input", path, "--output-prefix", folder + "/out", "--vocab-file", VOCAB + "/vocab.json",
         "--merge-file", VOCAB + "/merges.txt", "--workers", str(workers), "--json-keys", *keys, *args],
        capture_output=True, text=True)


def expected(lines, key, append_eod):
    documents = []
    for line in lines:
        value = json.loads(line)[key]
        texts = value if isinstance(value, list) else [value]
        document = [ids for ids in (ENCODING.encode_ordinary(t) for t in texts) if ids]
        if document and append_eod:
            document[-1] = document[-1] + [EOD]
        documents.append(document)
    return documents


def random_lines(rng, n):
    alphabet = "abc  DE'\"\\/\n\t12é中🙂\u2028\x7f.,-"
    lines = []
    for i in range(n):
        text = lambda: "".join(rng.choice(alphabet) for _ in range(rng.choice([0, 3, 40, 900])))
        row = {"id": i, "x": [{"text": [None, True, 1.5e-3]}], "text": rng.choice([text(), [text(), "", text()], []]),
               "other": text()}
        keys = list(row)
        rng.shuffle(keys)
        lines.append(json.dumps({k: row[k] for k in keys}, ensure_ascii=rng.random() < 0.5))
    return lines


def check(folder, lines, append_eod, name, workers, ending):
    data = ("\n".join(lines) + ending).encode()
    args = ("--append-eod",) if append_eod else ()
    path, done = run(folder, data, "--log-interval", "100", *args, name=name, keys=("text", "other"), workers=workers)
    assert done.returncode == 0, done.stderr
    for key in ("text", "other"):
        reference.write_index(folder + "/want", expected(lines, key, append_eod), 50257)
        for end in (".bin", ".idx"):
            ours = open(f"{folder}/out_{key}_document{end}", "rb").read()
            assert ours == open(folder + "/want" + end, "rb").read(), (key, end, name, workers)
    out = done.stdout.splitlines()
    assert out[0] == "Opening " + path and re.fullmatch(r"Time to startup: [0-9.e-]+", out[1]), out
    reports = done.stderr.splitlines()
    assert len(reports) == len(lines) // 100, reports
    for i, report in enumerate(reports):
        assert re.fullmatch(rf"Processed {100 * (i + 1)} documents \([0-9.e+-]+ docs/s, [0-9.e+-]+ MB/s\)\.", report)


def check_refusals(folder):
    """A line is refused by us if and only if Python refuses it."""
    bad = [b'{"text": "a"', b'{"text": "\xff"}', b'{"text": "\\ud800"}', b'{"text": 1}', b'{"t": "a"}', b"", b"[]",
           b'{"text": "a"}x', b'{"text": "\x01"}', b'{"text": "a", }', b'{"text": "\\q"}', b'{"text": "a" "b"}']
    good = [b'{"text": "a", "n": NaN}', b'  {"text": "a"}  ', b'{"text": "1", "text": "2"}', b'{"text": "\x7f"}']
    for line in bad + good:
        try:
            expected([line.decode()], "text", False)
            refused = False
        except (ValueError, KeyError, TypeError, UnicodeError):
            refused = True
        _, done = run(folder, b'{"text": "first"}\n' + line + b"\n")
        if line == b'{"text": "\\ud800"}':
            refused = True  # tiktoken replaces it; Megatron-LM's own tokenizer cannot encode it
        assert (done.returncode != 0) == refused, (line, done)
        if refused:
            assert f"in.jsonl:2: " in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not [n for n in os.listdir(folder) if ".tmp" in n]


def main():
    rng = random.Random(3)
    with tempfile.TemporaryDirectory() as folder:
        check(folder, random_lines(rng, 999), True, "in.jsonl", 1, "\n")
        check(folder, random_lines(rng, 5000), True, "in.jsonl", 3, "")
        check(folder, random_lines(rng, 1000), False, "in.jsonl.gz", 2, "\n")
        big = [json.dumps({"text": "word " * 700_000, "other": ""}), json.dumps({"text": "a", "other": "é" * 100_000})]
        check(folder, big * 2, True, "in.jsonl", 2, "\r\n")
        check_refusals(folder)
        _, done = run(folder, b"")
        assert done.returncode == 0
        assert reference.read_index(folder + "/out_text_document") == []
    print("files equal")


main()
