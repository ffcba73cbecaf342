"""Training on the GPUs that are here, beside PyTorch, in turns; and layers that GPUs share, beside PyTorch.

    MOBULA_WORKER=.../mobula-worker PYTHONPATH=tests/integration/worker \
        python3 bench/gpu_parallel.py OUT.json [ROUNDS [WORK[,WORK...] [ARGUMENT...]]]

| WORK | what |
| gpt2 | GPT-2 124M, bf16, 524288 tokens a step, data parallel on one GPU and on all, beside DistributedDataParallel |
| stages | the same in 8 samples at a time and 256 a step, on one GPU, and as a pipeline over all: 1F1B, and with chunks of the interleaved schedule |
| llama | 8 layers of Llama-3-8B's shape, 4 samples of 4096 tokens a step, one GPU |
| llama-fp8 | the same beside itself with the layers' products in fp8, hybrid, on both sides |
| llama8b | the whole of it, 4 samples of 2048, one GPU; ARGUMENTs are ours alone: how many samples at a time and which layers are computed
again, so that fp32 weights fit |
| llama8b-all | the whole of it on all GPUs, 4 x 4 samples of 2048 a GPU and step, fp32 weights behind bf16, distributed optimizer, beside FSDP2
(gpu_torch_fsdp.py). Below 100 GiB a GPU, pairs of GPUs share a model, since a rank keeps all of its model's weights and gradients in fp32,
and FSDP2 reduces gradients after every micro batch |
| context | GPT-2 124M with samples of 8192 tokens, one at a time and two a step: on one GPU, a model on all with sequence parallel, and all sharing samples |
| context-llama | the same with 4 layers of Llama-3-8B's shape and samples of 16384 |
| layers | bench_layers (BENCH_LAYERS, BENCH_BACKEND), 4 x 4096 tokens forward and backward, on one GPU and shared by all, beside gpu_torch_tp.py |

The worker runs as an agent would start it (gang.py), on mock data, with --overlap-grad-reduce; the peer is gpu_torch.py where no other is
named. A figure is the median of the steps after the first two. Every round takes each row of each WORK once, and OUT.json is written after
each; a row that fails says so in it, and after BENCH_SECONDS no row begins."""
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
WARM, ROW_S = 2, 240
BEGAN, SECONDS = time.monotonic(), float(os.environ.get("BENCH_SECONDS", "inf"))
BF16_MEMORY_GIB = 100  # with less, a rank of ours does not hold 8 B parameters
LLAMA = "--model-preset llama3.1-8b"
# name: steps, sequence, samples at a time and a step, vocabulary, shape
WORKS = {"gpt2": (9, 1024, 64, 512, 50256, "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --max-position-embeddings 1024"),
         "stages": (9, 1024, 8, 256, 50256, "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --max-position-embeddings 1024"),
         "context": (9, 8192, 1, 2, 50256, "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --max-position-embeddings 8192"),
         "context-llama": (7, 16384, 1, 2, 128255, f"{LLAMA} --num-layers 4"),
         "llama": (14, 4096, 4, 4, 128255, f"{LLAMA} --num-layers 8"),
         "llama-fp8": (14, 4096, 4, 4, 128255, f"{LLAMA} --num-layers 8"),
         "llama8b": (10, 2048, 4, 4, 128255, LLAMA),
         "llama8b-all": (6, 2048, 4, 16, 128255, LLAMA)}  # samples of a step: a GPU


def left_s():
    return min(ROW_S, SECONDS - (time.monotonic() - BEGAN))


