"""A byte that changed on the disk, or a file that is gone, is named by `mobula checkpoint verify` and by every rank
before it trains; what has no checksums is said to have none. Usage: test_verify.py WORKER MOBULA"""

import json
import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile
import unittest

from gang import MOCK, MODEL, Gang, iterations, run

WORKER, MOBULA = (os.path.abspath(p) for p in sys.argv[1:3])
del sys.argv[1:3]
LLAMA = "--normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights".split()
SHARDS = ["optim_dp_000_of_002.safetensors", "optim_dp_001_of_002.safetensors"]
FILES = ["model_tp00_pp00.safetensors", *SHARDS, "state.json"]


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def strip(path):
    """The same file, as a program without checksums has it."""
    data = path.read_bytes()
    n = struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8:8 + n])
    kept = {k: v for k, v in header["__metadata__"].items() if not k.startswith("mobula.")}
    header = json.dumps({**header, "__metadata__": kept}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + n:])


class VerifyTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="mobula-verify-")
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name)
        self.saved = self.path / "s"
        self.iter = self.saved / "iter_0000010"
        self.words = [*MODEL, *MOCK, *LLAMA, "--train-iters", "20"]
        run(WORKER, 2, [*self.words, "--save", str(self.saved), "--save-interval", "10", "--exit-interval", "10"],
            str(self.path / "a"))

    def mobula(self, *words, status=0):
        done = subprocess.run([MOBULA, "checkpoint", *map(str, words)], capture_output=True, text=True, timeout=60,
                              cwd=self.path, check=False)
        self.assertEqual(done.returncode, status, done.stderr)
        return done

    def refused(self, *names, status=65):
        """By verify, and by the rank that reads it before any trains."""
        for text in (self.mobula("verify", self.saved, status=status).stderr, self.train(status)):
            for name in names:
                self.assertIn(name, text)

    def train(self, status):
        """What ranks say that did not begin; those that have nothing to say themselves name one that has."""
        gang = Gang(WORKER, 2, [*self.words, "--load", str(self.saved)], str(self.path / "b"))
        self.addCleanup(gang.kill)
        codes = gang.start().finish()
        texts = [rank.of("failed")[0]["text"] for rank in gang.ranks]
        self.assertIn(status, codes, texts)
        for rank, code, text in zip(gang.ranks, codes, texts):
            self.assertEqual(iterations(rank), {})
            self.assertTrue(code == status or code == 69 and re.search(r"rank \d (failed|gave up)", text), (code, text))
        return "\n".join(texts)

    def test_a_flipped_byte_is_named(self):
        self.assertRegex(self.mobula("verify", "s").stdout,
                         r"^verified: iteration 10 in s, mobula checkpoint, 4 files, [\d.]+ [KM]iB$")
        for name in FILES:
            with self.subTest(name):
                file = self.iter / name
                at = file.stat().st_size * 3 // 5  # among the data, or the arguments
                flip(file, at)
                self.refused(name)
                flip(file, at)
        facts = json.loads(self.mobula("verify", "--json", self.saved).stdout)
        self.assertEqual({k: facts[k] for k in ("verified", "kind", "iteration", "files", "files_without_checksums")},
                         {"verified": True, "kind": "mobula checkpoint", "iteration": 10, "files": 4,
                          "files_without_checksums": 0})
        self.assertEqual(facts["bytes"], sum(f.stat().st_size for f in self.iter.iterdir()))
        flip(self.iter / FILES[0], -1)
        text = self.mobula("verify", self.saved, "--json", status=65)
        self.assertEqual(json.loads(text.stdout)["verified"], False)
        self.assertIn(f"{FILES[0]}: damaged: bytes ", json.loads(text.stdout)["error"])
        self.assertIn(FILES[0], self.mobula("inspect", self.saved, status=65).stderr)
        self.mobula("inspect", "--headers-only", self.saved)

    def test_the_optimizer_may_be_sgd(self):
        self.saved = self.path / "sgd"
        run(WORKER, 2, [*self.words, "--optimizer", "sgd", "--save", str(self.saved), "--save-interval", "10",
                          "--exit-interval", "10"],
            str(self.path / "b"))
        self.assertIn("iteration 10 in sgd, mobula checkpoint, 4 files", self.mobula("verify", "sgd").stdout)
        shard = self.saved / "iter_0000010" / SHARDS[1]
        flip(shard, -1)
        self.assertIn(SHARDS[1], self.mobula("verify", "sgd", status=65).stderr)

    def test_a_missing_shard_is_named(self):
        (self.iter / SHARDS[1]).unlink()
        self.refused(f"{SHARDS[1]} is not there", status=66)
        (self.iter / FILES[0]).unlink()
        self.refused(FILES[0], status=66)

    def test_a_changed_state_is_named(self):
        state = self.iter / "state.json"
        text = state.read_text()
        state.write_text(re.sub(r'"consumed_train_samples": \d+', '"consumed_train_samples": 81', text))
        self.refused("state.json", "is not the checksum of its text")

    def test_one_of_before_is_loaded_and_said_to_have_none(self):
        whole = run(WORKER, 2, [*self.words, "--load", str(self.saved)], str(self.path / "c"))
        for name in FILES[:3]:
            strip(self.iter / name)
        state = json.loads((self.iter / "state.json").read_text())
        del state["crc64nvme"]
        (self.iter / "state.json").write_text(json.dumps(state))
        done = self.mobula("verify", self.saved)
        self.assertIn("warning: 4 of 4 files have no checksums", done.stderr)
        self.assertIn("not all with checksums", done.stdout)
        older = run(WORKER, 2, [*self.words, "--load", str(self.saved)], str(self.path / "d"))
        self.assertEqual(iterations(older.ranks[1]), iterations(whole.ranks[1]))

    def test_what_becomes_of_it_has_them_too(self):
        self.mobula("convert", self.saved, "hf", "--vocab-size", 100)
        self.assertIn("verified: hf, Hugging Face directory, 1 file", self.mobula("verify", "hf").stdout)
        flip(self.path / "hf" / "model.safetensors", -1)
        self.assertIn("hf/model.safetensors: damaged", self.mobula("verify", "hf", status=65).stderr)
        self.assertIn("hf/model.safetensors: damaged", self.mobula("convert", "hf", "back", status=65).stderr)
        self.assertFalse((self.path / "back").exists())

    def test_megatrons_files_are_read_whole(self):
        self.mobula("convert", self.saved, "theirs", "--to", "megatron", "--tensor-model-parallel-size", 2,
                    "--make-vocab-size-divisible-by", 64)
        self.assertIn("verified: iteration 10 in theirs, Megatron-LM checkpoint, 2 files",
                      self.mobula("verify", "theirs").stdout)
        file = self.path / "theirs" / "iter_0000010" / "mp_rank_01" / "model_optim_rng.pt"
        flip(file, file.stat().st_size // 2)
        self.saved = self.path / "theirs"
        self.refused("mp_rank_01/model_optim_rng.pt", "its checksum is not that of its bytes")

    def test_a_directory_that_is_a_store_is_read_as_one(self):
        self.mobula("push", self.saved, f"file://{self.path}/store")
        self.assertIn("verified: iteration 10", self.mobula("verify", self.path / "store").stdout)
        flip(self.path / "store" / "iter_0000010" / FILES[0], -1)
        self.assertIn("the manifest says", self.mobula("verify", self.path / "store", status=65).stderr)


if __name__ == "__main__":
    unittest.main()
