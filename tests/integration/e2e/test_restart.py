"""--max-restarts: what is repeated, what is not, and where the next attempt begins."""

import json
import os
import pathlib
import re
import signal
import time
import unittest

import checkpoints
from cluster import Cluster, environment_of, iterations_of, is_alive, mini_model, wait_until


def attempts_of(text):
    return [int(n) for n in re.findall(r"this is attempt (\d+)", text)]


class Commands(unittest.TestCase):
    """kuberay#2376, kuberay#2393: a failure that only comes again is not repeated."""

    @classmethod
    def setUpClass(cls):
        cls.cluster = cls.enterClassContext(Cluster(nodes=2))

    def tearDown(self):
        self.cluster.assert_all_free()

    def run_gang(self, script, *options, restarts=5):
        return self.cluster.mobula(
            "run", "--num-nodes", "2", "--max-restarts", restarts, "--restart-delay", "50ms",
            *options, "--", "sh", "-c", "[ $RANK = 1 ] && echo this is attempt $MOBULA_ATTEMPT; "
            + script)

    def test_a_permanent_failure_is_not_repeated(self):
        for status in (64, 65, 66, 78, 127):
            done = self.run_gang(f"[ $RANK = 0 ] || exit {status}; sleep 1000")
            self.assertEqual(done.returncode, 1, done.stdout)
            self.assertEqual(attempts_of(done.stdout), [1], done.stdout)
            self.assertIn("this failure would only come again", done.stdout)

    def test_the_same_crash_twice_is_the_end(self):
        done = self.run_gang("[ $RANK = 0 ] || exit 7; sleep 1000")
        self.assertEqual(attempts_of(done.stdout), [1, 2], done.stdout)
        self.assertIn("rank 1 failed twice in the same way", done.stdout)
        self.assertEqual(done.stdout.strip().splitlines()[-1].split(": ")[-1],
                         "rank 1 exited with status 7")

    def test_off_by_default(self):
        done = self.run_gang("exit 7", restarts=0)
        self.assertEqual(attempts_of(done.stdout), [1], done.stdout)
        self.assertNotIn("attempt 1 was the last", done.stdout)

    def test_a_killed_rank_is_repeated(self):
        """Fresh port and attempt number; the verdict names the killed rank; the record the cause."""
        job_id = self.cluster.submit(
            ["mobula", "run", "--num-nodes", "2", "--max-restarts", "3", "--restart-delay", "50ms",
             "--", "sh", "-c", "echo this is attempt $MOBULA_ATTEMPT port $MASTER_PORT; "
             "[ $MOBULA_ATTEMPT -lt 3 ] || exit 0; exec sleep 1000"])
        for attempt in (1, 2):
            ranks = wait_until(
                lambda: self.cluster.logs(job_id).count(f"attempt {attempt} port") == 2 and
                len(self.cluster.rank_pids("sleep")) == 2 and self.cluster.rank_pids("sleep"),
                lambda: self.cluster.logs(job_id))
            killed = time.monotonic()
            os.kill(ranks[attempt - 1], signal.SIGKILL)
            line = f"rank {attempt - 1} was killed by signal 9"
            wait_until(lambda: line in self.cluster.logs(job_id), lambda: self.cluster.logs(job_id))
            noticed_s = time.monotonic() - killed
            wait_until(lambda: not any(is_alive(p) for p in ranks.values()), "the peers end", 5)
            print(f"a killed rank is a line in the log after {noticed_s:.3f} s, its peers are gone "
                  f"after {time.monotonic() - killed:.3f} s")
            self.assertLess(time.monotonic() - killed, 1)
        job = self.cluster.wait_job(job_id)
        log = self.cluster.logs(job_id)
        self.assertEqual(job["status"], "SUCCEEDED", log)
        self.assertEqual(sorted(attempts_of(log)), [1, 1, 2, 2, 3, 3])
        ports = dict(re.findall(r"attempt (\d) port (\d+)", log))
        self.assertEqual(len(set(ports.values())), 3, ports)
        gang = self.cluster.gang_of(job_id)
        self.assertEqual((gang["attempt"], gang["max_restarts"]), (3, 3), gang)
        self.assertEqual(len(gang["restarts"]), 2, gang)
        self.assertTrue(gang["restarts"][0].startswith("attempt 1: rank 0 was killed"), gang)

    def test_a_signal_in_the_pause_ends_it(self):
        with self.cluster.running("run", "--num-nodes", "2", "--max-restarts", "3",
                                  "--restart-delay", "1h", "--", "sh", "-c", "exit 7") as driver:
            wait_until(lambda: "attempt 2 of at most 4" in driver.output(), driver.output)
            driver.send_signal(signal.SIGTERM)
            self.assertEqual(driver.wait(10), 128 + signal.SIGTERM, driver.output())


