"""tiktoken's encoding made from GPT-2's own vocab.json and merges.txt."""

import json
import os

import tiktoken

CACHE = os.environ.get("MOBULA_CACHE", os.path.expanduser("~/.cache/mobula"))
VOCAB = CACHE + "/gpt2-vocab"  # what tools/fetch-gpt2-vocab leaves there

PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


def byte_alphabet():
    """The byte that a character of the vocabulary stands for."""
    shown = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


def encoding():
    byte_of = byte_alphabet()
    ranks, special = {}, {}
    for text, i in json.load(open(VOCAB + "/vocab.json", encoding="utf-8")).items():
        if text == "<|endoftext|>":
            special[text] = i
        else:
            ranks[bytes(byte_of[c] for c in text)] = i
    return tiktoken.Encoding("gpt2-files", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)
