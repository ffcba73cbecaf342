"""The main job in small: a gang of two ranks trains, checkpoints durably, resumes bit for bit."""

import json
import unittest

import checkpoints
from cluster import Cluster, iterations_of, train_command, wait_until


class TrainTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.cluster = cls.enterClassContext(Cluster(nodes=2))

    def store(self, name):
        return f"{self.cluster.dir}/{name}"

    def train(self, name, url, iterations, *more):
        """Submits, waits, insists on success; the log."""
        self.cluster.submit(train_command(url, iterations, *more), submission_id=name)
        job = self.cluster.wait_job(name, timeout_s=120)
        self.assertEqual(job["status"], "SUCCEEDED", self.cluster.logs(name))
        return self.cluster.logs(name)

    def verify(self, directory):
        done = self.cluster.mobula("checkpoint", "verify", f"file://{directory}")
        self.assertEqual(done.returncode, 0, done.stdout)

    def check_main_job(self, name, directory, log):
        seen = iterations_of(log)
        self.assertEqual([(i, n) for i, n, _ in seen], [(i, 8 * i) for i in range(1, 11)], log)
        first, last = float(seen[0][2]), float(seen[-1][2])
        self.assertAlmostEqual(first, 4.85, delta=0.2)  # about ln(128): nothing learnt yet
        self.assertLess(last, first)
        self.assertIn("validation loss at iteration 10", log)
        self.assertEqual(checkpoints.latest(directory), 10)
        for iteration in (5, 10):
            checkpoints.assert_complete(directory, iteration)
        self.verify(directory)
        gang = self.cluster.gang_of(name)
        self.assertEqual((gang["iteration"], gang["train_iters"], gang["state"]),
                         (10, 10, "SUCCEEDED"), gang)
        self.assertEqual(gang["checkpoint"]["durable_iteration"], 10)
        self.assertAlmostEqual(gang["loss"], last, delta=1e-4)
        self.assertGreater(gang["tokens_per_s"], 0)

    def test_mobula_job_submit(self):
        directory = self.store("by-mobula")
        done = self.cluster.mobula(
            "job", "submit", "--address", self.cluster.address, "--submission-id", "by-mobula", "--",
            *train_command(f"file://{directory}", 10, "--save-interval", "5"), timeout=120)
        self.assertEqual(done.returncode, 0, done.stdout)
        self.check_main_job("by-mobula", directory, done.stdout)
        shown = self.cluster.mobula("status", "--address", self.cluster.address, "--json")
        self.assertEqual(shown.returncode, 0, shown.stdout)
        job = next(j for j in json.loads(shown.stdout)["jobs"] if j["submission_id"] == "by-mobula")
        self.assertEqual(job["gang"]["checkpoint"]["durable_iteration"], 10)
        people = self.cluster.mobula("status", "--address", self.cluster.address)
        self.assertEqual(people.returncode, 0, people.stdout)
        for word in ("by-mobula", "SUCCEEDED", "10/10", "node-0", "node-1"):
            self.assertIn(word, people.stdout)

    def test_ray_job_submit(self):
        directory = self.store("by-ray")
        done = self.cluster.ray(
            "job", "submit", "--address", self.cluster.address, "--submission-id", "by-ray", "--",
            *train_command(f"file://{directory}", 10, "--save-interval", "5"), timeout=120)
        self.assertEqual(done.returncode, 0, done.stdout)
        self.check_main_job("by-ray", directory, done.stdout)

    def test_ten_and_resume_and_ten_is_twenty(self):
        whole, parts = self.store("whole"), self.store("parts")
        save = ("--save-interval", "10")
        once = self.train("whole", f"file://{whole}", 20, *save)
        first = self.train("part-1", f"file://{parts}", 20, *save, "--exit-interval", "10")
        self.assertEqual(checkpoints.latest(parts), 10)
        second = self.train("part-2", f"file://{parts}", 20, *save, "--load", f"file://{parts}")
        self.assertEqual([i for i, _, _ in iterations_of(first)], list(range(1, 11)))
        self.assertEqual([i for i, _, _ in iterations_of(second)], list(range(11, 21)), second)
        self.assertEqual(iterations_of(once), iterations_of(first) + iterations_of(second))
        for directory in (whole, parts):
            self.assertEqual(checkpoints.latest(directory), 20)
            self.verify(directory)
        for iteration in (10, 20):
            a, b = (checkpoints.tensors(d, iteration) for d in (whole, parts))
            self.assertGreater(len(a), 10)
            self.assertEqual(a.keys(), b.keys())
            self.assertEqual([k for k in a if a[k] != b[k]], [], f"tensors of iteration {iteration}")

    def test_status_while_it_trains_and_stop_saves(self):
        directory = self.store("stopped")
        self.cluster.submit(train_command(f"file://{directory}", 100000, "--save-interval", "100000"),
                            submission_id="stopped")

        def look():
            gang = self.cluster.gang_of("stopped")
            return gang if gang and gang["iteration"] >= 3 and gang["tokens_per_s"] > 0 else None

        gang = wait_until(look, lambda: self.cluster.logs("stopped")[-3000:], 60)
        self.assertEqual(gang["train_iters"], 100000)
        self.assertGreater(gang["loss"], 0)
        self.assertEqual(gang["checkpoint"]["durable_iteration"], -1)
        self.assertLess(self.cluster.available(), self.cluster.total())
        done = self.cluster.mobula("job", "stop", "--address", self.cluster.address, "stopped")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertEqual(self.cluster.wait_job("stopped", timeout_s=40)["status"], "STOPPED")
        last = iterations_of(self.cluster.logs("stopped"))[-1][0]
        self.assertEqual(checkpoints.latest(directory), last)
        checkpoints.assert_complete(directory, last)
        self.verify(directory)
        self.cluster.assert_all_free()

    def test_unreachable_store_fails_the_job_and_keeps_the_files(self):
        """What cannot be made durable is never a success."""
        blocked = self.store("blocked")
        open(blocked, "w").close()  # a file where the store's directory should be
        self.cluster.submit(train_command(f"file://{blocked}/ckpt", 5, "--save-interval", "5"),
                            submission_id="blocked")
        # Five tries of every file, then the ranks' logs (15 s) and the driver's (15 s) are given up.
        job = self.cluster.wait_job("blocked", timeout_s=100)
        self.assertEqual(job["status"], "FAILED", self.cluster.logs("blocked"))
        self.assertIn("blocked", self.cluster.logs("blocked"))

    def test_outside_a_job(self):
        """Typed in a shell, the driver registers a job of its own."""
        directory = self.store("shell")
        argv = train_command(f"file://{directory}", 4, "--save-interval", "2")[1:]
        done = self.cluster.mobula(*argv, timeout=120)
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertEqual(len(iterations_of(done.stdout)), 4)
        self.assertEqual(checkpoints.latest(directory), 4)
        self.verify(directory)
        self.cluster.assert_all_free()


if __name__ == "__main__":
    unittest.main()
