"""Bad input: one clear line saying what, where and what to do; the listed exit status; no leftovers.

Exit statuses are those of docs/operations.md (sysexits): 64 bad argument, 65 corrupt data, 66 no such
file, 69 unreachable, 72 exists already, 73 full, 78 not provided.
"""

import json
import os
import pathlib
import resource
import shutil
import signal
import socket
import struct
import subprocess
import unittest

from cluster import Cluster, NoCluster, train_command, wait_until
from ports import free_port


def corpus(path, documents=200):
    with open(path, "w", encoding="ascii") as f:
        for i in range(documents):
            words = " ".join(str((i * 7 + k * k) % 100) for k in range(60))
            f.write(json.dumps({"text": words}) + "\n")


class BadInput(unittest.TestCase):
    def setUp(self):
        # No cluster: the block only gives the directory, the environment and the final check.
        self.cluster = self.enterContext(NoCluster())
        self.dir = pathlib.Path(self.cluster.dir)

    def refused(self, argv, status, *texts, **more):
        """The command fails with the status and one line on stderr that has all the texts."""
        before = self.files()
        done = self.cluster.mobula(*argv, stderr=subprocess.PIPE, **more)
        self.assertEqual(done.returncode, status, (argv, done.stdout, done.stderr))
        lines = done.stderr.splitlines()
        self.assertEqual(len(lines), 1, done.stderr)
        for text in texts:
            self.assertIn(text, lines[0])
        self.assertLess(len(lines[0]), 400)
        self.assertEqual(self.files() - before, set(), "files were left")

    def files(self):
        return {p for p in self.dir.rglob("*") if p.is_file() and p.suffix != ".log"}

    # ---- arguments ----

    def test_wrong_arguments(self):
        for argv, texts in (
            (["sttaus"], ["sttaus", "did you mean status?"]),
            (["job", "submitt"], ["submitt", "did you mean submit?"]),
            (["start", "--hed"], ["--hed", "did you mean --head?"]),
            (["start"], ["--head", "--address"]),
            (["start", "--head", "--port", "99999"], ["--port", "99999"]),
            (["start", "--head", "--port", "x"], ["--port", "x"]),
            (["start", "--head", "--labels", "no json"], ["--labels"]),
            *((["start", *where, "--node-ip-address", ip, *more], ["--node-ip-address", what])
              for ip, what in (("0.0.0.0", "0.0.0.0 is a wildcard"), ("::", ":: is a wildcard"),
                               ("224.0.0.1", "a multicast address"), ("", "is empty"))
              for where in (["--head"], ["--address", "127.0.0.1:1"]) for more in ([], ["--block"])),
            (["run"], ["no command"]),
            (["run", "--num-nodes", "0", "--", "true"], ["--num-nodes"]),
            (["run", "--num-nodez", "2", "--", "true"], ["--num-nodez", "--num-nodes"]),
            (["run", "--checkpoint-url", "file:///tmp/x", "--", "true"], ["--save"]),
            (["train", "--checkpoint-url", "file:///tmp/x", "--num-layers", "2"], ["--checkpoint-url", "--save-interval"]),
            (["train", "--num-node", "2", "--num-layers", "2"], ["--num-node;", "did you mean --num-nodes?"]),
            (["job", "submit"], ["what is to run?"]),
            (["checkpoint", "verify"], ["URL"]),
            (["preprocess", "--input", "x"], ["--output-prefix"]),
        ):
            with self.subTest(argv=argv):
                self.refused([*argv, *(["--temp-dir", self.cluster.temp] if argv[0] == "start"
                                       else [])], 64, *texts)

    def test_wrong_arguments_of_a_rank(self):
        worker = pathlib.Path(os.environ["MOBULA_BIN"]).with_name("mobula-worker")
        for argv in (["--train-iters", "x"], ["--train-itrs", "2"]):
            with self.subTest(argv=argv):
                done = subprocess.run([worker, *argv], stderr=subprocess.PIPE, text=True, timeout=60)
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertIn(argv[0], done.stderr)

    def test_unreachable_head(self):
        port = free_port()
        self.refused(["status", "--address", f"http://127.0.0.1:{port}"], 69, f"127.0.0.1:{port}")
        self.refused(["job", "list", "--address", f"http://127.0.0.1:{port}"], 69,
                     f"127.0.0.1:{port}")
        self.refused(["run", "--address", f"127.0.0.1:{port}", "--", "true"], 69,
                     f"127.0.0.1:{port}")
        done = self.cluster.mobula("start", "--address", f"127.0.0.1:{port}", "--temp-dir",
                                   self.cluster.temp, stderr=subprocess.PIPE)
        self.assertEqual(done.returncode, 69, done.stderr)
        self.assertIn(f"127.0.0.1:{port}", done.stderr)

    def test_start_that_is_interrupted(self):
        port = free_port()
        with self.cluster.running("start", "--address", f"127.0.0.1:{port}", "--temp-dir",
                                  self.cluster.temp) as start:
            wait_until(lambda: list(pathlib.Path(self.cluster.temp).glob("node_*/agent.log")),
                       "the node is starting", 60)
            start.send_signal(signal.SIGINT)
            self.assertEqual(start.wait(60), 130, start.output())
            self.assertIn("interrupted", start.output())
        wait_until(lambda: not self.cluster.own_pids(), "nothing is left", 30)

    def test_an_address_that_this_machine_does_not_have(self):
        """It may be right (a host that passes its ports on to a container), so it is only said."""
        with self.cluster.running("start", "--head", "--port", "0", "--dashboard-port", "0", "--temp-dir",
                                  self.cluster.temp, "--node-ip-address", "203.0.113.7", "--no-token") as start:
            wait_until(lambda: "WARNING: no interface of this machine has --node-ip-address 203.0.113.7"
                       in start.output(), start.output, 60)
            wait_until(lambda: list(pathlib.Path(self.cluster.temp).glob("node_*/agent.log")),
                       "the node is starting", 60)
            start.send_signal(signal.SIGINT)
            self.assertNotEqual(start.wait(60), 0, start.output())
        wait_until(lambda: not self.cluster.own_pids(), "nothing is left", 60)

    def test_port_in_use(self):
        for flag, other in (("--port", "--dashboard-port"), ("--dashboard-port", "--port")):
            with socket.socket() as taken:
                taken.bind(("127.0.0.1", 0))
                taken.listen()
                port = taken.getsockname()[1]
                done = self.cluster.mobula("start", "--head", "--temp-dir", self.cluster.temp, flag,
                                           port, other, "0", stderr=subprocess.PIPE)
                self.assertEqual(done.returncode, 72, (done.stdout, done.stderr))
                self.assertIn(str(port), done.stderr)
                self.assertIn("in use", done.stderr)
                self.assertIn("agent.log", done.stderr)
            wait_until(lambda: not self.cluster.own_pids(), "nothing is left", 30)

    def test_port_of_the_node_in_use(self):
        """ray#51925, ray#55638, ray#27736, ray#14763: no node without HTTP. A port that was asked for
        is that one or nothing; without, any will do, and the job's record says which."""
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            for flag in ("--dashboard-agent-listen-port", "--node-manager-port"):
                done = self.cluster.mobula("start", "--head", "--temp-dir", self.cluster.temp, "--port",
                                           "0", "--dashboard-port", "0", flag, port,
                                           stderr=subprocess.PIPE)
                self.assertEqual(done.returncode, 72, (done.stdout, done.stderr))
                self.assertIn(str(port), done.stderr)
                self.assertIn("in use", done.stderr)
        wait_until(lambda: not self.cluster.own_pids(), "nothing is left", 30)

    def test_temp_dir_that_cannot_be(self):
        path = self.dir / "file"
        path.write_text("")
        self.refused(["start", "--head", "--temp-dir", path / "below"], 72, str(path))

    # ---- data ----

    def preprocess(self, *more, prefix="out", input="in.jsonl"):
        return ["preprocess", "--input", self.dir / input, "--output-prefix", self.dir / prefix,
                "--tokenizer-type", "NullTokenizer", "--vocab-size", "127", "--append-eod", *more]

    def test_preprocess_input(self):
        self.refused(self.preprocess(), 66, "in.jsonl")
        for name, content, texts in (
            ("json", '{"text": "1 2"}\n{"text": \n', [":2:"]),
            ("key", '{"text": "1 2"}\n{"other": "1"}\n', [":2:", "text"]),
            ("type", '{"text": 17}\n', [":1:", "text"]),
            ("word", '{"text": "1 two 3"}\n', [":1:", "two"]),
        ):
            (self.dir / f"{name}.jsonl").write_text(content)
            with self.subTest(name=name):
                self.refused(self.preprocess(input=f"{name}.jsonl"), 64, f"{name}.jsonl:", *texts)

    def test_missing_vocabulary(self):
        corpus(self.dir / "in.jsonl", 3)
        self.refused(["preprocess", "--input", self.dir / "in.jsonl", "--output-prefix",
                      self.dir / "out", "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file",
                      self.dir / "no-vocab.json", "--merge-file", self.dir / "no-merges.txt"],
                     66, "no-vocab.json")
        self.refused(["preprocess", "--input", self.dir / "in.jsonl", "--output-prefix",
                      self.dir / "out", "--tokenizer-type", "GPT2BPETokenizer"], 64, "--vocab-file")

    def test_full_disk(self):
        """A file may not grow beyond a limit: the same path through the code as a full disk."""
        corpus(self.dir / "in.jsonl", 5000)

        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, 64 * 1024))

        before = self.files()
        done = self.cluster.mobula(*self.preprocess(), stderr=subprocess.PIPE, preexec_fn=limit)
        self.assertIn(done.returncode, (73, 74), (done.returncode, done.stderr))
        errors = [line for line in done.stderr.splitlines() if line.startswith("mobula: ")]
        self.assertEqual(len(errors), 1, done.stderr)
        self.assertIn("out.preprocess/", errors[0])
        self.assertEqual(self.files() - before, set(), "a half-written file was left")

    # ---- stores ----

    def test_verify(self):
        verify = ["checkpoint", "verify"]
        self.refused([*verify, f"file://{self.dir}/nothing"], 66, "nothing")
        self.refused([*verify, "ftp://host/x"], 78, "ftp://host/x")
        self.refused([*verify, "s3://bucket/x"], 77, "AWS_ACCESS_KEY_ID")
        store = self.dir / "store"
        store.mkdir()
        (store / "latest_checkpointed_iteration.txt").write_text("twelve\n")
        self.refused([*verify, f"file://{store}"], 65, "latest_checkpointed_iteration.txt")
        (store / "latest_checkpointed_iteration.txt").write_text("12\n")
        self.refused([*verify, f"file://{store}"], 65, "manifest.json")


