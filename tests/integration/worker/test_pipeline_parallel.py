"""The stages of a pipeline train a model as one rank alone would, together with tensor and data parallel ranks, of one
chunk of layers each or of several, and go on from each other's checkpoints. Usage: test_pipeline_parallel.py WORKER"""

import os
import re
import shutil
import signal
import unittest

from gang import losses, numbers, run
from layouts import LLAMA, NO_DROPOUT, OVERLAP, SEQUENCE, TOLERANCE, WORKER, ZERO, LayoutCase, length, plan, split

AGAIN = "some layers computed again"
# Without dropout sums of biases are formed on other ways.
MODELS = {"gpt2": [], "gpt2 without dropout": NO_DROPOUT, "llama": LLAMA,
          AGAIN: ["--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "1",
                  *LLAMA, "--apply-layernorm-1p"]}
# Ranks, arguments.
LAYOUTS = [(2, split(pipeline=2)), (4, split(pipeline=4)), (4, split(pipeline=2)), (4, split(tensor=2, pipeline=2)),
           (4, split(ZERO, pipeline=2)), (4, split(ZERO, *OVERLAP, pipeline=2)), (4, split(*OVERLAP, pipeline=2)),
           (4, split(SEQUENCE, tensor=2, pipeline=2)), (2, split(tensor=2)), (2, split()), (4, split(ZERO, tensor=2))]
CHUNKS = [(2, split(pipeline=2, chunks=2)), (4, split(ZERO, *OVERLAP, pipeline=2, chunks=2)),
          (4, split(SEQUENCE, tensor=2, pipeline=2, chunks=2)),
          (2, split("--num-layers-per-virtual-pipeline-stage", "1", pipeline=2))]
# The other ways of sums: at a stage's edge, at a chunk's, with tensor parallel ranks.
FEWER = {AGAIN: [LAYOUTS[1], LAYOUTS[7], CHUNKS[0]],
         "gpt2 without dropout": [LAYOUTS[0], LAYOUTS[3], LAYOUTS[7], LAYOUTS[8], CHUNKS[0], CHUNKS[2]]}


