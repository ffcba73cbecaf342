"""Against the real megatron-core: a checkpoint of ours becomes one of --ckpt-format torch for any number of ranks, which its
model loads strictly and which gives our logits. Usage: test_megatron_write.py WORKER MOBULA GPT_LOGITS"""

import argparse
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import warnings

warnings.filterwarnings("ignore")

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from gang import tool as run
import megatron_gang
from megatron_gang import BATCH, SEQ, VOCAB, Shape

WORKER, MOBULA, GPT_LOGITS = (os.path.abspath(p) for p in sys.argv[1:4])
del sys.argv[1:4]
ITER, TRACKER = "iter_0000003", "latest_checkpointed_iteration.txt"
COMMON = ["--distributed-backend", "gloo", "--seq-length", SEQ, "--micro-batch-size", BATCH, "--mock-data",
          "--tokenizer-type", "NullTokenizer", "--vocab-size", VOCAB - 1]
TRAINING = ["--lr", "1e-2", "--lr-decay-style", "constant", "--global-batch-size", 8, "--eval-iters", 0,
            "--log-interval", 1, "--save-interval", 3]
SIZES = ["--num-layers", 4, "--hidden-size", 64, "--ffn-hidden-size", 96, "--num-attention-heads", 8,
         "--max-position-embeddings", SEQ, "--attention-dropout", 0, "--hidden-dropout", 0]


def words_of(s):
    if not s.llama:
        return SIZES
    return [*SIZES, "--kv-channels", 16, "--group-query-attention", "--num-query-groups", s.groups, "--swiglu",
            "--disable-bias-linear", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--rotary-base",
            5000, *(["--untie-embeddings-and-output-weights"] if s.untied else [])]


def losses(log):
    return re.findall(r"iteration +(\d+)/.*consumed samples: +(\d+) .*lm loss: (\S+)", log)


def files_of(directory):
    return {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="mobula-megatron-write-")
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name)
        self.ours, self.theirs = self.path / "ours", self.path / "theirs"

    def train(self, s, *words):
        return run(WORKER, *COMMON, *TRAINING, *words_of(s), *words)

    def convert(self, *words, status=0):
        return run(MOBULA, "checkpoint", "convert", *words, status=status)

    def weights(self, checkpoint, iteration=ITER):
        return load_file(checkpoint / iteration / "model_tp00_pp00.safetensors")

    def load(self, s, checkpoint, tp=0, pp=0):
        return torch.load(checkpoint / ITER / megatron_gang.file_of(s, tp, pp), weights_only=False)

    def same_weights(self, a, b):
        self.assertEqual(set(a), set(b))
        for name, value in a.items():
            self.assertTrue(torch.equal(value, b[name]), name)


class LogitsTest(Case):
    """megatron-core's ranks load what was written, all names and shapes strictly, and compute what we do."""

    def our_logits(self, s, tokens):
        tokens.numpy().astype("<i4").tofile(self.path / "tokens")
        run(GPT_LOGITS, self.ours / ITER / "model_tp00_pp00.safetensors", self.path / "tokens", self.path / "logits",
            *words_of(s), *COMMON, "--lr", "1e-2", "--train-iters", 1)
        return torch.from_numpy(np.fromfile(self.path / "logits", "<f4").reshape(BATCH, SEQ, -1))

    def check(self, **shape):
        whole = Shape(**shape)
        tokens = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(5))
        self.train(whole, "--train-iters", 3, "--save", self.ours)
        want = self.our_logits(whole, tokens)
        self.assertGreater(float(want.abs().max()), 0.3)
        for tp, pp in ((1, 1), (2, 1), (1, 2), (2, 2)):
            with self.subTest(tp=tp, pp=pp):
                s, name = Shape(tp=tp, pp=pp, **shape), f"theirs-{tp}-{pp}"
                self.convert("--to", "megatron", "--tensor-model-parallel-size", tp, "--pipeline-model-parallel-size", pp,
                             "--transformer-impl", "local", self.ours, self.path / name)
                self.assertEqual(files_of(self.path / name), {TRACKER} | {
                    f"{ITER}/{megatron_gang.file_of(s, t, p)}" for t in range(tp) for p in range(pp)})
                self.assertEqual((self.path / name / TRACKER).read_text(), "3")
                got = megatron_gang.run(s, self.path, tokens, given=name, state=f"{name}/{ITER}")
                self.assertLess(float((got - want).abs().max()), 1e-5)

    def test_learned_positions_biases_and_tied_embeddings(self):
        self.check()

    def test_gates_and_query_groups(self):
        self.check(llama=True, untied=True)

    def test_gates_and_tied_embeddings(self):
        self.check(llama=True)


