"""What takes longer than a test of every day may: a node that uploads long after the others."""

import os
import pathlib
import re
import signal
import tempfile
import time
import unittest

import s3
from cluster import Cluster, train_command, wait_until

LONG_S = 40  # more than the 30 s that a node without a driver waits for the parts of others


class UnevenNodesTest(unittest.TestCase):
    def run_job(self, cluster, name, gate):
        """The second node's files are held back until long after the first is done."""
        cluster.submit(train_command(f"s3://{s3.BUCKET}/{name}", 4, "--save-interval", "4"), submission_id=name)
        wait_until(lambda: gate.waiting, "an upload is held", 60)
        begun = time.monotonic()
        wait_until(lambda: time.monotonic() - begun > LONG_S, "time passes", LONG_S + 10)
        self.assertEqual(cluster.job(name)["status"], "RUNNING", cluster.logs(name)[-2000:])
        self.assertIn("uploading iteration 4", cluster.job(name)["message"])

    def test_a_node_is_waited_for_as_long_as_it_takes(self):
        with tempfile.TemporaryDirectory(prefix="mb-uneven-") as directory, s3.server(directory) as port, \
                s3.Gate(port, r"iter_0000004/[^.]*\.safetensors") as gate, \
                Cluster(nodes=1, env=s3.environment(port)) as cluster:
            cluster.env.update(s3.environment(gate.port))
            cluster.start_node(1)  # only this one's way leads through the gate
            self.run_job(cluster, "uneven", gate)
            gate.open()
            job = cluster.wait_job("uneven", timeout_s=60)
            self.assertEqual(job["status"], "SUCCEEDED", cluster.logs("uneven")[-2000:])
            latest = pathlib.Path(directory, "s3", s3.BUCKET, "uneven/latest_checkpointed_iteration.txt")
            self.assertEqual(latest.read_text().strip(), "4")


class KilledAgentTest(unittest.TestCase):
    def test_agents_killed_when_the_ranks_are_asked(self):
        """Both agents die as soon as it is said; their successors ask the ranks again, and send the rest."""
        with tempfile.TemporaryDirectory(prefix="mb-uneven-") as directory, s3.server(directory) as port, \
                Cluster(nodes=2, env=s3.environment(port)) as cluster:
            deadline = time.time() + 45
            cluster.submit(train_command(f"s3://{s3.BUCKET}/killed", 100_000, "--save-interval", "300",
                                         "--log-interval", "50", "--eval-interval", "100000", "--deadline",
                                         f"@{deadline:.3f}"), submission_id="killed")
            agents = [n["pid_agent"] for n in cluster.nodes() if not n["is_head"]]
            wait_until(lambda: "the ranks save and end" in cluster.logs("killed"), "the last save is asked for", 60)
            for pid in agents:
                os.kill(pid, signal.SIGKILL)
            job = cluster.wait_job("killed", timeout_s=60)
            log = cluster.logs("killed")
            self.assertEqual(job["status"], "SUCCEEDED", log[-2000:])
            self.assertIn("ended for its deadline", log)
            saved = re.findall(r"successfully saved checkpoint from iteration +(\d+)", log)
            latest = pathlib.Path(directory, "s3", s3.BUCKET, "killed/latest_checkpointed_iteration.txt")
            self.assertEqual(latest.read_text().strip(), saved[-1])


if __name__ == "__main__":
    unittest.main()
