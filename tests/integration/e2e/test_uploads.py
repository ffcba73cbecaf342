"""What the nodes of a gang make of each other's uploads, on a real S3 server behind a proxy."""

import json
import pathlib
import re
import sys
import tempfile
import time
import unittest

import checkpoints
import s3
from cluster import Cluster, iterations_of, train_command, wait_until

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "s3"))
from faults import FaultProxy, hold  # noqa: E402

BUCKET = f"s3://{s3.BUCKET}"
STALL_S = 3  # instead of 30: when a request that is not answered goes out again


class UploadsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = cls.enterClassContext(tempfile.TemporaryDirectory(prefix="mb-uploads-"))
        port = cls.enterClassContext(s3.server(cls.directory))
        cls.proxy = cls.enterClassContext(FaultProxy(port))
        cls.cluster = cls.enterClassContext(Cluster(nodes=2, env={
            **s3.environment(cls.proxy.port), "BUCKET_STORAGE_STALL_SECONDS": str(STALL_S)}))

    def tearDown(self):
        self.proxy.silent = False
        self.proxy.rate = None
        self.proxy.clear()
        self.cluster.assert_all_free()

    def bucket(self, name):
        return pathlib.Path(self.directory, "s3", s3.BUCKET, name)

    def agent_logs(self):
        return "".join((n["dir"] / "agent.log").read_text(errors="replace") for n in self.cluster.nodes())

    def gang(self, name):
        shown = json.loads(self.cluster.mobula("status", "--address", self.cluster.address, "--json").stdout)
        return next(j for j in shown["jobs"] if j["submission_id"] == name)["gang"]

    def submit_that_gives_up(self, name, *options, end=""):
        """Two nodes save iterations 1 and 2; a file of the first is not what was saved when its turn comes."""
        here = pathlib.Path(self.cluster.dir)
        script = f"""
            if [ $MOBULA_ATTEMPT -gt 1 ]; then exit 0; fi
            D={here}/{name}-$RANK
            for i in 1 2; do
                N=$D/iter_000000$i; mkdir -p $N; head -c 300000 /dev/zero > $N/rank$RANK.bin; : > $D/saved-$i
                until test -e {here}/{name}-0/saved-$i && test -e {here}/{name}-1/saved-$i; do sleep 0.05; done
                if [ $RANK = 0 ]; then printf $i > $D/latest_checkpointed_iteration.txt; fi
                until test -e {here}/{name}-go-$i; do sleep 0.05; done
            done
            {end}"""
        claim = f"{name}/iter_0000001/.mobula/manifest.json"
        self.proxy.rule("PUT", claim, hold())  # before any file; what is not answered is asked again
        self.cluster.submit(["mobula", "run", "--num-nodes", "2", "--save", f"{here}/{name}-%n", "--checkpoint-url",
                             f"{BUCKET}/{name}", *options, "--", "sh", "-c", script], submission_id=name)

        def both_know():  # each node speaks for its own files
            kept = (self.gang(name) or {}).get("checkpoint") or {}
            return (kept.get("saved_iteration"), kept.get("total_bytes")) == (1, 600_000)

        wait_until(lambda: self.proxy.seen("PUT", claim) and both_know(), lambda: self.gang(name))
        with open(here / f"{name}-1/iter_0000001/rank1.bin", "ab") as f:
            f.write(b"more")
        self.proxy.clear()
        return here

    def test_a_failure_after_what_was_given_up(self):
        """It is named, and another attempt follows: what was given up stands for nothing that comes later."""
        here = self.submit_that_gives_up("after", "--max-restarts", "2", "--restart-delay", "50ms",
                                         end="[ $RANK = 1 ] || kill -9 $$; sleep 1000")
        wait_until(lambda: "iteration 1 was given up" in self.cluster.job("after")["message"],
                   lambda: self.cluster.job("after")["message"], 60)
        (here / "after-go-1").touch()
        wait_until(lambda: self.gang("after")["checkpoint"]["durable_iteration"] == 2,
                   lambda: self.cluster.logs("after"), 60)
        (here / "after-go-2").touch()
        job = self.cluster.wait_job("after", timeout_s=60)
        log = self.cluster.logs("after")
        self.assertEqual(job["status"], "SUCCEEDED", log)
        self.assertIn("rank 0 was killed by signal 9", log)
        self.assertIn("rank1.bin: it changed after it was saved", log)
        self.assertEqual(self.gang("after")["attempt"], 2)
        self.assertEqual((self.bucket("after") / "latest_checkpointed_iteration.txt").read_text(), "2")

    def test_what_one_node_gives_up(self):
        """The other node hears of it while the gang runs on, and the next is durable."""
        here = self.submit_that_gives_up("given")
        wait_until(lambda: "iteration 1 is not durable: node 1 has given it up" in self.agent_logs(),
                   lambda: self.agent_logs()[-3000:], 60)
        wait_until(lambda: "iteration 1 was given up" in self.cluster.job("given")["message"],
                   lambda: self.cluster.job("given")["message"], 60)
        one, = self.gang("given")["checkpoint"]["given_up"]
        self.assertEqual((one["iteration"], one["node"]), (1, 1))
        self.assertIn("rank1.bin: it changed after it was saved", one["error"])
        self.assertEqual(self.cluster.job("given")["status"], "RUNNING")
        for i in (1, 2):
            (here / f"given-go-{i}").touch()
        job = self.cluster.wait_job("given", timeout_s=60)
        log = self.cluster.logs("given")
        self.assertEqual(job["status"], "FAILED", log)
        self.assertIn("iteration 1 is not durable", job["message"])
        said = [line for line in log.splitlines() if "iteration 1 is not durable" in line]
        self.assertEqual(len(said), 2, "when it happened, and as what the run ends with: " + log)
        self.assertEqual(log.strip().splitlines()[-1], said[1])
        self.assertEqual((self.bucket("given") / "latest_checkpointed_iteration.txt").read_text(), "2")
        self.assertFalse(self.proxy.seen("PUT", "given/iter_0000001/.mobula/part-1-"), "it has no part")
        done = self.cluster.mobula("checkpoint", "verify", f"{BUCKET}/given")
        self.assertEqual(done.returncode, 0, done.stdout)

    def look_for(self, seconds, name):
        """Nobody waits for the store who need not: the head answers, and says what is on its way."""
        said, slowest = set(), 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.monotonic()
            job = self.cluster.job(name)
            slowest = max(slowest, time.monotonic() - began)
            self.assertEqual(job["status"], "RUNNING", self.cluster.logs(name)[-3000:])
            said.add(job["message"])
            time.sleep(0.2)
        print(f"the head answered within {slowest:.2f} s", flush=True)
        self.assertLess(slowest, 2)
        return said

    def test_a_black_hole_while_training_goes_on(self):
        """The store accepts connections and answers nothing; when it is back all that was saved goes out."""
        self.proxy.silent = True
        self.cluster.submit(train_command(f"{BUCKET}/hole", 12, "--save-interval", "3"), submission_id="hole")
        wait_until(lambda: "saved checkpoint from iteration      12" in self.cluster.logs("hole"),
                   lambda: self.cluster.logs("hole")[-3000:], 60)
        wait_until(lambda: iterations_of(self.cluster.logs("hole"))[-1][0] == 12,  # another rank may have told of the save
                   lambda: self.cluster.logs("hole")[-3000:])
        said = self.look_for(3 * STALL_S, "hole")
        self.assertTrue(any(re.search(r"iteration \d+", m) for m in said), said)
        self.assertFalse((self.bucket("hole") / "latest_checkpointed_iteration.txt").exists())
        self.proxy.silent = False
        job = self.cluster.wait_job("hole", timeout_s=90)
        self.assertEqual(job["status"], "SUCCEEDED", self.cluster.logs("hole")[-3000:])
        for iteration in (3, 6, 9, 12):
            checkpoints.assert_complete(self.bucket("hole"), iteration)
        self.assertEqual(checkpoints.latest(self.bucket("hole")), 12)

    def test_a_black_hole_at_the_deadline(self):
        """The ranks save and end before it; what is not durable is said, and goes out when the store is back."""
        self.proxy.silent = True
        deadline = time.time() + 40  # of it ranks need a while to come up on a loaded machine
        self.cluster.submit(train_command(f"{BUCKET}/late", 100_000, "--save-interval", "100000", "--log-interval", "50",
                                          "--eval-interval", "100000", "--deadline", f"@{deadline:.3f}"),
                            submission_id="late")
        wait_until(lambda: self.cluster.rank_pids("mobula-worker"), lambda: self.cluster.logs("late")[-3000:])
        wait_until(lambda: not self.cluster.rank_pids("mobula-worker"), lambda: self.cluster.logs("late")[-3000:], 60)
        left = deadline - time.time()
        print(f"ranks ended {left:.1f} s before the deadline", flush=True)
        self.assertGreater(left, 0, self.cluster.logs("late")[-3000:])
        # What a rank has printed comes to the job's log by way of its agent and the driver; it saves
        # more than once: early enough for the deadline, and when it is told to end.
        wait_until(lambda: "[exiting program" in self.cluster.logs("late"), lambda: self.cluster.logs("late")[-3000:])
        last = int(re.findall(r"saved checkpoint from iteration +(\d+)", self.cluster.logs("late"))[-1])
        self.look_for(max(0, deadline - time.time()), "late")
        wait_until(lambda: f"iteration {last} is not durable at the deadline (--deadline)" in self.agent_logs(),
                   lambda: self.agent_logs()[-3000:])
        wait_until(lambda: re.search(r"iteration \d+.* s after the deadline", self.cluster.job("late")["message"]),
                   lambda: self.cluster.job("late")["message"])
        self.proxy.silent = False
        job = self.cluster.wait_job("late", timeout_s=90)
        self.assertEqual(job["status"], "SUCCEEDED", self.cluster.logs("late")[-3000:])
        self.assertEqual(checkpoints.latest(self.bucket("late")), last)
        checkpoints.assert_complete(self.bucket("late"), last)

    def test_all_is_over_with_the_drain_timeout(self):
        """Transfers are open, the ranks' logs and the driver's too, when the store answers nothing any more."""
        here, seconds = pathlib.Path(self.cluster.dir), 8
        script = f"""
            D={here}/drained-$RANK; mkdir -p $D/iter_0000001; truncate -s 400M $D/iter_0000001/rank$RANK.bin; : > $D/saved
            until test -e {here}/drained-0/saved && test -e {here}/drained-1/saved; do sleep 0.05; done
            if [ $RANK = 0 ]; then printf 1 > $D/latest_checkpointed_iteration.txt; fi
            echo rank $RANK has saved; until test -e {here}/drained-go; do sleep 0.05; done"""
        self.proxy.rate = 40 << 20
        self.cluster.submit(["mobula", "run", "--num-nodes", "2", "--save", f"{here}/drained-%n", "--checkpoint-url",
                             f"{BUCKET}/drained", "--drain-timeout", f"{seconds}s", "--", "sh", "-c", script],
                            submission_id="drained")
        wait_until(lambda: len([r for r in self.proxy.seen("PUT", "drained/.*partNumber=") if r.done]) > 2,
                   "parts are in the store", 60)
        self.proxy.silent = True
        began = time.monotonic()
        (here / "drained-go").touch()
        job = self.cluster.wait_job("drained", timeout_s=120)
        took = time.monotonic() - began
        print(f"the job was over {took:.1f} s after its ranks, of {seconds} s", flush=True)
        self.assertEqual(job["status"], "FAILED")
        self.assertIn("iteration 1 is not durable: its upload was abandoned", job["message"])
        self.assertLess(took, seconds + 3)
        self.assertTrue((here / "drained-0/iter_0000001/rank0.bin").exists())
        self.assertIn("stays behind", self.agent_logs())


if __name__ == "__main__":
    unittest.main()
