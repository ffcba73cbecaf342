"""The peer of bench/gpu_parallel.py: GPT-2 124M, or 8 or all 32 layers of Llama-3-8B's shape, in PyTorch: torch.compile, bf16 autocast over fp32
weights or all in bf16, fused AdamW, cuDNN's attention first, DistributedDataParallel where there is more than one process. Started once a GPU
with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: STEPS MICRO BATCH [gpt2|llama|llama8b [bf16] [fp8: the layers' products,
Llama's only]]; rank 0 prints milliseconds of each step as JSON."""
import contextlib
import json
import os
import sys
import time

import torch
from torch import distributed, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_gpt import Gpt
from torch_llama import LLAMA_8B, Fp8Linear, Llama

MODEL = sys.argv[4] if len(sys.argv) > 4 else "gpt2"
ALL_BF16, FP8 = "bf16" in sys.argv[5:], "fp8" in sys.argv[5:]
if MODEL == "gpt2":
    LAYERS, HIDDEN, HEADS, SEQ, VOCAB = 12, 768, 12, 1024, 50304
else:
    VOCAB = LLAMA_8B.vocab
    LAYERS, SEQ = (8, 4096) if MODEL == "llama" else (32, 2048)


def main():
    steps, micro, batch = (int(a) for a in sys.argv[1:4])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(rank)
    torch.cuda.set_device(0)
    torch.set_float32_matmul_precision("high")
    with torch.device("cpu" if MODEL == "gpt2" else "cuda"):  # 8 B weights take minutes to be drawn on a CPU
        model = (Gpt(LAYERS, HIDDEN, HEADS, SEQ, VOCAB) if MODEL == "gpt2" else Llama(LLAMA_8B, LAYERS, SEQ, Fp8Linear if FP8 else nn.Linear)).cuda()
    if ALL_BF16:
        model = model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    step_model = torch.compile(model)
    if world > 1:
        distributed.init_process_group("nccl", device_id=torch.device("cuda", 0))
        step_model = nn.parallel.DistributedDataParallel(step_model, device_ids=[0], gradient_as_bucket_view=True)
    n_micro, times = batch // (micro * world), []
    for _ in range(steps):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for k in range(n_micro):
            ids = torch.randint(0, VOCAB - 47, (micro, SEQ + 1), device="cuda")
            last = world == 1 or k + 1 == n_micro
            with contextlib.nullcontext() if last else step_model.no_sync():
                with torch.autocast("cuda", torch.bfloat16, enabled=not ALL_BF16), sdpa_kernel(
                        [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
                    loss = step_model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) / n_micro
                loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=world == 1)
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - began))
    if rank == 0:
        print(json.dumps({"torch": torch.__version__, "nccl": ".".join(map(str, torch.cuda.nccl.version())), "loss": loss.item() * n_micro,
                          "memory_gib": torch.cuda.max_memory_allocated() / 2**30, "ms": [round(t, 1) for t in times]}), flush=True)
    if world > 1:
        distributed.destroy_process_group()


main()
