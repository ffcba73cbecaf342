"""The peer of bench/gpu_parallel.py for Llama-3-8B on several GPUs: PyTorch's FSDP2: fp32 shards of weights, gradients and AdamW's
moments, weights gathered in bf16, gradients reduced in fp32; blocks and output compiled one by one, cuDNN's attention first. Started once a GPU
with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: STEPS MICRO BATCH [MODE [LAYERS SEQ HIDDEN HEADS GROUPS FFN VOCAB]]; rank 0 prints
milliseconds of each step as JSON.

MODE: `each`, gradients are reduced after every micro batch, so that only shards of them are kept; `last`, after a step's last one, for
which every GPU keeps all of them in fp32. With BENCH_TORCH_DEVICE=cpu it runs without GPUs, by gloo, to see that it does."""
import json
import os
import sys
import time

import torch
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_llama import LLAMA_8B, Llama, Shape

DEVICE = os.environ.get("BENCH_TORCH_DEVICE", "cuda")
CUDA = DEVICE == "cuda"


def settle():
    if CUDA:
        torch.cuda.synchronize()


def build(shape, layers, seq):
    """No GPU ever has the whole model."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model = Llama(shape, layers, seq)
    for part in (*model.blocks, model.output):
        part.compile()
        fully_shard(part, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=DEVICE)
    model.draw()
    return model


def main():
    steps, micro, batch = (int(a) for a in sys.argv[1:4])
    mode = sys.argv[4] if len(sys.argv) > 4 else "each"
    layers, seq, *sizes = (int(a) for a in sys.argv[5:]) if len(sys.argv) > 5 else (32, 2048)
    shape = Shape(*sizes) if sizes else LLAMA_8B
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if CUDA:
        torch.cuda.set_device(0)
        distributed.init_process_group("nccl", device_id=torch.device("cuda", 0))
    else:
        distributed.init_process_group("gloo")
    torch.manual_seed(rank)
    torch.set_float32_matmul_precision("high")
    model = build(shape, layers, seq)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=CUDA)
    n_micro, times = batch // (micro * world), []
    for _ in range(steps):
        settle()
        began = time.perf_counter()
        for k in range(n_micro):
            ids = torch.randint(0, shape.vocab - 1, (micro, seq + 1), device=DEVICE)
            model.set_requires_gradient_sync(mode == "each" or k + 1 == n_micro)
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
                loss = model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) / n_micro
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        settle()
        times.append(1000 * (time.perf_counter() - began))
    if rank == 0:
        print(json.dumps({"torch": torch.__version__, "mode": mode, "loss": loss.item() * n_micro, "ms": [round(t, 1) for t in times],
                          **({"nccl": ".".join(map(str, torch.cuda.nccl.version())), "cudnn": torch.backends.cudnn.version(),
                              "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1)} if CUDA else {})}), flush=True)
    distributed.destroy_process_group()


main()
