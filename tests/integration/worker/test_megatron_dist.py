"""Against the real megatron-core: directories that its dist_checkpointing writes (--ckpt-format torch_dist) become one
checkpoint that gives its logits, and are trained from as they are. Usage: test_megatron_dist.py WORKER MOBULA GPT_LOGITS"""

import json
import os
import pathlib
import pickle
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
from megatron.core.dist_checkpointing.strategies.torch import MCoreMetadata
from safetensors.torch import load_file

from gang import tool as run
import megatron_gang
from megatron_gang import BATCH, SEQ, VOCAB, Shape

WORKER, MOBULA, GPT_LOGITS = (os.path.abspath(p) for p in sys.argv[1:4])
del sys.argv[1:4]
ITER, TRACKER = "iter_0000020", "latest_checkpointed_iteration.txt"
COMMON = ["--distributed-backend", "gloo", "--seq-length", SEQ, "--micro-batch-size", BATCH, "--lr", "1e-3",
          "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", VOCAB - 1]
TRAINING = ["--lr-decay-style", "constant", "--global-batch-size", 8, "--eval-iters", 0, "--log-interval", 1]
LLAMA = Shape(tp=2, pp=2, llama=True, untied=True, dist=True)


def words_of(s):
    words = ["--num-layers", 4, "--hidden-size", 64, "--ffn-hidden-size", 96, "--num-attention-heads", 8,
             "--max-position-embeddings", SEQ, "--attention-dropout", 0, "--hidden-dropout", 0]
    if not s.llama:
        return words
    return [*words, "--kv-channels", 16, "--group-query-attention", "--num-query-groups", s.groups, "--swiglu",
            "--disable-bias-linear", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--rotary-base",
            5000, *(["--untie-embeddings-and-output-weights"] if s.untied else [])]


def losses(log):
    return re.findall(r"iteration +(\d+)/.*consumed samples: +(\d+) .*lm loss: (\S+)", log)


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="mobula-megatron-dist-")
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name)
        self.theirs, self.ours = self.path / "theirs", self.path / "ours"

    def weights(self, checkpoint):
        return load_file(checkpoint / ITER / "model_tp00_pp00.safetensors")

    def same_weights(self, a, b):
        self.assertEqual(set(a), set(b))
        for name, value in a.items():
            self.assertTrue(torch.equal(value, b[name]), name)


class LogitsTest(Case):
    def check(self, s):
        tokens = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(5))
        want = megatron_gang.run(s, self.path, tokens)
        run(MOBULA, "checkpoint", "convert", "--no-load-optim", self.theirs, self.ours)
        tokens.numpy().astype("<i4").tofile(self.path / "tokens")
        run(GPT_LOGITS, self.ours / ITER / "model_tp00_pp00.safetensors", self.path / "tokens", self.path / "logits",
            *words_of(s), *COMMON, "--train-iters", 1)
        got = torch.from_numpy(np.fromfile(self.path / "logits", "<f4").reshape(BATCH, SEQ, -1))
        self.assertGreater(float(want.abs().max()), 0.3)
        self.assertLess(float((got - want).abs().max()), 1e-5)
        facts = json.loads(run(MOBULA, "checkpoint", "inspect", "--json", self.theirs))
        self.assertEqual(facts, {**facts, "kind": "megatron", "ckpt_format": "torch_dist", "iteration": 20, "num_layers": 4,
                                 "parameters": sum(t.numel() for t in self.weights(self.ours).values())})
        state = json.loads((self.ours / ITER / "state.json").read_text())
        self.assertEqual((state["iteration"], state["consumed_train_samples"], state["has_optimizer"]), (20, 160, False))

    def test_learned_positions_biases_and_tied_embeddings(self):
        self.check(Shape(tp=2, pp=2, dist=True))

    def test_gates_and_query_groups(self):
        self.check(LLAMA)

    def test_interleaved_stages(self):
        self.check(Shape(tp=1, pp=2, vp=2, llama=True, dist=True))

    def test_one_rank_and_layers_apart(self):
        self.check(Shape(llama=True, dist=True, apart=True))

    def test_bfloat16(self):
        self.check(Shape(tp=2, pp=1, llama=True, untied=True, dist=True, apart=True, dtype=torch.bfloat16))


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


