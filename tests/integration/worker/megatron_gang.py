"""Real ranks of megatron-core on the CPU, tensor and pipeline parallel, whose GPTModel computes logits and is saved as
Megatron-LM's save_checkpoint does it (--ckpt-format torch or torch_dist): one process a rank, gloo between them."""

import argparse
import contextlib
import dataclasses
import pathlib
import queue
import warnings

warnings.filterwarnings("ignore")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

# Some places ask for CUDA whatever the model is on: the buffers' device, the last stage's copy of tied embeddings, and
# the generators of dropout, which is off.
torch.cuda.current_device = lambda: "cpu"
torch.Tensor.cuda = lambda self, *_: self
torch.set_num_threads(1)  # so that a process can be forked
CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
torch.cuda.synchronize = lambda *_: None
filesystem_async._process_memory = lambda: 0  # a debug line's, which wants psutil
filesystem_async._results_queue = queue.Queue()  # saves are of one process here, and its own starts the test again

SEQ, BATCH, VOCAB = 16, 2, 256
NAME = "model_optim_rng.pt"


@dataclasses.dataclass
class Shape:
    tp: int = 1
    pp: int = 1
    vp: int = 1  # chunks of the model that a stage has
    layers: int = 4
    llama: bool = False
    groups: int = 2
    untied: bool = False
    dist: bool = False  # saved as torch_dist
    apart: bool = False  # and each layer's tensors by themselves
    dtype: torch.dtype = torch.float32  # of what torch_dist saves
    dp: int = 1
    zero: str = ""  # the distributed optimizer, and in which form torch_dist saves it
    bucket: int = 0  # elements where its buckets end


def config_of(s):
    return TransformerConfig(
        num_layers=s.layers, hidden_size=64, num_attention_heads=8, ffn_hidden_size=96,
        num_query_groups=s.groups if s.llama else 8, kv_channels=16 if s.llama else 8, use_cpu_initialization=True,
        pipeline_dtype=torch.float32, tensor_model_parallel_size=s.tp, pipeline_model_parallel_size=s.pp,
        virtual_pipeline_model_parallel_size=s.vp if s.vp > 1 else None, attention_dropout=0.0, hidden_dropout=0.0,
        gradient_accumulation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        bias_activation_fusion=False, apply_rope_fusion=False, add_bias_linear=not s.llama,
        gated_linear_unit=s.llama, activation_func=F.silu if s.llama else (lambda x: F.gelu(x, approximate="tanh")),
        normalization="RMSNorm" if s.llama else "LayerNorm")


def chunk_of(s, config, stage, chunk):
    return GPTModel(
        config=config, transformer_layer_spec=get_gpt_layer_local_spec(normalization=config.normalization),
        vocab_size=VOCAB, max_sequence_length=SEQ, pre_process=stage == 0 and chunk == 0,
        post_process=stage == s.pp - 1 and chunk == s.vp - 1, share_embeddings_and_output_weights=not s.untied,
        position_embedding_type="rope" if s.llama else "learned_absolute", rotary_base=5000,
        vp_stage=chunk if s.vp > 1 else None)


def args_of(s, **more):
    """The arguments that matter, and some that do not, as Megatron-LM's are when it saves."""
    c = config_of(s)
    return argparse.Namespace(**{**{
        "num_layers": s.layers, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 8,
        "kv_channels": c.kv_channels, "group_query_attention": s.llama, "num_query_groups": s.groups if s.llama else 1,
        "max_position_embeddings": SEQ, "seq_length": SEQ, "padded_vocab_size": VOCAB, "swiglu": s.llama,
        "add_bias_linear": not s.llama, "add_qkv_bias": not s.llama, "bias_gelu_fusion": True, "squared_relu": False,
        "normalization": c.normalization, "norm_epsilon": 1e-5, "apply_layernorm_1p": False,
        "position_embedding_type": "rope" if s.llama else "learned_absolute", "add_position_embedding": True,
        "rotary_base": 5000.0, "rotary_percent": 1.0, "rotary_interleaved": False,
        "rotary_seq_len_interpolation_factor": None, "use_rope_scaling": False, "num_experts": None,
        "untie_embeddings_and_output_weights": s.untied, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "tensor_model_parallel_size": s.tp, "pipeline_model_parallel_size": s.pp,
        "virtual_pipeline_model_parallel_size": s.vp if s.vp > 1 else None, "expert_model_parallel_size": 1,
        "consumed_train_samples": 160, "consumed_valid_samples": 8, "iteration": 20, "params_dtype": torch.float32,
        "attention_backend": AttnBackend.auto, "model_type": ModelType.encoder_or_decoder, "fp8": None,
        "tokenizer_type": "NullTokenizer", "world_size": s.tp * s.pp * s.dp, "data_parallel_size": s.dp, "context_parallel_size": 1,
        "transformer_impl": "local", "use_distributed_optimizer": bool(s.zero), "overlap_grad_reduce": bool(s.bucket),
        "ddp_bucket_size": s.bucket or None, "data_path": ["nowhere"]}, **more})


def file_of(s, tp, pp):
    return f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if s.pp > 1 else "") + "/" + NAME


