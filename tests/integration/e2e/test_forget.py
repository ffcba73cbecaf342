"""A job that is deleted leaves nothing on any node: no log, no directory, no record of its gang."""

import os
import pathlib
import time
import unittest

from cluster import Cluster, wait_until
from ray._raylet import GcsClient
from shared_store import Redis, SharedCluster


def look(cluster, job_id):
    found = [str(p) for p in pathlib.Path(cluster.temp).rglob(f"*{job_id}*")]
    for gang in pathlib.Path(cluster.temp).glob("node_*/gangs/*/gang.json"):
        if f'"{job_id}"' in gang.read_text():
            found.append(str(gang.parent))
    return found


def traces(cluster, job_id):
    """Files and directories anywhere in the cluster that are of this job."""
    end = time.monotonic() + 10
    while True:
        try:
            return look(cluster, job_id)
        except FileNotFoundError:  # it went away between two looks at it
            if time.monotonic() > end:
                raise


class Forget(unittest.TestCase):
    def test_ranks_on_all_nodes(self):
        with Cluster(nodes=2) as cluster:
            command = ["mobula", "run", "--num-nodes", "2", "--", "echo", "out"]
            for job_id in ("deleted", "stays"):
                cluster.submit(command, submission_id=job_id)
                self.assertEqual(cluster.wait_job(job_id)["status"], "SUCCEEDED")
            alive = cluster.submit(["mobula", "run", "--num-nodes", "2", "--", "sleep", "600"],
                                   submission_id="lives")
            wait_until(lambda: len([t for t in traces(cluster, alive) if "/gangs/" in t]) == 2,
                       lambda: traces(cluster, alive))  # the last that come, on each node one
            self.assertGreaterEqual(len(traces(cluster, "deleted")), 4)  # two of them gangs
            kept = {job: sorted(traces(cluster, job)) for job in ("stays", "lives")}
            gcs = GcsClient(address=cluster.gcs)
            self.assertIsNotNone(gcs.internal_kv_get(b"gang:deleted", namespace=b"mobula"))
            self.assertEqual(cluster.call("DELETE", "/api/jobs/deleted")[0], 200)
            wait_until(lambda: not traces(cluster, "deleted"), lambda: traces(cluster, "deleted"), 60)
            self.assertIsNone(gcs.internal_kv_get(b"gang:deleted", namespace=b"mobula"))
            self.assertEqual({job: sorted(traces(cluster, job)) for job in kept}, kept)
            for rank in "01":
                self.assertEqual(cluster.get(f"/api/jobs/stays/logs?rank={rank}")["logs"], "out\n")
            for node in cluster.nodes():
                wait_until(lambda: not list(pathlib.Path(node["dir"], "forgotten").glob("*")),
                           "what was moved away is removed", 60)

    def test_a_node_that_does_not_answer_is_told_again(self):
        with Cluster(nodes=2) as cluster:
            cluster.submit(["mobula", "run", "--num-nodes", "2", "--", "true"],
                           submission_id="deleted")
            cluster.wait_job("deleted", ("SUCCEEDED",))
            pid = cluster.node("node-1")["pid_agent"]
            os.kill(pid, 9)  # its successor is there in a moment
            self.assertEqual(cluster.call("DELETE", "/api/jobs/deleted")[0], 200)
            wait_until(lambda: cluster.node("node-1")["pid_agent"] != pid, "a new agent")
            wait_until(lambda: not traces(cluster, "deleted"), lambda: traces(cluster, "deleted"), 60)

    def test_a_driver_of_the_former_head(self):
        with Redis() as redis, SharedCluster(redis) as cluster:
            cluster.submit("echo out", submission_id="deleted")
            cluster.wait_job("deleted", ("SUCCEEDED",))
            with cluster.hung("node-0"):
                cluster.use("node-1")
                wait_until(cluster.answers, "the standby is the head", 10)
            wait_until(lambda: "node-0" in {n["node_name"] for n in cluster.status()["nodes"]
                                            if n["state"] == "ALIVE"}, "the old head is a node", 90)
            self.assertGreaterEqual(len(traces(cluster, "deleted")), 2)
            self.assertEqual(cluster.call("DELETE", "/api/jobs/deleted")[0], 200)
            wait_until(lambda: not traces(cluster, "deleted"), lambda: traces(cluster, "deleted"), 60)


if __name__ == "__main__":
    unittest.main(verbosity=2)
