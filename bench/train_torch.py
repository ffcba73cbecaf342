"""The peer of bench/train.py: the quickstart's model as a plain eager PyTorch program, one process,
all cores. Prints milliseconds per step as JSON."""
import json
import math
import sys
import time

import torch
from torch_gpt import Gpt

LAYERS, HIDDEN, HEADS, SEQ, BATCH, VOCAB = 2, 128, 4, 256, 16, 50304


def main():
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    torch.manual_seed(0)
    model = Gpt(LAYERS, HIDDEN, HEADS, SEQ, VOCAB)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    times = []
    for _ in range(steps + 2):
        tokens = torch.randint(0, 50257, (BATCH, SEQ + 1))
        began = time.perf_counter()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter() - began)
        if not math.isfinite(loss.item()):
            raise SystemExit("the loss is not finite")
    times = sorted(times[2:])
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(),
                      "ms_per_step": 1000 * times[len(times) // 2], "min_ms": 1000 * times[0]}))


main()
