"""Training on the CPU: milliseconds of a step and resident memory of a mobula gang of two ranks, of eager and of
compiled PyTorch, and of plain C loops (bench_plain_gpt.c), all of one GPT-2 shape, in turns.

The shapes: the quickstart's model, and GPT-2 124M with 4 samples of 256 tokens. All in fp32, with AdamW and clipping.
A machine may be shared: beside the median stands the best step, which is what a side can do.

Usage: train.py [--rounds N] [--shapes NAME,...]"""
import argparse
import json
import math
import os
import pathlib
import re
import statistics
import sys
import tempfile

from lib import CACHE, ROOT, iterations_ms, sh, wait_quiet, write_result

sys.path.insert(0, str(ROOT / "tests/integration/worker"))
from gang import Gang  # noqa: E402  plays the agent: report sockets and the meeting of the ranks

HERE = pathlib.Path(__file__).resolve().parent
BIN = pathlib.Path(os.environ.get("MOBULA_BIN", ROOT / "build/release/bin"))
TORCH_PYTHON = os.environ.get("MOBULA_TORCH_PYTHON", str(CACHE / "venv-torch/bin/python"))
PLAIN = BIN.parent / "bench/bench_plain_gpt"
RANKS, WARM_UP = 2, 2
# layers, hidden, heads, sequence, batch, vocabulary; steps; steps of the plain loops, which take long
SHAPES = {"quickstart": ((2, 128, 4, 256, 16, 50304), 10, 2), "gpt2-124m": ((12, 768, 12, 256, 4, 50304), 5, 1)}


def peak_mb(pid):
    """Of a process's resident memory so far; what ranks share counts for each."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1)) / 1024


def mobula(shape, steps):
    layers, hidden, heads, seq, batch, vocab = shape
    with tempfile.TemporaryDirectory(prefix="mb-train-") as cwd:
        gang = Gang(str(BIN / "mobula-worker"), RANKS, [
            "--distributed-backend", "gloo", "--num-layers", str(layers), "--hidden-size", str(hidden),
            "--num-attention-heads", str(heads), "--seq-length", str(seq), "--max-position-embeddings", str(seq),
            "--micro-batch-size", str(batch // RANKS), "--global-batch-size", str(batch), "--train-iters",
            str(steps + WARM_UP), "--lr", "3e-3", "--adam-beta2", "0.95", "--weight-decay", "0.1", "--attention-dropout",
            "0", "--hidden-dropout", "0", "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size",
            str(vocab - 48), "--eval-iters", "0", "--log-interval", "1"], cwd)
        try:
            gang.start().reached(steps)  # of steps + 2: the peak is over
            rss = sum(peak_mb(r.process.pid) for r in gang.ranks)
            codes = gang.finish()
        finally:
            gang.kill()
        log = gang.ranks[-1].log()
    if any(codes):
        raise RuntimeError(f"exit statuses {codes}:\n{log}")
    losses = [float(x) for x in re.findall(r"lm loss: ([0-9.E+-]+)", log)]
    return {"ms": iterations_ms(log, steps + WARM_UP, WARM_UP), "losses": losses, "rss_mb": rss, "ranks": RANKS}


def torch(mode):
    def run(shape, steps):
        with tempfile.TemporaryDirectory(prefix="mb-train-") as cache:  # what the compiler makes
            out = sh(TORCH_PYTHON, HERE / "train_torch.py", mode, *shape, steps, timeout=900,
                     env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache})
        return json.loads(out.splitlines()[-1])
    return run


def plain(shape, steps):
    return json.loads(sh(PLAIN, *shape, steps + 1, timeout=900))  # the first one pays for its pages


def measure(shape, steps, plain_steps, rounds):
    sides = {"mobula": mobula, "torch eager": torch("eager"), "torch compiled": torch("compiled"), "plain C loops": plain}
    seen = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            wait_quiet()
            got = side(shape, plain_steps if side is plain else steps)
            if side is plain:
                got["ms"] = got["ms"][1:]
            # Random tokens: the loss begins at the logarithm of their number, wherever the weights begin.
            if not abs(got["losses"][0] - math.log(shape[-1])) < 0.5 or not all(map(math.isfinite, got["losses"])):
                raise RuntimeError(f"{name}: losses {got['losses']}")
            seen[name].append(got)
            print(f"{name}: {min(got['ms']):.0f} ms, {got['rss_mb']:.0f} MB", file=sys.stderr, flush=True)
    rows = {}
    for name, got in seen.items():
        ms = [t for g in got for t in g["ms"]]
        rows[name] = {"ms_median": round(statistics.median(ms), 1), "ms_min": round(min(ms), 1), "n": len(ms),
                      "rss_mb": round(max(g["rss_mb"] for g in got), 1)}
    for row in rows.values():
        row["times_mobula"] = round(row["ms_median"] / rows["mobula"]["ms_median"], 2)
    return {"shape": dict(zip(("layers", "hidden", "heads", "sequence", "batch", "vocabulary"), shape)),
            "torch": seen["torch eager"][0]["torch"], "rows": rows}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--shapes", default=",".join(SHAPES))
    o = p.parse_args()
    write_result("train", {name: measure(*SHAPES[name], o.rounds) for name in o.shapes.split(",")})


main()
