"""A run of the real megatron-core on the CPU with its optimizer, saved as Megatron-LM saves it; and what is compared of it
with a run of ours. Who imports this is started with WORKER MOBULA."""

import json
import math
import os
import pathlib
import sys
import tempfile
import unittest
import warnings

warnings.filterwarnings("ignore")

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from safetensors.torch import load_file

from gang import tool as run
from index_file import write_tokens
import megatron_gang
from megatron_gang import BATCH, SEQ, VOCAB

WORKER, MOBULA = (os.path.abspath(p) for p in sys.argv[1:3])
del sys.argv[1:3]
SAMPLES, STEPS, LR, MIN_LR, WEIGHT_DECAY, CLIP, EPS = 8, 3, 1e-2, 1e-3, 0.1, 0.2, 1e-4
BETAS = (0.9, 0.95)
ARGS = {"lr": LR, "min_lr": MIN_LR, "lr_decay_style": "cosine", "weight_decay": WEIGHT_DECAY, "start_weight_decay": WEIGHT_DECAY,
        "end_weight_decay": WEIGHT_DECAY, "weight_decay_incr_style": "constant", "train_iters": 10, "global_batch_size": SAMPLES,
        "adam_beta1": BETAS[0], "adam_beta2": BETAS[1], "adam_eps": EPS, "true_vocab_size": VOCAB}
TRACKER = "latest_checkpointed_iteration.txt"


def on_cpu(function):
    return lambda *a, **k: function(*a, **{**k, **({"device": "cpu"} if str(k.get("device")).startswith("cuda") else {})})


# The optimizer asks for CUDA by name, whatever its parameters are on.
torch.tensor, torch.zeros = on_cpu(torch.tensor), on_cpu(torch.zeros)
TYPE = torch.Tensor.type
KINDS = {torch.bfloat16: "torch.cuda.BFloat16Tensor", torch.float16: "torch.cuda.HalfTensor"}
torch.Tensor.type = lambda self, *a, **k: TYPE(self, *a, **k) if a or k else KINDS.get(self.dtype, "torch.cuda.FloatTensor")


def name_of(iteration):
    return f"iter_{iteration:07d}"


