"""The stages of a pipeline train a model as one rank alone would, together with tensor and data parallel ranks, and
go on from each other's checkpoints. Usage: test_pipeline_parallel.py WORKER"""

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
    "--distributed-backend gloo --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 16 --lr 1e-3 --lr-warmup-iters 2 "
    "--log-interval 1 --eval-interval 10 --eval-iters 2 --log-params-norm --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 500"
).split()
LLAMA = ("--normalization RMSNorm --swiglu --position-embedding-type rope --group-query-attention --num-query-groups 4 "
         "--num-attention-heads 8 --untie-embeddings-and-output-weights --disable-bias-linear --ffn-hidden-size 96").split()
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0".split()
AGAIN = "some layers computed again"
# Without dropout sums of biases are formed on other ways.
MODELS = {"gpt2": [], "gpt2 without dropout": NO_DROPOUT, "llama": LLAMA,
          AGAIN: ["--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "1",
                  *LLAMA, "--apply-layernorm-1p"]}
SEQUENCE = "--sequence-parallel"
ZERO = "--use-distributed-optimizer"
OVERLAP = ["--overlap-grad-reduce", "--ddp-bucket-size", "20000"]
TOLERANCE = 1e-5


def split(tensor, pipeline, *more):
    return ["--tensor-model-parallel-size", str(tensor), "--pipeline-model-parallel-size", str(pipeline), *more]


# Ranks, arguments.
LAYOUTS = [(2, split(1, 2)), (4, split(1, 4)), (4, split(1, 2)), (4, split(2, 2)), (4, split(1, 2, ZERO)),
           (4, split(1, 2, ZERO, *OVERLAP)), (4, split(1, 2, *OVERLAP)), (4, split(2, 2, SEQUENCE)), (2, split(2, 1)),
           (2, split(1, 1)), (4, split(2, 1, ZERO))]


class PipelineParallelTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="mobula-pp-")
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
            for world, layout in LAYOUTS[1::6] if name == AGAIN else LAYOUTS:
                gang = self.train(world, *model, *layout)
                self.assert_same(gang, alone, f"{name} on {world} ranks with {layout}")
                # The last rank, which has the loss, says the numbers; nobody else does.
                self.assertEqual(sorted(iterations(gang.ranks[-1])), list(range(1, 21)))
                for rank in gang.ranks[:-1]:
                    self.assertEqual(iterations(rank), {})
                norms = [float(re.search(r"params norm: (\S+)", g.ranks[-1].log()).group(1)) for g in (gang, alone)]
                self.assertAlmostEqual(norms[0], norms[1], delta=0.002)

    def test_fewer_micro_batches_than_stages(self):
        for batch in (2, 4, 6, 10):
            few = [*NO_DROPOUT, "--global-batch-size", str(batch)]
            self.assert_same(self.train(4, *split(1, 4), *few), self.train(1, *few), f"batches of {batch}")
        # A global batch that grows: 1, then 2 to 8 micro batches.
        ramp = "--lr-warmup-iters 0 --rampup-batch-size 2 2 40 --train-samples 120 --global-batch-size 16".split()
        a, b = (run(WORKER, w, [*TINY, *ramp, *layout], self.path(f"ramp{w}")) for w, layout in ((4, split(1, 4)), (1, [])))
        self.assertGreater(len(losses(b)), 10)
        for i, x in losses(b).items():
            self.assertLess(abs(losses(a)[i] - x), TOLERANCE * x)

    def test_a_layout_repeats_its_bits(self):
        for layout in (split(2, 2, SEQUENCE, ZERO), split(1, 4)):
            a, b = (self.train(4, *layout) for _ in range(2))
            self.assertEqual(iterations(a.ranks[-1]), iterations(b.ranks[-1]))

    def test_both_copies_of_an_embedding_stay_the_same(self):
        """A checkpoint has the first stage's. Had the last one another by then, a run that goes on from it would not
        have the bits of one that was not interrupted. Three data parallel ranks: from there on sums have an order."""
        for more in ([], [ZERO], [ZERO, *OVERLAP]):
            layout = split(1, 2, "--global-batch-size", "24", *more)
            name = "-".join(["s", *more])
            whole = self.train(6, *layout)
            self.save(6, name, *layout)
            rest = self.train(6, *layout, "--load", self.path(name))
            self.assertEqual(numbers(rest)[20], numbers(whole)[20])
            self.assertEqual(losses(rest), {i: x for i, x in losses(whole).items() if i > 10})

    def test_each_stage_says_what_it_has(self):
        def plan(rank):
            return {name.strip(): int(n) for name, n in re.findall(r"^(.{32}) +\S+ \S+ +(\d+)$", rank.log(), re.M)}

        def parameters(rank):
            return [(int(p), int(n)) for p, n in
                    re.findall(r"number of parameters on .* model parallel rank \(0, (\d+)\): (\d+)", rank.log())]
        short = ["--train-iters", "1", "--lr-warmup-iters", "0"]
        alone = self.train(1, *short)
        (_, whole), = parameters(alone.ranks[0])
        gang = self.train(4, *split(1, 4), *short)
        log = gang.ranks[0].log()
        self.assertIn("data-parallel size: 1, ", log)
        self.assertIn("pipeline-model-parallel size: 4 \n", log)
        self.assertIn("> initialized pipeline model parallel with size 4\n", log)
        told = [parameters(rank) for rank in gang.ranks]
        self.assertEqual([[p for p, _ in t] for t in told], [[0], [1], [2], [3]])
        sizes = [t[0][1] for t in told]
        vocabulary, layer = 512 * 64, 12 * 64 * 64 + 13 * 64
        self.assertEqual(sizes, [vocabulary + 32 * 64 + layer, layer, layer, layer + 2 * 64 + vocabulary])
        self.assertEqual(sum(sizes), whole + vocabulary)  # of the tied embedding the last stage has a copy
        plans = [plan(rank) for rank in gang.ranks]
        for p, n in zip(plans, sizes):
            self.assertEqual(p["weights"], 4 * n)
        # 4, 3, 2 and 1 micro batches are in flight; a stage of the whole model's four layers has one of them.
        mlp = [p["activations: mlp"] for p in plans]
        self.assertEqual(mlp, [4 * mlp[3], 3 * mlp[3], 2 * mlp[3], plan(alone.ranks[0])["activations: mlp"] // 4])
        # Others of a stage, and of a tensor group, say nothing.
        gang = self.train(4, *split(1, 2), *short)
        self.assertEqual([len(parameters(rank)) for rank in gang.ranks], [1, 0, 1, 0])

    def save(self, world, name, *extra):
        return self.train(world, "--save", self.path(name), "--save-interval", "10", "--exit-interval", "10", *extra)

    def test_any_layout_goes_on_from_any_other(self):
        for name in ("gpt2", "llama"):
            model = MODELS[name]
            whole = self.train(1, *model)
            # From two stages to one rank, to tensor parallel ones, and back.
            chain = [(2, split(1, 2)), (1, []), (2, split(1, 2)), (2, split(2, 1)), (4, split(2, 2, SEQUENCE, ZERO)),
                     (4, split(1, 4, "--async-save")), (4, split(1, 2, ZERO))]
            for i, (world, layout) in enumerate(chain):
                self.save(world, f"{name}{i}", *model, *layout)
                # The same files whatever the layout: whole tensors, and a range of the optimizer a rank.
                self.assertEqual(sorted(os.listdir(self.path(f"{name}{i}", "iter_0000010"))),
                                 ["model_tp00_pp00.safetensors",
                                  *(f"optim_dp_{r:03}_of_{world:03}.safetensors" for r in range(world)), "state.json"])
                n, other = chain[(i + 1) % len(chain)]
                rest = self.train(n, *model, *other, "--load", self.path(f"{name}{i}"))
                self.assertIn("at iteration 10\n", rest.ranks[0].log())
                self.assert_same(rest, whole, f"{name}: {other} after {layout}", first=11)

    def test_loading_and_saving_changes_no_bit(self):
        still = ["--lr", "0", "--override-opt_param-scheduler", "--exit-interval", "11", "--save-interval", "11"]
        for name in ("gpt2", "llama"):
            model = MODELS[name]
            self.save(1, name, *model)
            want = content(self.path(name, "iter_0000010"))["model_tp00_pp00.safetensors"]
            for i, (world, layout) in enumerate(((4, split(2, 2, ZERO)), (4, split(1, 4, "--async-save")))):
                to = self.path(f"{name}{i}")
                self.train(world, *model, *layout, "--load", self.path(name), "--save", to, *still)
                self.assertEqual(content(os.path.join(to, "iter_0000011"))["model_tp00_pp00.safetensors"], want)

    def test_a_lost_rank_is_named_by_all(self):
        for layout, victim in ((split(1, 4), 0), (split(1, 4), 2), (split(1, 4), 3), (split(2, 2), 3)):
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
                    self.assertIn(f"mobula-worker: {rank.of('failed')[0]['text']}\n", rank.log())

    def test_a_wish_of_one_stage_is_every_stage_s(self):
        self.n_runs += 1
        gang = Gang(WORKER, 4, [*TINY, *split(1, 4), "--train-iters", "100000", "--eval-interval", "100000", "--save",
                                self.path("s"), "--save-interval", "100000"], self.path(f"run{self.n_runs}"))
        self.addCleanup(gang.kill)
        gang.start().reached(2)
        gang.ranks[2].process.send_signal(signal.SIGTERM)
        self.assertEqual(gang.finish(), [0] * 4)
        self.assertIn("exiting program after receiving SIGTERM.", gang.ranks[0].log())
        self.assertEqual(len([name for name in os.listdir(self.path("s")) if name.startswith("iter_")]), 1)

    def test_conflicts_are_refused(self):
        for world, layout, text in (
                (3, split(1, 3), "Number of layers should be divisible by the pipeline-model-parallel size"),
                (3, split(1, 2), "world size (3) is not divisible by total_model_size (encoder_model_size=0 + "
                                 "decoder_model_size=2)"),
                (4, split(1, 2, "--global-batch-size", "6"), "global batch size (6) is not divisible by micro batch "
                                                             "size (2) times data parallel size (2)"),
                (2, split(1, 2, "--num-layers-per-virtual-pipeline-stage", "1"), "--num-layers-per-virtual-pipeline-stage"),
                (2, split(1, 2, "--distributed-backend", "nccl"), "--pipeline-model-parallel-size 2: not provided on GPUs")):
            self.n_runs += 1
            gang = Gang(WORKER, world, [*TINY, "--train-iters", "1", *layout], self.path(f"run{self.n_runs}"))
            self.addCleanup(gang.kill)
            codes = gang.finish()
            self.assertTrue(all(c in (64, 69, 78) for c in codes), codes)
            self.assertIn(text, gang.ranks[0].log())


if __name__ == "__main__":
    unittest.main(verbosity=2)
