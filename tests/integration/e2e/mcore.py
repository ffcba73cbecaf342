"""A megatron-core training loop on the CPU: its GPTModel with the local spec, tensor parallel size 2,
data parallel size 2, gloo; gang_program.py has its loop."""

import contextlib
import warnings

warnings.filterwarnings("ignore")

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.transformer_config import TransformerConfig

import gang_program

# Two places ask for CUDA whatever the model is on: the buffers' device, and the generators of
# dropout, which is off here.
torch.cuda.current_device = lambda: "cpu"
CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()

VOCAB, SEQ, BATCH = 64, 16, 2


def make_model():
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True,
        pipeline_dtype=torch.float32, tensor_model_parallel_size=2, attention_dropout=0.0,
        hidden_dropout=0.0, gradient_accumulation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, bias_activation_fusion=False, apply_rope_fusion=False)
    return GPTModel(config=config, transformer_layer_spec=get_gpt_layer_local_spec(),
                    vocab_size=VOCAB, max_sequence_length=SEQ)


def mean(tensor):
    group = parallel_state.get_data_parallel_group()
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    return gang_program.mean_in_rank_order(parts)


def main():
    gang_program.begin()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(100 + parallel_state.get_data_parallel_rank())
    positions = torch.arange(SEQ).repeat(BATCH, 1)
    mask = torch.triu(torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool), 1)

    def step():
        tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=data)
        loss = model(input_ids=tokens[:, :-1], position_ids=positions, attention_mask=mask,
                     labels=tokens[:, 1:].contiguous()).mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = mean(parameter.grad)
        optimizer.step()

    def restore(saved):
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        data.set_state(saved["data"])

    gang_program.train(step, lambda: {"model": model.state_dict(),
                                      "optimizer": optimizer.state_dict(),
                                      "data": data.get_state()},
                       restore, model.named_parameters)


main()