class Rank:
    """One of megatron-core's, with an optimizer. halves: of what numbers its weights are."""

    def __init__(self, rank, s, folder, meet, halves=None):
        self.s, self.folder = s, pathlib.Path(folder)
        dist.init_process_group("gloo", init_method=f"file://{self.folder}/{meet}", rank=rank, world_size=s.tp * s.pp * s.dp)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=s.tp, pipeline_model_parallel_size=s.pp,
            virtual_pipeline_model_parallel_size=s.vp if s.vp > 1 else None)
        self.stage, self.tp = (parallel_state.get_pipeline_model_parallel_rank(),
                               parallel_state.get_tensor_model_parallel_rank())
        torch.manual_seed(11 + self.stage)
        self.config = megatron_gang.config_of(s)
        self.models = [megatron_gang.chunk_of(s, self.config, self.stage, c) for c in range(s.vp)]
        with torch.no_grad():
            megatron_gang.stir(s, self.models, self.stage)
        if halves:
            self.models = [m.to(halves) for m in self.models]
        together = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=bool(s.zero),
                                                 overlap_grad_reduce=bool(s.bucket), bucket_size=s.bucket or None)
        self.ddp = [DistributedDataParallel(self.config, together, m, disable_bucketing=i > 0) for i, m in enumerate(self.models)]
        how = OptimizerConfig(optimizer="adam", lr=LR, min_lr=MIN_LR, weight_decay=WEIGHT_DECAY, adam_beta1=BETAS[0], adam_beta2=BETAS[1],
                              adam_eps=EPS, clip_grad=CLIP if halves is None and s.pp == 1 else 0.0,
                              bf16=halves == torch.bfloat16, fp16=halves == torch.float16, initial_loss_scale=64.0,
                              loss_scale_window=2, hysteresis=2, min_loss_scale=1.0, use_distributed_optimizer=bool(s.zero))
        self.optimizer = get_megatron_optimizer(how, self.ddp, get_standard_config_overrides(how))
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, init_lr=0.0, max_lr=LR, min_lr=MIN_LR, lr_warmup_steps=2 * SAMPLES, lr_decay_steps=10 * SAMPLES,
            lr_decay_style="cosine", start_wd=WEIGHT_DECAY, end_wd=WEIGHT_DECAY, wd_incr_steps=10 * SAMPLES,
            wd_incr_style="constant", use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=False)
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads

    def file(self, state, iteration):
        return self.folder / state / name_of(iteration) / megatron_gang.file_of(self.s, self.tp, self.stage)

    def save(self, state, iteration, **args):
        target = self.file(state, iteration)
        args = {**ARGS, "consumed_train_samples": iteration * SAMPLES, "iteration": iteration, **args}
        if iteration < STEPS and self.s.zero:  # its distributed optimizer cannot be saved before its first step
            target.parent.mkdir(parents=True, exist_ok=True)
            if parallel_state.get_data_parallel_rank() == 0:
                megatron_gang.save(self.s, target, self.models, **args)
        elif self.s.dist:
            self.save_dist(self.folder / state / name_of(iteration), args)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            if parallel_state.get_data_parallel_rank() == 0:
                megatron_gang.save(self.s, target, self.models, self.optimizer, self.scheduler, **args)
            if self.s.zero:
                self.optimizer.save_parameter_state(target.parent / "distrib_optim.pt")
        dist.barrier()
        if dist.get_rank() == 0:
            (self.folder / state / TRACKER).write_text(str(iteration))

    def save_dist(self, target, args):
        """As save_checkpoint() does it with --ckpt-format torch_dist."""
        if dist.get_rank() == 0:
            target.mkdir(parents=True)
        dist.barrier()
        how = {"chained_optim_avoid_prefix": True, "singleton_local_shards": False,
               **({"distrib_optim_sharding_type": self.s.zero} if self.s.zero else {})}
        state = {"args": megatron_gang.args_of(self.s, **args), "checkpoint_version": 3.0, "iteration": args["iteration"],
                 "opt_param_scheduler": self.scheduler.state_dict()}
        for key, model in megatron_gang.model_keys(self.models):
            state[key] = model.sharded_state_dict(metadata=how)
        state["optimizer"] = self.optimizer.sharded_state_dict({key: state[key] for key, _ in megatron_gang.model_keys(self.models)},
                                                               metadata=how)
        dist_checkpointing.save(state, str(target))

    def load(self, state, iteration):
        saved = torch.load(self.file(state, iteration), weights_only=False)
        for key, model in megatron_gang.model_keys(self.models):
            model.load_state_dict(saved[key], strict=True)
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scheduler.load_state_dict(saved["opt_param_scheduler"])
        return saved

    def end(self):
        dist.barrier()
        dist.destroy_process_group()

    def step(self):
        """All samples, in micro batches, through the model; tensor parallel at most."""
        samples = torch.load(self.folder / "samples.pt")[parallel_state.get_data_parallel_rank()::self.s.dp]
        samples = iter(samples.split(BATCH))

        def forward(batches, chunk):
            x = next(batches)
            positions = torch.arange(SEQ).repeat(BATCH, 1)
            mask = torch.triu(torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool), 1)
            losses = chunk(input_ids=x[:, :-1], position_ids=positions, attention_mask=mask, labels=x[:, 1:])
            return losses, lambda out: (out.mean(), {"lm loss": out.mean().detach()})

        self.ddp[0].zero_grad_buffer()
        self.optimizer.zero_grad()
        told = get_forward_backward_func()(forward_step_func=forward, data_iterator=samples, model=self.ddp, seq_length=SEQ,
                                           num_microbatches=SAMPLES // BATCH // self.s.dp, micro_batch_size=BATCH, forward_only=False)
        done, norm, _ = self.optimizer.step()
        assert done
        self.scheduler.step(increment=SAMPLES)
        return float(torch.stack([t["lm loss"] for t in told]).mean()), float(norm)

    def made_up_step(self):
        """With gradients that are functions of the weights, element by element: whole tensors get the same."""
        scale = self.optimizer.get_loss_scale()
        for ddp, model in zip(self.ddp, self.models):
            ddp.zero_grad_buffer()
            for p in model.parameters():
                p.main_grad.copy_(gradient(self.master(p)) * scale)
        done, _, _ = self.optimizer.step()
        assert done
        self.scheduler.step(increment=SAMPLES)


    def master(self, p):
        """A parameter in fp32; of the distributed optimizer's halves this rank's part, and zeros."""
        if not self.s.zero or p.dtype == torch.float32:
            return getattr(p, "main_param", p).detach().float()
        whole, optimizer = torch.zeros(p.numel()), self.optimizer.chained_optimizers[0]
        if p in optimizer.model_param_gbuf_map:
            at = optimizer._get_model_param_range_map(p)["param"]
            whole[at.start:at.end] = optimizer._get_main_param_and_optimizer_states(p)["param"].detach()
        return whole.view_as(p)


def gradient(weight):
    return torch.sin(7 * weight) * 0.3


def layout_main(rank, s, folder, halves):
    r = Rank(rank, s, folder, "meet", halves)
    kind = {"params_dtype": halves or torch.float32, "bf16": halves == torch.bfloat16, "fp16": halves == torch.float16}
    r.save("before", 1, **kind)
    for _ in range(STEPS):
        r.made_up_step()
    r.save("theirs", STEPS, **kind)
    r.end()


def start(main, s, *args):
    torch.multiprocessing.start_processes(main, (s, *args), nprocs=s.tp * s.pp * s.dp, start_method="fork")


class Case(unittest.TestCase):
    def setUp(self):
        self.fresh()

    def fresh(self):
        folder = tempfile.TemporaryDirectory(prefix="mobula-megatron-optim-")
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name)

    def convert(self, *words, status=0):
        return run(MOBULA, "checkpoint", "convert", *words, status=status)

    def whole(self, checkpoint, iteration):
        """{name: (weight, exp_avg, exp_avg_sq)} of one of ours, and its state.json."""
        directory = self.path / checkpoint / name_of(iteration)
        state = json.loads((directory / "state.json").read_text())
        weights = load_file(directory / "model_tp00_pp00.safetensors")
        files = sorted(directory.glob(f"optim_dp_*_of_{state['data_parallel_size']:03d}.safetensors"))
        flat = {key: torch.cat([load_file(f)[key] for f in files]) for key in ("exp_avg", "exp_avg_sq")}
        return {t["name"]: (weights[t["name"]], *(flat[key][t["offset"]:t["offset"] + t["elements"]].view_as(weights[t["name"]])
                                                  for key in flat)) for t in state["layout"]}, state

    def of_theirs(self, state, iteration):
        self.convert(self.path / state, self.path / f"{state}-ours")
        return self.whole(f"{state}-ours", iteration)

    def close(self, got, want, bound=2e-5):
        """Weights, and moments as parts of a tensor's largest one."""
        self.assertEqual(set(got), set(want))
        for name, values in want.items():
            for what, (a, b) in enumerate(zip(got[name], values)):
                size = float(b.abs().max())
                self.assertLessEqual(float((a - b).abs().max()), bound * (max(1.0, size) if what == 0 else size), (name, what))

    def make_data(self):
        """All samples are alike, so that it does not matter which ones an iteration gets."""
        tokens = torch.randint(0, VOCAB - 1, (SEQ,), generator=torch.Generator().manual_seed(3))
        write_tokens(self.path / "data", tokens.repeat(SAMPLES).numpy())
        torch.save(torch.cat([tokens, tokens[:1]]).repeat(SAMPLES, 1), self.path / "samples.pt")

    def words(self, *more):
        return [str(w) for w in (
            "--use-checkpoint-args", "--distributed-backend", "gloo", "--seq-length", SEQ, "--micro-batch-size", BATCH,
            "--global-batch-size", SAMPLES, "--train-iters", 10, "--lr", LR, "--min-lr", MIN_LR, "--lr-decay-style", "cosine",
            "--lr-warmup-iters", 2, "--weight-decay", WEIGHT_DECAY, "--adam-beta2", BETAS[1], "--adam-eps", EPS, "--clip-grad",
            CLIP, "--eval-iters", 0, "--log-interval", 1, "--tokenizer-type", "NullTokenizer", "--vocab-size", VOCAB - 1,
            "--data-path", self.path / "data", "--split", "100,0,0", "--dataloader-type", "cyclic", *more)]

    def train(self, *more, status=0, env=None):
        return run(WORKER, *self.words(*more), status=status, env=env)

    def check_log(self, log, told):
        line = next(line for line in log.splitlines() if "lm loss:" in line)
        self.assertIn(f"iteration {STEPS + 1:8d}/", line)
        self.assertIn(f"consumed samples: {(STEPS + 1) * SAMPLES:12d} ", line)
        self.assertLess(abs(float(line.split("lm loss: ")[1].split()[0]) - told[0]), 1e-5)
        self.assertLess(abs(float(line.split("grad norm: ")[1].split()[0]) - told[1]), 1e-3)


