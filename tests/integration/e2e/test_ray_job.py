"""`ray job submit -- mobula ...` on a stock Ray head: Ray runs the driver, the driver gangs our nodes."""

import json
import os
import pathlib
import signal
import unittest
import urllib.request

import checkpoints
from cluster import MOBULA, Joined, iterations_of, train_command, wait_until
from ports import free_port
from ray_head import RayHead

# What ranks do; in files, since a shell of Ray's would be the first to read it.
SCRIPTS = {
    "saves": "trap 'echo saved by $RANK; exit 0' TERM; echo up; sleep 1000 & wait",
    "fails": "exit $((7 * RANK))",
}


class RayJobTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        port = free_port()
        head = cls.enterClassContext(RayHead(
            env={"PATH": f"{MOBULA.parent}:{os.environ['PATH']}"},
            args=["--include-dashboard=true", f"--dashboard-port={port}"]))
        cls.cluster = cls.enterClassContext(Joined(head.address, 2))
        cls.cluster.address = f"http://127.0.0.1:{port}"
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


if __name__ == "__main__":
    unittest.main()
