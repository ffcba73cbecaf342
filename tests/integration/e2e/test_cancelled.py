"""ray#65025: a call that is CANCELLED while its server fails over marks a healthy job FAILED for good."""

import pathlib
import time
import unittest

from cancel_proxy import CancelProxy
from cluster import Cluster, wait_until

# What a driver and its node need the head for, from the first to the last.
ONCE_EACH = {"RegisterNode", "ReportDrivers", "AddJob", "CreatePlacementGroup",
             "WaitPlacementGroupUntilReady", "GetPlacementGroup", "GetAllNodeInfo", "InternalKVPut",
             "RemovePlacementGroup", "MarkJobFinished"}
ALL_S = 3


class Cancelled(unittest.TestCase):
    def test_a_healthy_job_goes_on(self):
        with Cluster(nodes=1) as cluster, CancelProxy(cluster.gcs) as proxy:
            done = cluster.mobula(
                "start", "--address", proxy.address, "--temp-dir", cluster.temp, "--node-name", "far",
                "--dashboard-agent-listen-port", "0", "--resources", '{"shark": 1}')
            self.assertEqual(done.returncode, 0, done.stdout)
            go = pathlib.Path(cluster.dir, "go")
            starts = [pathlib.Path(cluster.dir, f"rank-{r}") for r in (0, 1)]
            rank = (f"echo $$ >> {cluster.dir}/rank-$RANK; until test -e {go}; do sleep 0.05; done; "
                    "echo rank $RANK ends")
            # Node and driver speak to the head through the proxy.
            cluster.submit(f"RAY_ADDRESS={proxy.address} mobula run --num-nodes 2 -- sh -c '{rank}'",
                           submission_id="healthy", entrypoint_resources={"shark": 1})
            wait_until(lambda: all(s.exists() for s in starts), lambda: cluster.logs("healthy"))
            far = cluster.node("far")["node_id"]
            self.assertEqual(cluster.job("healthy")["driver_node_id"], far)
            before = len(proxy.cancelled)
            proxy.all(True)
            began = time.monotonic()

            def had_its_share():
                self.assertEqual(cluster.job("healthy")["status"], "RUNNING")
                return time.monotonic() - began > ALL_S and len(proxy.cancelled) - before > 10

            wait_until(had_its_share, lambda: proxy.cancelled)
            proxy.all(False)
            go.touch()
            job = cluster.wait_job("healthy")
            self.assertEqual(job["status"], "SUCCEEDED", cluster.logs("healthy"))
            log = cluster.logs("healthy")
            for r, file in enumerate(starts):
                self.assertEqual(log.count(f"rank {r} ends\n"), 1, log)
                self.assertEqual(len(file.read_text().split()), 1, "it was started once")
            self.assertLessEqual(ONCE_EACH, set(proxy.cancelled), proxy.cancelled)
            cluster.assert_all_free()
            done = cluster.mobula("stop", "--temp-dir", cluster.temp)  # while the proxy is there
            self.assertEqual(done.returncode, 0, done.stdout)


if __name__ == "__main__":
    unittest.main()
