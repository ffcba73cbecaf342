"""`ray job submit -- mobula ...` on a stock Ray head: Ray runs the driver, the driver gangs our nodes."""

import json
import os
import pathlib
import signal
import tempfile
import unittest
import urllib.request

import checkpoints
import s3
from cluster import MOBULA, Joined, is_alive, iterations_of, train_command, wait_until
from ports import free_port
from ray_head import RayHead, ray_version

# What ranks do; in files, since a shell of Ray's would be the first to read it.
SCRIPTS = {
    "saves": "trap 'echo saved by $RANK; exit 0' TERM; echo up; sleep 1000 & wait",
    "fails": "exit $((7 * RANK))",
}

PATIENCE_S = 110  # a machine that does much besides; the gate opens by itself after 120


class Head(RayHead):
    """With a dashboard, and mobula among its programs."""

    def __init__(self, env=None):
        self.dashboard_port = free_port()
        super().__init__(env={**(env or {}), "PATH": f"{MOBULA.parent}:{os.environ['PATH']}"},
                         args=["--include-dashboard=true",
                               f"--dashboard-port={self.dashboard_port}"])

    def __enter__(self):
        super().__enter__()
        # Its dashboard refuses jobs until its agent has started, which takes Ray's node for its own at
        # the first job: afterwards it might be one of ours, on this machine (docs/ray-compat.md).
        if ray_version() < (2, 60):
            wait_until(self.takes_a_job, "Ray's own agent takes a job", 120)
        return self

    def takes_a_job(self):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.dashboard_port}/api/jobs/", method="POST",
            headers={"Content-Type": "application/json"}, data=b'{"entrypoint": "true"}')
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status == 200
        except OSError:
            return False

    def nodes(self, n, env=None):
        """That many of ours, not yet started; their jobs are the dashboard's."""
        cluster = Joined(self.address, n, env)
        cluster.address = f"http://127.0.0.1:{self.dashboard_port}"
        return cluster


class RayJobTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.cluster = cls.enterClassContext(cls.enterClassContext(Head()).nodes(2))
        for name, text in SCRIPTS.items():
            pathlib.Path(cls.cluster.dir, name).write_text(text)
        cls.before = cls.free()

    @classmethod
    def free(cls):
        found = []
        for n in cls.cluster.nodes():
            url = f"http://{n['node_ip']}:{n['http_port']}/api/mobula/node"
            with urllib.request.urlopen(url, timeout=60) as reply:
                found.append(json.loads(reply.read())["resources_available"])
        return found

    def tearDown(self):
        """Whatever became of the job: nothing of it is left on the nodes."""
        wait_until(lambda: self.free() == self.before, lambda: self.free(), 60)
        self.assertEqual(self.cluster.rank_pids(), {})

    def ray(self, verb, *words):
        return self.cluster.ray("job", verb, "--address", self.cluster.address, *words)

    def begin(self, name):
        """A gang of two that goes on until it is stopped."""
        done = self.ray("submit", "--no-wait", "--submission-id", name, "--", "mobula", "run",
                        "--num-nodes", "2", "--", "sh", f"{self.cluster.dir}/saves")
        self.assertEqual(done.returncode, 0, done.stdout)
        wait_until(lambda: self.cluster.logs(name).count("] up\n") == 2,
                   lambda: self.cluster.logs(name), 60)

    def test_train(self):
        store = f"{self.cluster.dir}/store"
        done = self.ray("submit", "--submission-id", "train", "--",
                        *train_command(f"file://{store}", 10, "--save-interval", "5"))
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIn("Job 'train' succeeded", done.stdout)
        self.assertEqual([(i, n) for i, n, _ in iterations_of(done.stdout)],
                         [(i, 8 * i) for i in range(1, 11)], done.stdout)
        self.assertEqual(checkpoints.latest(store), 10)
        for iteration in (5, 10):
            checkpoints.assert_complete(store, iteration)

    def test_status_of_the_driver(self):
        for name, words, code, said in (
            ("rank-fails", ["--num-nodes", "2", "--", "sh", f"{self.cluster.dir}/fails"], 1,
             "rank 1 exited with status 7"),
            ("no-nodes", ["--num-nodes", "3", "--wait-timeout", "1s", "--", "true"], 75,
             "no 3 nodes were free within 1 s"),
        ):
            done = self.ray("submit", "--submission-id", name, "--", "mobula", "run", *words)
            self.assertEqual(done.returncode, 1, done.stdout)
            self.assertIn(said, done.stdout)
            job = self.cluster.job(name)
            self.assertEqual((job["status"], job["driver_exit_code"]), ("FAILED", code), job)
            self.assertIn(said, job["message"])

    def test_stop(self):
        self.begin("stopped")
        done = self.ray("stop", "stopped")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertEqual(self.cluster.job("stopped")["status"], "STOPPED")
        log = self.cluster.logs("stopped")
        for rank in range(2):
            self.assertIn(f"saved by {rank}\n", log)

    def test_driver_is_killed(self):
        self.begin("killed")
        drivers = [int(p.name) for p in pathlib.Path("/proc").glob("[0-9]*")
                   if self.is_driver(p, "killed")]
        self.assertEqual(len(drivers), 1, drivers)
        os.kill(drivers[0], signal.SIGKILL)
        job = self.cluster.wait_job("killed")
        self.assertEqual(job["status"], "FAILED", job)

    @staticmethod
    def is_driver(process, job):
        try:
            return (process / "cmdline").read_bytes().startswith(b"mobula\0run\0") and \
                f'"{job}"'.encode() in (process / "environ").read_bytes()
        except OSError:
            return False


