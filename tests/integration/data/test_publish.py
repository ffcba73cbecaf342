"""mobula preprocess into a bucket of a real S3 server, and in Megatron-LM's partition order.

Usage: test_publish.py MOBULA
"""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import reference_files as reference
import s3

MOBULA = sys.argv.pop(1)
PREFIX = f"s3://{s3.BUCKET}/data/corpus"


def rows(seed, n):
    rng = random.Random(seed)
    text = lambda: " ".join(str(rng.randrange(1000)) for _ in range(rng.randrange(1, 40)))
    return [{"text": rng.choice([text(), text(), [text(), text()], []]), "other": str(i % 1000)} for i in range(n)]


def write_lines(path, some_rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in some_rows))
    return str(path)


def documents(some_rows, key="text"):
    out = []
    for row in some_rows:
        texts = row[key] if isinstance(row[key], list) else [row[key]]
        out.append([[int(x) for x in t.split(" ")] for t in texts])
        if texts:
            out[-1][-1].append(1000)
    return out


class Case(unittest.TestCase):
    def setUp(self):
        self.dir = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory(prefix="mb-publish-")))
        self.scratch = self.dir / "scratch"
        self.scratch.mkdir()

    def command(self, prefix, *args):
        return [MOBULA, "preprocess", "--output-prefix", str(prefix), "--tokenizer-type", "NullTokenizer",
                "--vocab-size", "1000", "--append-eod", "--scratch-dir", str(self.scratch), *args]

    def run_it(self, prefix, *args, env=None):
        return subprocess.run(self.command(prefix, *args), capture_output=True, text=True, timeout=100,
                              env={**os.environ, **(env or {})})

    def expect_files(self, prefix, want):
        reference.write_index(str(self.dir / "want"), want, 1001)
        for end in (".bin", ".idx"):
            self.assertTrue(pathlib.Path(f"{prefix}{end}").read_bytes() ==
                            (self.dir / f"want{end}").read_bytes(), f"{prefix}{end}")


class Partitions(Case):
    """tools/preprocess_data.py of Megatron-LM: lines go in turn to N files, over all inputs; each file is
    tokenized; the results are laid end to end."""

    def test_order(self):
        a, b = rows(1, 5003), rows(2, 1709)
        paths = [write_lines(self.dir / "in-a.jsonl", a), write_lines(self.dir / "in-b.jsonl", b)]
        for n in (1, 2, 3, 8):
            with self.subTest(partitions=n):
                done = self.run_it(self.dir / "out", "--input", str(self.dir / "in-*.jsonl"), "--partitions", str(n),
                                   "--workers", str(n), "--json-keys", "text", "other")
                self.assertEqual(done.returncode, 0, done.stderr)
                order = [r for i in range(n) for r in (a + b)[i::n]]
                self.expect_files(self.dir / "out_text_document", documents(order))
                self.expect_files(self.dir / "out_other_document", documents(order, "other"))
                kept = self.run_it(self.dir / "seq", "--input", *paths, "--partitions", str(n), "--workers", str(n),
                                   "--keep-sequential-samples")
                self.assertEqual(kept.returncode, 0, kept.stderr)
                self.expect_files(self.dir / "seq_text_document", documents(a + b))
        left = sorted(p.name for p in self.dir.iterdir())
        self.assertEqual([n for n in left if n.startswith("in")], ["in-a.jsonl", "in-b.jsonl"], left)
        self.assertFalse([n for n in left if "tmp" in n or n.endswith(".preprocess")], left)

    def test_refused(self):
        path = write_lines(self.dir / "in.jsonl", rows(1, 3))
        done = self.run_it(self.dir / "out", "--input", path, "--partitions", "3", "--workers", "4")
        self.assertEqual(done.returncode, 64)
        self.assertIn("not a multiple", done.stderr)

    def test_fewer_lines_than_partitions(self):
        a = rows(3, 3)
        done = self.run_it(self.dir / "out", "--input", write_lines(self.dir / "in.jsonl", a), "--partitions", "8",
                           "--workers", "8")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.expect_files(self.dir / "out_text_document", documents(a))


