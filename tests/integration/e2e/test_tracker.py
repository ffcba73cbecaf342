"""Saves of a foreign trainer while the agents that watch it are away."""

import os
import pathlib
import re
import signal
import tempfile
import unittest

import checkpoints
import s3
from cluster import TERMINAL, Cluster, wait_until

TRACKER = "latest_checkpointed_iteration.txt"
# Each rank saves into a directory of its own, the first names what all have written; `may X` waits for the test.
RANK = """
    set -e
    may() { until test -e HERE/may-$1; do sleep 0.05; done; }
    write() { mkdir -p $D/iter_000000$1; echo $1-$RANK > $D/iter_000000$1/rank$RANK.pt; : > HERE/wrote-$1-$RANK; }
    name() {
        until test -e HERE/wrote-$1-0 && test -e HERE/wrote-$1-1; do sleep 0.05; done
        if [ $RANK = 0 ]; then printf $1 > $D/latest_checkpointed_iteration.txt; fi
        : > HERE/named-$1-$RANK
    }
    D=HERE/save-$RANK
"""


class AwayTest(unittest.TestCase):
    def setUp(self):
        self.directory = self.enterContext(tempfile.TemporaryDirectory(prefix="mb-away-"))
        port = self.enterContext(s3.server(self.directory))
        self.cluster = self.enterContext(Cluster(nodes=2, env=s3.environment(port)))
        self.here = pathlib.Path(self.cluster.dir)
        self.run = pathlib.Path(self.directory, "s3", s3.BUCKET, "run")

    def submit(self, script):
        self.cluster.submit(["mobula", "run", "--num-nodes", "2", "--save", f"{self.here}/save-%n", "--checkpoint-url",
                             f"s3://{s3.BUCKET}/run", "--lease", "300s", "--", "sh", "-c",
                             (RANK + script).replace("HERE", str(self.here))], submission_id="away")

    def may(self, what):
        (self.here / f"may-{what}").touch()

    def wait_named(self, iteration):
        wait_until(lambda: all((self.here / f"named-{iteration}-{rank}").exists() for rank in (0, 1)),
                   f"iteration {iteration} is named", 60)

    def go_away(self):
        nodes = self.cluster.nodes()
        for node in nodes:
            os.kill(node["pid_init"], signal.SIGSTOP)  # it starts no other agent
        for node in nodes:
            os.kill(node["pid_agent"], signal.SIGKILL)
        return nodes

    def come_back(self, nodes):
        for node in nodes:
            os.kill(node["pid_init"], signal.SIGCONT)
        for node in nodes:
            wait_until(lambda: (n := self.cluster.node(node["node_name"]))["pid_agent"] != node["pid_agent"] and
                       n["state"] == "ALIVE", "init starts the agent again", 60)

    def ask(self, what):
        try:
            return what("away")
        except OSError:
            return None  # the head is not back yet

    def wait_over(self):
        return wait_until(lambda: (job := self.ask(self.cluster.job)) and job["status"] in TERMINAL and job,
                          "the job is over", 120)

    def test_each_save_is_durable(self):
        """Twice; the second time the ranks have ended, too, before the agents are back."""
        self.submit("""
            write 1; name 1; may 2
            for i in 2 3 4; do write $i; name $i; done; may 5
            for i in 5 6; do write $i; name $i; done""")
        wait_until(lambda: (self.run / TRACKER).exists(), lambda: self.cluster.logs("away"), 60)
        nodes = self.go_away()
        self.may(2)
        self.wait_named(4)
        self.come_back(nodes)
        wait_until(lambda: "iteration 4 is durable" in (self.ask(self.cluster.logs) or ""), "the last one is durable", 60)
        nodes = self.go_away()
        self.may(5)
        self.wait_named(6)
        self.come_back(nodes)
        job = self.wait_over()
        log = self.cluster.logs("away")
        self.assertEqual(job["status"], "SUCCEEDED", log)
        for i in range(1, 7):
            checkpoints.assert_complete(self.run, i)
            for rank in (0, 1):
                self.assertEqual((self.run / f"iter_000000{i}/rank{rank}.pt").read_text(), f"{i}-{rank}\n")
            self.assertEqual(log.count(f"checkpoint of iteration {i} is durable"), 1, log)
        self.assertEqual((self.run / TRACKER).read_text(), "6")
        self.cluster.assert_all_free()

    def test_removed_by_its_trainer(self):
        """It keeps the last one only: what is lost by that is named, and the job is FAILED."""
        self.submit("""
            write 1; may 2
            name 1; write 2; name 2
            if [ $RANK = 0 ]; then until test -e HERE/named-2-1; do sleep 0.05; done; rm -r $D/iter_0000001; : > HERE/gone; fi
            may 3""")
        wait_until(lambda: any("new 1\n" in p.read_text() for n in self.cluster.nodes()
                               for p in n["dir"].rglob("tracker.known")), lambda: self.cluster.logs("away"), 60)
        nodes = self.go_away()
        self.may(2)
        wait_until((self.here / "gone").exists, "the trainer has removed it", 60)
        self.come_back(nodes)
        self.may(3)
        job = self.wait_over()
        log = self.cluster.logs("away")
        self.assertEqual(job["status"], "FAILED", log)
        self.assertEqual(job["driver_exit_code"], 74, job)
        said = re.findall(r".*iteration 1 is not durable: it was saved and not uploaded: iter_0000001.*removed.*", log)
        self.assertEqual(len(said), 2, "when it was found, and as what the run ends with: " + log)
        self.assertIn("iteration 1 is not durable", job["message"])
        self.assertEqual([p.name for p in self.run.glob("iter_*")], ["iter_0000002"])
        checkpoints.assert_complete(self.run, 2)
        self.cluster.assert_all_free()


if __name__ == "__main__":
    unittest.main()
