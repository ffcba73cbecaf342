"""What a save costs training, with and without --async-save, and how near writing and loading come to the disk:
a gang of ranks trains a GPT and saves, our own files and Megatron-LM's (--ckpt-format torch); a raw writer and reader of
as many bytes run in the same rounds.

Usage: save.py [--ranks N] [--layers N] [--hidden N] [--rounds N] [--dir DIR]"""
import argparse
import os
import pathlib
import re
import shutil
import statistics
import sys
import tempfile
import time

from lib import ROOT, spread, write_result

sys.path.insert(0, str(ROOT / "tests/integration/worker"))
from gang import Gang  # noqa: E402  plays the agent: report sockets and the meeting of the ranks

WORKER = pathlib.Path(os.environ.get("MOBULA_BIN", ROOT / "build/release/bin")) / "mobula-worker"
CHUNK = 1 << 20
SAVES, PAUSE = 4, 8  # iterations: 8, 16, 24, 32; the first pays for fresh directories and pages
PERIOD_S = 600
FORMATS = {"safetensors": [], "torch": ["--ckpt-format", "torch"]}


def raw_write(directory, total):
    """dd and fsync: what the disk takes from one writer."""
    path = pathlib.Path(directory) / "raw"
    block = os.urandom(CHUNK)
    began = time.monotonic()
    with open(path, "wb", buffering=0) as f:
        for at in range(0, total, CHUNK):
            f.write(block[:min(CHUNK, total - at)])
        os.fsync(f.fileno())
    return total / (time.monotonic() - began) / 1e6


def warm(directory, total):
    """A virtual machine gets its memory page by page: nobody shall pay for that inside a measurement."""
    for _ in range(2):
        raw_write(directory, total)
    (pathlib.Path(directory) / "raw").unlink()


