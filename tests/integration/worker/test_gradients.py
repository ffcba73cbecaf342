"""What is made of gradients: sums of ranks in bf16 against torch's arithmetic, zeros that are counted, and SGD in all layouts
and in checkpoints. Usage: test_gradients.py WORKER"""

import pathlib
import re
import unittest

import torch
from safetensors.torch import load_file

from gang import iterations, run
from layouts import LLAMA, NO_DROPOUT, OVERLAP, TINY, WORKER, ZERO, LayoutCase, length, plan, split

SGD = ["--optimizer", "sgd", "--sgd-momentum", "0.8", "--lr", "0.1", "--weight-decay", "0.1"]
# Weights do not move, and the first moment is the gradient itself.
STANDING = [*NO_DROPOUT, "--lr", "0", "--lr-warmup-iters", "0", "--adam-beta1", "0", "--clip-grad", "0", "--eval-iters", "0",
            "--num-layers", "2", *length(16)]


def moment(folder, iteration, name="exp_avg"):
    """Of the flat buffer, joined from all ranks' files."""
    files = sorted(pathlib.Path(folder, f"iter_{iteration:07d}").glob("optim_dp_*.safetensors"))
    return torch.cat([load_file(f)[name] for f in files])


class SummedInBf16(LayoutCase):
    def gradients(self, world, n, *extra):
        """Of n iterations, each of two samples a rank."""
        words, folder = self.words(*STANDING, "--train-iters", n, "--global-batch-size", 2 * world, "--save-interval", 1,
                                   "--save", "saved", *extra)
        self.last = run(WORKER, world, [str(w) for w in words], folder).ranks[0]
        return [moment(pathlib.Path(folder, "saved"), i + 1) for i in range(n)]

    def check(self, world):
        parts = [(g / world).to(torch.bfloat16) for g in self.gradients(1, world)]
        # A part of the buffer is summed from the rank behind the one that has it on, round the ring.
        sums = []
        for first in range(world):
            total = parts[first]
            for i in range(1, world):
                total = total + parts[(first + i) % world]
            sums.append(total.to(torch.float32))
        fp32 = torch.stack([p.to(torch.float32) for p in parts]).sum(0)
        self.assertGreater(int((sums[0] != fp32).sum()), 1000)  # it shows
        for more in ([], [ZERO], OVERLAP, [ZERO, *OVERLAP]):
            with self.subTest(world=world, more=more):
                got = self.gradients(world, 1, "--bf16", "--grad-reduce-in-bf16", *more)[0]
                is_one = torch.stack([got == s for s in sums]).any(0)
                self.assertEqual(int((~is_one).sum()), 0)
                # In the plan of memory.
                self.assertIn(("gradients: bf16, for sums", 2 * len(got)), plan(self.last).items())
        for more in ([], ["--bf16"]):
            got = self.gradients(world, 1, *more)[0]
            self.assertGreater(int((got != got.to(torch.bfloat16).to(torch.float32)).sum()), 1000)

    def test_two_ranks(self):
        self.check(2)

    def test_four_ranks(self):
        self.check(4)

    def test_models_that_ranks_share(self):
        """Rounded where data parallel ranks sum, and nowhere else: near what fp32 gives."""
        words = [*STANDING, *LLAMA]
        want = self.train(1, *words, "--global-batch-size", "8", "--train-iters", "1")
        layouts = (split(tensor=2), split(pipeline=2), [ZERO, *split(pipeline=2)], [ZERO, *OVERLAP, *split(tensor=2)])
        for i, layout in enumerate(layouts):
            folder = self.path(f"shared-{i}")
            got = self.train(4, *words, "--global-batch-size", "8", "--train-iters", "1", "--bf16", "--grad-reduce-in-bf16",
                             "--save", folder, "--save-interval", "1", *layout)
            gradient = moment(folder, 1)
            self.assertGreater(int((gradient != 0).sum()), 10000)
            self.assertTrue(torch.equal(gradient, gradient.to(torch.bfloat16).to(torch.float32)))
            norms = [float(re.search(r"grad norm: (\S+)", iterations(g.ranks[-1])[1]).group(1)) for g in (got, want)]
            self.assertAlmostEqual(norms[0] / norms[1], 1, delta=2e-3)


