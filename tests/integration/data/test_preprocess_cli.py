"""The command `mobula preprocess`: what it shows, bad lines, broken UTF-8, Megatron-LM's other flags, memory.

Usage: test_preprocess_cli.py MOBULA. The bytes of good input are compared in test_preprocess.py.
"""

import json
import os
import pty
import random
import re
import signal
import subprocess
import sys
import tempfile

import gpt2
import reference_files as reference

MOBULA = sys.argv[1]
CORPUS = gpt2.CACHE + "/corpus-en-24mb.jsonl"  # made by tools/make-corpus
ENCODING = gpt2.encoding()
FLAGS = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", gpt2.VOCAB + "/vocab.json", "--merge-file",
         gpt2.VOCAB + "/merges.txt"]
PROGRESS = r"Processed \d+ documents \([0-9.e+-]+ docs/s, [0-9.e+-]+ MB/s\)\."
DONE = r"Done: (\d+) documents, (\d+) tokens, [0-9.]+ MB of text in [0-9.]+ s \([0-9.]+ docs/s, [0-9.]+ MB/s, \d+ tokens/s\)"


def command(folder, *args, flags=FLAGS):
    return [MOBULA, "preprocess", "--input", folder + "/in.jsonl", "--output-prefix", folder + "/out", *flags, *args]


def run(folder, data, *args, flags=FLAGS):
    if data is not None:
        with open(folder + "/in.jsonl", "wb") as f:
            f.write(data)
    return subprocess.run(command(folder, *args, flags=flags), capture_output=True, text=True)


def same(folder, texts):
    reference.write_index(folder + "/want", [[ids] if ids else [] for ids in map(ENCODING.encode_ordinary, texts)], 50257)
    for end in (".bin", ".idx"):
        assert open(f"{folder}/out_text_document{end}", "rb").read() == open(folder + "/want" + end, "rb").read(), end


def check_shown(folder):
    texts = [f"text number {i}" for i in range(2500)]
    data = "".join(json.dumps({"text": t}) + "\n" for t in texts).encode()
    done = run(folder, data)
    out, err = done.stdout.splitlines(), done.stderr.splitlines()
    assert done.returncode == 0 and len(out) == 2, done
    assert out[0] == f"Opening {folder}/in.jsonl" and re.fullmatch(r"Time to startup: [0-9.e-]+", out[1])
    assert len(err) == 3 and all(re.fullmatch(PROGRESS, x) for x in err[:2]), err
    total = re.fullmatch(DONE, err[2])
    assert total[1] == "2500" and int(total[2]) == sum(len(ENCODING.encode_ordinary(t)) for t in texts)
    done = run(folder, data, "--json")
    answer = json.loads(done.stdout)
    assert answer["documents"] == answer["sequences"] == 2500 and answer["tokens"] == int(total[2])
    assert answer["text_bytes"] == sum(map(len, texts)) and answer["json_chars"] == len(data)
    assert answer["skipped_lines"] == answer["repaired_lines"] == 0 and answer["resumed"] is False
    assert answer["output_prefixes"] == [folder + "/out_text_document"] and answer["elapsed_s"] > 0
    assert "Opening" in done.stderr and "Time to startup" in done.stderr
    same(folder, texts)


def check_bar(folder):
    """On a terminal a bar is drawn and taken away again; Megatron-LM's lines stand as they are."""
    master, slave = pty.openpty()
    with open(folder + "/in.jsonl", "wb") as f:
        for _ in range(3):
            f.write(open(CORPUS, "rb").read())
    child = subprocess.Popen(command(folder), stdout=subprocess.DEVNULL, stderr=slave, env={**os.environ, "TERM": "xterm"})
    os.close(slave)
    shown = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # EIO: the last writer is gone
            part = b""
        if not part:
            break
        shown += part
    os.close(master)
    assert child.wait() == 0
    parts = re.findall(r"\r([^\r\n]*)\x1b\[K", shown.decode())
    bars = [b for b in parts if b]
    want = r" *\d+ % [0-9.kMG]+ docs, [0-9.kMG ]+ docs/s, [0-9.]+ MB/s, [0-9.kMG ]+ tokens/s, ETA \d+:\d\d"
    assert bars and all(re.fullmatch(want, b) and len(b) < 80 for b in bars), bars[:3]
    plain = re.sub(r"\r[^\r\n]*\x1b\[K", "", shown.decode()).replace("\r\n", "\n").splitlines()
    assert all(re.fullmatch(PROGRESS, x) for x in plain[:-1]) and re.fullmatch(DONE, plain[-1]), plain[-3:]


