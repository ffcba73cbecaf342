"""`mobula preprocess` on fresh text beside its peers, in one run: gigatoken (file and batch API), tiktoken, Hugging
Face's tokenizers, and the loop of Megatron-LM's tools/preprocess_data.py; for GPT-2's and Llama-3's vocabulary.

Every measurement is a process of its own, so that nobody has seen the text before. Ours is measured end to end, start
and writing of .bin and .idx included, in CPU seconds of all its threads; of the peers only the call that encodes is
counted, without loading the vocabulary, importing or writing (Megatron's loop reads and writes). Peers that keep no
cache of words get a part of the corpus, whose lines are ordered by hash.

Usage: preprocess.py [ROUNDS]
"""
import json
import os
import re
import subprocess
import sys
import tempfile
import time

from lib import CACHE, MOBULA, spread, write_result

CORPUS = CACHE / "corpus-240mb.jsonl"
VOCABULARIES = {
    "gpt2": ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", CACHE / "gpt2-vocab/vocab.json",
             "--merge-file", CACHE / "gpt2-vocab/merges.txt"],
    "llama3": ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", CACHE / "tokenizers/llama3"],
}
# Peer, megabytes of text it gets (None: the whole corpus).
PEERS = [("gigatoken files", None), ("gigatoken batch", None), ("tiktoken", 24), ("tokenizers", 12), ("megatron loop", 6)]
CALLGRIND_MB = 2


class Corpus:
    """A file of JSON lines and what is counted of it."""

    def __init__(self, path, lines):
        self.path, self.documents, self.text_bytes, self.json_characters = str(path), 0, 0, 0
        for line in lines:
            self.documents += 1
            self.json_characters += len(line)
            self.text_bytes += len(json.loads(line)["text"].encode())

    def rates(self, seconds, tokens):
        return {"mb_per_s": round(self.text_bytes / 1e6 / seconds, 1), "docs_per_s": round(self.documents / seconds),
                "json_mib_per_s": round(self.json_characters / 2**20 / seconds, 1),
                "tokens_per_s": round(tokens / seconds)}


def parts(folder):
    """The corpus whole, and its beginnings of so many megabytes of text."""
    made = {None: Corpus(CORPUS, open(CORPUS, encoding="utf-8"))}
    for mb in sorted({mb for _, mb in PEERS if mb} | {CALLGRIND_MB}):
        path, size = os.path.join(folder, f"{mb}mb.jsonl"), 0
        with open(CORPUS, encoding="utf-8") as source, open(path, "w", encoding="utf-8") as target:
            for line in source:
                target.write(line)
                size += len(line.encode())
                if size >= mb * 1e6:
                    break
        made[mb] = Corpus(path, open(path, encoding="utf-8"))
    return made


def command(vocabulary, corpus, folder, workers):
    return [str(a) for a in (MOBULA, "preprocess", "--input", corpus.path, "--output-prefix", folder + "/out",
                             "--append-eod", "--workers", workers, *VOCABULARIES[vocabulary])]


def remove_output(folder):
    for end in ("bin", "idx"):
        os.remove(f"{folder}/out_text_document.{end}")


def mobula(vocabulary, corpus, folder, workers):
    began = time.monotonic()
    with open(folder + "/log", "w+", encoding="utf-8") as log:
        child = subprocess.Popen(command(vocabulary, corpus, folder, workers), stdout=log, stderr=log)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        wall = time.monotonic() - began
        if child.returncode != 0:
            log.seek(0)
            raise RuntimeError(f"preprocess: {child.returncode}: {log.read()}")
    width = 2 if vocabulary == "gpt2" else 4
    tokens = os.path.getsize(folder + "/out_text_document.bin") // width - corpus.documents  # less the ends of documents
    remove_output(folder)
    return {"wall_s": wall, "cpu_s": used.ru_utime + used.ru_stime, "rss_mib": used.ru_maxrss / 1024, "tokens": tokens}


def peer(name, vocabulary, corpus):
    done = subprocess.run([sys.executable, os.path.join(os.path.dirname(__file__), "preprocess_peer.py"), name,
                           vocabulary, corpus.path], env=dict(os.environ, RAYON_NUM_THREADS="1"),
                          stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def instructions(vocabulary, part, folder):
    """Per byte of text, of a run less the run on nothing; callgrind has no AVX-512, so this is the AVX2 code."""
    counted = []
    empty = Corpus(os.path.join(folder, "empty.jsonl"), [])
    open(empty.path, "w", encoding="utf-8").close()
    for corpus in (empty, part):
        done = subprocess.run(["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null",
                               *command(vocabulary, corpus, folder, 1)], capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        counted.append(int(re.search(r"Collected : (\d+)", done.stderr)[1]))
        remove_output(folder)
    return round((counted[1] - counted[0]) / part.text_bytes, 2)


def summary(corpus, runs):
    best = min(r["cpu_s"] for r in runs)
    tokens = {r["tokens"] for r in runs}
    assert len(tokens) == 1, tokens
    [tokens] = tokens
    return {"text_mb": round(corpus.text_bytes / 1e6, 1), "tokens": tokens, "cpu_s": spread([r["cpu_s"] for r in runs]),
            "wall_s": spread([r["wall_s"] for r in runs]), "rss_mib": round(max(r["rss_mib"] for r in runs), 1),
            "per_cpu_second": corpus.rates(best, tokens),
            "per_second": corpus.rates(min(r["wall_s"] for r in runs), tokens)}


def measure(vocabulary, made, folder, rounds):
    workers = [n for n in (1, 2, 4, 8, 16) if n < os.cpu_count()] + [os.cpu_count()]
    mobula(vocabulary, made[CALLGRIND_MB], folder, 1)  # the files of program and vocabulary are read once
    runs = {f"mobula, workers {n}": [] for n in workers} | {name: [] for name, _ in PEERS}
    of = {name: made[None] for name in runs} | {name: made[mb] for name, mb in PEERS}
    for _ in range(rounds):
        for n in workers:
            runs[f"mobula, workers {n}"].append(mobula(vocabulary, made[None], folder, n))
        for name, mb in PEERS:
            runs[name].append(peer(name, vocabulary, made[mb]))
    result = {name: summary(of[name], r) for name, r in runs.items()}
    ours, theirs = result["mobula, workers 1"], [result[n] for n in ("gigatoken files", "gigatoken batch")]
    if any(t["tokens"] != ours["tokens"] for t in theirs):
        raise RuntimeError(f"tokens: {ours['tokens']}, gigatoken {[t['tokens'] for t in theirs]}")
    fastest = max(t["per_cpu_second"]["mb_per_s"] for t in theirs)
    return {"runs": result, "instructions_per_byte": instructions(vocabulary, made[CALLGRIND_MB], folder),
            "times_gigatoken": round(ours["per_cpu_second"]["mb_per_s"] / fastest, 2)}


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    with tempfile.TemporaryDirectory(prefix="mb-bench-") as folder:
        made = parts(folder)
        write_result("preprocess", {"rounds": rounds, "documents": made[None].documents} |
                     {name: measure(name, made, folder, rounds) for name in VOCABULARIES})


main()
