"""Ranks that share every sample train a model as one rank alone would, together with tensor, pipeline and data parallel
ranks, and go on from each other's checkpoints. Usage: test_context_parallel.py WORKER"""

import unittest

from layouts import LLAMA, NO_DROPOUT, OVERLAP, SEQUENCE, ZERO, LayoutCase, length, plan, split

AGAIN = "layers computed again"
LONG = "more than one block of queries"
MODELS = {"gpt2": [], "llama": LLAMA,
          AGAIN: ["--recompute-granularity", "full", "--recompute-method", "uniform", *LLAMA, "--apply-layernorm-1p"],
          LONG: [*NO_DROPOUT, *length(320)]}
ODD = {"odd llama": [*LLAMA, *"--rotary-percent 0.5 --kv-channels 16 --use-rope-scaling --add-qkv-bias".split()],
       "odd gpt2": "--position-embedding-type none --no-bias-gelu-fusion --apply-layernorm-1p".split()}
# Ranks, arguments. Three of a ring: the places of its ends are both even.
LAYOUTS = [(2, split(context=2)), (4, split(context=4)), (3, split(context=3)), (4, split(context=2)),
           (4, split(ZERO, context=2)), (4, split(ZERO, *OVERLAP, context=2)), (4, split(*OVERLAP, context=2)),
           (4, split(context=2, tensor=2)), (4, split(SEQUENCE, ZERO, context=2, tensor=2)), (4, split(context=2, pipeline=2)),
           (8, split(SEQUENCE, ZERO, *OVERLAP, context=2, tensor=2, pipeline=2))]
FEWER = {AGAIN: LAYOUTS[1::6], LONG: LAYOUTS[:2]}


class ContextParallelTest(LayoutCase):
    MODEL = ["--num-layers", "2", "--global-batch-size", "8", *length(24)]

    def test_every_layout_trains_the_same_model(self):
        for name, model in MODELS.items():
            for world, layout in FEWER.get(name, LAYOUTS):
                self.check_layout(world, layout, model, name)

    def test_three_ways_beside_data_parallel(self):
        for world, layout in ((8, split(SEQUENCE, ZERO, *OVERLAP, tensor=2, pipeline=2)),
                              (8, split(SEQUENCE, ZERO, tensor=2, context=2)), (8, split(ZERO, context=2, pipeline=2))):
            for name in ("gpt2", "llama"):
                self.check_layout(world, layout, MODELS[name], name)

    def test_what_else_a_model_may_have(self):
        """Rotary positions of some channels of wide heads, scaled; biases of queries, keys and values alone; no positions,
        GELU by erf and norms around 1: each way to share a model."""
        for name, model in ODD.items():
            for world, layout in ((4, split(SEQUENCE, tensor=4)), (2, split(pipeline=2)), (2, split(context=2)),
                                  (8, split(SEQUENCE, ZERO, context=2, tensor=2, pipeline=2))):
                self.check_layout(world, layout, model, name)

    def test_chunks_of_a_pipeline(self):
        self.check_layout(4, split(context=2, pipeline=2, chunks=2), ["--num-layers", "4"], "chunks")

    def test_tokens_without_loss_are_counted_once(self):
        """One rank's rows have more of them than another's."""
        masked = ["--eod-mask-loss", *NO_DROPOUT, "--vocab-size", "20", "--data-path", self.path("to20")]
        for more in ([], ["--calculate-per-token-loss"]):
            for world, layout in ((2, split(context=2)), (4, split(ZERO, context=2))):
                self.assert_same(self.train(world, *masked, *more, *layout), self.alone(*masked, *more), f"{layout} {more}")

    def test_a_layout_repeats_its_bits(self):
        for layout in (split(context=4), split(SEQUENCE, ZERO, context=2, tensor=2)):
            self.check_bits(4, layout)

    def test_a_rank_needs_memory_for_its_rows(self):
        short = ["--train-iters", "1", "--lr-warmup-iters", "0", *length(256)]
        alone, gang = self.train(1, *short), self.train(4, *split(context=4), *short)
        log = gang.ranks[0].log()
        self.assertIn("using world size: 4, data-parallel size: 1, context-parallel size: 4, ", log)
        self.assertIn("> initialized context parallel with size 4\n", log)
        whole, part = plan(alone.ranks[0]), plan(gang.ranks[0])
        for name in ("activations: norms", "activations: attention", "activations: mlp", "activations: residual stream",
                     "gradients of activations", "scratch: attention"):
            self.assertEqual(4 * part[name], whole[name], name)
        self.assertEqual(part["weights"], whole["weights"])
        # Keys and values, twice, and three of their gradients: 2 samples, 64 rows, 2 x 4 heads of 8 channels.
        self.assertEqual(part["ring of keys and values"], 5 * 4 * 2 * 64 * 2 * 4 * 8)
        self.assertNotIn("ring of keys and values", whole)
        for rank in gang.ranks[1:]:
            self.assertEqual(plan(rank), {})

    def test_any_layout_goes_on_from_any_other(self):
        for name in ("gpt2", "llama"):
            self.check_chain(name, MODELS[name], [
                (2, split(context=2)), (1, []), (4, split(ZERO, context=2)), (4, split("--async-save", context=2, tensor=2)),
                (4, split("--async-save", context=4)), (4, split(ZERO, context=2, pipeline=2)), (2, split(context=2))])

    def test_loading_and_saving_changes_no_bit(self):
        self.check_no_bit_changes("bits", [], (4, split(ZERO, context=4)), (4, split("--async-save", context=2, tensor=2)))

    def test_a_lost_rank_is_named_by_all(self):
        for layout, victim in ((split(context=4), 0), (split(context=4), 3), (split(context=2, tensor=2), 2)):
            self.check_lost_rank(4, layout, victim)

    def test_conflicts_are_refused(self):
        multiple = "seq-length should be a multiple of 2 * context-parallel-size if context-parallel-size > 1."
        for world, layout, text in (
                (2, split("--seq-length", "22", context=2), multiple),
                (4, split("--seq-length", "20", context=4), multiple),
                (3, split(context=2), "world size (3) is not divisible by total_model_size (encoder_model_size=0 + "
                                      "decoder_model_size=2)"),
                (4, split("--global-batch-size", "6", context=2), "global batch size (6) is not divisible by micro batch size "
                                                                  "(2) times data parallel size (2)"),
                (6, split(SEQUENCE, "--num-attention-heads", "3", "--hidden-size", "48", "--seq-length", "20",
                          "--ffn-hidden-size", "96", context=2, tensor=3),
                 "--sequence-parallel: seq_length: 10 is not divisible by 3"),
                (2, split("--cp-comm-type", "a2a", context=2), "--cp-comm-type: invalid choice: 'a2a'"),
                (2, ["--context-parallel-size", "0"], "context-parallel-size is 0")):
            self.check_refused(world, layout, text)


if __name__ == "__main__":
    unittest.main(verbosity=2)
