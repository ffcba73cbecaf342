"""Jobs of an embedded head, by REST, by `mobula job`, and by Ray's own client and command line."""

import asyncio
import contextlib
import http.client
import json
import os
import pathlib
import re
import time
import unittest

import ray
from cluster import Cluster, is_alive, wait_until
from ray.job_submission import JobStatus, JobSubmissionClient
from tail import Tail

# A tree of a shell, a child that is deaf to SIGTERM, and a daemon in a session of its own.
TREE = ("cd $DIR; (trap '' TERM; echo $$ > shell; exec sleep 1000) & "
        "setsid sh -c 'echo $$ > daemon.new; mv daemon.new daemon; exec sleep 1000' & "
        "(trap '' TERM; sh -c 'echo $PPID > deaf; exec sleep 1000') & "
        "echo here we are; wait")


# What KubeRay's dashboard client decodes a job into (Go: string, *string, uint64, map): null leaves a
# field as it was, any other type fails the whole answer.
OPERATOR_FIELDS = {"status": str, "entrypoint": str, "message": str, "error_type": str, "job_id": str,
                   "submission_id": str, "start_time": int, "end_time": int, "metadata": dict,
                   "runtime_env": dict}


class JobsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        os.environ.pop("RAY_ADDRESS", None)
        cls.cluster = cls.enterClassContext(Cluster(nodes=2, start_args=["--resources", '{"whale": 1}']))
        cls.client = JobSubmissionClient(cls.cluster.address)

    def scratch(self, name):
        path = pathlib.Path(self.cluster.dir, name)
        path.mkdir()
        return path

    def pid_in(self, path):
        def look():
            text = path.read_text() if path.exists() else ""
            return int(text) if text.endswith("\n") else None

        return wait_until(look, f"{path} has a process id")

    # ---- mobula job ----

    def test_mobula_submit_follows_and_succeeds(self):
        began = time.monotonic()
        done = self.cluster.mobula("job", "submit", "--address", self.cluster.address,
                                   "--submission-id", "follow-1", "--", "sh", "-c",
                                   "echo first; echo 'second line' >&2")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIn("first\n", done.stdout)
        self.assertIn("second line\n", done.stdout)
        self.assertIn("follow-1", done.stdout)
        self.assertLess(time.monotonic() - began, 10)
        self.assertEqual(self.cluster.job("follow-1")["status"], "SUCCEEDED")

    def test_mobula_failing_exit_code(self):
        done = self.cluster.mobula("job", "submit", "--address", self.cluster.address,
                                   "--submission-id", "fails-3", "--", "sh", "-c",
                                   "echo about to fail; exit 3")
        self.assertNotEqual(done.returncode, 0, done.stdout)
        self.assertIn("about to fail", done.stdout)
        job = self.cluster.job("fails-3")
        self.assertEqual((job["status"], job["driver_exit_code"]), ("FAILED", 3))
        self.assertIn("about to fail", job["message"])
        shown = self.cluster.mobula("job", "status", "--address", self.cluster.address, "--json",
                                    "fails-3")
        self.assertEqual(shown.returncode, 0, shown.stdout)
        self.assertEqual(json.loads(shown.stdout)["status"], "FAILED")

    # ---- Ray's internal mirror ----

    def agent_port(self, name="node-0"):
        """The same calls at the port of a node's agent."""
        mirror = Cluster.__new__(Cluster)
        mirror.address = f"http://127.0.0.1:{self.cluster.node(name)['http_port']}"
        return mirror

    def test_job_agent(self):
        agent, base = self.agent_port(), "/api/job_agent/jobs/"
        body = {"entrypoint": "echo out; sleep 600", "submission_id": "mirror"}
        self.assertEqual(agent.call("POST", base, body),
                         (200, '{"job_id": "mirror", "submission_id": "mirror"}'))
        status, text = agent.call("POST", base, body)
        self.assertEqual(status, 400, text)
        self.assertIn("Please use a different submission_id.", text)
        self.assertEqual(agent.call("POST", base, {"entrypoint": 1})[0], 400)
        wait_until(lambda: "\nout\n" in json.loads(agent.call("GET", base + "mirror/logs")[1])["logs"],
                   "its log")
        tail = Tail(agent.address, "mirror", prefix="/api/job_agent/jobs/")
        self.assertEqual(tail.status, 101)
        status, text = agent.call("DELETE", base + "mirror")
        self.assertEqual(status, 500)
        self.assertIn("non-terminal state", text)
        self.assertEqual(agent.call("POST", base + "mirror/stop"), (200, '{"stopped": true}'))
        self.assertTrue(tail.read().decode().endswith("\nout\n"))
        self.assertEqual(tail.closed, (1000, "STOPPED"))
        self.assertEqual(agent.call("DELETE", base + "mirror"), (200, '{"deleted": true}'))
        self.assertEqual(agent.call("GET", base + "mirror/logs"),
                         (404, "Job mirror does not exist"))
        for method, path in (("POST", base), ("GET", base + "mirror/logs")):
            status, text = self.agent_port("node-1").call(method, path, body if method == "POST" else None)
            self.assertEqual(status, 503, text)
            self.assertIn("ask the head", text)

    def test_browsers_get_nothing_of_an_agent(self):
        """What a page in somebody's browser could reach by a name that it makes resolve to this machine."""
        port = self.cluster.node("node-0")["http_port"]
        body = json.dumps({"entrypoint": "true", "submission_id": "of-a-page"}).encode()
        for header in ({"User-Agent": "Mozilla/5.0 (X11)"}, {"Origin": "http://evil.example"},
                       {"Referer": "http://evil.example/"}, {"Sec-Fetch-Mode": "no-cors"},
                       {"Access-Control-Request-Method": "POST"}):
            for method, path in (("POST", "/api/job_agent/jobs/"), ("GET", "/metrics"),
                                 ("GET", "/api/job_agent/jobs/of-a-page/logs"),
                                 ("DELETE", "/api/job_agent/jobs/of-a-page")):
                with self.subTest(header=header, method=method, path=path):
                    c = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                    self.addCleanup(c.close)
                    c.request(method, path, body if method == "POST" else None, header)
                    answer = c.getresponse()
                    self.assertEqual((answer.status, answer.read()),
                                     (403, b"Browser requests not allowed."))
        self.assertEqual(self.cluster.call("GET", "/api/jobs/of-a-page")[0], 404)

    def test_mobula_list_logs_stop_delete(self):
        address = ("--address", self.cluster.address)
        scratch = self.scratch("tree-1")
        sent = self.cluster.mobula("job", "submit", *address, "--submission-id", "tree-1",
                                   "--no-wait", "--runtime-env-json",
                                   json.dumps({"env_vars": {"DIR": str(scratch),
                                                            "RAY_JOB_STOP_WAIT_TIME_S": "1"}}),
                                   "--", "sh", "-c", TREE)
        self.assertEqual(sent.returncode, 0, sent.stdout)
        pids = [self.pid_in(scratch / n) for n in ("shell", "daemon", "deaf")]
        self.assertTrue(all(is_alive(p) for p in pids))

        refused = self.cluster.mobula("job", "delete", *address, "tree-1")
        self.assertNotEqual(refused.returncode, 0, refused.stdout)
        self.assertIn("tree-1", self.cluster.mobula("job", "list", *address).stdout)
        wait_until(lambda: "here we are\n" in self.cluster.logs("tree-1"), "the log's line")
        logs = self.cluster.mobula("job", "logs", *address, "tree-1")
        self.assertIn("here we are", logs.stdout)
        self.assertEqual(logs.stdout.count("Running entrypoint for job tree-1"), 1, logs.stdout)

        stopped = self.cluster.mobula("job", "stop", *address, "tree-1")
        self.assertEqual(stopped.returncode, 0, stopped.stdout)
        job = self.cluster.wait_job("tree-1", timeout_s=60)
        self.assertEqual((job["status"], job["driver_exit_code"]), ("STOPPED", None))
        for pid in pids:
            wait_until(lambda p=pid: not is_alive(p), f"process {pid} of the stopped job ends", 30)

        gone = self.cluster.mobula("job", "delete", *address, "tree-1")
        self.assertEqual(gone.returncode, 0, gone.stdout)
        self.assertEqual(self.cluster.call("GET", "/api/jobs/tree-1"),
                         (404, "Job tree-1 does not exist"))
        again = self.cluster.mobula("job", "status", *address, "tree-1")
        self.assertNotEqual(again.returncode, 0, again.stdout)
        self.assertIn("tree-1", again.stdout)

    def test_pending_stop_is_stopped_at_once(self):
        """Ray answers yes and leaves such a job PENDING."""
        with self.all_whales_taken():
            self.cluster.submit("true", submission_id="pending-1", entrypoint_resources={"whale": 1})
            job = self.cluster.job("pending-1")
            self.assertEqual(job["status"], "PENDING")
            self.assertIn("waiting for resources", job["message"])
            self.cluster.call("POST", "/api/jobs/pending-1/stop")
            self.assertEqual(self.cluster.job("pending-1")["status"], "STOPPED")

    @contextlib.contextmanager
    def all_whales_taken(self):
        """Who needs one waits as long as this lasts; what nobody has fails soon after it was asked about."""
        holders = [self.cluster.submit("sleep 1000", entrypoint_resources={"whale": 1}) for _ in range(2)]
        try:
            for holder in holders:
                self.cluster.wait_job(holder, ("RUNNING",))
            yield
        finally:
            for holder in holders:
                self.cluster.call("POST", f"/api/jobs/{holder}/stop")
            for holder in holders:
                self.cluster.wait_job(holder)

    def assert_operator_reads(self, job):
        for field, kind in OPERATOR_FIELDS.items():
            self.assertIn(type(job[field]), (kind, type(None)), f"{field}: {job}")
        for field in ("start_time", "end_time"):
            self.assertTrue(job[field] is None or 0 <= job[field] < 1 << 64, job)
        self.assertTrue(all(type(v) is str for v in (job["metadata"] or {}).values()), job)

    def test_the_operator_reads_a_job_in_every_state(self):
        self.enterContext(self.all_whales_taken())
        for name, entrypoint, last in (("op-ok", "sleep 1", "SUCCEEDED"), ("op-bad", "exit 3", "FAILED"),
                                       ("op-stop", "sleep 1000", "STOPPED"), ("op-wait", "true", "STOPPED")):
            more = {"entrypoint_resources": {"whale": 1}} if name == "op-wait" else {}
            self.cluster.submit(entrypoint, submission_id=name, metadata={"team": "sea"}, **more)
            self.assert_operator_reads(self.cluster.job(name))
            if last == "STOPPED":
                self.cluster.call("POST", f"/api/jobs/{name}/stop")
            job = self.cluster.wait_job(name)
            self.assertEqual(job["status"], last)
            self.assert_operator_reads(job)
            self.assertGreaterEqual(job["end_time"], job["start_time"])
        for job in self.cluster.get("/api/jobs/"):
            self.assert_operator_reads(job)
        # The one sentence by which a submission that was sent twice is known.
        status, text = self.cluster.call("POST", "/api/jobs/", {"entrypoint": "true", "submission_id": "op-ok"})
        self.assertEqual(status, 500)
        self.assertIn("Please use a different submission_id", text)

    # ---- Ray's client ----

    def test_client_life_of_a_job(self):
        self.assertGreater(tuple(map(int, self.client.get_version().split("."))), (0,))
        work = self.scratch("wd")
        (work / "hello.py").write_text(
            "import os, helper\nprint('hello', helper.NAME, os.environ['COLOUR'], os.getcwd())\n")
        (work / "helper.py").write_text("NAME = 'whale'\n")
        job_id = self.client.submit_job(
            entrypoint="python3 hello.py", submission_id="client-1",
            runtime_env={"working_dir": str(work), "env_vars": {"COLOUR": "blue"}},
            metadata={"team": "sea"})
        self.assertEqual(job_id, "client-1")
        self.cluster.wait_job(job_id)
        self.assertEqual(self.client.get_job_status(job_id), JobStatus.SUCCEEDED,
                         self.client.get_job_logs(job_id))
        self.assertRegex(self.client.get_job_logs(job_id), r"hello whale blue /\S+")
        info = self.client.get_job_info(job_id)
        self.assertEqual(info.metadata, {"team": "sea"})
        self.assertEqual(info.entrypoint, "python3 hello.py")
        self.assertGreaterEqual(info.end_time, info.start_time)
        self.assertIn(job_id, [j.submission_id for j in self.client.list_jobs()])
        self.assertTrue(self.client.delete_job(job_id))
        self.assertNotIn(job_id, [j.submission_id for j in self.client.list_jobs()])

    def test_client_tails_every_line_to_the_end(self):
        lines = 50000
        job_id = self.client.submit_job(
            entrypoint=f"i=0; while [ $i -lt {lines} ]; do echo line $i; i=$((i+1)); done; "
                       "printf 'no end of line'")

        async def tail():
            return "".join([part async for part in self.client.tail_job_logs(job_id)])

        text = asyncio.run(asyncio.wait_for(tail(), 60))
        # The stream may end only when the terminal state can be read.
        self.assertEqual(self.client.get_job_status(job_id), JobStatus.SUCCEEDED)
        self.assertEqual(re.findall(r"^line (\d+)$", text, re.M), [str(i) for i in range(lines)])
        self.assertTrue(text.endswith("no end of line"), text[-80:])

    def test_client_duplicate_id(self):
        self.client.submit_job(entrypoint="true", submission_id="twice")
        with self.assertRaises(RuntimeError) as caught:
            self.client.submit_job(entrypoint="true", submission_id="twice")
        self.assertIn("status code 500", str(caught.exception))
        self.assertIn("Please use a different submission_id", str(caught.exception))

    def test_client_unknown_job(self):
        for call in (self.client.get_job_status, self.client.get_job_logs, self.client.stop_job,
                     self.client.delete_job):
            with self.assertRaisesRegex(RuntimeError, "404.*Job nobody does not exist"):
                call("nobody")

    # ---- Ray's command line ----

    def test_ray_submit_follows(self):
        done = self.cluster.ray("job", "submit", "--address", self.cluster.address,
                                "--submission-id", "ray-follow", "--", "sh", "-c",
                                "for i in 1 2 3; do echo line $i; done")
        self.assertEqual(done.returncode, 0, done.stdout)
        plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
        self.assertRegex(plain, r"Job 'ray-follow' submitted successfully")
        for i in (1, 2, 3):
            self.assertEqual(plain.count(f"line {i}\n"), 1, plain)
        self.assertRegex(plain, r"Job 'ray-follow' succeeded")

    def test_ray_submit_fails_with_1(self):
        done = self.cluster.ray("job", "submit", "--address", self.cluster.address,
                                "--submission-id", "ray-fails", "--", "sh", "-c", "exit 3")
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertIn("failed", done.stdout)
        job = self.cluster.job("ray-fails")
        self.assertEqual((job["status"], job["driver_exit_code"]), ("FAILED", 3))

    def test_ray_no_wait_status_stop_list_delete(self):
        address = ("--address", self.cluster.address)
        sent = self.cluster.ray("job", "submit", *address, "--submission-id", "ray-sleeps",
                                "--no-wait", "--", "sleep", "1000")
        self.assertEqual(sent.returncode, 0, sent.stdout)
        self.cluster.wait_job("ray-sleeps", ("RUNNING",))
        self.assertIn("RUNNING", self.cluster.ray("job", "status", *address, "ray-sleeps").stdout)
        stopped = self.cluster.ray("job", "stop", *address, "ray-sleeps")
        self.assertEqual(stopped.returncode, 0, stopped.stdout)
        self.assertIn("was stopped", stopped.stdout)
        self.assertEqual(self.cluster.job("ray-sleeps")["status"], "STOPPED")
        listed = self.cluster.ray("job", "list", *address)
        self.assertEqual(listed.returncode, 0, listed.stdout)
        self.assertIn("ray-sleeps", listed.stdout)
        deleted = self.cluster.ray("job", "delete", *address, "ray-sleeps")
        self.assertEqual(deleted.returncode, 0, deleted.stdout)
        self.assertEqual(self.cluster.call("GET", "/api/jobs/ray-sleeps")[0], 404)


class ClusterViewTest(unittest.TestCase):
    def test_ray_status_and_list_nodes(self):
        """Ray's tools replace a loopback address by the machine's own, so that is what we listen on."""
        ip = ray.util.get_node_ip_address()
        with Cluster(nodes=2, start_args=["--node-ip-address", ip, "--no-token"]) as cluster:
            status = cluster.ray("status", "--address", cluster.gcs)
            self.assertEqual(status.returncode, 0, status.stdout)
            self.assertIn("mobula_slot", status.stdout)
            listed = cluster.ray("list", "nodes", "--address", cluster.address)
            self.assertEqual(listed.returncode, 0, listed.stdout)
            self.assertEqual(listed.stdout.count("ALIVE"), 2, listed.stdout)
            health = cluster.ray("health-check", "--address", cluster.gcs)
            self.assertEqual(health.returncode, 0, health.stdout)
            ran = cluster.mobula("run", "--address", cluster.gcs, "--num-nodes", "2", "--", "echo",
                                 "together")
            self.assertEqual((ran.returncode, ran.stdout.count("together\n")), (0, 2), ran.stdout)


if __name__ == "__main__":
    unittest.main()
