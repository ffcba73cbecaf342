"""--data-cache-path against megatron-core: what either writes the other opens as a hit, file by file the same bytes; what is damaged or
cannot be written is named and changes no number. Usage: test_data_cache.py WORKER SLOW_DISK, with the Python of torch-python."""

import base64
import json
import os
import pathlib
import pickle
import re
import resource
import shutil
import sys
import tempfile
import time
import types
import unittest

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.tokenizers.text.utils.build_tokenizer import build_tokenizer

from gang import MODEL, Gang, Rank, content, iterations, run
from index_file import write_documents

WORKER, SLOW_DISK = (os.path.abspath(p) for p in sys.argv[1:3])
del sys.argv[1:3]
CACHE = os.environ.get("MOBULA_CACHE", os.path.expanduser("~/.cache/mobula"))
NULL = types.SimpleNamespace(tokenizer_type="NullTokenizer", vocab_size=300)
NULL_FLAGS = "--tokenizer-type NullTokenizer --vocab-size 300".split()
# What pretrain_gpt.py's parser has where nothing is given.
DEFAULTS = {"vocab_file": None, "merge_file": None, "tokenizer_model": None, "vocab_size": None, "tokenizer_metadata": None,
            "tokenizer_special_tokens": None, "tiktoken_pattern": None, "tiktoken_num_special_tokens": 1000,
            "tokenizer_sentencepiece_legacy": False, "tokenizer_hf_use_fast": False,
            "tokenizer_hf_include_special_tokens": False, "trust_remote_code": False}


def make_data(prefix, n, seed):
    lengths = np.random.default_rng(seed).integers(5, 60, n).astype("<i4")
    write_documents(prefix, np.random.default_rng(seed + 1).integers(2, 250, lengths.sum()), lengths)