class DrainTest(unittest.TestCase):
    """`ray drain-node` with a deadline takes a node from a gang whose checkpoints go to an S3 server.
    Nothing else makes the gang save."""

    @classmethod
    def setUpClass(cls):
        cls.directory = cls.enterClassContext(tempfile.TemporaryDirectory(prefix="mb-drain-"))
        port = cls.enterClassContext(s3.server(cls.directory))
        cls.gate = cls.enterClassContext(s3.Gate(port, r"/\.mobula/manifest\.json$"))
        env = s3.environment(cls.gate.port)
        head = cls.enterClassContext(Head(env))
        cls.cluster = cls.enterClassContext(head.nodes(2, env=env))

    def listed(self, node):
        """What Ray says of the node."""
        done = self.cluster.ray("list", "nodes", "--address", self.cluster.gcs, "--detail",
                                "--filter", f"node_id={node['node_id']}")
        self.assertEqual(done.returncode, 0, done.stdout)
        return done.stdout

    def with_rank(self, rank):
        """The logs of such ranks, of former gangs as well: the node of each."""
        return {log: node for node in self.cluster.nodes()
                for log in node["dir"].glob(f"gangs/*/rank-{rank}.log")}

    def drain(self, name, rank):
        """The node of this rank goes, and not before the last file of the checkpoint is stored."""
        cluster, url = self.cluster, f"s3://{s3.BUCKET}/{name}"
        known = self.with_rank(rank)
        self.gate.shut()
        done = cluster.ray("job", "submit", "--address", cluster.address, "--no-wait",
                           "--submission-id", name, "--",
                           *train_command(url, 10 ** 7, "--save-interval", str(10 ** 6),
                                          "--eval-iters", "0", "--log-interval", "100"))
        self.assertEqual(done.returncode, 0, done.stdout)
        wait_until(lambda: iterations_of(cluster.logs(name)), lambda: cluster.logs(name), PATIENCE_S)
        (node,) = (node for log, node in self.with_rank(rank).items() if log not in known)
        done = cluster.ray("drain-node", "--address", cluster.gcs, "--node-id", node["node_id"],
                           "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test",
                           "--deadline-remaining-seconds", "900")
        self.assertEqual(done.returncode, 0, done.stdout)
        wait_until(lambda: self.gate.waiting, lambda: cluster.logs(name), PATIENCE_S)
        self.assertIn("state: ALIVE", self.listed(node))
        self.assertTrue(is_alive(node["pid_agent"]))
        self.assertEqual(cluster.job(name)["status"], "RUNNING")
        self.gate.open()
        wait_until(lambda: not is_alive(node["pid_init"]), "the node leaves", PATIENCE_S)
        run = pathlib.Path(self.directory, "s3", s3.BUCKET, name)
        saved = checkpoints.latest(run)
        self.assertGreaterEqual(saved, 100)
        checkpoints.assert_complete(run, saved)
        said = self.listed(node)
        self.assertIn("state: DEAD", said)
        self.assertIn("Terminated due to preemption", said)
        job = cluster.wait_job(name, timeout_s=PATIENCE_S)
        self.assertEqual(job["status"], "FAILED", job)
        self.assertIn("the node is drained", job["message"])
        verified = cluster.mobula("checkpoint", "verify", url)
        self.assertEqual(verified.returncode, 0, verified.stdout)
        cluster.forget_node(node)

    def test_drain(self):
        """First the node that speaks for the gang, then the other."""
        self.drain("first", 0)
        self.cluster.start_node(3)
        self.drain("other", 1)


if __name__ == "__main__":
    unittest.main()
