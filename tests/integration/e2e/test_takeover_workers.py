"""Two heads, one Redis, and workers that are no heads: what runs there does not notice a takeover.

kuberay#1489, kuberay#4217: a gang and its driver outlive the machine that was the head.
"""

import asyncio
import contextlib
import os
import pathlib
import signal
import subprocess
import tempfile
import time
import unittest

import stored_logs
from cluster import RAY, is_alive, wait_until
from ray._raylet import GcsClient
from ray.job_submission import JobStatus, JobSubmissionClient
from shared_store import Redis, SharedCluster

TAKEOVER_S = 5


class Workers(SharedCluster):
    """node-0 is the head, node-1 stands by; worker-0 is told of both, worker-1 of the head only."""

    def __enter__(self):
        super().__enter__()
        try:
            self.heads = [self.node(f"node-{i}")["gcs_address"] for i in (0, 1)]
            self.start_worker("worker-0", ",".join(self.heads))
            self.start_worker("worker-1", self.heads[0])
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def start_worker(self, name, address):
        done = self.mobula("start", "--address", address, "--temp-dir", self.temp, "--node-name",
                           name, "--num-gpus", "2", "--dashboard-agent-listen-port", "0")
        assert done.returncode == 0, done.stdout

    @contextlib.contextmanager
    def gang(self, name, address):
        """A driver in a shell outside, whose two ranks run on the workers until go_on() is called."""
        goes_on = pathlib.Path(self.dir, f"{name}-goes-on")
        # Every start of a rank adds a line: its pid.
        command = (f"echo $$ >> {self.dir}/{name}-$RANK; "
                   f"until test -e {goes_on}; do sleep 0.1; done; echo {name} $RANK ends")
        with self.running("run", "--address", address, "--num-nodes", "2", "--gpus-per-node", "1",
                          "--", "sh", "-c", command) as driver:
            driver.go_on = goes_on.touch
            driver.ranks = lambda: [[int(pid) for pid in path.read_text().split()]
                                    for path in sorted(pathlib.Path(self.dir).glob(f"{name}-[01]"))]
            driver.began = wait_until(lambda: len(r := driver.ranks()) == 2 and all(r) and r,
                                      lambda: f"both ranks run: {driver.output()}")
            yield driver

    def served_by(self, name, began):
        """Everything is answered at the new head; how long it took."""
        self.use(name)
        wait_until(self.answers, f"{name} is the head", 10)
        rest = time.monotonic() - began
        gcs = GcsClient(address=self.gcs)
        assert gcs.internal_kv_put(b"served", b"by", True, namespace=b"test") is not None
        assert gcs.internal_kv_get(b"served", namespace=b"test") == b"by"
        every = time.monotonic() - began
        print(f"takeover by {name}: REST after {rest:.2f} s, KV reads and writes after {every:.2f} s")
        return every

    def alive(self):
        return {n["node_name"] for n in self.status()["nodes"] if n["state"] == "ALIVE"}


