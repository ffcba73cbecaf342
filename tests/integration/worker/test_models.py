"""Models in Llama's style and in between: a gang resumes bit for bit, every spread over ranks gives the same
losses, another model's checkpoint is refused. Usage: test_models.py WORKER"""

import os
import re
import sys
import tempfile
import unittest

from gang import MOCK, MODEL, Gang, run

WORKER = os.path.abspath(sys.argv.pop(1))

LLAMA = ("--swiglu --normalization RMSNorm --position-embedding-type rope --rotary-base 500000 --use-rope-scaling "
         "--disable-bias-linear --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 "
         "--attention-dropout 0 --hidden-dropout 0").split()
MODELS = {
    "llama": LLAMA,
    "dropout": [*LLAMA, "--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--add-qkv-bias", "--rotary-percent",
                "0.5", "--kv-channels", "24"],
    "norm-1p": "--apply-layernorm-1p --position-embedding-type none".split(),
}


class ModelsTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="mobula-models-")
        self.addCleanup(self.folder.cleanup)

    def path(self, *parts):
        return os.path.join(self.folder.name, *parts)

    def train(self, world, name, *extra):
        return run(WORKER, world, [*MODEL, *MOCK, "--train-iters", "20", *extra], self.path(name))

    def losses(self, gang):
        """By iteration, from the log: loss, norms of gradients and weights."""
        found = re.findall(r"iteration +(\d+)/.*lm loss: (\S+) .*grad norm: (\S+) \| params norm: (\S+) ",
                           gang.ranks[-1].log())
        return {int(i): tuple(map(float, values)) for i, *values in found}

    def test_resume_is_bit_for_bit(self):
        for name, model in MODELS.items():
            save = ["--save-interval", "10", "--use-distributed-optimizer", *model]
            whole = self.train(2, name + "-whole", "--save", self.path(name + "-w"), *save)
            self.train(2, name + "-first", "--save", self.path(name + "-r"), "--exit-interval", "10", *save)
            rest = self.train(2, name + "-rest", "--save", self.path(name + "-r"), "--load", self.path(name + "-r"), *save)
            logged = self.losses(whole)
            self.assertEqual({i: logged[i] for i in range(11, 21)}, self.losses(rest), name)
            for file in ("model_tp00_pp00", "optim_dp_000_of_002", "optim_dp_001_of_002"):
                with open(self.path(name + "-w", "iter_0000020", file + ".safetensors"), "rb") as a, \
                        open(self.path(name + "-r", "iter_0000020", file + ".safetensors"), "rb") as b:
                    self.assertEqual(a.read(), b.read(), (name, file))

    def test_every_layout_gives_the_same_losses(self):
        for name, model in MODELS.items():
            alone = self.losses(self.train(1, name + "-1", *model))
            self.assertEqual(sorted(alone), list(range(1, 21)))
            self.assertLess(alone[20][0], alone[1][0] - 0.3)
            for world, micro, sharded in ((2, 2, []), (4, 1, ["--use-distributed-optimizer"]), (4, 2, [])):
                gang = self.train(world, f"{name}-{world}-{micro}", *model, *sharded, "--micro-batch-size", str(micro))
                losses = self.losses(gang)
                self.assertEqual(sorted(losses), sorted(alone))
                for i, (loss, norm, params) in losses.items():
                    self.assertLess(abs(loss / alone[i][0] - 1), 1e-5, (name, world, micro, i))
                    self.assertLess(abs(norm - alone[i][1]), 0.0021, (name, world, micro, i))  # of 3 decimals
                    self.assertLess(abs(params - alone[i][2]), 0.0021, (name, world, micro, i))

    def test_the_batch_grows(self):
        """By the samples that were consumed, also after a restart, and whatever the number of ranks."""
        ramp = ("--train-samples 160 --rampup-batch-size 4 4 48 --global-batch-size 16 --micro-batch-size 2 "
                "--lr-warmup-iters 0 --save-interval 5").split()

        def batches(gang):
            return [tuple(map(int, found)) for found in re.findall(
                r"iteration +(\d+)/.*consumed samples: +(\d+) .*global batch size: +(\d+) ", gang.ranks[-1].log())]

        def train(world, name, *extra):
            return run(WORKER, world, [*MODEL, *MOCK, *LLAMA, *ramp, *extra], self.path(name))

        whole = train(1, "whole")
        consumed, want = 0, []
        while consumed + 16 <= 160:
            batch = 16 if consumed > 48 else 4 + consumed // 16 * 4
            consumed += batch
            want.append((len(want) + 1, consumed, batch))
        self.assertEqual(batches(whole), want)
        self.assertEqual([b for *_, b in want[:8]], [4, 4, 4, 4, 8, 8, 12, 12])
        train(2, "first", "--save", self.path("s"), "--exit-interval", "5")
        rest = train(2, "rest", "--save", self.path("s"), "--load", self.path("s"))
        self.assertEqual(batches(rest), want[5:])
        losses, alone = self.losses(rest), self.losses(whole)
        for i in range(6, len(want) + 1):
            self.assertLess(abs(losses[i][0] / alone[i][0] - 1), 1e-5)

    def test_another_model_is_refused(self):
        self.train(1, "a", "--save", self.path("s"), "--save-interval", "20", *LLAMA)
        less = [w for w in LLAMA if w not in ("--swiglu", "--use-rope-scaling")]
        cases = {
            "swiglu value from checkpoint (True) is not equal to the input argument value (False).":
                [*less, "--ffn-hidden-size", "128"],
            "normalization value from checkpoint (RMSNorm) is not equal to the input argument value (LayerNorm).":
                [*LLAMA, "--normalization", "LayerNorm"],
            "position_embedding_type value from checkpoint (rope) is not equal to the input argument value (none).":
                [*less, "--swiglu", "--position-embedding-type", "none"],
            "num_query_groups value from checkpoint (2) is not equal to the input argument value (4).":
                [*LLAMA, "--num-query-groups", "4"],
        }
        for i, (text, model) in enumerate(cases.items()):
            for how in ("--load", "--pretrained-checkpoint"):
                self.refused(text, f"b{i}{how}", how, self.path("s"), *model)
        longer = [*LLAMA, "--rotary-base", "1000000", "--max-position-embeddings", "64"]
        self.refused("max_position_embeddings value from checkpoint (32) is not equal", "c", "--load", self.path("s"),
                     *longer)
        log = self.train(1, "d", "--pretrained-checkpoint", self.path("s"), *longer).ranks[0].log()
        self.assertIn("rotary_base is 1000000 as the command line says; in the checkpoint it is 500000\n", log)

    def refused(self, text, name, *args, status=64):
        """Returns the log."""
        gang = Gang(WORKER, 1, [*MODEL, *MOCK, "--train-iters", "20", *args], self.path(name))
        self.addCleanup(gang.kill)
        self.assertEqual(gang.start().finish(), [status])
        self.assertIn(text, gang.ranks[0].of("failed")[0]["text"])
        return gang.ranks[0].log()

    def test_a_checkpoint_that_is_missing_is_the_reason(self):
        """Not what its arguments would have given."""
        log = self.refused("no checkpoint in " + self.path("none"), "a", "--load", self.path("none"),
                           "--use-checkpoint-args", "--exit-on-missing-checkpoint", "--kv-channels", "0", status=66)
        self.assertIn("Checkpoint not found to provide arguments", log)
        log = self.refused("kv-channels", "b", "--load", self.path("none"), "--use-checkpoint-args", "--kv-channels", "0")
        self.assertIn("Checkpoint not found to provide arguments", log)

    def test_a_preset_counts_its_parameters(self):
        """Too large for this machine: the count is said, and what it would need, before anything is taken."""
        args = [*MODEL, "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "51199", "--train-iters", "1"]
        for cut in ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length",
                    "--max-position-embeddings"):
            at = args.index(cut)
            del args[at:at + 2]
        gang = Gang(WORKER, 1, [*args, "--model-preset", "gpt3-310.1b"], self.path("big"))
        self.addCleanup(gang.kill)
        self.assertEqual(gang.start().finish(), [70])
        log = gang.ranks[0].log()
        self.assertIn("> number of parameters on (tensor, pipeline) model parallel rank (0, 0): 310130540544", log)
        self.assertRegex(log, r"the memory plan needs \S+ TiB of host memory, \S+ \S+ are available; ")


if __name__ == "__main__":
    unittest.main()
