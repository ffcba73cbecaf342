"""One peer of bench/preprocess.py, one time: prints CPU and wall seconds of encoding, tokens and peak memory.

Usage: preprocess_peer.py PEER VOCABULARY FILE.jsonl
"""
import json
import os
import pathlib
import resource
import sys
import tempfile
import time

CACHE = pathlib.Path(os.environ.get("MOBULA_CACHE", pathlib.Path.home() / ".cache/mobula"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests/integration/data"))


def texts_of(path):
    with open(path, encoding="utf-8") as f:
        return [json.loads(line)["text"] for line in f]


def gigatoken_files(vocabulary, path):
    import awkward
    import gigatoken
    tokenizer = gigatoken.Tokenizer(str(CACHE / "tokenizers" / vocabulary / "tokenizer.json"))
    source = gigatoken.JsonlFileSource([path], field="text")
    return lambda: tokenizer.encode_files(source, parallel=False), lambda out: int(awkward.sum(awkward.num(out)))


def gigatoken_batch(vocabulary, path):
    import awkward
    import gigatoken
    tokenizer = gigatoken.Tokenizer(str(CACHE / "tokenizers" / vocabulary / "tokenizer.json"))
    texts = texts_of(path)
    return lambda: tokenizer.encode_batch(texts, parallel=False), lambda out: int(awkward.sum(awkward.num(out)))


def tiktoken(vocabulary, path):
    import families
    import gpt2
    encode = (families.tiktoken_of(gpt2.encoding(), False) if vocabulary == "gpt2" else
              families.tiktoken_from_hf(vocabulary))
    texts = texts_of(path)
    return lambda: encode(texts), lambda out: sum(map(len, out))


def tokenizers(vocabulary, path):
    import families
    encode = families.huggingface(vocabulary)
    texts = texts_of(path)
    return lambda: encode(texts), lambda out: sum(map(len, out))


def megatron_loop(vocabulary, path):
    """What tools/preprocess_data.py does with a line, in one process, with the tokenizer called directly."""
    import numpy
    import tokenizers
    tokenizer = tokenizers.Tokenizer.from_file(str(CACHE / "tokenizers" / vocabulary / "tokenizer.json"))
    width = numpy.uint16 if vocabulary == "gpt2" else numpy.int32
    eod = {"gpt2": 50256, "llama3": 128001}[vocabulary]

    def run():
        n = 0
        with open(path, encoding="utf-8") as lines, tempfile.TemporaryFile() as out:
            for line in lines:
                ids = tokenizer.encode(json.loads(line)["text"]).ids
                n += len(ids)
                if ids:
                    ids.append(eod)
                out.write(numpy.array(ids, dtype=width).tobytes(order="C"))
        return n

    return run, lambda n: n


PEERS = {"gigatoken files": gigatoken_files, "gigatoken batch": gigatoken_batch, "tiktoken": tiktoken,
         "tokenizers": tokenizers, "megatron loop": megatron_loop}


def main():
    name, vocabulary, path = sys.argv[1:]
    encode, count = PEERS[name](vocabulary, path)
    wall, cpu = time.monotonic(), time.process_time()
    out = encode()
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    print(json.dumps({"wall_s": wall, "cpu_s": cpu, "tokens": count(out),
                      "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


main()
