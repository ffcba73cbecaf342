"""TikTokenizer against tiktoken, id by id, for both forms of its file. Usage: test_tiktoken.py DUMP_IDS"""

import base64
import json
import os
import random
import struct
import subprocess
import sys
import tempfile

import tiktoken
from tiktoken.load import load_tiktoken_bpe

DUMP = sys.argv[1]
CACHE = os.environ.get("MOBULA_CACHE", os.path.expanduser("~/.cache/mobula"))
FILE = CACHE + "/tokenizers/cl100k/cl100k_base.tiktoken"  # what tools/fetch-tokenizers leaves there
# Facts of tiktoken_ext/openai_public.py and of Megatron-LM's tiktoken_tokenizer.py.
CL100K = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s")
V1 = r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
NAMED = ["<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>"]
RANKS = load_tiktoken_bpe(FILE)


def run(arguments, texts):
    records = b"".join(struct.pack("<I", len(t)) + t for t in (text.encode() for text in texts))
    return subprocess.run([DUMP, "TikTokenizer", *map(str, arguments)], input=records, capture_output=True)


def check(name, arguments, peer, about, texts):
    done = run(arguments, texts)
    if done.returncode != 0:
        sys.exit(f"{name}: {done.stderr.decode()}")
    assert struct.unpack_from("<Qii", done.stdout) == about, (name, struct.unpack_from("<Qii", done.stdout))
    at = 16
    for text in texts:
        (n,) = struct.unpack_from("<I", done.stdout, at)
        ids = list(struct.unpack_from(f"<{n}i", done.stdout, at + 4))
        want = peer.encode(text, allowed_special="all")
        assert ids == want, (name, text, ids[:9], want[:9])
        at += 4 + 4 * n
    print(f"{name}: {len(texts)} texts equal", flush=True)


def texts(rng):
    pools = ("abc ABC'S're123 \t\n.,!", " \n\t\r\u00a0\u3000a1", "aé中ыए́🙂\u200d1²½٣ Σſ")
    special = ["<|endoftext|>", "<s>", "</s>", "<SPECIAL_9>", "<|", "<SPECIAL_"]
    for _ in range(4000):
        pool = rng.choice(pools)
        text = "".join(rng.choice(pool) for _ in range(rng.randrange(50)))
        yield text + rng.choice(special) * rng.choice((0, 0, 1, 2)) + text[:5]


rng = random.Random(3)
all_texts = ["", *texts(rng)]
end = len(RANKS) + 1
check("ranks in lines", [FILE, "cl100k", "-", "-", "<|endoftext|>"],
      tiktoken.Encoding("a", pat_str=CL100K, mergeable_ranks=RANKS, special_tokens={"<|endoftext|>": max(RANKS.values()) + 1}),
      (max(RANKS.values()) + 2, max(RANKS.values()) + 1, -1), all_texts)

with tempfile.TemporaryDirectory() as folder:
    # Megatron-LM's form wants the bytes themselves as the first ranks.
    first = [bytes([i]) for i in range(256)]
    order = first + [t for t, _ in sorted(RANKS.items(), key=lambda item: item[1]) if len(t) > 1][:20000]
    with open(folder + "/vocab.json", "w") as out:
        json.dump([{"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": t.decode("utf-8", "replace")}
                   for i, t in enumerate(order)], out)
    shifted = {t: i + 40 for i, t in enumerate(order[:15000])}
    special = {t: i for i, t in enumerate(NAMED + [f"<SPECIAL_{i}>" for i in range(7, 40)])}
    check("Megatron-LM's form, cut", [folder + "/vocab.json", "v1", 40, 15040],
          tiktoken.Encoding("b", pat_str=V1, mergeable_ranks=shifted, special_tokens=special), (15040, 2, 1), all_texts)
    with open(folder + "/less", "w") as out:
        out.writelines(f"{base64.b64encode(t).decode()} {i}\n" for i, t in enumerate([*first[:122], *first[123:], b"ab", b"cd"]))
    for arguments, what in (([folder + "/less", "gpt2"], "no token for byte 0x7a"), ([folder + "/vocab.json"], "needs 130072"), ([folder + "/vocab.json", "cl100k"], "v1 or v2"),
                            ([FILE], "--tiktoken-pattern"), ([folder + "/none"], "none"), ([__file__, "v1"], "BASE64 RANK"),
                            ([folder + "/vocab.json", "v1", 40, 15040, "<s>"], "<unk>")):
        done = run(arguments, [])
        assert done.returncode == 1 and what in done.stderr.decode(), (arguments, done)