class Work:
    def __init__(self, name):
        self.name = name
        self.steps, self.seq, self.micro, self.batch, self.vocab, self.shape = WORKS[name]

    def summary(self, ms):
        middle = statistics.median(ms[WARM:])
        return {"ms": ms, "median_ms": round(middle, 1), "tokens_per_s": round(self.batch * self.seq * 1000 / middle)}

    def ours(self, world, *more):
        args = (f"{self.shape} --seq-length {self.seq} --micro-batch-size {self.micro} --global-batch-size {self.batch} --lr 3e-4 "
                f"--lr-decay-style constant --adam-beta2 0.95 --weight-decay 0.1 --hidden-dropout 0 --attention-dropout 0 --bf16 --mock-data "
                f"--tokenizer-type NullTokenizer --vocab-size {self.vocab} --train-iters {self.steps} --log-interval 1 --eval-iters 0 "
                f"--eval-interval 1000 --log-throughput --overlap-grad-reduce").split()
        with tempfile.TemporaryDirectory() as folder:
            run = gang.Gang(os.environ["MOBULA_WORKER"], world, [*args, *more], folder,
                            env_of_rank=lambda rank: {"CUDA_VISIBLE_DEVICES": str(rank)})
            try:
                codes = run.start().finish()
            finally:
                run.kill()
            log = run.ranks[-1].log()
            if any(codes):
                raise RuntimeError("\n".join(r.log()[-2000:] for r in run.ranks))
            ms = [float(x) for x in re.findall(r"elapsed time per iteration \(ms\): ([0-9.]+)", log)]
            return {**self.summary(ms), "arguments": list(more), "plan": re.findall(r".*GiB.*", run.ranks[0].log()),
                    "loss": float(re.findall(r"lm loss: ([0-9.E+-]+)", log)[-1]),
                    "backend": re.findall(r"> (?:backend: CUDA|NCCL).*", run.ranks[0].log())}

    def torch(self, world, *more):
        said = torch_ranks(world, "gpu_torch.py", self.steps, self.micro, self.batch, self.name.removesuffix("-fp8"), *more)
        return {**said, **self.summary(said["ms"])}

    def fsdp(self, world, mode):
        said = torch_ranks(world, "gpu_torch_fsdp.py", self.steps, self.micro, self.batch, mode)
        return {**said, **self.summary(said["ms"])}