def forget(paths):
    """The page cache lets go of files, so that reading them is reading the disk."""
    for path in paths:
        with open(path, "rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def raw_read(directory):
    path = pathlib.Path(directory) / "raw"
    forget([path])
    block = bytearray(CHUNK)
    began = time.monotonic()
    with open(path, "rb", buffering=0) as f:
        while f.readinto(block):
            pass
    rate = path.stat().st_size / (time.monotonic() - began) / 1e6
    path.unlink()
    return rate


def gang(o, cwd, *args):
    g = Gang(str(WORKER), o.ranks, [
        "--distributed-backend", "gloo", "--num-layers", str(o.layers), "--hidden-size", str(o.hidden),
        "--num-attention-heads", "8", "--seq-length", "128", "--max-position-embeddings", "128",
        "--micro-batch-size", "1", "--global-batch-size", str(2 * o.ranks), "--lr", "1e-4", "--mock-data",
        "--tokenizer-type", "NullTokenizer", "--vocab-size", "50000", "--eval-iters", "0", "--log-interval", "1",
        "--use-distributed-optimizer", *args], str(cwd))
    try:
        # No deadline of the harness below the benchmark's: large models take their time.
        g.start()
        while any(g.open):
            g.wait(lambda: not g.open or any(r.of("progress") for r in g.ranks))
            for r in g.ranks:
                r.messages.clear()
        codes = g.finish()
    finally:
        g.kill()
    log = "".join(r.log() for r in g.ranks)
    if any(codes):
        raise RuntimeError(f"exit statuses {codes}:\n{log}")
    return log


def saves_of(log):
    found = re.findall(r"saved iteration (\d+): stalled ([0-9.]+) ms, written in ([0-9.]+) s, ([0-9.]+) MB/s", log)
    assert len(found) == SAVES, log
    return [{"stall_ms": float(a), "write_s": float(b), "mb_per_s": float(c)} for _, a, b, c in found[1:]]


def steps_of(log):
    """Milliseconds of the iteration that follows a save, which shares memory and cores with it, and of all others."""
    ms = {int(i): float(t) for i, t in re.findall(
        r"iteration +(\d+)/ *\d+ .* elapsed time per iteration \(ms\): ([0-9.]+)", log)}
    after = [ms[i + 1] for i in range(2 * PAUSE, SAVES * PAUSE, PAUSE)]
    others = [t for i, t in ms.items() if i > PAUSE and i % PAUSE not in (1, 2)]
    return {"after_save_ms": round(statistics.median(after), 1), "other_ms": round(statistics.median(others), 1)}


def one_round(o, scratch, of_format):
    out = {}
    for name, flags in (("sync", of_format), ("async", [*of_format, "--async-save"])):
        target = scratch / name
        log = gang(o, scratch / f"run-{name}", "--train-iters", str(SAVES * PAUSE), "--save", str(target),
                   "--save-interval", str(PAUSE), *flags)
        out[name] = {"saves": saves_of(log), "steps": steps_of(log)}
        last = target / f"iter_{SAVES * PAUSE:07d}"
        files = [p for p in last.rglob("*") if p.is_file()]
        out["bytes"] = sum(p.stat().st_size for p in files)
        if name == "async":
            forget(files)
            log = gang(o, scratch / "run-load", "--train-iters", str(SAVES * PAUSE), "--load", str(target))
            ms = float(re.search(r"load-checkpoint \.+: \([0-9.]+, ([0-9.]+)\)", log).group(1))
            out["load_mb_per_s"] = out["bytes"] / ms / 1e3
        shutil.rmtree(target)
        shutil.rmtree(scratch / f"run-{name}")
        shutil.rmtree(scratch / "run-load", ignore_errors=True)
        out.setdefault("raw_write_mb_per_s", []).append(raw_write(scratch, out["bytes"]))
        out.setdefault("raw_read_mb_per_s", []).append(raw_read(scratch))
    return out


def summary(rounds):
    """Of the rounds of one format."""
    result = {"bytes": rounds[0]["bytes"]}
    for name in ("sync", "async"):
        saves = [s for r in rounds for s in r[name]["saves"]]
        stall = statistics.median(s["stall_ms"] for s in saves)
        result[name] = {key: spread([s[key] for s in saves]) for key in ("stall_ms", "write_s", "mb_per_s")}
        result[name]["steps"] = [r[name]["steps"] for r in rounds]
        result[name]["stall_percent_at_one_save_per_10_min"] = round(100 * stall / 1000 / PERIOD_S, 5)
    raw = [v for r in rounds for v in r["raw_write_mb_per_s"]]
    result["raw_write_mb_per_s"] = spread(raw)
    result["raw_read_mb_per_s"] = spread([v for r in rounds for v in r["raw_read_mb_per_s"]])
    result["load_mb_per_s"] = spread([r["load_mb_per_s"] for r in rounds])
    result["sync_write_of_raw"] = round(result["sync"]["mb_per_s"]["median"] / statistics.median(raw), 3)
    result["load_of_raw_read"] = round(
        result["load_mb_per_s"]["median"] / result["raw_read_mb_per_s"]["median"], 3)
    return result


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--layers", type=int, default=6)
    p.add_argument("--hidden", type=int, default=512)
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--dir", default=tempfile.gettempdir())
    o = p.parse_args()
    rounds = {name: [] for name in FORMATS}
    for _ in range(o.rounds):
        with tempfile.TemporaryDirectory(prefix="mb-save-", dir=o.dir) as scratch:
            warm(scratch, (SAVES + 2) * 12 * o.hidden * (12 * o.layers * o.hidden + 50304))
            for name, flags in FORMATS.items():
                rounds[name].append(one_round(o, pathlib.Path(scratch), flags))
    result = {"ranks": o.ranks, "layers": o.layers, "hidden": o.hidden, **summary(rounds.pop("safetensors"))}
    write_result("save", {**result, **{name: summary(of_format) for name, of_format in rounds.items()}})


main()