class Train(unittest.TestCase):
    def test_goes_on_from_the_durable_checkpoint(self):
        """kuberay#2155: training that was cut off goes on where it was, and ends the same."""
        with Cluster(nodes=2) as cluster:
            def train(directory, *more):
                return cluster.submit(
                    ["mobula", "train", "--num-nodes", "2", "--gpus-per-node", "1",
                     "--checkpoint-url", f"file://{cluster.dir}/{directory}", *more,
                     *mini_model(2000, "--save-interval", "100")], submission_id=directory)

            calm = train("calm")
            self.assertEqual(cluster.wait_job(calm, timeout_s=120)["status"], "SUCCEEDED",
                             cluster.logs(calm))
            rough = train("rough", "--max-restarts", "3", "--restart-delay", "50ms")
            latest = f"{cluster.dir}/rough/latest_checkpointed_iteration.txt"
            wait_until(lambda: os.path.exists(latest), lambda: cluster.logs(rough), 60)
            os.kill(cluster.rank_pids("mobula-worker")[1], signal.SIGKILL)
            job = cluster.wait_job(rough, timeout_s=120)
            log = cluster.logs(rough)
            self.assertEqual(job["status"], "SUCCEEDED", log)
            self.assertIn("rank 1 was killed by signal 9", log)
            began = int(re.search(r"attempt 2 goes on from iteration (\d+)", log)[1])
            self.assertGreaterEqual(began, 100)
            seen = {i: loss for i, _, loss in iterations_of(log)}
            self.assertEqual(seen, {i: loss for i, _, loss in iterations_of(cluster.logs(calm))})
            again = [i for i, _, _ in iterations_of(log)]
            self.assertEqual(again[-(2000 - began):], list(range(began + 1, 2001)))
            checkpoints.assert_complete(f"{cluster.dir}/rough", 2000)
            # The fence in the store: a node that comes back with attempt 1 stands back.
            writers = json.loads(pathlib.Path(f"{cluster.dir}/rough/.mobula/writers.json").read_text())["writers"]
            self.assertEqual([(w["job_id"], w["attempt"]) for w in writers], [(rough, 2)])


class Preempted(unittest.TestCase):
    def test_saves_within_its_notice_and_goes_on_elsewhere(self):
        """kuberay#2155, kuberay#5004: SIGTERM to a node is a notice that is used. No interval saves
        here: what is durable was saved because of it."""
        with Cluster(nodes=3) as cluster:
            url = f"{cluster.dir}/run"
            job_id = cluster.submit(
                ["mobula", "train", "--num-nodes", "2", "--gpus-per-node", "1", "--max-restarts",
                 "1", "--restart-delay", "50ms", "--checkpoint-url", f"file://{url}",
                 *mini_model(4000, "--save-interval", "4000")])
            wait_until(lambda: len(iterations_of(cluster.logs(job_id))) > 5,
                       lambda: cluster.logs(job_id), 60)
            victim = next(n for n in cluster.nodes() if not n["is_head"] and
                          any(pathlib.Path(n["dir"]).glob("gangs/*/gang.json")))
            os.kill(victim["pid_init"], signal.SIGTERM)
            job = cluster.wait_job(job_id, timeout_s=120)
            log = cluster.logs(job_id)
            self.assertEqual(job["status"], "SUCCEEDED", log)
            began = int(re.search(r"attempt 2 goes on from iteration (\d+)", log)[1])
            self.assertTrue(5 < began < 4000, began)
            again = [i for i, _, _ in iterations_of(log)]
            self.assertEqual(again, list(range(1, 4001)), "no iteration was lost or done twice")
            checkpoints.assert_complete(url, 4000)


class LostNode(unittest.TestCase):
    """kuberay#2153: a machine that is gone is replaced by one that is there."""

    def test_goes_on_elsewhere(self):
        with Cluster(nodes=3) as cluster:
            job_id = cluster.submit(
                ["mobula", "run", "--num-nodes", "2", "--max-restarts", "2", "--restart-delay",
                 "50ms", "--", "sh", "-c",
                 "echo this is attempt $MOBULA_ATTEMPT; [ $MOBULA_ATTEMPT = 1 ] || exit 0; "
                 "exec sleep 1000"])
            wait_until(lambda: len(cluster.rank_pids("sleep")) == 2, lambda: cluster.logs(job_id))
            victim = next(n for n in cluster.nodes() if not n["is_head"] and
                          any(pathlib.Path(n["dir"]).glob("gangs/*/gang.json")))
            # The machine hangs: nothing of the node runs, its connections stay.
            stopped = [p for p in cluster.own_pids() if str(victim["dir"]) in environment_of(p)
                       or p in (victim["pid_agent"], victim["pid_init"])]
            began = time.monotonic()
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            try:
                wait_until(lambda: "was lost" in cluster.logs(job_id),
                           lambda: cluster.logs(job_id), 30)
                hung_s = time.monotonic() - began
                print(f"a hung node is a line in the log after {hung_s:.1f} s")
                self.assertLess(hung_s, 10)
                job = cluster.wait_job(job_id, timeout_s=60)
                log = cluster.logs(job_id)
                self.assertEqual(job["status"], "SUCCEEDED", log)
                self.assertIn("was lost: the head declared it dead", log)
                self.assertEqual(attempts_of(log).count(2), 2, log)
            finally:
                for pid in stopped:
                    os.kill(pid, signal.SIGCONT)


if __name__ == "__main__":
    unittest.main()
