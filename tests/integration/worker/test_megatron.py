"""Against the real megatron-core: what its ranks save as Megatron-LM does, tensor and pipeline parallel, becomes one
checkpoint that gives its logits, and is trained from as it is. Usage: test_megatron.py WORKER MOBULA GPT_LOGITS"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import warnings

warnings.filterwarnings("ignore")

import numpy as np
import torch
from safetensors.torch import load_file

import gang
from gang import tool as run
import megatron_gang
from megatron_gang import BATCH, SEQ, VOCAB, Shape

WORKER, MOBULA, GPT_LOGITS = (os.path.abspath(p) for p in sys.argv[1:4])
del sys.argv[1:4]
ITER, TRACKER = "iter_0000020", "latest_checkpointed_iteration.txt"
COMMON = ["--distributed-backend", "gloo", "--seq-length", SEQ, "--micro-batch-size", BATCH, "--lr", "1e-3",
          "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", VOCAB - 1]
TRAINING = ["--lr-decay-style", "constant", "--global-batch-size", 8, "--eval-iters", 0, "--log-interval", 1]
SIZES = ["--num-layers", 4, "--hidden-size", 64, "--ffn-hidden-size", 96, "--num-attention-heads", 8,
         "--max-position-embeddings", SEQ, "--attention-dropout", 0, "--hidden-dropout", 0]
GPT2 = Shape(tp=2, pp=2)
LLAMA = Shape(tp=2, pp=2, llama=True, untied=True)


def words_of(s):
    if not s.llama:
        return SIZES
    return [*SIZES, "--kv-channels", 16, "--group-query-attention", "--num-query-groups", s.groups, "--swiglu",
            "--disable-bias-linear", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--rotary-base",
            5000, *(["--untie-embeddings-and-output-weights"] if s.untied else [])]


def our_logits(folder, s, checkpoint, tokens):
    tokens.numpy().astype("<i4").tofile(folder / "tokens")
    run(GPT_LOGITS, checkpoint / ITER / "model_tp00_pp00.safetensors", folder / "tokens", folder / "logits",
        *words_of(s), *COMMON, "--train-iters", 1)
    return torch.from_numpy(np.fromfile(folder / "logits", "<f4").reshape(BATCH, SEQ, -1))


def losses(log):
    return re.findall(r"iteration +(\d+)/.*consumed samples: +(\d+) .*lm loss: (\S+)", log)


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="mobula-megatron-")
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name)
        self.theirs, self.ours = self.path / "theirs", self.path / "ours"

    def same_weights(self, a, b):
        self.assertEqual(set(a), set(b))
        for name, value in a.items():
            self.assertTrue(torch.equal(value, b[name]), name)

    def weights(self, checkpoint, iteration=ITER):
        return load_file(checkpoint / iteration / "model_tp00_pp00.safetensors")


class LogitsTest(Case):
    """Every layout, with the logits of the ranks that saved it."""

    def check(self, s):
        tokens = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(5))
        want = megatron_gang.run(s, self.path, tokens)
        run(MOBULA, "checkpoint", "convert", self.theirs, self.ours)
        got = our_logits(self.path, s, self.ours, tokens)
        self.assertGreater(float(want.abs().max()), 0.3)
        self.assertLess(float((got - want).abs().max()), 1e-5)
        facts = json.loads(run(MOBULA, "checkpoint", "inspect", "--json", self.theirs))
        self.assertEqual(facts, {**facts, "kind": "megatron", "iteration": 20, "release": False,
                                 "tensor_model_parallel_size": s.tp, "pipeline_model_parallel_size": s.pp,
                                 "num_layers": 4, "files": s.tp * s.pp,
                                 "parameters": sum(t.numel() for t in self.weights(self.ours).values())})
        state = json.loads((self.ours / ITER / "state.json").read_text())
        self.assertEqual((state["iteration"], state["consumed_train_samples"], state["has_optimizer"]), (20, 160, False))

    def test_learned_positions_biases_and_tied_embeddings(self):
        self.check(GPT2)

    def test_gates_and_query_groups(self):
        self.check(LLAMA)

    def test_interleaved_stages(self):
        self.check(Shape(tp=1, pp=2, vp=2, llama=True))

    def test_one_file(self):
        self.check(Shape(llama=True, groups=8))


class DirectoryTest(Case):
    """What is done with a directory of two by two ranks."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="mobula-megatron-")
        cls.addClassCleanup(cls.folder.cleanup)
        cls.source = pathlib.Path(cls.folder.name)
        megatron_gang.run(LLAMA, cls.source, torch.zeros(BATCH, SEQ, dtype=torch.long))

    def setUp(self):
        super().setUp()
        shutil.copytree(self.source / "theirs", self.theirs)

    def change(self, change, name="*"):
        for file in sorted((self.theirs / ITER).glob(f"mp_rank_{name}/{megatron_gang.NAME}")):
            saved = torch.load(file, weights_only=False)
            change(saved)
            torch.save(saved, file)

    def train(self, *words, status=0):
        return run(WORKER, *COMMON, *TRAINING, *words, status=status)

    def test_training_goes_on_from_it(self):
        """As from the converted one; on ranks that share a model, by tensors or layers, as well."""
        words = ["--use-checkpoint-args", "--no-load-optim", "--train-iters", 23]
        run(MOBULA, "checkpoint", "convert", self.theirs, self.ours)
        log = self.train("--load", self.theirs, *words)
        self.assertIn(f" loading checkpoint from {self.theirs} at iteration 20\n", log)
        self.assertIn("Setting num_layers to 4 from checkpoint\n", log)
        self.assertEqual([x[:2] for x in losses(log)], [("21", "168"), ("22", "176"), ("23", "184")])
        self.assertEqual(losses(self.train("--load", self.ours, *words)), losses(log))
        for layout in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size"):
            ranks = gang.run(WORKER, 2, [str(w) for w in (*COMMON, *TRAINING, *words, "--load", self.theirs, layout, 2)],
                             self.path / layout).ranks
            shared = losses(ranks[-1].log())
            self.assertEqual([x[:2] for x in shared], [x[:2] for x in losses(log)])
            for x, y in zip(shared, losses(log)):
                self.assertLess(abs(float(x[2]) - float(y[2])), 1e-5)

    def test_arguments_of_another_model_are_refused(self):
        words = words_of(LLAMA)
        words[words.index("--num-layers") + 1] = 3
        log = self.train("--load", self.theirs, "--no-load-optim", "--train-iters", 21, *words, status=64)
        self.assertIn("num_layers value from checkpoint (4) is not equal to the input argument value (3).", log)

    def test_there_is_no_optimizer(self):
        log = self.train("--load", self.theirs, "--use-checkpoint-args", "--train-iters", 21, status=66)
        self.assertIn(f"Unable to load optimizer from checkpoint {self.theirs}. Specify --no-load-optim or --finetune", log)

    def test_finetune_and_release_begin_at_0(self):
        words = ["--use-checkpoint-args", "--train-iters", 1]
        tuned = self.train("--load", self.theirs, "--finetune", *words)
        self.assertEqual([x[:2] for x in losses(tuned)], [("1", "8")])
        base = self.train("--pretrained-checkpoint", self.theirs, *words)
        self.assertEqual(losses(base), losses(tuned))
        (self.theirs / ITER).rename(self.theirs / "release")
        (self.theirs / TRACKER).write_text("release\n")
        self.change_release(consumed_train_samples=0)
        log = self.train("--load", self.theirs, *words)
        self.assertIn(f" loading release checkpoint from {self.theirs}\n", log)
        self.assertEqual(losses(log), losses(tuned))
        self.assertIn("Megatron-LM checkpoint, release, tensor-parallel size 2", run(
            MOBULA, "checkpoint", "inspect", self.theirs))
        run(MOBULA, "checkpoint", "convert", self.theirs, self.ours)
        self.assertEqual((self.ours / TRACKER).read_text(), "1")
        run(MOBULA, "checkpoint", "convert", "--iteration", 20, self.source / "theirs", self.path / "again")
        self.same_weights(self.weights(self.ours, "iter_0000001"), self.weights(self.path / "again"))

    def change_release(self, **args):
        for file in (self.theirs / "release").rglob(megatron_gang.NAME):
            saved = torch.load(file, weights_only=False)
            vars(saved["args"]).update(args)
            torch.save(saved, file)

    def test_halves_and_the_names_of_transformer_engine(self):
        run(MOBULA, "checkpoint", "convert", self.theirs, self.ours)
        want = {name: t.to(torch.bfloat16).float() for name, t in self.weights(self.ours).items()}

        def rename(saved):
            fused = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                     "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
            model = {}
            for name, value in saved["model"].items():
                for local, name_of_te in fused.items():
                    name = name.replace(local, name_of_te)
                model[name] = value.to(torch.bfloat16) if isinstance(value, torch.Tensor) else value
            model["decoder.layers.0.mlp.linear_fc1._extra_state"] = torch.zeros(5, dtype=torch.uint8)
            saved["model"] = model
            del saved["args"].kv_channels, saved["args"].padded_vocab_size
            saved["args"].kv_channels = 16

        self.change(rename)
        run(MOBULA, "checkpoint", "convert", self.theirs, self.path / "half")
        self.same_weights(self.weights(self.path / "half"), want)

    def refused(self, text, status=65):
        """By all that read it; nothing is left."""
        for words in (["checkpoint", "inspect", self.theirs], ["checkpoint", "verify", self.theirs],
                      ["checkpoint", "convert", self.theirs, self.ours]):
            done = subprocess.run([MOBULA, *map(str, words)], capture_output=True, text=True, timeout=60, check=False)
            self.assertEqual((done.returncode, len(done.stderr.splitlines())), (status, 1), done.stderr)
            self.assertIn(text, done.stderr)
        self.assertEqual([p.name for p in self.path.iterdir()], ["theirs"])
        log = self.train("--load", self.theirs, "--use-checkpoint-args", "--no-load-optim", "--train-iters", 21,
                         status=status)
        self.assertIn(text, log)

    def test_files_without_checksums_are_said(self):
        torch.serialization.set_crc32_options(False)
        self.addCleanup(torch.serialization.set_crc32_options, True)
        self.change(lambda saved: None)
        done = subprocess.run([MOBULA, "checkpoint", "verify", self.theirs], capture_output=True, text=True, timeout=60,
                              check=True)
        self.assertRegex(done.stderr, r"^warning: 4 of 4 files have no checksums")

    def test_what_is_missing_or_too_much_is_named(self):
        at = self.theirs / ITER
        (at / "mp_rank_01_001").rename(self.path / "away")
        shutil.rmtree(self.path / "away")
        self.refused("mp_rank_01_001/model_optim_rng.pt is missing: the checkpoint is not whole (its tensor-parallel size "
                     "is 2, its pipeline-parallel size 2)")
        shutil.copytree(self.source / "theirs" / ITER / "mp_rank_01_001", at / "mp_rank_01_001")
        shutil.copytree(at / "mp_rank_01_001", at / "mp_rank_02_001")
        self.refused("there are ranks up to 2 and stages up to 1, but by its arguments the tensor-parallel size is 2 and "
                     "the pipeline-parallel size 2")
        (at / "mp_rank_02_001").rename(at / "mp_rank_00_001_001")
        self.refused("mp_rank_00_001_001: expert parallelism is not provided", status=78)
        (at / "mp_rank_00_001_001").rename(at / "mp_rank_03")
        self.refused("has directories mp_rank_TT and mp_rank_TT_PPP: of two runs")
        shutil.rmtree(at / "mp_rank_03")
        (at / "mp_rank_00_000" / megatron_gang.NAME).unlink()
        self.refused("mp_rank_00_000/model_optim_rng.pt is missing")

    def test_files_that_do_not_belong_together_are_named(self):
        for text, name, fields in (
                ("argument tensor_model_parallel_size is another than in", "01_000", {"tensor_model_parallel_size": 4}),
                ("argument hidden_size is another than in", "00_001", {"hidden_size": 128}),
                ("[128, 64]; with tensor-parallel size 1 the arguments need 2 [256, 64]", "*",
                 {"tensor_model_parallel_size": 1}),
                ("there are ranks up to 1 and stages up to 1, but by its arguments the tensor-parallel size is 1", "*",
                 {"tensor_model_parallel_size": 1}),
                ("mp_rank_02_000/model_optim_rng.pt is missing", "*", {"tensor_model_parallel_size": 4}),
                ("its files have 4 layers, the arguments say 5", "*", {"num_layers": 5}),
                ("[96, 64]; with tensor-parallel size 2 the arguments need 2 [128, 64]", "*", {"ffn_hidden_size": 128}),
                ("argument num_layers: expected a number from 1 to 65536", "*", {"num_layers": 2**40}),
                ("argument padded_vocab_size: expected a number from 1 to", "*", {"padded_vocab_size": -1}),
        ):
            with self.subTest(text):
                shutil.rmtree(self.theirs)
                shutil.copytree(self.source / "theirs", self.theirs)
                if "need 2 [256" in text:  # as if the second rank had never been there
                    for stage in range(2):
                        shutil.rmtree(self.theirs / ITER / f"mp_rank_01_00{stage}")
                self.change(lambda saved: vars(saved["args"]).update(fields), name)
                self.refused(text)

    def test_other_models_and_damage_are_named(self):
        def with_tensor(saved):
            saved["model"]["decoder.layers.0.self_attention.q_layernorm.weight"] = torch.ones(16)

        def without_tensor(saved):
            del saved["model"]["decoder.layers.1.mlp.linear_fc2.weight"]

        def with_integers(saved):
            saved["model"]["decoder.layers.1.mlp.linear_fc2.weight"] = torch.ones(64, 48, dtype=torch.int32)

        for text, status, change in (
                ("tensor model.decoder.layers.0.self_attention.q_layernorm.weight is none of this model", 78, with_tensor),
                ("tensor model.decoder.layers.1.mlp.linear_fc2.weight is missing", 65, without_tensor),
                ("its numbers are neither F32 nor F16 nor BF16", 78, with_integers),
                ("a model with rotary_interleaved is not provided", 78, lambda s: setattr(s["args"], "rotary_interleaved", True)),
                ("a model with num_experts is not provided", 78, lambda s: setattr(s["args"], "num_experts", 8)),
                ("its files say iteration 30", 65, lambda s: s.update(iteration=30)),
                ('it has no "args": no checkpoint of Megatron-LM', 65, lambda s: s.pop("args"))):
            with self.subTest(text):
                shutil.rmtree(self.theirs)
                shutil.copytree(self.source / "theirs", self.theirs)
                self.change(change)
                self.refused(text, status)
        shutil.rmtree(self.theirs)
        shutil.copytree(self.source / "theirs", self.theirs)
        file = self.theirs / ITER / "mp_rank_01_000" / megatron_gang.NAME
        whole = file.read_bytes()
        file.write_bytes(whole[:len(whole) // 2])
        self.refused("mp_rank_01_000/model_optim_rng.pt")
        at = whole.index(torch.load(self.source / "theirs" / ITER / "mp_rank_01_000" / megatron_gang.NAME,
                                    weights_only=False)["model"]["embedding.word_embeddings.weight"].numpy().tobytes())
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
        self.refused("its checksum is not that of its bytes")


if __name__ == "__main__":
    unittest.main()