class BadTraining(unittest.TestCase):
    """What only the ranks can know: the job is FAILED, its message has the line, with the rank."""

    @classmethod
    def setUpClass(cls):
        cls.cluster = cls.enterClassContext(Cluster(nodes=2))
        cls.dir = pathlib.Path(cls.cluster.dir)
        corpus(cls.dir / "in.jsonl")
        done = cls.cluster.mobula("preprocess", "--input", cls.dir / "in.jsonl", "--output-prefix",
                                  cls.dir / "good", "--tokenizer-type", "NullTokenizer",
                                  "--vocab-size", "127", "--append-eod")
        assert done.returncode == 0, done.stdout
        cls.good = cls.dir / "good_text_document"

    def train(self, *more, drop=()):
        command = [a for a in train_command(f"file://{self.dir}/store", 4, "--save-interval", "4",
                                            *more) if a not in drop]
        job_id = self.cluster.submit(command)
        job = self.cluster.wait_job(job_id, timeout_s=120)
        self.cluster.assert_all_free()
        self.assertEqual(self.cluster.rank_pids(), {})
        return job, self.cluster.logs(job_id)

    def refused(self, texts, *more, **kwargs):
        job, log = self.train(*more, **kwargs)
        self.assertEqual(job["status"], "FAILED", log)
        verdicts = [line for line in log.splitlines() if all(t in line for t in texts)]
        # Said again at the end when other lines have buried it.
        self.assertEqual(len({v for v in verdicts if v.startswith("mobula: ")}), 1, log)
        self.assertIn(verdicts[-1], job["message"])
        store = self.dir / "store"
        stored = {str(path.relative_to(store)) for path in store.rglob("*") if path.is_file()}
        # The gangs that were launched wait there, and hold nobody up (fence.h).
        writers = store / ".mobula" / "writers.json"
        self.assertEqual({p for p in stored if not p.startswith("logs/")} - {".mobula/writers.json"},
                         set(), "a checkpoint of nothing")
        for writer in json.loads(writers.read_text())["writers"] if writers.exists() else []:
            self.assertIs(writer.get("waits"), True, writer)

    def data(self, name, bin=None, idx=None):
        """A copy of the good data with its bytes changed by functions."""
        for suffix, change in ((".bin", bin), (".idx", idx)):
            content = bytearray(pathlib.Path(f"{self.good}{suffix}").read_bytes())
            pathlib.Path(f"{self.dir}/{name}{suffix}").write_bytes(
                change(content) if change else content)
        return ["--data-path", f"{self.dir}/{name}", "--split", "90,10,0"]

    def test_good_data_trains(self):
        job, log = self.train(*self.data("fine"), drop=("--mock-data",))
        self.assertEqual(job["status"], "SUCCEEDED", log)
        shutil.rmtree(self.dir / "store")

    def test_arguments(self):
        for texts, more in (
            (["--hiden-size", "--hidden-size", "exited with status 2"], ["--hiden-size", "3"]),
            (["global batch size (9)", "data parallel size (2)"], ["--global-batch-size", "9"]),
            (["hidden size (32)", "attention heads (5)"], ["--num-attention-heads", "5"]),
            (["train-samples", "exclude"], ["--train-samples", "100"]),
            (["--squared-relu"], ["--squared-relu"]),
            (["world size (2)", "total_model_size"], ["--tensor-model-parallel-size", "3"]),
            (["world size (2)", "total_model_size"], ["--pipeline-model-parallel-size", "4"]),
            (["Number of layers", "pipeline-model-parallel size"],
             ["--pipeline-model-parallel-size", "2", "--num-layers", "3"]),
            (["interleaved schedule", "pipeline-model-parallel size"], ["--num-layers-per-virtual-pipeline-stage", "1"]),
            (["max_position_embeddings", "seq_length"], ["--seq-length", "64"]),
            (["seq-length", "x"], ["--seq-length", "x"]),
            (["the memory plan needs 48.0 TiB of host memory", "the least is", "--tensor-model-parallel-size 8"],
             ["--num-layers", "64", "--hidden-size", "65536", "--num-attention-heads", "64"]),
        ):
            with self.subTest(more=more):
                self.refused(texts, *more)

    def test_data_files(self):
        def cut(n):
            return lambda data: data[:n]

        def patch(at, value):
            return lambda data: data[:at] + value + data[at + len(value):]

        cases = {
            "missing": None,
            "no-magic": self.data("no-magic", idx=patch(0, b"NOTMAGIC!")),
            "version": self.data("version", idx=patch(9, struct.pack("<Q", 7))),
            "dtype": self.data("dtype", idx=patch(17, b"\x63")),
            "idx-cut": self.data("idx-cut", idx=cut(100)),
            "idx-empty": self.data("idx-empty", idx=cut(0)),
            "bin-cut": self.data("bin-cut", bin=cut(1000)),
            "lengths": self.data("lengths", idx=patch(34, struct.pack("<i", -5))),
            "token": self.data("token", bin=lambda data: struct.pack("<H", 60000) * (len(data) // 2)),
            "pointers": self.data("pointers", idx=patch(34 + 4 * 200, struct.pack("<q", 1 << 40))),
        }
        for name, more in cases.items():
            with self.subTest(name=name):
                self.refused([f"{self.dir}/{name}"],
                             *(more or ["--data-path", f"{self.dir}/missing"]), drop=("--mock-data",))

    def test_empty_split(self):
        few = self.dir / "few.jsonl"
        corpus(few, 3)
        done = self.cluster.mobula("preprocess", "--input", few, "--output-prefix", self.dir / "few",
                                   "--tokenizer-type", "NullTokenizer", "--vocab-size", "127",
                                   "--append-eod")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.refused(["valid", "split"], "--data-path", f"{self.dir}/few_text_document", "--split",
                     "98,2,0", drop=("--mock-data",))

    def test_missing_vocabulary(self):
        self.refused(["no-vocab.json"], *self.data("vocab"), "--tokenizer-type", "GPT2BPETokenizer",
                     "--vocab-file", f"{self.dir}/no-vocab.json", "--merge-file",
                     f"{self.dir}/no-merges.txt", drop=("--mock-data",))

    # ---- the Jobs API ----

    def test_json_bodies(self):
        post = lambda body=None, raw=None: self.cluster.call("POST", "/api/jobs/", body, raw)
        for raw in (b"", b"{", b"[]", b'"text"', b"\xff\xfe"):
            status, _ = post(raw=raw)
            self.assertEqual(status, 500, raw)
        for body, text in (
            ({}, "missing 1 required positional argument: 'entrypoint'"),
            ({"entrypoint": 5}, "entrypoint must be a string"),
            ({"entrypoint": "true", "bogus": 1}, "unexpected keyword argument 'bogus'"),
            ({"entrypoint": "true", "submission_id": 5}, "submission_id must be a string"),
            ({"entrypoint": "true", "runtime_env": []}, "runtime_env must be a dict"),
            ({"entrypoint": "true", "metadata": {"a": 1}}, "metadata values must be strings"),
            ({"entrypoint": "true", "entrypoint_num_cpus": "x"}, "entrypoint_num_cpus must be a number"),
        ):
            status, answer = post(body)
            self.assertEqual(status, 400, (body, answer))
            self.assertIn(text, answer)
        self.assertEqual(self.cluster.call("GET", "/api/jobs")[0], 404)
        self.assertEqual(self.cluster.call("GET", "/api/nothing")[0], 404)
        self.assertEqual(self.cluster.call("PUT", "/api/jobs/")[0], 405)

    def test_submission_ids_that_are_paths(self):
        before = {p for p in self.dir.parent.glob("*")}
        for bad in ("../escape", "/etc/x", "a/b", ".hidden", "x" * 300, "new\nline"):
            status, answer = self.cluster.call("POST", "/api/jobs/", {"entrypoint": "true",
                                                                     "submission_id": bad})
            if status == 200:
                job = self.cluster.wait_job(json.loads(answer)["submission_id"].replace("\n", "%0A"))
                self.assertEqual(job["status"], "FAILED", (bad, job))
            else:
                self.assertIn(status, (400, 500), (bad, answer))
        self.assertFalse(any("escape" in p.name for p in {p for p in self.dir.parent.glob("*")} - before))

    def test_bytes_that_are_not_http(self):
        host, port = self.cluster.address[7:].split(":")
        for junk in (b"\0" * 4096, b"GET / HTTP/9.9\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                     b"POST /api/jobs/ HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
                     b"GET /" + b"a" * 100000 + b" HTTP/1.1\r\n\r\n"):
            for to in (int(port), int(self.cluster.gcs.rsplit(":", 1)[1])):
                with socket.create_connection((host, to), 5) as s:
                    s.settimeout(5)
                    try:
                        s.sendall(junk)
                        s.shutdown(socket.SHUT_WR)
                        while s.recv(65536):
                            pass
                    except OSError:  # it hung up on us, which is its right
                        pass
        self.assertEqual(self.cluster.get("/api/version")["ray_version"], "2.60.0")
        self.assertEqual(sum(n["state"] == "ALIVE" for n in self.cluster.status()["nodes"]), 2)


if __name__ == "__main__":
    unittest.main()
