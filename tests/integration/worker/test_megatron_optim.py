"""Against the real megatron-core: a run goes on with its optimizer, from their checkpoint in ours and from ours in theirs.
Moments, fp32 weights, steps and the schedule are those of the run that was not moved. Usage: test_megatron_optim.py WORKER MOBULA"""

import os
import shutil
import subprocess
import unittest

import torch

import gang
import megatron_gang
from megatron_gang import Shape
from megatron_train import (BETAS, CLIP, EPS, LR, MOBULA, SAMPLES, STEPS, WEIGHT_DECAY, WORKER, Case, LayoutCase, Rank, gradient,
                            name_of, start)


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


def reload_main(rank, s, folder, given, halves):
    """What was written from ours, loaded by their optimizer and saved as it says it."""
    r = Rank(rank, s, folder, f"meet-{given}", halves)
    r.load(given, STEPS)
    r.save(f"{given}-again", STEPS)
    r.end()


def go_on_main(rank, s, folder, given, at, halves):
    """A step from what a run of ours saved, with gradients that can be computed of whole tensors."""
    r = Rank(rank, s, folder, f"meet-{given}", halves)
    r.load(given, at)
    r.made_up_step()
    kind = {"params_dtype": halves or torch.float32, "bf16": halves == torch.bfloat16}
    r.save(f"{given}-after", at + 1, **kind)
    r.end()


class StepTest(Case):
    """A run of theirs is moved to ours, and one of ours to theirs: the next step is that of who stayed."""

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