def check_bad_lines(folder, rng):
    good = [f"good {i}" for i in range(30000)]
    lines = [json.dumps({"text": t, "pad": "x" * 100}).encode() for t in good]
    bad = [b'{"text": "a"', b"", b'{"text": 5}', b'{"t": "a"}', b'{"text": "\xff"}', b'{"text": ["half", 1]}', b'{"text": "\\ud800"}']
    at = sorted(rng.sample(range(len(lines)), 150))
    for n, i in enumerate(at):
        lines.insert(i + n, bad[n % len(bad)])
    numbers = [i + n + 1 for n, i in enumerate(at)]
    data = b"\n".join(lines)
    for workers in ("1", "3"):
        done = run(folder, data, "--workers", workers)
        assert done.returncode == 64 and f"in.jsonl:{numbers[0]}: " in done.stderr, done.stderr[-300:]
        assert not [n for n in os.listdir(folder) if n.startswith("out_") and n.endswith(".tmp")]
        done = run(folder, data, "--workers", workers, "--skip-bad-lines", "--json")
        assert done.returncode == 0, done.stderr[-300:]
        told = re.findall(r"skipped: .*/in\.jsonl:(\d+): ", done.stderr)
        assert [int(x) for x in told] == numbers[:100], told[:5]
        answer = json.loads(done.stdout)
        assert answer["skipped_lines"] == 150 and answer["documents"] == 30000
        assert "150 bad lines skipped" in done.stderr
        same(folder, good)


def check_utf8(folder, rng):
    """errors="replace" of CPython's own decoder, line by line."""
    pieces = [b"\xff", b"\xc3", b"\xe2\x82", b"\xf0\x9f\x99", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80", b"a", b" b",
              "é中🙂".encode(), b"\x80", b"\xf8\x88\x80\x80\x80", b"\xe2\x28\xa1"]
    lines = [b'{"text": "' + b"".join(rng.choice(pieces) for _ in range(rng.randrange(12))) + b'"}' for _ in range(4000)]
    lines += [b'{"text": "cut \xe2\x82"}\r', b'{"text": "x"} \xf0\x9f']  # the last one is no JSON either way
    broken = 0
    texts = []
    for line in lines[:-1]:
        text = line.decode("utf-8", "replace")
        broken += text.encode() != line
        texts.append(json.loads(text)["text"])
    data = b"\n".join(lines)
    done = run(folder, data, "--invalid-utf8", "replace")
    assert done.returncode == 64 and f"in.jsonl:{len(lines)}: " in done.stderr, done.stderr[-300:]
    done = run(folder, data, "--invalid-utf8", "replace", "--skip-bad-lines", "--json")
    answer = json.loads(done.stdout)
    assert answer["skipped_lines"] == 1 and answer["repaired_lines"] == broken > 1000, answer
    assert answer["json_chars"] == sum(len(x.decode("utf-8", "replace")) + 1 for x in lines[:-1])
    same(folder, texts)
    first = next(i for i, x in enumerate(lines) if x.decode("utf-8", "replace").encode() != x)
    done = run(folder, data, "--invalid-utf8", "fail")
    assert done.returncode == 64 and f"in.jsonl:{first + 1}: " in done.stderr


