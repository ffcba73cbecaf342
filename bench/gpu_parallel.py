"""GPT-2 124M, bf16, 524288 tokens a step, data parallel on one GPU and on all that are here, beside PyTorch, in turns.

    MOBULA_WORKER=.../mobula-worker PYTHONPATH=tests/integration/worker python3 bench/gpu_parallel.py OUT.json [ROUNDS]

The worker runs as an agent would start it (gang.py), on mock data, with --overlap-grad-reduce; the peer is gpu_torch.py. A figure is the
median of the steps after the first two."""
import json
import os
import pathlib
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import gang

HERE = pathlib.Path(__file__).parent
STEPS, WARM, SEQ, MICRO, BATCH = 9, 2, 1024, 64, 512
ARGS = (f"--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length {SEQ} --max-position-embeddings {SEQ} "
        f"--micro-batch-size {MICRO} --global-batch-size {BATCH} --lr 3e-4 --lr-decay-style constant --adam-beta2 0.95 "
        f"--weight-decay 0.1 --hidden-dropout 0 --attention-dropout 0 --bf16 --mock-data --tokenizer-type NullTokenizer "
        f"--vocab-size 50256 --train-iters {STEPS} --log-interval 1 --eval-iters 0 --eval-interval 1000 --log-throughput "
        "--overlap-grad-reduce").split()


def summary(ms):
    middle = statistics.median(ms[WARM:])
    return {"ms": ms, "median_ms": round(middle, 1), "tokens_per_s": round(BATCH * SEQ * 1000 / middle)}


def ours(world, more):
    with tempfile.TemporaryDirectory() as folder:
        run = gang.Gang(os.environ["MOBULA_WORKER"], world, [*ARGS, *more], folder,
                        env_of_rank=lambda rank: {"CUDA_VISIBLE_DEVICES": str(rank)})
        try:
            codes = run.start().finish()
        finally:
            run.kill()
        log = run.ranks[-1].log()
        if any(codes):
            raise SystemExit("\n".join(r.log() for r in run.ranks))
        ms = [float(x) for x in re.findall(r"elapsed time per iteration \(ms\): ([0-9.]+)", log)]
        return {**summary(ms), "loss": float(re.findall(r"lm loss: ([0-9.E+-]+)", log)[-1]),
                "backend": re.findall(r"> (?:backend: CUDA|NCCL).*", run.ranks[0].log())}


def torch(world):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, str(HERE / "gpu_torch.py"), str(STEPS), str(MICRO), str(BATCH)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={
        **os.environ, "RANK": str(r), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": str(r)}) for r in range(world)]
    out = [p.communicate()[0] for p in ranks]
    if any(p.returncode for p in ranks):
        return {"failed": [p.returncode for p in ranks]}
    said = json.loads(out[0].splitlines()[-1])
    return {**said, **summary(said["ms"])}


def main():
    out, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 2
    gpus = len(list(pathlib.Path("/dev").glob("nvidia[0-9]*")))
    results = []
    worlds = sorted({1, gpus})
    rows = [(f"mobula, {w} GPU", lambda w=w: ours(w, [])) for w in worlds]
    if gpus > 1:
        rows.append((f"mobula, {gpus} GPU, distributed optimizer", lambda: ours(gpus, ["--use-distributed-optimizer"])))
    rows += [(f"torch, {w} GPU", lambda w=w: torch(w)) for w in worlds]
    for turn in range(rounds):
        for name, run in rows:
            began = time.monotonic()
            row = {"what": name, "round": turn, **run(), "took_s": round(time.monotonic() - began, 1)}
            results.append(row)
            print(name, row.get("median_ms"), "ms", row.get("tokens_per_s"), "tokens/s, took", row["took_s"], "s", flush=True)
            pathlib.Path(out).write_text(json.dumps(results, indent=1) + "\n")


main()
