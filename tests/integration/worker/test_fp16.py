"""--fp16: what it trains is what fp32 trains, overflows change nothing but the loss scale, every layout agrees, and a run goes
on from a checkpoint as if it had not stopped. Usage: test_fp16.py WORKER"""

import json
import re
import unittest

from gang import content, iterations, losses
from layouts import LLAMA, MODEL_FILE, NO_DROPOUT, OVERLAP, SEQUENCE, ZERO, LayoutCase, length, split

FP16 = ["--fp16", "--initial-loss-scale", "1024"]
BOUND = 1e-4  # of a loss, relative; 5e-6 is seen
NEVER = ["--eval-interval", "1000", "--eval-iters", "0"]


def fields(gang):
    """{iteration: {name: text}} of the log's lines."""
    return {i: dict(re.findall(r"([a-z][a-z ]*): +(\S+) \|", line)) for i, line in iterations(gang.ranks[-1]).items()}


def scales_after(overflows, scale, window=1000, hysteresis=2):
    """What the loss scale is after each iteration (Megatron-LM's rule, written once more)."""
    out, good, patience = [], 0, hysteresis
    for overflow in overflows:
        if overflow:
            good, patience = 0, patience - 1
            scale = max(scale / 2, 1.0) if patience <= 0 else scale
        else:
            good += 1
            if good == window:
                good, patience, scale = 0, hysteresis, scale * 2
        out.append(scale)
    return out


