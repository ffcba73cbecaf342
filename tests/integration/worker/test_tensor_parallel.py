"""Ranks that share a model train it as one rank alone would, whatever the layout, and go on from each other's
checkpoints. Usage: test_tensor_parallel.py WORKER"""

import os
import re
import signal
import sys
import tempfile
import unittest

from gang import Gang, content, iterations, losses, numbers, run, validations

WORKER = os.path.abspath(sys.argv.pop(1))

# 500 tokens fill up to 512 rows with 128, 2 * 128 and 4 * 128 alike. Dropout stays on where nothing else is said.
TINY = (
    "--distributed-backend gloo --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --lr-warmup-iters 2 "
    "--log-interval 1 --eval-interval 10 --eval-iters 2 --log-params-norm --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 500"
).split()
LLAMA = ("--normalization RMSNorm --swiglu --position-embedding-type rope --group-query-attention --num-query-groups 4 "
         "--num-attention-heads 8 --untie-embeddings-and-output-weights --disable-bias-linear --ffn-hidden-size 96").split()
AGAIN = "layers computed again"
MODELS = {"gpt2": [], "llama": LLAMA,
          AGAIN: ["--recompute-granularity", "full", "--recompute-method", "uniform", *LLAMA, "--apply-layernorm-1p",
                  "--attention-dropout", "0", "--hidden-dropout", "0"]}
SEQUENCE = "--sequence-parallel"
ZERO = "--use-distributed-optimizer"
OVERLAP = ["--overlap-grad-reduce", "--ddp-bucket-size", "20000"]
TOLERANCE = 1e-5


def tp(size, *more):
    return ["--tensor-model-parallel-size", str(size), *more]


# Ranks, arguments.
LAYOUTS = [(2, tp(2)), (4, tp(4)), (4, tp(2)), (4, tp(2, ZERO, *OVERLAP)), (4, tp(4, SEQUENCE)),
           (4, tp(2, SEQUENCE, *OVERLAP))]


class TensorParallelTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="mobula-tp-")
        self.addCleanup(self.folder.cleanup)
        self.n_runs = 0

    def path(self, *parts):
        return os.path.join(self.folder.name, *parts)

    def train(self, world, *extra, iters=20):
        self.n_runs += 1
        return run(WORKER, world, [*TINY, "--train-iters", str(iters), *extra], self.path(f"run{self.n_runs}"))

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
            # Nothing of the run is told twice, and nothing is missing.
            told = sorted(iterations(alone.ranks[0]))
            self.assertEqual(told, list(range(1, 21)))
            for world, layout in LAYOUTS[::4] if name == AGAIN else LAYOUTS:
                gang = self.train(world, *model, *layout)
                self.assert_same(gang, alone, f"{name} on {world} ranks with {layout}")
                self.assertEqual(sorted(iterations(gang.ranks[-1])), told)
                for rank in gang.ranks[:-1]:
                    self.assertEqual(iterations(rank), {})
                for rank in gang.ranks[1:]:
                    self.assertNotIn("building GPT model", rank.log())
                norms = [float(re.search(r"params norm: (\S+)", g.ranks[-1].log()).group(1)) for g in (gang, alone)]
                self.assertAlmostEqual(norms[0], norms[1], delta=0.002)
            size = layout[1]
            log = gang.ranks[0].log()
            self.assertIn(f"data-parallel size: {world // int(size)}, ", log)
            self.assertIn(f"> initialized tensor model parallel with size {size}", log)

    def test_a_layout_repeats_its_bits(self):
        a, b = (self.train(4, *tp(2, SEQUENCE, ZERO)) for _ in range(2))
        self.assertEqual(iterations(a.ranks[-1]), iterations(b.ranks[-1]))

    def save(self, world, name, *extra):
        return self.train(world, "--save", self.path(name), "--save-interval", "10", "--exit-interval", "10", *extra)

    def test_any_layout_goes_on_from_any_other(self):
        whole = self.train(1, *LLAMA)
        layouts = [(1, []), (2, tp(2, SEQUENCE)), (4, tp(2, ZERO)), (4, tp(2, "--async-save")), (4, tp(4)), (3, [])]
        for i, (world, layout) in enumerate(layouts):
            batch = ["--global-batch-size", "24", "--micro-batch-size", "2"] if world == 3 else []
            self.save(world, f"s{i}", *LLAMA, *layout, *batch)
            files = sorted(os.listdir(self.path(f"s{i}", "iter_0000010")))
            # The same files whatever the layout: whole tensors, and a range of the optimizer a rank.
            self.assertEqual(files, ["model_tp00_pp00.safetensors",
                                     *(f"optim_dp_{r:03}_of_{world:03}.safetensors" for r in range(world)), "state.json"])
            if batch:
                continue
            other = [(2, tp(2)), (4, tp(2, ZERO)), (1, []), (4, tp(4, SEQUENCE)), (2, [ZERO])][i]
            for goes_on in (other, (world, layout)):
                rest = self.train(goes_on[0], *LLAMA, *goes_on[1], "--load", self.path(f"s{i}"))
                self.assertIn("at iteration 10\n", rest.ranks[0].log())
                self.assertNotIn(10, iterations(rest.ranks[-1]))
                self.assert_same(rest, whole, f"{goes_on} after {world} with {layout}", first=11)
        # Weights only.
        tuned = self.train(2, *LLAMA, *tp(2), "--load", self.path("s0"), "--finetune", "--no-save-optim", "--save",
                           self.path("t"), "--save-interval", "20")
        self.assertLess(numbers(tuned)[20][0], numbers(whole)[20][0])
        self.assertEqual(sorted(os.listdir(self.path("t", "iter_0000020"))), ["model_tp00_pp00.safetensors", "state.json"])

    def test_loading_and_saving_changes_no_bit(self):
        still = ["--lr", "0", "--override-opt_param-scheduler", "--exit-interval", "11", "--save-interval", "11"]
        for name in ("gpt2", "llama"):
            model = MODELS[name]
            self.save(1, name, *model)
            want = content(self.path(name, "iter_0000010"))["model_tp00_pp00.safetensors"]
            for i, (world, layout) in enumerate(((4, tp(4, ZERO)), (4, tp(2, "--async-save")))):
                to = self.path(f"{name}{i}")
                self.train(world, *model, *layout, "--load", self.path(name), "--save", to, *still)
                self.assertEqual(content(os.path.join(to, "iter_0000011"))["model_tp00_pp00.safetensors"], want)

    def test_a_lost_rank_is_named_by_all(self):
        for victim in (0, 3):
            gang = Gang(WORKER, 4, [*TINY, *tp(2), "--train-iters", "100000", "--eval-interval", "100000"],
                        self.path(f"lost{victim}"))
            self.addCleanup(gang.kill)
            gang.start().reached(3)
            gang.ranks[victim].process.send_signal(signal.SIGKILL)
            codes = gang.finish()
            self.assertEqual([c for r, c in enumerate(codes) if r != victim], [69] * 3)
            for r, rank in enumerate(gang.ranks):
                if r != victim:
                    self.assertIn(f"rank {victim} went away", rank.of("failed")[0]["text"])

    def test_a_damaged_checkpoint_is_named(self):
        self.save(2, "s")
        shard = self.path("s", "iter_0000010", "optim_dp_001_of_002.safetensors")
        os.truncate(shard, os.path.getsize(shard) // 2)
        model = self.path("s", "iter_0000010", "model_tp00_pp00.safetensors")
        for what in ("optim_dp_001_of_002.safetensors", "model_tp00_pp00.safetensors"):
            self.n_runs += 1
            gang = Gang(WORKER, 2, [*TINY, *tp(2), "--train-iters", "20", "--load", self.path("s")],
                        self.path(f"run{self.n_runs}"))
            self.addCleanup(gang.kill)
            codes = gang.start().finish()
            self.assertNotIn(0, codes)
            self.assertIn(65, codes)
            self.assertTrue(any(what in rank.of("failed")[0]["text"] for rank in gang.ranks))
            os.truncate(model, os.path.getsize(model) // 2)


if __name__ == "__main__":
    unittest.main(verbosity=2)
