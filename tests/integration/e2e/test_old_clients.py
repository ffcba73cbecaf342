"""The client and the command line of an older Ray against our head: test_old_clients.py

Run by the Python that has that Ray (old-ray-python). What its users do with a cluster: submit and
follow, fail, look, stop, list, delete, with a working directory, modules, variables and metadata.
"""

import asyncio
import concurrent.futures
import json
import os
import pathlib
import sys
import tempfile
import unittest

import ray
from cluster import Cluster, wait_until
from ray.job_submission import JobStatus, JobSubmissionClient

MAIN = """\
import os, mymodule
from data import TEXT
print("main says", TEXT, mymodule.NAME, os.environ["GREETING"], flush=True)
"""


class OldClients(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
            os.environ.pop(name, None)
        cls.cluster = cls.enterClassContext(Cluster(nodes=1))
        cls.client = JobSubmissionClient(cls.cluster.address)
        cls.folder = pathlib.Path(cls.cluster.dir, "work")
        cls.folder.mkdir()
        (cls.folder / "main.py").write_text(MAIN)
        (cls.folder / "data.py").write_text("TEXT = 'packed'\n")
        cls.module = pathlib.Path(cls.cluster.dir, "mymodule")
        cls.module.mkdir()
        (cls.module / "__init__.py").write_text("NAME = 'a module'\n")

    def cli(self, *words):
        env = {"RAY_ADDRESS": self.cluster.address, "PYTHONWARNINGS": "ignore"}
        done = self.cluster.ray("job", *words, env=env)
        return done.returncode, done.stdout

    def follow(self, job):
        async def collect():
            return "".join([part async for part in self.client.tail_job_logs(job)])

        return asyncio.run(collect())

    def test_a_head_of_the_same_version(self):
        """The head says that it is the Ray of its clients, for those that compare."""
        with Cluster(nodes=1, start_args=["--ray-version", ray.__version__],
                     env={"MOBULA_RAY_VERSION": "2.0.0", "MOBULA_RAY_COMMIT": "0a1b2c"}) as cluster:
            told = cluster.get("/api/version")
            self.assertEqual((told["ray_version"], told["ray_commit"]), (ray.__version__, "0a1b2c"))
            client = JobSubmissionClient(cluster.address)
            self.assertEqual(client.get_version(), "4")
            done = cluster.ray("job", "submit", "--", "echo", "fine",
                               env={"RAY_ADDRESS": cluster.address, "PYTHONWARNINGS": "ignore"})
            self.assertEqual(done.returncode, 0, done.stdout)
            self.assertIn("fine", done.stdout)
            self.assertNotIn("ersion", done.stdout)
            self.look_at(cluster)

    def look_at(self, cluster):
        """Ray's tools want the GCS of their version; they would make 127.0.0.1 the machine's. Our
        own node goes by what the head is, not by what it says."""
        node = cluster.node("node-0")
        gcs = f"0.0.0.0:{cluster.gcs.rsplit(':', 1)[1]}"
        for words, says in ((["status", "--address", gcs], "mobula_slot"),
                            (["list", "nodes", "--address", gcs], node["node_id"]),
                            (["list", "nodes", "--address", cluster.address], node["node_id"])):
            done = cluster.ray(*words, env={"PYTHONWARNINGS": "ignore"})
            self.assertEqual(done.returncode, 0, done.stdout)
            self.assertIn(says, done.stdout)
        self.assertNotIn("sync stream ended", (node["dir"] / "agent.log").read_text())

    def test_sdk(self):
        python = sys.executable
        job = self.client.submit_job(
            entrypoint=f"{python} main.py", metadata={"who": "an old client"},
            runtime_env={"working_dir": str(self.folder), "py_modules": [str(self.module)],
                         "env_vars": {"GREETING": "hello"}})
        self.assertIn("main says packed a module hello", self.follow(job))
        self.assertEqual(self.client.get_job_status(job), JobStatus.SUCCEEDED)
        info = self.client.get_job_info(job)
        self.assertEqual(info.metadata, {"who": "an old client"})
        self.assertEqual(info.runtime_env["env_vars"], {"GREETING": "hello"})
        self.assertTrue(info.runtime_env["working_dir"].startswith("gcs://_ray_pkg_"))
        self.assertIn("main says packed", self.client.get_job_logs(job))
        self.assertIn(job, [d.submission_id for d in self.client.list_jobs()])
        with self.assertRaisesRegex(RuntimeError, "Please use a different submission_id"):
            self.client.submit_job(entrypoint="true", submission_id=job)
        self.assertTrue(self.client.delete_job(job))
        with self.assertRaisesRegex(RuntimeError, f"Job {job} does not exist"):
            self.client.get_job_status(job)

    def test_sdk_failure_and_stop(self):
        job = self.client.submit_job(entrypoint="echo so; exit 3")
        self.assertIn("so\n", self.follow(job))
        self.assertEqual(self.client.get_job_status(job), JobStatus.FAILED)
        self.assertIn("exit code 3", self.client.get_job_info(job).message)
        job = self.client.submit_job(entrypoint="sleep 1000")
        wait_until(lambda: self.client.get_job_status(job) == JobStatus.RUNNING, "it runs")
        self.assertTrue(self.client.stop_job(job))
        wait_until(lambda: self.client.get_job_status(job) == JobStatus.STOPPED, "it is stopped")

    def test_cli(self):
        """Commands that do not wait for each other run side by side: each takes seconds to start."""
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            good = pool.submit(self.cli, "submit", "--submission-id", "good", "--working-dir",
                               str(self.folder), "--", "cat", "data.py")
            bad = pool.submit(self.cli, "submit", "--submission-id", "bad", "--", "exit", "4")
            long = pool.submit(self.cli, "submit", "--submission-id", "long", "--no-wait", "--",
                               "sleep", "1000")
            code, text = good.result()
            self.assertEqual(code, 0, text)
            self.assertIn("TEXT = 'packed'", text)
            self.assertIn("Job 'good' succeeded", text)
            code, text = bad.result()
            self.assertEqual(code, 1, text)
            self.assertIn("Job 'bad' failed", text)
            self.assertEqual(long.result()[0], 0, long.result()[1])
            status = pool.submit(self.cli, "status", "bad")
            stop = pool.submit(self.cli, "stop", "long")
            again = pool.submit(self.cli, "submit", "--submission-id", "good", "--", "true")
            listed = pool.submit(self.cli, "list")
            self.assertIn("Job 'long' was stopped", stop.result()[1])
            self.assertIn("Please use a different submission_id", again.result()[1])
            self.assertEqual(again.result()[0], 1)
            self.assertIn("'good'", listed.result()[1])
            self.assertEqual([r.result()[0] for r in (stop, listed, status)], [0, 0, 0])
            self.assertIn("Job 'bad' failed", status.result()[1])
            code, text = self.cli("delete", "bad")
            self.assertEqual(code, 0, text)


class TokenMode(unittest.TestCase):
    """These releases know no token; what they say without one, and how they are given one."""

    TOKEN = "0123456789abcdef-of-an-old-client"

    def test_refused_and_with_a_header(self):
        with tempfile.TemporaryDirectory() as directory:
            path = pathlib.Path(directory, "token")
            path.write_text(self.TOKEN)
            path.chmod(0o600)
            with Cluster(nodes=1, start_args=["--token-file", str(path)]) as cluster:
                self.tries(cluster)

    def tries(self, cluster):
        def cli(token, *words):
            env = {"RAY_ADDRESS": cluster.address, "PYTHONWARNINGS": "ignore"}
            if token:
                env["RAY_JOB_HEADERS"] = json.dumps({"Authorization": f"Bearer {token}"})
            done = cluster.ray("job", *words, env=env)
            return done.returncode, done.stdout

        for token, text in ((None, "401 Client Error: Unauthorized for url"),
                            ("wrong", "403 Client Error: Forbidden for url")):
            code, said = cli(token, "submit", "--", "true")
            self.assertEqual(code, 1, said)
            self.assertIn(text, said)
            headers = {"Authorization": f"Bearer {token}"} if token else None
            with self.assertRaisesRegex(Exception, text):
                JobSubmissionClient(cluster.address, headers=headers).list_jobs()
        code, said = cli(self.TOKEN, "submit", "--", "echo", "let in")
        self.assertEqual(code, 0, said)
        self.assertIn("let in", said)


if __name__ == "__main__":
    print("ray", ray.__version__, flush=True)
    unittest.main()