class LayoutCase(Case):
    """Every layout of theirs, with gradients whose whole tensors can be computed here by torch's own Adam."""

    main = staticmethod(layout_main)

    def check(self, s, halves=None):
        start(self.main, s, str(self.path), halves)
        weights = self.weights("before")
        got, state = self.of_theirs("theirs", STEPS)
        want = {n: torch.nn.Parameter(w.clone()) for n, w in weights.items()}
        groups = [{"params": [w for w in want.values() if w.dim() > 1], "weight_decay": WEIGHT_DECAY},
                  {"params": [w for w in want.values() if w.dim() == 1], "weight_decay": 0.0}]
        adam = torch.optim.AdamW(groups, lr=0.0, betas=BETAS, eps=EPS)
        for k in range(STEPS):
            for group in adam.param_groups:
                group["lr"] = self.rate(k * SAMPLES)
            for w in want.values():
                w.grad = gradient(w.detach())
            adam.step()
        self.assertEqual((state["iteration"], state["optimizer_steps"], state["schedule_samples"], state["has_optimizer"]),
                         (STEPS, STEPS, STEPS * SAMPLES, True))
        self.close(got, {n: (w.detach(), adam.state[w]["exp_avg"], adam.state[w]["exp_avg_sq"]) for n, w in want.items()}, 1e-6)
        self.assertGreater(min(float(v[1].abs().max()) for v in got.values()), 1e-4)
        return got, state

    def weights(self, state):
        self.convert("--no-load-optim", self.path / state, self.path / f"{state}-ours")
        saved = json.loads((self.path / f"{state}-ours" / name_of(1) / "state.json").read_text())
        self.assertFalse(saved["has_optimizer"])
        self.assertEqual(sorted(p.name for p in (self.path / f"{state}-ours" / name_of(1)).iterdir()),
                         ["model_tp00_pp00.safetensors", "state.json"])
        return load_file(self.path / f"{state}-ours" / name_of(1) / "model_tp00_pp00.safetensors")

    def rate(self, n):
        if n <= 2 * SAMPLES:
            return LR * n / (2 * SAMPLES)
        return MIN_LR + 0.5 * (math.cos(math.pi * (n - 2 * SAMPLES) / (8 * SAMPLES)) + 1) * (LR - MIN_LR)
