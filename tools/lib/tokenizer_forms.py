#!/usr/bin/env python3
"""Writes the same vocabularies in the other forms in which they are published; used by tools/fetch-tokenizers.

Usage: tokenizer_forms.py GPT2_FOLDER FOLDER

FOLDER has cl100k/, o200k/ (tiktoken's rank files) and llama2/ (llama-tokenizer.js). Made are tokenizer.json for GPT-2,
cl100k and o200k, as Hugging Face's own conversion of a rank file gives it, and for Llama-2, and Llama-2's
SentencePiece model.
"""

import base64
import json
import os
import re
import struct
import sys

CL100K = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
ENDOFTEXT = "<|endoftext|>"
SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that GPT-2's alphabet shows as themselves
ALPHABET = {b: chr(b) for b in SHOWN} | {b: chr(256 + i) for i, b in enumerate(sorted({*range(256)} - {*SHOWN}))}


def shown(token):
    return "".join(ALPHABET[b] for b in token)


def merges_of(ranks):
    """Every way to make a token of two others, in the order of the tokens, then of their left and right parts."""
    found = []
    for token, rank in ranks.items():
        ways = []
        for i in range(1, len(token)):
            left, right = ranks.get(token[:i]), ranks.get(token[i:])
            if left is not None and right is not None:
                ways.append((rank, left, right, token[:i], token[i:]))
        found += sorted(ways)
    return [f"{shown(left)} {shown(right)}" for *_, left, right in sorted(found)]


def byte_level(**options):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, **options}


def added_tokens(specials):
    return [{"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True} for text, i in specials.items()]


def write_files(folder, tokenizer, config):
    os.makedirs(folder, exist_ok=True)
    config |= {"clean_up_tokenization_spaces": False, "model_max_length": 1 << 20}
    for name, value in (("tokenizer.json", tokenizer), ("tokenizer_config.json", config)):
        with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
            json.dump(value, f, ensure_ascii=False)


def write_byte_level(folder, vocab, merges, specials, pattern, **model):
    """pattern None: the ByteLevel component's own, which is GPT-2's."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added_tokens(specials),
        "normalizer": None,
        "pre_tokenizer": byte_level(use_regex=True) if pattern is None else
        {"type": "Sequence", "pretokenizers": [split, byte_level(use_regex=False)]},
        "post_processor": byte_level(use_regex=True), "decoder": byte_level(use_regex=True),
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, **model,
                  "vocab": vocab, "merges": merges},
    }
    write_files(folder, tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": ENDOFTEXT,
                                    "eos_token": ENDOFTEXT})


def from_gpt2(source, folder):
    with open(os.path.join(source, "vocab.json"), encoding="utf-8") as f:
        vocab = json.load(f)
    with open(os.path.join(source, "merges.txt"), encoding="utf-8") as f:
        merges = [line for line in f.read().split("\n")[1:] if line]
    write_byte_level(folder, vocab, merges, {ENDOFTEXT: vocab[ENDOFTEXT]}, None)


def from_ranks(path, specials, pattern):
    with open(path, "rb") as f:
        ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in f)}
    vocab = {shown(token): rank for token, rank in ranks.items()}
    write_byte_level(os.path.dirname(path), vocab | specials, merges_of(ranks), specials, pattern, ignore_merges=True)


def varint(n):
    out = b""
    while n > 127:
        out += bytes([n & 127 | 128])
        n >>= 7
    return out + bytes([n])


def field(number, value):
    """One field of a protobuf message, by the Python type of its value."""
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value if isinstance(value, bytes) else value.encode()
    return varint(number << 3 | 2) + varint(len(data)) + data


def llama2_vocabulary(path):
    """Pieces by id and merges in their order, from the two base64 strings of the package's one source file."""
    with open(path, encoding="utf-8") as f:
        source = f.read()
    strings = [base64.b64decode(re.search(f'const {name} = "([^"]*)"', source)[1])
               for name in ("llama_vocab_base64", "llama_merges_binary")]
    pieces = strings[0].decode().split("\n")
    assert len(pieces) == 32000 and pieces[3] == "<0x00>" and pieces[258] == "<0xFF>", pieces[:3]
    return pieces, [(pieces[left], pieces[right]) for left, right in struct.iter_unpack("<2H", strings[1])]


def sentencepiece_model(path, pieces, merges):
    """In a BPE model the score of a piece is minus the place of its merge. Runs of spaces come last there, all alike.
    Field numbers and types are those of sentencepiece_model.proto."""
    normal, unknown, control, byte = 1, 2, 3, 6
    place = {}
    for left, right in merges:
        place.setdefault(left + right, float(-len(place)))
    model = b""
    for i, text in enumerate(pieces):
        kind = unknown if i == 0 else control if i < 3 else byte if i < 259 else normal
        score = -1e9 if len(text) > 1 and not text.strip("\u2581") else place.get(text, float(259 - i))
        model += field(1, field(1, text) + field(2, score if kind == normal else 0.0) + field(3, kind))
    trainer = (field(3, 2) + field(4, len(pieces)) + field(25, 1) + field(26, 1) + field(35, 1)  # BPE, byte fallback
               + field(40, 0) + field(41, 1) + field(42, 2) + varint(43 << 3) + b"\xff" * 9 + b"\x01")  # no padding
    normalizer = field(1, "identity") + field(2, b"") + field(3, 1) + field(4, 0) + field(5, 1)
    with open(path, "wb") as f:
        f.write(model + field(2, trainer) + field(3, normalizer))


def from_llama2(source, folder):
    pieces, merges = llama2_vocabulary(source)
    sentencepiece_model(folder + "/tokenizer.model", pieces, merges)
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": added_tokens({"<unk>": 0, "<s>": 1, "</s>": 2}),
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "\u2581"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]},
        "pre_tokenizer": None,
        "post_processor": {"type": "TemplateProcessing", "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
                           "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}},
                                    {"Sequence": {"id": "B", "type_id": 1}}],
                           "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True,
                  "vocab": {piece: i for i, piece in enumerate(pieces)},
                  "merges": [f"{left} {right}" for left, right in merges]},
    }
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
              "add_bos_token": True, "add_eos_token": False, "legacy": True}
    write_files(folder, tokenizer, config)


def main():
    gpt2, folder = sys.argv[1:]
    from_gpt2(gpt2, folder + "/gpt2")
    from_ranks(folder + "/cl100k/cl100k_base.tiktoken",
               {ENDOFTEXT: 100257, "<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260,
                "<|endofprompt|>": 100276}, CL100K)
    from_ranks(folder + "/o200k/o200k_base.tiktoken", {ENDOFTEXT: 199999, "<|endofprompt|>": 200018}, O200K)
    from_llama2(folder + "/llama2/llama-tokenizer.js", folder + "/llama2")


main()
