"""Data, tokenizer and base model that lie in an S3 bucket: fetched before the ranks start, once a node, never a
mixture; what is wrong is named."""

import fcntl
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
import unittest

import s3
from cluster import Cluster, iterations_of, mini_model, wait_until

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "s3"))
from faults import FaultProxy, error  # noqa: E402

DATA = f"s3://{s3.BUCKET}/datasets/tiny_text_document"
MODEL = f"s3://{s3.BUCKET}/models/tiny"
BASE = f"s3://{s3.BUCKET}/megatron-models/base"


class Inputs(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = cls.enterClassContext(tempfile.TemporaryDirectory(prefix="mb-inputs-"))
        port = cls.enterClassContext(s3.server(cls.directory))
        cls.proxy = cls.enterClassContext(FaultProxy(port))
        cls.cluster = cls.enterClassContext(Cluster(nodes=2, env=s3.environment(cls.proxy.port)))
        cls.make_objects()

    @classmethod
    def path(cls, *parts):
        return os.path.join(cls.directory, *parts)

    @classmethod
    def must(cls, *words):
        done = cls.cluster.mobula(*words)
        assert done.returncode == 0, done.stdout
        return done.stdout

    @classmethod
    def make_tokenizer(cls, directory):
        """GPT-2's kind of files, of one byte a token but for "ab"."""
        os.makedirs(directory)
        shown = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
        hidden = [b for b in range(256) if b not in shown]
        alphabet = [chr(b) for b in shown] + [chr(256 + i) for i in range(len(hidden))]
        vocab = {c: i for i, c in enumerate([*alphabet, "ab", "<|endoftext|>"])}
        with open(f"{directory}/vocab.json", "w", encoding="utf-8") as f:
            json.dump(vocab, f)
        with open(f"{directory}/merges.txt", "w", encoding="utf-8") as f:
            f.write("#version: 0.2\na b\n")
        with open(f"{directory}/tokenizer.json", "w", encoding="utf-8") as f:
            json.dump({"version": "1.0", "added_tokens": [
                {"id": len(vocab) - 1, "content": "<|endoftext|>", "single_word": False, "lstrip": False, "rstrip": False,
                 "normalized": False, "special": True}], "normalizer": None,
                "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                                  "use_regex": True},
                "post_processor": None, "decoder": {"type": "ByteLevel", "add_prefix_space": True,
                                                    "trim_offsets": True, "use_regex": True},
                "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
                          "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "vocab": vocab,
                          "merges": ["a b"]}}, f)
        with open(f"{directory}/tokenizer_config.json", "w", encoding="utf-8") as f:
            json.dump({"eos_token": "<|endoftext|>"}, f)
        with open(f"{directory}/model-00001.safetensors", "wb") as f:
            f.write(b"weights, which nobody who wants a tokenizer needs")

    @classmethod
    def make_objects(cls):
        cls.make_tokenizer(cls.path("tiny"))
        with open(cls.path("text.jsonl"), "w", encoding="utf-8") as f:
            for i in range(400):
                f.write(json.dumps({"text": "abc def gh " * (1 + i % 7)}) + "\n")
        cls.must("preprocess", "--input", cls.path("text.jsonl"), "--output-prefix", DATA.removesuffix("_text_document"),
                 "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", cls.path("tiny/vocab.json"),
                 "--merge-file", cls.path("tiny/merges.txt"), "--append-eod")
        cls.must("checkpoint", "push", "--plain", cls.path("tiny"), MODEL)
        cls.proxy.requests.clear()

    def setUp(self):
        self.proxy.clear()
        self.proxy.requests.clear()

    def command(self, *more, tokenizer=("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", MODEL),
                data=("--data-path", DATA), iterations=4):
        words = mini_model(iterations)
        at = words.index("--mock-data")
        del words[at:at + 5]  # and the NullTokenizer
        return ["mobula", "train", "--num-nodes", "2", "--gpus-per-node", "1", *words, "--split", "90,10,0", *tokenizer,
                *data, *more]

    def train(self, *more, **kinds):
        job_id = self.cluster.submit(self.command(*more, **kinds))
        job = self.cluster.wait_job(job_id, timeout_s=120)
        return job, self.cluster.logs(job_id)

    def got(self, pattern):
        return [r for r in self.proxy.seen("GET", pattern) if r.status in (200, 206)]

    def cached(self):
        root = pathlib.Path(self.cluster.temp, "inputs")
        return sorted(str(p.relative_to(root)).split("/", 1)[1] for p in root.rglob("*") if p.is_file()
                      and p.name != ".lock")

    def test_data_and_tokenizer_once(self):
        shutil.rmtree(pathlib.Path(self.cluster.temp, "inputs"), ignore_errors=True)  # nothing runs
        job, log = self.train()
        self.assertEqual(job["status"], "SUCCEEDED", log)
        self.assertEqual(len(iterations_of(log)), 4)
        self.assertRegex(log, rf"mobula: node 0: (fetched {DATA}: \d+\.\d \w+ in|{DATA} is here already)")
        # Two nodes of one machine: each object came over the network once, weights never.
        for name in ("tiny_text_document.bin", "tiny_text_document.idx", "tokenizer.json", "tokenizer_config.json"):
            self.assertEqual(len(self.got(re.escape(name))), 1, name)
        self.assertEqual(self.got("safetensors"), [])
        self.assertIn("tiny/tokenizer.json", self.cached())
        local = self.train("--data-path", self.cached_prefix(), data=())
        self.assertEqual([x[2] for x in iterations_of(local[1])], [x[2] for x in iterations_of(log)])
        # Again: everything is there, and asked for.
        self.proxy.requests.clear()
        job, log = self.train()
        self.assertEqual(job["status"], "SUCCEEDED", log)
        self.assertIn(f"mobula: node 0: {DATA} is here already", log)
        self.assertEqual(self.got("text_document"), [])
        self.assertTrue(self.proxy.seen("HEAD", "text_document.idx"))

    def cached_prefix(self):
        root = pathlib.Path(self.cluster.temp, "inputs")
        return str(next(root.rglob("tiny_text_document.idx")).with_suffix(""))

    def test_single_files_by_flag_and_equals_sign(self):
        job, log = self.train(tokenizer=("--tokenizer-type", "GPT2BPETokenizer", f"--vocab-file={MODEL}/vocab.json",
                                         "--merge-file", f"{MODEL}/merges.txt"),
                              data=("--data-path", "0.5", DATA, "0.5", DATA))
        self.assertEqual(job["status"], "SUCCEEDED", log)
        self.assertEqual(len(iterations_of(log)), 4)

    def test_preprocess_with_a_tokenizer_of_the_bucket(self):
        with open(self.path("strings"), "w", encoding="utf-8") as f:
            f.write('"abc def"\n')
        self.assertIn("[", self.must("tokenizer", "encode", "--tokenizer-type", "HuggingFaceTokenizer",
                                     "--tokenizer-model", MODEL, "--input", self.path("strings")))
        for i, model in enumerate((MODEL, self.path("tiny"))):
            self.must("preprocess", "--input", self.path("text.jsonl"), "--output-prefix", self.path(f"tok{i}"),
                      "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", model, "--append-eod")
        for ending in ("bin", "idx"):
            pair = [pathlib.Path(self.path(f"tok{i}_text_document.{ending}")).read_bytes() for i in (0, 1)]
            self.assertEqual(pair[0], pair[1])
        failed = self.cluster.mobula("preprocess", "--input", self.path("text.jsonl"), "--output-prefix",
                                     self.path("tok2"), "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file",
                                     f"{MODEL}/vocab.json", "--merge-file", f"{MODEL}/no-merges.txt")
        self.assertEqual(failed.returncode, 66, failed.stdout)
        self.assertIn("no-merges.txt: it is not there", failed.stdout)

    def test_a_replaced_object_is_another_file(self):
        url = DATA.replace("tiny", "changing").removesuffix("_text_document")
        make = ["preprocess", "--input", self.path("text.jsonl"), "--output-prefix", url, "--tokenizer-type",
                "GPT2BPETokenizer", "--vocab-file", self.path("tiny/vocab.json"), "--merge-file",
                self.path("tiny/merges.txt")]
        self.must(*make)
        data = ("--data-path", url + "_text_document")
        job, first = self.train(data=data)
        self.assertEqual(job["status"], "SUCCEEDED", first)
        self.must(*make, "--append-eod")
        job, second = self.train(data=data)
        self.assertEqual(job["status"], "SUCCEEDED", second)
        self.assertNotEqual(iterations_of(first), iterations_of(second))
        self.assertEqual(self.cached().count("changing_text_document.bin"), 2)

    def test_one_fetches_and_others_wait(self):
        job, log = self.train()
        self.assertEqual(job["status"], "SUCCEEDED", log)
        prefix = pathlib.Path(self.cached_prefix())
        truncated, leftover = prefix.with_suffix(".bin"), prefix.with_name("tiny_text_document.bin.tmp-1")
        whole = truncated.read_bytes()
        truncated.write_bytes(whole[:10])  # and what a fetcher that was killed leaves
        leftover.write_bytes(b"half")
        with open(prefix.with_name(".lock"), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            job_id = self.cluster.submit(self.command())
            wait_until(lambda: f"{DATA} is being fetched by another: waiting" in self.cluster.logs(job_id),
                       "the job waits for the lock", 60)
            self.assertEqual(self.cluster.job(job_id)["status"], "RUNNING")
            stopped = self.cluster.submit(self.command())  # waits for its nodes, and is stopped
            self.cluster.mobula("job", "stop", stopped)
            self.assertEqual(self.cluster.wait_job(stopped)["status"], "STOPPED")
        job = self.cluster.wait_job(job_id)
        self.assertEqual(job["status"], "SUCCEEDED", self.cluster.logs(job_id))
        self.assertEqual(truncated.read_bytes(), whole)
        self.assertFalse(leftover.exists())

    def test_what_is_wrong_is_named(self):
        for more, words in ((("--data-path", DATA + "-typo"), [r"tiny_text_document-typo\.(bin|idx): it is not there"]),
                            (("--data-path", "s3://no-such-bucket/x"), ["fetching inputs: s3://no-such-bucket/x"]),
                            (("--tokenizer-model", MODEL + "-typo"), ["no such object, and no files of a tokenizer"]),
                            (("--pretrained-checkpoint", BASE + "-typo"), ["base-typo: there is no checkpoint"])):
            job, log = self.train(*more)
            self.assertEqual(job["status"], "FAILED", log)
            for word in words:
                self.assertRegex(log, word)
            self.assertNotIn(s3.SECRET_KEY, log)
        job, log = self.train("--save", f"s3://{s3.BUCKET}/x", "--save-interval", "2")
        self.assertEqual(job["status"], "FAILED", log)
        self.assertIn("--checkpoint-url makes what is saved there durable", log)
        self.cluster.assert_all_free()

    def test_a_passing_fault_and_a_stop(self):
        url = DATA.replace("datasets", "faulty")
        self.must("checkpoint", "push", "--plain", os.path.dirname(self.cached_or_made()), os.path.dirname(url))
        self.proxy.rule("GET", r"faulty/tiny_text_document\.bin", error(503, "SlowDown"), times=2)
        job, log = self.train(data=("--data-path", url))
        self.assertEqual(job["status"], "SUCCEEDED", log)
        self.proxy.rule("HEAD", r"faulty/tiny_text_document\.bin", error(503, "SlowDown"))
        job_id = self.cluster.submit(self.command(data=("--data-path", url)))
        wait_until(lambda: len(self.proxy.seen("HEAD", "faulty/tiny_text_document.bin")) > 1,
                   "the node asks for its data", 30)
        self.cluster.mobula("job", "stop", job_id)
        self.assertEqual(self.cluster.wait_job(job_id)["status"], "STOPPED")
        self.cluster.assert_all_free()

    def cached_or_made(self):
        """A local copy of the data set."""
        prefix = self.path("local", "tiny")
        os.makedirs(os.path.dirname(prefix), exist_ok=True)
        self.must("preprocess", "--input", self.path("text.jsonl"), "--output-prefix", prefix, "--tokenizer-type",
                  "GPT2BPETokenizer", "--vocab-file", self.path("tiny/vocab.json"), "--merge-file",
                  self.path("tiny/merges.txt"), "--append-eod")
        return prefix

    def test_a_base_model(self):
        save = self.path("base")
        job, log = self.train("--save", save, "--save-interval", "4")
        self.assertEqual(job["status"], "SUCCEEDED", log)
        self.must("checkpoint", "push", save, BASE)
        self.proxy.requests.clear()
        job, log = self.train("--pretrained-checkpoint", BASE, "--save", self.path("tuned"), "--save-interval", "2",
                              "--load", self.path("tuned"))
        self.assertEqual(job["status"], "SUCCEEDED", log)
        self.assertRegex(log, r"successfully loaded checkpoint from \S+ .* at iteration 0")
        self.assertEqual([i for i, _, _ in iterations_of(log)], [1, 2, 3, 4])
        self.assertEqual(self.got("optim_dp"), [])
        self.assertEqual(len(self.got("model_tp00")), 1)
        # A run that has begun goes on with its own.
        job, log = self.train("--pretrained-checkpoint", BASE, "--save", self.path("tuned"), "--save-interval", "2",
                              "--load", self.path("tuned"), iterations=6)
        self.assertEqual(job["status"], "SUCCEEDED", log)
        self.assertEqual([i for i, _, _ in iterations_of(log)], [5, 6])

    def test_another_program_finds_what_it_reads(self):
        """mobula run --fetch-inputs: every node has data, tokenizer and model, also the ones without rank 0."""
        save, base = self.path("other"), f"s3://{s3.BUCKET}/megatron-models/other"
        weights = "iter_0000001/mp_rank_00/model_optim_rng.pt"  # as Megatron-LM names them
        os.makedirs(os.path.dirname(f"{save}/{weights}"))
        for name, text in (("latest_checkpointed_iteration.txt", "1"), (weights, "weights")):
            pathlib.Path(save, name).write_text(text, encoding="utf-8")
        self.must("checkpoint", "push", save, base)
        script = ('test -s "$2.bin" && test -s "$2.idx" && test -s "$4/tokenizer.json" && cd "${5#--load=}" && '
                  'grep -qx 1 latest_checkpointed_iteration.txt && grep -qx weights "$6" && echo all is here')
        words = ("sh", "-c", script, "sh", "--data-path", DATA, "--tokenizer-model", MODEL, f"--load={base}", weights)
        log = self.must("run", "--num-nodes", "2", "--fetch-inputs", "--", *words)
        self.assertEqual(log.count("all is here"), 2, log)
        # Unasked, a program's words are its own.
        log = self.must("run", "--", "echo", "--data-path", DATA)
        self.assertIn(f"--data-path {DATA}", log)

    def test_a_damaged_newest_checkpoint(self):
        """What is missing or short all nodes see and pass over; what was changed in place only who reads it."""
        url = f"s3://{s3.BUCKET}/damaged"
        job, log = self.train("--checkpoint-url", url, "--save-interval", "2", "--use-distributed-optimizer",
                              iterations=4)
        self.assertEqual(job["status"], "SUCCEEDED", log)
        shard = pathlib.Path(self.directory, "s3", s3.BUCKET,
                             "damaged/iter_0000004/optim_dp_001_of_002.safetensors")
        whole = shard.read_bytes()
        load = ("--load", url, "--use-distributed-optimizer", "--override-opt_param-scheduler")
        shard.write_bytes(whole[:-1])
        job, log = self.train(*load, iterations=5)
        self.assertEqual(job["status"], "SUCCEEDED", log)
        self.assertRegex(log, r"mobula: node 0: the newest checkpoint in the store is not whole "
                              r"\(optim_dp_001_of_002.safetensors: size or checksum differ .*\): iteration 2 is loaded")
        self.assertEqual([i for i, _, _ in iterations_of(log)], [3, 4, 5])
        shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        job, log = self.train(*load, "--max-restarts", "1", "--restart-delay", "0", iterations=5)
        self.assertEqual(job["status"], "SUCCEEDED", log)
        self.assertIn("a file that only one of them reads is damaged", log)
        self.assertEqual([i for i, _, _ in iterations_of(log)], [3, 4, 5])

    def test_each_node_takes_its_own_shards(self):
        url = f"s3://{s3.BUCKET}/run"
        job, log = self.train("--checkpoint-url", url, "--save-interval", "2", "--use-distributed-optimizer",
                              iterations=2)
        self.assertEqual(job["status"], "SUCCEEDED", log)
        self.proxy.requests.clear()
        job, log = self.train("--load", url, "--use-distributed-optimizer", iterations=4)
        self.assertEqual(job["status"], "SUCCEEDED", log)
        self.assertEqual([i for i, _, _ in iterations_of(log)], [3, 4])
        for name in ("model_tp00", "optim_dp_000_of_002", "optim_dp_001_of_002", "state.json"):
            self.assertEqual(len(self.got("run/.*" + name)), 1, name)


if __name__ == "__main__":
    unittest.main()
