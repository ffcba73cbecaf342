"""What the programs of test_torch.py and test_mcore.py share: a training loop as people write them
around torch.distributed on gloo, with checkpoints in Megatron's layout (a directory an iteration, a
file a rank, the tracker file last), resumed from the newest.

PROGRAM ITERATIONS STOP_AT: in the first attempt rank 2 waits at STOP_AT for its end (0: it goes on).
"""

import hashlib
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist

SAVE_EVERY = 10


class Checkpoints:
    """state() is what this rank saves, restore(saved) takes it back."""

    def __init__(self, state, restore):
        self.rank = int(os.environ["RANK"])
        self.directory = pathlib.Path(os.environ["MOBULA_CHECKPOINT_DIR"])
        self.tracker = self.directory / "latest_checkpointed_iteration.txt"
        self.state, self.restore = state, restore

    def file(self, iteration):
        return self.directory / f"iter_{iteration:07d}" / f"rank_{self.rank:02d}.pt"

    def load(self):
        """The iteration that this attempt begins after; only the first node has a tracker file."""
        began = torch.tensor(int(self.tracker.read_text()) if self.tracker.exists() else 0)
        dist.all_reduce(began, dist.ReduceOp.MAX)
        began = int(began)
        if began:
            self.restore(torch.load(self.file(began), weights_only=False))
        print(f"attempt {os.environ['MOBULA_ATTEMPT']} begins after iteration {began} with master "
              f"port {os.environ['MASTER_PORT']}", flush=True)
        return began

    def save(self, iteration):
        path = self.file(iteration)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(self.state(), path)
        dist.barrier()
        if self.rank == 0:
            (path.parent / ".metadata").write_text("hidden files belong to a checkpoint, too\n")
            self.tracker.write_text(str(iteration))


def mean_in_rank_order(parts):
    """Every rank adds in the same order, in every attempt; gloo's own order may be another one."""
    return sum(parts) / len(parts)


def begin():
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo")


def train(step, state, restore, named_tensors):
    """step() is one iteration; named_tensors() is what the last line has a digest of."""
    iterations, stop_at = map(int, sys.argv[1:])
    checkpoints = Checkpoints(state, restore)
    for iteration in range(checkpoints.load() + 1, iterations + 1):
        step()
        if iteration % SAVE_EVERY == 0:
            checkpoints.save(iteration)
        if iteration == stop_at and checkpoints.rank == 2 and os.environ["MOBULA_ATTEMPT"] == "1":
            print(f"rank 2 waits at iteration {iteration}", flush=True)
            time.sleep(3600)
    if checkpoints.rank == 0:
        digest = hashlib.sha256()
        for name, value in sorted(named_tensors()):
            digest.update(name.encode() + value.detach().numpy().tobytes())
        print(f"final {digest.hexdigest()}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