class Fp16Test(LayoutCase):
    MODEL = ["--num-layers", "2", "--global-batch-size", "8", *length(16), *NEVER]

    def near_losses(self, got, want, what):
        a, b = losses(got), losses(want)
        self.assertEqual(sorted(a), sorted(b))
        worst = max(abs(a[i] - b[i]) / b[i] for i in a)
        print(f"  {what}: losses of {len(a)} iterations at most {worst:.1e} apart")
        self.assertLess(worst, BOUND, what)

    def test_it_trains_what_fp32_trains(self):
        for name, model in (("gpt2", []), ("llama", [*LLAMA, "--apply-layernorm-1p"])):
            want, got = (self.train(1, *model, *more, "--train-iters", "100") for more in ([], FP16))
            self.near_losses(got, want, name)
            self.assertLess(losses(got)[100], losses(got)[1] - 0.4)  # it learns
            log = got.ranks[0].log()
            self.assertIn("using torch.float16 for parameters ...\n", log)
            self.assertIn("WARNING: Setting args.check_for_nan_in_loss_and_grad to False since dynamic loss scaling is being "
                          "used\n", log)
            self.assertRegex(log, r"weights: fp16, for products +")
            for line in fields(got).values():
                self.assertEqual((line["loss scale"], line["number of skipped iterations"], line["number of nan iterations"]),
                                 ("1024.0", "0", "0"))
            self.assertEqual(fields(want)[1]["loss scale"], "1.0")
        once = self.train(1, "--fp16", "--loss-scale", "512")
        self.assertEqual({line["loss scale"] for line in fields(once).values()}, {"512.0"})
        self.near_losses(once, self.alone(), "a constant scale")

    def test_overflows(self):
        """From 2^32 on, as Megatron-LM begins. The steps until the scale fits are left out: no loss, no norm, no learning
        rate, no change of weights; samples are consumed."""
        gang = self.train(1, "--fp16", "--train-iters", "30", "--loss-scale-window", "4", "--save", self.path("over"),
                          "--save-interval", "2")
        lines = fields(gang)
        skipped = [lines[i]["number of skipped iterations"] == "1" for i in sorted(lines)]
        first = skipped.index(False)
        print(f"  {first} iterations left out at the beginning, {sum(skipped)} in all")
        self.assertGreater(first, 4)
        self.assertGreater(sum(skipped), first)  # it has grown until it overflowed again
        self.assertEqual([float(lines[i]["loss scale"]) for i in sorted(lines)], scales_after(skipped, 2.0**32, window=4))
        for i, left_out in enumerate(skipped, 1):
            self.assertEqual("lm loss" not in lines[i] and "grad norm" not in lines[i], left_out)
            self.assertEqual(lines[i]["learning rate"] == "0.000000E+00", i <= first)
        self.assertIn(f"iteration {first:8}/      30 | consumed samples: {first * 8:12} |", gang.ranks[-1].log())
        files = [content(self.path("over", f"iter_{i:07}")) for i in (2, 4)]
        for name in files[0]:
            if name != "state.json":
                self.assertEqual(files[0][name], files[1][name])
        state = json.loads(files[1]["state.json"])
        self.assertEqual((state["skipped_iterations"], state["optimizer_steps"], state["schedule_samples"],
                          state["consumed_train_samples"]), (4, 0, 0, 32))
        self.assertEqual(state["grad_scaler"], {"scale": 2.0**29, "growth_tracker": 0, "hysteresis_tracker": -2})

    def test_it_goes_on_as_if_it_had_not_stopped(self):
        words = ["--fp16", "--initial-loss-scale", str(2**18), "--loss-scale-window", "3"]
        for world, layout in ((1, []), (4, split(ZERO, tensor=2))):
            name = f"goes-on{world}"
            whole = self.train(world, *words, *layout, "--save", self.path(name), "--save-interval", "10")
            self.assertGreater(len({line["loss scale"] for line in fields(whole).values()}), 2)
            with open(self.path(name, "latest_checkpointed_iteration.txt"), "w", encoding="ascii") as f:
                f.write("10")
            rest = self.train(world, *words, *layout, "--load", self.path(name), "--save", self.path(name + "-2"),
                              "--save-interval", "10")
            self.assertEqual(fields(rest), {i: line for i, line in fields(whole).items() if i > 10})
            a, b = (content(self.path(n, "iter_0000020")) for n in (name, name + "-2"))
            self.assertEqual(a[MODEL_FILE], b[MODEL_FILE])
            self.assertEqual(*(json.loads(x["state.json"])["grad_scaler"] for x in (a, b)))

    def test_checkpoints_of_other_kinds_of_numbers(self):
        """Weights are fp32 in all of them."""
        self.save(1, "fp32")
        self.save(1, "fp16", *FP16)
        after = self.train(1, *FP16, "--load", self.path("fp32"))
        self.assertIn("***WARNING*** found an old checkpoint, will not load grad scaler ...\n", after.ranks[0].log())
        back = self.train(1, "--load", self.path("fp16"))
        want = losses(self.alone())
        for gang in (after, back):
            self.assertEqual(sorted(losses(gang)), list(range(11, 21)))
            for i, x in losses(gang).items():
                self.assertLess(abs(x - want[i]) / want[i], BOUND)

    def test_every_layout_trains_the_same_model(self):
        model = [*LLAMA, *NO_DROPOUT, "--num-layers", "4", *FP16]
        want = self.train(1, *model)
        for world, layout in ((2, [ZERO, *OVERLAP]), (2, split(SEQUENCE, tensor=2)), (2, split(context=2)),
                              (2, split(pipeline=2)), (4, split(ZERO, SEQUENCE, tensor=2, pipeline=2)),
                              (4, split(tensor=2, context=2))):
            got = self.train(world, *model, *layout)
            self.near_losses(got, want, f"{world} ranks with {layout}")

    def test_all_ranks_leave_out_the_same_steps(self):
        """Ranks that did not would train other models, or wait for each other."""
        for world, layout in ((4, split(ZERO, tensor=2, pipeline=2)), (4, split(context=2))):
            got = self.train(world, "--fp16", "--initial-loss-scale", str(2**30), *NO_DROPOUT, *layout)
            lines = fields(got)
            skipped = [lines[i]["number of skipped iterations"] == "1" for i in sorted(lines)]
            self.assertTrue(skipped[0] and not all(skipped), skipped)
            self.assertEqual([float(lines[i]["loss scale"]) for i in sorted(lines)], scales_after(skipped, 2.0**30))


if __name__ == "__main__":
    unittest.main(verbosity=2)