class DirectoryTest(Case):
    """What is in the files, and what becomes of them here."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="mobula-megatron-write-")
        cls.addClassCleanup(cls.folder.cleanup)
        cls.source = pathlib.Path(cls.folder.name) / "ours"
        cls.shape = Shape(llama=True, untied=True)
        run(WORKER, *COMMON, *TRAINING, *words_of(cls.shape), "--train-iters", 3, "--save", cls.source)

    def to_megatron(self, *words, status=0, source=None):
        return self.convert("--to", "megatron", *words, source or self.source, self.theirs, status=status)

    def test_arguments_and_counters(self):
        said = self.to_megatron("--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2)
        self.assertIn(f"{self.theirs} is a Megatron-LM checkpoint of it now", said)
        saved = self.load(Shape(tp=2, pp=2), self.theirs, 1, 1)
        self.assertEqual((saved["checkpoint_version"], saved["iteration"]), (3.0, 3))
        self.assertIsInstance(saved["args"], argparse.Namespace)
        args = vars(saved["args"])
        want = {"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 8, "kv_channels": 16,
                "num_query_groups": 2, "group_query_attention": True, "max_position_embeddings": SEQ, "seq_length": SEQ,
                "padded_vocab_size": VOCAB, "swiglu": True, "add_bias_linear": False, "normalization": "RMSNorm",
                "position_embedding_type": "rope", "rotary_base": 5000, "untie_embeddings_and_output_weights": True,
                "tokenizer_type": "NullTokenizer", "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": None, "params_dtype": torch.float32, "ckpt_format": "torch",
                "iteration": 3, "consumed_train_samples": 24, "world_size": 4, "transformer_impl": "transformer_engine",
                "add_position_embedding": True, "make_vocab_size_divisible_by": 128}
        self.assertEqual({k: args.get(k) for k in want}, want)
        self.assertIn("tensor-parallel size 2, pipeline-parallel size 2", run(MOBULA, "checkpoint", "inspect", self.theirs))

    def test_it_comes_back_and_is_trained_from(self):
        self.to_megatron("--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 4)
        self.convert(self.theirs, self.path / "back")
        self.same_weights(self.weights(self.path / "back"), self.weights(self.source))
        words = ["--no-load-optim", "--train-iters", 5]
        log = self.train(self.shape, "--load", self.theirs, *words)
        self.assertEqual([x[:2] for x in losses(log)], [("4", "32"), ("5", "40")])
        self.assertEqual(losses(self.train(self.shape, "--load", self.path / "back", *words)), losses(log))

    def test_one_of_megatron_becomes_one_of_another_layout(self):
        self.to_megatron("--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2)
        again, straight = self.path / "again", self.path / "straight"
        layout = ["--to", "megatron", "--tensor-model-parallel-size", 1, "--pipeline-model-parallel-size", 4]
        self.convert(*layout, self.theirs, again)
        self.convert(*layout, self.source, straight)
        for stage in range(4):
            a, b = (self.load(Shape(pp=4), d, 0, stage) for d in (again, straight))
            self.assertEqual(vars(a["args"]), vars(b["args"]))
            self.assertEqual(list(a["model"]), list(b["model"]))
            for name, value in a["model"].items():
                self.assertTrue(value is b["model"][name] is None or torch.equal(value, b["model"][name]), name)

    def test_a_release_stays_one(self):
        self.to_megatron()
        (self.theirs / ITER).rename(self.theirs / "release")
        (self.theirs / TRACKER).write_text("release")
        self.convert("--to", "megatron", "--tensor-model-parallel-size", 2, self.theirs, self.path / "again")
        self.assertEqual((self.path / "again" / TRACKER).read_text(), "release")
        self.assertEqual(files_of(self.path / "again" / "release"),
                         {megatron_gang.file_of(Shape(tp=2), t, 0) for t in range(2)})

    def test_the_names_of_transformer_engine(self):
        """The same tensors as with the other names; None for what strict loading asks of linear layers."""
        self.to_megatron()
        self.convert("--to", "megatron", "--transformer-impl", "local", self.source, self.path / "local")
        local, fused = self.load(self.shape, self.path / "local")["model"], self.load(self.shape, self.theirs)["model"]
        names = {n.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_").replace(
            "pre_mlp_self_attention.linear_qkv.layer_norm_", "mlp.linear_fc1.layer_norm_").replace(
            "pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"): n for n in local}
        self.assertEqual(set(names), set(fused))
        self.assertEqual(sum(n.endswith("_extra_state") for n in fused), 4 * 4 + 1)
        for name, value in fused.items():
            if name.endswith("_extra_state"):
                self.assertIsNone(value)
            else:
                self.assertTrue(torch.equal(value, local[names[name]]), name)
        ours = {f"{n}": t for n, t in self.weights(self.source).items()}
        self.same_weights({n: t for n, t in fused.items() if t is not None}, ours)

    def test_halves(self):
        for name, kind in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            target = self.path / name
            self.convert("--to", "megatron", "--dtype", name, self.source, target)
            saved = self.load(self.shape, target)
            self.assertEqual((saved["args"].params_dtype, saved["args"].bf16, saved["args"].fp16),
                             (kind, name == "bf16", name == "fp16"))
            self.same_weights({n: t for n, t in saved["model"].items() if t is not None},
                              {n: t.to(kind) for n, t in self.weights(self.source).items()})

    def test_the_vocabulary_is_padded_as_megatron_does(self):
        """To a multiple of 128 for each rank, of 255 tokens and the one that NullTokenizer adds: with zeros, or less."""
        want = self.weights(self.source)
        self.to_megatron("--tensor-model-parallel-size", 4)
        self.assertEqual(self.load(Shape(tp=4), self.theirs)["args"].padded_vocab_size, 512)
        parts = [self.load(Shape(tp=4), self.theirs, t)["model"] for t in range(4)]
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            rows = torch.cat([p[name] for p in parts])
            self.assertTrue(torch.equal(rows[:VOCAB], want[name]))
            self.assertTrue(torch.equal(rows[VOCAB:], torch.zeros(512 - VOCAB, 64)))
        self.convert("--to", "megatron", "--vocab-size", 200, "--make-vocab-size-divisible-by", 8, self.source,
                     self.path / "less")
        model = self.load(self.shape, self.path / "less")["model"]
        self.assertTrue(torch.equal(model["output_layer.weight"], want["output_layer.weight"][:200]))

    def refused(self, text, *words, status=64, source=None):
        said = self.to_megatron(*words, status=status, source=source)
        self.assertEqual(len(said.splitlines()), 1, said)
        self.assertIn(text, said)
        self.assertFalse(self.theirs.exists())
        self.assertEqual([p.name for p in self.path.iterdir() if p.name.startswith("theirs")], [])

    def test_what_cannot_be_is_refused(self):
        self.refused("its 4 layers are no multiple of the pipeline-parallel size 3", "--pipeline-model-parallel-size", 3)
        self.refused("are no multiple of the tensor-parallel size 5", "--tensor-model-parallel-size", 5)
        self.refused("--transformer-impl te: expected transformer_engine or local", "--transformer-impl", "te")
        self.refused("--max-shard-size", "--max-shard-size", "1M")
        self.refused("more than 1024 ranks", "--tensor-model-parallel-size", 512, "--pipeline-model-parallel-size", 4,
                     status=78)
        self.refused("tensor embedding.word_embeddings.weight: F32 of 2 dimensions [256, 64]", "--vocab-size", 300,
                     status=65)
        said = self.convert("--to", "nemo", self.source, self.theirs, status=64)
        self.assertIn("--to nemo: expected mobula, huggingface or megatron", said)
        said = self.convert("--tensor-model-parallel-size", 2, self.source, self.theirs, status=64)
        self.assertIn("--tensor-model-parallel-size", said)
        self.assertIn("is a checkpoint of ours already", self.convert("--to", "mobula", self.source, self.theirs, status=64))
        self.assertFalse(self.theirs.exists())
        self.theirs.mkdir()
        (self.theirs / "mine").write_text("x")
        self.assertIn("is not empty: nothing is overwritten", self.to_megatron(status=72))
        self.assertEqual(files_of(self.theirs), {"mine"})

    def test_damage_is_named(self):
        ours = self.path / "ours"
        shutil.copytree(self.source, ours)
        file = ours / ITER / "model_tp00_pp00.safetensors"
        whole = load_file(file)
        for text, status, change in (
                ("tensor decoder.layers.2.mlp.linear_fc2.weight is missing", 65,
                 lambda t: t.pop("decoder.layers.2.mlp.linear_fc2.weight")),
                ("tensor decoder.final_layernorm.weight: F32 of 1 dimensions [32, 0], the arguments need F32 of 1 [64, 0]", 65,
                 lambda t: t.update({"decoder.final_layernorm.weight": torch.ones(32)})),
                ("tensor decoder.layers.0.mlp.linear_fc1.bias is none of this model: it would be lost", 78,
                 lambda t: t.update({"decoder.layers.0.mlp.linear_fc1.bias": torch.ones(192)}))):
            with self.subTest(text):
                tensors = dict(whole)
                change(tensors)
                save_file(tensors, file)
                self.refused(text, status=status, source=ours)
        big = {**whole, "decoder.final_layernorm.weight": torch.full((64,), 1e5)}
        save_file(big, file)
        self.refused("tensor decoder.final_layernorm.weight has values beyond 65504", "--dtype", "fp16", status=78,
                     source=ours)

    def test_a_kill_leaves_no_target(self):
        """Wherever it comes; the next conversion clears what is left, and is whole."""
        words = [MOBULA, "checkpoint", "convert", "--to", "megatron", "--pipeline-model-parallel-size", "4",
                 str(self.source), str(self.theirs)]
        partial = self.path / "theirs.mobula-convert"
        n_killed = 0
        moments = (".mobula-convert", f"{ITER}/mp_rank_00_000", f"{ITER}/mp_rank_00_002", f"{ITER}/mp_rank_00_003")
        for n in range(40):  # how many end before they are killed depends on the machine
            if n >= len(moments) and n_killed > 0:
                break
            wait_for = moments[n % len(moments)]
            p = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while p.poll() is None and not (partial / wait_for).exists():
                time.sleep(0)
            p.send_signal(signal.SIGKILL)
            if p.wait() == -signal.SIGKILL and not self.theirs.exists():
                n_killed += 1
            elif self.theirs.exists():  # it was faster
                self.assertEqual((self.theirs / TRACKER).read_text(), "3")
                shutil.rmtree(self.theirs)
        self.assertGreater(n_killed, 0)
        self.to_megatron("--pipeline-model-parallel-size", 4)
        self.assertEqual([p.name for p in self.path.iterdir()], ["theirs"])
        self.convert(self.theirs, self.path / "back")
        self.same_weights(self.weights(self.path / "back"), self.weights(self.source))


if __name__ == "__main__":
    unittest.main()
