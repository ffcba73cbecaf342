"""Against the real torch and megatron-core: files of torch.save are listed and become safetensors files, bit by bit, and
these files that torch loads; what is hostile or broken is refused by name, and nothing runs. Usage: test_torch_file.py MOBULA"""

import argparse
import collections
import io
import json
import os
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import unittest
import warnings
import zipfile

warnings.filterwarnings("ignore")

import numpy as np
import torch
from megatron.core.enums import ModelType
from safetensors import safe_open
from safetensors.torch import load_file, save_file

MOBULA = os.path.abspath(sys.argv[1])
del sys.argv[1]
DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64", torch.int64: "I64",
          torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}
# What is no damage, but not read: exit status 78. All else is 65.
UNSUPPORTED = ("it names", "it is refused", "compressed", "its protocol", "opcode", "nested", "is none", "is there twice",
               "are refused", "its arguments")


class Worker(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(5, 3)
        self.norm = torch.nn.LayerNorm(3)


def tensors_in(value, path=""):
    """Name and tensor, by the rule of torch_file.h."""
    if isinstance(value, torch.Tensor):
        yield path, value.detach()
    elif isinstance(value, argparse.Namespace):
        yield from tensors_in(vars(value), path)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for key, item in enumerate(value):
            yield from tensors_in(item, f"{path}.{key}" if path else str(key))


def megatron_like():
    """What Megatron-LM's save_checkpoint puts together, of small tensors of every kind."""
    torch.manual_seed(3)
    model = Worker()
    state = model.state_dict()  # an OrderedDict with attributes
    state["half"] = torch.randn(7, 2).to(torch.bfloat16)
    state["linear._extra_state"] = io.BytesIO(b"scales")
    state["norm._extra_state"] = None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.norm(model.linear(torch.randn(4, 5))).sum().backward()
    optimizer.step()
    big = torch.randn(40, 30)
    args = argparse.Namespace(num_layers=2, hidden_size=64, lr=1.5e-4, bf16=True, load=None, params_dtype=torch.bfloat16,
                              data_path=["1", "a_text_document"], large=2**40, negative=-3, name="größe",
                              nan=float("nan"), model_type=ModelType.encoder_or_decoder, beyond=2**70)
    random.seed(1)
    return {"args": args, "checkpoint_version": 3.0, "iteration": 20, "model": state,
            "optimizer": {"optimizer": optimizer.state_dict(),
                          "fp32_from_fp16_params": [[big, big[3:9]], [big.t(), big[:, 1:20:3]]]},
            "opt_param_scheduler": {"max_lr": 0.1, "num_steps": 320},
            "rng_state": [{"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state(),
                           "torch_rng_state": torch.get_rng_state(), "rng_tracker_states": {}}],
            "parameter": torch.nn.Parameter(torch.randn(3)), "default": collections.defaultdict(None, a=[torch.ones(2)]),
            "size": torch.Size([1, 2]), "set": {1, 2}, "numpy": np.arange(3), "scalar": np.float64(0.5),
            "num_floating_point_operations_so_far": 2**60}


def everything():
    many = torch.arange(100000, dtype=torch.float32).reshape(100, 1000)
    return {"kinds": {name: (torch.arange(24).reshape(2, 3, 4) % 2).to(kind) for kind, name in DTYPES.items()},
            "scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "none": torch.empty(3, 0)[:, :0],
            "turned": many.t(), "columns": many[:, 10:900:7], "rows": many[90:], "part": many[3:7, 100:900],
            "one": many[5, 5], "wide": many[:1].expand(4, 1000), "swapped": many.reshape(10, 10, 1000).permute(2, 0, 1),
            "ones": torch.ones(1, 5, 1).expand(1, 5, 1), "list": [many[0], (many[1], [many[2]])], 7: many[3],
            "bits": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])}


class TorchFileTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="mobula-torch-")
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name)
        self.file, self.target = self.path / "model_optim_rng.pt", self.path / "out.safetensors"

    def run_mobula(self, *words, status=0):
        done = subprocess.run([MOBULA, "checkpoint", *map(str, words)], capture_output=True, text=True, timeout=300,
                              check=False)
        self.assertEqual(done.returncode, status, (words, done.stdout[-2000:], done.stderr[-2000:]))
        return done.stdout if status == 0 else done.stderr

    def refused(self, text):
        """Both verbs say so, and nothing is left."""
        status = next((78 for t in UNSUPPORTED if t in text), 65)
        for words in (("inspect", self.file), ("convert", self.file, self.target)):
            self.assertIn(text, self.run_mobula(*words, status=status))
        self.assertEqual([p for p in os.listdir(self.path) if "out" in p], [])

    def compare(self, saved):
        """The file is listed, and converted, as what torch reads from it."""
        want = dict(tensors_in(torch.load(self.file, weights_only=False)))
        self.assertEqual(set(want), set(dict(tensors_in(saved))))
        facts = json.loads(self.run_mobula("inspect", "--json", self.file))
        self.assertEqual({t["name"]: (t["dtype"], t["shape"]) for t in facts["list"]},
                         {name: (DTYPES[t.dtype], list(t.shape)) for name, t in want.items()})
        self.assertEqual(facts["tensors"], len(want))
        self.assertEqual(facts["values"], sum(t.numel() for t in want.values()))
        listed = self.run_mobula("inspect", self.file).splitlines()[1:]
        self.assertEqual(listed, [f"{t['name']} {t['dtype']} {t['shape']}" for t in facts["list"]])
        converted = json.loads(self.run_mobula("convert", "--json", self.file, self.target))
        self.assertEqual((converted["event"], converted["tensors"]), ("converted", len(want)))
        self.assert_same(load_file(self.target), want)
        self.assertEqual([p for p in os.listdir(self.path) if p.endswith(".mobula-convert")], [])
        return facts

    def assert_same(self, got, want):
        """Two dictionaries of tensors, bit by bit."""
        self.assertEqual(set(got), set(want))
        for name, t in want.items():
            self.assertEqual((got[name].dtype, got[name].shape), (t.dtype, t.shape), name)
            as_bytes = [x.contiguous().reshape(-1).view(torch.uint8) for x in (got[name], t)]
            self.assertTrue(torch.equal(*as_bytes), name)

    def write_back(self):
        """The safetensors file as one of torch: what the strictest way of loading makes of it."""
        back = self.path / "back.pt"
        converted = json.loads(self.run_mobula("convert", "--json", self.target, back))
        self.assertEqual((converted["event"], converted["kind"]), ("converted", "safetensors"))
        with zipfile.ZipFile(back) as z:
            self.assertIsNone(z.testzip())  # every checksum
        with torch.serialization.safe_globals([argparse.Namespace]):
            loaded = torch.load(back, weights_only=True)
            mapped = torch.load(back, weights_only=True, mmap=True)
        self.assert_same(dict(tensors_in(mapped)), dict(tensors_in(loaded)))
        return loaded

    def test_tensors_are_what_torch_reads(self):
        torch.save(everything(), self.file)
        self.assertNotIn("args", self.compare(everything()))
        self.assert_same(self.write_back(), load_file(self.target))

    def test_any_safetensors_file_becomes_torchs(self):
        want = dict(tensors_in(everything()["kinds"])) | {"größe.x": torch.randn(300, 1000), "none": torch.empty(0, 3),
                                                          "model.one": torch.tensor(1.5)}
        save_file(want, self.target, {"args": "a word", "format": "pt"})
        listed = json.loads(self.run_mobula("inspect", "--json", self.target))
        self.assertEqual({t["name"]: (t["dtype"], t["shape"]) for t in listed["list"]},
                         {name: (DTYPES[t.dtype], list(t.shape)) for name, t in want.items()})
        self.assertEqual((listed["kind"], listed["values"]), ("safetensors", sum(t.numel() for t in want.values())))
        self.assert_same(self.write_back(), want)
        again = self.path / "again.safetensors"
        self.run_mobula("convert", self.path / "back.pt", again)
        self.assert_same(load_file(again), want)
        save_file({}, self.path / "empty.safetensors")
        self.run_mobula("convert", self.path / "empty.safetensors", self.path / "empty.pt")
        self.assertEqual(torch.load(self.path / "empty.pt", weights_only=True), {})

    def test_a_checkpoint_of_megatron(self):
        saved = megatron_like()
        torch.save(saved, self.file)
        facts = self.compare(saved)
        self.assertEqual(facts["iteration"], 20)
        self.assertEqual(facts["args"], {"num_layers": 2, "hidden_size": 64, "lr": 1.5e-4, "bf16": True, "load": None,
                                         "params_dtype": "torch.bfloat16", "data_path": ["1", "a_text_document"],
                                         "large": 2**40, "negative": -3, "name": "größe"})
        with safe_open(self.target, "pt") as f:
            self.assertEqual(json.loads(f.metadata()["args"]), facts["args"])
            self.assertEqual(f.metadata()["iteration"], "20")
        loaded = self.write_back()
        self.assertEqual((loaded["checkpoint_version"], loaded["iteration"]), (3.0, 20))
        self.assertIs(type(loaded["args"]), argparse.Namespace)
        self.assertEqual(vars(loaded["args"]), facts["args"] | {"params_dtype": torch.bfloat16})
        self.assert_same(loaded["model"], dict(tensors_in(saved["model"])))
        self.assert_same(dict(tensors_in(loaded)), load_file(self.target))
        again = json.loads(self.run_mobula("inspect", "--json", self.path / "back.pt"))
        for key in ("args", "iteration", "list", "values", "bytes"):
            self.assertEqual(again[key], facts[key], key)

    def test_a_model_of_megatron_core(self):
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.transformer_config import TransformerConfig
        torch.distributed.init_process_group("gloo", init_method=f"file://{self.path}/rendezvous", rank=0, world_size=1)
        self.addCleanup(torch.distributed.destroy_process_group)
        parallel_state.initialize_model_parallel(1, 1)
        self.addCleanup(parallel_state.destroy_model_parallel)
        config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True,
                                   pipeline_dtype=torch.float32)
        model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=128, max_sequence_length=32)
        saved = {"args": argparse.Namespace(num_layers=2), "iteration": 1,
                 "model": model.state_dict_for_save_checkpoint()}
        torch.save(saved, self.file)
        facts = self.compare(saved)
        shapes = {t["name"]: t["shape"] for t in facts["list"]}
        self.assertEqual(shapes["model.decoder.layers.1.self_attention.linear_qkv.weight"], [192, 64])
        want = {name: p.detach().clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        missing, unexpected = model.load_state_dict(self.write_back()["model"], strict=False)
        self.assertEqual([k for k in missing if not k.endswith("._extra_state")], [])
        self.assertEqual(unexpected, [])
        self.assert_same({name: p.detach() for name, p in model.named_parameters()}, want)

    def test_other_roots_and_writers(self):
        for value in (torch.arange(5), [torch.ones(2), 3], {"a": 1}, 5):
            torch.save(value, self.file)
            got = json.loads(self.run_mobula("inspect", "--json", self.file))
            want = [(n or "tensor", list(t.shape)) for n, t in tensors_in(value)]
            self.assertEqual([(t["name"], t["shape"]) for t in got["list"]], want)
        crc = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        self.addCleanup(torch.serialization.set_crc32_options, crc)
        torch.save(everything(), self.file)
        self.compare(everything())

    def test_many_entries_need_the_64_bit_records(self):
        saved = {"many": [torch.full((1,), i) for i in range(70000)]}
        torch.save(saved, self.file)
        self.compare(saved)
        self.assertEqual(len(self.write_back()), 70000)

    def save_pickle(self, pickle):
        with zipfile.ZipFile(self.file, "w") as z:
            z.writestr("a/data.pkl", pickle)

    def test_nothing_runs(self):
        class Hostile:
            def __reduce__(self):
                return os.system, (f"touch {out}",)
        out = self.path / "out-of-order"
        torch.save({"model": {}, "args": Hostile()}, self.file)
        self.refused("it names posix.system, which no checkpoint of Megatron-LM has: it is refused")
        for name in (b"builtins\neval\n", b"__builtin__\neval\n", b"os\nsystem\n", b"torch\nload\n", b"\x1b[2J\nx\n"):
            self.save_pickle(b"\x80\x02c" + name + b"X\x01\0\0\x001\x85R.")
            self.refused("it is refused")

    def test_what_is_broken_is_named(self):
        self.file.write_bytes(b"")
        self.refused("it is too short")
        self.file.write_bytes(b"no zip" * 100)
        self.refused("it has no end record")
        with zipfile.ZipFile(self.file, "w") as z:
            z.writestr("a.txt", "x")
        self.refused("a zip, but none of torch.save")
        with zipfile.ZipFile(self.file, "w", zipfile.ZIP_DEFLATED) as z:
            z.writestr("a/data.pkl", b"\x80\x02N." * 1000)
        self.refused("an entry is compressed or encrypted")
        for pickle, text in ((b"", "it ends in the middle"), (b"\x80\x05N.", "its protocol"),
                             (b"\x80\x02.", "nothing is on the stack"), (b"\x80\x02h\x05.", "it takes what was not kept"),
                             (b"\x80\x02t.", "there is no mark"), (b"\x80\x02X\xff\xff\xff\xff.", "it ends in the middle"),
                             (b"\x80\x02i.", "opcode 0x69"),
                             (b"\x80\x02]q\0h\0a.", "nested too deeply, or within themselves"),
                             (b"\x80\x02]" + b"q\0]h\0h\0\x86a" * 40 + b".", "nested too deeply")):
            with self.subTest(pickle[:20]):
                self.save_pickle(pickle)
                self.refused(text)

        torch.save({"a": torch.arange(1000.0)}, self.file)
        whole = self.file.read_bytes()
        at = whole.index(struct.pack("<f", 998.0) + struct.pack("<f", 999.0))
        self.file.write_bytes(whole[:at] + b"\1" + whole[at + 1:])
        self.assertIn("its checksum is not that of its bytes",
                      self.run_mobula("convert", self.file, self.target, status=65))
        self.assertFalse(self.target.exists())
        for n in (len(whole) - 1, len(whole) // 2, 30):
            self.file.write_bytes(whole[:n])
            self.refused("no whole zip file of torch.save")
        storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x04tQ"
        for size, text in ((b"K\x05\x85K\x01\x85", "lies outside its storage"),
                           (b"J\xff\xff\xff\xff\x85K\x01\x85", "is none that torch.save writes"),
                           (b"K\x05\x85)", "is none that torch.save writes"),
                           (b"\x8a\x08\0\0\0\0\0\0\0\x7f\x85\x8a\x08\0\0\0\0\0\0\0\x7f\x85", "outside its storage"),
                           (b"\x8a\x08\0\0\0\0\0\0\0\x7f\x85K\0\x85", "outside its storage")):
            with self.subTest(size), zipfile.ZipFile(self.file, "w") as z:
                z.writestr("a/data.pkl", b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\0" + size +
                           b"\x89NtR.")
                z.writestr("a/data/0", bytes(16))
            self.refused(text)
        torch.save({"a": torch.ones(1).expand(2 ** 40)}, self.file)
        self.refused("numbers that stand for so many others are refused")
        row = list(range(4000))
        torch.save({"model": {}, "args": argparse.Namespace(a=[row] * 4000)}, self.file)
        self.refused("its arguments are more than 65536 values or")
        torch.save({"model": {}, "args": argparse.Namespace(a=["x" * 4000] * 4000)}, self.file)
        self.refused("its arguments are more than 65536 values or")
        torch.save({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, self.file)
        self.refused("tensor a.b is there twice")
        torch.save({"a": torch.ones(1, dtype=torch.complex64)}, self.file)
        self.refused("it names torch.ComplexFloatStorage")

    def test_files_are_kept(self):
        torch.save({"a": torch.ones(2)}, self.file)
        self.target.write_text("mine")
        self.assertIn("exists: nothing is overwritten", self.run_mobula("convert", self.file, self.target, status=72))
        self.assertEqual(self.target.read_text(), "mine")
        self.assertIn("the file ends early", self.run_mobula("convert", self.target, self.path / "other.pt", status=65))
        save_file({"a": torch.ones(2)}, self.path / "a.safetensors")
        self.assertIn("exists: nothing", self.run_mobula("convert", self.path / "a.safetensors", self.file, status=72))
        self.assertIn("no effect", self.run_mobula("inspect", "--iteration", 3, self.file, status=64))
        self.assertIn("one of the two", self.run_mobula("convert", self.file, self.path / "other.pt", status=64))
        self.assertIn("--json alone", self.run_mobula("convert", "--dtype", "bf16", self.file, self.target, status=64))


if __name__ == "__main__":
    unittest.main()
