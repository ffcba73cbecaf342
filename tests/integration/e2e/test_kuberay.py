"""KubeRay's own clients of the Jobs API (v1.6.1, the newest that the registry of Go modules has) against our head: what its
operator does with a RayJob, and its light-weight submitter, without a token and with one."""

import json
import os
import pathlib
import subprocess
import tempfile
import unittest

from cluster import Cluster, wait_until

CACHE = pathlib.Path(os.environ.get("MOBULA_CACHE", pathlib.Path.home() / ".cache/mobula"))
CLIENT = os.environ.get("MOBULA_KUBERAY_CLIENT", CACHE / "bin/kuberay-client")
SUBMITTER = pathlib.Path(CLIENT).with_name("kuberay-submitter")
TOKEN = "0123456789abcdef0123456789abcdef"

RAY_JOB = """\
apiVersion: ray.io/v1
kind: RayJob
metadata:
  name: {id}
spec:
  entrypoint: {entrypoint}
  metadata: {{team: llm}}
  entrypointNumCpus: 1
  runtimeEnvYAML: |
    env_vars:
      GREETING: "hello from the operator"
status:
  jobId: {id}
"""


class WithoutToken(unittest.TestCase):
    token = ""

    @classmethod
    def setUpClass(cls):
        for program in (CLIENT, SUBMITTER):
            if not os.access(program, os.X_OK):
                raise RuntimeError(f"{program} is not there: tools/test --all builds it")
        cls.dir = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="mb-kuberay-")))
        (cls.dir / "token").write_text(cls.token)
        (cls.dir / "token").chmod(0o600)
        args = ["--token-file", str(cls.dir / "token")] if cls.token else []
        cls.cluster = cls.enterClassContext(Cluster(nodes=1, start_args=args))

    def ask(self, *words, token=None):
        return subprocess.run([CLIENT, "-url", self.cluster.address, "-token", self.token if token is None else token,
                               *words], capture_output=True, text=True, timeout=60)

    def said(self, *words):
        done = self.ask(*words)
        self.assertEqual((done.returncode, done.stderr), (0, ""), done)
        return json.loads(done.stdout)

    def submit(self, name, entrypoint):
        path = self.dir / f"{name}.yaml"
        path.write_text(RAY_JOB.format(id=name, entrypoint=json.dumps(entrypoint)))
        return self.ask("submit", str(path))

    def wait(self, name, state):
        wait_until(lambda: self.said("info", name)["status"] == state, lambda: self.said("info", name))
        return self.said("info", name)

    def test_a_job_to_its_end(self):
        done = self.submit("whole", "echo $GREETING; sleep 1")
        self.assertEqual(json.loads(done.stdout), "whole", done.stderr)
        info = self.wait("whole", "SUCCEEDED")
        self.assertEqual((info["submission_id"], info["metadata"], info["entrypoint"]),
                         ("whole", {"team": "llm"}, "echo $GREETING; sleep 1"))
        self.assertEqual(info["runtime_env"], {"env_vars": {"GREETING": "hello from the operator"}})
        self.assertGreaterEqual(info["end_time"] - info["start_time"], 1000)
        self.assertEqual(self.said("log", "whole").splitlines()[-1], "hello from the operator")
        self.assertIn("whole", [j["submission_id"] for j in self.said("list")])

    def test_submitted_twice(self):
        """The operator that was restarted learns that the job is there already, and looks for it."""
        self.assertEqual(self.submit("twice", "true").returncode, 0)
        again = self.submit("twice", "true")
        self.assertEqual(again.returncode, 1)
        self.assertIn("submission ID 'twice' already used, Please use a different submission_id", again.stderr)
        self.assertEqual(self.wait("twice", "SUCCEEDED")["submission_id"], "twice")

    def test_a_failure(self):
        self.submit("fails", "echo so it ends; exit 3")
        self.assertIn("exit code 3", self.wait("fails", "FAILED")["message"])

    def test_stop_and_delete(self):
        self.submit("stopped", "exec sleep 1000")
        self.wait("stopped", "RUNNING")
        self.assertIsNone(self.said("stop", "stopped"))
        self.wait("stopped", "STOPPED")
        self.assertIsNone(self.said("stop", "stopped"), "a job that has ended is no error")
        self.assertIsNone(self.said("delete", "stopped"))
        gone = self.ask("info", "stopped")
        self.assertEqual((gone.returncode, gone.stderr), (1, "Job stopped does not exist on the cluster\n"))

    # ---- the submitter: submits, and prints the log until the job is over ----

    def submitter(self, name, *words, token=None):
        env = {**os.environ, "RAY_DASHBOARD_ADDRESS": self.cluster.address.removeprefix("http://"),
               "RAY_JOB_SUBMISSION_ID": name, "RAY_AUTH_TOKEN": self.token if token is None else token}
        return subprocess.run([SUBMITTER, *words], env=env, capture_output=True, timeout=120)

    def test_the_submitter(self):
        """Its words are those that KubeRay puts into the container's arguments. A line is longer than what its websocket
        takes in a frame (32 KiB), and of letters of three bytes."""
        script = ("import sys, os\nprint('begins', os.environ['GREETING'], flush=True)\n"
                  "sys.stdout.buffer.write('\\u20ac'.encode() * 700000 + b'\\n')\nprint('ends')\n")
        (self.dir / "long.py").write_text(script)
        done = self.submitter("light", "--runtime-env-json", '{"env_vars": {"GREETING": "hello"}}', "--metadata-json",
                              '{"team": "llm"}', "--entrypoint-num-cpus", "1", "--", "python3", str(self.dir / "long.py"))
        self.assertEqual((done.returncode, done.stderr), (0, b""), done.stdout[-2000:])
        said = done.stdout.decode()
        self.assertTrue(said.startswith("SUCC -- Job 'light' submitted successfully\n"), said[:300])
        self.assertIn("\nbegins hello\n" + "\u20ac" * 700000 + "\nends\n", said)
        self.assertTrue(said.endswith("SUCC -- Job 'light' succeeded\n"), said[-300:])
        info = self.said("info", "light")
        self.assertEqual((info["status"], info["metadata"]), ("SUCCEEDED", {"team": "llm"}))

    def test_the_submitter_again(self):
        """Its pod was restarted: it follows the job that is there, from the log's beginning."""
        self.assertEqual(self.submitter("once", "--", "echo", "so it was").returncode, 0)
        again = self.submitter("once", "--", "echo", "so it was")
        self.assertEqual((again.returncode, again.stderr), (0, b""))
        self.assertIn(b"has already been submitted, tailing logs.", again.stdout)
        self.assertEqual(again.stdout.count(b"\nso it was\n"), 1, again.stdout)

    def test_the_submitter_and_a_failure(self):
        """To it the end of a log is the end of its work; its operator reads the state."""
        done = self.submitter("light-fails", "--", "sh", "-c", "'echo now; exit 3'")
        self.assertEqual(done.returncode, 0, done)
        self.assertEqual(done.returncode, 0, done)
        self.assertIn(b"\nnow\n", done.stdout)
        self.assertEqual(self.said("info", "light-fails")["status"], "FAILED", "it is readable when the log ends")

    def test_what_is_not_there(self):
        self.assertIn("does not exist", self.ask("info", "nobody").stderr)
        self.assertIsNone(self.said("log", "nobody"))


class WithToken(WithoutToken):
    token = TOKEN

    def test_without_the_right_one(self):
        for wrong in ("", "f" * 32):
            self.assertEqual(self.ask("list", token=wrong).returncode, 1)
            self.assertEqual(self.submitter("unknown", "--", "true", token=wrong).returncode, 1)


if __name__ == "__main__":
    unittest.main()
