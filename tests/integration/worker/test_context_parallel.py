"""Ranks that share every sample train a model as one rank alone would, together with tensor, pipeline and data parallel
ranks, and go on from each other's checkpoints. Usage: test_context_parallel.py WORKER"""

import os
import re
import signal
import sys
import tempfile
import time
import unittest

from gang import Gang, content, iterations, losses, numbers, run, validations

WORKER = os.path.abspath(sys.argv.pop(1))

# 500 tokens fill up to 512 rows with 128 and 2 * 128 alike. Dropout stays on where nothing else is said.
TINY = (
    "--distributed-backend gloo --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 48 "
    "--max-position-embeddings 48 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --lr-warmup-iters 2 "
    "--log-interval 1 --eval-interval 10 --eval-iters 2 --log-params-norm --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 500"
).split()
LLAMA = ("--normalization RMSNorm --swiglu --position-embedding-type rope --group-query-attention --num-query-groups 4 "
         "--num-attention-heads 8 --untie-embeddings-and-output-weights --disable-bias-linear --ffn-hidden-size 96").split()
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0".split()
AGAIN = "layers computed again"
LONG = "more than one block of queries"
MODELS = {"gpt2": [], "llama": LLAMA,
          AGAIN: ["--recompute-granularity", "full", "--recompute-method", "uniform", *LLAMA, "--apply-layernorm-1p"],
          LONG: [*NO_DROPOUT, "--seq-length", "320", "--max-position-embeddings", "320"]}
SEQUENCE = "--sequence-parallel"
ZERO = "--use-distributed-optimizer"
OVERLAP = ["--overlap-grad-reduce", "--ddp-bucket-size", "20000"]
TOLERANCE = 1e-5


def split(context, *more, tensor=1, pipeline=1):
    return ["--context-parallel-size", str(context), "--tensor-model-parallel-size", str(tensor),
            "--pipeline-model-parallel-size", str(pipeline), *more]


# Ranks, arguments. Three of a ring: the places of its ends are both even.
LAYOUTS = [(2, split(2)), (4, split(4)), (3, split(3)), (4, split(2)), (4, split(2, ZERO)), (4, split(2, ZERO, *OVERLAP)),
           (4, split(2, *OVERLAP)), (4, split(2, tensor=2)), (4, split(2, SEQUENCE, ZERO, tensor=2)), (4, split(2, pipeline=2)),
           (8, split(2, SEQUENCE, ZERO, *OVERLAP, tensor=2, pipeline=2))]


class ContextParallelTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="mobula-cp-")
        self.addCleanup(self.folder.cleanup)
        self.n_runs = 0

    def path(self, *parts):
        return os.path.join(self.folder.name, *parts)

    def train(self, world, *extra):
        self.n_runs += 1
        return run(WORKER, world, [*TINY, "--train-iters", "20", *extra], self.path(f"run{self.n_runs}"))

    def assert_same(self, got, want, what, first=1):
        a, b = numbers(got), numbers(want)
        common = sorted(i for i in a if i in b)
        self.assertEqual(common[-1], 20)
        logged, expected = losses(got), losses(want)
        self.assertEqual(sorted(logged), list(range(first, 21)))
        for i, x in logged.items():
            self.assertLess(abs(x - expected[i]), TOLERANCE * expected[i], f"{what}, iteration {i}")
        for i in common:
            for x, y in zip(a[i], b[i]):
                self.assertLess(abs(x - y), TOLERANCE * abs(y), f"{what}, iteration {i}: {a[i]} and {b[i]}")
        v, w = validations(got), validations(want)
        self.assertEqual(len(v), len(w) if first == 1 else len(w) - 1)
        for x, y in zip(reversed(v), reversed(w)):
            self.assertLess(abs(x - y), TOLERANCE * y, what)

    def test_every_layout_trains_the_same_model(self):
        for name, model in MODELS.items():
            alone = self.train(1, *model)
            for world, layout in LAYOUTS[1::6] if name == AGAIN else LAYOUTS[:2] if name == LONG else LAYOUTS:
                gang = self.train(world, *model, *layout)
                self.assert_same(gang, alone, f"{name} on {world} ranks with {layout}")
                self.assertEqual(sorted(iterations(gang.ranks[-1])), list(range(1, 21)))
                for rank in gang.ranks[:-1]:
                    self.assertEqual(iterations(rank), {})
                norms = [float(re.search(r"params norm: (\S+)", g.ranks[-1].log()).group(1)) for g in (gang, alone)]
                self.assertAlmostEqual(norms[0], norms[1], delta=0.002)

    def test_tokens_without_loss_are_counted_once(self):
        """One rank's rows have more of them than another's."""
        masked = ["--eod-mask-loss", *NO_DROPOUT, "--vocab-size", "20"]
        for more in ([], ["--calculate-per-token-loss"]):
            alone = self.train(1, *masked, *more)
            for world, layout in ((2, split(2)), (4, split(2, ZERO))):
                self.assert_same(self.train(world, *masked, *more, *layout), alone, f"{layout} {more}")

    def test_a_layout_repeats_its_bits(self):
        for world, layout in ((4, split(4)), (4, split(2, SEQUENCE, ZERO, tensor=2))):
            a, b = (self.train(world, *layout) for _ in range(2))
            self.assertEqual(iterations(a.ranks[-1]), iterations(b.ranks[-1]))

    def test_a_rank_needs_memory_for_its_rows(self):
        def plan(rank):
            return {name.strip(): int(n) for name, n in re.findall(r"^(.{32}) +\S+ \S+ +(\d+)$", rank.log(), re.M)}
        short = ["--train-iters", "1", "--lr-warmup-iters", "0", "--seq-length", "256", "--max-position-embeddings", "256"]
        alone, gang = self.train(1, *short), self.train(4, *split(4), *short)
        log = gang.ranks[0].log()
        self.assertIn("using world size: 4, data-parallel size: 1, context-parallel size: 4, ", log)
        self.assertIn("> initialized context parallel with size 4\n", log)
        whole, part = plan(alone.ranks[0]), plan(gang.ranks[0])
        for name in ("activations: norms", "activations: attention", "activations: mlp", "activations: residual stream",
                     "gradients of activations", "scratch: attention"):
            self.assertEqual(4 * part[name], whole[name], name)
        self.assertEqual(part["weights"], whole["weights"])
        # Keys and values, twice, and three of their gradients: 2 samples, 64 rows, 2 x 4 heads of 16 channels.
        self.assertEqual(part["ring of keys and values"], 5 * 4 * 2 * 64 * 2 * 4 * 16)
        self.assertNotIn("ring of keys and values", whole)
        for rank in gang.ranks[1:]:
            self.assertEqual(plan(rank), {})

    def save(self, world, name, *extra):
        return self.train(world, "--save", self.path(name), "--save-interval", "10", "--exit-interval", "10", *extra)

    def test_any_layout_goes_on_from_any_other(self):
        for name in ("gpt2", "llama"):
            model = MODELS[name]
            whole = self.train(1, *model)
            chain = [(2, split(2)), (1, []), (4, split(2, ZERO)), (4, split(2, "--async-save", tensor=2)),
                     (4, split(4, "--async-save")), (4, split(2, ZERO, pipeline=2))]
            for i, (world, layout) in enumerate(chain):
                self.save(world, f"{name}{i}", *model, *layout)
                self.assertEqual(sorted(os.listdir(self.path(f"{name}{i}", "iter_0000010"))),
                                 ["model_tp00_pp00.safetensors",
                                  *(f"optim_dp_{r:03}_of_{world:03}.safetensors" for r in range(world)), "state.json"])
                n, other = chain[(i + 1) % len(chain)]
                rest = self.train(n, *model, *other, "--load", self.path(f"{name}{i}"))
                self.assertIn("at iteration 10\n", rest.ranks[0].log())
                self.assert_same(rest, whole, f"{name}: {other} after {layout}", first=11)

    def test_loading_and_saving_changes_no_bit(self):
        still = ["--lr", "0", "--override-opt_param-scheduler", "--exit-interval", "11", "--save-interval", "11"]
        self.save(1, "from")
        want = content(self.path("from", "iter_0000010"))["model_tp00_pp00.safetensors"]
        for i, (world, layout) in enumerate(((4, split(4, ZERO)), (4, split(2, "--async-save", tensor=2)))):
            to = self.path(f"to{i}")
            self.train(world, *layout, "--load", self.path("from"), "--save", to, *still)
            self.assertEqual(content(os.path.join(to, "iter_0000011"))["model_tp00_pp00.safetensors"], want)

    def test_a_lost_rank_is_named_by_all(self):
        for layout, victim in ((split(4), 0), (split(4), 3), (split(2, tensor=2), 2)):
            self.n_runs += 1
            gang = Gang(WORKER, 4, [*TINY, *layout, "--train-iters", "100000", "--eval-interval", "100000"],
                        self.path(f"run{self.n_runs}"))
            self.addCleanup(gang.kill)
            gang.start().reached(3)
            gang.ranks[victim].process.send_signal(signal.SIGKILL)
            since = time.monotonic()
            codes = gang.finish()
            self.assertLess(time.monotonic() - since, 10)
            self.assertEqual([c for r, c in enumerate(codes) if r != victim], [69] * 3)
            for r, rank in enumerate(gang.ranks):
                if r != victim:
                    self.assertIn(f"rank {victim} went away", rank.of("failed")[0]["text"])

    def test_conflicts_are_refused(self):
        multiple = "seq-length should be a multiple of 2 * context-parallel-size if context-parallel-size > 1."
        for world, layout, text in (
                (2, split(2, "--seq-length", "46"), multiple), (4, split(4, "--seq-length", "36"), multiple),
                (3, split(2), "world size (3) is not divisible by total_model_size (encoder_model_size=0 + "
                              "decoder_model_size=2)"),
                (4, split(2, "--global-batch-size", "6"), "global batch size (6) is not divisible by micro batch size (2) "
                                                          "times data parallel size (2)"),
                (6, split(2, SEQUENCE, "--num-attention-heads", "3", "--hidden-size", "48", "--seq-length", "40",
                          "--ffn-hidden-size", "96", tensor=3), "--sequence-parallel: seq_length: 20 is not divisible by 3"),
                (2, split(2, "--cp-comm-type", "a2a"), "--cp-comm-type: invalid choice: 'a2a'"),
                (2, split(0), "context-parallel-size is 0"),
                (2, split(2, "--distributed-backend", "nccl"), "--context-parallel-size 2: not provided on GPUs")):
            self.n_runs += 1
            gang = Gang(WORKER, world, [*TINY, "--train-iters", "1", *layout], self.path(f"run{self.n_runs}"))
            self.addCleanup(gang.kill)
            codes = gang.finish()
            self.assertTrue(all(c in (2, 64, 69, 78) for c in codes), codes)
            self.assertIn(text, gang.ranks[0].log())


if __name__ == "__main__":
    unittest.main(verbosity=2)
