"""The peer of bench/train.py: a GPT-2 as a plain PyTorch program, one process, all cores, eager or compiled.
Prints milliseconds and losses of the steps and the peak of resident memory as JSON.

Usage: train_torch.py eager|compiled LAYERS HIDDEN HEADS SEQUENCE BATCH VOCABULARY STEPS"""
import json
import resource
import sys
import time

import torch
from torch_gpt import Gpt

WARM_UP = 2  # steps that are not counted: the first compiles


def main():
    mode, (layers, hidden, heads, seq, batch, vocab, steps) = sys.argv[1], map(int, sys.argv[2:])
    torch.manual_seed(0)
    model = Gpt(layers, hidden, heads, seq, vocab)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    loss_of = {"eager": model, "compiled": torch.compile(model)}[mode]
    ms, losses = [], []
    for _ in range(steps + WARM_UP):
        tokens = torch.randint(0, vocab, (batch, seq + 1))
        began = time.perf_counter()
        loss = loss_of(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ms.append(1000 * (time.perf_counter() - began))
        losses.append(loss.item())
    print(json.dumps({"ms": ms[WARM_UP:], "losses": losses, "torch": torch.__version__, "threads": torch.get_num_threads(),
                      "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


main()