def check_pipes(folder):
    """One that writes pipe after pipe is read in this order; an interrupt ends a wait for a pipe."""
    texts = [f"text number {i}" for i in range(60000)]
    half = folder + "/half.jsonl"
    with open(half, "w", encoding="utf-8") as f:
        f.writelines(json.dumps({"text": t}) + "\n" for t in texts)
    pipes = [folder + "/p1", folder + "/p2"]
    for pipe in pipes:
        os.mkfifo(pipe)
    writer = subprocess.Popen(["sh", "-c", 'cat "$1" >"$2"; cat "$1" >"$3"', "sh", half, *pipes])
    command_line = [MOBULA, "preprocess", "--input", *pipes, "--output-prefix", folder + "/out", *FLAGS]
    done = subprocess.run(command_line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and writer.wait() == 0, done
    same(folder, texts + texts)
    child = subprocess.Popen(command_line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline().startswith("Opening")
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=20)
        assert child.returncode == 130, (child.returncode, err)
    finally:
        child.kill()


def check_full_stdout(folder):
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(command(folder, "--json"), stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode != 0 and "standard output" in done.stderr, done


def check_flags(folder):
    data = b'{"text": "a"}\n'
    refused = (["--split-sentences"], ["--find-optimal-num-workers"], ["--tokenizer-metadata", "x"], ["--dataset-impl", "lazy"],
               ["--tokenizer-sentencepiece-legacy"], ["--tokenizer-special-tokens", "a", "b"])
    for flags, word in ((flags, flags[0]) for flags in refused):
        done = run(folder, data, *flags)
        assert done.returncode == 78 and word in done.stderr and done.stderr.count("\n") == 1, done
    # All that tools/preprocess_data.py of any release takes and that changes no byte here.
    ignored = (["--keep-newlines"], ["--lang", "english"], ["--vocab-extra-ids", "3"], ["--trust-remote-code"], ["--legacy-tokenizer"],
               ["--workers-to-check", "16", "32"], ["--max-documents", "5"], ["--performance-dir", "x"], ["--padded-vocab-size", "50304"],
               ["--make-vocab-size-divisible-by", "128"], ["--dataset-impl", "mmap"], ["--chunk-size", "25"], ["--tokenizer-hf-use-fast"],
               ["--tokenizer-hf-no-use-fast"], ["--tokenizer-hf-include-special-tokens"], ["--null-tokenizer-eod-id", "0"],
               ["--null-tokenizer-pad-id", "-1"], ["--special-tokens", "a", "b"], ["--tokenizer-prompt-format", "chatml"],
               ["--sft-tokenizer-prompt-format", "chatml"], ["--image-tag-type", "x"], ["--force-system-message"],
               ["--chat-template", "x"])
    for flags in ignored:
        done = run(folder, data, *flags)
        assert done.returncode == 0 and f"{flags[0]} has no effect: " in done.stderr, done
        same(folder, ["a"])
    for flags in (["--vocab-size", "50257"], ["--tokenizer-model", "x"], ["--tiktoken-pattern", "v1"], ["--tiktoken-num-special-tokens", "5"],
                  ["--tiktoken-special-tokens", "a"], ["--keep-sequential-samples"], ["--partitions", "1"], ["--log-interval", "7"]):
        assert run(folder, data, *flags).returncode == 0, flags
    done = run(folder, data, flags=["--tokenizer-type", "GPT2BPETokenizer", "--vocab", gpt2.VOCAB + "/vocab.json", *FLAGS[4:]])
    assert done.returncode == 0, done
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9", "--null-tokenizer-eod-id"]
    assert run(folder, b'{"text": "1"}', flags=[*null, "9"]).returncode == 0
    done = run(folder, b'{"text": "1"}', flags=[*null, "8"])
    assert done.returncode == 78 and "--null-tokenizer-eod-id 8" in done.stderr, done
    for flags in (["--invalid-utf8", "ignore"], ["--workers", "3", "--partitions", "2"], ["--workers", "0"], ["stray"],
                  ["--json-keys"], ["--json-keys", "a", "a"], ["--input"]):
        assert run(folder, data, *flags).returncode == 64, flags
    done = run(folder, data, flags=["--tokenizer-type", "BertWordPieceCase"])
    assert done.returncode != 0 and "BertWordPieceCase" in done.stderr


def check_memory(folder):
    """Under 100 MB and 16 MB a thread, with 240 MB of input."""
    with open(folder + "/in.jsonl", "wb") as f:
        for _ in range(9):
            f.write(open(CORPUS, "rb").read())
    assert os.path.getsize(folder + "/in.jsonl") > 200_000_000
    for workers in (1, 4):
        pid = os.posix_spawn(MOBULA, command(folder, "--workers", str(workers), "--log-interval", "1000000"), os.environ,
                             file_actions=[(os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0),
                                           (os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_WRONLY, 0)])
        _, status, used = os.wait4(pid, 0)
        print(f"{workers} workers: {used.ru_maxrss / 1e3:.1f} MB, {used.ru_utime + used.ru_stime:.2f} CPU-s")
        assert status == 0 and used.ru_maxrss * 1024 < (100 + 16 * workers) * 1_000_000, used


if not os.path.exists(CORPUS):
    sys.exit(f"no corpus {CORPUS}: tools/test makes it, or tools/make-corpus {CORPUS}")
rng = random.Random(31)
with tempfile.TemporaryDirectory() as folder:
    check_shown(folder)
    check_bar(folder)
    check_bad_lines(folder, rng)
    check_utf8(folder, rng)
    check_flags(folder)
    check_full_stdout(folder)
    with tempfile.TemporaryDirectory() as pipes:
        check_pipes(pipes)
    check_memory(folder)
print("preprocess as its help says")
