"""A torch.distributed program as people write them: DDP on gloo; gang_program.py has its loop."""

import os

import torch
import torch.distributed as dist

import gang_program


def in_rank_order(_, bucket):
    """The mean of the gradients: gloo's own order depends on how DDP has filled its buckets, which is
    another one in the first iteration of a process."""
    parts = [torch.empty_like(bucket.buffer()) for _ in range(dist.get_world_size())]
    work = dist.all_gather(parts, bucket.buffer(), async_op=True)
    return work.get_future().then(lambda _: gang_program.mean_in_rank_order(parts))


def main():
    gang_program.begin()
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    ddp.register_comm_hook(None, in_rank_order)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2)
    # State that every rank has for itself.
    noise = torch.Generator().manual_seed(100 + int(os.environ["RANK"]))

    def step():
        x = torch.randn(16, 8, generator=noise)
        loss = ((ddp(x) - x.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def restore(saved):
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        noise.set_state(saved["noise"])

    gang_program.train(step, lambda: {"model": model.state_dict(),
                                      "optimizer": optimizer.state_dict(),
                                      "noise": noise.get_state()},
                       restore, lambda: model.state_dict().items())


main()