class Zeros(LayoutCase):
    MODEL = ["--num-layers", "2", *length(16), *LLAMA, *NO_DROPOUT, "--log-num-zeros-in-grad", "--global-batch-size", "8",
             "--train-iters", "3"]

    def zeros(self, gang):
        return [float(re.search(r"num zeros: (\S+)", text).group(1)) for _, text in sorted(iterations(gang.ranks[-1]).items())]

    def test_all_ranks_count_the_whole_model(self):
        want = self.zeros(self.train(1))
        self.assertGreater(min(want), 1000)  # tokens that do not occur
        for world, layout in ((2, []), (2, [ZERO]), (2, split(tensor=2)), (2, split(pipeline=2)),
                              (4, [ZERO, *OVERLAP, *split(tensor=2)]), (2, split(context=2))):
            with self.subTest(layout=layout):
                for a, b in zip(self.zeros(self.train(world, *layout)), want):
                    self.assertLessEqual(abs(a - b), 8)  # one or the other is 0 by rounding

    def test_what_ranks_have_twice_counts_once(self):
        """Rows of positions that no sample has: each tensor parallel rank has them."""
        model = ["--num-layers", "2", "--seq-length", "16", "--max-position-embeddings", "64", *NO_DROPOUT,
                 "--log-num-zeros-in-grad", "--global-batch-size", "8"]
        for world, layout in ((1, []), (2, split(tensor=2)), (2, split(pipeline=2)), (4, [ZERO, *split(pipeline=2)]),
                              (4, [ZERO, *OVERLAP, *split(tensor=2)])):
            with self.subTest(layout=layout):
                _, folder = self.words()
                words = [*TINY, *model, "--data-path", self.path("to500"), "--train-iters", "3", *layout]
                for n in self.zeros(run(WORKER, world, words, folder)):
                    # Biases of keys, 64 in all, make no difference to the loss: theirs may be 0 by rounding.
                    self.assertTrue(48 * 32 <= n <= 48 * 32 + 64 + 8, n)


class Sgd(LayoutCase):
    MODEL = ["--num-layers", "4", *length(16), "--global-batch-size", "8", *SGD]

    def test_layouts(self):
        for world, layout in ((2, []), (2, [ZERO]), (4, [ZERO, *OVERLAP]), (2, split(tensor=2)), (2, split(pipeline=2)),
                              (4, [ZERO, *split(tensor=2)])):
            self.check_layout(world, layout, (), "SGD")

    def test_any_layout_goes_on_from_any_other(self):
        self.check_chain("sgd", (), ((1, []), (2, [ZERO]), (2, split(tensor=2)), (4, [ZERO, *split(pipeline=2)])))

    def test_decoupled_rates_and_asynchronous_saves(self):
        more = ["--decoupled-lr", "0.01"]
        want = self.train(1, *more)
        self.train(2, *more, "--async-save", "--save", self.path("async"), "--save-interval", "10", "--exit-interval", "10")
        self.assert_same(self.train(1, *more, "--load", self.path("async")), want, "SGD, saved beside training", first=11)

    def test_another_rules_state_is_refused(self):
        for saved, loads, name in (("sgd", "adam", "momentum_buffer"), ("adam", "sgd", "exp_avg_sq")):
            folder = self.path(f"of-{saved}")
            self.train(1, "--optimizer", saved, "--save", folder, "--save-interval", "2", "--exit-interval", "2")
            self.assertGreater(float(moment(folder, 2, name).abs().max()), 0)
            gang = self.gang(1, "--optimizer", loads, "--load", folder).start()
            self.assertEqual(gang.finish(), [64])
            self.assertIn(f"it is of --optimizer {saved}, this run has {loads}. Specify --no-load-optim",
                          gang.ranks[0].log())
            gang = self.gang(1, "--optimizer", loads, "--load", folder, "--no-load-optim").start()
            self.assertEqual(gang.finish(), [0])


if __name__ == "__main__":
    unittest.main()
