"""dump_spm against the SentencePiece package, ids and decoded texts: models trained here with its own trainer, the
Llama-2 vocabulary, and Megatron-LM's three classes on top. Usage: test_sentencepiece.py DUMP_SPM"""

import io
import json
import os
import random
import struct
import subprocess
import sys
import tempfile

import sentencepiece

DUMP = sys.argv[1]
CACHE = os.environ.get("MOBULA_CACHE", os.path.expanduser("~/.cache/mobula"))
LLAMA2 = CACHE + "/tokenizers/llama2/tokenizer.model"  # made by tools/fetch-tokenizers
CORPUS = CACHE + "/corpus-240mb.jsonl"  # made by tools/make-corpus --languages
CORPUS_BYTES = 24 << 20  # of it are read; its lines are in no order
total = 0


def run(kind, model, texts):
    """(size, eod), [(ids, decoded bytes)], CPU seconds"""
    records = b"".join(struct.pack("<I", len(t)) + t for t in texts)
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as answered:
        given.write(records)
        given.seek(0)
        child = subprocess.Popen([DUMP, kind, model], stdin=given, stdout=answered)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode != 0:
            sys.exit(f"dump_spm {kind} {model}: exit {child.returncode}")
        answered.seek(0)
        data = answered.read()
    head, at, out = struct.unpack_from("<2i", data), 8, []
    while at < len(data):
        (n,) = struct.unpack_from("<I", data, at)
        ids = list(struct.unpack_from(f"<{n}i", data, at + 4))
        at += 4 + 4 * n
        (n,) = struct.unpack_from("<I", data, at)
        out.append((ids, data[at + 4 : at + 4 + n]))
        at += 4 + n
    assert len(out) == len(texts), (kind, model)
    return head, out, usage.ru_utime + usage.ru_stime


def check(name, model, peer, texts):
    global total
    _, got, _ = run("model", model, [t.encode() for t in texts])
    for text, (ids, back), want in zip(texts, got, peer.encode(texts)):
        if ids != want:
            i = next((i for i, (a, b) in enumerate(zip(ids, want)) if a != b), min(len(ids), len(want)))
            sys.exit(f"{name}: {text[:80]!r}: token {i}: {ids[i:i+6]}, SentencePiece {want[i:i+6]}")
        if back != peer.decode(want).encode():
            sys.exit(f"{name}: {text[:80]!r} is decoded as {back[:80]}, SentencePiece {peer.decode(want)[:80]!r}")
    total += sum(len(t.encode()) for t in texts)
    print(f"{name}: {len(texts)} texts equal", flush=True)


