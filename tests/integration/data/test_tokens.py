"""dump_tokens against tiktoken, id by id. Usage: test_tokens.py DUMP_TOKENS"""

import json
import os
import random
import struct
import subprocess
import sys

import gpt2

DUMP = sys.argv[1]
VOCAB = gpt2.VOCAB
CORPUS = gpt2.CACHE + "/corpus-en-24mb.jsonl"  # made by tools/make-corpus
ENCODING = gpt2.encoding()
total = 0


def ours(texts):
    records = b"".join(struct.pack("<I", len(t)) + t for t in texts)
    done = subprocess.run([DUMP, f"{VOCAB}/vocab.json", f"{VOCAB}/merges.txt"], input=records, capture_output=True)
    if done.returncode != 0:
        sys.exit(done.stderr.decode())
    out, at = [], 0
    while at < len(done.stdout):
        (n,) = struct.unpack_from("<I", done.stdout, at)
        out.append(list(struct.unpack_from(f"<{n}i", done.stdout, at + 4)))
        at += 4 + 4 * n
    return out


def check(name, texts):
    global total
    got = ours([t.encode() for t in texts])
    assert len(got) == len(texts), name
    for text, ids in zip(texts, got):
        want = ENCODING.encode_ordinary(text)
        if ids != want:
            i = next((i for i, (a, b) in enumerate(zip(ids, want)) if a != b), min(len(ids), len(want)))
            sys.exit(f"{name}: {text[:80]!r}: token {i}: {ids[i:i+6]}, tiktoken {want[i:i+6]}")
    total += sum(len(t.encode()) for t in texts)
    print(f"{name}: {len(texts)} texts equal", flush=True)


def code_points():
    points = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    for context in ("a{}b", " {}", "1{}2", "{} x", "  {}  {}", "'{}s", "{}'s!", "\n{}\n", ".{}."):
        check(f"every code point in {context!r}",
              ["\n\n.a".join(context.format(c, c) for c in points[i : i + 997]) for i in range(0, len(points), 997)])


def random_texts(rng):
    pools = [
        "abc ABC'sd're123 \t\n.,!", "'stmdrevl ", " \n\t\r\x0b\x0c\u00a0\u2003\u3000\x85\x1c",
        "aé中ыए́🙂\u200d1²½٣ ", "".join(chr(rng.choice([rng.randrange(0x250), rng.randrange(0x3000),
        rng.randrange(0xE000, 0x20000)])) for _ in range(500)),
    ]
    pools[-1] = pools[-1].encode("utf-8", "replace").decode("utf-8", "replace")
    texts = []
    for _ in range(6000):
        pool = rng.choice(pools)
        texts.append("".join(rng.choice(pool) for _ in range(rng.randrange(60))))
    check("random Unicode", texts)
    check("random bytes, replaced as a decoder does",
          [rng.randbytes(rng.randrange(200)).decode("utf-8", "replace") for _ in range(4000)])
    check("words cut at every end", ["don't we'll I've  they're   x"[:i] for i in range(30)])


def long_pieces(rng):
    check("1 MB without a space", ["".join(rng.choice("etaoinshrdlucmfw") for _ in range(1_000_000))])
    check("1 MB of one character", [c * (1_000_000 // len(c.encode())) for c in "a=é漢"])
    check("20 kB of white space", [" " * 20_000])  # at 1 MB tiktoken's own pattern engine overflows its stack


def raw_bytes(rng):
    """Bytes that are no UTF-8 have no peer: nothing may be lost (dump_tokens decodes every record)."""
    ours([rng.randbytes(rng.randrange(2000)) for _ in range(2000)])


def corpus(path):
    texts = [json.loads(line)["text"] for line in open(path, encoding="utf-8")]
    for i in range(0, len(texts), 500):
        check(f"corpus from {i}", texts[i : i + 500])


rng = random.Random(11)
random_texts(rng)
long_pieces(rng)
raw_bytes(rng)
code_points()
if not os.path.exists(CORPUS):
    sys.exit(f"no corpus {CORPUS}: tools/test makes it, or tools/make-corpus {CORPUS}")
corpus(CORPUS)
print(f"{total} bytes of text: every token equal to tiktoken's")
