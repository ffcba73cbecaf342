"""`mobula tokenizer encode|decode|inspect` against tiktoken. Usage: test_tokenizer_cli.py MOBULA"""

import json
import os
import random
import subprocess
import sys

import gpt2

MOBULA = sys.argv[1]
FLAGS = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", gpt2.VOCAB + "/vocab.json",
         "--merge-file", gpt2.VOCAB + "/merges.txt"]
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]
ENCODING = gpt2.encoding()


def mobula(verb, data, *args, flags=FLAGS):
    data = data if isinstance(data, bytes) else data.encode()
    return subprocess.run([MOBULA, "tokenizer", verb, *flags, *args], input=data, capture_output=True)


def texts(rng):
    alphabet = "abc  DE'\"\\/\n\t\r\0\x1f12é中🙂\u2028\x7f.,-"
    return ["".join(rng.choice(alphabet) for _ in range(rng.choice([0, 1, 5, 60, 3000]))) for _ in range(700)]


def check_encode(rng):
    all_texts = texts(rng)
    lines = "".join(json.dumps(t, ensure_ascii=rng.random() < 0.5) + "\n" for t in all_texts)
    done = mobula("encode", lines[:-1])  # the last line needs no newline
    assert done.returncode == 0, done.stderr
    got = [json.loads(x) for x in done.stdout.splitlines()]
    assert got == [ENCODING.encode_ordinary(t) for t in all_texts]
    back = mobula("decode", done.stdout)
    assert back.returncode == 0, back.stderr
    assert [json.loads(x) for x in back.stdout.decode().split("\n")[:-1]] == all_texts


def check_decode(rng):
    """Ids whose bytes are no UTF-8 decode as CPython's errors="replace" has it."""
    rows = [[rng.randrange(50257) for _ in range(rng.randrange(40))] for _ in range(500)]
    done = mobula("decode", "".join(json.dumps(r) + "\n" for r in rows))
    assert done.returncode == 0, done.stderr
    want = [ENCODING.decode(r, errors="replace") for r in rows]
    assert [json.loads(x) for x in done.stdout.decode().split("\n")[:-1]] == want
    broken = next(r for r in rows if "\ufffd" in ENCODING.decode(r, errors="replace"))
    done = mobula("decode", json.dumps([0]) + "\n" + json.dumps(broken) + "\n", "--invalid-utf8", "fail")
    assert done.returncode == 64 and b"stdin:2: " in done.stderr and done.stdout == b'"!"\n', done


def check_refusals(folder):
    for verb, line in (("encode", "[1]"), ("encode", "1"), ("encode", '"a'), ("encode", '"\\ud800"'), ("encode", ""),
                       ("encode", '"a" "b"'), ("decode", '"a"'), ("decode", "[1.5]"), ("decode", "[-1]"),
                       ("decode", "[50257]"), ("decode", "[99999999999]"), ("decode", "[1")):
        good = '"x"' if verb == "encode" else "[87]"
        done = mobula(verb, good + "\n" + line + "\n" + good + "\n")
        assert done.returncode == 64, (verb, line, done)
        assert done.stderr.startswith(b"mobula: stdin:2: ") and done.stderr.count(b"\n") == 1, done.stderr
        assert done.stdout.decode() == ("[87]\n" if verb == "encode" else '"x"\n'), done.stdout
    assert mobula("encode", b'"\xff"\n').returncode == 64
    assert mobula("encode", "1 2\n", flags=NULL).returncode == 64
    assert mobula("encode", '"1 2"\n', flags=NULL).stdout == b"[1, 2]\n"
    assert mobula("encode", "", "--input", folder).returncode == 74
    assert mobula("encode", "", "--input", folder + "/none").returncode == 66
    assert mobula("encode", "", flags=[]).returncode == 64
    with open("/dev/full", "wb") as full:
        done = subprocess.run([MOBULA, "tokenizer", "encode", *FLAGS], input=b'"a"\n', stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 73 and b"stdout" in done.stderr, done


def check_skip():
    """A bad line is answered with null, so that answers stay beside their lines; the first 100 are named, all counted."""
    good = [json.dumps(f"line {i}") for i in range(300)]
    lines = [x for i, g in enumerate(good) for x in ([g, "{", "[1]", '"\\ud800"'][: 1 + (i % 2) * (1 + i % 3)])]
    want = [ENCODING.encode_ordinary(json.loads(x)) if x in good else None for x in lines]
    done = mobula("encode", "\n".join(lines), "--skip-bad-lines")
    assert done.returncode == 0 and [json.loads(x) for x in done.stdout.splitlines()] == want, done
    numbers = [i + 1 for i, x in enumerate(want) if x is None]
    told = done.stderr.decode().splitlines()
    assert len(numbers) > 150 and len(told) == 101, told
    assert all(t.startswith(f"mobula: skipped: stdin:{n}: ") for t, n in zip(told[:100], numbers)), told[:3]
    assert told[-1] == f"mobula: {len(numbers)} bad lines skipped", told[-1]
    done = mobula("decode", "[0]\n[99999]\n[\n[0]\n", "--skip-bad-lines")
    assert done.returncode == 0 and done.stdout == b'"!"\nnull\nnull\n"!"\n', done
    assert b"skipped" not in mobula("encode", '"a"\n', "--skip-bad-lines").stderr


def check_talk():
    """One line in, one line out, before the next is sent."""
    child = subprocess.Popen([MOBULA, "tokenizer", "encode", *FLAGS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    for text in ("Hello world", "", "x" * 200_000, "end"):
        child.stdin.write(json.dumps(text).encode() + b"\n")
        child.stdin.flush()
        assert json.loads(child.stdout.readline()) == ENCODING.encode_ordinary(text)
    child.stdin.close()
    assert child.wait() == 0
    child.stdout.close()


def check_inspect():
    done = mobula("inspect", "", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "type": "GPT2BPETokenizer", "vocab_size": 50257, "eod": {"id": 50256, "text": "<|endoftext|>"}, "bos": None,
        "family": "gpt2", "pattern": gpt2.PATTERN, "added_tokens": []}
    done = mobula("inspect", "")
    assert b"vocab_size   50257\n" in done.stdout and gpt2.PATTERN.encode() in done.stdout
    assert json.loads(mobula("inspect", "", "--json", flags=NULL).stdout)["vocab_size"] == 1001


rng = random.Random(23)
check_encode(rng)
check_decode(rng)
check_refusals(os.path.dirname(os.path.abspath(__file__)))
check_skip()
check_talk()
check_inspect()
print("tokenizer verbs: equal to tiktoken")
