"""How long the stages of a pipeline wait for each other, beside the formula (p - 1) / (v m + p - 1): v is 1 for the
1F1B schedule, for the interleaved one the chunks of a stage.

One rank a stage trains a GPT with m micro batches an iteration, for several m. A straight line through their times has
what a micro batch costs as its slope; what an iteration takes beyond m times that is the bubble, and what comes once
an iteration: sums, optimizer.

Every stage needs a processor of its own. Where there are fewer cores than stages, ranks share a core in turns of fixed
length, whether they have something to do or wait: each has a slower processor, but nobody else's time.

Usage: pipeline.py [--stages N] [--micro-batches M,...] [--iterations N] [--hidden N] [--layers N]
       [--chunks N] [--rounds N] [--turn-ms N]"""
import argparse
import os
import pathlib
import signal
import sys
import tempfile
import threading

from lib import ROOT, iterations_ms, spread, write_result

sys.path.insert(0, str(ROOT / "tests/integration/worker"))
from gang import Gang  # noqa: E402  plays the agent: report sockets and the meeting of the ranks

WORKER = pathlib.Path(os.environ.get("MOBULA_BIN", ROOT / "build/release/bin")) / "mobula-worker"
WARM_UP = 2  # iterations that do not count


class Turns(threading.Thread):
    """Lets ranks run, as many at a time as there are cores, in turns."""

    def __init__(self, pids, turn_s):
        super().__init__(daemon=True)
        self.cores = sorted(os.sched_getaffinity(0))
        self.groups = [pids[i:i + len(self.cores)] for i in range(0, len(pids), len(self.cores))]
        self.turn_s, self.over = turn_s, threading.Event()
        for group in self.groups:
            for core, pid in zip(self.cores, group):
                os.sched_setaffinity(pid, {core})

    def signal(self, group, number):
        for pid in group:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def run(self):
        if len(self.groups) == 1:
            return
        for group in self.groups:
            self.signal(group, signal.SIGSTOP)
        while not self.over.is_set():
            for group in self.groups:
                self.signal(group, signal.SIGCONT)
                self.over.wait(self.turn_s)
                self.signal(group, signal.SIGSTOP)
        for group in self.groups:
            self.signal(group, signal.SIGCONT)

    def end(self):
        self.over.set()
        self.join()


def iteration_ms(o, cwd, m, chunks):
    gang = Gang(str(WORKER), o.stages, [
        "--distributed-backend", "gloo", "--pipeline-model-parallel-size", str(o.stages),
        "--num-layers", str(o.stages * o.layers), "--hidden-size", str(o.hidden), "--num-attention-heads", "8",
        "--seq-length", "128", "--max-position-embeddings", "128", "--micro-batch-size", "2",
        "--global-batch-size", str(2 * m), "--train-iters", str(WARM_UP + o.iterations), "--lr", "1e-4", "--mock-data",
        "--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--attention-dropout", "0", "--hidden-dropout", "0",
        "--eval-iters", "0", "--log-interval", "1",
        *(["--num-virtual-stages-per-pipeline-rank", str(chunks)] if chunks > 1 else [])], str(cwd))
    turns = None
    try:
        gang.start()
        turns = Turns([r.process.pid for r in gang.ranks], o.turn_ms / 1000)
        turns.start()
        codes = gang.finish()
    finally:
        if turns:
            turns.end()
        gang.kill()
    log = gang.ranks[-1].log()
    if any(codes):
        raise RuntimeError(f"exit statuses {codes}:\n{log}")
    return iterations_ms(log, WARM_UP + o.iterations, WARM_UP)


def slope(points):
    """Of the line that fits best, relative to the times: a large m counts no more than a small one."""
    w = {m: t ** -2 for m, t in points.items()}
    total = sum(w.values())
    mean_m = sum(w[m] * m for m in points) / total
    mean_t = sum(w[m] * t for m, t in points.items()) / total
    return (sum(w[m] * (m - mean_m) * (t - mean_t) for m, t in points.items()) /
            sum(w[m] * (m - mean_m) ** 2 for m in points))


def rows_of(o, took, chunks):
    """(ms that a micro batch costs, [what an iteration of m of them takes and wastes])."""
    # The fastest iteration is the one that nobody else's work disturbed.
    per_micro = slope({m: min(ms) for m, ms in took.items()})
    return round(per_micro, 2), [
        {"micro_batches": m, "iteration_ms": spread(ms), "bubble": round(1 - m * per_micro / min(ms), 3),
         "formula": round((o.stages - 1) / (chunks * m + o.stages - 1), 3)} for m, ms in took.items()]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--stages", type=int, default=4)
    p.add_argument("--micro-batches", default="1,2,4,8,16")
    p.add_argument("--iterations", type=int, default=6)
    p.add_argument("--hidden", type=int, default=512)
    p.add_argument("--layers", type=int, default=2, help="of a stage")
    p.add_argument("--chunks", type=int, default=2, help="of a stage of the interleaved schedule")
    p.add_argument("--turn-ms", type=float, default=10)
    p.add_argument("--rounds", type=int, default=2)
    o = p.parse_args()
    counts = sorted(int(m) for m in o.micro_batches.split(","))
    # The interleaved schedule takes micro batches a stage's number at a time.
    schedules = {"1F1B": (1, counts), "interleaved": (o.chunks, [m for m in counts if m % o.stages == 0])}
    took = {name: {m: [] for m in ms} for name, (_, ms) in schedules.items()}
    for _ in range(o.rounds):
        for name, (chunks, ms) in schedules.items():
            for m in ms:
                with tempfile.TemporaryDirectory(prefix="mb-pipeline-") as cwd:
                    took[name][m] += iteration_ms(o, pathlib.Path(cwd), m, chunks)
                print(f"{name}, {m} micro batches: {min(took[name][m]):.0f} ms", file=sys.stderr, flush=True)
    result = {"stages": o.stages, "layers_of_a_stage": o.layers, "chunks_of_a_stage": o.chunks, "hidden": o.hidden,
              "ranks_on_a_core": -(-o.stages // len(os.sched_getaffinity(0))), "turn_ms": o.turn_ms}
    for name, (chunks, _) in schedules.items():
        per_micro, rows = rows_of(o, took[name], chunks)
        result[name] = {"micro_batch_ms": per_micro, "rows": rows}
    write_result("pipeline", result)


main()
