"""A megatron-core training loop on the CPU: its GPTModel with the local spec, tensor parallel size 2,
data parallel size 2, gloo. Checkpoints in Megatron's layout: a directory an iteration, a file a
rank, the tracker file last.

mcore.py ITERATIONS STOP_AT: in the first attempt rank 2 waits at STOP_AT for its end (0: it goes on).
"""

import contextlib
import hashlib
import os
import pathlib
import sys
import time
import warnings

warnings.filterwarnings("ignore")

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.transformer_config import TransformerConfig

# Two places ask for CUDA whatever the model is on: the buffers' device, and the generators of
# dropout, which is off here.
torch.cuda.current_device = lambda: "cpu"
CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()

SAVE_EVERY, VOCAB, SEQ, BATCH = 10, 64, 16, 2


def make_model():
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True,
        pipeline_dtype=torch.float32, tensor_model_parallel_size=2, attention_dropout=0.0,
        hidden_dropout=0.0, gradient_accumulation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, bias_activation_fusion=False, apply_rope_fusion=False)
    return GPTModel(config=config, transformer_layer_spec=get_gpt_layer_local_spec(),
                    vocab_size=VOCAB, max_sequence_length=SEQ)


def mean_in_rank_order(tensor, group):
    """Every rank adds in the same order, in every attempt."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    return sum(parts) / len(parts)


def main():
    iterations, stop_at = map(int, sys.argv[1:])
    rank = int(os.environ["RANK"])
    directory = pathlib.Path(os.environ["MOBULA_CHECKPOINT_DIR"])
    tracker = directory / "latest_checkpointed_iteration.txt"
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    dp = parallel_state.get_data_parallel_rank()
    data = torch.Generator().manual_seed(100 + dp)
    positions = torch.arange(SEQ).repeat(BATCH, 1)
    mask = torch.triu(torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool), 1)

    began = torch.tensor(int(tracker.read_text()) if tracker.exists() else 0)
    dist.all_reduce(began, dist.ReduceOp.MAX)
    began = int(began)
    if began:
        state = torch.load(directory / f"iter_{began:07d}" / f"rank_{rank:02d}.pt",
                           weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        data.set_state(state["data"])
    print(f"attempt {os.environ['MOBULA_ATTEMPT']} begins after iteration {began} with master port "
          f"{os.environ['MASTER_PORT']}", flush=True)

    for iteration in range(began + 1, iterations + 1):
        tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=data)
        loss = model(input_ids=tokens[:, :-1], position_ids=positions, attention_mask=mask,
                     labels=tokens[:, 1:].contiguous()).mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = mean_in_rank_order(parameter.grad,
                                                parallel_state.get_data_parallel_group())
        optimizer.step()
        if iteration % SAVE_EVERY == 0:
            save = directory / f"iter_{iteration:07d}"
            save.mkdir(parents=True, exist_ok=True)
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                        "data": data.get_state()}, save / f"rank_{rank:02d}.pt")
            dist.barrier()
            if rank == 0:
                (save / ".metadata").write_text("hidden files belong to a checkpoint, too\n")
                tracker.write_text(str(iteration))
        if iteration == stop_at and rank == 2 and os.environ["MOBULA_ATTEMPT"] == "1":
            print(f"rank 2 waits at iteration {iteration}", flush=True)
            time.sleep(3600)
    if rank == 0:
        digest = hashlib.sha256()
        for name, value in sorted(model.named_parameters()):
            digest.update(name.encode() + value.detach().numpy().tobytes())
        print(f"final {digest.hexdigest()} loss {loss.item():.6f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
