"""The tokenizers that ours are compared with, by the family of their pattern.

A family has the arguments of dump_tokens and its peers: functions from a list of texts to lists of ids, each from
another library. Vocabularies are those of tools/fetch-gpt2-vocab and tools/fetch-tokenizers.
"""

import base64
import json
import os
import struct
import tempfile

import tiktoken
import tokenizers

import gpt2

FOLDER = gpt2.CACHE + "/tokenizers"
# tiktoken's pattern of cl100k; the text of Hugging Face's differs, and so does white space with a line end at the very
# end of a text.
CL100K = (r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"""
          r"""|\s+(?!\S)|\s""")
# Megatron-LM's --tiktoken-pattern v1 and v2 (megatron/core/tokenizers/text/libraries/tiktoken_tokenizer.py).
V1 = r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
V2 = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
      r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
      r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")


class Family:
    def __init__(self, name, dump, is_lossy=False, **peers):
        self.name, self.dump, self.is_lossy, self.peers = name, dump, is_lossy, peers


def hf_json(name):
    with open(f"{FOLDER}/{name}/tokenizer.json", encoding="utf-8") as f:
        return json.load(f)


def huggingface(name):
    """tokenizers' own; no BOS or EOS. One thread: encode_batch_fast uses as many as RAYON_NUM_THREADS says."""
    tokenizer = tokenizers.Tokenizer.from_file(f"{FOLDER}/{name}/tokenizer.json")
    return lambda texts: [e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def tiktoken_of(encoding, specials):
    """specials: strings of the vocabulary's own special tokens are those tokens, as in Hugging Face's."""
    if specials:
        return lambda texts: [encoding.encode(t, allowed_special="all") for t in texts]
    return lambda texts: [encoding.encode_ordinary(t) for t in texts]


def tiktoken_from_hf(name):
    """tiktoken with the vocabulary and the pattern of a tokenizer.json; its rank of a token is the place of its merge,
    so ids are looked up afterwards."""
    source = hf_json(name)
    vocab = source["model"]["vocab"]
    byte_of = gpt2.byte_alphabet()
    added = {t["content"]: t["id"] for t in source["added_tokens"]}
    ids = {bytes(byte_of[c] for c in text): i for text, i in vocab.items() if text not in added}
    [pattern] = [p["pattern"]["Regex"] for p in source["pre_tokenizer"]["pretokenizers"] if p["type"] == "Split"]
    # In these vocabularies tokens were numbered as they were made: the id is the rank.
    encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ids, special_tokens=added)
    normalizer = tokenizers.Tokenizer.from_file(f"{FOLDER}/{name}/tokenizer.json").normalizer
    encode = tiktoken_of(encoding, True)
    return encode if normalizer is None else lambda texts: encode([normalizer.normalize_str(t) for t in texts])


def ranks_of(name):
    with open(f"{FOLDER}/{name}/{name}_base.tiktoken", "rb") as f:
        return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in f)}


def ranks_file(name):
    """A tiktoken vocabulary as dump_tokens reads it."""
    f = tempfile.NamedTemporaryFile(prefix="mb-ranks-", suffix=".bin")
    for token, rank in ranks_of(name).items():
        f.write(struct.pack("<II", rank, len(token)) + token)
    f.flush()
    return f


def engine(name, pattern, family):
    """The engine alone, against tiktoken with its own vocabulary."""
    f = ranks_file(name)
    encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks_of(name), special_tokens={})
    made = Family(f"{name} cut as {family}", ["ranks", f.name, family], tiktoken=tiktoken_of(encoding, False))
    made.file = f  # deleted with the family
    return made


def hf_family(name, **options):
    return Family(name, ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", f"{FOLDER}/{name}"],
                  tokenizers=huggingface(name), tiktoken=tiktoken_from_hf(name), **options)


def by_name(name):
    if name == "gpt2":
        return Family(name, ["--vocab-file", gpt2.VOCAB + "/vocab.json", "--merge-file", gpt2.VOCAB + "/merges.txt"],
                      tiktoken=tiktoken_of(gpt2.encoding(), False), tokenizers=huggingface_without_specials("gpt2"))
    if name in ("cl100k", "o200k", "llama3"):
        return hf_family(name)
    if name == "qwen3":
        return hf_family(name, is_lossy=True)  # its normalizer changes the text
    if name == "engine-cl100k":
        return engine("cl100k", CL100K, "cl100k")
    if name == "engine-v1":
        return engine("cl100k", V1, "tiktoken-v1")
    if name == "engine-v2":
        return engine("o200k", V2, "tiktoken-v2")
    raise SystemExit(f"no family {name}")


def huggingface_without_specials(name):
    """GPT2BPETokenizer is Megatron-LM's: special strings in the text are ordinary."""
    source = hf_json(name)
    source["added_tokens"] = []
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(source))
    return lambda texts: [e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
