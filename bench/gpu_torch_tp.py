"""The peer of bench/bench_layers: forward and backward passes of a stretch of Llama's layers that several GPUs share, as Megatron-LM splits them, in
PyTorch: qkv and fc1 by their outputs, proj and fc2 by their inputs, one all-reduce behind proj and behind fc2 and one each in the backward
pass, which nothing runs beside. What lies between two of them is compiled; weights, activations and gradients are bf16, cuDNN's attention
comes first. Started once a GPU with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: STEPS [LAYERS MICRO SEQ HIDDEN HEADS GROUPS FFN]; rank 0
prints milliseconds of each pass as JSON. With BENCH_TORCH_DEVICE=cpu it runs without GPUs, by gloo, to see that it does."""
import json
import os
import statistics
import sys
import time

import torch
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_llama import LLAMA_8B, Shape, angles, attention

DEVICE = os.environ.get("BENCH_TORCH_DEVICE", "cuda")
CUDA = DEVICE == "cuda"
WARM = 3


def summed(x):
    if distributed.get_world_size() > 1:
        distributed.all_reduce(x)
    return x


class Spread(torch.autograd.Function):
    """All ranks have x; the gradient is the sum of theirs."""

    @staticmethod
    def forward(_, x):
        return x.view_as(x)

    @staticmethod
    def backward(_, d):
        return summed(d.contiguous())


class Gather(torch.autograd.Function):
    """The sum of the ranks' x."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return summed(x)

    @staticmethod
    def backward(_, d):
        return d


class Part(nn.Module):
    """One rank's part of a block. x is the residual stream without the last branch's sum."""

    def __init__(self, shape, world):
        super().__init__()
        d = shape.hidden // shape.heads
        self.heads, self.groups, ffn = shape.heads // world, shape.groups // world, shape.ffn // world
        self.norm1, self.norm2 = nn.RMSNorm(shape.hidden, eps=1e-5), nn.RMSNorm(shape.hidden, eps=1e-5)
        self.qkv = nn.Linear(shape.hidden, (self.heads + 2 * self.groups) * d, bias=False)
        self.proj = nn.Linear(self.heads * d, shape.hidden, bias=False)
        self.fc1, self.fc2 = nn.Linear(shape.hidden, 2 * ffn, bias=False), nn.Linear(ffn, shape.hidden, bias=False)
        self.first, self.attend = torch.compile(self.first), torch.compile(self.attend)
        self.second, self.think = torch.compile(self.second), torch.compile(self.think)

    def first(self, x, branch):
        x = x + branch
        return x, self.norm1(x)

    def attend(self, x, cos, sin):
        return self.proj(attention(self.qkv(x), self.heads, self.groups, cos, sin))

    def second(self, x, branch):
        x = x + branch
        return x, self.norm2(x)

    def think(self, x):
        gate, up = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(F.silu(gate) * up)

    def forward(self, x, branch, cos, sin):
        x, y = self.first(x, branch)
        branch = Gather.apply(self.attend(Spread.apply(y), cos, sin))
        x, y = self.second(x, branch)
        return x, Gather.apply(self.think(Spread.apply(y)))


def settle():
    if CUDA:
        torch.cuda.synchronize()


def main():
    steps = int(sys.argv[1])
    layers, micro, seq, *sizes = (int(a) for a in sys.argv[2:]) if len(sys.argv) > 2 else (8, 4, 4096)
    shape = Shape(*sizes, vocab=0) if sizes else LLAMA_8B
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if CUDA:
        torch.cuda.set_device(0)
        distributed.init_process_group("nccl", device_id=torch.device("cuda", 0))
    else:
        distributed.init_process_group("gloo")
    torch.manual_seed(1 + rank)
    with torch.device(DEVICE):
        blocks = nn.ModuleList(Part(shape, world) for _ in range(layers)).bfloat16()
    for p in blocks.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.02)
    cos, sin = (t.to(DEVICE) for t in angles(shape, seq))
    torch.manual_seed(1)  # the same on all ranks
    x = (2 * torch.rand((micro, seq, shape.hidden), device=DEVICE) - 1).bfloat16().requires_grad_()
    d = (1e-3 * (2 * torch.rand((micro, seq, shape.hidden), device=DEVICE) - 1)).bfloat16()
    none, times = torch.zeros_like(x), []
    for _ in range(WARM + steps):
        for t in (x, *blocks.parameters()):
            t.grad = None
        distributed.barrier()
        settle()
        began = time.perf_counter()
        y, branch = x, none
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
            for block in blocks:
                y, branch = block(y, branch, cos, sin)
        (y + branch).backward(d)
        settle()
        times.append(1000 * (time.perf_counter() - began))
    assert torch.isfinite(x.grad).all()
    if rank == 0:
        print(json.dumps({"torch": torch.__version__, "ranks": world, "layers": layers, "ms": [round(t, 2) for t in times[WARM:]],
                          "median_ms": round(statistics.median(times[WARM:]), 2), "gradient_norm": x.grad.float().norm().item(),
                          **({"nccl": ".".join(map(str, torch.cuda.nccl.version())), "cudnn": torch.backends.cudnn.version(),
                              "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1)} if CUDA else {})}), flush=True)
    distributed.destroy_process_group()


main()
