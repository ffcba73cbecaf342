"""GPT-2 124M, bf16, 524288 tokens a step, data parallel on one GPU and on all that are here, beside PyTorch, in turns; or, on one GPU, 8 layers
of Llama-3-8B's shape, 4 samples of 4096 tokens a step, or the whole of it, 4 of 2048 (llama8b; arguments behind it are ours alone:
how many samples at a time and which layers are computed again, so that fp32 weights fit).

    MOBULA_WORKER=.../mobula-worker PYTHONPATH=tests/integration/worker \
        python3 bench/gpu_parallel.py OUT.json [ROUNDS [gpt2|llama|llama8b [ARGUMENT...]]]

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
MODEL = sys.argv[3] if len(sys.argv) > 3 else "gpt2"
if MODEL == "gpt2":
    STEPS, WARM, SEQ, MICRO, BATCH, VOCAB = 9, 2, 1024, 64, 512, 50256
    SHAPE = f"--num-layers 12 --hidden-size 768 --num-attention-heads 12 --max-position-embeddings {SEQ}"
elif MODEL == "llama":
    STEPS, WARM, SEQ, MICRO, BATCH, VOCAB = 14, 2, 4096, 4, 4, 128255
    SHAPE = "--model-preset llama3.1-8b --num-layers 8"
else:
    STEPS, WARM, SEQ, MICRO, BATCH, VOCAB = 10, 2, 2048, 4, 4, 128255
    SHAPE = "--model-preset llama3.1-8b"
ARGS = (f"{SHAPE} --seq-length {SEQ} --micro-batch-size {MICRO} --global-batch-size {BATCH} --lr 3e-4 --lr-decay-style constant --adam-beta2 0.95 "
        f"--weight-decay 0.1 --hidden-dropout 0 --attention-dropout 0 --bf16 --mock-data --tokenizer-type NullTokenizer "
        f"--vocab-size {VOCAB} --train-iters {STEPS} --log-interval 1 --eval-iters 0 --eval-interval 1000 --log-throughput "
        f"--overlap-grad-reduce {' '.join(sys.argv[4:])}").split()


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
        return {**summary(ms), "plan": re.findall(r".*GiB.*", run.ranks[0].log())[:3], "loss": float(re.findall(r"lm loss: ([0-9.E+-]+)", log)[-1]),
                "backend": re.findall(r"> (?:backend: CUDA|NCCL).*", run.ranks[0].log())}


def torch(world, more=()):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, str(HERE / "gpu_torch.py"), str(STEPS), str(MICRO), str(BATCH), MODEL, *more]
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
    worlds = sorted({1, gpus}) if MODEL == "gpt2" else [1]
    rows = [(f"mobula, {w} GPU", lambda w=w: ours(w, [])) for w in worlds]
    if worlds[-1] > 1:
        rows.append((f"mobula, {gpus} GPU, distributed optimizer", lambda: ours(gpus, ["--use-distributed-optimizer"])))
    if MODEL != "llama8b":  # with fp32 weights it does not fit
        rows += [(f"torch, {w} GPU", lambda w=w: torch(w)) for w in worlds]
    if MODEL != "gpt2":
        rows.append(("torch, 1 GPU, all in bf16", lambda: torch(1, ["bf16"])))
    for turn in range(rounds):
        for name, run in rows:
            began = time.monotonic()
            row = {"what": name, "round": turn, **run(), "took_s": round(time.monotonic() - began, 1)}
            results.append(row)
            print(name, row.get("median_ms"), "ms", row.get("tokens_per_s"), "tokens/s, took", row["took_s"], "s", flush=True)
            pathlib.Path(out).write_text(json.dumps(results, indent=1) + "\n")


main()