class TakeoverWithWorkers(unittest.TestCase):
    def ends_well(self, cluster, drivers):
        for name, driver in drivers.items():
            self.assertIsNone(driver.poll(), driver.output())
            self.assertEqual(driver.ranks(), driver.began, "a rank was started again")
            self.assertTrue(all(is_alive(pid) for pids in driver.began for pid in pids))
            driver.go_on()
        for name, driver in drivers.items():
            self.assertEqual(driver.wait(60), 0, driver.output())
            for rank in "01":
                self.assertEqual(driver.output().count(f"{name} {rank} ends\n"), 1, driver.output())
        new = cluster.mobula("run", "--num-nodes", "2", "--gpus-per-node", "2", "--", "echo", "all of us")
        self.assertEqual(new.returncode, 0, new.stdout)

    def test_the_head_is_gone(self):
        def ends_in_order(cluster):
            os.kill(cluster.node("node-0")["pid_init"], signal.SIGTERM)

        for gone in (lambda cluster: cluster.kill("node-0"), ends_in_order):
            with self.subTest(gone), Redis() as redis, Workers(redis) as cluster:
                a, b = cluster.heads
                with cluster.gang("both", f"{a},{b}") as both, cluster.gang("one", a) as one:
                    gone(cluster)
                    self.assertLess(cluster.served_by("node-1", time.monotonic()), TAKEOVER_S)
                    wait_until(lambda: {"worker-0", "worker-1", "node-1"} == cluster.alive(),
                               lambda: f"the old head is dead, all others live: {cluster.alive()}", 90)
                    self.ends_well(cluster, {"both": both, "one": one})
                cluster.assert_all_free()

    def test_the_head_hangs(self):
        with Redis() as redis, Workers(redis) as cluster:
            a, b = cluster.heads
            with cluster.gang("both", f"{a},{b}") as both, cluster.gang("one", a) as one:
                with cluster.hung("node-0"):
                    self.assertLess(cluster.served_by("node-1", time.monotonic()), TAKEOVER_S)
                    self.assertLessEqual({"worker-0", "worker-1", "node-1"}, cluster.alive())
                self.ends_well(cluster, {"both": both, "one": one})
            self.old_head_stands_by(cluster)
            cluster.assert_all_free()

    def test_stock_followers_end(self):
        """ray#60665: a follower hangs, or ends as if the job had, when its head is lost."""
        with Redis() as redis, SharedCluster(redis) as cluster:
            cluster.submit("echo begun; sleep 600", submission_id="followed")
            cluster.wait_job("followed", ("RUNNING",))
            wait_until(lambda: "begun\n" in cluster.logs("followed"), "its log has a line")

            async def follow(got):
                async for part in JobSubmissionClient(cluster.address).tail_job_logs("followed"):
                    got.append(part)
                    if "begun\n" in "".join(got) and not cluster.killed:
                        cluster.killed = time.monotonic()
                        cluster.kill("node-0")

            cluster.killed, got = 0, []
            with self.assertRaisesRegex(RuntimeError, "WebSocket connection closed unexpectedly"):
                asyncio.run(asyncio.wait_for(follow(got), 120))
            cluster.use("node-1")
            wait_until(cluster.answers, "the standby is the head", 10)
            client = JobSubmissionClient(cluster.address)
            self.assertIn(client.get_job_status("followed"), (JobStatus.RUNNING, JobStatus.FAILED))
            job = cluster.wait_job("followed", timeout_s=90)
            self.assertEqual(job["status"], "FAILED")
            self.assertRegex(job["message"], "The driver was lost: node [0-9a-f]{56}, .* is dead")

    def test_the_stock_command_does_not_end_well(self):
        """`ray job logs -f` while its head goes: an error and status 1, never a finished job; the
        command given again at the new head shows the log and the state."""
        def ends_in_order(cluster):
            os.kill(cluster.node("node-0")["pid_init"], signal.SIGTERM)

        for gone, words in ((lambda cluster: cluster.kill("node-0"), "close code 1006"),
                            (ends_in_order, "Connection")):
            with self.subTest(words), tempfile.TemporaryDirectory() as store, Redis() as redis, \
                    SharedCluster(redis) as cluster:
                env = {"MOBULA_LOG_URL": f"file://{store}", "MOBULA_LOG_MAX_BYTES": "512K"}
                cluster.submit("seq 1 50000; sleep 600", submission_id="followed",
                               runtime_env={"env_vars": env})
                with self.ray_follower(cluster) as follower:
                    wait_until(lambda: "\n20000\n" in follower.output(), follower.output, 120)
                    wait_until(lambda: "\n9000\n" in stored_logs.whole(f"{store}/logs/followed/driver"), "its front is in the store")
                    gone(cluster)
                    self.assertEqual(follower.wait(120), 1, follower.output())
                self.assertIn(words, follower.output())
                self.assertNotIn("succeeded", follower.output())
                cluster.use("node-1")
                wait_until(cluster.answers, "the standby is the head", 10)
                again = cluster.ray("job", "logs", "-f", "--address", cluster.address, "followed")
                self.assertIn("which had this log, is gone: it is read from", again.stdout)
                self.assertIn("\n9000\n", again.stdout)
                self.assertIn("Job 'followed' failed", again.stdout)

    @contextlib.contextmanager
    def ray_follower(self, cluster):
        path = pathlib.Path(cluster.dir, "follower")
        env = {k: v for k, v in cluster.env.items() if k != "RAY_ADDRESS"}
        with open(path, "wb") as out:
            process = subprocess.Popen([RAY, "job", "logs", "-f", "--address", cluster.address,
                                        "followed"], env=env, stdout=out, stdin=subprocess.DEVNULL,
                                       stderr=subprocess.STDOUT)
        process.output = lambda: path.read_text(errors="replace")
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    def old_head_stands_by(self, cluster):
        """It says so once, serves nothing, and is a node of the new head's cluster."""
        head = cluster.gcs
        wait_until(lambda: {"node-0", "node-1", "worker-0", "worker-1"} == cluster.alive(),
                   lambda: f"the old head is a node: {cluster.alive()}", 90)
        log = cluster.agent_log("node-0")
        self.assertEqual(log.count(" agent: this head is deposed"), 1, log)
        cluster.use("node-0")
        for method, path in (("GET", "/api/jobs/"), ("POST", "/api/jobs/"), ("GET", "/api/version")):
            status, text = cluster.call_once(method, path, {"entrypoint": "true"} if method == "POST" else None)
            self.assertEqual((status, text), (503, f"this head is a standby; the head is at {head}"))
        cluster.use("node-1")
        self.assertEqual([j for j in cluster.get("/api/jobs/") if j["type"] == "SUBMISSION"], [])


if __name__ == "__main__":
    unittest.main(verbosity=2)
