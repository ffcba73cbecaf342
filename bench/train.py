"""Training speed on the CPU: the quickstart's model (2 layers, hidden 128, sequence 256, batch 16,
vocabulary 50304) as a mobula gang of two ranks on two nodes, and as eager PyTorch, in one run."""
import json
import os
import re
import statistics
import sys

from lib import CACHE, MOBULA, Mobula, sh, write_result

TORCH_PYTHON = os.environ.get("MOBULA_TORCH_PYTHON", str(CACHE / "venv-torch/bin/python"))
STEPS = 20


def mobula():
    cluster = Mobula()
    try:
        cluster.start_head()
        cluster.start_node()
        out = sh(MOBULA, "train", "--address", f"127.0.0.1:{cluster.gcs}", "--num-nodes", 2,
                 "--gpus-per-node", 1, "--distributed-backend", "gloo", "--num-layers", 2,
                 "--hidden-size", 128, "--num-attention-heads", 4, "--seq-length", 256,
                 "--max-position-embeddings", 256, "--micro-batch-size", 8, "--global-batch-size",
                 16, "--train-iters", STEPS, "--lr", "3e-3", "--adam-beta2", 0.95,
                 "--weight-decay", 0.1, "--attention-dropout", 0, "--hidden-dropout", 0,
                 "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", 50256,
                 "--eval-iters", 0, "--log-interval", 1, timeout=600)
    finally:
        cluster.stop()
    times = [float(t) for t in re.findall(r"elapsed time per iteration \(ms\): ([0-9.]+)", out)]
    if len(times) != STEPS:
        raise RuntimeError(f"{len(times)} of {STEPS} iterations in the log:\n{out}")
    times = times[2:]
    return {"ms_per_step": statistics.median(times), "min_ms": min(times), "ranks": 2}


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(mobula())
        theirs.append(json.loads(sh(TORCH_PYTHON, os.path.join(os.path.dirname(__file__),
                                                               "train_torch.py"), STEPS,
                                    timeout=600)))
    # The machine may be shared: the best step of each side is what it can do.
    best_ours = min(r["min_ms"] for r in ours)
    best_theirs = min(r["min_ms"] for r in theirs)
    tokens = 16 * 256
    write_result("train-cpu", {
        "tokens_per_step": tokens, "mobula": ours, "torch eager": theirs,
        "mobula_tokens_per_s": round(tokens / best_ours * 1000),
        "torch_tokens_per_s": round(tokens / best_theirs * 1000),
        "ratio": round(best_theirs / best_ours, 2)})


main()