def torch_ranks(world, program, *args):
    """What rank 0 of the peer says."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    until = time.monotonic() + left_s()
    with tempfile.TemporaryFile("w+") as errors:
        ranks = [subprocess.Popen([sys.executable, str(HERE / program), *map(str, args)], stdout=subprocess.PIPE, stderr=errors, text=True, env={
            **os.environ, "RANK": str(r), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "CUDA_VISIBLE_DEVICES": str(r)}) for r in range(world)]
        try:
            out = [p.communicate(timeout=max(1, until - time.monotonic()))[0] for p in ranks]
        finally:
            for p in ranks:
                p.kill()
                p.wait()
        if any(p.returncode for p in ranks):
            errors.seek(0)
            raise RuntimeError(f"exit statuses {[p.returncode for p in ranks]}: {errors.read()[-3000:]}")
    return json.loads(out[0].splitlines()[-1])


def layers(ranks, *more):
    command = [os.environ["BENCH_LAYERS"], os.environ["BENCH_BACKEND"], "--ranks", str(ranks), *more]
    p = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=max(1, left_s()))
    if p.returncode:
        raise RuntimeError(p.stderr[-3000:])
    return json.loads(p.stdout)


def gpu_gib():
    said = subprocess.run(["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"], stdout=subprocess.PIPE, text=True, check=True)
    return min(float(x) for x in said.stdout.split()) / 1024


def rows_of(name, gpus, more):
    """[(what, function)] of a work."""
    if name == "layers":
        rows = [("mobula, 8 layers, 1 GPU", lambda: layers(1)), ("torch, 8 layers, 1 GPU", lambda: torch_ranks(1, "gpu_torch_tp.py", 20))]
        if gpus > 1:
            rows[1:1] = [(f"mobula, 8 layers, {gpus} GPU", lambda: layers(gpus)),
                         (f"mobula, 8 layers, {gpus} GPU, sequence parallel", lambda: layers(gpus, "--sequence-parallel", "1"))]
            rows.append((f"torch, 8 layers, {gpus} GPU", lambda: torch_ranks(gpus, "gpu_torch_tp.py", 20)))
        return rows
    if name == "stages":
        stages = ["--pipeline-model-parallel-size", str(gpus)]
        chunks = [v for v in (2, 3, 6) if 12 // gpus % v == 0]
        return [("mobula, 1 GPU", lambda: Work(name).ours(1, *more)), (f"mobula, {gpus} stages, 1F1B", lambda: Work(name).ours(gpus, *stages, *more)),
                *((f"mobula, {gpus} stages of {v} chunks",
                   lambda v=v: Work(name).ours(gpus, *stages, "--num-virtual-stages-per-pipeline-rank", str(v), *more)) for v in chunks)]
    if name.startswith("context"):
        way = {"share a model": ["--tensor-model-parallel-size", str(gpus), "--sequence-parallel"],
               "share samples": ["--context-parallel-size", str(gpus)]}
        return [(f"mobula, {name}, 1 GPU", lambda: Work(name).ours(1, *more)),
                *((f"mobula, {name}, {gpus} GPU {what}", lambda args=args: Work(name).ours(gpus, *args, *more)) for what, args in way.items())]
    work = Work(name)
    if name == "llama-fp8":
        return [("mobula, bf16", lambda: work.ours(1, *more)), ("mobula, fp8", lambda: work.ours(1, "--fp8-format", "hybrid", *more)),
                ("torch, fp8, the rest all in bf16", lambda: work.torch(1, "bf16", "fp8"))]
    worlds = sorted({1, gpus}) if name == "gpt2" else [1]
    if name == "llama8b-all":
        work.batch *= gpus
        fits = gpu_gib() >= BF16_MEMORY_GIB
        way = [] if fits else ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
        return [(f"mobula, Llama-3-8B, {gpus} GPU", lambda: work.ours(gpus, "--use-distributed-optimizer", *way, *more)),
                (f"torch FSDP2, Llama-3-8B, {gpus} GPU", lambda: work.fsdp(gpus, "last" if fits else "each"))]
    rows = [(f"mobula, {w} GPU", lambda w=w: work.ours(w, *more)) for w in worlds]
    if worlds[-1] > 1:
        rows.append((f"mobula, {gpus} GPU, distributed optimizer", lambda: work.ours(gpus, "--use-distributed-optimizer", *more)))
    if name != "llama8b":  # with fp32 weights it does not fit
        rows += [(f"torch, {w} GPU", lambda w=w: work.torch(w)) for w in worlds]
    if name != "gpt2":
        rows.append(("torch, 1 GPU, all in bf16", lambda: work.torch(1, "bf16")))
    return rows


def main():
    out, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 2
    names, more = sys.argv[3].split(",") if len(sys.argv) > 3 else ["gpt2"], sys.argv[4:]
    gpus = len(list(pathlib.Path("/dev").glob("nvidia[0-9]*")))
    rows = [(name, *row) for name in names for row in rows_of(name, gpus, more)]
    results, failed = [], 0
    for turn in range(rounds):
        for name, what, run in rows:
            if left_s() <= 0:
                print(what, "not begun, the time is over", flush=True)
                continue
            began = time.monotonic()
            row = {"work": name, "what": what, "round": turn}
            try:
                row.update(run())
            except (RuntimeError, AssertionError, subprocess.TimeoutExpired) as error:
                row["failed"] = str(error)
                failed = 1
            row["took_s"] = round(time.monotonic() - began, 1)
            results.append(row)
            print(what, row.get("median_ms", row.get("failed")), "ms", row.get("tokens_per_s", ""), "tokens/s, took", row["took_s"], "s", flush=True)
            pathlib.Path(out).write_text(json.dumps(results, indent=1) + "\n")
    return failed


sys.exit(main())