def forward(s, chunks, stage, tokens):
    """Chunk 0 of every stage, then chunk 1: what each is given comes from the one before."""
    positions = torch.arange(SEQ).repeat(BATCH, 1)
    mask = torch.triu(torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool), 1)
    here, logits, tp = parallel_state.get_tensor_model_parallel_rank(), None, s.tp
    for i in range(s.vp * s.pp):
        if i % s.pp != stage:
            continue
        model = chunks[i // s.pp].eval()
        if i > 0 and s.pp > 1:
            hidden = torch.empty(SEQ, BATCH, 64)
            dist.recv(hidden, src=here + tp * ((i - 1) % s.pp))
            model.set_input_tensor(hidden)
        logits = model(input_ids=tokens, position_ids=positions, attention_mask=mask)
        if i + 1 < s.vp * s.pp and s.pp > 1:
            dist.send(logits, dst=here + tp * ((i + 1) % s.pp))
    return logits


def rank_main(rank, s, folder, given, state):
    """Saves random weights with the logits they give, or, given a file of arguments' models, loads and computes."""
    folder = pathlib.Path(folder)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{given}", rank=rank, world_size=s.tp * s.pp)
    with torch.no_grad():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=s.tp, pipeline_model_parallel_size=s.pp,
            virtual_pipeline_model_parallel_size=s.vp if s.vp > 1 else None)
        stage, tp = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
        torch.manual_seed(11 + stage)  # whole tensors are drawn and split: the same on all of a tensor group
        config = config_of(s)
        chunks = [chunk_of(s, config, stage, chunk) for chunk in range(s.vp)]
        target = folder / state / file_of(s, tp, stage)
        if given:
            saved = torch.load(target, weights_only=False)
            assert saved["checkpoint_version"] == 3.0
            for key, model in model_keys(chunks):
                model.load_state_dict(saved[key], strict=True)
        else:
            stir(s, chunks, stage)
            if s.dist:
                save_dist(s, folder / state, chunks, stage, tp)
            else:
                target.parent.mkdir(parents=True)
                save(s, target, chunks)
        tokens = torch.load(folder / "tokens.pt")
        logits = forward(s, chunks, stage, tokens)
        if stage == s.pp - 1:
            parts = [torch.empty_like(logits) for _ in range(s.tp)]
            dist.all_gather(parts, logits.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
            if tp == 0:
                torch.save(torch.cat(parts, -1), folder / "logits.pt")
    dist.barrier()
    dist.destroy_process_group()


def stir(s, chunks, stage):
    """Norms and biases matter too; those that are on every rank stay alike."""
    torch.manual_seed(70 + stage)
    for model in chunks:
        for name, p in model.named_parameters():
            own = getattr(p, "tensor_model_parallel", False)
            noise = torch.randn([p.shape[0] * (s.tp if own and p.dim() == 1 else 1), *p.shape[1:]]) * 0.1
            if own and p.dim() == 1:
                noise = noise.chunk(s.tp)[parallel_state.get_tensor_model_parallel_rank()]
            if not own or p.dim() == 1:
                p.add_(noise)
    if not s.untied and s.pp > 1:  # both copies of the table are one
        table = [m.shared_embedding_or_output_weight() for m in chunks if m.pre_process or m.post_process]
        group = parallel_state.get_embedding_group()
        for weight in table:
            dist.broadcast(weight.data, src=dist.get_process_group_ranks(group)[0], group=group)


def model_keys(chunks):
    return [("model" if len(chunks) == 1 else f"model{i}", model) for i, model in enumerate(chunks)]


def save(s, target, chunks, optimizer=None, scheduler=None, **args):
    """As save_checkpoint() lays it out; without an optimizer with --no-save-optim."""
    state = {"args": args_of(s, rank=dist.get_rank(), **args), "checkpoint_version": 3.0, "iteration": args.get("iteration", 20),
             "num_floating_point_operations_so_far": 2**60,
             "rng_state": [{"torch_rng_state": torch.get_rng_state()}]}
    if optimizer is not None:
        state.update(optimizer=optimizer.state_dict(), opt_param_scheduler=scheduler.state_dict())
    for key, model in model_keys(chunks):
        state[key] = model.state_dict_for_save_checkpoint()
    torch.save(state, target)


def save_dist(s, target, chunks, stage, tp):
    """With what an optimizer saves beside the model, and each rank's generators."""
    if dist.get_rank() == 0:
        target.mkdir(parents=True)
    dist.barrier()
    state = {"args": args_of(s), "checkpoint_version": 3.0, "iteration": 20, "num_floating_point_operations_so_far": 2**60,
             "opt_param_scheduler": {"max_lr": 0.1, "num_steps": 320}, "optimizer": {"param_state_sharding_type": "x"},
             "rng_state": ShardedObject("rng_state", [{"torch_rng_state": torch.get_rng_state()}], (s.pp, s.tp), (stage, tp))}
    for key, model in model_keys(chunks):
        model.to(s.dtype)
        state[key] = model.sharded_state_dict(metadata={"non_homogeneous_layers": s.apart})
        state["optimizer"][key] = {
            name: dataclasses.replace(t, key=f"optimizer.state.exp_avg.{t.key}", data=torch.ones_like(t.data))
            for name, t in state[key].items() if isinstance(t, ShardedTensor)}
    dist_checkpointing.save(state, str(target))
    for _, model in model_keys(chunks):
        model.float()


def run(s, folder, tokens, given="", state="theirs/iter_0000020"):
    """The logits of such ranks. given: a word, and then they load what is in folder / state."""
    folder = pathlib.Path(folder)
    torch.save(tokens, folder / "tokens.pt")
    torch.multiprocessing.start_processes(rank_main, (s, str(folder), given, state), nprocs=s.tp * s.pp,
                                          start_method="fork")
    if not given:
        (folder / state).parent.joinpath("latest_checkpointed_iteration.txt").write_text("20")
    (folder / f"meet-{given}").unlink(missing_ok=True)
    return torch.load(folder / "logits.pt")