class PipelineParallelTest(LayoutCase):
    MODEL = ["--num-layers", "4", "--global-batch-size", "16", *length(16)]

    def test_every_layout_trains_the_same_model(self):
        for name, model in MODELS.items():
            for world, layout in FEWER.get(name, LAYOUTS + CHUNKS):
                self.check_layout(world, layout, model, name)

    def test_rings_of_three_and_four_stages(self):
        """With an odd number of stages two neighbours in the ring are both even."""
        for stages, model in ((3, ["--num-layers", "6", "--global-batch-size", "24"]), (4, ["--num-layers", "8", *LLAMA])):
            self.check_layout(stages, split(pipeline=stages, chunks=2), model, f"{stages} stages")

    def test_fewer_micro_batches_than_stages(self):
        for batch in (2, 4, 6, 10):
            self.check_layout(4, split(pipeline=4), [*NO_DROPOUT, "--global-batch-size", str(batch)], f"batches of {batch}")
        # A global batch that grows: 1, then 2 to 8 micro batches.
        ramp = "--lr-warmup-iters 0 --rampup-batch-size 2 2 40 --train-samples 120 --global-batch-size 16".split()
        # With chunks a multiple of the stages: 2 to 8 micro batches.
        even = "--lr-warmup-iters 0 --rampup-batch-size 4 4 40 --train-samples 120 --global-batch-size 16".split()
        for name, words, world, layout in (("any", ramp, 4, split(pipeline=4)), ("even", even, 2, split(pipeline=2, chunks=2))):
            a, b = (run(WORKER, w, [*self.base(), *words, *l], self.path(f"ramp-{name}{w}"))
                    for w, l in ((world, layout), (1, [])))
            self.assertGreater(len(losses(b)), 10 if name == "any" else 6)
            for i, x in losses(b).items():
                self.assertLess(abs(losses(a)[i] - x), TOLERANCE * x)

    def test_a_layout_repeats_its_bits(self):
        for layout in (split(SEQUENCE, ZERO, tensor=2, pipeline=2), split(pipeline=4),
                       split(ZERO, *OVERLAP, pipeline=2, chunks=2)):
            self.check_bits(4, layout)

    def test_both_copies_of_an_embedding_stay_the_same(self):
        """A checkpoint has the first stage's. Had the last one another by then, a run that goes on from it would not
        have the bits of one that was not interrupted. Three data parallel ranks: from there on sums have an order."""
        for i, layout in enumerate((split(pipeline=2), split(ZERO, pipeline=2),
                                    split(ZERO, *OVERLAP, pipeline=2, chunks=2))):
            words = [*layout, "--global-batch-size", "24" if i < 2 else "12"]
            at = self.path(f"copies{i}")
            whole = self.train(6, *words, "--save", at, "--save-interval", "10")
            shutil.rmtree(os.path.join(at, "iter_0000020"))
            with open(os.path.join(at, "latest_checkpointed_iteration.txt"), "w", encoding="ascii") as tracker:
                tracker.write("10")
            rest = self.train(6, *words, "--load", at)
            self.assertEqual(numbers(rest)[20], numbers(whole)[20])
            self.assertEqual(losses(rest), {i: x for i, x in losses(whole).items() if i > 10})

    def test_each_stage_says_what_it_has(self):
        def parameters(rank):
            return [(int(p), int(n)) for p, n in
                    re.findall(r"number of parameters on .* model parallel rank \(0, (\d+)\): (\d+)", rank.log())]
        short = ["--train-iters", "1", "--lr-warmup-iters", "0", "--hidden-size", "64"]
        alone = self.train(1, *short)
        (_, whole), = parameters(alone.ranks[0])
        gang = self.train(4, *split(pipeline=4), *short)
        log = gang.ranks[0].log()
        self.assertIn("data-parallel size: 1, ", log)
        self.assertIn("pipeline-model-parallel size: 4 \n", log)
        self.assertIn("> initialized pipeline model parallel with size 4\n", log)
        told = [parameters(rank) for rank in gang.ranks]
        self.assertEqual([[p for p, _ in t] for t in told], [[0], [1], [2], [3]])
        sizes = [t[0][1] for t in told]
        vocabulary, layer = 512 * 64, 12 * 64 * 64 + 13 * 64
        self.assertEqual(sizes, [vocabulary + 16 * 64 + layer, layer, layer, layer + 2 * 64 + vocabulary])
        self.assertEqual(sum(sizes), whole + vocabulary)  # of the tied embedding the last stage has a copy
        plans = [plan(rank) for rank in gang.ranks]
        for p, n in zip(plans, sizes):
            self.assertEqual(p["weights"], 4 * n)
        # 4, 3, 2 and 1 micro batches are in flight; a stage of the whole model's four layers has one of them.
        mlp = [p["activations: mlp"] for p in plans]
        self.assertEqual(mlp, [4 * mlp[3], 3 * mlp[3], 2 * mlp[3], plan(alone.ranks[0])["activations: mlp"] // 4])
        # Others of a stage, and of a tensor group, say nothing.
        gang = self.train(4, *split(pipeline=2), *short)
        self.assertEqual([len(parameters(rank)) for rank in gang.ranks], [1, 0, 1, 0])
        # With two chunks of a layer 2 (p - rank - 1) + p + 1 passes are in flight.
        gang = self.train(2, *split(pipeline=2, chunks=2), *short)
        self.assertIn("Number of virtual stages per pipeline stage: 2\n", gang.ranks[0].log())
        self.assertRegex(gang.ranks[0].log(), r"virtual_pipeline_model_parallel_size \.+ 2\n")
        self.assertEqual([plan(rank)["activations: mlp"] for rank in gang.ranks], [5 * mlp[3], 3 * mlp[3]])
        self.assertEqual([t[0][1] for t in map(parameters, gang.ranks)], [sum(sizes[:2]), sum(sizes[2:])])

    def test_any_layout_goes_on_from_any_other(self):
        for name in ("gpt2", "llama"):
            # From two stages to one rank, to tensor parallel ones, to chunks, and back.
            self.check_chain(name, MODELS[name], [
                (2, split(pipeline=2)), (1, []), (2, split(pipeline=2)), (2, split(pipeline=2, chunks=2)), (2, split(tensor=2)),
                (4, split(SEQUENCE, ZERO, tensor=2, pipeline=2)), (4, split("--async-save", pipeline=4)),
                (4, split(ZERO, pipeline=2, chunks=2)), (4, split(ZERO, pipeline=2)), (2, split(pipeline=2))])

    def test_loading_and_saving_changes_no_bit(self):
        for name in ("gpt2", "llama"):
            self.check_no_bit_changes(name + "-bits", MODELS[name], (4, split(ZERO, tensor=2, pipeline=2)),
                                      (4, split("--async-save", pipeline=4)), (2, split(pipeline=2, chunks=2)))

    def test_a_lost_rank_is_named_by_all(self):
        for layout, victim in ((split(pipeline=4), 0), (split(pipeline=4), 2), (split(pipeline=4), 3),
                               (split(tensor=2, pipeline=2), 3)):
            self.check_lost_rank(4, layout, victim)
        self.check_lost_rank(2, split(pipeline=2, chunks=2), 0)

    def test_a_wish_of_one_stage_is_every_stage_s(self):
        gang = self.gang(4, *split(pipeline=4), "--train-iters", "100000", "--eval-interval", "100000", "--save",
                         self.path("wish"), "--save-interval", "100000")
        gang.start().reached(2)
        gang.ranks[2].process.send_signal(signal.SIGTERM)
        self.assertEqual(gang.finish(), [0] * 4)
        self.assertIn("exiting program after receiving SIGTERM.", gang.ranks[0].log())
        self.assertEqual(len([name for name in os.listdir(self.path("wish")) if name.startswith("iter_")]), 1)

    def test_conflicts_are_refused(self):
        for world, layout, text in (
                (3, split(pipeline=3), "Number of layers should be divisible by the pipeline-model-parallel size"),
                (3, split(pipeline=2), "world size (3) is not divisible by total_model_size (encoder_model_size=0 + "
                                       "decoder_model_size=2)"),
                (4, split("--global-batch-size", "6", pipeline=2),
                 "global batch size (6) is not divisible by micro batch size (2) times data parallel size (2)"),
                (2, split("--global-batch-size", "6", pipeline=2, chunks=2),
                 "number of microbatches (3) is not divisible by pipeline-model-parallel-size (2) when using interleaved")):
            self.check_refused(world, layout, text)


if __name__ == "__main__":
    unittest.main(verbosity=2)
