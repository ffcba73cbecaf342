"""Against the real megatron-core: a run goes on with its optimizer, from their checkpoint in ours and from ours in theirs.
Moments, fp32 weights, steps and the schedule are those of the run that was not moved. Usage: test_megatron_optim.py WORKER MOBULA"""

import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest
import warnings

warnings.filterwarnings("ignore")

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from safetensors.torch import load_file

import gang
from gang import tool as run
import megatron_gang
from megatron_gang import BATCH, SEQ, VOCAB, Shape

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


def write_tokens(prefix, tokens):
    tokens.astype("<u2").tofile(f"{prefix}.bin")
    with open(f"{prefix}.idx", "wb") as f:
        f.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1, 2) + struct.pack("<i", len(tokens)) +
                struct.pack("<q", 0) + struct.pack("<qq", 0, 1))


def name_of(iteration):
    return f"iter_{iteration:07d}"


class Rank:
    """One of megatron-core's, with an optimizer. halves: of what numbers its weights are."""

    def __init__(self, rank, s, folder, meet, halves=None):
        self.s, self.folder = s, pathlib.Path(folder)
        dist.init_process_group("gloo", init_method=f"file://{self.folder}/{meet}", rank=rank, world_size=s.tp * s.pp)
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
        self.ddp = [DistributedDataParallel(self.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), m)
                    for m in self.models]
        how = OptimizerConfig(optimizer="adam", lr=LR, min_lr=MIN_LR, weight_decay=WEIGHT_DECAY, adam_beta1=BETAS[0], adam_beta2=BETAS[1],
                              adam_eps=EPS, clip_grad=CLIP if halves is None and s.pp == 1 else 0.0,
                              bf16=halves == torch.bfloat16, fp16=halves == torch.float16, initial_loss_scale=64.0,
                              loss_scale_window=2, hysteresis=2, min_loss_scale=1.0)
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
        target.parent.mkdir(parents=True)
        consumed = {"consumed_train_samples": iteration * SAMPLES, "iteration": iteration}
        megatron_gang.save(self.s, target, self.models, self.optimizer, self.scheduler,
                           **{**ARGS, **consumed, **args})
        dist.barrier()
        if dist.get_rank() == 0:
            (self.folder / state / TRACKER).write_text(str(iteration))

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
        samples = iter(torch.load(self.folder / "samples.pt").split(BATCH))

        def forward(batches, chunk):
            x = next(batches)
            positions = torch.arange(SEQ).repeat(BATCH, 1)
            mask = torch.triu(torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool), 1)
            losses = chunk(input_ids=x[:, :-1], position_ids=positions, attention_mask=mask, labels=x[:, 1:])
            return losses, lambda out: (out.mean(), {"lm loss": out.mean().detach()})

        self.ddp[0].zero_grad_buffer()
        self.optimizer.zero_grad()
        told = get_forward_backward_func()(forward_step_func=forward, data_iterator=samples, model=self.ddp, seq_length=SEQ,
                                           num_microbatches=SAMPLES // BATCH, micro_batch_size=BATCH, forward_only=False)
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
                p.main_grad.copy_(gradient(getattr(p, "main_param", p).detach().float()) * scale)
        done, _, _ = self.optimizer.step()
        assert done
        self.scheduler.step(increment=SAMPLES)


def gradient(weight):
    return torch.sin(7 * weight) * 0.3


def step_main(rank, s, folder, given, at=STEPS):
    """Takes steps and saves, then one more; or, given a directory of ours, goes on from that."""
    r = Rank(rank, s, folder, f"meet-{given}")
    if given:
        r.load(given, at)
    else:
        for at in range(1, STEPS + 1):
            r.step()
        r.save("theirs", STEPS)
    told = r.step()
    r.save(f"{given}-after" if given else "after", at + 1)
    if rank == 0:
        torch.save(told, r.folder / f"told-{given}.pt")
    r.end()


def layout_main(rank, s, folder, halves):
    r = Rank(rank, s, folder, "meet", halves)
    kind = {"params_dtype": halves or torch.float32, "bf16": halves == torch.bfloat16, "fp16": halves == torch.float16}
    r.save("before", 1, **kind)
    for _ in range(STEPS):
        r.made_up_step()
    r.save("theirs", STEPS, **kind)
    r.end()


def reload_main(rank, s, folder, given, halves):
    """What was written from ours, loaded by their optimizer and saved as it says it."""
    r = Rank(rank, s, folder, f"meet-{given}", halves)
    r.load(given, STEPS)
    r.save(f"{given}-again", STEPS)
    r.end()


def start(main, s, *args):
    torch.multiprocessing.start_processes(main, (s, *args), nprocs=s.tp * s.pp, start_method="fork")


class Case(unittest.TestCase):
    def setUp(self):
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

    def train(self, *more, status=0):
        return run(WORKER, *self.words(*more), status=status)


class StepTest(Case):
    """A run of theirs is moved to ours, and one of ours to theirs: the next step is that of who stayed."""

    def check_log(self, log, told):
        line = next(line for line in log.splitlines() if "lm loss:" in line)
        self.assertIn(f"iteration {STEPS + 1:8d}/", line)
        self.assertIn(f"consumed samples: {(STEPS + 1) * SAMPLES:12d} ", line)
        self.assertLess(abs(float(line.split("lm loss: ")[1].split()[0]) - told[0]), 1e-5)
        self.assertLess(abs(float(line.split("grad norm: ")[1].split()[0]) - told[1]), 1e-3)

    def check(self, s):
        self.make_data()
        start(step_main, s, str(self.path), "")
        told = torch.load(self.path / "told-.pt")
        self.assertGreater(told[1], CLIP)
        save = ["--save", self.path / "ours", "--save-interval", 1, "--exit-interval", STEPS + 1]
        self.check_log(self.train("--load", self.path / "theirs", *save), told)
        before, _ = self.of_theirs("theirs", STEPS)
        want, _ = self.of_theirs("after", STEPS + 1)
        got, state = self.whole("ours", STEPS + 1)
        self.assertEqual((state["optimizer_steps"], state["schedule_samples"], state["warmup_samples"], state["decay_samples"]),
                         (STEPS + 1, (STEPS + 1) * SAMPLES, 2 * SAMPLES, 10 * SAMPLES))
        self.close(got, want)
        for name, (weight, exp_avg, _) in before.items():
            self.assertGreater(float((weight - want[name][0]).abs().max()), LR / 50, name)
            self.assertGreater(float((exp_avg - want[name][1]).abs().max()), float(exp_avg.abs().max()) / 100, name)
        # Without it the step is another one.
        self.train("--load", self.path / "theirs", "--no-load-optim", "--save", self.path / "without", *save[2:])
        without, state = self.whole("without", STEPS + 1)
        self.assertEqual((state["optimizer_steps"], state["schedule_samples"]), (1, SAMPLES))
        self.assertGreater(max(float((without[n][0] - want[n][0]).abs().max()) for n in want), LR / 10)
        return s, save, want

    def test_learned_positions_biases_and_tied_embeddings(self):
        self.check(Shape())

    def test_layouts_and_back(self):
        """Of two ranks by tensors; ours on several layouts gives the same; and what we write, they go on from."""
        s, save, want = self.check(Shape(tp=2, llama=True, untied=True))
        for name, world, more in (("tensors", 2, ["--tensor-model-parallel-size", 2]),
                                  ("stages", 2, ["--pipeline-model-parallel-size", 2, "--use-distributed-optimizer"]),
                                  ("data", 2, ["--use-distributed-optimizer"])):
            with self.subTest(layout=name):
                gang.run(WORKER, world, self.words("--load", self.path / "theirs", *save[2:], "--save", self.path / name, *more),
                         str(self.path / f"cwd-{name}"))
                self.close(self.whole(name, STEPS + 1)[0], want)
        self.convert(self.path / "theirs", self.path / "base")
        for tp in (1, 2):
            with self.subTest(tp=tp):
                self.convert("--to", "megatron", "--tensor-model-parallel-size", tp, "--transformer-impl", "local",
                             self.path / "base", self.path / f"given-{tp}")
                self.close(self.of_theirs(f"given-{tp}", STEPS)[0], self.whole("base", STEPS)[0], 0.0)
                start(step_main, Shape(tp=tp, llama=True, untied=True), str(self.path), f"given-{tp}")
                self.close(self.of_theirs(f"given-{tp}-after", STEPS + 1)[0], want)


    def test_what_a_run_of_ours_saved(self):
        """--ckpt-format torch: after two more steps here, the third there is the third here."""
        s = Shape(tp=2, llama=True, untied=True)
        self.make_data()
        start(step_main, s, str(self.path), "")
        at = STEPS + 2

        def ours(name, last, *more):
            words = ["--save", self.path / name, "--save-interval", at, "--exit-interval", last, "--tensor-model-parallel-size", 2, *more]
            return gang.run(WORKER, 2, self.words("--load", self.path / "theirs", *words), str(self.path / f"cwd-{name}"))

        ours("torch", at, "--ckpt-format", "torch", "--transformer-impl", "local")
        want = gang.iterations(ours("ours", at + 1).ranks[-1])[at + 1]
        start(step_main, s, str(self.path), "torch", at)
        told = torch.load(self.path / "told-torch.pt")
        self.assertLess(abs(float(want.split("lm loss: ")[1].split()[0]) - told[0]), 1e-5)
        self.assertLess(abs(float(want.split("grad norm: ")[1].split()[0]) - told[1]), 1e-3)
        self.close(self.of_theirs("torch-after", at + 1)[0], self.whole("ours", at + 1)[0])


class LayoutTest(Case):
    """Every layout of theirs, with gradients whose whole tensors can be computed here by torch's own Adam."""

    def check(self, s, halves=None):
        start(layout_main, s, str(self.path), halves)
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
        import math
        if n <= 2 * SAMPLES:
            return LR * n / (2 * SAMPLES)
        return MIN_LR + 0.5 * (math.cos(math.pi * (n - 2 * SAMPLES) / (8 * SAMPLES)) + 1) * (LR - MIN_LR)

    def test_two_by_two_with_tied_embeddings(self):
        self.check(Shape(tp=2, pp=2))
        self.refusals()

    def halves(self, s, halves, name):
        """Masters are fp32; what is written of ours is loaded by theirs, and says the same."""
        got, state = self.check(s, halves)
        self.assertGreater(max(float((v[0] - v[0].to(halves).float()).abs().max()) for v in got.values()), 0)
        self.convert("--to", "megatron", "--dtype", name, "--transformer-impl", "local", self.path / "theirs-ours",
                     self.path / "given")
        back, state_back = self.of_theirs("given", STEPS)
        self.close(back, got, 0.0)
        whole = Shape(llama=s.llama, untied=s.untied)
        (self.path / "meet-given").unlink(missing_ok=True)
        start(reload_main, whole, str(self.path), "given", halves)
        again, state_again = self.of_theirs("given-again", STEPS)
        self.close(again, got, 0.0)
        model = torch.load(self.path / "given" / name_of(STEPS) / megatron_gang.file_of(whole, 0, 0), weights_only=False)["model"]
        for name in ("embedding.word_embeddings.weight", "decoder.layers.1.mlp.linear_fc2.weight"):
            self.assertTrue(torch.equal(model[name], got[name][0].to(halves)), name)
        for key in ("optimizer_steps", "schedule_samples", "warmup_samples", "decay_samples", "grad_scaler"):
            self.assertEqual(state_again.get(key), state.get(key), key)
            self.assertEqual(state_back.get(key), state.get(key), key)
        for tp in range(s.tp):
            self.close(self.one_in_fp32(s, tp, "decoder.layers.0.mlp.linear_fc2.weight"), got, 0.0)
        return state

    def one_in_fp32(self, s, tp, name):
        """A weight of one rank in fp32: it is its own fp32 weight then, whatever other ranks have of it."""
        target = self.path / f"mixed-{tp}"
        shutil.copytree(self.path / "theirs", target)
        file = target / name_of(STEPS) / megatron_gang.file_of(s, tp, 0)
        saved = torch.load(file, weights_only=False)
        weight = saved["model"][name]
        for group in saved["optimizer"]["fp32_from_fp16_params"]:
            for i, master in enumerate(group):
                if master.shape == weight.shape and torch.equal(master.to(weight.dtype), weight):
                    saved["model"][name] = group.pop(i).detach().clone()
                    break
        self.assertEqual(saved["model"][name].dtype, torch.float32)
        torch.save(saved, file)
        return self.of_theirs(target.name, STEPS)[0]

    def test_bf16(self):
        self.assertNotIn("grad_scaler", self.halves(Shape(tp=2, llama=True, untied=True), torch.bfloat16, "bf16"))

    def test_fp16(self):
        self.assertEqual(self.halves(Shape(), torch.float16, "fp16")["grad_scaler"],
                         {"scale": 128.0, "growth_tracker": 1, "hysteresis_tracker": 2})

    def refusals(self):
        """What does not fit is named before anything is trained or written; without the optimizer it goes on."""
        file = next((self.path / "theirs").rglob(f"mp_rank_01_001/{megatron_gang.NAME}"))
        whole = file.read_bytes()

        def case(text, change):
            saved = torch.load(file, weights_only=False)
            change(saved["optimizer"], saved)
            torch.save(saved, file)
            self.refused(text, file)
            file.write_bytes(whole)

        case("state.3.exp_avg: 1 dimensions [5, 0]; it is that of model.decoder.layers.0.mlp.linear_fc2.weight", lambda o, _: o["state"][3].update(exp_avg=torch.zeros(5)))
        case("state.2.exp_avg_sq is missing", lambda o, _: o["state"][2].pop("exp_avg_sq"))
        case("state.1.exp_avg is missing", lambda o, _: o["state"].pop(1))
        case("its numbers are not F32", lambda o, _: o["state"][0].update(exp_avg=o["state"][0]["exp_avg"].double()))
        case("param_groups 0: its wd_mult is neither 0 nor 1", lambda o, _: o["param_groups"][0].update(wd_mult=0.5))
        case("param_groups 1: its lr_mult is not 1", lambda o, _: o["param_groups"][1].update(lr_mult=2.0))
        case("param_groups 1: another one has the same wd_mult", lambda o, _: o["param_groups"][1].update(wd_mult=1.0))
        case("param_groups 0: does not say which", lambda o, _: o["param_groups"][0].pop("params"))
        case("has 8 parameters, by the model's matrices they are 9", lambda o, _: o["param_groups"][0]["params"].pop())
        case("no param_groups has parameter", lambda o, _: o["param_groups"].pop(0))
        case("amsgrad is not provided", lambda o, _: o["param_groups"][0].update(amsgrad=True))
        case("max_exp_avg_sq is none that is read", lambda o, _: o["state"][0].update(max_exp_avg_sq=torch.zeros(3)))
        case("says 7 steps of the optimizer, others say 3", lambda o, _: o["state"][4].update(step=torch.tensor(7.0)))
        case("its optimizer is a chain of several", lambda o, saved: saved.update(optimizer=[o, o]))
        case("its optimizer has no param_groups", lambda o, _: o.pop("param_groups"))
        case("has no optimizer, or one", lambda o, saved: saved.pop("optimizer"))
        (file.parent / "distrib_optim.pt").write_bytes(b"")
        self.refused("distrib_optim.pt: the distributed optimizer's file is not read", file)
        (file.parent / "distrib_optim.pt").unlink()
        file = next((self.path / "theirs").rglob(f"mp_rank_00_000/{megatron_gang.NAME}"))
        whole = file.read_bytes()
        case("opt_param_scheduler: num_steps is no number", lambda _, saved: saved["opt_param_scheduler"].pop("num_steps"))
        case("but no opt_param_scheduler", lambda _, saved: saved.pop("opt_param_scheduler"))

    def refused(self, text, file):
        log = subprocess.run([MOBULA, "checkpoint", "convert", self.path / "theirs", self.path / "none"], capture_output=True,
                             text=True, check=False)
        self.assertIn(log.returncode, (65, 78), log.stderr)
        self.assertIn(text, log.stderr)
        self.assertIn("--no-load-optim", log.stderr)
        self.assertFalse((self.path / "none").exists())
        if "wd_mult" in text or "distrib" in text:
            self.make_data()
            words = ["--load", self.path / "theirs", "--exit-interval", STEPS + 1]
            log = self.train(*words, status=66)
            self.assertIn(f"Unable to load optimizer from checkpoint {self.path / 'theirs'}. Specify --no-load-optim", log)
            self.assertIn(text, log)
            self.assertNotIn("lm loss:", log)
            self.assertIn("lm loss:", self.train(*words, "--no-load-optim"))
        if "distrib" in text:  # the reason names the file, which may have any name
            odd = self.path / os.fsdecode(b"theirs-\xff")
            shutil.copytree(self.path / "theirs", odd)
            self.assertIn("lm loss:", self.train("--load", odd, *words[2:], "--no-load-optim"))

    def test_interleaved_stages(self):
        self.check(Shape(pp=2, vp=2, llama=True, untied=True))


if __name__ == "__main__":
    unittest.main()