class Bucket(Case):
    @classmethod
    def setUpClass(cls):
        cls.root = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="mb-publish-s3-")))
        cls.port = cls.enterClassContext(s3.server(cls.root))
        cls.bucket = cls.root / "s3" / s3.BUCKET
        cls.env = cls.environment(cls.port)

    @staticmethod
    def environment(port):
        return {"BUCKET_STORAGE_HOST": f"http://127.0.0.1:{port}", "BUCKET_STORAGE_ACCESS_KEY": s3.ACCESS_KEY,
                "BUCKET_STORAGE_SECRET_KEY": s3.SECRET_KEY, "NO_PROXY": "127.0.0.1"}

    def setUp(self):
        super().setUp()
        for path in (self.bucket / "data").glob("*"):
            path.unlink()

    def objects(self):
        return {p.name: p.read_bytes() for p in (self.bucket / "data").glob("corpus*")}

    def test_two_keys_twice(self):
        for seed in (1, 2):
            a = rows(seed, 3000)
            path = write_lines(self.dir / "in.jsonl", a)
            done = self.run_it(PREFIX, "--input", path, "--json-keys", "text", "other", "--json", env=self.env)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(json.loads(done.stdout)["output_prefixes"],
                             [PREFIX + "_text_document", PREFIX + "_other_document"])
            self.expect_files(self.bucket / "data/corpus_text_document", documents(a))
            self.expect_files(self.bucket / "data/corpus_other_document", documents(a, "other"))
            self.assertEqual(list(self.scratch.iterdir()), [])

    def test_input_from_the_bucket_too(self):
        a = rows(4, 2000)
        (self.bucket / "in").mkdir(exist_ok=True)
        write_lines(self.bucket / "in/x.jsonl", a)
        done = self.run_it(PREFIX, "--input", f"s3://{s3.BUCKET}/in/*.jsonl", env=self.env)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.expect_files(self.bucket / "data/corpus_text_document", documents(a))

    def test_told_before_the_work(self):
        path = write_lines(self.dir / "in.jsonl", rows(5, 10))
        for prefix, env, status, text in (
                (f"s3://{s3.BUCKET}/", {}, 64, "a name is missing"),
                ("s3://no-such-bucket/a/b", {}, 66, "no-such-bucket"),
                (PREFIX, {"BUCKET_STORAGE_SECRET_KEY": "not-it"}, 77, "S3 answered 403"),
                (PREFIX, {"BUCKET_STORAGE_SECRET_KEY": ""}, 77, "BUCKET_STORAGE_SECRET_KEY")):
            done = self.run_it(prefix, "--input", path, env={**self.env, **env})
            self.assertEqual(done.returncode, status, done.stderr)
            self.assertIn(text, done.stderr)
            self.assertEqual(done.stdout, "")  # not even "Opening"
            self.assertEqual(list(self.scratch.iterdir()), [])

    def test_a_bad_line_changes_no_object(self):
        self.assertEqual(self.run_it(PREFIX, "--input", write_lines(self.dir / "in.jsonl", rows(6, 10)),
                                     env=self.env).returncode, 0)
        before = self.objects()
        (self.dir / "in.jsonl").write_text('{"text": "1"}\n{"text"\n')
        done = self.run_it(PREFIX, "--input", str(self.dir / "in.jsonl"), env=self.env)
        self.assertEqual(done.returncode, 64, done.stderr)
        self.assertEqual(self.objects(), before)
        self.assertEqual(list(self.scratch.iterdir()), [])

    def test_ended_while_it_is_sent(self):
        """The .idx does not get through: objects stay as they were, the files stay here, and say where."""
        path = write_lines(self.dir / "in.jsonl", rows(7, 100))
        self.assertEqual(self.run_it(PREFIX, "--input", path, env=self.env).returncode, 0)
        before = self.objects()
        write_lines(self.dir / "in.jsonl", rows(8, 200))
        with s3.Gate(self.port, r"\.idx.*partNumber") as gate:
            process = subprocess.Popen(self.command(PREFIX, "--input", path), stderr=subprocess.PIPE,
                                       stdout=subprocess.DEVNULL, text=True,
                                       env={**os.environ, **self.environment(gate.port)})
            deadline = time.monotonic() + 120
            while not gate.waiting and time.monotonic() < deadline:
                time.sleep(0.05)
            self.assertTrue(gate.waiting)
            self.assertEqual(self.objects(), before)
            process.send_signal(signal.SIGTERM)
            error = process.communicate(timeout=120)[1]
        self.assertEqual(process.returncode, 130, error)
        self.assertIn("the objects are as they were, the files stay in " + str(self.scratch), error)
        self.assertEqual(self.objects(), before)
        done = self.run_it(PREFIX, "--input", path, env=self.env)  # the next run cleans up
        self.assertEqual(done.returncode, 0, done.stderr)
        self.expect_files(self.bucket / "data/corpus_text_document", documents(rows(8, 200)))
        self.assertEqual(list(self.scratch.iterdir()), [])


if __name__ == "__main__":
    unittest.main()
