"""HuggingFaceTokenizer against the package tokenizers, id by id. Usage: test_hf.py DUMP_IDS"""

import os
import random
import struct
import subprocess
import sys
import tempfile

import hf_files
from tokenizers import Tokenizer

DUMP = sys.argv[1]
CACHE = os.environ.get("MOBULA_CACHE", os.path.expanduser("~/.cache/mobula"))
FILES = CACHE + "/tokenizers"  # what tools/fetch-tokenizers leaves there
POINTS = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]


def run(arguments, texts):
    records = b"".join(struct.pack("<I", len(t)) + t for t in (text.encode() for text in texts))
    return subprocess.run([DUMP, *arguments], input=records, capture_output=True)


def ours(arguments, texts):
    """(size of the vocabulary, eod, bos), ids of each text"""
    done = run(arguments, texts)
    if done.returncode != 0:
        sys.exit(f"{arguments}: {done.stderr.decode()}")
    about, at, ids = struct.unpack_from("<Qii", done.stdout), 16, []
    while at < len(done.stdout):
        (n,) = struct.unpack_from("<I", done.stdout, at)
        ids.append(list(struct.unpack_from(f"<{n}i", done.stdout, at + 4)))
        at += 4 + 4 * n
    assert len(ids) == len(texts), arguments
    return about, ids


def check(name, folder, texts, loud=True):
    peer = Tokenizer.from_file(folder + "/tokenizer.json")
    about, got = ours(["HuggingFaceTokenizer", folder], texts)
    for text, ids, want in zip(texts, got, peer.encode_batch_fast(texts)):
        if ids != want.ids:
            pairs = enumerate(zip(ids, want.ids))
            i = next((i for i, (a, b) in pairs if a != b), min(len(ids), len(want.ids)))
            sys.exit(f"{name}: {text[:100]!r}: token {i}: {ids[i:i+6]}, tokenizers {want.ids[i:i+6]}")
    assert about[0] == peer.get_vocab_size(), (name, about)
    if loud:
        print(f"{name}: {len(texts)} texts equal", flush=True)
    return about


def in_context(context, step=997):
    return ["\n\n.a".join(context.format(c, c) for c in POINTS[i : i + step]) for i in range(0, len(POINTS), step)]


MARKS = "".join(map(chr, [*range(0x300, 0x370), 0x3099, 0x309A, *range(0x1161, 0x1176), *range(0x11A7, 0x11C3), 0x9BE, 0x9C7,
                          0x5B0, 0x5B1, 0x94D, 0x653, 0x334, 0x327, 0x1D165, 0x1D16D, 0x7FD, 0x1DF6]))
POOLS = (
    "abc ABC'sd're123 \t\n.,!the quick fox don't 12 345", " \n\t\r\x0b\x0c\u00a0\u2003\u3000\x85\x1c\u180ea1",
    MARKS + "aeiouéAO가나각ᄀᄁकখ\u0344\u0958\u212b\u1e9b\ufb1d\uf900𝅗", "aé中ыए́🙂\u200d1²½٣ ΣſK'S'ſ",
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<s>", "</s>", "<|x|>", "<|y|>", "<|z|>", "fox", "été",
           "e\u0301t\u0065\u0301s", "<pad>", "the", "qz", "a b", "<|", "<|end"]


def random_texts(rng, n):
    texts = ["", " ", "  ", "<s>", "fox", "a" * 500, " " * 300, "\n" * 300, "e" + "\u0301\u0327" * 200]
    for _ in range(n):
        pool = rng.choice(POOLS)
        text = "".join(rng.choice(pool) for _ in range(rng.randrange(50)))
        for _ in range(rng.choice((0, 0, 1, 3))):
            cut = rng.randrange(len(text) + 1)
            text = text[:cut] + rng.choice(("", " ", "  ", "\u3000", "x")) + rng.choice(SPECIAL) + text[cut:]
        texts.append(text)
    return texts


def real_files(rng):
    texts = random_texts(rng, 800)
    wanted = {"gpt2": (50257, 50256), "cl100k": (100261, 100257), "o200k": (200000, 199999), "llama3": (128256, 128001, 128000),
              "qwen3": (151669, 151645, -1)}  # AutoTokenizer's len() and eos_token_id
    for name, about in wanted.items():
        got = check(name, f"{FILES}/{name}", texts)
        assert got[: len(about)] == about, (name, got)
    # The peer's time for a text grows with its square: short texts.
    context = "{}\u0301\u0327"
    check(f"qwen3, normal form of every code point in {context!r}", f"{FILES}/qwen3", in_context(context, 97))
    done = run(["HuggingFaceTokenizer", f"{FILES}/llama2"], [])
    assert done.returncode == 1 and b"byte-level" in done.stderr and b"is not provided" in done.stderr, done.stderr


def made_files(rng, folder):
    texts = random_texts(rng, 25)
    n = 0
    for name, description in hf_files.forms():
        hf_files.write(folder, description)
        check(name, folder, texts, loud=False)
        n += 1
    points = in_context("a{} {}1", 97)
    for name, description in hf_files.sets():
        hf_files.write(folder, description)
        check(name, folder, points)
    print(f"{n} forms of tokenizer.json equal on {len(texts)} texts", flush=True)
    n = 0
    for what, description in hf_files.refused():
        hf_files.write(folder, description)
        done = run(["HuggingFaceTokenizer", folder], [])
        assert done.returncode == 1 and what in done.stderr.decode(), (what, done)
        n += 1
    print(f"{n} forms refused by name")


rng = random.Random(7)
with tempfile.TemporaryDirectory() as temporary:
    made_files(rng, temporary + "/made")
real_files(rng)