def random_texts(rng, count):
    pools = [
        "abc ABC'sd're123 \t\n.,!", "the  of and to in  \u2581\u2581 abab", "aé中ыա\u0301🙂\u200d²½٣ ﬁ①Ａｂ\u3000",
        " \n\t\r\x0b\x0c\u00a0\u2003\u3000\x85\u2581", "éèàü ñçß ÀÉ \u0308\u0301\u0302aeo", "\0\x01\x7f a\ufffd",
    ]
    texts = ["", " ", "  ", "\u2581", " \u2581 ", "\u2581 a \u2581", "a", "a ", " a", "<s> </s><unk><0x41> <sep>abc"]
    for _ in range(count):
        pool = rng.choice(pools)
        texts.append("".join(rng.choice(pool) for _ in range(rng.randrange(60))))
    texts += [rng.randbytes(rng.randrange(200)).decode("utf-8", "replace") for _ in range(count // 4)]
    return texts


def code_points(context):
    points = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    return ["".join(context.format(c) for c in points[i : i + 499]) for i in range(0, len(points), 499)]


LLAMA = dict(byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False)
USER = ["<sep>", "▁▁", "ab", "abc", "the▁of", "é", "in ", "  "]
MODELS = {
    "BPE as Llama-2": dict(model_type="bpe", split_digits=True, allow_whitespace_only_pieces=True, **LLAMA),
    "BPE by default": dict(model_type="bpe"),
    "BPE, nfkc, bytes": dict(model_type="bpe", byte_fallback=True, normalization_rule_name="nfkc"),
    "BPE, case folded, no dummy prefix": dict(
        model_type="bpe", normalization_rule_name="nmt_nfkc_cf", add_dummy_prefix=False),
    "BPE across spaces": dict(model_type="bpe", split_by_whitespace=False, **LLAMA),
    "BPE, space behind words": dict(model_type="bpe", treat_whitespace_as_suffix=True, byte_fallback=True),
    "BPE, user-defined": dict(model_type="bpe", user_defined_symbols=USER, control_symbols=["<ctl>"], **LLAMA),
    "BPE, user-defined, nmt_nfkc": dict(model_type="bpe", user_defined_symbols=USER + ["ﬁ", "Ａ", "e\u0301"]),
    "unigram by default": dict(model_type="unigram"),
    "unigram, bytes": dict(model_type="unigram", **LLAMA),
    "unigram, user-defined, across spaces": dict(
        model_type="unigram", user_defined_symbols=USER, split_by_whitespace=False),
    "unigram, space behind words": dict(model_type="unigram", treat_whitespace_as_suffix=True),
    "characters": dict(model_type="char"),
    "characters, bytes, user-defined": dict(
        model_type="char", byte_fallback=True, user_defined_symbols=["abc"], normalization_rule_name="identity"),
}


def trained(options, sentences):
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=out, vocab_size=1500, num_threads=1, minloglevel=2,
        hard_vocab_limit=False, **options)
    return out.getvalue()


def save(folder, data):
    path = os.path.join(folder, "tokenizer.model")
    with open(path, "wb") as file:
        file.write(data)
    return path


def trained_models(folder, documents, rng):
    sentences = [s for t in documents[:120] for s in t.split("\n") if 0 < len(s.encode()) < 2000][:2500]
    texts = random_texts(rng, 1500)
    points = code_points("a{0} {0}e")
    some = rng.sample(points, 100) + points[:24]
    for name, options in MODELS.items():
        model = save(folder, trained(options, sentences))
        peer = sentencepiece.SentencePieceProcessor(model_file=model)
        check(f"{name}: random texts", model, peer, texts)
        check(f"{name}: code points", model, peer, points if "default" in name else some)
        check(f"{name}: corpus", model, peer, documents[200:240])
        megatron(name, model, peer, texts[:300] + ["a<CLS> b<EOD></s>c<PAD> <s><MASK><SEP><BOS>x"])


def message(number, data):
    size = len(data)
    return bytes([number << 3 | 2, *([size] if size < 128 else [size & 127 | 128, size >> 7])]) + data


def hand_made(pieces, algorithm):
    """A model file of (text, score, type) without normalisation."""
    made = b"".join(
        message(1, message(1, text.encode()) + b"\x15" + struct.pack("<f", score) + bytes([3 << 3, kind]))
        for text, score, kind in pieces)
    return made + message(2, bytes([3 << 3, algorithm])) + message(3, bytes([4 << 3, 0]))


def unused_pieces(folder, rng):
    """Hand-made models in which some pieces are only steps of merges; scores tie."""
    for _ in range(30):
        pieces = ["<unk>"] + list("abc\u2581")
        while len(pieces) < 40:
            piece = rng.choice(pieces[1:]) + rng.choice(pieces[1:])
            if piece not in pieces:
                pieces.append(piece)
        kinds = [2] + [5 if rng.random() < 0.3 else 1 for _ in pieces[1:]]
        rows = [(piece, float(-rng.randrange(20)), kind) for piece, kind in zip(pieces, kinds)]
        model = save(folder, hand_made(rows, rng.choice([1, 2])))
        peer = sentencepiece.SentencePieceProcessor(model_file=model)
        check("unused pieces", model, peer,
              ["".join(rng.choice("aabbcx ") for _ in range(rng.randrange(80))) for _ in range(200)])


def megatron(name, model, peer, texts):
    """Megatron-LM's classes, said again in Python over the package."""
    vocabulary = {peer.id_to_piece(i): i for i in range(len(peer))}
    strings = ["<CLS>", "<SEP>", "<EOD>", "<MASK>"]
    for own, other in ((peer.pad_id(), "<PAD>"), (peer.bos_id(), "<BOS>"), (peer.eos_id(), "<EOS>")):
        strings.append(peer.id_to_piece(own) if own >= 0 else other)
    for s in strings:
        vocabulary.setdefault(s, len(vocabulary))

    def specials(text):
        ids = []
        while True:
            found = [(text.index(s), s) for s in strings if s in text]
            if not found:
                return ids + peer.encode(text)
            at, s = min(found)
            ids += peer.encode(text[:at]) + [vocabulary[s]]
            text = text[at + len(s) :]

    def shown(ids):
        text, last = "", 0
        for i, one in enumerate(ids):
            hit = next((s for s in strings if vocabulary[s] == one), None)
            if hit is not None:
                text += peer.decode(ids[last:i]) + " " + hit + " "
                last = i + 1
        return text + peer.decode(ids[last:])

    kinds = {
        "Llama2Tokenizer": (lambda t: [peer.bos_id()] + peer.encode(t), peer.decode, (len(peer), peer.eos_id())),
        "GPTSentencePieceTokenizer": (peer.encode, peer.decode, (len(peer), peer.eos_id())),
        "SentencePieceTokenizer": (specials, shown, (len(vocabulary), vocabulary["<EOD>"])),
    }
    for kind, (encode, decode, head) in kinds.items():
        got_head, got, _ = run(kind, model, [t.encode() for t in texts])
        assert got_head == head, (name, kind, got_head, head)
        for text, (ids, back) in zip(texts, got):
            assert ids == encode(text), (name, kind, text, ids, encode(text))
            assert back == decode(ids).encode(), (name, kind, text, back, decode(ids))


def long_texts(model, peer, rng):
    letters = ["".join(rng.choice("etaoinshrdlucmfw") for _ in range(1_000_000))]
    check("1 MB without a space", model, peer, letters)
    check("1 MB of one character", model, peer, [c * (1_000_000 // len(c.encode())) for c in "a=é漢 🙂\n"])
    for c in "a ":
        used = [run("model", model, [(c * n).encode()])[2] for n in (1_000_000, 8_000_000)]
        print(f"1 and 8 MB of {c!r}: {used[0]:.2f} and {used[1]:.2f} CPU seconds")
        assert used[1] < 20 * used[0] + 1, used  # n log n; n * n would be 64 times


def llama2(documents, rng):
    peer = sentencepiece.SentencePieceProcessor(model_file=LLAMA2)
    check("Llama-2: random texts", LLAMA2, peer, random_texts(rng, 4000))
    for context in ("a{0}b", " {0}{0} 1{0}"):
        check(f"Llama-2: every code point in {context!r}", LLAMA2, peer, code_points(context))
    check("Llama-2: corpus", LLAMA2, peer, documents[:500])
    megatron("Llama-2", LLAMA2, peer, documents[:100])
    long_texts(LLAMA2, peer, rng)


def bytes_that_are_no_text(rng):
    """SentencePiece's own reading of invalid UTF-8; its Python layer passes bytes on."""
    peer = sentencepiece.SentencePieceProcessor(model_file=LLAMA2)
    texts = [rng.randbytes(rng.randrange(100)) for _ in range(3000)]
    texts += [b"\xe2\x96 a", b"\xe2 \x96\x81", b"\xed\xa0\x80 \xf4\x90\x80\x80\xc0\x80", b"a\xe2\x96\x81 b\xe2\x96"]
    for text, (ids, _) in zip(texts, run("model", LLAMA2, texts)[1]):
        assert ids == peer.encode(text), (text, ids, peer.encode(text))
    print(f"{len(texts)} strings of bytes equal")


for needed, tool in ((CORPUS, "make-corpus"), (LLAMA2, "fetch-tokenizers")):
    if not os.path.exists(needed):
        sys.exit(f"no {needed}: tools/test makes it, or tools/{tool}")
rng = random.Random(12)
with open(CORPUS, encoding="utf-8") as lines:
    documents = [json.loads(line)["text"] for line in lines.readlines(CORPUS_BYTES)]
rng.shuffle(documents)
with tempfile.TemporaryDirectory() as folder:
    unused_pieces(folder, rng)
    bytes_that_are_no_text(rng)
    trained_models(folder, documents, rng)
llama2(documents, rng)
print(f"{total} bytes of text: every token equal to SentencePiece's")