def sizes(iterations_, batch=8, interval=5, evaluations=2):
    return [iterations_ * batch, (iterations_ // interval + 1) * evaluations * batch, evaluations * batch]


def megatron(cache, n_samples, seq=32, seed=1234, tokenizer=NULL, data=None, split=None, per_split=None):
    """Its data sets, of the splits that have some, built or loaded in that directory."""
    tokenizer = build_tokenizer(types.SimpleNamespace(**{**DEFAULTS, **vars(tokenizer)}))
    config = GPTDatasetConfig(
        random_seed=seed, sequence_length=seq, blend=get_blend_from_list(data), split=split, path_to_cache=str(cache),
        blend_per_split=[get_blend_from_list(x) for x in per_split] if per_split else None, tokenizer=tokenizer,
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False)
    kind = GPTDataset if data or per_split else MockGPTDataset
    return BlendedMegatronDatasetBuilder(kind, n_samples, lambda: True, config).build()


def state(directory):
    """What a rebuild would change: {name: (inode, time, bytes)}."""
    return {n: (os.stat(os.path.join(directory, n)).st_ino, os.stat(os.path.join(directory, n)).st_mtime_ns, b)
            for n, b in content(directory).items()}


def told(gang):
    return gang.ranks[0].log()


class DataCacheTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="mobula-data-cache-")
        cls.addClassCleanup(cls.folder.cleanup)
        cls.path = pathlib.Path(cls.folder.name)
        torch.distributed.init_process_group("gloo", init_method=f"file://{cls.path}/group", rank=0, world_size=1)
        cls.addClassCleanup(torch.distributed.destroy_process_group)
        cls.few, cls.some, cls.many = (str(cls.path / x) for x in ("few", "some", "many é\"\\"))
        for prefix, n, seed in ((cls.few, 40, 1), (cls.some, 300, 3), (cls.many, 2000, 5)):
            make_data(prefix, n, seed)

    def ours(self, name, cache, *args, world=1, iters=10):
        lists = [*MODEL, *NULL_FLAGS, "--train-iters", str(iters), *map(str, args)]
        lists += ["--data-cache-path", str(cache)] if cache else []
        return run(WORKER, world, lists, str(self.path / "runs" / name))

    def both_ways(self, name, args, **theirs):
        """Ours then theirs in one directory, and the other way round; both directories hold the same."""
        a, b = self.path / name / "a", self.path / name / "b"
        first = self.ours(name + "-a", a, *args)
        self.assertIn("> saved indices", told(first))
        self.assertNotIn("WARNING: --data-cache-path", told(first))
        before = state(a)
        megatron(a, **theirs)
        self.assertEqual(before, state(a), "megatron-core built what was there")
        want = megatron(b, **theirs)
        self.assertEqual(sorted(content(a)), sorted(content(b)))
        self.assertEqual(content(a), content(b))
        before = state(b)
        second = self.ours(name + "-b", b, *args)
        self.assertEqual(before, state(b))
        self.assertNotIn("saved indices", told(second))
        self.assertEqual(told(second).count("> loaded indices"), sum(x.endswith("description.txt") for x in before))
        self.assertEqual(iterations(first.ranks[0]), iterations(second.ranks[0]))
        return want

    def test_one_prefix(self):
        """Splits, lengths of samples, one epoch and many, with a last one shuffled apart and without."""
        epochs = set()
        for i, (data, split, seq, iters, seed) in enumerate((
                (self.some, "80,15,5", 32, 10, 1234), (self.few, "969, 300, 200", 32, 40, 7),
                (self.few, "1,1,1", 16, 16, 1), (self.some, "50,50,0", 64, 30, 1234), (self.many, "969, 30, 1", 128, 5, 99),
                (self.some, "0.7,.2,.1", 24, 12, 5), (self.few, "90,5,5", 32, 22, 1234))):
            n = [x if share > 0 else 0 for x, share in zip(sizes(iters), map(float, re.findall(r"[.0-9]+", split)))]
            args = ["--data-path", data, "--split", split, "--seq-length", seq, "--max-position-embeddings", seq, "--train-iters",
                    iters, "--seed", seed]
            train = self.both_ways(f"one-{i}", args, n_samples=n, seq=seq, seed=seed, data=[data], split=split)[0]
            n = len(train.indices)
            is_many = len(train.document_index) > n
            epochs.add((is_many, is_many and np.array_equal(np.sort(train.document_index[-n:]), train.indices)))
        self.assertEqual(epochs, {(False, False), (True, False), (True, True)})

    def test_blends(self):
        weighted = ["0.3", self.few, "0.5", self.some, "7e-1", self.many]
        for i, (data, split) in enumerate(((weighted, "90,5,5"), ([self.few, self.some, self.many], "80,10,10"),
                                           (["1", self.some], "60,30,10"), (["3", self.few, "1", self.few], "50,30,20"))):
            want = self.both_ways(f"blend-{i}", ["--data-path", *data, "--split", split], n_samples=sizes(10), data=data, split=split)
            self.assertEqual([type(x).__name__ for x in want], ["BlendedDataset"] * 3)

    def test_lists_of_splits(self):
        lists = [["0.3", self.few, "0.7", self.some], [self.some], [self.few, self.many, self.some]]
        flags = [w for name, x in zip(("train", "valid", "test"), lists) for w in (f"--{name}-data-path", *x)]
        self.both_ways("lists", flags, n_samples=sizes(10), per_split=lists)

    def test_mock(self):
        self.both_ways("mock", ["--mock-data"], n_samples=sizes(10))

    def test_tokenizers(self):
        os.symlink(CACHE + "/tokenizers/gpt2", self.path / "gpt2")  # the name that megatron-core asks the hub for
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.path)
        gpt2 = {"vocab_file": CACHE + "/gpt2-vocab/vocab.json", "merge_file": CACHE + "/gpt2-vocab/merges.txt"}
        tik = self.path / "tik.json"
        tik.write_text(json.dumps([{"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": chr(i)} for i in range(256)]))
        spm = CACHE + "/tokenizers/llama2/tokenizer.model"
        special = ["<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>"]
        for i, (kind, given) in enumerate((
                ("GPT2BPETokenizer", gpt2), ("HuggingFaceTokenizer", {"tokenizer_model": CACHE + "/tokenizers/llama3"}),
                ("Llama2Tokenizer", {"tokenizer_model": spm}), ("GPTSentencePieceTokenizer", {"tokenizer_model": spm}),
                ("SentencePieceTokenizer", {"tokenizer_model": spm}),
                ("TikTokenizer", {"tokenizer_model": str(tik), "tiktoken_pattern": "v2", "vocab_size": 1256}),
                ("TikTokenizer", {"tokenizer_model": str(tik), "tiktoken_pattern": "v1", "vocab_size": 356, "tiktoken_num_special_tokens": 100,
                                  "tiktoken_special_tokens": special}))):
            flags = ["--tokenizer-type", kind]
            for key, value in given.items():
                flags += ["--" + key.replace("_", "-"), *(value if isinstance(value, list) else [str(value)])]
            theirs = {"tokenizer_type": kind, **given}
            if "tiktoken_special_tokens" in theirs:  # as arguments.py passes it on
                theirs["tokenizer_special_tokens"] = theirs.pop("tiktoken_special_tokens")
            self.both_ways(f"tokenizer-{i}", ["--data-path", self.some, "--split", "80,15,5", *flags], n_samples=sizes(10), data=[self.some],
                           split="80,15,5", tokenizer=types.SimpleNamespace(**theirs))

    def test_what_is_there_is_used(self):
        """Another order than the one that would be built is trained in, if it is one."""
        cache = self.path / "other"
        args = ["--data-path", self.some, "--split", "80,15,5"]
        built = self.ours("other-1", cache, *args)
        (name,) = cache.glob("*-GPTDataset-train-shuffle_index.npy")
        np.save(name, np.load(name)[::-1].copy())
        reversed_ = self.ours("other-2", cache, *args)
        self.assertEqual(told(reversed_).count("> loaded indices"), 3)
        self.assertNotEqual(iterations(built.ranks[0]), iterations(reversed_.ranks[0]))

    def damages(self):
        """(name of the file, what to do with it, what is said)"""
        def save(change):
            def act(path):
                x = np.load(path)
                np.save(path, change(x))
            return act

        def put(value, at):
            def change(x):
                x = x.copy()
                x.reshape(-1)[at] = value
                return x
            return change

        def cut(n):
            return lambda path: os.truncate(path, os.path.getsize(path) - n if n else 0)

        def pickled(path):
            np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)

        def bytes_of(text):
            return lambda path: path.write_bytes(text)

        def pipe(path):
            path.unlink()
            os.mkfifo(path)

        return [
            ("document", cut(4), "bytes of elements"), ("sample", cut(0), "does not begin as a .npy file"), ("shuffle", cut(200), "it has|elements"),
            ("document", save(lambda x: x.astype("<i8")), "it has <i8"), ("shuffle", save(lambda x: x.astype("<i4")), "it has <i4"),
            ("sample", save(lambda x: x[:-1]), "not <i4 of"), ("sample", save(lambda x: np.asfortranarray(x)), "fortran_order is not False"),
            ("document", save(lambda x: x.astype(">i4")), "descr is none of"), ("document", pickled, "descr is none of"),
            ("document", bytes_of(pickle.dumps(list(range(50)))), "does not begin as a .npy file"),
            ("document", save(put(2**31 - 1, 0)), "document_index is no order"), ("document", save(put(-1, 3)), "document_index is no order"),
            ("document", save(lambda x: np.full_like(x, x[0])), "document_index is no order"),
            ("sample", save(put(2**31 - 1, 4)), "sample_index does not fit"), ("sample", save(put(-5, 5)), "sample_index does not fit"),
            ("sample", save(put(1, 1)), "sample_index does not fit"),
            ("shuffle", save(put(2**32 - 1, 0)), "shuffle_index is no order"), ("shuffle", save(lambda x: np.zeros_like(x)), "shuffle_index is no order"),
            ("shuffle", pipe, "it is no regular file"), ("shuffle", pathlib.Path.unlink, "No such file"),
        ]

    def test_damage_is_named_and_mended(self):
        cache = self.path / "damaged"
        args = ["--data-path", self.some, "--split", "80,15,5", "--eval-iters", "0"]
        whole = self.ours("damage", cache, *args, iters=3)
        self.assertEqual(iterations(whole.ranks[0]), iterations(self.ours("no-cache", None, *args, iters=3).ranks[0]))
        files = content(cache)
        for i, (name, act, said) in enumerate(self.damages()):
            (path,) = cache.glob(f"*-train-{name}_index.npy")
            act(path)
            with self.subTest(name=name, said=said):
                gang = self.ours(f"damage-{i}", cache, *args, iters=3)
                self.assertRegex(told(gang), rf"(?m)^WARNING: --data-cache-path: \S*{path.name.rsplit('-', 1)[0]}\S*: .*({said}).*; the indices are built$")
                self.assertIn("> saved indices", told(gang))
                self.assertEqual(iterations(whole.ranks[0]), iterations(gang.ranks[0]))
                self.assertEqual(files, content(cache))
        (path,) = cache.glob("*-description.txt")
        path.write_text(path.read_text().replace("1234", "1235"))
        gang = self.ours("description", cache, *args, iters=3)
        self.assertRegex(told(gang), r"WARNING: --data-cache-path: \S*description.txt describes another data set; the indices are built")
        self.assertEqual(files, content(cache))

    def test_a_damaged_blend(self):
        cache = self.path / "damaged-blend"
        args = ["--data-path", "1", self.some, "2", self.many, "--split", "80,15,5", "--eval-iters", "0"]
        whole = self.ours("blend", cache, *args, iters=3)
        files = content(cache)
        for kind, value in (("dataset_index", 2), ("dataset_index", -1), ("dataset_sample_index", 2**40), ("dataset_sample_index", -1)):
            (path,) = cache.glob(f"*-BlendedDataset-train-{kind}.npy")
            x = np.load(path)
            x[3] = value
            np.save(path, x)
            gang = self.ours(f"{kind}-{value}", cache, *args, iters=3)
            self.assertIn("they are no order of the data sets' samples; the indices are built", told(gang))
            self.assertEqual(iterations(whole.ranks[0]), iterations(gang.ranks[0]))
            self.assertEqual(files, content(cache))

    def test_a_directory_that_takes_nothing(self):
        args = ["--data-path", self.some, "--split", "80,15,5"]
        want = iterations(self.ours("nowhere", None, *args).ranks[0])
        (self.path / "file").write_text("")
        taken = self.path / "taken"
        self.ours("taken-1", taken, *args)
        (path,) = taken.glob("*-GPTDataset-valid-sample_index.npy")
        path.unlink()
        path.mkdir()
        for i, (place, said) in enumerate(((self.path / "file" / "cache", "is not a directory"), ("/sys/kernel/mobula", "Operation not permitted|Permission denied"),
                                           (taken, "Is a directory"))):
            gang = self.ours(f"nowhere-{i}", place, *args)
            self.assertRegex(told(gang), rf"(?m)^WARNING: --data-cache-path: .*({said}); training goes on without it$")
            self.assertEqual(want, iterations(gang.ranks[0]))
        self.assertEqual([x for x in os.listdir(taken) if ".tmp-" in x], [])

    def test_a_full_disk(self):
        """A file may not grow as far as it must: what a full disk does, without one. The index of mock documents has 133 kB."""
        cache = self.path / "full"
        args = [*MODEL, *NULL_FLAGS, "--train-iters", "3", "--mock-data", "--eval-iters", "0"]
        want = run(WORKER, 1, args, str(self.path / "runs" / "not-full"))
        gang = Gang(WORKER, 1, [*args, "--data-cache-path", str(cache)], str(self.path / "runs" / "full"))
        self.addCleanup(gang.kill)
        gang.wait(lambda: gang.ranks[0].of("endpoint"))
        resource.prlimit(gang.ranks[0].process.pid, resource.RLIMIT_FSIZE, (100000, 100000))
        self.assertEqual(gang.start().finish(), [0], told(gang))
        self.assertRegex(told(gang), r"(?m)^WARNING: --data-cache-path: \S*document_index.npy\S*: .*File too large; training goes on without it$")
        self.assertEqual(iterations(want.ranks[0]), iterations(gang.ranks[0]))
        self.assertEqual(os.listdir(cache), [])

    def test_several_ranks(self):
        args = ["--data-path", "1", self.some, "2", self.many, "--split", "80,15,5"]
        want = self.ours("ranks", None, *args, world=4)
        cache = self.path / "ranks"
        for i in range(2):
            gang = self.ours(f"ranks-{i}", cache, *args, world=4)
            self.assertEqual(told(gang).count("> saved indices"), 9 * (i == 0))
            self.assertEqual(told(gang).count("> loaded indices"), 9 * (i == 1))
            self.assertNotIn("WARNING: --data-cache-path", told(gang))
            self.assertEqual(iterations(want.ranks[3]), iterations(gang.ranks[3]))
            self.assertEqual(len(os.listdir(cache)), 6 * 4 + 3 * 3)

    def test_nodes_with_different_directories(self):
        """One node's cache has another order: nobody trains in it."""
        args = [*MODEL, *NULL_FLAGS, "--train-iters", "10", "--data-path", self.some, "--split", "80,15,5"]
        want = run(WORKER, 2, args, str(self.path / "runs" / "alike"))
        caches = [self.path / "node-0", self.path / "node-1"]
        self.ours("node", caches[0], *args[len(MODEL) + len(NULL_FLAGS) + 2:])
        files = content(caches[0])
        (name,) = caches[0].glob("*-GPTDataset-train-shuffle_index.npy")
        np.save(name, np.load(name)[::-1].copy())
        files[name.name] = name.read_bytes()  # it stays: some run may have trained in that order
        cwd = str(self.path / "runs" / "nodes")
        os.makedirs(cwd)
        gang = Gang(WORKER, 0, args, cwd)
        gang.ranks = [Rank(WORKER, r, 2, [*args, "--data-cache-path", str(caches[r])], cwd, {}) for r in range(2)]
        gang.open = list(gang.ranks)
        self.addCleanup(gang.kill)
        self.assertEqual(gang.start().finish(), [0, 0], told(gang))
        self.assertIn(f"WARNING: --data-cache-path: ranks found different indices in {caches[0]}; they are built anew", told(gang))
        self.assertEqual(iterations(want.ranks[1]), iterations(gang.ranks[1]))
        self.assertEqual(files, content(caches[0]))
        self.assertFalse(caches[1].exists())

    def gang_of(self, name, lists, cwds=None, env_of_rank=lambda r: {}):
        """Ranks with an argument list each."""
        cwd = self.path / "runs" / name
        cwds = cwds or [str(cwd)] * len(lists)
        for place in (str(cwd), *cwds):
            os.makedirs(place, exist_ok=True)
        gang = Gang(WORKER, 0, [], str(cwd))
        gang.ranks = [Rank(WORKER, r, len(lists), [*MODEL, *NULL_FLAGS, "--train-iters", "10", *map(str, words)], cwds[r], env_of_rank(r))
                      for r, words in enumerate(lists)]
        gang.open = list(gang.ranks)
        self.addCleanup(gang.kill)
        return gang

    def test_a_damaged_directory_of_another_node(self):
        """Its ranks say so, since nobody else knows of it."""
        args = ["--data-path", self.some, "--split", "80,15,5"]
        caches = [self.path / "sound", self.path / "unsound"]
        self.ours("sound", caches[0], *args)
        shutil.copytree(*caches)
        (name,) = caches[1].glob("*-GPTDataset-train-shuffle_index.npy")
        name.write_bytes(name.read_bytes()[:-1])
        gang = self.gang_of("unsound", [[*args, "--data-cache-path", cache] for cache in caches])
        self.assertEqual(gang.start().finish(), [0, 0], told(gang))
        self.assertNotIn("WARNING: --data-cache-path", told(gang))
        self.assertRegex(gang.ranks[1].log(), rf"WARNING: --data-cache-path: \S*{name.name}\S*: .*; the indices are built")
        self.assertNotIn("> loaded indices", gang.ranks[1].log())

    def test_nodes_with_different_data(self):
        """No cache is to blame for that, and nobody trains in it, with a cache or without."""
        for cached in (False, True):
            gang = self.gang_of(f"different-{cached}", [["--data-path", prefix, "--split", "80,15,5",
                                                         *(["--data-cache-path", self.path / f"different-{r}"] if cached else [])]
                                                        for r, prefix in enumerate((self.some, self.few))])
            self.assertNotIn(0, gang.start().finish(), told(gang))
            self.assertIn(f"ranks have different data: {self.some}.idx of rank 1 has 40 documents, that of rank 0 300 (1 of 2 ranks differ)\n",
                          told(gang))
            self.assertEqual(gang.ranks[1].log().count("ranks have different data"), 0)  # rank 0 has said it
            self.assertNotIn("lm loss", told(gang))
            self.assertFalse((self.path / f"different-{0}").exists())

    def differs(self, name, change, said, world=2, odd=1):
        """One relative path, other files there: rank odd's are changed."""
        cwds = [str(self.path / "runs" / name / f"cwd-{r}") for r in range(world)]
        for r, cwd in enumerate(cwds):
            os.makedirs(cwd)
            if r == odd:
                change(cwd)
            else:
                make_data(cwd + "/data", 300, 3)
        gang = self.gang_of(name, [["--data-path", "data", "--split", "80,15,5"]] * world, cwds)
        self.assertNotIn(0, gang.start().finish(), told(gang))
        self.assertRegex(told(gang), "ranks have different data: " + said + "\n")
        self.assertNotIn("lm loss", told(gang))
        self.assertEqual({m["text"] for r in gang.ranks for m in r.of("failed") if "different" in m["text"]},
                         {m["text"] for m in gang.ranks[0].of("failed")})

    def test_what_differs_is_named(self):
        def swapped(cwd):  # as many of everything, two sequences in each other's place
            lengths = np.random.default_rng(3).integers(5, 60, 300).astype("<i4")
            i, j = 0, int(np.flatnonzero(lengths != lengths[0])[0])
            lengths[[i, j]] = lengths[[j, i]]
            write_documents(cwd + "/data", np.random.default_rng(4).integers(2, 250, lengths.sum()), lengths)

        def longer(cwd):
            make_data(cwd + "/data", 300, 3)
            with open(cwd + "/data.bin", "ab") as f:
                f.write(bytes(6))

        self.differs("documents", lambda cwd: make_data(cwd + "/data", 301, 3), r"data\.idx of rank 1 has 301 documents, that of rank 0 300 \(1 of 2 ranks differ\)")
        self.differs("checksum", swapped, r"data\.idx of rank 1 has \d+ as its checksum \(CRC64-NVME\), that of rank 0 \d+ \(1 of 2 ranks differ\)")
        self.differs("bytes", longer, r"data\.bin of rank 1 has (\d+) bytes, that of rank 0 \d+ \(1 of 2 ranks differ\)")
        self.differs("first", lambda cwd: make_data(cwd + "/data", 299, 3), r"data\.idx of rank 0 has 299 documents, that of rank 1 300 \(1 of 4 ranks differ\)",
                     world=4, odd=0)
        gang = self.gang_of("counts", [["--split", "80,15,5", "--data-path", self.some, *([self.few] if r == 1 else [])] for r in range(2)])
        self.assertNotIn(0, gang.start().finish(), told(gang))
        self.assertIn("ranks have different data: rank 1 was given 2 prefixes, rank 0 1\n", told(gang))

    def test_nodes_with_different_weights(self):
        """The same prefixes, of which each node's list draws otherwise: with a cache or without, nobody trains in it."""
        for r in range(4):
            (self.path / f"list-{r}").write_text(f"{0.3 + 0.4 * (r == 1)} {self.some} {0.7 - 0.4 * (r == 1)} {self.few}")
        for cached in (False, True):
            gang = self.gang_of(f"weights-{cached}", [["--data-args-path", self.path / f"list-{r}", "--split", "80,15,5",
                                                       *(["--data-cache-path", self.path / "weights"] if cached else [])] for r in range(4)])
            self.assertEqual(gang.start().finish(), [64] * 4, told(gang))
            self.assertEqual(told(gang).count("ranks have different data: rank 1 draws samples in another order than rank 0 "
                                              "(1 of 4 ranks differ): other weights or splits\n"), 1)
            self.assertNotIn("lm loss", told(gang))
            self.assertFalse((self.path / "weights").exists())

    def test_a_slow_directory_is_told_of(self):
        """Every flush there takes its time: the ranks wait, and say for whom."""
        slow = self.path / "slow"
        slow.write_text("")
        words = ["--data-path", self.some, "--split", "80,15,5", "--data-cache-path", self.path / "slow-cache"]
        env = {"LD_PRELOAD": SLOW_DISK, "SLOW_DISK_WHILE": str(slow), "SLOW_DISK_MS": "6000"}
        gang = self.gang_of("slow", [words] * 2, env_of_rank=lambda r: env if r == 0 else {}).start()
        while "> waiting for rank 0, " not in told(gang):
            self.assertIsNone(gang.ranks[0].process.poll(), told(gang))
            time.sleep(0.05)  # for the next look
        slow.unlink()
        self.assertEqual(gang.finish(), [0, 0], told(gang))
        self.assertRegex(told(gang), rf"> waiting for rank 0, \d+ s so far: writing {self.path}/slow-cache/\S+-GPTDataset-train-\S+_index.npy\n")
        self.assertEqual(told(gang).count("> saved indices"), 3)

    def test_what_a_killed_run_left_is_removed(self):
        """Killed while it writes; the next one there removes that, and not what is being written."""
        cache, slow = self.path / "left", self.path / "left-slow"
        slow.write_text("")
        words = ["--data-path", self.some, "--split", "80,15,5", "--data-cache-path", cache]
        env = {"LD_PRELOAD": SLOW_DISK, "SLOW_DISK_WHILE": str(slow), "SLOW_DISK_MS": "600000"}
        gang = self.gang_of("left-1", [words], env_of_rank=lambda r: env).start()
        while not (cache.exists() and any(".npy.tmp-" in x for x in os.listdir(cache))):
            self.assertIsNone(gang.ranks[0].process.poll(), told(gang))
            time.sleep(0.01)  # for the next look
        (left,) = os.listdir(cache)
        beside = self.gang_of("left-2", [words]).start()  # its writer lives
        self.assertEqual(beside.finish(), [0], told(beside))
        self.assertIn(left, os.listdir(cache))
        self.assertNotIn("> removed", told(beside))
        gang.kill()
        for name in cache.glob("*-GPTDataset-test-*"):
            name.unlink()
        after = self.gang_of("left-3", [words])
        self.assertEqual(after.start().finish(), [0], told(after))
        self.assertRegex(told(after), rf"> removed 1 unfinished files \(\d+ bytes\) of killed runs from {cache}\n")
        self.assertEqual([x for x in os.listdir(cache) if ".tmp-" in x], [])
        self.assertEqual(told(after).count("> saved indices"), 1)


if __name__ == "__main__":
    unittest.main()
