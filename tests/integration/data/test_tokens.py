"""dump_tokens against tiktoken and Hugging Face's tokenizers, id by id.

Usage: test_tokens.py DUMP_TOKENS FAMILY PART... [--all]

FAMILY is a name of families.py, PART one of corpus, strings, points, long. Without --all the corpus is a sample of 20 MB
(its lines are ordered by hash), the code points stand in fewer contexts, most of them for the faster peer only, and a peer
that has answered the same question before is not asked again (known_answers.py); with --all both peers take everything.
"""

import itertools
import json
import os
import random
import resource
import struct
import subprocess
import sys

import families
import gpt2
from known_answers import KnownAnswers

DUMP, FAMILY = sys.argv[1], families.by_name(sys.argv[2])
ALL = "--all" in sys.argv
CORPUS = gpt2.CACHE + "/corpus-240mb.jsonl"  # made by tools/make-corpus --languages
SAMPLE_BYTES = 20_000_000
FASTEST = next(p for p in ("tiktoken", "tokenizers") if p in FAMILY.peers)
KNOWN = KnownAnswers(FAMILY)
total = 0


def raw(texts):
    """dump_tokens' answer to byte strings, and the CPU seconds of the process."""
    records = b"".join(struct.pack("<I", len(t)) + t for t in texts)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([DUMP, *(["--lossy"] if FAMILY.is_lossy else []), *FAMILY.dump], input=records,
                          capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        sys.exit(done.stderr.decode() or f"dump_tokens: status {done.returncode}")
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def ids_of(answer):
    out, at = [], 0
    while at < len(answer):
        (n,) = struct.unpack_from("<I", answer, at)
        out.append(list(struct.unpack_from(f"<{n}i", answer, at + 4)))
        at += 4 + 4 * n
    return out


def ours(texts):
    return ids_of(raw(texts)[0])


def check(name, texts, peers=None):
    global total
    got, _ = raw([t.encode() for t in texts])
    asked = [peer for peer in peers or FAMILY.peers if ALL or not KNOWN.says(peer, texts, got)]
    ids_got = ids_of(got) if asked else None
    for peer in asked:
        assert len(ids_got) == len(texts), name
        for text, ids, want in zip(texts, ids_got, FAMILY.peers[peer](texts)):
            if ids != want:
                report(name, peer, text, ids, want)
        KNOWN.keep(peer, texts, got)
    total += sum(len(t.encode()) for t in texts)


def report(name, peer, text, ids, want):
    """The shortest end of the text that still differs tells most."""
    i = next((i for i, (a, b) in enumerate(zip(ids, want)) if a != b), min(len(ids), len(want)))
    sys.exit(f"{FAMILY.name}, {name}: {text[:60]!r}... token {i}: {ids[i:i+6]}, {peer} {want[i:i+6]}\n"
             f"{shortened(text, peer)!r} is {ours([shortened(text, peer).encode()])[0]}, "
             f"{peer} {FAMILY.peers[peer]([shortened(text, peer)])[0]}")


def shortened(text, peer):
    def differs(t):
        return ours([t.encode()])[0] != FAMILY.peers[peer]([t])[0]

    size = len(text) // 2
    while size > 0 and len(text) < 2_000_000:
        at = 0
        while at < len(text):
            less = text[:at] + text[at + size :]
            if differs(less):
                text = less
            else:
                at += size
        size //= 2
    return text


CONTEXTS = ("a{}b", "'{}s {}'s", "1{}2", "  {}  {}", "A{}\u0301 {}É", " {}", "{} x", "{}'s!", "\n{}\n", ".{}.", "{}{}\r\n{}")


def code_points(rng):
    del rng
    points = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    contexts = CONTEXTS if ALL else CONTEXTS[:5]
    for k, context in enumerate(contexts):
        texts = ["\n\n.a".join(context.replace("{}", c) for c in points[i : i + 997])
                 for i in range(0, len(points), 997)]
        check(f"every code point in {context!r}", texts, None if ALL or k == 4 else [FASTEST])
    check("every code point alone", points, None if ALL else [FASTEST])
    print(f"every code point alone and in {len(contexts)} contexts: equal", flush=True)


def random_texts(rng):
    def unicode():
        return chr(rng.choice([rng.randrange(0x250), rng.randrange(0x3000), rng.randrange(0xE000, 0x20000)]))

    pools = ["abc ABC'sd're123 \t\n.,!", "'stmdrevl ", "'sSſtTmMdDrReEvVlLK\u212a ", "aA1 \r\n/.", "aǅʰªA\u0301z'Sß ",
             " \n\t\r\x0b\x0c\u00a0\u2003\u3000\x85\x1c\u2028", "aé中ыए́🙂\u200d1²½٣ ", "e\u0301e\u0323\u0302가각ᄀ\u1161\u11a8é",
             "".join(unicode() for _ in range(500)).encode("utf-8", "replace").decode()]
    texts = []
    for _ in range(40000 if ALL else 8000):
        pool = rng.choice(pools)
        texts.append("".join(rng.choice(pool) for _ in range(rng.randrange(60))))
    check("random Unicode", texts)
    check("random bytes, replaced as a decoder does",
          [rng.randbytes(rng.randrange(200)).decode("utf-8", "replace") for _ in range(20000 if ALL else 4000)])
    check("words cut at every end", ["don't we'll I've THEY'RE   x"[:i] for i in range(30)])
    check("every short string", ["".join(s) for n in range(5) for s in itertools.product("a1' \n.", repeat=n)])
    check("special strings", ["<|endoftext|>", "a<|endoftext|> b<|endoftext|><|end_of_text|>", "<|im_start|>x", "<s></s>",
                              "<|endoftext", "<|begin_of_text|>a <|endofprompt|>", " <|im_end|> \n<|eot_id|>"])
    if not FAMILY.is_lossy:  # bytes that are no UTF-8 have no peer: dump_tokens decodes them again
        ours([rng.randbytes(rng.randrange(2000)) for _ in range(2000)])
    print("random and short strings: equal", flush=True)


LONG = {"no space": "etaoinshrdlucmfw", "one letter": "a", "one sign": "=", "an accent": "é", "one ideograph": "漢",
        "emoji": "🙂👩\u200d🚀🇩🇪", "line ends": "\n", "returns": "\r\n", "spaces": " ", "digits": "0123456789",
        "apostrophes": "'", "mixed white space": " \t\n\u3000", "combining marks": "\u0301\u0323"}
DEEP = {"line ends", "returns", "spaces", "mixed white space"}  # white space in which peers' engines overflow or crawl


def long_texts(rng):
    """Equal where a peer gets through; never slower than n log n: eight times the text, at most sixteen times the CPU."""
    for name, alphabet in LONG.items():
        def text(n_bytes):
            unit = len(alphabet.encode())
            if name in ("no space", "digits", "mixed white space", "combining marks"):
                return "".join(rng.choice(alphabet) for _ in range(n_bytes * len(alphabet) // unit))
            return alphabet * (n_bytes // unit)

        check(name, [text(20_000 if name in DEEP else 1_000_000)], [FASTEST])
        check(name, [text(20_000)])
        _, idle = raw([])
        small, large = text(1_000_000).encode(), text(8_000_000).encode()
        _, once = raw([small])
        _, eight = raw([large])
        once, eight = max(once - idle, 0.1), eight - idle  # below that the clock is noise
        assert eight < 16 * once, f"{FAMILY.name}, {name}: 1 MB {once:.2f} s, 8 MB {eight:.2f} s of CPU"
        assert eight < 12, f"{FAMILY.name}, {name}: 8 MB in {eight:.2f} s of CPU"
    print(f"{len(LONG)} kinds of text without a boundary: equal, and at most n log n", flush=True)


def corpus(rng):
    del rng
    if not os.path.exists(CORPUS):
        sys.exit(f"no corpus {CORPUS}: tools/test makes it, or tools/make-corpus --languages {CORPUS}")
    done, batch, size = 0, [], 0
    with open(CORPUS, encoding="utf-8") as f:
        for line in f:
            batch.append(json.loads(line)["text"])
            size += len(line)
            if size > 4_000_000:
                check(f"corpus from {done}", batch)
                done, batch, size = done + len(batch), [], 0
                if not ALL and total > SAMPLE_BYTES:
                    break
    if batch:
        check(f"corpus from {done}", batch)
    print(f"{done + len(batch)} documents of the corpus: equal", flush=True)


PARTS = {"corpus": corpus, "strings": random_texts, "points": code_points, "long": long_texts}


def main():
    for part in (a for a in sys.argv[3:] if a != "--all"):
        PARTS[part](random.Random(11))
    print(f"{FAMILY.name}: {total / 1e6:.0f} MB of text: every token equal to {' and '.join(FAMILY.peers)}"
          f" ({KNOWN.asked} answers asked for, {KNOWN.remembered} remembered)")


main()
