"""Against a newer megatron-core, 0.19, whose --ckpt-format torch_dist has no common.pt: arguments, counters and the optimizer's settings
lie among the chunks. Usage: test_megatron_new.py WORKER MOBULA"""

import dataclasses
import json
import unittest

import torch

# More places that ask for CUDA whatever the model is on.
torch.cuda.current_stream = lambda *_: None
torch.cuda.get_device_capability = lambda *_: (0, 0)

import megatron.core
import megatron_gang
from gang import tool as run
from megatron_gang import BATCH, SEQ, VOCAB, Shape
from megatron_train import MOBULA, STEPS, WORKER, Case, LayoutCase, name_of

FORMS = ("", "dp_reshardable", "fully_reshardable")


class LayoutTest(LayoutCase):
    """Weights, moments, steps and schedule are those that torch's own Adam has of whole tensors."""

    def forms(self, s, halves=None):
        self.assertTrue(megatron.core.__version__.startswith("0.19."), megatron.core.__version__)
        for zero in FORMS:
            with self.subTest(zero):
                self.fresh()
                self.check(dataclasses.replace(s, zero=zero, dp=2 if zero and s.tp == 1 else 1, dist=True), halves)
                directory = self.path / "theirs" / name_of(STEPS)
                self.assertFalse((directory / "common.pt").exists())
                facts = json.loads(run(MOBULA, "checkpoint", "inspect", "--json", self.path / "theirs"))
                self.assertEqual((facts["iteration"], facts["ckpt_format"]), (STEPS, "torch_dist"))

    def test_gates_and_query_groups(self):
        self.forms(Shape(tp=2, pp=2, llama=True, untied=True))

    def test_stages_biases_and_tied_embeddings_in_bf16(self):
        self.forms(Shape(pp=2), torch.bfloat16)


class RunTest(Case):
    def test_it_is_trained_from_and_damage_is_named(self):
        tokens = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(5))
        megatron_gang.run(Shape(tp=2, pp=2, dist=True), self.path, tokens)
        words = ["--use-checkpoint-args", "--load", self.path / "theirs", "--no-load-optim", "--distributed-backend", "gloo", "--seq-length", SEQ,
                 "--micro-batch-size", BATCH, "--lr", "1e-3", "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", VOCAB - 1,
                 "--lr-decay-style", "constant", "--global-batch-size", 8, "--eval-iters", 0, "--log-interval", 1, "--train-iters", 21]
        self.assertRegex(run(WORKER, *words), r"iteration +21/ +21 .*consumed samples: +168 ")
        self.assertIn("verified: iteration 20", run(MOBULA, "checkpoint", "verify", self.path / "theirs"))
        meta = self.path / "theirs" / name_of(20) / ".metadata"
        meta.write_bytes(meta.read_bytes().replace(b"common_state/shard_0_1", b"commom_state/shard_0_1"))
        self.assertIn("common.pt is missing, and no common_state/shard_0_1 is in .metadata: there are no arguments",
                      run(MOBULA, "checkpoint", "inspect", self.path / "theirs", status=65))


if __name__ == "__main__":
    unittest.main()
