"""A torch.distributed program as people write them: DDP on gloo, its own checkpoints in Megatron's
layout (a directory an iteration, a file a rank, a tracker file last), resumed from the newest.

ddp.py ITERATIONS STOP_AT: in the first attempt rank 2 waits at STOP_AT for its end (0: it goes on).
"""

import hashlib
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist

SAVE_EVERY = 10


def in_rank_order(_, bucket):
    """The mean of the gradients, summed in the order of ranks: gloo's own order depends on how DDP
    has filled its buckets, which is another one in the first iteration of a process."""
    world = dist.get_world_size()
    parts = [torch.empty_like(bucket.buffer()) for _ in range(world)]
    work = dist.all_gather(parts, bucket.buffer(), async_op=True)
    return work.get_future().then(lambda _: sum(parts) / world)


def main():
    iterations, stop_at = map(int, sys.argv[1:])
    rank = int(os.environ["RANK"])
    directory = pathlib.Path(os.environ["MOBULA_CHECKPOINT_DIR"])
    tracker = directory / "latest_checkpointed_iteration.txt"
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    ddp.register_comm_hook(None, in_rank_order)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2)
    noise = torch.Generator().manual_seed(100 + rank)  # state that every rank has for itself

    began = torch.tensor(int(tracker.read_text()) if tracker.exists() else 0)
    dist.all_reduce(began, dist.ReduceOp.MAX)
    began = int(began)
    if began:
        state = torch.load(directory / f"iter_{began:07d}" / f"rank_{rank:02d}.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        noise.set_state(state["noise"])
    print(f"attempt {os.environ['MOBULA_ATTEMPT']} begins after iteration {began} with master port "
          f"{os.environ['MASTER_PORT']}", flush=True)

    for iteration in range(began + 1, iterations + 1):
        x = torch.randn(16, 8, generator=noise)
        loss = ((ddp(x) - x.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if iteration % SAVE_EVERY == 0:
            save = directory / f"iter_{iteration:07d}"
            save.mkdir(parents=True, exist_ok=True)
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                        "noise": noise.get_state()}, save / f"rank_{rank:02d}.pt")
            dist.barrier()
            if rank == 0:
                (save / ".metadata").write_text("hidden files belong to a checkpoint, too\n")
                tracker.write_text(str(iteration))
        if iteration == stop_at and rank == 2 and os.environ["MOBULA_ATTEMPT"] == "1":
            print(f"rank 2 waits at iteration {iteration}", flush=True)
            time.sleep(3600)
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.numpy().tobytes())
    if rank == 0:
        print(f"final {digest.hexdigest()}", flush=True)
    dist.destroy_process_group()


main()