class DirectoryTest(Case):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="mobula-megatron-dist-")
        cls.addClassCleanup(cls.folder.cleanup)
        cls.source = pathlib.Path(cls.folder.name)
        megatron_gang.run(LLAMA, cls.source, torch.zeros(BATCH, SEQ, dtype=torch.long))

    def setUp(self):
        super().setUp()
        self.fresh()

    def fresh(self):
        shutil.rmtree(self.theirs, ignore_errors=True)
        shutil.copytree(self.source / "theirs", self.theirs)

    def change(self, change):
        """What .metadata says."""
        file = self.theirs / ITER / ".metadata"
        meta = pickle.loads(file.read_bytes())
        meta = change(meta) or meta
        file.write_bytes(pickle.dumps(meta))

    def train(self, *words, status=0):
        return run(WORKER, *COMMON, *TRAINING, *words, status=status)

    def test_training_goes_on_from_it(self):
        words = ["--use-checkpoint-args", "--no-load-optim", "--train-iters", 22]
        run(MOBULA, "checkpoint", "convert", "--no-load-optim", self.theirs, self.ours)
        log = self.train("--load", self.theirs, *words)
        self.assertEqual([x[:2] for x in losses(log)], [("21", "168"), ("22", "176")])
        self.assertEqual(losses(self.train("--load", self.ours, *words)), losses(log))
        tuned = self.train("--pretrained-checkpoint", self.theirs, "--use-checkpoint-args", "--train-iters", 1)
        self.assertEqual([x[:2] for x in losses(tuned)], [("1", "8")])

    def test_its_optimizer_is_not_taken(self):
        log = self.train("--load", self.theirs, "--use-checkpoint-args", "--train-iters", 21, status=78)
        self.assertIn(f"Unable to load optimizer from checkpoint {self.theirs}. Specify --no-load-optim or --finetune", log)

    def test_it_becomes_one_of_ranks(self):
        run(MOBULA, "checkpoint", "convert", "--no-load-optim", "--to", "megatron", "--tensor-model-parallel-size", 2, self.theirs,
            self.path / "ranks")
        for source in (self.theirs, self.path / "ranks"):
            run(MOBULA, "checkpoint", "convert", "--no-load-optim", source, self.path / f"ours-{source.name}")
        self.same_weights(self.weights(self.path / "ours-theirs"), self.weights(self.path / "ours-ranks"))

    def refused(self, text, status=65):
        """By all that read it; nothing is left."""
        for verb in (["inspect", self.theirs], ["verify", self.theirs],
                     ["convert", "--no-load-optim", self.theirs, self.ours]):
            done = subprocess.run([MOBULA, "checkpoint", *map(str, verb)], capture_output=True, text=True, timeout=60,
                                  check=False)
            self.assertEqual((done.returncode, len(done.stderr.splitlines())), (status, 1), done.stderr)
            self.assertIn(text, done.stderr)
        self.assertEqual([p.name for p in self.path.iterdir()], ["theirs"])
        log = self.train("--load", self.theirs, "--use-checkpoint-args", "--no-load-optim", "--train-iters", 21,
                         status=status)
        self.assertIn(text, log)

    def test_what_is_missing_is_named(self):
        at = self.theirs / ITER
        for name, text in (("__1_0.distcp", "__1_0.distcp is missing: the checkpoint is not whole"),
                           (".metadata", ".metadata is missing: the checkpoint is not whole"),
                           ("common.pt", "common.pt is missing")):
            with self.subTest(name):
                (at / name).unlink()
                self.refused(text)
                self.fresh()
        (at / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
        self.refused("its sharded_backend is not torch_dist", status=78)
        (at / "metadata.json").write_text("{")
        self.refused("metadata.json: it does not say sharded_backend")

    def test_damage_is_named(self):
        file = self.theirs / ITER / "__1_0.distcp"
        whole = file.read_bytes()
        file.write_bytes(whole[:-1000])
        self.refused("__1_0.distcp: no whole zip file of torch.save: it lies outside of the file")
        file.write_bytes(bytes(len(whole)))
        self.refused("__1_0.distcp: no whole zip file of torch.save")
        meta = pickle.loads((self.theirs / ITER / ".metadata").read_bytes())
        info = next(v for k, v in meta.storage_data.items()
                    if v.relative_path == "__1_0.distcp" and k.fqn == "decoder.layers.mlp.linear_fc1.weight")
        at = info.offset + info.length // 2
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
        self.refused("tensor decoder.layers.mlp.linear_fc1.weight: a checksum is not that of its bytes")

    def test_metadata_that_does_not_fit_is_named(self):
        fc1, norm = "decoder.layers.mlp.linear_fc1.weight", "decoder.final_layernorm.weight"

        def of(meta, name):
            return next((k, v) for k, v in meta.storage_data.items() if k.fqn == name)

        def forget(meta):
            del meta.storage_data[of(meta, fc1)[0]]

        def rename(meta):
            meta.state_dict_metadata["decoder.other.weight"] = meta.state_dict_metadata.pop(norm)
            key, info = of(meta, norm)
            del meta.storage_data[key]
            meta.storage_data[type(key)("decoder.other.weight", key.offset)] = info

        def add(meta):
            meta.state_dict_metadata["decoder.layers.self_attention.q_layernorm.weight"] = meta.state_dict_metadata[norm]
            key, info = of(meta, norm)
            meta.storage_data[type(key)("decoder.layers.self_attention.q_layernorm.weight", key.offset)] = info

        def shift(meta):
            meta.state_dict_metadata[fc1].chunks[1].offsets = meta.state_dict_metadata[fc1].chunks[0].offsets

        def drop(meta):
            meta.state_dict_metadata[fc1].chunks.pop()

        def escape(meta):
            of(meta, norm)[1].relative_path = "../../secret"

        def swap(meta):
            of(meta, norm)[1].offset = of(meta, fc1)[1].offset

        def widen(meta):
            meta.state_dict_metadata[norm].size = torch.Size([65])

        def double(meta):
            meta.state_dict_metadata[norm].properties.dtype = torch.float64

        def transform(meta):
            of(meta, norm)[1].transform_descriptors = ["zstd"]

        for change, status, text in (
                (forget, 65, f"tensor {fc1}: no file has one of its chunks"),
                (rename, 65, f"tensor {norm} is missing"),
                (add, 78, "tensor decoder.layers.self_attention.q_layernorm.weight is none of this model: it would be lost"),
                (shift, 65, f"tensor {fc1}: bytes of a chunk that it has not"),
                (drop, 65, f"tensor {fc1}: bytes of a chunk that it has not"),
                (escape, 65, "a chunk's file lies outside of the directory"),
                (swap, 65, "no "),
                (widen, 65, f"tensor {norm}: its chunks are not all of it"),
                (double, 78, f"tensor {norm}: its numbers are neither F32 nor F16 nor BF16"),
                (transform, 78, f"tensor {norm}: its bytes are transformed"),
                (lambda meta: [1], 65, "no metadata of torch.distributed.checkpoint: it has something else")):
            with self.subTest(change.__name__):
                self.fresh()
                self.change(change)
                self.refused(text, status)

    def test_metadata_of_megatrons_own_class(self):
        """As megatron-core 0.15 writes it."""
        def change(meta):
            own = MCoreMetadata()
            own.__dict__.update(meta.__dict__, mcore_data={})
            return own

        run(MOBULA, "checkpoint", "convert", "--no-load-optim", self.theirs, self.ours)
        self.change(change)
        self.assertIn(b"MCoreMetadata", (self.theirs / ITER / ".metadata").read_bytes())
        run(MOBULA, "checkpoint", "convert", "--no-load-optim", self.theirs, self.path / "again")
        self.same_weights(self.weights(self.ours), self.weights(self.path / "again"))

    def test_layers_that_are_not_there_take_no_memory(self):
        """A common.pt of a few bytes may say 60000 of them."""
        def inspect(status):
            process = subprocess.Popen([MOBULA, "checkpoint", "inspect", str(self.theirs)], stdout=subprocess.DEVNULL,
                                       stderr=subprocess.PIPE, text=True)
            with process.stderr:
                text = process.stderr.read()
            _, wait_status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(wait_status)
            self.assertEqual(process.returncode, status, text)
            return text, used.ru_maxrss
        common = self.theirs / ITER / "common.pt"
        _, before = inspect(0)
        state = torch.load(common, weights_only=False)
        state["args"].num_layers = 60000
        torch.save(state, common)
        text, after = inspect(65)
        self.assertLess(after, before + 20 * 1024)
        self.assertIn("the arguments say 60000", text)

    def test_nothing_in_it_runs(self):
        ran = self.path / "theirs" / "ran"
        for change in (lambda meta: Evil(ran), lambda meta: setattr(meta, "planner_data", Evil(ran))):
            self.fresh()
            self.change(change)
            self.refused("it names posix.system, which no checkpoint of Megatron-LM has: it is refused", status=78)
            self.assertFalse(ran.exists())


if __name__ == "__main__":
    unittest.main()
