"""Ranks that share a model train it as one rank alone would, whatever the layout, and go on from each other's
checkpoints. Usage: test_tensor_parallel.py WORKER"""

import os
import re
import unittest
from unittest import mock

from gang import numbers
from layouts import LLAMA, MODEL_FILE, NO_DROPOUT, OVERLAP, SEQUENCE, ZERO, LayoutCase, length, split

AGAIN = "layers computed again"
MODELS = {"gpt2": [], "llama": LLAMA,
          AGAIN: ["--recompute-granularity", "full", "--recompute-method", "uniform", *LLAMA, "--apply-layernorm-1p",
                  *NO_DROPOUT]}
# Ranks, arguments.
LAYOUTS = [(2, split(tensor=2)), (4, split(tensor=4)), (4, split(tensor=2)), (4, split(ZERO, *OVERLAP, tensor=2)),
           (4, split(SEQUENCE, tensor=4)), (4, split(SEQUENCE, *OVERLAP, tensor=2)), (4, split(SEQUENCE, ZERO, tensor=2))]


class TensorParallelTest(LayoutCase):
    MODEL = ["--num-layers", "2", "--global-batch-size", "8", *length(16)]

    def test_every_layout_trains_the_same_model(self):
        for name, model in MODELS.items():
            for world, layout in LAYOUTS[::4] if name == AGAIN else LAYOUTS:
                gang = self.check_layout(world, layout, model, name)
                for rank in gang.ranks[1:]:
                    self.assertNotIn("building GPT model", rank.log())
            size = layout[1]
            log = gang.ranks[0].log()
            self.assertIn(f"data-parallel size: {world // int(size)}, ", log)
            self.assertIn(f"> initialized tensor model parallel with size {size}", log)

    def test_a_layout_repeats_its_bits(self):
        self.check_bits(4, split(SEQUENCE, ZERO, tensor=2))

    def test_strips_train_the_same_model(self):
        """However many of them there are, in one layer after the other and where layers are computed again."""
        for strips in ("2", "4"):
            with mock.patch.dict(os.environ, MOBULA_TENSOR_STRIPS=strips):
                for name, model in MODELS.items():
                    self.check_layout(2, split(tensor=2), model, f"{name}, {strips} strips")
                    self.check_layout(4, split(SEQUENCE, *OVERLAP, tensor=2), model, f"{name}, {strips} strips")
                self.check_layout(4, split(SEQUENCE, tensor=2, context=2), MODELS["llama"], f"shared samples, {strips} strips")
                self.check_layout(4, split(SEQUENCE, tensor=2, pipeline=2), MODELS["llama"], f"stages, {strips} strips")
                self.check_bits(4, split(SEQUENCE, ZERO, tensor=2))

    def test_each_part_of_the_model_is_told_once(self):
        """By the first of the ranks that have it, of those that share samples, too: tensor and pipeline rank, and its size."""
        for copies in ([], split(context=2)):
            gang = self.train(8, *LLAMA, *split(*copies, tensor=2, pipeline=2), "--train-iters", "1", "--lr-warmup-iters", "0")
            told = [re.findall(r"^ > number of parameters on \(tensor, pipeline\) model parallel rank (\(\d+, \d+\)): (\d+)$",
                               rank.log(), re.M) for rank in gang.ranks]
            first = (512 * 32 + 64 * 32 + 32 * 32 + 3 * 96 * 32) // 2 + 2 * 32  # vocabulary, a layer's products; its norms
            last = first + 32  # as many for the output, and the last norm
            self.assertEqual(told, [[("(0, 0)", str(first))], [("(1, 0)", str(first))], [], [],
                                    [("(0, 1)", str(last))], [("(1, 1)", str(last))], [], []])

    def test_a_wrong_number_of_strips_is_one_line(self):
        with mock.patch.dict(os.environ, MOBULA_TENSOR_STRIPS="17"):
            gang = self.gang(2, *split(tensor=2))
            self.assertNotIn(0, gang.start().finish())
        self.assertIn("MOBULA_TENSOR_STRIPS", gang.ranks[0].of("failed")[0]["text"])

    def test_different_numbers_of_strips_are_one_line(self):
        """As where nodes have different environments: nobody trains."""
        gang = self.gang(2, *split(tensor=2), env_of_rank=lambda rank: {"MOBULA_TENSOR_STRIPS": str(2 * rank + 2)})
        self.assertNotIn(0, gang.start().finish())
        told = [text["text"] for rank in gang.ranks for text in rank.of("failed")]
        self.assertTrue(any("MOBULA_TENSOR_STRIPS is not the same on all ranks" in text for text in told), told)
        self.assertNotIn("lm loss", gang.ranks[0].log())

    def test_any_layout_goes_on_from_any_other(self):
        self.check_chain("llama", LLAMA, [
            (1, []), (2, split(tensor=2)), (4, split(ZERO, tensor=2)), (2, split(SEQUENCE, tensor=2)), (1, []),
            (4, split("--async-save", tensor=2)), (4, split(SEQUENCE, tensor=4)), (4, split(tensor=4)), (2, [ZERO]),
            (4, split(SEQUENCE, tensor=4))])
        # A checkpoint of three ranks; and weights only.
        three = ["--global-batch-size", "24"]
        self.save(3, "three", *LLAMA, *three)
        self.assertEqual(sorted(os.listdir(self.path("three", "iter_0000010"))),
                         [MODEL_FILE, *(f"optim_dp_{r:03}_of_003.safetensors" for r in range(3)), "state.json"])
        rest = self.train(2, *LLAMA, *three, *split(tensor=2), "--load", self.path("three"))
        self.assert_same(rest, self.alone(*LLAMA, *three), "after three ranks", first=11)
        self.save(1, "one", *LLAMA)
        tuned = self.train(2, *LLAMA, *split(tensor=2), "--load", self.path("one"), "--finetune", "--no-save-optim",
                           "--save", self.path("tuned"), "--save-interval", "20")
        self.assertLess(numbers(tuned)[20][0], numbers(self.alone(*LLAMA))[20][0])
        self.assertEqual(sorted(os.listdir(self.path("tuned", "iter_0000020"))), [MODEL_FILE, "state.json"])

    def test_loading_and_saving_changes_no_bit(self):
        for name in ("gpt2", "llama"):
            self.check_no_bit_changes(name + "-bits", MODELS[name], (4, split(ZERO, tensor=4)),
                                      (4, split("--async-save", tensor=2)))

    def test_a_lost_rank_is_named_by_all(self):
        for victim in (0, 3):
            self.check_lost_rank(4, split(tensor=2), victim)

    def test_a_stopped_rank_is_named_by_all(self):
        self.check_stopped_rank(4, split(tensor=2), 1)

    def test_a_damaged_checkpoint_is_named(self):
        self.save(2, "damaged")
        shard = self.path("damaged", "iter_0000010", "optim_dp_001_of_002.safetensors")
        os.truncate(shard, os.path.getsize(shard) // 2)
        model = self.path("damaged", "iter_0000010", MODEL_FILE)
        for what in ("optim_dp_001_of_002.safetensors", MODEL_FILE):
            gang = self.gang(2, *split(tensor=2), "--load", self.path("damaged"))
            codes = gang.start().finish()
            self.assertNotIn(0, codes)
            self.assertIn(65, codes)
            self.assertTrue(any(what in rank.of("failed")[0]["text"] for rank in gang.ranks))
            os.truncate(model, os.path.getsize(model) // 2)


if __name__ == "__main__":
    unittest.main(verbosity=2)
