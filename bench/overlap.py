"""How much of what the ranks send each other is hidden behind the backward pass by --overlap-grad-reduce.

Data parallel ranks train a GPT over a link of a given rate: a network namespace of its own, whose loopback has a
token bucket, and a process namespace a rank, so that none finds another's shared memory. Without the argument an
iteration takes what computing takes and then what the link takes; with it gradients leave in buckets as the pass
forms them. Hidden is (iteration without it - iteration with it) / (iteration without it - iteration without a limit).

A bucket is of whole layers, so k has to divide them; the last one is complete when the pass ends, and so are the
embeddings. At most what is sent before can be hidden: that is the limit of a row; and no more than the pass still takes
when the first bucket is complete: the rate is to be such that this is no bound. The ranks have fewer cores than they
are: what sending and adding up take of them, the pass does not have. So each row is also measured without a limit of the
link: by how much it is slower than the sum after the pass is what overlapping itself costs here ("cost_ms"), and what
the link then adds is what is left to be waited for ("waits_ms"; "link_left_ms": what the link needs for it alone).

Usage: overlap.py [--ranks N] [--layers N] [--hidden N] [--mb-per-s R] [--buckets K,...] [--iterations N] [--rounds N]"""
import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from lib import ROOT, iterations_ms, spread, write_result

sys.path.insert(0, str(ROOT / "tests/integration/worker"))
import gang  # noqa: E402  plays the agent: report sockets and the meeting of the ranks

WORKER = pathlib.Path(os.environ.get("MOBULA_BIN", ROOT / "build/release/bin")) / "mobula-worker"
WARM_UP = 2  # iterations that do not count
SEQUENCE, SAMPLES, VOCABULARY = 512, 2, 128
INSIDE = "MOBULA_BENCH_OVERLAP_INSIDE"


def layer(o):
    return 12 * o.hidden * o.hidden + 13 * o.hidden


def embeddings(o):
    return (SEQUENCE + VOCABULARY) * o.hidden


def elements(o):
    """Of all weights: layers', positions and vocabulary, the last norm."""
    return o.layers * layer(o) + embeddings(o) + 2 * o.hidden


def left(o, k):
    """Of them, what becomes final when the pass ends: the last bucket and the embeddings."""
    return o.layers // k * layer(o) + embeddings(o)


def limit(mb_per_s):
    """Of the namespace's loopback; None: none."""
    subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], stderr=subprocess.DEVNULL, check=False)
    if mb_per_s:
        subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", f"{mb_per_s * 8:.0f}mbit",
                        "burst", "256kb", "latency", "1s"], check=True)


def iteration_ms(o, cwd, worker, *args):
    ranks = gang.run(str(worker), o.ranks, [
        "--distributed-backend", "gloo", "--num-layers", str(o.layers), "--hidden-size", str(o.hidden),
        "--num-attention-heads", "8", "--seq-length", str(SEQUENCE), "--max-position-embeddings", str(SEQUENCE),
        "--micro-batch-size", str(SAMPLES), "--global-batch-size", str(SAMPLES * o.ranks),
        "--train-iters", str(WARM_UP + o.iterations), "--lr", "1e-4", "--mock-data", "--tokenizer-type", "NullTokenizer",
        "--vocab-size", str(VOCABULARY - 1), "--eval-iters", "0", "--log-interval", "1", *args], str(cwd))
    return iterations_ms(ranks.ranks[-1].log(), WARM_UP + o.iterations, WARM_UP)


def arguments():
    p = argparse.ArgumentParser()
    p.add_argument("--ranks", type=int, default=4)
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--hidden", type=int, default=256)
    p.add_argument("--mb-per-s", type=float, default=250, help="of all ranks together")
    p.add_argument("--buckets", default="2,4,8", type=lambda s: [int(k) for k in s.split(",")])
    p.add_argument("--iterations", type=int, default=5)
    p.add_argument("--rounds", type=int, default=2)
    o = p.parse_args()
    if any(o.layers % k for k in o.buckets):
        p.error(f"--buckets: {o.layers} layers are no multiple")
    return o


def measure(o, worker, scratch):
    """{name of the case: iterations' ms}, the cases in turns."""
    cases = {"no limit": (None, ()), "after": (o.mb_per_s, ())}
    for k in o.buckets:
        words = ("--overlap-grad-reduce", "--ddp-bucket-size", str(o.layers // k * layer(o)))
        cases[k], cases[k, "no limit"] = (o.mb_per_s, words), (None, words)
    took = {name: [] for name in cases}
    for round_ in range(o.rounds):
        for name, (rate, args) in cases.items():
            limit(rate)
            took[name] += iteration_ms(o, scratch / f"{round_}-{name}".replace("'", "").replace(" ", "-"), worker, *args)
            print(f"{name}: {min(took[name]):.0f} ms", file=sys.stderr, flush=True)
    return took


def main():
    o = arguments()
    if INSIDE not in os.environ:
        os.environ[INSIDE] = "1"
        os.execvp("unshare", ["unshare", "--map-root-user", "--net", sys.executable, *sys.argv])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with tempfile.TemporaryDirectory(prefix="mb-overlap-") as scratch:
        scratch = pathlib.Path(scratch)
        alone = scratch / "worker"
        alone.write_text(f'#!/bin/sh\nexec unshare --pid --fork --kill-child "{WORKER}" "$@"\n')
        alone.chmod(0o755)
        took = measure(o, alone, scratch)
    after, bare = (statistics.median(took.pop(name)) for name in ("after", "no limit"))
    # A ring's all-reduce: every rank sends 2 (n - 1) / n of the gradients.
    sent = 2 * (o.ranks - 1) * 4 * elements(o)
    rows = []
    for k in o.buckets:
        here, free = statistics.median(took[k]), statistics.median(took[k, "no limit"])
        rows.append({"buckets": k, "iteration_ms": spread(took[k]), "without_limit_ms": spread(took[k, "no limit"]),
                     "hidden": round((after - here) / (after - bare), 3), "limit": round(1 - left(o, k) / elements(o), 3),
                     "cost_ms": round(free - bare, 1), "waits_ms": round(here - free, 1),
                     "link_left_ms": round(sent * left(o, k) / elements(o) / o.mb_per_s / 1e3, 1)})
    write_result("overlap", {"ranks": o.ranks, "layers": o.layers, "hidden": o.hidden, "mb_per_s": o.mb_per_s,
                             "sent_mb": round(sent / 1e6, 1), "link_ms": round(sent / o.mb_per_s / 1e3, 1),
                             "without_limit_ms": round(bare, 1), "after_the_pass_ms": round(after, 1), "rows": rows})


main()