class LayoutTest(LayoutCase):
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

        def case(text, change, status=65):
            saved = torch.load(file, weights_only=False)
            change(saved["optimizer"], saved)
            torch.save(saved, file)
            self.refused(text, file, status)
            file.write_bytes(whole)

        case("state.3.exp_avg: 1 dimensions [5, 0]; it is that of model.decoder.layers.0.mlp.linear_fc2.weight", lambda o, _: o["state"][3].update(exp_avg=torch.zeros(5)))
        case("state.2.exp_avg_sq is missing", lambda o, _: o["state"][2].pop("exp_avg_sq"))
        case("state.1.exp_avg is missing", lambda o, _: o["state"].pop(1))
        case("its numbers are not F32", lambda o, _: o["state"][0].update(exp_avg=o["state"][0]["exp_avg"].double()), 78)
        case("param_groups 0: its wd_mult is neither 0 nor 1", lambda o, _: o["param_groups"][0].update(wd_mult=0.5), 78)
        case("param_groups 1: its lr_mult is not 1", lambda o, _: o["param_groups"][1].update(lr_mult=2.0), 78)
        case("param_groups 1: another one has the same wd_mult", lambda o, _: o["param_groups"][1].update(wd_mult=1.0), 78)
        case("param_groups 0: does not say which", lambda o, _: o["param_groups"][0].pop("params"), 66)
        case("has 8 parameters, by the model's matrices they are 9", lambda o, _: o["param_groups"][0]["params"].pop())
        case("no param_groups has parameter", lambda o, _: o["param_groups"].pop(0))
        case("amsgrad is not provided", lambda o, _: o["param_groups"][0].update(amsgrad=True), 78)
        case("max_exp_avg_sq is none that is read", lambda o, _: o["state"][0].update(max_exp_avg_sq=torch.zeros(3)), 78)
        case("says 7 steps of the optimizer, others say 3", lambda o, _: o["state"][4].update(step=torch.tensor(7.0)))
        case("its optimizer is a chain of several", lambda o, saved: saved.update(optimizer=[o, o]), 78)
        case("its optimizer has no param_groups", lambda o, _: o.pop("param_groups"))
        case("has no optimizer, or one", lambda o, saved: saved.pop("optimizer"))
        (file.parent / "distrib_optim.pt").write_bytes(b"")
        self.refused("distrib_optim.pt: no whole zip file of torch.save: it is too short", file, 65)
        torch.save({}, file.parent / "distrib_optim.pt")
        self.refused("param_groups 0: says which parameters are its, which it does not where distrib_optim.pt beside it", file, 65)
        (file.parent / "distrib_optim.pt").unlink()
        file = next((self.path / "theirs").rglob(f"mp_rank_00_000/{megatron_gang.NAME}"))
        whole = file.read_bytes()
        case("has no optimizer, or one", lambda o, saved: saved.pop("optimizer"))
        case("opt_param_scheduler: num_steps is no number", lambda _, saved: saved["opt_param_scheduler"].pop("num_steps"))
        case("but no opt_param_scheduler", lambda _, saved: saved.pop("opt_param_scheduler"))

    def refused(self, text, file, status):
        log = subprocess.run([MOBULA, "checkpoint", "convert", self.path / "theirs", self.path / "none"], capture_output=True,
                             text=True, check=False)
        self.assertEqual(log.returncode, status, log.stderr)
        self.assertIn(text, log.stderr)
        self.assertIn("--no-load-optim", log.stderr)
        self.assertFalse((self.path / "none").exists())
        log = subprocess.run([MOBULA, "checkpoint", "verify", self.path / "theirs"], capture_output=True, text=True, check=False)
        self.assertEqual(log.returncode, 0 if status == 78 else status, log.stderr)
        self.assertIn(text, log.stderr)
        self.assertEqual("warning: not compared: the optimizer, " in log.stderr, status == 78)
        if "wd_mult" in text or "distrib" in text:
            self.make_data()
            words = ["--load", self.path / "theirs", "--exit-interval", STEPS + 1]
            log = self.train(*words, status=status)
            self.assertIn(f"Unable to load optimizer from checkpoint {self.path / 'theirs'}. Specify --no-load-optim", log)
            self.assertIn(text, log)
            self.assertNotIn("lm loss:", log)
            self.assertIn("lm loss:", self.train(*words, "--no-load-optim"))
        if "too short" in text:  # the reason names the file, which may have any name
            odd = self.path / os.fsdecode(b"theirs-\xff")
            shutil.copytree(self.path / "theirs", odd)
            self.assertIn("lm loss:", self.train("--load", odd, *words[2:], "--no-load-optim"))

    def test_interleaved_stages(self):
        self.check(Shape(pp=2, vp=2, llama=True, untied=True))

    def what_a_run_of_ours_saved(self, s, halves=None, *more):
        """Its optimizer is loaded by theirs, whose next step is torch's own from the same moments."""
        self.make_data()
        start(self.main, s, str(self.path), halves)
        at = STEPS + 2
        words = ["--load", self.path / "theirs", "--save", self.path / "torch", "--save-interval", at, "--exit-interval", at,
                 "--ckpt-format", "torch", "--transformer-impl", "local", "--pipeline-model-parallel-size", s.pp,
                 "--num-layers-per-virtual-pipeline-stage", s.layers // s.pp // s.vp, *more]
        gang.run(WORKER, s.pp, self.words(*words), str(self.path / "cwd"))
        before, _ = self.of_theirs("torch", at)
        want = {n: torch.nn.Parameter(w.clone()) for n, (w, _, _) in before.items()}
        adam = torch.optim.AdamW([{"params": [w for w in want.values() if w.dim() > 1], "weight_decay": WEIGHT_DECAY},
                                  {"params": [w for w in want.values() if w.dim() == 1], "weight_decay": 0.0}],
                                 lr=self.rate(at * SAMPLES), betas=BETAS, eps=EPS)
        for name, w in want.items():
            adam.state[w].update(step=torch.tensor(float(at)), exp_avg=before[name][1].clone(), exp_avg_sq=before[name][2].clone())
            w.grad = gradient(w.detach())
        adam.step()
        start(go_on_main, s, str(self.path), "torch", at, halves)
        got, state = self.of_theirs("torch-after", at + 1)
        self.assertEqual(state["optimizer_steps"], at + 1)
        self.close(got, {n: (w.detach(), adam.state[w]["exp_avg"], adam.state[w]["exp_avg_sq"]) for n, w in want.items()}, 2e-6)

    def test_interleaved_stages_that_a_run_of_ours_saved(self):
        self.what_a_run_of_ours_saved(Shape(pp=2, vp=2))

    def test_interleaved_stages_that_a_run_of_ours_saved_in_bf16(self):
        self.what_a_run_of_ours_saved(Shape(pp=2, vp=2, llama=True, untied=True), torch.bfloat16, "--bf16")


if __name__ == "__main__":
    unittest.main()
